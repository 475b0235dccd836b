"""The table of attention ops: what every shared test runs over. A new op is one row here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from reformax.ops import (
    asymmetric_lsh,
    block_patterns,
    block_sparse,
    csa,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    hca,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    moba,
    nsa,
    nystromformer,
    performer,
    retention,
    routing,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.base import AttentionOp
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.candidates import Clustered, Coded, Hashed, Pooled
from reformax.ops.indexing.indexer import Indexer
from tests.ops import compressed, indexed, low_rank, native_sparse, recurrences, routed

# No sequence of the shared tests is longer.
LONGEST = 130


EXACT = dense.dense, flash.flash, memory_efficient.memory_efficient, shared_qk.shared_qk


class Shape(NamedTuple):
    """The sizes of a call, in the letters of `reformax.ops.base`."""

    batch: int
    n_queries: int
    n_keys: int
    n_heads: int


class Row(NamedTuple):
    """An op, the options to try it with, and the attention that it is exact for.

    Attributes:
      name: the test's id.
      factory: the public function that makes the op.
      options: the values to try of each option; the first of each makes `op()`.
      counts: `(options, plan, shape, causal, segment_ids) -> [B, N, T, S]`, how many times each
        query
        counts each key: a mask of 0 and 1 unless the op says otherwise. The row is then softmax
        attention, by the oracle.
      reference: in place of counts, `(options, params, plan, qkv, extra_projections, mask, keep) ->
        out`: what the op computes, from its equations, in arrays of JAX. `qkv` and
        `extra_projections` are float64, and its gradient is taken. `mask` `[B, N, T, S]` says which
        keys causality and segments leave visible, `keep` `[B, N, T, K]` is dropout's factor of each
        address, K being at least 2 S. Of the options, `causal` is the call's.
      relative: whether the keys that a query sees depend on their distance alone, so that packed
        segments are attended to as they are one by one.
      padding_counts: whether padding changes real positions, as in a circle of chunks, where whole
        chunks of it stand between the last token and the first.
      n_held: how many positions the cache of decoding holds; None is all.
      holds_keys: whether that cache holds keys; or else it is a state whose size is constant.
      no_step: why the op cannot decode step by step; empty if it can.
      second_order: how many of three second derivatives the op has (`test_second_order.py`); the
        others are refused.
      rounding: how many times the error of softmax attention the op's rounding may have.
      group_chooses: whether the heads of one key head choose together where they look, or read
        projections of their own, so that repeated keys are another function.
      own_loss: whether its weights learn by a loss of their own, over all positions.
      slow: whether its tests are slow, though it is the first row of its factory.
    """

    name: str
    factory: Callable[..., AttentionOp]
    options: dict[str, tuple[Any, ...]]
    counts: Callable[..., np.ndarray] | None = None
    relative: bool = False
    padding_counts: bool = False
    n_held: int | None = None
    holds_keys: bool = True
    no_step: str = ""
    second_order: int = 3
    rounding: float = 1.0
    reference: Callable[..., Any] | None = None
    group_chooses: bool = False
    own_loss: bool = False
    slow: bool = False

    @property
    def first(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.options.items()}

    def op(self, **options) -> AttentionOp:
        return self.factory(**(self.first | options))

    @property
    def in_kernel(self) -> bool:
        return self.first.get("impl") == INTERPRETED

    @property
    def bias(self) -> bool:
        """Whether the calls may have a bias, which no kernel of ours computes."""
        return self.op().bias and not self.in_kernel

    @property
    def exact(self) -> bool:
        """Whether the op attends to every visible key."""
        return isinstance(self.op(), EXACT)

    @property
    def plans_ahead(self) -> bool:
        """Whether no later token decides, in a causal call, what a position sees."""
        sorts = isinstance(self.op(), lsh.lsh | asymmetric_lsh.SortedByHash | routing.routing)
        return not sorts or self.op().causality == "only"

    @property
    def n_pad(self) -> int:
        """Padding behind 11 positions that changes nothing: none of it a chunk of its own."""
        return 5 if self.padding_counts else 7

    @property
    def decodes(self) -> bool:
        """Whether a step is the last row of attention over the tokens, padded in any way.

        Kernels are left out: `test_decoding.py` tries every `impl` of a step.
        """
        return not (self.no_step or self.in_kernel or self.padding_counts)

    def dropout(self, rate: float) -> float:
        """`rate` where the op makes weights that can be dropped."""
        return rate if self.op().dropout else 0.0

    def segment_ids(self, ids):
        """`ids` where the op has `packed`; or else one segment of them all."""
        return ids if self.op().packed else (ids != 0).astype(ids.dtype)

    def causal(self, causal: bool = True) -> bool:
        """`causal` where the op can be either; or else what the op can be."""
        causality = self.op().causality
        return causal if causality == "either" else causality == "only"


def visible(shape: Shape, causal: bool, segment_ids) -> np.ndarray:
    """Which keys a query may see at all, by the meaning of `causal` and of `segment_ids`."""
    mask = np.ones((shape.batch, shape.n_heads, shape.n_queries, shape.n_keys), int)
    if causal:
        mask = np.tril(mask)
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        query, key = (np.asarray(ids)[:, None] for ids in pair)
        mask = mask * ((query[..., None] == key[..., None, :]) & (key != 0)[..., None, :])
    return mask


def except_self(counts: np.ndarray, attend_self_if_alone: bool = True) -> np.ndarray:
    """No position sees itself, unless with `attend_self_if_alone` it sees nothing else."""
    others = counts * ~np.eye(counts.shape[-1], dtype=bool)
    if not attend_self_if_alone:
        return others
    alone = others.sum(axis=-1, keepdims=True) == 0
    return np.where(alone, counts, others)


def in_reach(slot, chunk_len: int, n_chunks_before: int, n_chunks_after: int) -> np.ndarray:
    """Whether key j's chunk lies in reach of query i's, for the place of each position."""
    chunk = np.asarray(slot) // chunk_len
    ahead = chunk[..., None, :] - chunk[..., :, None]
    return (ahead >= -n_chunks_before) & (ahead <= n_chunks_after)


def _everything(options, plan, shape, causal, segment_ids):
    return visible(shape, causal, segment_ids)


def _others(options, plan, shape, causal, segment_ids):
    return except_self(visible(shape, causal, segment_ids), options["attend_self_if_alone"])


def _neighbours(options, plan, shape, causal, segment_ids):
    reach = {name: options[name] for name in _NEIGHBOURHOODS}
    counts = visible(shape, causal, segment_ids) * in_reach(np.arange(shape.n_keys), **reach)
    return except_self(counts) if options.get("shared_qk") else counts


def _window(options, plan, shape, causal, segment_ids):
    query, key = np.ogrid[: shape.n_queries, : shape.n_keys]
    return visible(shape, causal, segment_ids) * (abs(query - key) < options["window"])


def _dilated(options, plan, shape, causal, segment_ids):
    query, key = np.ogrid[: shape.n_queries, : shape.n_keys]
    step = options["dilation"]
    near = (abs(query - key) < options["window"] * step) & ((query - key) % step == 0)
    return visible(shape, causal, segment_ids) * near


def _window_and_first(options, plan, shape, causal, segment_ids):
    query, key = np.ogrid[: shape.n_queries, : shape.n_keys]
    near = np.broadcast_to(abs(query - key) < options["window"], (shape.batch, 1, *shape[1:3]))
    real = (
        np.ones((shape.batch, shape.n_keys))
        if segment_ids is None
        else np.asarray(segment_ids) != 0
    )
    first = real * (np.cumsum(real, axis=1) <= options["n_sinks"])
    return visible(shape, causal, segment_ids) * (near | (first[:, None, None] > 0))


def hashes_that_reach(options, plan, shape: Shape) -> np.ndarray:
    """How many of an LSH plan's hashes bring each key within reach of each query."""
    if plan is None:  # One chunk has every key.
        return np.ones((shape.batch, shape.n_heads, shape.n_queries, shape.n_keys), int)
    slot = np.argsort(np.asarray(plan.query_positions), axis=-1)[..., : shape.n_queries]
    reach = [options[name] for name in ("chunk_len", "n_chunks_before", "n_chunks_after")]
    return in_reach(slot, *reach).sum(axis=2)


def _hashed(options, plan, shape, causal, segment_ids):
    shown = hashes_that_reach(options, plan, shape)
    counts = shown > 0 if options["count_once"] else shown
    return except_self(
        visible(shape, causal, segment_ids) * counts, options.get("attend_self_if_alone", True)
    )


def _clusters(options, plan, shape, causal, segment_ids):
    counts = visible(shape, causal, segment_ids)
    if plan is not None:
        # Across sequences a chunk has room for as many queries more as there are.
        ratio = max(1, round(shape.n_queries / shape.n_keys))
        sides = (
            (plan.query_positions, shape.n_queries, ratio),
            (plan.key_positions, shape.n_keys, 1),
        )
        of_query, of_key = (
            np.argsort(np.asarray(x), axis=-1)[..., :n] // (options["chunk_len"] * more)
            for x, n, more in sides
        )
        ahead = of_key[..., None, :] - of_query[..., None]
        before, after = (options.get(f"n_chunks_{x}", 0) for x in ("before", "after"))
        shown = ((ahead >= -before) & (ahead <= after)).sum(axis=2)
        counts = counts * (shown > 0 if options["count_once"] else shown)
    crosses = shape.n_queries != shape.n_keys or isinstance(segment_ids, tuple)
    if crosses or not options["attend_self_if_alone"]:
        return counts
    alone = counts.sum(axis=-1, keepdims=True) == 0
    return counts + alone * np.eye(shape.n_keys, dtype=int) * visible(shape, causal, segment_ids)


def _same_bucket(options, plan, shape, causal, segment_ids):
    of_query, of_key = (
        np.take_along_axis(np.asarray(x.group), np.argsort(np.asarray(x.position), axis=-1), -1)
        for x in (plan.queries, plan.keys or plan.queries)
    )
    counts = visible(shape, causal, segment_ids) * (of_query[..., None] == of_key[..., None, :])
    if options["shared_qk"]:
        return except_self(counts, options["attend_self_if_alone"])
    alone = counts.sum(axis=-1, keepdims=True) == 0
    itself = alone * np.eye(shape.n_keys, dtype=int) * visible(shape, causal, segment_ids)
    return counts + itself * options["attend_self_if_alone"]


def around(slot, length: int, chunk_len: int, n_chunks_before: int, n_chunks_after: int):
    """How many times key j is in reach of query i where the hashes' chunks are in a circle.

    `slot` `[R, T]` is the slot of each position in the order of each hash, of `length` slots.
    """
    n_hashes, n_positions = slot.shape
    counts = np.zeros((n_positions, n_positions), int)
    if length <= chunk_len:
        return counts + 1
    at = np.full(n_hashes * length, -1)
    for r in range(n_hashes):
        at[r * length + slot[r]] = np.arange(n_positions)
    n_chunks = len(at) // chunk_len
    for r, query in np.ndindex(slot.shape):
        own = (r * length + slot[r, query]) // chunk_len
        for c in range(own - n_chunks_before, own + n_chunks_after + 1):
            start = c % n_chunks * chunk_len
            for key in at[start : start + chunk_len]:
                counts[query, key] += key >= 0
    return counts


def _circle(options, plan, shape, causal, segment_ids):
    sizes = {name: options[name] for name in ("chunk_len", "n_chunks_before", "n_chunks_after")}
    n_keys, whole = shape.n_keys, options["chunk_len"] * options["pad_chunks"]
    length = -(-n_keys // whole) * whole if n_keys > options["chunk_len"] else n_keys
    if plan is None:
        return _hashed(options, plan, shape, causal, segment_ids)
    if not plan:
        slot = np.arange(n_keys)[None]
        return visible(shape, causal, segment_ids) * around(slot, length, **sizes)
    assert plan.key_positions.shape[-1] > length or not sum(list(sizes.values())[1:])
    slot = np.asarray(plan.query_slots)[..., :n_keys]
    counts = [[around(head, length, **sizes) for head in example] for example in slot]
    return except_self(
        visible(shape, causal, segment_ids) * np.array(counts),
        options.get("attend_self_if_alone", True),
    )


def _in_blocks(options, plan, shape, causal, segment_ids):
    """Each pair asks the pattern for the blocks that it lies in."""
    sizes = np.array(options["block_size"]) * [1, 1]
    query, key = np.ogrid[: shape.n_queries, : shape.n_keys]
    query, key = query // sizes[0], key // sizes[1]
    mask = options["pattern"](query.max() + 1, key.max() + 1)
    return visible(shape, causal, segment_ids) * mask[..., query, key]


def _odd_blocks(n_blocks_q, n_blocks_k):
    """No block of queries sees all; the second of every five sees nothing."""
    query, key = np.ogrid[:n_blocks_q, :n_blocks_k]
    return ((query + 2 * key) % 3 != 1) & (query % 5 != 1)


def _bucket_before(options, plan, shape, causal, segment_ids):
    slot, first = (
        np.asarray(x)[..., : shape.n_queries] for x in (plan.query_slots, plan.first_slot)
    )
    key = slot[..., None, :]
    shown = ((key >= first[..., None]) & (key <= slot[..., None])).sum(axis=2)
    counts = shown > 0 if options["count_once"] else shown
    return except_self(visible(shape, causal, segment_ids) * counts)


def _chosen_blocks(options, plan, shape, causal, segment_ids):
    """A query's own block, and those that the plan has for it."""
    query, key = (x // options["block_size"] for x in np.ogrid[: shape.n_queries, : shape.n_keys])
    chosen = (np.asarray(plan)[..., None] == key[0]).any(axis=-2)
    return visible(shape, causal, segment_ids) * (chosen | (query == key))


_CHUNKS = {"query_chunk_size": (4, 5, "sqrt", 1024), "key_chunk_size": (8, 7, 3, "sqrt", 4096)}
_BLOCKS = {"query_block_size": (8, 5, None), "key_block_size": (4, 8, 7, None)}
_NEIGHBOURHOODS = {
    "chunk_len": (8, 1, 5),
    "n_chunks_before": (1, 0, 2),
    "n_chunks_after": (0, 1, 2),
}
_HASHING = {
    "chunk_len": (8, 4, 5),
    "n_hashes": (3, 1, 2),
    "n_buckets": (4, "auto", 2, (4, 2)),
    "n_chunks_before": (1, 0, 2),
    "n_chunks_after": (0, 1),
    "attend_self_if_alone": (True, False),
}
_KERNEL = {"impl": (INTERPRETED,)}
_STRICT = {
    "chunk_len": (4, 1, 5),
    "n_buckets": (2, "auto", (2, 2)),
    "n_chunks_before": (1, 2),
    "strictly_causal": (True,),
    "n_hashes": (3, 1, 2),
}
_WINDOWS = {"window": (6, 1, 9), "chunk_len": (4,), "n_chunks_before": (2,), "n_chunks_after": (2,)}

_PATTERNS = (
    block_patterns.butterfly(),
    block_patterns.strided(stride=3),
    block_patterns.fixed(stride=3),
    block_patterns.local_global(),
    block_patterns.bigbird(n_global=1, n_random=1),
    _odd_blocks,
)
_SPARSE = {"pattern": _PATTERNS, "block_size": (4, (4, 3), (5, 8), 1)}
_SPARSE_KERNEL = {"pattern": _PATTERNS, "block_size": (16, (16, 32))}

_PROJECTED = {
    "n_projected": (6, 1, 20),
    "parameter_sharing": ("headwise", "none", "key-value"),
    "impl": ("xla",),
}
_LANDMARKS = {
    "n_landmarks": (4, 1, 7, 64),
    "n_iterations": (6, 2),
    "conv_size": (None, 3, 5),
    "impl": ("xla",),
}
_FEATURES = {
    "n_features": (16, 1, 7),
    "seed": (0, None, 3),
    "epsilon": (1e-2, 0.1),
    "chunk_len": (8, 1, 5, 64),
}
_LONG_SHORT = {
    "window": (6, 1, 9),
    "rank": (2, 1),
    "chunk_len": (4, 5, 2),
    "dual_norm": (True, False),
}

_CLUSTERS = {
    "chunk_len": (8, 1, 5),
    "n_hashes": (3, 1, 2),
    "count_once": (False, True),
    "attend_self_if_alone": (True, False),
}

_MIXED = {"block_size": (4, 5, 1, 64), "top_k": (2, 3, 1, 50)}
_NATIVE = {
    "compress_len": (4, 8),
    "compress_stride": (2, 4, 1),
    "block_size": (4, 8, 16),
    "n_selected": (3, 1, 4, 50),
    "window": (6, 1, 9),
    "compression": ("mlp", "mean"),
    "independent_kv": (True, False),
    "impl": ("xla",),
}
_INDEXED = {
    "top_k": (5, 2, 1, 200),
    "n_index_heads": (2, 1, 3),
    "d_index": (4, 1, 7),
    "index_loss": (1.0, 0.5),
    "impl": ("xla",),
}
_COMPRESSED = {"learned_sinks": (True, False), "share_kv": (False,), "impl": ("xla",)}
_BEST_SUMMARIES = {
    "block_size": (3, 1, 4),
    "top_k": (2, 1, 50),
    "window": (6, 4, 64),
    "n_index_heads": (2, 1, 3),
    "d_index": (4, 1, 7),
    "index_dtype": ("float32", "bfloat16"),
    "index_loss": (1.0, 0.5),
}
_ALL_SUMMARIES = {"block_size": (4, 1, 6), "window": (6, 9, 64)}
_LOCAL = Indexer(score="product", rotary=True, n_local=3, group=3)
_POOLED = Indexer(candidates=Pooled(block_sizes=(8, 4), n_blocks=2))
_CLUSTERED = Indexer(candidates=Clustered(stride=4, n_clusters=2, n_nearest=3))
_WHOLE_BLOCKS = Indexer(rotary=True, block_size=4)
_CODED = Indexer(candidates=Coded(n_bits=16, n_best=8))
_HASHED = Indexer(score="product", candidates=Hashed(n_hashes=3, n_buckets=4, n_nearest=4))
_HASHED_RELU = Indexer(n_local=2, candidates=Hashed(n_hashes=2, n_nearest=3, centre=False))
_INDEXERS = {
    "dsa_local": {"top_k": (6, 200), "indexer": (_LOCAL, Indexer(rotary=True, dtype="bfloat16"))},
    "dsa_pooled": {"top_k": (5, 200), "indexer": (_POOLED,)},
    "dsa_clustered": {"top_k": (5, 200), "indexer": (_CLUSTERED,)},
    "dsa_blocks": {"top_k": (9, 4, 200), "indexer": (_WHOLE_BLOCKS,)},
    "dsa_coded": {"top_k": (5, 200), "indexer": (_CODED,)},
    "dsa_hashed": {"top_k": (5, 200), "indexer": (_HASHED, _HASHED_RELU)},
}
_ROUTED = {
    "n_clusters": (3, 1, 2, 40),
    "cluster_size": (None, 4, 1, 200),
    "decay": (0.9, 0.0),
    "attend_self_if_alone": (True, False),
}
# As each query is a program, which the interpreter runs one after the other.
_FEW_BLOCKS = {"compress_len": (8,), "block_size": (8, 16), "n_selected": (3, 1)}
_SEPARATE = {
    "chunk_len": (4, 1, 5),
    "n_hashes": (3, 1, 2),
    "n_buckets": (4, "auto", (4, 2)),
    "n_chunks_before": (1, 0, 2),
    "n_chunks_after": (0, 1),
    "count_once": (True, False),
    "attend_self_if_alone": (True, False),
}

_BUCKETS = {
    "n_buckets": (4, 2, 16),
    "attend_self_if_alone": (True, False),
    "shared_qk": (False, True),
}

_CIRCLE = {"wrap": (True,), "pad_chunks": (1, 3)}

_CHUNKS_OF_STATES = {"chunk_len": (4, 1, 7, 64)}
_RECURRENT = dict(holds_keys=False, relative=True, second_order=1)

ROWS = [
    Row("dense", dense.dense, {"impl": ("xla", "auto")}, _everything),
    Row(
        "memory_efficient",
        memory_efficient.memory_efficient,
        _CHUNKS,
        _everything,
        second_order=1,
    ),
    Row("flash", flash.flash, _BLOCKS, _everything, second_order=1),
    Row("flash_pallas", flash.flash, _KERNEL, _everything),
    Row(
        "shared_qk",
        shared_qk.shared_qk,
        {"attend_self_if_alone": (True, False), "impl": ("xla", "auto")},
        _others,
    ),
    Row(
        "shared_qk_pallas",
        shared_qk.shared_qk,
        {"attend_self_if_alone": (True, False)} | _KERNEL,
        _others,
    ),
    Row("block_sparse", block_sparse.block_sparse, _SPARSE, _in_blocks, second_order=1),
    Row(
        "block_sparse_pallas",
        block_sparse.block_sparse,
        _SPARSE_KERNEL | _KERNEL,
        _in_blocks,
    ),
    Row("local", local.local, _NEIGHBOURHOODS, _neighbours, n_held=16),
    Row(
        "local_shared",
        local.local,
        _NEIGHBOURHOODS | {"shared_qk": (True,)},
        _neighbours,
        n_held=16,
    ),
    Row("local_window", local.local, _WINDOWS, _window, relative=True, n_held=6),
    Row(
        "local_circle",
        local.local,
        _NEIGHBOURHOODS | _CIRCLE,
        _circle,
        padding_counts=True,
        no_step="circle",
    ),
    Row("lsh", lsh.lsh, _HASHING | {"count_once": (True,)}, _hashed),
    Row("lsh_count_each", lsh.lsh, _HASHING | {"count_once": (False,)}, _hashed),
    Row(
        "local_pallas",
        local.local,
        _NEIGHBOURHOODS | {"shared_qk": (False, True)} | _KERNEL,
        _neighbours,
    ),
    Row("local_window_pallas", local.local, _WINDOWS | _KERNEL, _window, relative=True),
    Row("lsh_pallas", lsh.lsh, _HASHING | {"count_once": (True, False)} | _KERNEL, _hashed),
    Row("lsh_strict", lsh.lsh, _STRICT | {"count_once": (True,)}, _bucket_before),
    Row("lsh_strict_count_each", lsh.lsh, _STRICT | {"count_once": (False,)}, _bucket_before),
    Row(
        "lsh_circle",
        lsh.lsh,
        _HASHING | _CIRCLE | {"count_once": (False,)},
        _circle,
        padding_counts=True,
    ),
    Row("smyrf", smyrf.smyrf, _CLUSTERS, _clusters),
    Row(
        "asymmetric_lsh",
        asymmetric_lsh.asymmetric_lsh,
        _SEPARATE,
        _clusters,
        slow=True,
    ),
    Row(
        "asymmetric_lsh_pallas",
        asymmetric_lsh.asymmetric_lsh,
        _SEPARATE | _KERNEL,
        _clusters,
    ),
    Row("smyrf_pallas", smyrf.smyrf, _CLUSTERS | _KERNEL, _clusters),
    Row(
        "hash_sparse",
        hash_sparse.hash_sparse,
        _BUCKETS | {"impl": ("xla",)},
        _same_bucket,
        second_order=1,
        slow=True,
    ),
    Row("hash_sparse_pallas", hash_sparse.hash_sparse, _BUCKETS | _KERNEL, _same_bucket),
    Row(
        "linformer",
        linformer.linformer,
        _PROJECTED,
        reference=low_rank.linformer,
        no_step="mixes the future in",
        second_order=1,
        # A mixture of n keys is sqrt(n / k) times as long as a key, and so are those of values.
        rounding=LONGEST / min(_PROJECTED["n_projected"]),
    ),
    Row(
        "nystromformer",
        nystromformer.nystromformer,
        _LANDMARKS,
        reference=low_rank.nystromformer,
        no_step="mixes the future in",
        second_order=1,
        rounding=30,
        slow=True,
    ),
    Row(
        "long_short",
        long_short.long_short,
        _LONG_SHORT,
        n_held=6,
        reference=low_rank.long_short,
        slow=True,
    ),
    Row(
        "long_short_pallas",
        long_short.long_short,
        _LONG_SHORT | _KERNEL,
        reference=low_rank.long_short,
    ),
    Row(
        "longformer",
        longformer.longformer,
        {"window": (6, 1, 9), "dilation": (1, 2, 3)},
        _dilated,
        relative=True,
        n_held=6,
    ),
    Row(
        "longformer_pallas",
        longformer.longformer,
        {"window": (6, 1, 9), "dilation": (3, 1, 2)} | _KERNEL,
        _dilated,
        relative=True,
    ),
    Row(
        "sinks",
        sinks.sinks,
        {"window": (6, 1, 9), "n_sinks": (2, 0, 1, 40)},
        _window_and_first,
        n_held=6,
        slow=True,
    ),
    Row(
        "sinks_pallas",
        sinks.sinks,
        {"window": (6, 1, 9), "n_sinks": (2, 0, 1, 40)} | _KERNEL,
        _window_and_first,
    ),
    Row(
        "performer",
        performer.performer,
        _FEATURES,
        reference=low_rank.performer,
        holds_keys=False,
        second_order=1,
        rounding=30,
        slow=True,
    ),
    Row("moba", moba.moba, _MIXED, _chosen_blocks),
    Row("moba_pallas", moba.moba, _MIXED | _KERNEL, _chosen_blocks),
    Row(
        "nsa",
        nsa.nsa,
        _NATIVE,
        reference=native_sparse.nsa,
        group_chooses=True,
        slow=True,
    ),
    Row(
        "dsa",
        dsa.dsa,
        _INDEXED,
        reference=indexed.dsa,
        own_loss=True,
        slow=True,
    ),
    Row("dsa_pallas", dsa.dsa, _INDEXED | _KERNEL, reference=indexed.dsa, own_loss=True),
    *(
        Row(name, dsa.dsa, _INDEXED | options, reference=indexed.dsa, own_loss=True)
        for name, options in _INDEXERS.items()
    ),
    Row(
        "hca",
        hca.hca,
        _ALL_SUMMARIES | _COMPRESSED,
        n_held=6,
        reference=compressed.hca,
        rounding=10,  # a norm of few features divides by what may be near 0
        group_chooses=True,
        slow=True,
    ),
    Row(
        "hca_pallas",
        hca.hca,
        _ALL_SUMMARIES | _COMPRESSED | _KERNEL,
        reference=compressed.hca,
        rounding=10,
        group_chooses=True,
    ),
    Row(
        "csa",
        csa.csa,
        _BEST_SUMMARIES | _COMPRESSED,
        n_held=6,
        reference=compressed.csa,
        rounding=10,
        group_chooses=True,
        own_loss=True,
        slow=True,
    ),
    Row(
        "csa_pallas",
        csa.csa,
        _BEST_SUMMARIES | _COMPRESSED | _KERNEL | {"top_k": (2, 50)},
        reference=compressed.csa,
        rounding=10,
        group_chooses=True,
        own_loss=True,
    ),
    *(
        Row(
            f"routing{'_shared' * shared}",
            routing.routing,
            _ROUTED | {"shared_qk": (shared,)},
            reference=routed.routing,
            slow=True,
        )
        for shared in (False, True)
    ),
    Row(
        "routing_pallas",
        routing.routing,
        _ROUTED | {"shared_qk": (False, True)} | _KERNEL,
        reference=routed.routing,
    ),
    Row(
        "nsa_pallas",
        nsa.nsa,
        _NATIVE | _KERNEL | _FEW_BLOCKS,
        reference=native_sparse.nsa,
        group_chooses=True,
    ),
    Row("linear", linear.linear, _CHUNKS_OF_STATES, reference=recurrences.linear, **_RECURRENT),
    Row("linear_pallas", linear.linear, _KERNEL, reference=recurrences.linear, **_RECURRENT),
    *(
        Row(
            name,
            factory,
            _CHUNKS_OF_STATES | {"normalized": (False,), "gated": (False,)} | options,
            reference=getattr(recurrences, factory.__name__),
            rounding=rounding,
            slow=True,
            **_RECURRENT,
        )
        for name, factory, options, rounding in (
            ("retention", retention.retention, {}, 1),
            ("retention_convolved", retention.retention, {"chunk_len": (4,), "conv_size": (4,)}, 3),
            ("gated_linear", gated_linear.gated_linear, {}, 1),
            # It solves a system in each chunk.
            ("gated_delta", gated_delta.gated_delta, {}, 3),
            ("gated_delta_negative", gated_delta.gated_delta, {"negative_eigenvalues": (True,)}, 3),
            ("kda", kda.kda, {}, 3),
        )
    ),
]


# One row of each kind: exact attention, hashes, a recurrence, windows with global tokens, and a
# projection of the positions.
KINDS = ("flash", "lsh", "linear", "longformer", "linformer")


def over(rows, quick: Callable[[Row], bool] = lambda row: True):
    """Runs a test over rows, each with its name as the test's id.

    All but the first row of each factory are slow: variants and interpreted kernels. So is a row
    that says it, and one that is not `quick` in this test.
    """
    seen: set[Callable[..., AttentionOp]] = set()
    params = []
    for row in rows:
        slow = row.slow or row.in_kernel or row.factory in seen or not quick(row)
        seen.add(row.factory)
        marks = [pytest.mark.slow] if slow else []
        params.append(pytest.param(row, id=row.name, marks=marks))
    return pytest.mark.parametrize("row", params)


def one_of_each_kind(row: Row) -> bool:
    """Quick in a test of what is around the op, or of what another test says of every op."""
    return row.name in KINDS


def the_others(row: Row) -> bool:
    """Quick where a test much like it has one of each kind."""
    return row.name not in KINDS

"""Native sparse attention: summaries of all blocks, the best blocks themselves, and a window.

Yuan et al. 2025 ("Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
Attention"). A query attends three times, and gates add up what it found (eq. 5):

    out_t = g_cmp Attn(q_t, K_cmp, V_cmp) + g_slc Attn(q_t, K_slc, V_slc) + g_win Attn(q_t, ...)

Of the compressed branch, a key is a summary of `compress_len` positions, one every
`compress_stride` of them (eq. 7). Its weights say which blocks matter: a block has the weights of
the summaries that overlap it, once for each stride that they share (eq. 9), summed over the query
heads of one key head, which therefore read the same keys (eq. 10). The selected branch attends to
the positions of the best blocks (eq. 11-12), the third to a sliding window (sec. 3.3.3).

Time is T^2 / compress_stride for the summaries and T (n_selected block_size + window) besides;
memory is linear in T.

Letters besides those of `reformax.ops.base`: C summaries, J blocks of L positions, K blocks that a
query selects, M query heads of a key head, Q queries of a chunk, P positions of a summary.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.declared import Called, SettingError, Size, Width, check
from reformax.ops import local
from reformax.ops.base import AttentionOp, Traits, named
from reformax.ops.calls.dims import Dims, ExtraProjection
from reformax.ops.calls.dispatch import KERNELS, check_impl, choose_impl, kernel_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    add_to_ring,
    attend_to,
    fill_ring,
    positions_by_slot,
)
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only
from reformax.ops.numerics.precision import accum_dtype, product
from reformax.ops.numerics.query_chunks import by_chunks, in_blocks, join_chunks, positions
from reformax.ops.softmax.chosen_blocks import FIRST_BLOCK, OWN_BLOCK, PREVIOUS_BLOCK
from reformax.ops.softmax.dropout import dropout_mask, seed_words
from reformax.ops.softmax.gathered import gather_rows
from reformax.ops.softmax.online import masked_softmax

# What the tiles of the kernels hold.
KERNELS_HOLD = {"heads_of_a_key_head": 128, "summaries_of_a_block": 64, "blocks": 2**15}


class NsaSettings(NamedTuple):
    """The hyperparameters of `nsa`, whose arguments they are."""

    compress_len: int
    compress_stride: int
    block_size: int
    n_selected: int
    window: int
    compression: str
    own_projections: bool
    impl: str

    def check(self) -> None:
        """Raises `SettingError` for options that do not fit together."""
        check_impl(self.impl, *KERNELS)
        names = "mlp", "mean"
        if self.compression not in names:
            raise SettingError(
                f"compression is {self.compression!r}: expected {' or '.join(map(repr, names))}"
            )
        if self.compression == "mlp":
            check("compress_len", self.compress_len, Width)
        for name in ("compress_len", "block_size"):
            if getattr(self, name) % self.compress_stride:
                raise SettingError(
                    f"{name} is {getattr(self, name)}: expected a multiple of compress_stride, "
                    f"{self.compress_stride}"
                )

    def choose(self, q: Array, k: Array, v: Array | None) -> str:
        """The implementation of summaries and of selected blocks."""
        shape = {
            "heads_of_a_key_head": q.shape[2] // k.shape[2],
            "summaries_of_a_block": self.block_size // self.compress_stride,
            "blocks": -(-q.shape[1] // self.block_size),
        }
        above = {name: n for name, n in shape.items() if n > KERNELS_HOLD[name]}
        return choose_impl(self.impl, **kernel_obstacles(q, k, v, **above))

    def within(self, length: int) -> NsaSettings:
        """The settings that show the same of so many positions."""
        stride = self.compress_stride
        block_size = min(self.block_size, -(-length // stride) * stride)
        span = self.compress_len
        if self.compression == "mean":  # or weights have its length
            span = min(span, (length // stride + 1) * stride)  # of which none is complete either
        return self._replace(compress_len=span, block_size=block_size)

    @property
    def near(self) -> AttentionOp:
        """The attention of the window."""
        return local.local(
            chunk_len=self.window, n_chunks_before=1, window=self.window, impl=self.impl
        )

    def n_summaries(self, length: int) -> int:
        """C: those that are complete within `length`; at least one, which nothing sees."""
        return max(1, (length - self.compress_len) // self.compress_stride + 1)

    def last(self, n_summaries: int) -> Int[Array, "1 C"]:
        """The last position of each summary."""
        number = jnp.arange(n_summaries, dtype=jnp.int32)[None]
        return number * self.compress_stride + (self.compress_len - 1)


@named
def nsa(
    *,
    compress_len: Size = 32,
    compress_stride: Width = 16,
    block_size: Size = 64,
    n_selected: Size = 16,
    window: Size = 512,
    compression: Annotated[str, Called("'mlp' or 'mean'")] = "mlp",
    own_projections: bool = True,
    impl: str = "auto",
) -> AttentionOp:
    """Causal attention to summaries, to the best blocks and to a window, added up by gates.

    Summaries and blocks are cut by the place in the row. In packed rows a summary of positions of
    several segments is seen by none. A query's blocks are among those from the first token of its
    segment on; its own, that first one and the one before its own are always selected (sec. 4.1).
    With as many as there are, the selected branch is dense attention.

    Weights, for all heads and with `compression="mlp"` alone: of keys and of values, `positions
    [P, H]`, `hidden [P, H, H]` and `out [H, H]`. Further projections: `gate [N, 3]`, of the
    compressed, the selected and the window's branch, through a sigmoid; with `own_projections`
    also `selected_k`, `selected_v`, `window_k` and `window_v`, of the heads of keys.

    Args:
      compress_len: P, l of the paper: positions of a summary; 32 in sec. 4.1.
      compress_stride: d: positions from one to the next; 16.
      block_size: L, l': positions of a block; 64.
      n_selected: K, n: blocks that a query selects; 16, those that it always selects among them.
      window: w: a position sees those less than `window` positions before it; 512.
      compression: what makes a summary. `"mlp"` adds to the mean a hidden layer over all numbers
        of the positions, to which learnt ones are added by place in the block, as in sec. 3.3.1;
        the mean lets blocks be found from the first step on. `"mean"` is that alone.
      own_projections: whether the selected branch and the window have keys and values of their
        own, as in sec. 3.3.3; or else all branches read the same.
      impl: `"xla"` runs everywhere. `"pallas"` has kernels for NVIDIA GPUs of Ampere or later and
        heads of 128 or less; `"pallas_interpret"` runs them anywhere, slowly, for tests. `"auto"`
        takes them where they compute the same function, and for the window what `local.local`
        takes.

    Raises:
      ValueError: a size out of range, or no multiple of `compress_stride`; an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """
    settings = NsaSettings(**locals())
    settings.check()
    return AttentionOp(
        init=functools.partial(_init, settings),
        plan=functools.partial(_plan, settings),
        apply=functools.partial(_apply, settings),
        traits=Traits(bidirectional=False, grouped=True, head_shards=True, choose_together=True),
        init_cache=functools.partial(_init_cache, settings),
        step=functools.partial(_step, settings),
        extra_projections=functools.partial(_extras, settings),
    )


def _extras(settings: NsaSettings, dims: Dims) -> dict[str, ExtraProjection]:
    gate = {"gate": ExtraProjection(dims.n_heads, 3)}
    if not settings.own_projections:
        return gate
    keys = ExtraProjection(dims.key_heads, dims.d_qk, rotated=True)
    values = ExtraProjection(dims.key_heads, dims.d_v)
    return gate | {
        f"{branch}_{name}": what
        for branch in ("selected", "window")
        for name, what in (("k", keys), ("v", values))
    }


def _init(settings: NsaSettings, rng: PRNGKeyArray, dims: Dims) -> Any:
    if settings.compression == "mean":
        return ()
    n_places = settings.compress_len

    def of(rng, size):
        places, hidden, out = jax.random.split(rng, 3)
        return {
            "positions": 0.02 * jax.random.normal(places, (n_places, size)),
            "hidden": jax.random.normal(hidden, (n_places, size, size))
            / math.sqrt(n_places * size),
            "out": 0.1 * jax.random.normal(out, (size, size)) / math.sqrt(size),
        }

    rng_k, rng_v = jax.random.split(rng)
    return {"k": of(rng_k, dims.d_qk), "v": of(rng_v, dims.d_v)}


# Summaries


class Summaries(NamedTuple):
    """The compressed keys and values."""

    keys: Float[Array, "B C G H"]
    values: Float[Array, "B C G V"]
    ids: Int[Array, "B C"]  # the segment of all of its positions; 0 where there is none

    def seen(self, last: Int[Array, "1 C"], ids, position) -> Bool[Array, "B Q C"]:
        """Which of them, of `last` positions, queries of segments `ids [B, Q]` see."""
        mask = (last[None] <= position[..., None]) & (ids[..., None] == self.ids[:, None])
        return mask & (ids != 0)[..., None]


def _summary(params, x: Float[Array, "B C P G H"]) -> Float[Array, "B C G H"]:
    """Eq. 7's phi of each block: its mean, and what a hidden layer adds to it."""
    dtype = x.dtype
    y = x.astype(accum_dtype(dtype))
    out = y.mean(axis=2)
    if params is not None:
        positions = params["positions"].astype(y.dtype)[None, None, :, None]
        hidden = product("bcpgh,phf->bcgf", y + positions, params["hidden"], dtype)
        out = out + product(
            "bcgf,fh->bcgh", jax.nn.gelu(hidden, approximate=False), params["out"], dtype
        )
    return out.astype(dtype)


def _in_summaries(settings: NsaSettings, x: Array) -> Array:
    """The positions of each summary, of `[B, T, ...]`: `[B, C, P, ...]`."""
    n, stride = settings.n_summaries(x.shape[1]), settings.compress_stride
    per = settings.compress_len // stride
    length = (n + per - 1) * stride
    x = x[:, :length]
    x = jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    strides = x.reshape(x.shape[0], -1, stride, *x.shape[2:])
    return jnp.concatenate([strides[:, i : i + n] for i in range(per)], axis=2)


def _summaries(settings: NsaSettings, params, k, v, ids: Int[Array, "#B T"]) -> Summaries:
    """The summaries of a row."""
    keys, values = (
        _summary(params[name] if params else None, _in_summaries(settings, x))
        for name, x in (("k", k), ("v", v))
    )
    ids = _in_summaries(settings, jnp.broadcast_to(ids, k.shape[:2]))
    ids = jnp.where((ids == ids[:, :, :1]).all(axis=2), ids[:, :, 0], 0)
    return Summaries(keys, values, ids)


# Which blocks are selected


def _block_scores(
    settings: NsaSettings, weights: Float[Array, "*d C"], n_blocks: int
) -> Float[Array, "*d J"]:
    """What each block is worth by the weights of summaries (eq. 9)."""
    stride = settings.compress_stride
    per_summary, per_block = settings.compress_len // stride, settings.block_size // stride
    none = [(0, 0)] * (weights.ndim - 1)
    # A stride is worth what the summaries are that it is in.
    n_strides = max(n_blocks * per_block, weights.shape[-1])
    at_strides = 0
    for i in range(per_summary):
        behind = max(n_strides - weights.shape[-1] - i, 0)
        at_strides += jnp.pad(weights, [*none, (i, behind)])[..., :n_strides]
    at_strides = at_strides[..., : n_blocks * per_block]
    return at_strides.reshape(*weights.shape[:-1], n_blocks, per_block).sum(axis=-1)


def _best(
    settings: NsaSettings,
    scores: Float[Array, "*d J"],
    own: Int[Array, "*#d"],
    first: Int[Array, "*#d"],
) -> Int[Array, "*d K"]:
    """The blocks of the highest scores from `first` to a query's own, which leads; -1 is none."""
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    block = block.reshape(*[1] * (scores.ndim - 1), -1)
    own, first = own[..., None], first[..., None]
    scores = jnp.where(block == own - 1, PREVIOUS_BLOCK, scores)
    scores = jnp.where(block == first, FIRST_BLOCK, scores)
    scores = jnp.where(block == own, OWN_BLOCK, scores)
    scores = jnp.where((block >= first) & (block <= own), scores, -1)
    best, chosen = lax.top_k(scores, min(settings.n_selected, scores.shape[-1]))
    return jnp.where(best >= 0, chosen, -1).astype(jnp.int32)


def _first_of_segment(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The first position of each position's segment."""
    order = jnp.argsort(ids, axis=1, stable=True).astype(jnp.int32)
    in_order = jnp.take_along_axis(ids, order, axis=1)
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    new = jnp.pad(in_order[:, 1:] != in_order[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = jnp.take_along_axis(order, lax.cummax(jnp.where(new, place, 0), axis=1), axis=1)
    return jnp.zeros_like(order).at[jnp.arange(len(ids))[:, None], order].set(first)


def _plan(
    settings: NsaSettings, params, q, k, *, segment_ids, causal, rng, train, length=None
) -> Int[Array, "B G T K"]:
    """The blocks that each query selects, its own first."""
    del causal, rng, train, length
    q, k, params = lax.stop_gradient((q, k, params))
    length = q.shape[1]
    settings = settings.within(length)
    ids = ids_or_ones(segment_ids, q)
    q, k = tokens_only(q, ids), tokens_only(k, ids)
    own = params["k"] if params else None
    # Values have no say.
    far = _summaries(settings, {"k": own, "v": own} if params else params, k, k[..., :1, :], ids)
    first = jnp.zeros_like(ids) if segment_ids is None else _first_of_segment(ids)
    impl = settings.choose(q, k, None)
    if impl == "xla":
        return _select_in_arrays(settings, q, far, ids, first)
    from reformax.ops.kernels.triton import selection

    masks = () if segment_ids is None else (ids, far.ids, first // settings.block_size)
    n_best, group = (
        min(settings.n_selected, -(-length // settings.block_size)),
        q.shape[2] // k.shape[2],
    )
    sizes = settings.block_size, settings.compress_stride, settings.compress_len
    sizes = selection.SelectionSizes(n_best, *sizes, group)
    return selection.select(sizes, impl == "pallas_interpret", q, far.keys, *masks)


def _select_in_arrays(
    settings: NsaSettings, q, far: Summaries, ids: Int[Array, "B T"], first: Int[Array, "B T"]
) -> Int[Array, "B G T K"]:
    """`_plan` in array operations, some queries after the other."""
    n_batch, length = ids.shape
    n_kv, n_blocks = far.keys.shape[2], -(-length // settings.block_size)
    last = settings.last(far.keys.shape[1])

    def select(q, ids, position, first):  # [B, Q, G, M, H], [B, Q], [1, Q], [B, Q]
        mask = far.seen(last, ids, position)
        logits = _logits("bqgmh,bcgh->bgmqc", q, far.keys)
        weights = masked_softmax(logits, mask[:, None, None]).sum(axis=2)
        scores = _block_scores(settings, weights, n_blocks)
        block = (x // settings.block_size for x in (position, first))
        return _best(settings, scores, *(x[:, None] for x in block))

    n_seen = far.keys.shape[1] * q.shape[2]
    q = q.reshape(n_batch, length, n_kv, -1, q.shape[3])
    chosen = by_chunks(select, n_seen, q, ids, positions(length), first)
    return jnp.moveaxis(chosen, 0, 2).reshape(n_batch, n_kv, -1, chosen.shape[-1])[:, :, :length]


def _logits(axes: str, queries: Array, keys: Array) -> Array:
    """Products of queries and keys, divided by sqrt(H)."""
    return product(axes, queries, keys, queries.dtype) / math.sqrt(queries.shape[-1])


# Attention


def _apply(
    settings: NsaSettings,
    params,
    q,
    k,
    v,
    *,
    plan,
    segment_ids,
    causal,
    dropout,
    rng,
    extra_projections,
) -> Float[Array, "B T N V"]:
    del causal
    settings = settings.within(q.shape[1])
    ids = ids_or_ones(segment_ids, q)
    far = _summaries(settings, params, k, v, ids)
    (selected_k, selected_v), (near_k, near_v) = _own(settings, k, v, extra_projections)
    more = dict(causal=True, segment_ids=segment_ids, dropout=dropout, rng=rng)
    near = settings.near.apply((), q, near_k, near_v, plan=(), **more)
    selected = q, selected_k, selected_v
    impl = settings.choose(q, k, v)
    if impl == "xla":
        seed = seed_words(rng, len(q)) if dropout > 0.0 else None
        others = _in_arrays(settings, far, *selected, plan, ids, dropout, seed)
    else:
        has_ids = segment_ids is not None
        masks = plan, ids if has_ids else None, dropout, rng
        others = _in_kernels(settings, impl == "pallas_interpret", far, *selected, *masks)
    return _gated((*others, near), extra_projections["gate"]).astype(v.dtype)


def _own(settings: NsaSettings, k, v, extra_projections) -> tuple[KeyValues, KeyValues]:
    """Keys and values of the selected branch and of the window."""
    if not settings.own_projections:
        return KeyValues(k, v), KeyValues(k, v)
    return tuple(
        KeyValues(extra_projections[f"{branch}_k"], extra_projections[f"{branch}_v"])
        for branch in ("selected", "window")
    )


def _gated(branches, gate: Float[Array, "B T N 3"]) -> Float[Array, "B T N V"]:
    """The branches' outputs, each times its gate (eq. 5)."""
    dtype = accum_dtype(*(x.dtype for x in branches))
    gates = jax.nn.sigmoid(gate.astype(dtype))
    return sum(x.astype(dtype) * gates[..., i, None] for i, x in enumerate(branches))


def _in_arrays(
    settings: NsaSettings, far: Summaries, q, k, v, plan, ids, dropout: float, seed
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
    """The compressed and the selected branch in array operations, some queries after the other."""
    n_batch, length, n_heads, _ = q.shape
    n_kv, size = k.shape[2], settings.block_size
    of_keys = k, v, ids[:, :, None]
    of_keys = [jnp.moveaxis(in_blocks(x, size), 3, 1) for x in of_keys]  # [B, G or 1, J, L, ...]
    head = jnp.arange(n_heads, dtype=jnp.int32).reshape(1, n_kv, -1, 1, 1)
    batch = jnp.arange(n_batch, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
    last = settings.last(far.keys.shape[1])

    def dropped(query, key):
        if seed is None:
            return None
        return dropout_mask(seed, dropout, batch, head, query, key)

    @jax.checkpoint  # the gradient computes the logits again instead of keeping them
    def attend(q, ids, position, chosen):  # [B, Q, G, M, H], [B, Q], [1, Q], [B, Q, G, K]
        query = position[:, None, None, :, None]
        mask = far.seen(last, ids, position)
        compressed = _softmax(
            _logits("bqgmh,bcgh->bgmqc", q, far.keys),
            ("bgmqc,bcgv->bqgmv", far.values),
            mask[:, None, None],
            dropped(query, last[None, None, None]),
        )
        chosen = jnp.swapaxes(chosen, 1, 2)  # [B, G, Q, K]
        at = jnp.maximum(chosen, 0)
        keys, values, of_key = (_blocks_at(x, at) for x in of_keys)  # [B, G, Q, K L, ...]
        place = chosen[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, None, None]
        place = place.reshape(*place.shape[:3], -1)
        mask = (place >= 0) & (place <= position[:, None, :, None])
        mask = mask & (of_key == ids[:, None, :, None]) & (of_key != 0)
        selected = _softmax(
            _logits("bqgmh,bgqkh->bgmqk", q, keys),
            ("bgmqk,bgqkv->bqgmv", values),
            mask[:, :, None],
            dropped(query, place[:, :, None]),
        )
        return compressed, selected

    n_keys = min(settings.n_selected * size, length + size)
    n_seen = n_heads * (far.keys.shape[1] + n_keys) + n_kv * n_keys * (k.shape[3] + v.shape[3])
    heads = q.reshape(n_batch, length, n_kv, -1, q.shape[3])
    arrays = heads, ids, positions(length), jnp.swapaxes(plan, 1, 2)
    branches = by_chunks(attend, n_seen, *arrays)
    return tuple(join_chunks(x, length).reshape(*q.shape[:3], v.shape[3]) for x in branches)


def _in_kernels(
    settings: NsaSettings, interpret: bool, far: Summaries, q, k, v, plan, ids, dropout: float, rng
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
    """The same by kernels."""
    from reformax.ops.kernels.triton import nsa as kernel

    group, size = q.shape[2] // k.shape[2], min(settings.block_size, q.shape[1])
    rng = rng if dropout > 0.0 else None
    stride, span = settings.compress_stride, settings.compress_len
    rows = kernel.n_rows(q)
    sizes = kernel.NsaSizes(group, 0, 0, stride, span, dropout, rows)
    far_ids = None if ids is None else far.ids
    compressed = kernel.attend(sizes, interpret, q, far.keys, far.values, ids, far_ids, None, rng)
    sizes = kernel.NsaSizes(group, size, plan.shape[3], 1, 1, dropout, rows)
    selected = kernel.attend(sizes, interpret, q, k, v, ids, ids, plan, rng)
    return compressed, selected


def _softmax(logits, to_values, mask, dropped) -> Array:
    """Softmax attention over a mask, with given logits."""
    axes, values = to_values
    weights = masked_softmax(logits, mask)
    if dropped is not None:
        weights = weights * dropped.astype(weights.dtype)
    return product(axes, weights, values, values.dtype)


def _blocks_at(x: Array, at: Int[Array, "B G Q K"]) -> Array:
    """Blocks of `[B, G or 1, J, L, ...]`, one after the other: `[B, G, Q, K L, ...]`."""
    x = gather_rows(x, at)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


# Decoding


class NsaCache(NamedTuple):
    """All positions, the last ones that a window or a summary needs, and the summaries so far."""

    selected: KeyValues
    near: KeyValues
    newest: KeyValues
    far: KeyValues


def _init_cache(
    settings: NsaSettings, params, q, k, v, *, plan, lengths, capacity, rng, extra_projections
) -> NsaCache:
    del q, plan, rng
    settings = settings.within(capacity)
    selected, near = _own(settings, k, v, extra_projections)
    real = (jnp.arange(k.shape[1])[None] < jnp.asarray(lengths)[:, None]).astype(jnp.int32)
    found = _summaries(settings, params, tokens_only(k, real), tokens_only(v, real), real)
    n = settings.n_summaries(capacity)

    def room(x):
        x = jnp.swapaxes(x, 1, 2)[:, :, :n]
        return jnp.pad(x, ((0, 0), (0, 0), (0, n - x.shape[2]), (0, 0)))

    return NsaCache(
        fill_ring(*selected, lengths, capacity),
        fill_ring(*near, lengths, min(settings.window, capacity)),
        fill_ring(k, v, lengths, min(settings.compress_len, capacity)),
        KeyValues(room(found.keys), room(found.values)),
    )


def _step(settings: NsaSettings, params, q, k, v, cache: NsaCache, *, position, extra_projections):
    settings = settings.within(cache.selected.keys.shape[2])
    new_selected, new_near = _own(settings, k, v, extra_projections)
    memory = add_to_ring(cache.selected, *new_selected, position)
    near = add_to_ring(cache.near, *new_near, position)
    newest = add_to_ring(cache.newest, k, v, position)
    far = _with_newest(settings, params, cache.far, newest, position)
    last = settings.last(far.keys.shape[2])
    seen = (last <= position[:, None])[:, None]
    held = positions_by_slot(position, near.keys.shape[2])
    window = (held >= jnp.maximum(position[:, None] - settings.window + 1, 0))[:, None]
    place = _places_now(settings, q, far.keys, seen, position, memory.keys.shape[2])
    mask = (place >= 0) & (place <= position[:, None, None])
    index = jnp.clip(place, 0, memory.keys.shape[2] - 1)[..., None]
    chosen = (jnp.take_along_axis(x, index, axis=2) for x in memory)
    mask = jnp.repeat(mask, q.shape[2] // memory.keys.shape[1], axis=1)
    branches = [
        attend_to(q, *held, mask, settings.impl)
        for held, mask in ((far, seen), (chosen, mask), (near, window))
    ]
    out = _gated(branches, extra_projections["gate"]).astype(v.dtype)
    return out, NsaCache(memory, near, newest, far)


def _places_now(
    settings: NsaSettings, q, summaries: Float[Array, "B G C H"], seen, position, capacity: int
) -> Int[Array, "B G K*L"]:
    """The positions of the blocks that the newest query selects, by the summaries' keys."""
    n_batch, n_kv = summaries.shape[:2]
    heads = q.reshape(n_batch, n_kv, -1, q.shape[3])
    weights = masked_softmax(_logits("bgmh,bgch->bgmc", heads, summaries), seen[:, None]).sum(
        axis=2
    )
    scores = _block_scores(settings, weights, -(-capacity // settings.block_size))
    own = (position // settings.block_size)[:, None]
    blocks = _best(settings, scores, own, jnp.zeros_like(own))
    within = jnp.arange(settings.block_size, dtype=jnp.int32)[None, None, None]
    place = blocks[..., None] * settings.block_size + within
    return place.reshape(n_batch, n_kv, -1)


def _with_newest(settings: NsaSettings, params, far: KeyValues, newest: KeyValues, position):
    """The summaries with the one that ends at `position`, if one does."""
    before = jnp.arange(settings.compress_len, dtype=jnp.int32)[None, ::-1]
    place = position[:, None] - before
    index = (place % newest.keys.shape[2])[:, None, :, None]
    number, left = jnp.divmod(position - (settings.compress_len - 1), settings.compress_stride)
    n = far.keys.shape[2]
    number = jnp.where((left == 0) & (number >= 0), number, n)  # behind the end: not written
    row = jnp.arange(position.shape[0])
    new = (
        _summary(
            params[name] if params else None,
            jnp.moveaxis(jnp.take_along_axis(x, index, axis=2), 1, 2)[:, None],
        )[:, 0]
        for name, x in zip("kv", newest, strict=True)
    )
    return KeyValues(
        *(x.at[row, :, number].set(y, mode="drop") for x, y in zip(far, new, strict=True))
    )

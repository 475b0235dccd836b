"""Kernels against array operations in float32, given the same plan, at lengths of several tiles.

On an NVIDIA GPU `JAX_PLATFORMS=cuda pytest -n 8 -m slow tests/ops/test_kernels_on_gpu.py` runs the
compiled kernels, faster with `XLA_FLAGS=--xla_gpu_autotune_level=0`. Elsewhere a short case is
interpreted, to check the test itself.
"""

import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import trained
from reformax.ops import (
    AttentionOp,
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
    local,
    long_short,
    longformer,
    lsh,
    moba,
    nsa,
    performer,
    retention,
    routing,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.calls import obstacles, this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.candidates import Coded, Hashed, Pooled
from reformax.ops.indexing.indexer import Indexer
from tests.helpers import assert_trees_close, with_gradients

ON_GPU = jax.default_backend() == "gpu"
KEY = jax.random.PRNGKey(3)
# With `jax_default_matmul_precision` "highest", products of float32 are exact.
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5}


class Case(NamedTuple):
    """N and G heads of size H, and two rows of T positions, `marked` of them global."""

    make: Callable[..., AttentionOp]
    n: int = 2
    g: int = 2
    h: int = 64
    t: int = 500
    causal: bool = True
    packed: bool = False
    marked: int = 0
    dropout: float = 0.0
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


of = functools.partial
CAPPED, SINKS = dict(soft_cap=2.0), dict(learned_sinks=True)
native = of(nsa.nsa, compression="mean", independent_kv=False)
CASES = {
    "nsa, short": Case(of(native, block_size=16, n_selected=4, window=30), 6, 2, 16, 90),
    "nsa, 16 heads of one": Case(native, 16, 1, t=5000),
    "nsa, packed": Case(native, 8, 2, t=777, packed=True),
    "nsa, wide": Case(native, 64, 4, 128, 2600),
    "nsa, a mean a block": Case(of(native, compress_len=64, compress_stride=64), 16, 1, t=3001),
    "nsa, own projections": Case(nsa.nsa, 16, 1, t=1500),
    "nsa, dropout": Case(of(native, block_size=32, n_selected=8), 6, t=333, dropout=0.2),
    "moba": Case(moba.moba, 16, 1, t=1777),
    "moba, packed": Case(of(moba.moba, block_size=64), 4, t=1000, packed=True),
    "moba, wide": Case(of(moba.moba, block_size=64), 8, 4, 128, dropout=0.2),
    "dsa": Case(of(dsa.dsa, top_k=256), 4, 4, t=1777),
    "dsa, packed": Case(of(dsa.dsa, top_k=40, n_index_heads=7, d_index=40), t=777, packed=True),
    "dsa, lists": Case(of(dsa.dsa, top_k=40), 16, 1, t=3001),
    "dsa, lists, packed": Case(
        of(dsa.dsa, top_k=30, **CAPPED), 64, 1, 128, 1500, packed=True, dropout=0.2
    ),
    "dsa, lists, both sides": Case(of(dsa.dsa, top_k=20), 4, 4, 256, 3001, causal=False),
    "dsa, lists of groups": Case(of(dsa.dsa, top_k=33), 8, 2, 40, 1777, packed=True),
    "dsa, blocks": Case(
        of(dsa.dsa, top_k=256, indexer=Indexer(rotary=True, block_size=32)), 16, 1, t=1777
    ),
    "dsa, blocks, packed": Case(
        of(dsa.dsa, top_k=64, indexer=Indexer(block_size=16)), 4, t=777, packed=True, dropout=0.2
    ),
    "dsa, local keys": Case(
        of(dsa.dsa, top_k=256, indexer=Indexer(n_local=150)), 4, 4, t=1777, packed=True
    ),
    "dsa, hashed": Case(
        of(dsa.dsa, top_k=64, indexer=Indexer(n_local=8, candidates=Hashed())), 4, 4, t=1777
    ),
    "dsa, pooled, packed": Case(
        of(dsa.dsa, top_k=64, indexer=Indexer(candidates=Pooled(n_blocks=3))), t=1500, packed=True
    ),
    "dsa, coded": Case(
        of(dsa.dsa, top_k=64, indexer=Indexer(candidates=Coded(n_best=256))), 4, 4, t=1777
    ),
    "dsa, wide": Case(of(dsa.dsa, top_k=100, d_index=128), 4, 4, 128, causal=False, dropout=0.2),
    "dsa, a long row of scores": Case(of(dsa.dsa, top_k=2048, n_index_heads=2), t=5000),
    "dsa, few of a long row": Case(of(dsa.dsa, top_k=100), 16, 1, t=6001, packed=True),
    "longformer, both sides": Case(of(longformer.longformer, window=65), causal=False),
    "longformer": Case(of(longformer.longformer, n_global=16), t=1000, packed=True, marked=16),
    "longformer, wide": Case(
        of(longformer.longformer, window=512, n_global=3), 2, 2, 128, 1700, False, marked=9
    ),
    "longformer, dilated": Case(
        of(longformer.longformer, window=65, dilation=3, n_global=5), 2, 2, t=1000, marked=9
    ),
    "sinks": Case(of(sinks.sinks, window=64), t=1000),
    "sinks, dropout": Case(of(sinks.sinks, window=128, n_sinks=8), h=128, dropout=0.2),
    "linear": Case(linear.linear, 4, 4, t=2000),
    "linear, packed": Case(linear.linear, h=80, t=777, packed=True),
    "performer": Case(performer.performer, 4, 4, t=2000),
    "performer, all": Case(performer.performer, 4, 4, t=2000, causal=False),
    "performer, wide": Case(of(performer.performer, n_features=256), h=128, t=2000),
    "performer, packed": Case(of(performer.performer, n_features=144), t=777, packed=True),
    "routing": Case(of(routing.routing, n_clusters=8), 4, 4, t=1000),
    "routing, shared": Case(
        of(routing.routing, n_clusters=5, cluster_size=130, shared_qk=True), dropout=0.2
    ),
    "shared_qk": Case(shared_qk.shared_qk, 4, 4, t=1777, causal=False),
    "shared_qk, packed": Case(
        of(shared_qk.shared_qk, attend_self_if_alone=False), 4, 4, t=777, packed=True, dropout=0.2
    ),
    "shared_qk, wide": Case(shared_qk.shared_qk, 2, 2, 128, 1000, causal=False, packed=True),
    "dense, packed": Case(dense.dense, 4, 2, t=777, packed=True),
    "dense, dropout": Case(dense.dense, 4, 2, t=1000, causal=False, packed=True, dropout=0.1),
    "dense, wide": Case(dense.dense, h=128, t=700, packed=True, dropout=0.3),
    "long_short": Case(of(long_short.long_short, window=100), 4, 4, t=1777),
    "long_short, wide": Case(of(long_short.long_short, rank=3), h=128, t=777, dropout=0.2),
    "long_short, both sides": Case(
        of(long_short.long_short, window=100), 4, 4, t=1000, causal=False, dropout=0.2
    ),
    "long_short, a window": Case(of(long_short.long_short, rank=0, window=65), h=80, t=777),
    "flash, capped": Case(of(flash.flash, **CAPPED), t=777, packed=True, dropout=0.2),
    "flash, sinks": Case(of(flash.flash, **SINKS), 4, t=1777),
    "flash, sinks, packed": Case(
        of(flash.flash, soft_cap=2.0, **SINKS), 4, 1, 80, 777, packed=True, dropout=0.2
    ),
    "flash, sinks, both sides": Case(of(flash.flash, **SINKS), 2, 2, 128, 1000, causal=False),
    "flash, 256": Case(flash.flash, 4, 2, 256, 1777),
    "flash, 256, packed": Case(
        of(flash.flash, **SINKS), 2, 1, 200, 777, causal=False, packed=True, dropout=0.2
    ),
    "block_sparse, 256": Case(of(block_sparse.block_sparse, block_size=64), 2, 2, 256, 1024),
    "shared_qk, 256": Case(shared_qk.shared_qk, 2, 2, 256, 1000, packed=True),
    "routing, 256": Case(of(routing.routing, n_clusters=8), 2, 2, 256, 1000),
    "hash_sparse, 256": Case(of(hash_sparse.hash_sparse, n_buckets=8), 2, 2, 256, 700, packed=True),
    "dsa, 256": Case(of(dsa.dsa, top_k=100), 4, 4, 256, 777),
    "local, 256": Case(of(local.local, n_chunks_after=1), 2, 2, 256, 1000, causal=False),
    "local, 256, a window": Case(of(local.local, window=64), 2, 1, 192, 777, packed=True),
    "longformer, 256": Case(
        of(longformer.longformer, window=65, n_global=5), 2, 2, 256, 1000, marked=9
    ),
    "sinks, 256": Case(of(sinks.sinks, window=64), 2, 2, 256, 1000, dropout=0.2),
    "lsh, 256": Case(
        of(lsh.lsh, n_hashes=4, chunk_len=64, n_buckets=16), 2, 2, 256, 1777, packed=True
    ),
    "lsh, 32 hashes": Case(
        of(lsh.lsh, n_hashes=32, chunk_len=32, attend_self_if_alone=False), t=1777, packed=True
    ),
    "smyrf, 256": Case(smyrf.smyrf, 2, 2, 256, 1000, causal=False),
    "retention, 256": Case(retention.retention, 2, 2, 256, 1000, packed=True),
    "gated_linear, wide": Case(gated_linear.gated_linear, 2, 2, 128, 1000, packed=True),
    "gated_linear, 72": Case(gated_linear.gated_linear, 2, 2, 72, 777),
    "gated_delta, wide": Case(gated_delta.gated_delta, 2, 2, 128, 1000, packed=True),
    "gated_delta, many": Case(gated_delta.gated_delta, 32, 32, 64, 4000, packed=True),
    "gated_delta, many wide": Case(
        gated_delta.gated_delta, 16, 16, 128, 3000, dtypes=("bfloat16",)
    ),
    "retention, many": Case(retention.retention, 32, 32, 64, 2000, packed=True),
    "kda, wide": Case(kda.kda, 2, 2, 128, 777),
    "gated_linear, 256": Case(gated_linear.gated_linear, 2, 2, 256, 777),
    "gated_delta, 256": Case(gated_delta.gated_delta, 2, 2, 256, 1000, dtypes=("bfloat16",)),
    "lsh, strict": Case(
        of(lsh.lsh, n_hashes=4, chunk_len=64, n_buckets=16, strictly_causal=True), t=1777
    ),
    "lsh, strict, packed": Case(
        of(lsh.lsh, n_hashes=2, chunk_len=40, n_buckets=8, strictly_causal=True, count_once=False),
        t=777,
        packed=True,
        dropout=0.2,
    ),
    "flash, wide, capped": Case(of(flash.flash, **CAPPED), 2, 2, 128, 1000, causal=False),
    "lsh, capped": Case(of(lsh.lsh, n_hashes=2, chunk_len=128, n_buckets=8, **CAPPED), t=1000),
    "moba, capped": Case(of(moba.moba, block_size=64, **CAPPED), 4, t=1000, packed=True),
    "nsa, capped": Case(of(native, **CAPPED), 8, 2, t=777, packed=True),
    "dsa, capped": Case(of(dsa.dsa, top_k=40, **CAPPED), t=777),
    "longformer, capped": Case(
        of(longformer.longformer, window=65, n_global=5, **CAPPED), t=1000, marked=9
    ),
    "hca": Case(hca.hca, 16, 2, t=1777),
    "hca, packed": Case(of(hca.hca, block_size=32), 4, 1, t=777, packed=True, dropout=0.2),
    "hca, a head of all": Case(of(hca.hca, share_kv=True, **CAPPED), 64, 1, 128, 1500, packed=True),
    "hca, a key head each": Case(of(hca.hca, window=200, learned_sinks=False), 4, 4, t=1000),
    "csa, lists": Case(of(csa.csa, top_k=64), 16, 1, t=3001),
    "csa, lists, packed": Case(
        of(csa.csa, top_k=30, share_kv=True, **CAPPED), 64, 1, 128, 1500, packed=True, dropout=0.2
    ),
    "csa": Case(of(csa.csa, top_k=128), 8, 2, t=1777),
    "csa, packed": Case(
        of(csa.csa, top_k=40, n_index_heads=7, d_index=40, window=30), 4, 4, 40, 777, packed=True
    ),
    "hash_sparse": Case(of(hash_sparse.hash_sparse, n_buckets=8), t=1000),
    "hash_sparse, shared": Case(
        of(hash_sparse.hash_sparse, n_buckets=8, shared_qk=True), t=700, packed=True
    ),
    "hash_sparse, all": Case(
        of(hash_sparse.hash_sparse, attend_self_if_alone=False),
        h=40,
        t=333,
        causal=False,
        dropout=0.2,
    ),
}


def paired_segment_ids(rng, case: Case):
    """Three segments and padding, cut anywhere."""
    if not case.packed:
        return None
    ends = np.sort(rng.integers(1, case.t, (2, 3)), axis=1)
    ids = 1 + (np.arange(case.t)[None, :, None] >= ends[:, None]).sum(axis=-1)
    return jnp.asarray(np.where(ids == 4, 0, ids), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE if ON_GPU else list(TOLERANCE)[:1])
@pytest.mark.parametrize("name", CASES if ON_GPU else list(CASES)[:1])
def test_a_kernel_computes_what_array_operations_do(name, dtype):
    if dtype not in CASES[name].dtypes:
        pytest.skip(f"no chip holds the rows in {dtype}")
    case, rng = CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    op, other = (case.make(impl=x) for x in ("pallas" if ON_GPU else INTERPRETED, "xla"))

    def draw(n_heads, size=case.h):
        return jax.device_put(rng.normal(size=(2, case.t, n_heads, size)).astype(dtype))

    q, k, v, d_out = (draw(n) for n in (case.n, case.g, case.g, case.n))
    k = None if op.shared_qk else k
    dims, segment_ids = op.dims(q, v), paired_segment_ids(rng, case)
    if segment_ids is not None:
        d_out = d_out * (segment_ids != 0)[..., None, None]
    params = op.init(KEY, dims)
    extra_projections = {
        name: draw(x.n_heads, x.size) for name, x in op.extra_projections(dims).items()
    }
    masks = dict(segment_ids=segment_ids, causal=case.causal, rng=KEY)
    global_tokens = {}
    if case.marked:
        row = rng.permutation(np.arange(case.t) < case.marked).astype(np.int32)
        global_tokens = {"global_tokens": jnp.asarray(np.stack([row, row[::-1]]))}
    plans = [
        jax.jit(functools.partial(x.plan, params, train=True, **masks, **global_tokens))(q, k)
        for x in (op, other)
    ]
    if isinstance(plans[0], jax.Array) and not case.marked:
        same = np.equal(*(np.sort(x, axis=-1) for x in plans)).all(axis=-1)  # [B, T] or [B, N, T]
        real = (
            np.ones(same.shape[-1], bool) if segment_ids is None else np.asarray(segment_ids != 0)
        )
        same = same | ~(real[:, None] if segment_ids is not None and same.ndim == 3 else real)
        assert same.mean() > 0.99

    def run(op, d_out, *inputs):
        def attend(q, k, v, extra_projections, params):
            options = masks | dict(plan=plans[0], dropout=case.dropout)
            return op.apply(
                params,
                q,
                k,
                v,
                **options,
                **({"extra_projections": extra_projections} if extra_projections else {}),
            )

        out, vjp = jax.vjp(attend, *inputs)
        *gradients, of_params = vjp(d_out.astype(out.dtype))
        return out, (*gradients, trained(of_params))

    inputs = d_out, q, k, v, extra_projections, params
    inputs_in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)

    @jax.default_matmul_precision("highest")
    def computed(op, inputs):
        out, gradients = jax.jit(functools.partial(run, op))(*inputs)
        if segment_ids is not None:
            out = out * (segment_ids != 0)[..., None, None]
        return [np.asarray(x, np.float64) for x in jax.tree.leaves((out, gradients))]

    want = computed(other, inputs_in_float32)

    def errors(op):
        return np.array(
            [np.abs(x - y).max() for x, y in zip(computed(op, inputs), want, strict=True)]
        )

    bounds = np.array([TOLERANCE[dtype] * max(1, np.abs(y).max()) for y in want])
    found = errors(op)
    if (found > bounds).any():  # array operations that round as much say that it is the dtype
        assert (found <= np.maximum(bounds, 2 * errors(other))).all(), found / bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, causal",
    [
        (flash.flash, False),
        (flash.flash, True),
        (dense.dense, True),
        (shared_qk.shared_qk, True),
        (functools.partial(local.local, chunk_len=64, window=50), True),
    ],
)
@pytest.mark.parametrize(
    "length, size", [(512, 64), (999, 64), (4096, 64), (999, 256)] if ON_GPU else [(70, 64)]
)
def test_cudnn_hides_the_padding_behind_rows(length, size, make, causal, monkeypatch):
    """Rows without padding, with some, with one token, and with only padding."""
    lengths = jnp.array([length, length // 2 + 1, length - 1, 1, 0], jnp.int32)
    rng = np.random.default_rng(length)
    if size > obstacles.NARROW_HEAD and not this_gpu.is_hopper():
        pytest.skip("cuDNN has heads of 256 on Hopper")
    n_kv_heads = 4 if make is shared_qk.shared_qk else 2
    shapes = [(len(lengths), length, n, size) for n in (4, n_kv_heads, n_kv_heads, 4)]
    q, k, v, d_out = (
        jax.device_put(rng.normal(size=shape).astype(jnp.bfloat16)) for shape in shapes
    )
    masks = dict(segment_ids=jnp.arange(length)[None] < lengths[:, None], causal=causal)
    if not ON_GPU:
        computed = jax.nn.dot_product_attention
        instead = lambda *x, implementation, **options: computed(*x, **options)  # noqa: E731
        monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
        monkeypatch.setattr(this_gpu, "obstacle", lambda: None)

    def run(op, dtype, **options):
        options |= dict(plan=(), dropout=0.0, rng=None)
        keys = [] if op.shared_qk else [k]

        def attend(q, *keys_and_values):
            *keys, v = keys_and_values
            return op.apply((), q, keys[0] if keys else None, v, **options)

        return with_gradients(attend)(*(x.astype(dtype) for x in (d_out, q, *keys, v)))

    with jax.default_matmul_precision("highest"):
        got = run(make(impl="cudnn"), jnp.bfloat16, **masks, lengths=lengths)
        want = run(make(impl="xla"), jnp.float32, **masks)
    assert_trees_close(got, want, TOLERANCE["bfloat16"])

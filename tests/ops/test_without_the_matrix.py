"""Memory-efficient attention and FlashAttention: exact, linear in memory, and what they skip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import block_sparse, dense, flash, memory_efficient, shared_qk
from reformax.ops.calls import this_gpu
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import block_sparse as kernel_blocks
from reformax.ops.numerics import row_blocks
from reformax.ops.numerics.logits import Logits
from reformax.ops.sharding import array_calls
from reformax.ops.softmax import cudnn, tiles
from reformax.ops.softmax.reference import reference_attention
from tests.helpers import assert_trees_close, default_jit, with_gradients
from tests.ops import oracle

KEY = jax.random.key(5)
OPS = {"memory_efficient": memory_efficient.memory_efficient, "flash": flash.flash}
# Sizes that divide neither each other nor the lengths of these tests.
SIZES = {
    "memory_efficient": dict(query_chunk_size=8, key_chunk_size=20),
    "flash": dict(query_block_size=12, key_block_size=8),
}
both = pytest.mark.parametrize("name", OPS)


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.slow
@both
@pytest.mark.parametrize(  # Uniform values have means of 0.5: CPUs round 6.0e-7 to 6.9e-7 apart.
    "draw, bound", [(jax.random.normal, 1.5e-7), (jax.random.uniform, 8e-7)], ids=["n", "u"]
)
def test_the_papers_check_of_16384_tokens(name, draw, bound):
    """Rabe and Staats, sec. 3: the difference to plain attention, in some of the rows."""
    length, size = 2**14, 64
    q, k, v = (draw(key, (1, length, 1, size)) for key in jax.random.split(KEY, 3))
    some = np.random.default_rng(0).choice(length, 64, replace=False)
    with jax.default_matmul_precision("highest"):
        out, plain = (
            np.asarray(default_jit(lambda *x, op=op: op(*x))(queries, k, v))
            for op, queries in ((OPS[name](), q), (dense.dense(impl="xla"), q[:, some]))
        )
        out = out[:, some]
    want, _ = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q[:, some], k, v)), 1, 1, np.zeros(out.shape)
    )
    assert np.abs(out - plain).max() <= bound
    assert np.abs(out - want).max() <= bound


def temp_bytes(op, length, n_heads, gradient, bias_shape=None, causal=True):
    """The temporary memory of the compiled program, without its inputs and outputs."""
    x = jax.ShapeDtypeStruct((1, length, n_heads, 64), jnp.float32)
    inputs = [x, x, x]
    if bias_shape is not None:
        inputs.append(jax.ShapeDtypeStruct(bias_shape, jnp.float32))

    def attend(q, k, v, bias=None):
        return op(q, k, v, causal=causal, bias=bias)

    args = (x, *inputs) if gradient else inputs
    program = with_gradients(attend) if gradient else jax.jit(attend)
    return program.lower(*args).compile().memory_analysis().temp_size_in_bytes


@both
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_memory_is_linear_in_the_length(name, gradient):
    """And no more than twice the inputs; what remains is a tile, whatever the length."""
    op = OPS[name]()
    lengths = (2**15, 2**17, 2**20)
    used = [temp_bytes(op, n, 1, gradient) for n in lengths]
    slopes = np.diff(used) / np.diff(lengths)
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=0.05, atol=1)
    inputs = 3 * 64 * 4
    assert slopes[1] <= 2 * inputs
    assert used[0] - slopes[0] * lengths[0] < 160 * 2**20


@pytest.mark.slow
def test_the_gradient_at_65536_tokens_of_8_heads_takes_less_than_a_gigabyte():
    """The paper's code takes 33.9 GB."""
    assert temp_bytes(memory_efficient.memory_efficient(), 2**16, 8, gradient=True) < 2**30


@both
@pytest.mark.parametrize("shape", [(1, 1, 1, 2**15), (1, 4, 2**15, 1)])
def test_what_a_bias_shares_is_never_expanded(name, shape):
    op, length, n_heads = OPS[name](), 2**15, 4
    size = 4 * np.prod(shape)
    without = temp_bytes(op, length, n_heads, gradient=True)
    # What comes on top: the bias's gradient in the loop, and a tile of logits at most.
    assert temp_bytes(op, length, n_heads, True, shape) < without + 2 * size + 64 * 2**20


@both
def test_a_bias_hides(name):
    """As masks are often given; a row that sees nothing at all is no NaN."""
    mask = np.random.default_rng(0).random((2, 1, 23, 31)) < 0.5
    mask[..., 0] = True
    q, k, v, d_out = (numbers(2, n, 3, 4, seed=i) for i, n in enumerate((23, 31, 31, 23)))
    op = OPS[name](**SIZES[name])
    run = with_gradients(lambda q, k, v, bias: op(q, k, v, bias=bias))
    reference = with_gradients(lambda q, k, v: reference_attention(q, k, v, mask))
    want, want_gradients = reference(d_out, q, k, v)
    for hidden in (-np.inf, np.finfo(np.float32).min, -1e9):
        bias = np.where(mask, 0, hidden).astype(np.float32)
        out, gradients = run(d_out, q, k, v, bias)
        assert_trees_close((out, gradients[:3]), (want, want_gradients))
        assert not np.any(np.where(mask, 0, gradients[3].sum(axis=1, keepdims=True)))
        bias[0, :, 3] = hidden
        for x in jax.tree.leaves(run(d_out, q, k, v, bias)):
            assert np.isfinite(x).all()


@both
def test_the_gradient_of_a_bias_keeps_its_dtype(name):
    op = OPS[name](**SIZES[name])
    q, k, v = (numbers(2, 23, 3, 4, seed=i) for i in range(3))
    bias = jnp.asarray(numbers(1, 3, 1, 23).astype(jnp.bfloat16))

    def loss(bias, op):
        return jnp.sum(jnp.sin(op(q, k, v, bias=bias, causal=True, dropout=0.2, rng=KEY)))

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, op=x)))(bias) for x in (op, dense.dense())
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.02)


@both
@pytest.mark.parametrize("n_queries, n_keys", [(47, 47), (47, 30)])
def test_chunks_above_the_diagonal_cost_nothing(name, n_queries, n_keys, monkeypatch):
    """The tiles that run are counted, in both passes, and under vmap, where a branch takes both."""
    ran, logits = [], tiles.logits

    def counted(tiling, x, group, queries, keys, q, k):
        jax.debug.callback(lambda *at: ran.append(at), queries.position, keys.position)
        return logits(tiling, x, group, queries, keys, q, k)

    monkeypatch.setattr(tiles, "logits", counted)
    traced_anew = array_calls._compiled.__wrapped__
    monkeypatch.setattr(array_calls, "_compiled", traced_anew)
    op = OPS[name](**SIZES[name])
    q, k, v, d_out = (
        numbers(2, 1, n, 1, 4, seed=i) for i, n in enumerate((n_queries, n_keys, n_keys, n_queries))
    )
    run = jax.jit(jax.vmap(with_gradients(functools.partial(op, causal=True))))
    jax.block_until_ready(run(d_out, q, k, v))
    jax.effects_barrier()
    assert all(np.min(keys) <= np.max(queries) for queries, keys in ran)
    visible = np.tril(np.ones((n_queries, n_keys), int)) * 2  # once in each pass
    for queries, keys in ran:
        visible[np.ix_(queries, keys)] -= 1
    assert (visible <= 0).all()
    if name == "flash":
        # In every one of 4 blocks of 12 queries, the blocks of 8 keys up to the last query's.
        n_tiles = sum(min(-(-min(12 * i, n_queries) // 8), -(-n_keys // 8)) for i in range(1, 5))
        assert len(ran) == 2 * n_tiles


@both
@pytest.mark.parametrize("n_heads", [12, 3])  # three heads of four examples, one head of two
def test_a_few_heads_at_a_time(name, n_heads, monkeypatch):
    """As a CPU computes more logits than its cache holds: the same numbers."""
    op = OPS[name](**SIZES[name])
    q, k, v, d_out = (numbers(4, 29, 6, 8, seed=i) for i in range(4))
    bias = numbers(4, 6, 29, 29)
    segment_ids = np.sort(np.random.default_rng(0).integers(0, 3, (4, 29)))

    traced_anew = array_calls._compiled.__wrapped__
    monkeypatch.setattr(array_calls, "_compiled", traced_anew)

    def run(n_logits):
        monkeypatch.setattr(row_blocks, "LOGITS_IN_CACHE", n_logits)

        def attend(*inputs):
            *inputs, bias = inputs
            return op(*inputs, segment_ids=segment_ids, bias=bias, dropout=0.3, rng=KEY)

        return with_gradients(attend)(d_out, q, k, v, bias)

    assert_trees_close(run(8 * 20 * n_heads), run(2**30), 1e-6)


def test_tiles_of_any_block_mask():
    """A plan may list any tiles for each head. Other tiles have no part in either pass."""
    rng = np.random.default_rng(0)
    sizes, shape = (8, 12), (4, 3)
    mask = rng.random((3, *shape)) < 0.5
    mask[0, 1] = mask[1, :, 2] = False
    q, k, v, d_out = (numbers(2, n, 3, 4, seed=i) for i, n in enumerate((29, 31, 31, 29)))
    tiling = tiles.Tiling(*sizes, causal=False, logits=Logits(scale=0.5))

    def visits(mask):
        count = mask.sum(axis=-1)
        width = mask.sum(axis=(1, 2)).max()
        stop = np.cumsum(count, axis=-1)
        index = np.zeros((len(mask), width), np.int32)
        for head, some in enumerate(mask):
            index[head, : some.sum()] = np.nonzero(some)[1]
        return tiles.Visits(*(jnp.asarray(x) for x in (stop - count, stop, index)))

    plan = tiles.TilePlan(visits(mask), visits(np.swapaxes(mask, 1, 2)))

    def attend(q, k, v):
        x = tiles.inputs(Call(), q, k, v)
        return tiles.attend(tiles.forward, tiling, x, plan)

    out, gradients = with_gradients(attend)(d_out, q, k, v)
    counts = mask.repeat(sizes[0], axis=1).repeat(sizes[1], axis=2)[:, :29, :31]
    want, want_gradients = oracle.attention(
        *(x.astype(np.float64) for x in (q, k, v)), np.tile(counts, (2, 1, 1, 1)) * 1, 1, d_out
    )
    assert_trees_close((out, gradients), (want, want_gradients[:3]))


def test_scale():
    q, k, v, d_out = (numbers(2, 23, 3, 4, seed=i) for i in range(4))
    scale = 0.8
    op = flash.flash(scale=scale, query_block_size=8, key_block_size=8)
    out, (dq, dk, dv) = with_gradients(functools.partial(op, causal=True))(d_out, q, k, v)
    counts = np.broadcast_to(np.tril(np.ones((23, 23), int)), (2, 3, 23, 23))
    scaled = q.astype(np.float64) * scale * 2  # for the oracle divides by the square root of 4
    want, (wq, wk, wv, *_) = oracle.attention(
        scaled, k.astype(np.float64), v.astype(np.float64), counts, 1, d_out
    )
    assert_trees_close((out, dq, dk, dv), (want, wq * scale * 2, wk, wv))

    @jax.jit
    def last(q, k, v):
        lengths = jnp.full(2, 22)
        held = op.init_cache((), q, k, v, plan=(), lengths=lengths, capacity=23, rng=None)
        return op.step((), q[:, 22:], k[:, 22:], v[:, 22:], held, position=lengths)[0]

    assert_trees_close(last(q, k, v), out[:, 22:])


PACKED = np.repeat([[1, 2, 0]], [40, 17, 12], axis=1)
PACKED_KEYS = np.repeat([[1, 2, 0]], [70, 30, 50], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, size, n_keys, options",
    [
        (np.float32, 4, 69, dict(causal=True, dropout=0.3, rng=KEY)),
        (np.float32, 16, 150, dict(segment_ids=(PACKED, PACKED_KEYS))),
        (jnp.bfloat16, 8, 69, dict(causal=True)),
    ],
    ids=["dropout", "segment_ids", "bfloat16"],
)
def test_the_kernel_is_the_same_function(dtype, size, n_keys, options):
    lengths = (69, n_keys, n_keys, 69)
    q, k, v, d_out = (numbers(1, n, 2, size, seed=i).astype(dtype) for i, n in enumerate(lengths))
    got, want = (
        with_gradients(functools.partial(flash.flash(impl=impl), **options))(d_out, q, k, v)
        for impl in (INTERPRETED, "xla")
    )
    assert_trees_close(got, want, 1e-5 if dtype == np.float32 else 2e-2)


# `ops/test_learned_sinks.py` has these kernels, of flash.
@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_of_dense_attention_is_the_same_function(causal):
    """Packed rows, dropout, and heads that share keys."""
    q, k, v, d_out = (numbers(2, 69, n, 8, seed=n) for n in (4, 2, 2, 4))
    options = dict(causal=causal, segment_ids=PACKED.repeat(2, 0), dropout=0.3, rng=KEY)
    got, want = (
        with_gradients(functools.partial(dense.dense(impl=impl), **options))(d_out, q, k, v)
        for impl in (INTERPRETED, "xla")
    )
    assert_trees_close(got, want, 1e-5)


@pytest.mark.parametrize("op", [dense.dense(), flash.flash(), shared_qk.shared_qk()])
@pytest.mark.parametrize("dropout, packed", [(0.1, False), (0.0, True)])
def test_no_gpu_makes_the_matrix(op, dropout, packed, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    x = jax.ShapeDtypeStruct((1, 300, 2, 16), jnp.bfloat16)
    ids = jnp.ones((1, 300), jnp.int32) if packed else None
    masks = dict(plan=(), segment_ids=ids, causal=True, dropout=dropout, rng=KEY)
    traced = jax.make_jaxpr(lambda q, k, v: op.apply((), q, k, v, **masks))
    text = str(traced(x, None if op.shared_qk else x, x))
    assert "pallas_call" in text and "300,300]" not in text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN is for NVIDIA GPUs")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "n_queries, n_keys",
    [(256, 256), (200, 200), (128, 320), (320, 128), (100, 130), (130, 100), (5000, 100)],
)
def test_cudnn_is_the_same_function(n_queries, n_keys, causal):
    lengths = (n_queries, n_keys, n_keys, n_queries)
    q, k, v, d_out = (
        numbers(2, n, 4, 64, seed=i).astype(jnp.bfloat16) for i, n in enumerate(lengths)
    )
    got, want = (
        with_gradients(functools.partial(flash.flash(impl=impl, scale=0.1), causal=causal))(
            d_out, q, k, v
        )
        for impl in ("cudnn", "xla")
    )
    assert_trees_close(got, want, 2e-2)


@pytest.mark.parametrize("n_queries, n_keys, n_examples", [(64, 20, 2), (83, 64, 4), (64, 300, 1)])
def test_many_queries_of_few_keys_are_cut_into_pieces_for_cudnn(
    n_queries, n_keys, n_examples, monkeypatch
):
    lengths = (n_queries, n_keys, n_keys, n_queries)
    q, k, v, d_out = (numbers(1, n, 2, 8, seed=i) for i, n in enumerate(lengths))
    examples, computed = [], jax.nn.dot_product_attention

    def in_array_operations(q, *args, implementation, **options):
        examples.append(len(q))
        return computed(q, *args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_array_operations)
    monkeypatch.setattr(cudnn, "LEAST_PIECE", 20)
    monkeypatch.setattr(cudnn, "PROGRAMS", 9)
    got = with_gradients(functools.partial(cudnn.cudnn_attention, causal=False))(d_out, q, k, v)
    assert_trees_close(got, with_gradients(dense.dense(impl="xla"))(d_out, q, k, v), 1e-5)
    assert examples == [n_examples]


@pytest.mark.parametrize(
    "length, causal, pieces",
    [(64, False, 1), (64, True, 1), (83, False, 1), (83, True, 1), (83, False, 4)],
)
def test_padding_behind_rows_reaches_cudnn(length, causal, pieces, monkeypatch):
    """Rows without padding, with little, with almost nothing else and with nothing else."""
    lengths = jnp.array([length, length - 7, 1, 0])
    q, k, v, d_out = numbers(4, 4, length, 2, 8)
    computed = jax.nn.dot_product_attention

    def in_array_operations(q, *args, implementation, query_seq_lengths, **options):
        assert len(q) == 4 * pieces
        options |= dict(query_seq_lengths=query_seq_lengths, implementation="xla")
        out = computed(q, *args, **options)
        real = jnp.arange(q.shape[1])[None] < query_seq_lengths[:, None]
        return jnp.where(real[..., None, None], out, jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", in_array_operations)
    if pieces > 1:
        monkeypatch.setattr(cudnn, "LEAST_PIECE", 20)
        monkeypatch.setattr(cudnn, "PROGRAMS", 32)
    run = functools.partial(cudnn.cudnn_attention, causal=causal, lengths=lengths)
    segment_ids = np.arange(length)[None] < lengths[:, None]
    want = functools.partial(dense.dense(impl="xla"), causal=causal, segment_ids=segment_ids)
    assert_trees_close(with_gradients(run)(d_out, q, k, v), with_gradients(want)(d_out, q, k, v))


# `ops/test_logits.py` merges those of a ring's pieces.
@pytest.mark.slow
@pytest.mark.parametrize(
    "causal, given", [(False, {}), (True, {}), (True, "lengths"), (False, "segment_ids")]
)
def test_a_kernels_summaries_are_merged(causal, given):
    q, k, v = numbers(3, 3, 192, 2, 8)
    sizes = dict(query_chunk_size=32, key_chunk_size=64)
    if given == "lengths":
        given = dict(lengths=np.array([192, 70, 0]))
    elif given == "segment_ids":
        given = dict(segment_ids=np.repeat([[1, 1, 1], [1, 2, 0], [1, 0, 2]], 64, axis=1))

    def run(op):
        attend = with_gradients(lambda *x: op(*x, causal=causal, **given))
        return jax.jit(attend)(v, q, k, v)

    want = run(dense.dense(impl="xla"))
    kernel = memory_efficient.memory_efficient(impl=INTERPRETED, **sizes)
    assert_trees_close(run(kernel), want)
    odd = memory_efficient.memory_efficient(impl=INTERPRETED, query_chunk_size=24)
    for op, inputs in ((odd, (q, k, v)), (kernel, (x[:, :190] for x in (q, k, v)))):
        with pytest.raises(NotImplementedError, match="impl=INTERPRETED with chunks="):
            op(*inputs)


@pytest.mark.parametrize(
    "causal, packed, dropout", [(True, True, 0.3), (False, True, 0.0), (True, False, 0.0)]
)
def test_a_kernels_gradient_is_that_of_array_operations(causal, packed, dropout, monkeypatch):
    """A GPU computes the gradient by a kernel, also where the forward pass cannot be one."""
    q, k, v, d_out = numbers(4, 2, 45, 2, 8)
    ids = jnp.asarray(np.repeat([[1, 2, 0]], [20, 20, 5], axis=1).repeat(2, axis=0))
    options = dict(causal=causal, dropout=dropout, rng=KEY, segment_ids=ids if packed else None)

    def run(op):
        return with_gradients(lambda *x: op(*x, **options))(d_out, q, k, v)

    sizes = dict(query_chunk_size=16, key_chunk_size=32)
    want = run(memory_efficient.memory_efficient(impl="xla", **sizes))
    used = []

    def on_a_gpu(impl, pallas):
        """What `dispatch.choose_impl` does where kernels run, but interpreted."""
        used.append("xla" if impl == "xla" or pallas.call else INTERPRETED)
        return used[-1]

    monkeypatch.setattr(memory_efficient, "choose_impl", on_a_gpu)
    sizes["key_chunk_size"] = 33
    got = run(memory_efficient.memory_efficient(impl="auto", **sizes))
    assert used == ["xla", INTERPRETED]
    assert_trees_close(got, want)
    backward = kernel_blocks.backward
    monkeypatch.setattr(
        kernel_blocks, "backward", lambda *x, **o: jax.tree.map(jnp.zeros_like, backward(*x, **o))
    )
    sizes["key_chunk_size"] = 34  # an op that is not compiled yet
    other = memory_efficient.memory_efficient(impl="auto", **sizes)
    assert not any(np.any(x) for x in jax.device_get(run(other)[1]))


EVERYTHING = np.ones((2, 2), bool)


@pytest.mark.parametrize(
    "op",
    [
        flash.flash(impl=INTERPRETED),
        block_sparse.block_sparse(pattern=EVERYTHING, impl=INTERPRETED),
    ],
    ids=["flash", "block_sparse"],
)
def test_kernels_keep_the_small_gradients_of_float16(op):
    """An equal part of a small cotangent is below what float16 has: 1e-4 / 256."""
    q, k, v, d_out = numbers(4, 1, 256, 1, 16) * np.array([0.01, 1, 1, 1e-4]).reshape(4, 1, 1, 1, 1)
    inputs = [x.astype(np.float16) for x in (d_out, q, k, v)]
    _, (*_, got) = with_gradients(op)(*inputs)
    plain = with_gradients(dense.dense(impl="xla"))
    _, (*_, want) = plain(*(x.astype(np.float32) for x in inputs))
    assert np.abs(np.asarray(got, np.float32) - want).max() < 0.02 * np.abs(want).max()

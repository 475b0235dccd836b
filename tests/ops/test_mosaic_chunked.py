"""The forward pass of chunked attention for Hopper GPUs: interpreted, dispatched and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import local, lsh
from reformax.ops.calls import this_gpu
from reformax.ops.hashing import sorting
from reformax.ops.kernels.mosaic import chunked as kernel
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax import chunked
from reformax.ops.softmax.orders import Chunking, Order, UnsortedInputs
from tests.helpers import lower_for_gpu
from tools import described

ONE_BEFORE = dict(chunk_len=64, n_chunks_before=1, n_chunks_after=0, causal=True)
AROUND = ONE_BEFORE | dict(chunk_len=48, n_chunks_after=1, causal=False)
HASHED = dict(shared_qk=True)
ALONE = dict(shared_qk=False)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "options, n_hashes, packed, length",
    [
        pytest.param(AROUND | ALONE, 0, True, 70, marks=SLOW),
        pytest.param(ONE_BEFORE | ALONE | dict(window=40), 0, False, 130, marks=SLOW),
        pytest.param(ONE_BEFORE | ALONE | dict(logits=Logits(None, 5.0)), 0, False, 64, marks=SLOW),
        pytest.param(ONE_BEFORE | HASHED, 1, False, 192, marks=SLOW),
        (AROUND | HASHED, 2, True, 60),
        pytest.param(ONE_BEFORE | HASHED, 3, True, 150, marks=SLOW),
        pytest.param(ONE_BEFORE | HASHED | dict(count_once=False), 2, False, 130, marks=SLOW),
        pytest.param(
            *(ONE_BEFORE | HASHED | dict(attend_self_if_alone=False), 1, False, 64), marks=SLOW
        ),
    ],
)
def test_interpreted_it_is_the_array_operations(options, n_hashes, packed, length):
    """Outputs, maxima and sums; padding is NaN."""
    chunks = Chunking(length=length, **options)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, 2, size)).astype(jnp.bfloat16) for size in (64, 64, 128))
    k = None if chunks.shared_qk else k
    n_pad = -length % chunks.chunk_len
    ids = order = padded = None
    if packed:
        ids = np.sort(rng.integers(0, 3, (1, length)))[:, ::-1].astype(np.int32)
        padded = np.pad(ids, ((0, 0), (0, n_pad)))
    if n_hashes:
        buckets = rng.integers(0, 6, (1, 2, n_hashes, length)).astype(np.int32)
        order = jax.jit(lambda b: sorting.sort_by_bucket(b, 6, ids, n_pad))(buckets)
    exact = [None if x is None else x.astype(np.float32) for x in (q, k, v)]
    want = jax.jit(chunked.chunked_attention, static_argnums=3)(*exact, chunks, order, ids, None)
    if packed:
        q, k, v = (
            None if x is None else np.where(ids[..., None, None] == 0, np.nan, x).astype(x.dtype)
            for x in (q, k, v)
        )
    x = UnsortedInputs(
        *(x if x is None else jnp.asarray(x) for x in (q, k, v)), order, padded, None
    )
    ours, triton = (
        jax.jit(functools.partial(module.forward, interpret=True), static_argnums=0)(chunks, x)
        for module in (kernel, kernel.triton)
    )
    got, row_max, row_sum = ours
    np.testing.assert_allclose(got.astype(np.float32), want, atol=0.03, rtol=0.01)

    if packed:
        token = ids[:, None] != 0
        row_max, row_sum = (np.where(token, x, 0) for x in (row_max, row_sum))
        triton = triton[0], *(np.where(token, x, 0) for x in triton[1:])
    seen = np.asarray(triton[2]) > 0
    for ours, theirs in ((row_max, triton[1]), (row_sum, triton[2])):
        ours, theirs = (np.where(seen, x, 0) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("n_hashes", [0, 2])
def test_gradients_are_those_of_the_array_operations(n_hashes):
    """The backward pass is that of the kernels for Triton, from this forward pass's results."""
    chunks = Chunking(length=100, **ONE_BEFORE | dict(shared_qk=n_hashes > 0))
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jax.device_put(rng.normal(size=(1, 100, 2, 64)).astype(jnp.bfloat16)) for _ in range(4)
    )
    buckets = rng.integers(0, 6, (1, 2, n_hashes, 100)).astype(np.int32)
    order = sorting.sort_by_bucket(buckets, 6, None, 28) if n_hashes else None
    k = None if n_hashes else k

    def gradients(attend, dtype):
        given = [x.astype(dtype) for x in (q, k, v) if x is not None]
        found, vjp = jax.vjp(attend, *given)
        return vjp(d_out.astype(found.dtype))

    def kernels(q, *kv):
        k = None if n_hashes else kv[0]
        return kernel.attend(chunks, True, UnsortedInputs(q, k, kv[-1], order, None, None))

    def arrays(q, *kv):
        k = None if n_hashes else kv[0]
        return chunked.chunked_attention(q, k, kv[-1], chunks, order, None, None)

    pairs = zip(gradients(kernels, "bfloat16"), gradients(arrays, "float32"), strict=True)
    for got, want in pairs:
        got = np.asarray(got, np.float32)
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["local", pytest.param("lsh", marks=SLOW)])
def test_it_lowers_for_a_gpu(name):
    """Finds, without a GPU and its compiler, what the interpreter accepts and Mosaic does not."""
    chunks = Chunking(1000, 64, 1, 0, causal=True, shared_qk=name == "lsh")
    x = jax.ShapeDtypeStruct((1, 1000, 2, 64), "bfloat16")
    slots = jax.ShapeDtypeStruct((1, 2, 2, 1024), "int32")
    ids = jax.ShapeDtypeStruct((1, 1024), "int32")

    def run(q, k, v, slots, ids):
        k, order = (None, Order(slots)) if name == "lsh" else (k, None)
        return kernel.forward(chunks, UnsortedInputs(q, k, v, order, ids, None))

    assert "mosaic_gpu" in lower_for_gpu(run, x, x, x, slots, ids)


def on_hopper(monkeypatch, is_hopper=True):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    monkeypatch.setattr(this_gpu, "is_hopper", lambda: is_hopper)


OPS = {"local": local.local, "lsh": lsh.lsh}


def traced(op, size=64, dtype="bfloat16", **options):
    x = jax.ShapeDtypeStruct((1, 256, 2, size), dtype)
    k = None if op.shared_qk else x
    run = lambda q, k, v, rng: op(q, k, v, causal=True, rng=rng, **options)  # noqa: E731
    key = jax.eval_shape(lambda: jax.random.key(0))
    return str(jax.make_jaxpr(run)(x, k, x, key))


@pytest.mark.parametrize("name", OPS)
def test_it_is_taken_where_it_is_asked_for_alone(monkeypatch, name):
    make = OPS[name]
    message = "^impl='mosaic' with the backend 'cpu': use impl='auto' or 'xla'"
    with pytest.raises(NotImplementedError, match=message):
        traced(make(impl="mosaic"))
    on_hopper(monkeypatch, is_hopper=False)
    with pytest.raises(NotImplementedError, match="with a GPU that is not of NVIDIA's Hopper gen"):
        traced(make(impl="mosaic"))
    on_hopper(monkeypatch)
    assert "wgmma" in traced(make(impl="mosaic"))
    assert "wgmma" not in traced(make())


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "options, what",
    [
        (dict(dropout=0.1), "dropout=0.1"),
        (dict(size=80), "head size 80, which is no multiple of 64"),
        (dict(size=256), "head size 256, which is above 128"),
        (dict(dtype="float32"), "dtype float32"),
    ],
)
def test_what_it_lacks_is_refused(monkeypatch, name, options, what):
    on_hopper(monkeypatch)
    with pytest.raises(NotImplementedError, match=f"^impl='mosaic' with {what}: use"):
        traced(OPS[name](impl="mosaic"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_both_passes_compile_for_hopper(name, masked, size):
    """The forward pass for Mosaic, the backward pass for Triton."""
    op, gpu = OPS[name](impl="mosaic"), described.GPUS["h200"]

    def loss(q, k, v, ids, rng):
        out = op(q, None if op.shared_qk else k, v, causal=True, segment_ids=ids, rng=rng)
        return jnp.sum(out.astype(jnp.float32))

    try:
        device = described.devices(gpu)[0]
        with described.assumed(gpu):
            whole = jax.sharding.SingleDeviceSharding(device)
            x = jax.ShapeDtypeStruct((1, 1000, 2, size), "bfloat16", sharding=whole)
            ids = jax.ShapeDtypeStruct((1, 1000), "int32", sharding=whole) if masked else None
            key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
            lowered = jax.jit(jax.grad(loss, (0, 2))).lower(x, x, x, ids, key)
            assert "mosaic_gpu" in lowered.as_text()
            lowered.compile(compiler_options=described.OPTIONS)
    except NotImplementedError as error:
        pytest.skip(str(error))

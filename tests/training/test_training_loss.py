"""Chunked cross-entropy equals the plain one, in less memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.task import Task
from reformax.training import loss, metrics
from reformax.training.kernels import cross_entropy
from tests.helpers import assert_trees_close


def problem(length, vocab=11, d=5, batch=3):
    rng = np.random.default_rng(length)
    features = rng.normal(size=(batch, length, d)).astype(np.float32)
    matrix = rng.normal(size=(d, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, (batch, length), np.int32)
    weights = rng.random((batch, length), np.float32)
    weights[0, 0] = 0
    return features, matrix, targets, weights


@jax.jit
def plain(features, matrix, targets, weights):
    log_p = jax.nn.log_softmax(features @ matrix)
    nats = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    correct = (log_p.argmax(-1) == targets) * weights
    return (nats * weights).sum(), weights.sum(), correct.sum()


def product(matrix, features):
    return features @ matrix


def chunked(features, matrix, targets, weights, chunk_len):
    return loss.cross_entropy(product, matrix, features, targets, weights, chunk_len)


@pytest.mark.parametrize("length, chunk_len", [(1, 1), (1, 5), (13, 5), (13, 13)])
def test_sums_and_gradients_equal_the_plain_ones(length, chunk_len):
    args = problem(length)

    @jax.jit
    def both(*args):
        sums = chunked(*args, chunk_len), plain(*args)
        grads = (
            jax.grad(lambda *x: 3 * chunked(*x, chunk_len).loss, (0, 1, 3))(*args),
            jax.grad(lambda *x: 3 * plain(*x)[0], (0, 1, 3))(*args),
        )
        return sums, grads

    (sums, expected_sums), (grads, expected_grads) = both(*args)
    (nats, weight), correct = sums.metrics["nats"], sums.metrics["accuracy"]
    np.testing.assert_allclose((nats, weight, correct.sum), expected_sums, rtol=1e-5)
    assert sums.loss == nats and correct.weight == weight
    assert_trees_close(grads, expected_grads)


def test_z_loss_adds_the_squared_logarithm_of_the_sum():
    """To the loss and its gradients, and to no metric."""
    features, matrix, targets, weights = args = problem(13)

    def with_z(features, matrix, targets, weights):
        lse = jax.nn.logsumexp(features @ matrix, axis=-1)
        return plain(features, matrix, targets, weights)[0] + 0.3 * (weights * lse**2).sum()

    def in_chunks(features, matrix, targets, weights):
        return loss.cross_entropy(product, matrix, features, targets, weights, 5, z_loss=0.3)

    @jax.jit
    def both(*args):
        values = in_chunks(*args).loss, with_z(*args)
        of = (0, 1, 3)
        grads = jax.grad(lambda *x: in_chunks(*x).loss, of)(*args), jax.grad(with_z, of)(*args)
        return values, grads, in_chunks(*args).metrics["nats"][0]

    (got, want), grads, nats = both(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(nats, plain(*args)[0], rtol=1e-5)
    assert_trees_close(*grads)


@pytest.mark.parametrize("label_smoothing, z_loss", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_computes_what_array_operations_compute(
    dtype, label_smoothing, z_loss, monkeypatch
):
    """Blocks of the vocabulary, the last one partly behind its end; weights of 0; far logits."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 16)
    features, matrix, targets, weights = problem(13, vocab=37)
    features = (10 * features).astype(dtype)

    def logits_fn(matrix, x, dtype="float32"):
        return (x @ matrix.astype(x.dtype)).astype(dtype)

    def both(impl):
        def loss_of(matrix, features):
            args = matrix, features, targets, weights, 5, label_smoothing, impl
            sums = loss.cross_entropy(logits_fn, *args, z_loss)
            return sums.loss, sums

        gradient = jax.value_and_grad(loss_of, (0, 1), has_aux=True)
        (_, sums), grads = jax.jit(gradient)(matrix, features)
        return sums, grads

    (got, got_grads), (want, want_grads) = both(INTERPRETED), both("xla")
    assert got.metrics.keys() == want.metrics.keys()
    np.testing.assert_allclose(*map(jax.tree.leaves, (got, want)), rtol=1e-5)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(got_grads, want_grads, strict=True):
        scale = np.abs(np.asarray(other, np.float32)).max()
        difference = np.asarray(one, np.float32) - np.asarray(other, np.float32)
        assert np.abs(difference).max() <= tolerance * scale


def test_derivatives_of_a_second_order_equal_the_plain_ones():
    """Forward mode, and both modes over the gradient."""
    features, matrix, *others = problem(13)
    along = problem(13)[1:2][0] * 0.3 + 1

    def derivatives(run):
        def loss_of(matrix):
            return run(features, matrix, *others)

        @jax.jit
        def all_three(matrix):
            slope = jax.jvp(loss_of, (matrix,), (along,))[1]
            forward = jax.jvp(jax.grad(loss_of), (matrix,), (along,))[1]
            backward = jax.grad(lambda m: jnp.vdot(jax.grad(loss_of)(m), along))(matrix)
            return slope, forward, backward

        return all_three(matrix)

    got = derivatives(lambda *args: chunked(*args, 5).loss)
    want = derivatives(lambda *args: plain(*args)[0])
    assert_trees_close(got, want)
    assert all(np.any(x) for x in jax.device_get(got))


def test_the_logits_may_be_of_masks_and_tables_too():
    """Integers have no gradient, and what is not read has one of zeros."""
    features, matrix, targets, weights = problem(13)
    hidden, table = jnp.arange(11) == 4, jnp.arange(11)[::-1]
    targets = jnp.where(targets == 4, 3, targets)

    def ours(features, matrix, hidden, table):
        def logits_fn(params, f):
            matrix, hidden, table, _ = params
            return jnp.where(hidden, -1e9, (f @ matrix)[..., table])

        params = matrix, hidden, table, 2 * matrix
        return loss.cross_entropy(logits_fn, params, features, targets, weights, 5).loss

    def want(features, matrix, hidden, table):
        logits = jnp.where(hidden, -1e9, (features @ matrix)[..., table])
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return (nats * weights).sum()

    inputs = (features, matrix, hidden, table)
    expected = jax.grad(want, (0, 1))(*inputs)
    for function in (jax.checkpoint(ours), jax.jit(ours)):
        got = jax.jit(jax.grad(function, (0, 1)))(*inputs)
        assert_trees_close(got, expected)


def test_of_equals_the_first_is_the_prediction():
    features, matrix, targets, weights = problem(13)
    sums = chunked(features, 0 * matrix, targets, weights, 5)
    correct = sums.metrics["accuracy"].sum
    np.testing.assert_allclose(correct, (weights * (targets == 0)).sum(), rtol=1e-6)


def test_nothing_is_lost_of_nothing():
    features, matrix, targets, weights = (
        x[:, :0] if x.ndim > 2 or i > 1 else x for i, x in enumerate(problem(3))
    )
    assert chunked(features, matrix, targets, weights, None) == loss.Sums(0, metrics.no_sums())


def test_chunks_bound_the_memory_of_the_gradient():
    args = problem(1024, vocab=256)

    def temp(chunk_len):
        gradient = jax.grad(lambda f, m: chunked(f, m, *args[2:], chunk_len).loss, (0, 1))
        compiled = jax.jit(gradient).lower(*args[:2]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(32) < temp(1024) / 4


def test_bad_chunk_len_is_told():
    with pytest.raises(ValueError, match="loss_chunk_len=0"):
        chunked(*problem(7), 0)


def test_bits_per_dim():
    assert loss.bits_per_dim(3 * math.log(2), 2) == pytest.approx(1.5)
    assert math.isnan(loss.bits_per_dim(1.0, 0.0))


def test_bits_per_byte_are_of_the_bytes_of_the_split():
    sizes = {"train": (10, 20), "valid": (10, 50)}
    pieces = Task(
        "pieces",
        9,
        None,
        None,
        n_targets=lambda split: sizes[split][0],
        vocabulary=object(),
        n_bytes=lambda split: sizes[split][1],
    )
    found = loss.bits_of(pieces, "valid", 2.0)
    assert found == {"bits_per_token": 2.0, "bits_per_byte": pytest.approx(0.4)}


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
@pytest.mark.parametrize("chunk_len", [5, 13])
def test_smoothing_is_the_cross_entropy_to_the_smoothed_targets(smoothing, chunk_len):
    features, matrix, targets, weights = args = problem(13)

    def smoothed(features, matrix):
        p = (1 - smoothing) * jax.nn.one_hot(targets, 11) + smoothing / 11
        nats = -(p * jax.nn.log_softmax(features @ matrix)).sum(-1)
        return (nats * weights).sum()

    def ours(features, matrix):
        return loss.cross_entropy(product, matrix, features, targets, weights, chunk_len, smoothing)

    @jax.jit
    def gradients(*args):
        of_nats = jax.grad(lambda *a: ours(*a).metrics["nats"].sum, (0, 1))(*args)
        return of_nats, jax.grad(lambda *a: ours(*a).loss, (0, 1))(*args)

    sums = jax.jit(ours)(features, matrix)
    want, expected = jax.jit(jax.value_and_grad(smoothed, (0, 1)))(features, matrix)
    np.testing.assert_allclose(sums.loss, want, rtol=1e-5)
    (nats, weight), correct = sums.metrics["nats"], sums.metrics["accuracy"].sum  # not smoothed
    np.testing.assert_allclose((nats, weight, correct), plain(*args), rtol=1e-5)
    of_nats, grads = gradients(features, matrix)
    assert not any(np.any(g) for g in jax.device_get(of_nats))
    assert_trees_close(grads, expected)


def test_a_vocabulary_of_32000_is_never_in_memory_for_all_tokens():
    """Even if the chunks allow it: the logits of this batch's 8,192 tokens would be 1 GB."""
    batch, length, vocab, d = 64, 128, 32_000, 8
    shapes = [(batch, length, d), (d, vocab), (batch, length), (batch, length)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    args = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]

    def smoothed(features, matrix, targets, weights):
        return loss.cross_entropy(product, matrix, features, targets, weights, 1024, 0.1).loss

    compiled = jax.jit(jax.grad(smoothed, (0, 1))).lower(*args).compile()
    largest = batch * length * vocab * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * largest
    assert f"f32[{batch},{length},{vocab}]" not in compiled.as_text()


def test_the_kernel_rounds_the_logits_of_the_gradient_alone():
    """A loss without a gradient, as in evaluation, reads float32."""
    features, matrix, *others = problem(13)
    features, asked = features.astype("bfloat16"), []

    def logits_fn(matrix, x, dtype="float32"):
        asked.append(dtype)
        return jnp.matmul(x, matrix.astype(x.dtype), preferred_element_type=dtype)

    def loss_of(matrix):
        args = logits_fn, matrix, features, *others
        return loss.cross_entropy(*args, impl=INTERPRETED).loss

    scored = loss_of(matrix)
    assert set(asked) == {"float32"}
    rounded, gradient = jax.value_and_grad(loss_of)(matrix)
    assert asked[-1] == "bfloat16"
    logits = np.asarray(features, np.float64) @ np.asarray(matrix.astype("bfloat16"), np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets, weights = others
    weight = np.asarray(weights, np.float64)
    want = -np.sum(np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0]) * weight)
    np.testing.assert_allclose(scored, want, rtol=1e-6)
    np.testing.assert_allclose(rounded, want, rtol=2**-9)
    d_logits = (p - np.eye(p.shape[-1])[targets]) * weight[..., None]
    slope = np.einsum("btd,btv->dv", np.asarray(features, np.float64), d_logits)
    assert np.abs(gradient - slope).max() <= 0.02 * np.abs(slope).max()


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
def test_no_more_logits_without_a_gradient_than_in_array_operations(impl, monkeypatch):
    """They are float32, and with a gradient bfloat16 of the kernel: four times as many."""
    features, matrix, *others = problem(31, vocab=64, batch=2)
    features, asked = features.astype("bfloat16"), []
    monkeypatch.setattr(loss, "max_logits", lambda: 2 * 64 * 3)

    def logits_fn(matrix, x, dtype="float32"):
        logits = jnp.matmul(x, matrix.astype(x.dtype), preferred_element_type=dtype)
        asked.append(logits.shape[1])
        return logits

    def loss_of(matrix):
        return loss.cross_entropy(logits_fn, matrix, features, *others, impl=impl).loss

    scored = jax.jit(loss_of)(matrix)
    assert max(asked) <= 3
    asked.clear()
    found, _ = jax.jit(jax.value_and_grad(loss_of))(matrix)
    assert max(asked) == (11 if impl == INTERPRETED else 3)
    np.testing.assert_allclose(scored, found, rtol=2**-8)


@pytest.mark.parametrize(
    "size, dtype, kernels", [(4096, "bfloat16", 1), (4095, "bfloat16", 0), (4096, "float32", 0)]
)
def test_auto_takes_the_kernel_for_many_ids_in_bfloat16(size, dtype, kernels, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    shapes = ((2, 3, 8), dtype), ((8, size), "float32"), ((2, 3), "int32"), ((2, 3), "float32")
    features, matrix, *others = (jax.ShapeDtypeStruct(*x) for x in shapes)

    def logits_fn(matrix, x, dtype="float32"):
        return jnp.matmul(x, matrix.astype(x.dtype), preferred_element_type=dtype)

    def loss_of(matrix, features, *others):
        return loss.cross_entropy(logits_fn, matrix, features, *others).loss

    program = str(jax.make_jaxpr(jax.grad(loss_of))(matrix, features, *others))
    assert program.count("pallas_call[") == kernels


ON_GPU = jax.default_backend() == "gpu"
# Rows, vocabulary, dtypes of logits and gradient, label smoothing, size of the logits.
ROWS = [
    (64, 50_257, "bfloat16", "bfloat16", 0.0, 4.0),
    (64, 50_304, "bfloat16", "bfloat16", 0.1, 4.0),
    (33, 1001, "float32", "bfloat16", 0.1, 4.0),
    (17, 1, "float32", "float32", 0.0, 4.0),
    (64, 50_257, "float32", "float32", 0.1, 4.0),
    (64, 32_000, "bfloat16", "bfloat16", 0.0, 1e4),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS if ON_GPU else [(5, 37, *row[2:]) for row in ROWS])
def test_the_kernels_rows_equal_those_of_float64(case):
    """Compiled on an NVIDIA GPU; elsewhere few rows, interpreted. Odd rows have ties."""
    n, size, dtype, to, smoothing, scale = case
    rng = np.random.default_rng(size)
    logits = scale * rng.normal(size=(n, size))
    tied = rng.integers(0, size, (n // 2, 3))
    np.put_along_axis(logits[1::2], tied, logits[1::2].max(1, keepdims=True), axis=1)
    logits = jnp.asarray(logits, dtype)
    targets = rng.integers(0, size, n).astype(np.int32)
    targets[:2] = 0, size - 1
    weights = (rng.random(n) * (rng.random(n) < 0.8)).astype(np.float32)
    run = functools.partial(cross_entropy.differentiate, interpret=not ON_GPU)
    run = jax.jit(run, static_argnums=(3, 4, 5))
    found = run(logits, targets, weights, smoothing, 0.0, to)
    x = np.asarray(logits, np.float64)
    total = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    d = np.exp(x - total[:, None]) - smoothing / size
    d[np.arange(n), targets] -= 1 - smoothing
    np.testing.assert_allclose(found.lse, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.target, x[np.arange(n), targets])
    np.testing.assert_array_equal(found.best, x.argmax(1))
    if smoothing:
        assert np.all(np.abs(found.total - x.sum(1)) <= 1e-5 * np.abs(x).sum(1))
    got, want = np.asarray(found.d_logits, np.float64), d * weights[:, None]
    assert np.abs(got - want).max() <= (5e-3 if to == "bfloat16" else 2e-5)

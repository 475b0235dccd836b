"""Means by a linear recurrence, and their kernels interpreted, against a loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import recurrence as kernel
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.means import mean, mean_of_all
from tests.helpers import assert_trees_close, with_gradients, with_x64
from tests.ops import recurrence_oracle
from tests.ops.test_recurrence import draw, runs

KERNEL = dict(impl=INTERPRETED)


def positive(kind, length, **options):
    """`draw`, with queries and keys above 0, whose means are of weights above 0."""
    q, k, *others = draw(kind, length, batch=1, n_heads=1, **options)
    return [abs(q) + 0.125, abs(k) + 0.125, *others[:2]]


def oracle(q, k, v, log_decay, segment_ids, d_out):
    """The quotient of a recurrence of the values and one of ones, and its gradients."""
    ones = np.concatenate([v, np.ones((*v.shape[:3], 1))], axis=-1)
    run = functools.partial(recurrence_oracle.recurrence, q, k, ones, log_decay, None, segment_ids)
    sums = run(np.zeros_like(ones))[0]
    total = sums[..., -1:]
    out = sums[..., :-1] / total
    d_total = -np.sum(d_out * out, axis=-1, keepdims=True)
    gradients = run(np.concatenate([d_out, d_total], axis=-1) / total)[1]
    return out, (*gradients[:2], gradients[2][..., :-1], gradients[3])


def compare(inputs, dtype, tolerance, segment_ids=None, **options):
    d_out = np.random.default_rng(9).normal(size=inputs[2].shape)
    d_out = d_out.astype(dtype).astype(np.float64)
    run = with_gradients(functools.partial(mean, segment_ids=segment_ids, **options))
    got = run(d_out.astype(dtype), *jax.tree.map(lambda x: jnp.asarray(x, dtype), inputs))
    assert_trees_close(got, oracle(*inputs, segment_ids, d_out), tolerance)


@pytest.mark.parametrize("kind", ["linear", pytest.param("head", marks=pytest.mark.slow)])
def test_array_operations(kind):
    compare(positive(kind, 29), np.float32, 2e-6, runs(29, 1), chunk_len=4)


@pytest.mark.parametrize(
    "kind, size, packed",
    [
        ("head", 5, True),
        pytest.param("linear", 5, False, marks=pytest.mark.slow),
        pytest.param("head", 160, True, marks=pytest.mark.slow),  # three blocks, one not full
    ],
)
def test_kernels(kind, size, packed):
    inputs = positive(kind, 150, size=size)
    compare(inputs, np.float32, 4e-6, runs(150, 1) if packed else None, **KERNEL)


@pytest.mark.slow
def test_kernels_in_bfloat16():
    inputs = positive("linear", 150, size=16, d_v=8, dtype=jnp.bfloat16)
    compare(inputs, jnp.bfloat16, 2e-2, runs(150, 1), **KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_groups_of_chunks_are_one_sequence(packed):
    """Three groups of two chunks, of which there are five, against one group."""
    inputs = positive("head", 300, size=70, d_v=66, least=-0.02)
    x = RecurrenceInputs(*jax.tree.map(np.float32, inputs), None)
    ids = np.sort(runs(300, 1), axis=1) if packed else None
    d_sums, d_total = (np.random.default_rng(3).normal(size=s) for s in (x.v.shape, (1, 300, 1)))

    @functools.partial(jax.jit, static_argnums=0)
    def run(groups):
        options = dict(interpret=True, groups=groups)
        results, kept = kernel.means(x, ids, **options)
        return results, kernel.means_backward(x, ids, kept, d_sums, d_total, **options)

    assert_trees_close(run(3), run(1), 2e-6)


@pytest.mark.parametrize(
    "dtype, tolerance", [(np.float32, 2e-6), (jnp.bfloat16, 2e-2), (jnp.float16, 4e-3)]
)
def test_means_over_all_positions(dtype, tolerance):
    """Against the weights of all pairs in float64; a query of zeros has no mean."""
    q, k, v = positive("linear", 40, dtype=dtype)[:3]
    q[0, 7] = 0
    d_out = np.random.default_rng(9).normal(size=v.shape).astype(dtype).astype(np.float64)

    def attend(q, k, v):
        weights = jnp.einsum("btnh,bsnh->bnts", q, k)
        total = weights.sum(axis=-1, keepdims=True)
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
        return jnp.einsum("bnts,bsnv->btnv", weights, v)

    with with_x64():
        want = jax.tree.map(np.asarray, with_gradients(attend)(d_out, q, k, v))
    arrays = [jnp.asarray(x, dtype) for x in (d_out, q, k, v)]
    assert_trees_close(with_gradients(mean_of_all)(*arrays), want, tolerance)


@pytest.mark.parametrize(
    "mean",
    [
        mean_of_all,
        functools.partial(mean, impl="xla"),
        pytest.param(functools.partial(mean, **KERNEL), marks=pytest.mark.slow),
    ],
    ids=["of all", "causal", "causal in kernels"],
)
def test_means_over_many_positions_in_float16(mean):
    """Sums that float16 does not hold, and gradients that are too small after their division."""
    q, k, v = (np.float16(x) for x in positive("linear", 3000)[:3])
    d_out = 256 * np.random.default_rng(9).normal(size=v.shape)
    arrays = [np.float16(x) for x in (d_out, q, 64 * k, v + 1)]
    want = jax.tree.leaves(with_gradients(mean)(*jax.tree.map(np.float32, arrays)))
    got = jax.tree.leaves(with_gradients(mean)(*arrays))
    largest = [np.abs(x).max() for x in want]
    got, want = ([np.float32(x) / y for x, y in zip(a, largest, strict=True)] for a in (got, want))
    assert_trees_close(got, want, 2e-2)


@pytest.mark.parametrize("impl", ["xla", pytest.param(KERNEL["impl"], marks=pytest.mark.slow)])
def test_weights_that_vanish(impl):
    q, k, v = jax.tree.map(np.float32, positive("linear", 9)[:3])
    run = with_gradients(functools.partial(mean, impl=impl))
    out, gradients = run(np.ones_like(v), 1e-12 * q, 1e-12 * k, v)
    assert not np.any(out)
    assert all(np.isfinite(x).all() for x in gradients)

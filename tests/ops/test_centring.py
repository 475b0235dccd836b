"""Vectors less a mean: sums by blocks, at any length, of one segment alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.hashing import centring
from tests.helpers import with_x64

sums_before = jax.jit(centring.sums_before)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) + 2


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1001, 128 * 128 + 3])
@pytest.mark.parametrize("n_segments", [1, 9, 2**14])
def test_sums_by_blocks_are_cumulative_sums(length, n_segments):
    """Of segments of many blocks, and of as many as positions."""
    x = numbers(2, length, 3).astype(jnp.bfloat16)
    ids = np.sort(np.random.default_rng(1).integers(0, n_segments, (2, length)), axis=1)
    sums = np.cumsum(x.astype(np.float64), axis=1) - x.astype(np.float64)
    begins = np.diff(ids, prepend=-1) != 0
    first = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    want = sums - np.take_along_axis(sums, first[..., None], axis=1)
    got = sums_before(x, ids)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)
    with with_x64():
        got = sums_before(x.astype(np.float64), ids)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9)


def test_sums_of_a_segment_read_no_other():
    """Not where they are large, in a block or between blocks, either."""
    x, ids = numbers(1, 600, 2).astype(np.float32), np.repeat([[1, 2, 3]], [150, 300, 150], axis=1)
    want = sums_before(x, ids)
    for hidden in (1, 2):
        got = sums_before(np.where(ids[..., None] == hidden, np.float32(1e18), x), ids)
        others = np.ravel(ids) != hidden
        np.testing.assert_array_equal(got[:, others], want[:, others])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_a_causal_hash_reads_a_key_less_the_mean_of_those_before(packed, dtype):
    rng = np.random.default_rng(1)
    x, ids = rng.normal(size=(2, 300, 3, 4)) + 2, rng.integers(0, 4, (2, 300))
    x, segment_ids = x.astype(dtype), ids if packed else np.ones_like(ids)
    exact = x.astype(np.float64)
    want = exact.copy()
    for row, i in np.ndindex(ids.shape):
        before = exact[row, :i][segment_ids[row, :i] == segment_ids[row, i]]
        want[row, i] -= before.mean(axis=0) if len(before) else 0
    got = jax.jit(lambda x: centring.centred(x, ids if packed else None, True))(x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_the_mean_of_all(packed):
    x, ids = numbers(2, 40, 3, 4), np.random.default_rng(0).integers(0, 4, (2, 40))
    segment_ids = ids if packed else np.ones_like(ids)
    want = x.copy()
    for row, number in np.ndindex(2, 4):
        in_segment = segment_ids[row] == number
        if in_segment.any():
            want[row, in_segment] -= want[row, in_segment].mean(axis=0)
    got = jax.jit(lambda x: centring.centred(x, ids if packed else None, False))(
        x.astype(np.float32)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)

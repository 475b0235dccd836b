"""The dropout layer: its rate, its scale, its rng, and the axes along which a mask is shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers.dropout import APART, dropout

RNG = jax.random.PRNGKey(1)


@functools.cache
def compiled(rate, **options):
    layer = layers.Dropout(rate, **options)
    return jax.jit(lambda x, rng: layer.apply((), x, rng=rng))


def drop(x, rate, rng=RNG, **options):
    return np.asarray(compiled(rate, **options)(x, rng))


@pytest.mark.parametrize("shape", [(4000,), (40, 100), (4, 5, 10, 20)], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_zeros_at_the_rate_and_scales_the_others(rate, shape):
    out = drop(np.full(shape, 3.0, np.float32), rate)
    rounded = round(rate * 2**16) / 2**16
    np.testing.assert_allclose(np.unique(out), [0, 3 / (1 - rounded)], rtol=1e-6)
    assert np.mean(out == 0) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / 4000))


def test_no_axis_repeats_anothers_mask():
    out = drop(np.ones((6, 7, 8, 200), np.float32), 0.5).reshape(-1, 200) != 0
    agreement = np.mean(out[:, None] == out[None], axis=-1)[~np.eye(len(out), dtype=bool)]
    # 112,560 comparisons of 200 coins each: 6 standard deviations of 0.035.
    assert np.abs(agreement - 0.5).max() < 6 * 0.035


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("of", ["columns", "positions"])
def test_what_is_dropped_is_independent(of, rate):
    """Also in two columns that share a hash."""
    some = [0, 1, 2, 3, 254, 255, APART, APART + 1, APART + 2, 511, 512, 513, 599, 512 + APART]
    draws, size = 10_000, max(some) + 1
    zeros = (
        drop(np.ones((draws, size) if of == "columns" else (size, draws), np.float32), rate) == 0
    )
    zeros = (zeros if of == "columns" else zeros.T)[:, some]
    # Means over the draws, in standard deviations of what they should be.
    means = (zeros.mean(axis=0) - rate) * np.sqrt(draws / (rate * (1 - rate)))
    products = np.corrcoef(zeros, rowvar=False)[~np.eye(len(some), dtype=bool)] * np.sqrt(draws)
    assert np.abs(means).max() < 5 and np.abs(products).max() < 5


def test_the_same_rng_draws_the_same_mask():
    x = np.ones((20, 30), np.float32)
    np.testing.assert_array_equal(drop(x, 0.3), drop(x, 0.3))
    np.testing.assert_array_equal(drop(x, 0.3), layers.Dropout(0.3).apply((), x, rng=RNG))
    assert not np.array_equal(drop(x, 0.3), drop(x, 0.3, jax.random.PRNGKey(2)))


@pytest.mark.parametrize("axes", [(0,), (1,), (-2,), (0, 1), (2, 0), (0, 1, 2)], ids=str)
def test_shared_axes(axes):
    out = drop(np.ones((5, 6, 70), np.float32), 0.4, shared_axes=axes)
    first = tuple(slice(1) if a in axes or a - 3 in axes else slice(None) for a in range(3))
    np.testing.assert_array_equal(out, np.broadcast_to(out[first], out.shape))
    for axis in {0, 1, 2} - {a % 3 for a in axes}:
        assert np.any(np.diff(out, axis=axis))


def test_a_part_of_a_sequence_has_that_part_of_its_mask():
    x = np.ones((2, 3, 10, 40), np.float32)
    part_of = jax.jit(dropout, static_argnums=1)
    whole = part_of(x, 0.5, RNG)
    for start, size in ((0, 4), (4, 5), (9, 1)):
        part = part_of(x[..., start : start + size, :], 0.5, RNG, start=start)
        np.testing.assert_array_equal(part, whole[..., start : start + size, :])


def test_off_at_evaluation_and_at_rate_zero():
    x = np.ones((3, 4), np.float32)
    assert layers.Dropout(0.5, mode="eval").apply((), x) is x
    assert layers.Dropout(0.0).apply((), x) is x


def test_keeps_the_dtype():
    assert drop(jnp.ones((3, 4), jnp.bfloat16), 0.5).dtype == jnp.bfloat16


def test_errors():
    for rate in (1.0, -0.5):
        with pytest.raises(ValueError, match=r"^rate is -?[\d.]+: expected a rate in \[0, 1\)$"):
            layers.Dropout(rate)
    with pytest.raises(ValueError, match="^mode is 'predict': expected 'train' or 'eval'$"):
        layers.Dropout(mode="predict")

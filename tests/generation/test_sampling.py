"""The distribution of draws, against NumPy and against counts of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.generation import Sampler

# A sampler's numbers are arguments of these programs, as they are in a step of decoding.
draw, logits_of = jax.jit(Sampler.draw), jax.jit(Sampler.logits)
SETTINGS = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 3, 1.0),
    (1.0, 0, 0.6),
    (0.7, 5, 0.8),
    (1.3, 1, 1.0),
    (1.0, 99, 0.05),
]


def wanted(logits, temperature, top_k, top_p):
    """Probabilities by the definition: temperature, then the top k, then the nucleus."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    kept = order[: top_k or None]
    p = np.exp(scaled[kept] - scaled[kept].max())
    p /= p.sum()
    n = 1 + np.searchsorted(np.cumsum(p), top_p) if top_p < 1 else len(p)
    kept, p = kept[:n], p[:n]
    out = np.zeros_like(scaled)
    out[kept] = p / p.sum()
    return out


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_probabilities(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(6, 11)).astype(np.float32) * 2
    got = np.asarray(logits_of(Sampler(temperature, top_k, top_p).arrays(), logits), np.float64)
    got = np.exp(got - got.max(axis=-1, keepdims=True))
    for row, one in zip(got / got.sum(axis=-1, keepdims=True), logits, strict=True):
        np.testing.assert_allclose(row, wanted(one, temperature, top_k, top_p), atol=1e-5)


def test_draws_have_these_probabilities():
    logits = np.random.default_rng(1).normal(size=9).astype(np.float32) * 2
    n = 20_000
    keys, rows = jax.random.split(jax.random.PRNGKey(0), n), np.tile(logits, (n, 1))
    for setting in SETTINGS[:5]:
        drawn = draw(Sampler(*setting), rows, keys)
        p = wanted(logits, *setting)
        share = np.bincount(drawn, minlength=9) / n
        assert np.all(np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / n) + 1e-12)


def test_temperature_0_is_the_argmax_whatever_the_rest():
    logits = np.random.default_rng(2).normal(size=(50, 9)).astype(np.float32)
    keys = jax.random.split(jax.random.PRNGKey(0), 50)
    for top_k, top_p in ((0, 1.0), (4, 0.3)):
        drawn = draw(Sampler(0.0, top_k, top_p), logits, keys)
        np.testing.assert_array_equal(drawn, logits.argmax(axis=-1))


def test_equal_logits_are_left_in_together():
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 0.0]], np.float32)
    kept = np.isfinite(logits_of(Sampler(top_k=2), logits))
    assert kept.tolist() == [[False, True, True, True, False]]
    for top_p in (1e-6, 1e-50):  # the latter is 0 in float32
        assert np.isfinite(logits_of(Sampler(top_p=top_p), logits)).sum() == 3


def test_the_top_k_stay_where_the_first_has_all_of_the_probability():
    logits = np.array([[0.0, -30.0, -31.0, -32.0]], np.float32)
    kept = np.isfinite(logits_of(Sampler(top_k=3, top_p=1.0), logits))
    assert kept.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=-1.0), "temperature is -1.0: expected a number of at least 0"),
        (dict(temperature=float("nan")), "temperature is nan: expected a number of at least 0"),
        (dict(top_k=-1), "top_k is -1: expected at least 0"),
        (dict(top_k=2**31), "top_k is 2147483648: expected at least 0 and at most"),
        (dict(top_p=0.0), "top_p is 0.0: expected a number above 0"),
        (dict(top_p=1.5), "top_p is 1.5: expected a number above 0"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError) as error:
        Sampler(**options).check()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("temperature", [1e-30, 2e-38, 1e-42, 1e-300])
def test_a_tiny_temperature_takes_the_most_probable(temperature):
    logits = np.array([[1.0, 29.0, 30.0, -2.0], [-1e4, 5.0, 0.0, -3.0]], np.float32)
    keys = jax.random.split(jax.random.key(0), 2)
    sampler = Sampler(jnp.float32(temperature), jnp.int32(0), jnp.float32(1.0))
    assert draw(sampler, logits, keys).tolist() == [2, 1]
    assert not np.isnan(logits_of(sampler, logits)).any()

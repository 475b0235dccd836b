"""The kernels of Performer's features, interpreted, against the equations in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import performer
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import random_features as kernel
from tests.helpers import assert_trees_close, with_gradients

EPSILON = 0.02


def draw(length=70, size=20, n_features=40, seed=0):
    """Vectors and a cotangent of features, in bfloat16, directions, and what is subtracted."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1, length, 2, size))
    d = rng.normal(size=(1, length, 2, n_features))
    directions = rng.normal(size=(n_features, size)).astype(np.float32)
    relative_to = rng.normal(size=(1, length, 2)).astype(np.float32) + 4
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(d, jnp.bfloat16), directions, relative_to


def oracle(x, d, directions, relative_to):
    """`exp(E - r) + epsilon exp(max(E) - r)` of exponents E, and its gradient with r constant."""
    x, d = np.float64(x), np.float64(d)
    size = x.shape[-1]
    exponents = x @ (directions * size**-0.25).T - (x**2).sum(-1, keepdims=True) * size**-0.5 / 2
    row_max = exponents.max(-1)
    reference = (row_max if relative_to is None else np.float64(relative_to))[..., None]
    offset = EPSILON * np.exp(row_max[..., None] - reference)
    d_exponents = d * np.exp(exponents - reference)
    at_max = exponents == row_max[..., None]
    d_exponents = d_exponents + at_max * offset * d.sum(-1, keepdims=True)
    dx = d_exponents @ (directions * size**-0.25)
    dx = dx - x * size**-0.5 * d_exponents.sum(-1, keepdims=True)
    return row_max, np.exp(exponents - reference) + offset, dx


@pytest.mark.parametrize("relative", [True, False])
def test_the_equations(relative):
    x, d, directions, relative_to = draw()
    relative_to = relative_to if relative else None

    def features(x):
        return kernel.features(True, kernel.FeatureArrays(x, directions, EPSILON, relative_to))

    out, (dx,) = with_gradients(features)(d, x)
    row_max, *want = oracle(x, d, directions, relative_to)
    assert_trees_close((out, dx), tuple(want), 1e-2)
    np.testing.assert_allclose(kernel.scales(x, directions, True), row_max, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_attention_by_features_is_that_of_array_operations():
    """The array operations are in float32."""
    rng = np.random.default_rng(1)
    q, k, v, d = (
        jax.device_put(rng.normal(size=(1, 100, 2, 24)).astype(jnp.bfloat16)) for _ in range(4)
    )
    segment_ids = np.repeat([[1, 2]], [45, 55], axis=1)

    def run(impl, dtype):
        op = performer.performer(n_features=144, impl=impl)
        attend = functools.partial(op, causal=True, segment_ids=segment_ids)
        return with_gradients(attend)(*(x.astype(dtype) for x in (d, q, k, v)))

    got, want = run(INTERPRETED, jnp.bfloat16), run("xla", jnp.float32)
    got, want = ((np.float32(out), *rest) for out, rest in (got, want))
    assert_trees_close(got, want, 2e-2)

"""The kernel of angular hashing, interpreted, against the array operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.parts import hashing


@pytest.mark.parametrize(
    "length, size, factors, n_rounds",
    [(37, 8, (4,), 3), (150, 20, (6, 10), 2), (20, 64, (300,), 1)],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_same_buckets(length, size, factors, n_rounds, dtype):
    """More vectors and more directions than a program takes at a time; and a vector of zeros."""
    vectors = np.random.default_rng(0).normal(size=(2, length, 3, size)).astype(dtype)
    vectors[0, 3] = 0

    @jax.jit
    def buckets(vectors):
        rotations = hashing.draw_rotations(vectors, factors, n_rounds, jax.random.key(0))
        args = rotations, vectors, factors
        return hashing.hash_by(*args), hashing.hash_by(*args, "pallas_interpret")

    np.testing.assert_array_equal(*buckets(vectors))

"""Several products of one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers.matrices import products


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("sizes", [(3,), (3, 5), (4, 4, 2)])
def test_products_and_their_derivatives_are_the_plain_ones(sizes):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 7, 6)), jnp.float32)
    matrices = [jnp.asarray(rng.normal(size=(6, n)), jnp.float32) for n in sizes]

    def loss(multiply):
        return lambda x, matrices: sum(jnp.sum(jnp.sin(y)) for y in multiply(x, matrices))

    def plain(x, matrices):
        return [x @ w for w in matrices]

    def first_and_second(multiply):
        def gradient(x, matrices):
            return jax.grad(loss(multiply), (0, 1))(x, matrices)

        def norm(x, matrices):
            return sum(jnp.sum(d**2) for d in jax.tree.leaves(gradient(x, matrices)))

        both = jax.jit(lambda *a: (multiply(*a), gradient(*a), jax.grad(norm, (0, 1))(*a)))
        return both(x, matrices)

    got, want = first_and_second(products), first_and_second(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.usefixtures("on_gpu")
def test_a_gpus_compiler_does_not_know_that_the_products_read_one_array():
    x, w = jnp.zeros((5, 4)), jnp.zeros((4, 3))
    text = jax.jit(lambda *a: products(*a)).lower(x, [w, w, w]).as_text()
    assert text.count("optimization_barrier") == 2


def test_products_are_left_to_a_cpus_compiler():
    x, w = jnp.zeros((5, 4)), jnp.zeros((4, 3))
    assert (
        "optimization_barrier" not in jax.jit(lambda *a: products(*a)).lower(x, [w, w, w]).as_text()
    )

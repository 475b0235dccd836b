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
    x = jax.device_put(rng.normal(size=(2, 7, 6)).astype(jnp.float32))
    matrices = [jax.device_put(rng.normal(size=(6, n)).astype(jnp.float32)) for n in sizes]

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
def test_products_have_a_forward_mode():
    keys = jax.random.split(jax.random.key(0), 6)
    x, d_x = (jax.random.normal(key, (7, 6)) for key in keys[:2])
    a, d_a, b, d_b = (jax.random.normal(key, (6, 3)) for key in keys[2:])
    run = jax.jit(lambda *inputs: jax.jvp(products, *inputs))
    outs, d_outs = run((x, [a, b]), (d_x, [d_a, d_b]))
    for out, d_out, w, d_w in zip(outs, d_outs, (a, b), (d_a, d_b), strict=True):
        np.testing.assert_allclose(out, x @ w, atol=1e-5)
        np.testing.assert_allclose(d_out, d_x @ w + x @ d_w, atol=1e-5)
    got, want = (
        jax.jit(jax.jacfwd(jax.grad(lambda x, f=f: sum(jnp.sum(y**3) for y in f(x)))))(x)
        for f in (lambda x: products(x, [a, b]), lambda x: [x @ a, x @ b])
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("on_gpu")
def test_a_gradient_keeps_no_copies_of_what_products_read():
    x, matrices = jnp.zeros((5, 4)), [jnp.zeros((4, 3))] * 3
    _, vjp = jax.vjp(products, x, matrices)
    kept = [y for y in jax.tree.leaves(vjp) if getattr(y, "shape", None) == x.shape]
    assert len(kept) == 1


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

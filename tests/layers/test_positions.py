"""Axial, sinusoidal and rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import dense
from tests.layers import plain

RNG = jax.random.PRNGKey(1)
rotary = jax.jit(layers.rotary, static_argnames="grid")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape, d_embs", [((12,), (6,)), ((4, 6), (2, 4)), ((3, 2, 4), (1, 3, 2))])
def test_axial_is_a_vector_for_each_coordinate(shape, d_embs):
    capacity = np.prod(shape)
    layer, x = layers.AxialPositionalEncoding(shape, d_embs), numbers(2, capacity, 6)
    params = plain.init(layer, x.shape)
    assert [params[f"axis_{i}"].shape for i in range(len(shape))] == list(
        zip(shape, d_embs, strict=True)
    )
    embedding = np.stack(
        [
            np.concatenate(
                [params[f"axis_{i}"][c] for i, c in enumerate(np.unravel_index(t, shape))]
            )
            for t in range(capacity)
        ]
    )
    apply = jax.jit(layer.apply)
    whole = apply(params, x)
    np.testing.assert_allclose(whole, x + embedding, atol=1e-6)
    for length in (1, 5, capacity - 1):
        np.testing.assert_array_equal(apply(params, x[:, :length]), whole[:, :length])


def test_the_gradient_of_axial_counts_positions():
    layer = layers.AxialPositionalEncoding((4, 3), (2, 2))
    x = numbers(2, 7, 4)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(layer.apply(p, x))))(plain.init(layer, x.shape))
    # Positions 0 to 6 of two examples, three to a row: rows of 3, 3, 1, 0 and columns of 3, 2, 2.
    np.testing.assert_array_equal(gradient["axis_0"], 2 * np.array([[3, 3, 1, 0]] * 2).T)
    np.testing.assert_array_equal(gradient["axis_1"], 2 * np.array([[3, 2, 2]] * 2).T)


def test_axial_says_what_it_cannot_hold():
    layer = layers.AxialPositionalEncoding((4, 3), (2, 2))
    params = layer.init_params(RNG, (1, 12, 4))
    with pytest.raises(ValueError) as error:
        layer.apply(params, numbers(1, 13, 4))
    assert str(error.value) == (
        "axial positions of shape (4, 3) hold 12 positions, not 13: "
        "enlarge the shape or shorten the sequence"
    )
    with pytest.raises(ValueError, match=r"^d_embs \(2, 2\) add up to 4: expected 6$"):
        layer.init_params(RNG, (1, 12, 6))
    for shape, d_embs in (((), ()), ((4,), (2, 2))):
        with pytest.raises(ValueError, match=r"^shape \(.*\).* d_embs \(.*\): expected"):
            layers.AxialPositionalEncoding(shape, d_embs)
    for shape, d_embs in (((4, 0), (2, 2)), ((4, 3), (4, 0))):
        with pytest.raises(ValueError, match="expected a list, each a whole number of at least 1"):
            layers.AxialPositionalEncoding(shape, d_embs)


@pytest.mark.parametrize("d_model", [6, 7])
def test_sinusoids(d_model):
    x, n = numbers(2, 50, d_model), -(-d_model // 2)
    angle = np.arange(50)[:, None] / 10_000 ** (np.arange(n) / n)
    want = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)[:, :d_model]
    layer = layers.SinusoidalPositionalEncoding()
    assert layer.init_params(RNG, x.shape) == ()
    np.testing.assert_allclose(layer.apply((), x), x + want, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [layers.AxialPositionalEncoding((4, 4), (3, 3)), layers.SinusoidalPositionalEncoding()],
    ids=["axial", "sinusoidal"],
)
def test_added_positions_keep_the_dtype(layer):
    x = numbers(1, 9, 6).astype(jnp.bfloat16)
    assert jax.eval_shape(layer.apply, plain.init(layer, x.shape), x).dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [8, 5, 1])
def test_rotary_turns_each_pair(size):
    x, half = numbers(2, 9, 3, size), size // 2
    angle = np.arange(9)[:, None] * 10_000.0 ** (-np.arange(half) / max(half, 1))
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)[:, None]
    want = np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)
    np.testing.assert_allclose(rotary(x), want, atol=1e-5)


@pytest.mark.parametrize("size", [8, 5])
def test_the_gradient_of_rotary_is_turned_back(size):
    """In one pass, without halves that are padded; the tangent is turned as its input is."""
    d, half = numbers(2, 9, 3, size, seed=2), size // 2
    x, position = numbers(2, 9, 3, size), np.arange(40, 58).reshape(2, 9)[:, ::-1]
    angle = position[..., None] * 10_000.0 ** (-np.arange(half) / half)

    def turned(y, sign):
        z = (y[..., :half] + 1j * y[..., half : 2 * half]) * np.exp(sign * 1j * angle)[:, :, None]
        return np.concatenate([z.real, z.imag, y[..., 2 * half :]], axis=-1)

    def gradient(x, d):
        return jax.vjp(lambda x: layers.rotary(x, position), x)[1](d)[0]

    np.testing.assert_allclose(jax.jit(gradient)(x, d), turned(d, -1), atol=1e-5)
    tangent = jax.jit(lambda x, d: jax.jvp(lambda x: layers.rotary(x, position), (x,), (d,))[1])
    np.testing.assert_allclose(tangent(x, d), turned(d, 1), atol=1e-5)
    assert "pad[" not in str(jax.make_jaxpr(gradient)(x, d))


def test_rotary_products_depend_on_the_distance_alone():
    q, k = numbers(1, 9, 2, 6), numbers(1, 9, 2, 6, seed=1)

    def products(shift):
        shifted = (np.pad(x, ((0, 0), (shift, 0), (0, 0), (0, 0))) for x in (q, k))
        rotated_q, rotated_k = (rotary(x)[:, shift:] for x in shifted)
        return np.einsum("btnh,bsnh->bnts", rotated_q, rotated_k)

    np.testing.assert_allclose(products(40), products(0), atol=1e-5)
    unrotated = np.einsum("btnh,bsnh->bnts", q, k)
    off_diagonal = ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(
        np.diagonal(products(0), 0, 2, 3), np.diagonal(unrotated, 0, 2, 3), atol=1e-5
    )
    assert np.abs(products(0) - unrotated)[..., off_diagonal].max() > 0.5


@pytest.mark.parametrize("grid, size", [((4, 3), 9), ((2, 3, 2), 16)])
def test_rotary_turns_some_pairs_by_each_coordinate(grid, size):
    """The first pairs by the first coordinate, and so on; pairs that are left over do not turn."""
    x, half = numbers(2, 12, 3, size), size // 2
    each = half // len(grid)
    angle = np.zeros((12, half))
    for axis, coordinate in enumerate(np.unravel_index(np.arange(12), grid)):
        frequency = 100.0 ** (-np.arange(each) / each)
        angle[:, axis * each : (axis + 1) * each] = coordinate[:, None] * frequency
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)[:, None]
    want = np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)
    np.testing.assert_allclose(rotary(x, grid=grid), want, atol=1e-5)
    # The first axis has no end, and a position is the same wherever it is asked for.
    last = rotary(x[:, 11:], np.array([[11]]), grid=(1, *grid[1:]))
    np.testing.assert_allclose(last, want[:, 11:], atol=1e-5)


def test_products_in_a_grid_depend_on_the_distance_along_each_axis():
    q, k = numbers(1, 1, 1, 8), numbers(1, 1, 1, 8, seed=1)

    def product(of_query, of_key):
        at = [np.array([[row * 5 + column]]) for row, column in (of_query, of_key)]
        return np.vdot(rotary(q, at[0], grid=(4, 5)), rotary(k, at[1], grid=(4, 5)))

    near = product((1, 2), (0, 1))
    np.testing.assert_allclose(product((3, 4), (2, 3)), near, atol=1e-5)
    # As far on the line of positions, but from the end of a row to the next one's.
    assert abs(product((2, 0), (0, 4)) - near) > 1e-2


def test_a_grid_that_nothing_rotates_by_is_refused():
    message = r"^rotary_grid is \(4, 3\) and use_rotary is False: set use_rotary=True or leave"
    with pytest.raises(ValueError, match=message):
        layers.Attention(dense.dense(), d_qk=4, d_v=4, rotary_grid=(4, 3))


def test_rotary_keeps_the_dtype():
    x = numbers(1, 9, 2, 6).astype(jnp.bfloat16)
    out = rotary(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), rotary(x.astype(np.float32)), atol=2e-2)


def test_positions_one_by_one():
    """At any positions, in any order, the layer is that of the whole sequence."""
    picked = np.array([[3, 11, 0], [7, 7, 2]])
    x = numbers(2, 12, 6)
    for layer in (
        layers.AxialPositionalEncoding((4, 3), (2, 4)),
        layers.SinusoidalPositionalEncoding(),
    ):
        params = plain.init(layer, x.shape)
        whole = np.asarray(jax.jit(layer.apply)(params, np.zeros_like(x)))
        some = jax.jit(layer.apply_at)(params, np.zeros((2, 3, 6), np.float32), picked)
        np.testing.assert_allclose(some, whole[0][picked], atol=1e-6)
    heads = np.broadcast_to(numbers(1, 1, 2, 6), (2, 12, 2, 6))
    whole = rotary(heads)
    some = rotary(heads[:, :3], picked)
    np.testing.assert_allclose(some, np.asarray(whole)[0][picked], atol=1e-6)

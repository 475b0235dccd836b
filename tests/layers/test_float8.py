"""Products of FP8 numbers, compared with numbers that NumPy rounds."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from reformax import layers
from reformax.layers import float8
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close
from tests.layers import plain


def rounded(x, dtype):
    """`x` by way of FP8, as float64: the largest number is brought below 2^8 or 2^15."""
    x = np.asarray(x, np.float64)
    top, kind = {"e4m3": (8, ml_dtypes.float8_e4m3fn), "e5m2": (15, ml_dtypes.float8_e5m2)}[dtype]
    largest = np.abs(x[np.isfinite(x)]).max(initial=0)
    scale = 2.0 ** (top - np.frexp(largest)[1])
    return (x * scale).astype(kind).astype(np.float64) / scale


def arrays(dtype="float32", size=1.0):
    rng = np.random.default_rng(0)
    shapes = (2, 5, 24), (24, 7), (2, 5, 7)
    x, w, dy = (rng.normal(size=shape) * 10.0 ** rng.uniform(-5, 0, shape) for shape in shapes)
    return jnp.asarray(x, dtype), jnp.asarray(w, "float32"), jnp.asarray(size * dy, dtype)


@jax.jit
def with_gradients(x, w, dy):
    y, vjp = jax.vjp(float8.product, x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2), ("float16", 2e-3)]
)
def test_is_the_product_of_rounded_numbers(dtype, tolerance):
    for size in (1.0, 1e-9, 0.0):
        x, w, dy = arrays(dtype, size)
        got = with_gradients(x, w, dy)
        assert [z.dtype.name for z in got] == [dtype, dtype, "float32"]
        x, w, dy = rounded(x, "e4m3"), rounded(w, "e4m3"), rounded(dy, "e5m2")
        d_w = np.einsum("btk,btn->kn", x, dy)
        for z, want in zip(got, (x @ w, dy @ w.T, d_w), strict=True):
            np.testing.assert_allclose(z, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_what_is_not_finite_stays_in_its_row():
    x, w, dy = map(np.array, arrays())
    want, want_dx, _ = map(np.array, with_gradients(x, w, dy))
    x[1, 2, 3], want[1, 2] = np.inf, np.nan
    for value in (np.nan, np.inf):
        dy[0, 1, 0] = value
        y, dx, _ = map(np.array, with_gradients(x, w, dy))
        np.testing.assert_array_equal(y, want)
        assert not np.any(np.isfinite(dx[0, 1]))
        dx[0, 1] = want_dx[0, 1]
        np.testing.assert_array_equal(dx, want_dx)


def test_numbers_share_a_scale_and_no_rounding():
    """Scales are powers of two: a larger number elsewhere rounds no other one differently."""
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (4, 8)))
    for factor in (1.7, 300.0):
        both = x.at[0].multiply(factor), x
        quantized = [float8.quantize(y, float8.E4M3) for y in both]
        got, want = (np.asarray(q.rows, np.float64)[1:] / q.scale for q in quantized)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
def test_layers_round_in_training_alone(impl):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 16)), jnp.bfloat16)

    def gradients(**options):
        layer = layers.FeedForward(32, impl=impl, **options)
        params = plain.init(layer, x.shape)
        return jax.jit(jax.grad(lambda p: layer.apply(p, x).astype(jnp.float32).var()))(params)

    usual, narrow = gradients(), gradients(float8=True)
    for name in usual:
        distance = np.linalg.norm(narrow[name] - usual[name]) / np.linalg.norm(usual[name])
        assert 1e-3 < distance < 0.2, name
    assert_trees_close(gradients(float8=True, mode="eval"), gradients(mode="eval"), 0)


def test_a_gpu_without_such_products_is_told(monkeypatch):
    device = types.SimpleNamespace(compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(NotImplementedError, match="'NVIDIA A100' does not multiply FP8"):
        jax.eval_shape(float8.product, *arrays()[:2])

"""Products of FP8 numbers, compared with numbers that NumPy rounds."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from reformax import layers
from reformax.buffers import advanced
from reformax.declared import SettingError
from reformax.layers import float8
from reformax.ops import flash
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


def product(x, w, seen=None):
    """`products` with one matrix."""
    return float8.products(x, [w], None if seen is None else [seen])[0]


@jax.jit
def with_gradients(x, w, dy):
    y, vjp = jax.vjp(product, x, w)
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


@pytest.mark.parametrize("shape", [(3, 45, 131), (64, 128)])
@pytest.mark.parametrize("dtype", [float8.E4M3, float8.E5M2])
def test_the_kernel_rounds_as_array_operations_do(shape, dtype):
    """Rows, columns and the largest number, with numbers that are not finite or too large."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, shape)
    x.reshape(-1)[[5, 70, 2000]] = np.nan, -np.inf, 1e9
    seen = jnp.asarray([0.0, 2.0, 1.5])
    for given in (None, seen):
        got, want = (
            float8.quantize(jnp.asarray(x, jnp.bfloat16), dtype, given, columns=True, impl=impl)
            for impl in (INTERPRETED, "xla")
        )
        assert got.rows.dtype == dtype and got.columns.shape == (shape[-1], *shape[:-1])
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    end = float(jnp.finfo(dtype).max)
    assert float(got.rows.ravel()[2000]) == end and got.largest == jnp.bfloat16(1e9)
    assert np.isnan(np.asarray(got.rows, np.float32)).sum() == 2
    np.testing.assert_array_equal(
        np.asarray(got.columns, np.float32), np.moveaxis(np.asarray(got.rows, np.float32), -1, 0)
    )


def delayed(x, w, dy, seen):
    y, vjp = jax.vjp(product, x, w, seen)
    return y, *vjp(dy)


def reference(x, w, dy, seen):
    """The operands as delayed scales round them, in float64."""
    kinds, unseen = ("e4m3", "e4m3", "e5m2"), (8.0, 8.0, 0.25)
    found = []
    for z, kind, before, none in zip((x, w, dy), kinds, seen, unseen, strict=True):
        top, dtype, end = {
            "e4m3": (7, ml_dtypes.float8_e4m3fn, 448.0),
            "e5m2": (14, ml_dtypes.float8_e5m2, 57344.0),
        }[kind]
        largest = before.max() if before.max() > 0 else none
        scale = 2.0 ** (top - np.frexp(largest)[1])
        scaled = np.clip(np.float64(z) * scale, -end, end)
        found.append(scaled.astype(dtype).astype(np.float64) / scale)
    return found


def test_delayed_scales_are_of_the_last_steps():
    """Of three steps here; and what is larger than all of them becomes the range's end."""
    seen, before = float8.history(3), np.zeros((3, 3))
    run = jax.jit(delayed)
    for size in (1.0, 300.0, 0.05, 0.06, 0.07, 0.08, 5.0):
        x, w, dy = arrays(size=size)
        x = x * size
        y, dx, dw, change = run(x, w, dy, seen)
        rx, rw, rdy = reference(x, w, dy, before)
        d_w = np.einsum("btk,btn->kn", rx, rdy)
        for got, want in zip((y, dx, dw), (rx @ rw, rdy @ rw.T, d_w), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
        seen = advanced(seen, change)
        newest = [np.abs(z).max() for z in (x, w, dy)]
        before = np.concatenate([np.stack(newest)[:, None], before[:, :-1]], axis=1)
        np.testing.assert_allclose(seen.value, before, rtol=1e-6)


def test_delayed_scales_are_as_exact_as_fp8():
    """Relative errors below the formats' spacing: 2^-4 of a number in e4m3, 2^-3 in e5m2."""
    rng = np.random.default_rng(0)
    x, w, dy = (
        jax.device_put(rng.normal(size=shape).astype(jnp.float32))
        for shape in ((4, 33, 64), (64, 48), (4, 33, 48))
    )
    y, dx, dw, change = delayed(x, w, dy, float8.history(2))
    *got, _ = delayed(x, w, dy, advanced(float8.history(2), change))
    want = x @ w, dy @ w.T, np.einsum("btk,btn->kn", x, dy)
    for a, b, bound in zip(got, want, (2**-4, 2**-3, 2**-3), strict=True):
        assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < bound


def test_several_products_of_one_array_are_those_of_each():
    x, w, dy = arrays()
    *_, change = delayed(x, w, dy, float8.history(2))
    seen = [advanced(float8.history(2), change)] * 2

    def together(x, w, seen):
        return float8.products(x, [w, 2 * w], seen)

    outs, vjp = jax.vjp(together, x, w, seen)
    d_x, d_w, changes = vjp([dy, dy])
    y, want_x, want_w, change = delayed(x, w, dy, seen[0])
    np.testing.assert_array_equal(outs[0], y)
    np.testing.assert_allclose(outs[1], 2 * y, rtol=0.2, atol=0.1 * np.abs(y).max())
    np.testing.assert_array_equal(changes[0].value, change.value)
    assert np.linalg.norm(d_x - 3 * want_x) < 0.1 * np.linalg.norm(3 * want_x)
    np.testing.assert_allclose(d_w, 3 * want_w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [dict(impl=INTERPRETED), dict(gated=True), dict(chunk_size=4)],
    ids=["kernels", "gated", "chunks"],
)
def test_a_layers_histories_have_its_largest_numbers(options):
    x = jax.device_put(np.random.default_rng(0).normal(size=(2, 8, 16)).astype(jnp.bfloat16))
    layer = layers.FeedForward(32, float8=True, amax_history=2, **options)
    params = plain.init(layer, x.shape)
    params[float8.HISTORY] = {name: float8.history(2) for name in params[float8.HISTORY]}

    def gradient(params):
        return jax.grad(lambda p: layer.apply(p, x).astype(jnp.float32).var())(params)

    found = advanced(params, jax.jit(gradient)(params))[float8.HISTORY]
    assert found.keys() == {n for n in params if n.startswith("w")}
    for name, seen in found.items():
        np.testing.assert_allclose(seen.value[1, 0], np.abs(params[name]).max(), rtol=1e-6)
        assert np.all(seen.value[:, 0] > 0) and not np.any(seen.value[:, 1:])
    largest = np.abs(np.float32(x)).max()
    if layer.chunk_size:
        halves = np.array([np.abs(np.float32(x[:, i : i + 4])).max() for i in (0, 4)])
        largest = np.mean(halves**8) ** (1 / 8)
    np.testing.assert_allclose(found["w1"].value[0, 0], largest, rtol=1e-6)


def test_scales_suit_the_one_part_of_a_batch_that_has_targets():
    """Of 16 chunks only the last has a gradient, none of which is beyond the format's range."""
    rng = np.random.default_rng(0)
    x, dy = (jax.device_put(rng.normal(size=(2, n, 16)).astype(jnp.float32)) for n in (32, 2))
    found = {}
    for size in (0, 2):
        layer = layers.FeedForward(32, chunk_size=size, float8=True, amax_history=1)
        params = plain.init(layer, x.shape)
        gradient = jax.jit(jax.grad(lambda p, f=layer: jnp.vdot(f.apply(p, x)[:, -2:], dy)))
        for _ in range(3):
            found[size] = gradient(params)
            params = advanced(params, found[size])
    for name in ("w1", "b1", "w2", "b2"):
        whole, chunks = found[0][name], found[2][name]
        assert jnp.linalg.norm(chunks - whole) < 0.05 * jnp.linalg.norm(whole), name


@pytest.mark.parametrize("root", [0.999, 1.001, 90.0])
def test_a_number_of_one_part_of_many_is_within_the_range(root):
    """Where all other parts have zeros alone; a root just below a power of two leaves least."""
    seen, n_parts = float8.history(2), 22_000
    largest = root * n_parts ** (1 / 8)
    found = types.SimpleNamespace(largest=jnp.float32(largest))
    seen = advanced(seen, float8.History(float8.change(seen.value, *[found] * 3) / n_parts))
    for row, dtype in zip(seen.value, float8.OPERANDS, strict=True):
        assert row[0] < largest / 3
        assert largest * float8.delayed_scale(row, dtype) <= float(jnp.finfo(dtype).max)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e6, 1e30])
def test_histories_follow_numbers_of_any_size(size):
    seen = float8.history(2)
    for _ in range(16):
        *_, change = delayed(*(z * size for z in arrays()), seen)
        seen = advanced(seen, change)
    want = [np.abs(z * size).max() for z in arrays()]
    np.testing.assert_allclose(seen.value, np.stack([want] * 2, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    "length, d_ff, rate",
    [(9, 40, 0.0), pytest.param(70, 600, 0.3, marks=pytest.mark.slow)],
)
def test_the_kernels_that_round_the_hidden_layer_are_the_same_function(length, d_ff, rate):
    """Also where tiles are not full, with dropout, a bias, and a second step's scales."""
    rng = np.random.default_rng(0)
    # In float32, for the array operations round the hidden layer to the dtype of `x` first.
    x = jax.device_put(rng.normal(size=(2, length, 16)).astype(jnp.float32))
    options = dict(hidden_dropout=rate, float8=True, amax_history=2)
    found = []
    for impl in (INTERPRETED, "xla"):
        layer = layers.FeedForward(d_ff, impl=impl, **options)
        params = plain.init(layer, x.shape)
        params[float8.HISTORY] = {name: float8.history(2) for name in ("w1", "w2")}
        dropped = jax.random.key(0) if rate else None

        @jax.jit
        def gradients(params, x, layer=layer, rng=dropped):
            def loss(params, x):
                return jnp.sum(jnp.sin(layer.apply(params, x, rng).astype(jnp.float32)))

            return jax.grad(loss, (0, 1))(params, x)

        first, _ = gradients(params, x)
        seen = advanced(params, first)[float8.HISTORY]
        found.append(gradients(params | {float8.HISTORY: seen}, x))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        # A number between two of FP8's may go to either.
        assert jnp.linalg.norm(a - b) < 3e-3 * jnp.linalg.norm(b)


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
def test_layers_round_in_training_alone(impl):
    x = jax.device_put(np.random.default_rng(0).normal(size=(2, 9, 16)).astype(jnp.bfloat16))

    def gradients(**options):
        layer = layers.FeedForward(32, impl=impl, **options)
        params = plain.init(layer, x.shape)
        return jax.jit(jax.grad(lambda p: layer.apply(p, x).astype(jnp.float32).var()))(params)

    usual, narrow = gradients(), gradients(float8=True)
    for name in usual:
        distance = np.linalg.norm(narrow[name] - usual[name]) / np.linalg.norm(usual[name])
        assert 1e-3 < distance < 0.2, name
    assert_trees_close(gradients(float8=True, mode="eval"), gradients(mode="eval"), 0)


@pytest.mark.parametrize(
    "layer", [lambda **options: layers.FeedForward(8, **options),
              lambda **options: layers.Attention(flash.flash(), 2, 4, 4, **options)],
    ids=["feed_forward", "attention"],
)  # fmt: skip
def test_a_layers_history_without_scales_is_refused(layer):
    with pytest.raises(SettingError, match="amax_history is 2 and float8 is False") as error:
        layer(amax_history=2)
    assert "\n" not in str(error.value)
    layer(float8=True, amax_history=2)


def test_a_gpu_without_such_products_is_told(monkeypatch):
    device = types.SimpleNamespace(compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(NotImplementedError, match="'NVIDIA A100' does not multiply FP8"):
        jax.eval_shape(product, *arrays()[:2])

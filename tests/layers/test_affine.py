"""What a step of decoding computes with a matrix, in array operations and in the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers import matrices
from reformax.layers.matrices import Unnormed, affine, relu_squared, transposed_on_gpu
from reformax.ops.calls.dispatch import INTERPRETED

KERNEL = "pallas" if jax.default_backend() == "gpu" else INTERPRETED
RNG = np.random.default_rng(0)


def drawn(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


def equation(x, w, b, norm, activation, added):
    """In NumPy, float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if norm is not None:
        x = x - x.mean(-1, keepdims=True) if "bias" in norm else x
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        x = x * np.asarray(norm["scale"], np.float64) + np.asarray(norm.get("bias", 0), np.float64)
    y = x @ w + (0 if b is None else np.asarray(b, np.float64))
    if activation is jax.nn.relu:
        y = np.maximum(y, 0)
    elif activation is relu_squared:
        y = np.maximum(y, 0) ** 2
    elif activation is jax.nn.gelu:
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y if added is None else y + np.asarray(added, np.float64)


ACTIVATIONS = {"gelu": jax.nn.gelu, "relu": jax.nn.relu, "relu_squared": relu_squared}


# Sizes at and off powers of two; more outputs and fewer than a program has rows of the matrix.
@pytest.mark.parametrize("impl", ["xla", KERNEL])
@pytest.mark.parametrize("rows", [(1, 1), (3, 2)])
@pytest.mark.parametrize(
    "d_in, sizes, options",
    [
        (32, (300,), {"b", "gelu"}),
        (48, (7,), {"norm", "b", "relu"}),
        (33, (96, 5, 64), {"norm"}),
        (48, (7,), {"rms", "b", "relu_squared"}),
        (33, (96, 5, 64), {"rms"}),
        (4096, (3,), {"norm", "added"}),
        (20, (40,), {"b", "added"}),
    ],
)
def test_it_is_the_equation(d_in, sizes, options, rows, impl):
    x, w = drawn(*rows, d_in), drawn(d_in, sum(sizes)) / d_in**0.5
    b = drawn(sum(sizes)) if "b" in options else None
    added = drawn(*rows, sum(sizes)) if "added" in options else None
    activation = next((f for name, f in ACTIVATIONS.items() if name in options), None)
    norm = {"scale": drawn(d_in), "bias": drawn(d_in)} if {"norm", "rms"} & options else None
    read = x if norm is None else Unnormed(layers.LayerNorm(), norm, x)
    if "rms" in options:
        del norm["bias"]
        read = Unnormed(layers.RMSNorm(), norm, x)
    call = jax.jit(
        lambda w: affine(
            read,
            transposed_on_gpu(w),
            b,
            activation=activation,
            added=added,
            sizes=sizes,
            impl=impl,
        )
    )
    parts = call(w)
    assert [part.shape for part in parts] == [(*rows, size) for size in sizes]
    want = equation(x, w, b, norm, activation, added)
    np.testing.assert_allclose(jnp.concatenate(parts, -1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_round_the_output_before_it_is_added(dtype):
    stream, added = drawn(1, 1, 64), 100 * drawn(1, 1, 96)
    norm = {"scale": drawn(64), "bias": drawn(64)}
    read = Unnormed(layers.LayerNorm(dtype=dtype), norm, stream)
    w, b = drawn(64, 96, dtype=dtype), drawn(96, dtype=dtype)
    (want,), (got,) = (
        affine(read, transposed_on_gpu(w), b, added=added, impl=impl) for impl in ("xla", KERNEL)
    )
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(got - added, want - added, rtol=2e-2, atol=0.1)
    rounded = (got - added).astype(dtype).astype(jnp.float32)
    np.testing.assert_allclose(got, rounded + added, rtol=1e-6)


@pytest.mark.parametrize("impl", ["xla", KERNEL])
@pytest.mark.parametrize("rows", [(5, 1), (2, 6)])
@pytest.mark.parametrize(
    "d_in, sizes, options",
    [(48, (7,), {"norm", "b", "relu"}), (33, (96, 5), {"norm"}), (1030, (20,), {"b", "added"})],
)
def test_several_narrow_rows_are_the_equation(d_in, sizes, options, rows, impl):
    x, w = drawn(*rows, d_in), jnp.asarray(drawn(d_in, sum(sizes)) / d_in**0.5, "bfloat16")
    b = drawn(sum(sizes)) if "b" in options else None
    added = drawn(*rows, sum(sizes)) if "added" in options else None
    activation = jax.nn.relu if "relu" in options else None
    norm = {"scale": drawn(d_in), "bias": drawn(d_in)} if "norm" in options else None
    read = jnp.asarray(x, "bfloat16")
    x = read if norm is None else x
    read = read if norm is None else Unnormed(layers.LayerNorm(dtype="bfloat16"), norm, x)
    options = dict(activation=activation, added=added, sizes=sizes, impl=impl)
    parts = jax.jit(lambda w, b: affine(read, w, b, **options))(transposed_on_gpu(w), b)
    assert [part.shape for part in parts] == [(*rows, size) for size in sizes]
    want = equation(x, w, b, norm, activation, added)
    got = np.concatenate([np.asarray(part, np.float32) for part in parts], -1)
    np.testing.assert_allclose(got, want, atol=0.05)


def kernels(x, *arguments, **options):
    return str(jax.make_jaxpr(lambda *a: affine(*a, **options))(x, *arguments)).count("pallas_call")


def test_auto_takes_a_kernel_for_one_row_and_for_few_narrow_ones_on_a_gpu(monkeypatch):
    monkeypatch.setattr(matrices, "choose_impl", lambda impl, pays, **_: KERNEL if pays else "xla")
    row, w = drawn(1, 1, 16), drawn(16, 16)
    assert kernels(row, w) == 1
    assert kernels(row, w, activation=jax.nn.gelu) == 1
    assert kernels(row, w, activation=jnp.tanh) == 0
    assert kernels(drawn(2, 1, 16), w) == kernels(drawn(1, 2, 16), w) == 0
    narrow = w.astype("float16")
    assert kernels(drawn(2, 1, 16), narrow) == kernels(drawn(1, matrices.FEW, 16), narrow) == 1
    assert kernels(drawn(matrices.FEW + 1, 1, 16), narrow) == 0
    size = matrices.MOST + 1
    assert kernels(drawn(1, 1, size), drawn(size, size)) == 0


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has the kernel")
def test_the_kernel_without_a_gpu():
    with pytest.raises(NotImplementedError, match="impl='pallas' with the backend 'cpu'"):
        affine(drawn(1, 1, 8), drawn(8, 8), impl="pallas")


@pytest.mark.parametrize("impl", ["xla", KERNEL])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("activation", [None, jax.nn.relu])
def test_the_output_is_of_the_matrix_s_dtype_whatever_the_bias_is(activation, rows, impl):
    x, w, b = drawn(rows, 1, 32), drawn(32, 7, dtype="bfloat16"), drawn(7)
    narrow = jnp.asarray(x, "bfloat16")
    (got,) = affine(narrow, transposed_on_gpu(w), b, activation=activation, impl=impl)
    assert got.dtype == jnp.bfloat16
    want = equation(narrow, w, b, None, activation, None)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=0.1)

"""Products of FP8 numbers, whose sums are wider: e4m3 forward, e5m2 for gradients.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning": e4m3 has 3 bits of fraction and reaches
448; e5m2 has 2 and reaches 57,344. An array is multiplied by a scale that brings its largest finite
number near the end of the range, and rounded. Scales are powers of two, so that scaling rounds
nothing. Only numbers far below the largest one, by 2^-13 in e4m3 and 2^-28 in e5m2, lose more than
the format's fraction. A number that is not finite is NaN, in the products that read it.

The largest number is the array's own, which takes a pass over the array before it is rounded. Or a
scale is *delayed* (section 3.2; NVIDIA's Transformer Engine): it is that of the largest number of
the last steps, and the pass that rounds also finds the step's own, for the steps to come. Delayed
scales leave a bit more at the end of the range; numbers beyond it become its end.

XLA multiplies such operands by cuBLASLt's FP8 products, which take the scales; elsewhere they are
multiplied as what they are after rounding. cuBLASLt reads both operands along the axis that is
summed over. So arrays are rounded by rows and by columns, in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float

from reformax import devices
from reformax.buffers import HISTORY, Buffer
from reformax.declared import SettingError, Unsupported
from reformax.layers.matrices import copies
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED, choose_impl

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# The scaled maximum is below 2^TOP, and so is every number that rounds to it.
TOP = {E4M3: 8, E5M2: 15}
# The largest number that an array is supposed to have before any was seen. Activations and weights
# are mostly below 16, gradients of a mean over tokens below 1/2.
UNSEEN = {E4M3: 8.0, E5M2: 0.25}
# The sizes for which the kernel is taken: below XLA fuses the rounding, above nothing was tested.
LEAST_SIZE, MOST = 2**20, 2**31
# The rows of a history: the formats of `x`, `w` and the output's gradient.
OPERANDS = E4M3, E4M3, E5M2
# A history's largest number changes by at most this factor in a step, up or down: float32 has its
# eighth power, and sums of these.
REACH = 2.0**14


class History(Buffer):
    """The largest magnitudes that delayed scales come from; a layer's `HISTORY` has one a matrix.

    `value [3, S]` has those of `x`, `w` and the output's gradient in each of the last S steps,
    newest first; 0: there was none. Parts of a batch, chunks of positions on devices, add up their
    cotangents, and a scale must suit the largest number of all. So they add eighth powers. Of n
    parts the root of the mean is at least the largest number times `n^(-1/8)`, half of it for 256.
    `delayed_scale` leaves room for 3.5 times the root, so that up to 22,000 parts cut no number.
    """

    def after(self, change: Float[Array, "*d 3 S"]) -> History:
        mean = jnp.sqrt(jnp.sqrt(jnp.sqrt(change[..., :1])))
        newest = _before(self.value, OPERANDS)[..., None] * mean
        return History(jnp.concatenate([newest, self.value[..., :-1]], axis=-1))


def history(n_steps: int) -> History:
    """The history before the first step."""
    return History(jnp.zeros((len(OPERANDS), n_steps)))


def _before(seen: Float[Array, "*d R S"], dtypes: Sequence[Any]) -> Float[Array, "*d R"]:
    """The largest numbers of rows of a history, which are of arrays in these formats."""
    largest = jnp.max(seen, axis=-1)
    return jnp.where(largest > 0, largest, jnp.array([UNSEEN[dtype] for dtype in dtypes]))


def check_history(float8: bool, amax_history: int) -> None:
    """Raises `SettingError` for a layer whose history no scale would come from."""
    if amax_history and not float8:
        raise SettingError(
            f"amax_history is {amax_history} and float8 is False, which has no scales: set "
            "amax_history=0 or float8=True"
        )


class Quantized(NamedTuple):
    """Numbers `rows / scale`, of which `rows` are FP8 and `scale` is a power of two.

    `columns` are the same numbers, whose last axis comes first. Either may be None. `largest` is
    the largest finite magnitude before rounding.
    """

    rows: Float[Array, "*d C"] | None
    columns: Float[Array, "C ..."] | None
    scale: Float[Array, ""]
    largest: Float[Array, ""]


def quantize(
    x: Float[Array, "*d C"],
    dtype: Any,
    seen: Float[Array, " S"] | None = None,
    *,
    rows: bool = True,
    columns: bool = False,
    impl: str = "auto",
) -> Quantized:
    """`x` rounded to FP8.

    Args:
      x: the array; of three axes, it is activations `[B, T, C]` on the mesh in use.
      dtype: `E4M3` or `E5M2`.
      seen: the row of a `history` that the scale comes from; None: the scale is that of `x`.
      rows, columns: which of the two are returned.
      impl: "xla", "pallas" or `INTERPRETED`; "auto" takes the kernel on a GPU for large arrays.
    """
    pays = LEAST_SIZE <= x.size < MOST
    chosen = choose_impl(impl, pays, pallas=None) if x.size else "xla"
    scale = _scale(_largest(x), TOP[dtype]) if seen is None else delayed_scale(seen, dtype)
    if chosen == "xla":
        found = _quantize_arrays(x, scale, dtype, rows, columns)
    else:
        found = _quantize_by_kernel(x, scale, dtype, rows, columns, chosen == INTERPRETED)
    values, turned, largest = found
    # Only a history reads it, to whose update XLA may defer the exchange.
    return Quantized(values, turned, scale, largest if seen is None else over_shards(largest))


def delayed_scale(seen: Float[Array, " S"], dtype: Any) -> Float[Array, ""]:
    """The scale that a row of a history gives."""
    return _scale(_before(seen[None], (dtype,))[0], TOP[dtype] - 1)


def _largest(x: Float[Array, "*d"]) -> Float[Array, ""]:
    """The largest finite magnitude; within a shard that of the shard."""
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(jnp.float32)


def over_shards(largest: Float[Array, ""]) -> Float[Array, ""]:
    """The largest number of all shards, within one."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return lax.pmax(largest, axes) if axes else largest


def _scale(largest: Float[Array, ""], top: int) -> Float[Array, ""]:
    """The power of two that brings `largest` below 2^top."""
    # The largest number is below 2^exponent. The product of two scales must have an inverse.
    _, exponent = jnp.frexp(largest)
    return jnp.ldexp(jnp.float32(1), jnp.clip(top - exponent, -126, 60))


def _quantize_arrays(x, scale, dtype, rows: bool, columns: bool) -> tuple:
    """Rows, columns and the largest number."""
    end = float(jnp.finfo(dtype).max)
    scaled = x.astype(_scaled_in(x.dtype))
    scaled = jnp.clip(scaled * scale.astype(scaled.dtype), -end, end)
    # Infinity less itself is NaN. This keeps XLA's rounding by rows and columns in one fusion.
    values = (scaled + (x - x).astype(scaled.dtype)).astype(dtype)
    turned = jnp.moveaxis(values, -1, 0) if columns else None
    return values if rows else None, turned, _largest(x)


def _quantize_by_kernel(x, scale, dtype, rows: bool, columns: bool, interpret: bool) -> tuple:
    """The same; each device rounds what it has."""
    from reformax.layers.kernels import rounding as kernel

    options = kernel.RoundingOptions(dtype, rows, columns, interpret)

    def of_shard(x, scale):
        found = kernel.rounded(x.reshape(-1, x.shape[-1]), scale.reshape(1), options)
        values = None if found.rows is None else found.rows.reshape(x.shape)
        turned = found.columns
        if turned is not None:
            turned = turned.reshape(x.shape[-1], *x.shape[:-1])
        return values, turned, jnp.max(found.largest)

    if devices.current() is None:
        return of_shard(x, scale)
    axes: tuple = ()
    if x.ndim == 3:
        axes = devices.ROWS, devices.CONTEXT
        axes = axes if x.shape[1] % devices.n_sequence_shards() == 0 else axes[:1]

    def of_all(x, scale):
        *both, largest = of_shard(x, scale)
        return *both, over_shards(largest) if axes else largest

    specs = Spec(*axes) if rows else None, Spec(None, *axes) if columns else None, Spec()
    return devices.per_shard(of_all, (Spec(*axes), Spec()), specs)(x, scale)


def _scaled_in(dtype: Any) -> Any:
    """The dtype that holds numbers of another times their scale: float32 for float16."""
    return jnp.promote_types(dtype, jnp.bfloat16)


def products(
    x: Float[Array, "*d K"],
    matrices: Sequence[Float[Array, "K _"]],
    seen: Sequence[Buffer] | None = None,
) -> list[Float[Array, "*d _"]]:
    """`x @ w` for each matrix in the dtype of `x`, from all of them rounded to e4m3.

    The gradients multiply the rounded `x` and `w` by that of the output, rounded to e5m2. The
    gradient of `w` has the dtype of `w`.

    Args:
      x: the array, which is rounded once.
      matrices: the matrices.
      seen: the `History` of each matrix, for delayed scales. A training step writes its largest
        numbers to it (`reformax.buffers`). None: scales are those of the arrays.

    Raises:
      NotImplementedError: a GPU that cannot multiply FP8 numbers.
    """
    check_device()
    values = [None] * len(matrices) if seen is None else [past.value for past in seen]
    return _products(x, tuple(matrices), tuple(values))


def named_products(
    params: dict[str, Any], x: Float[Array, "*d K"], matrices: dict[str, Float[Array, "K _"]]
) -> list[Float[Array, "*d _"]]:
    """`products` with the histories that a layer's weights have of matrices by their names."""
    seen = [params[HISTORY][name] for name in matrices] if HISTORY in params else None
    return products(x, list(matrices.values()), seen)


@jax.custom_vjp
def _products(x, matrices, seen):
    return _outputs(x, matrices, seen, with_gradient=False)[0]


def _outputs(x, matrices, seen, with_gradient: bool):
    """The products, and their operands: `with_gradient` also as the backward pass reads them."""
    of_x = quantize(x, E4M3, rows_of(seen[0])[0], columns=with_gradient)
    weights = [
        quantize(w, E4M3, rows_of(past)[1], rows=with_gradient, columns=True)
        for w, past in zip(matrices, seen, strict=True)
    ]
    outs = [
        contract(copy, w, x.dtype) for copy, w in zip(_apart(of_x, weights), weights, strict=True)
    ]
    return outs, of_x, weights


def _forward(x, matrices, seen):
    outs, of_x, weights = _outputs(x, matrices, seen, with_gradient=True)
    like = [jnp.zeros(0, w.dtype) for w in matrices]
    kept = [w._replace(columns=None) for w in weights]
    return outs, (of_x._replace(rows=None), kept, like, seen)


def _backward(residuals, d_outs):
    of_x, weights, like, seen = residuals
    gradients = [
        quantize(d_out, E5M2, rows_of(past)[2], columns=True)
        for d_out, past in zip(d_outs, seen, strict=True)
    ]
    dtype = d_outs[0].dtype
    parts = [contract(d, w, dtype, of_rows=True) for d, w in zip(gradients, weights, strict=True)]
    d_matrices = [
        of_weights(copy, d, w.dtype)
        for copy, d, w in zip(_apart(of_x, weights), gradients, like, strict=True)
    ]
    changes = [
        None if past is None else change(past, of_x, w, d)
        for past, w, d in zip(seen, weights, gradients, strict=True)
    ]
    # In this order XLA has each product add to the sum of those before.
    d_x = functools.reduce(lambda total, part: part + total, parts)
    return d_x, tuple(d_matrices), tuple(changes)


def _apart(x: Quantized, weights: Sequence[Any]) -> list[Quantized]:
    """`x` for each of the matrices, as `matrices.products` keeps their products apart."""
    if jax.default_backend() != "gpu":
        return [x] * len(weights)
    rows, columns = (
        [None] * len(weights) if y is None else copies(y, len(weights)) for y in (x.rows, x.columns)
    )
    return [x._replace(rows=y, columns=z) for y, z in zip(rows, columns, strict=True)]


_products.defvjp(_forward, _backward)


def rows_of(seen: Float[Array, "3 S"] | None) -> Sequence[Float[Array, " S"] | None]:
    """The rows of a history that the scales of `x`, `w` and the output's gradient come from."""
    return (None,) * len(OPERANDS) if seen is None else tuple(seen)


def change(seen: Float[Array, "3 S"], *operands: Quantized) -> Float[Array, "3 S"]:
    """The cotangent of a history, for `History.after`: the largest numbers' powers, in front."""
    largest = jnp.stack([x.largest for x in operands])
    ratio = jnp.clip(largest / _before(seen, OPERANDS), 1 / REACH, REACH)
    return jnp.zeros_like(seen).at[:, 0].set(jnp.where(largest > 0, ratio**8, 0))


def contract(x: Quantized, w: Quantized, dtype: Any, of_rows: bool = False) -> Float[Array, "*d _"]:
    """`x @ w` from rows of `x` and columns of `w`, or with `of_rows`, `x @ w.T` from its rows."""
    other = w.rows if of_rows else w.columns
    # Gradients are summed up exactly; the faster sums have some 14 bits.
    exact = lax.Precision.HIGHEST if of_rows else lax.Precision.DEFAULT
    axes = (x.rows.ndim - 1,), (1,)
    return _dot(x.rows, other, axes, x.scale * w.scale, dtype, exact)


def of_weights(x: Quantized, d_out: Quantized, dtype: Any) -> Float[Array, "K N"]:
    """`x.T @ d_out`, summed over all rows, from the columns of both."""
    axes = (tuple(range(1, x.columns.ndim)),) * 2
    scale = x.scale * d_out.scale
    return _dot(x.columns, d_out.columns, axes, scale, dtype, lax.Precision.HIGHEST)


def _dot(x: Array, y: Array, axes, scale: Float[Array, ""], dtype: Any, precision: Any) -> Array:
    if jax.default_backend() != "gpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    # XLA hands the factor behind an FP8 product to cuBLASLt, which scales before it rounds.
    accum = _scaled_in(dtype)
    out = lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=accum)
    return (out * (1 / scale).astype(accum)).astype(dtype)


def check_device() -> None:
    """Raises `Unsupported` on a GPU without FP8 products; other machines round and multiply."""
    if jax.default_backend() != "gpu":
        return
    device = jax.local_devices()[0]
    if this_gpu.compute_capability(device) < 8.9:
        raise Unsupported(
            f"dtype is 'float8': the device {device.device_kind!r} does not multiply FP8 numbers, "
            "which takes an NVIDIA GPU of Ada, Hopper or later; use dtype='bfloat16'"
        )

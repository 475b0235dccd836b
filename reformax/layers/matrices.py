"""Products with matrices: several of one array, what fits them, and those of a step of decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from reformax import devices
from reformax.ops.calls.dispatch import INTERPRETED, choose_impl
from reformax.ops.numerics.precision import accum_dtype

if TYPE_CHECKING:
    from reformax.layers.layer_norm import LayerNorm

# The most numbers of a row that "auto" takes a kernel for: a program has the row and two of the
# matrix on the chip.
MOST = 4096
# The most rows that another kernel multiplies with a matrix in 16 bits: a tensor core's tile.
FEW = 16
# What a step's error says of the weights that `apply` reads.
FOR_DECODING = "expected those of for_decoding(params)"


def relu_squared(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`max(x, 0)^2` (So et al. 2021, "Primer: Searching for Efficient Transformers", sec. 4)."""
    positive = jax.nn.relu(x)
    return positive * positive


# The activations of kernels.
IN_KERNELS = (jax.nn.gelu, jax.nn.relu, relu_squared)


def products(
    x: Float[Array, "*d D"], matrices: Sequence[Float[Array, "D _"]]
) -> list[Float[Array, "*d _"]]:
    """`x @ w` for each matrix; on a GPU as separate products in both passes.

    A GPU's XLA would merge some of them into one product. It would then split the output by copies,
    and join the outputs' gradients by copies: more reads and writes than separate products have.
    """
    apart = jax.default_backend() == "gpu"
    return _apart(x, list(matrices)) if apart else [x @ w for w in matrices]


# Between the passes `x` is kept, and not its copies, which are made again.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _apart(x, matrices):
    return [copy @ w for copy, w in zip(copies(x, len(matrices)), matrices, strict=True)]


def copies(x: Array, n: int) -> list[Array]:
    """`x` `n` times, which the compiler does not know to be one."""
    copies = [x]
    for _ in range(n - 1):
        copies.append(lax.optimization_barrier(copies[-1]))
    return copies


def transposed_on_gpu(w: Float[Array, "I J"]) -> Float[Array, "I J"]:
    """The transpose of `w` on a GPU, elsewhere `w`: how decoding keeps a matrix between steps.

    On a GPU XLA multiplies a single row with the transpose by sums over its rows. Along columns it
    would write every product to memory first. A CPU multiplies several rows faster by `w` itself.
    """
    return w.T if jax.default_backend() == "gpu" else w


class Unnormed(NamedTuple):
    """`norm(x)`, not computed yet: what a sublayer reads in a step of decoding."""

    norm: LayerNorm
    params: Any  # the norm's
    x: Float[Array, "B T D"]


def computed(x: Float[Array, "B T D"] | Unnormed) -> Float[Array, "B T D"]:
    """The norm's output, or an array as it is."""
    return x.norm.apply(x.params, x.x) if isinstance(x, Unnormed) else x


def affine(
    x: Float[Array, "B T D"] | Unnormed,
    w: Float[Array, "D E"],
    b: Float[Array, " E"] | None = None,
    *,
    activation: Callable[[Array], Array] | None = None,
    added: Float[Array, "B T E"] | None = None,
    sizes: Sequence[int] = (),
    impl: str = "auto",
) -> list[Float[Array, "B T _"]]:
    """`added + activation(x @ w + b)`, in parts, as a step of decoding computes it.

    Args:
      x: the input; the norm of an `Unnormed` one is computed first.
      w: the matrix as `transposed_on_gpu` keeps it. The output is rounded to its dtype.
      b: the bias.
      activation: the nonlinearity; None: none.
      added: the stream that the output is added to, in its dtype.
      sizes: of the parts; (): the whole.
      impl: as in `FeedForward`. The kernel of a single row computes all of this, the norm for each
        of its programs anew. That of up to `FEW` rows in 16 bits computes all but the norm. "auto"
        takes them on a GPU.

    Raises:
      NotImplementedError: a kernel asked for cannot run here.
    """
    rows = x.x if isinstance(x, Unnormed) else x
    size = rows.shape[-1]
    few = size < rows.size <= FEW * size and w.dtype.itemsize == 2
    pays = few or (rows.size == size <= MOST and accum_dtype(w.dtype) == jnp.float32)
    pays = pays and (activation is None or activation in IN_KERNELS)
    chosen = choose_impl(impl, pays, pallas=None) if rows.size else "xla"
    sizes = tuple(sizes) or (b.size if b is not None else transposed_on_gpu(w).shape[1],)
    if chosen == "xla":
        x = computed(x)
        y = x @ transposed_on_gpu(w)
        if activation is not None:
            y = y.astype(accum_dtype(y.dtype))
        y = y if b is None else y + b[None, None]
        y = (y if activation is None else activation(y)).astype(w.dtype)
        y = y if added is None else added + y.astype(added.dtype)
        return jnp.split(y, list(accumulate(sizes))[:-1], axis=-1)
    from reformax.layers.kernels import few_rows, one_row

    if few:
        x = rows = computed(x)
    epsilon = norm = None
    if isinstance(x, Unnormed):
        epsilon, norm = x.norm.epsilon, x.norm.factors(x.params)
    options = one_row.OneRowOptions(epsilon, activation, sizes, chosen == INTERPRETED)
    kernel = few_rows if few else one_row

    def of_rows(first, x, added, w, b, norm):
        del first
        flat = (None if y is None else y.reshape(-1, y.shape[-1]) for y in (x, added))
        parts = kernel.affine(options, one_row.OneRowInputs(*flat, w, b, norm))
        return [part.reshape(*x.shape[:2], -1) for part in parts]

    w = w if jax.default_backend() == "gpu" else w.T
    return devices.by_positions(of_rows, (rows, added), (w, b, norm))

"""The vocabulary of the kernels: to read and write tiles, take a step of the softmax, launch.

A *tile* is an array that a program holds on the chip; its sides are powers of two. A *block* is
some positions, a NamedTuple of arrays; `column` and `line` make it one of a tile's two sides.

Letters as in `reformax.ops.base`; I, J and K are sides of tiles, L is the length of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.devices import varying_as, varying_axes
from reformax.ops.masking.padding import tokens_only
from reformax.ops.softmax import dropout
from reformax.ops.softmax.online import Softmax, lowest, nonzero

# A row's maximum starts here. Half, because it is multiplied by log2(e).
LOWEST = lowest(jnp.float32) / 2
LOG2_E = math.log2(math.e)
# Parts of a number of float32 (`in_three`).
N_PARTS = 3

T = TypeVar("T")


def power_of_two(n: int) -> int:
    """The side of a tile that holds `n` numbers: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


# Blocks.


def column(block: T) -> T:
    """A block, or any tree of arrays `[L]`, as a side of a tile, `[L, 1]`."""
    return jax.tree.map(lambda x: x if isinstance(x, bool) else x[:, None], block)


def line(block: T) -> T:
    """The same as the other side, `[1, L]`."""
    return jax.tree.map(lambda x: x if isinstance(x, bool) else x[None, :], block)


# Reading and writing. A mask of None reads, or writes, everything.


def load(view: Any, mask: Bool[Array, "*d"] | None, other: float = 0) -> Array:
    """The values at a view of a reference; `other` where the mask is False."""
    return pltriton.load(view) if mask is None else pltriton.load(view, mask=mask, other=other)


def chosen_bits(
    ref: Any, batch: Any, query: Array, key: Array, exists: Bool[Array, "I J"] | None
) -> Bool[Array, "I J"]:
    """Whether each query has chosen each key, of words `[B, T, S / 32]` with a bit for a key.

    Args:
      ref: the reference.
      batch: the sequence.
      query, key: positions, as two sides of a tile.
      exists: whether a query may have chosen a key; None: any may. Else it has not.
    """
    shape = jnp.broadcast_shapes(query.shape, key.shape)
    query, key = (jnp.broadcast_to(x, shape) for x in (query, key))
    if exists is not None:
        exists = jnp.broadcast_to(exists, shape)
        query, key = (jnp.where(exists, x, 0) for x in (query, key))
    word = load(ref.at[batch, query, lax.shift_right_logical(key, jnp.int32(5))], exists, 0)
    return (lax.shift_right_logical(word, key & jnp.int32(31)) & jnp.int32(1)) != 0


def view_rows(
    ref: Any, batch: Any, position: Int[Array, " L"], head: Any, width: int, exists: Array | None
) -> tuple[Any, Bool[Array, "L J"] | None]:
    """Rows of `[B, T, N, H]` as a tile, for `load` and `store`, and the mask of what exists.

    Args:
      ref: the reference.
      batch: the sequence.
      position: the rows.
      head: the head.
      width: J, of the tile; numbers from H on do not exist.
      exists: whether each row does; None: all do.
    """
    size = ref.shape[3]
    number = jnp.arange(width, dtype=jnp.int32)[None, :]
    view = ref.at[batch, position[:, None], head, number]
    shape = len(position), width
    mask = None if exists is None else jnp.broadcast_to(exists[:, None], shape)
    if width != size:
        inside = number < size
        mask = jnp.broadcast_to(inside, shape) if mask is None else mask & inside
    return view, mask


# Arithmetic.


def product(
    a: Float[Array, "I J"], b: Float[Array, "J K"], transpose_b: bool = False
) -> Float[Array, "I K"]:
    """The product of two tiles, summed in float32."""
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def product_in_parts(
    a: tuple[Float[Array, "I J"], ...],
    b: Sequence[Any],
    read: Callable[[Any], Float[Array, "K J"]] = lambda part: part,
    transposed: bool = False,
) -> Float[Array, "I K"]:
    """The product `a b^T` of numbers that are sums of parts (`in_three`), exact to float32.

    Args:
      a: the parts of one side, the largest first.
      b: those of the other.
      read: of a part of b, just before it is needed.
      transposed: whether the result is `b a^T`.
    """
    total = None
    for i, ref in reversed(list(enumerate(b))):  # small ones first
        part = read(ref)
        for other in reversed(a[: N_PARTS - i]):  # smaller products have no say in the digits
            pair = (part, other) if transposed else (other, part)
            found = product(*pair, transpose_b=True)
            total = found if total is None else total + found
    return total


def hide(logits: Float[Array, "I J"], visible: Bool[Array, "I J"] | None) -> Float[Array, "I J"]:
    """The logits of what is visible, minus infinity elsewhere; None: all is visible."""
    return logits if visible is None else jnp.where(visible, logits, -jnp.inf)


def empty_softmax(n_rows: int, d_v: int) -> Softmax:
    """The state of rows that have seen nothing."""
    acc = jnp.zeros((n_rows, power_of_two(d_v)), jnp.float32)
    row_max = jnp.full((n_rows,), LOWEST, jnp.float32)
    return Softmax(acc, row_max, jnp.zeros_like(row_max))


def softmax_step(
    state: Softmax,
    logits: Float[Array, "I J"],
    v: Float[Array, "J K"],
    size: int,
    dropout_mask: Float[Array, "I J"] | float,
) -> Softmax:
    """The state with another tile of keys (Dao et al. 2022, algorithm 2).

    Maxima are of the plain products: scale and base go into the exponent, one multiply-add.

    Args:
      state: of the queries' rows.
      logits: products of queries and keys, before they are scaled, through `hide`.
      v: the keys' values.
      size: H; the scale is `1 / sqrt(H)`.
      dropout_mask: what to multiply the weights by.
    """
    scale = LOG2_E / math.sqrt(size)
    row_max = jnp.maximum(state.row_max, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits * scale - (row_max * scale)[:, None])
    decay = jnp.exp2((state.row_max - row_max) * scale)
    row_sum = state.row_sum * decay + jnp.sum(weights, axis=1)
    weights = weights * dropout_mask
    acc = state.acc * decay[:, None] + product(weights.astype(v.dtype), v)
    return Softmax(acc, row_max, row_sum)


class QueryRows(NamedTuple):
    """The rows of queries that a backward pass reads.

    Statistics of rows are `[B, N, T]`, or in another order of the positions.
    """

    d_out: Float[
        Array, "B T N V"
    ]  # divided by the sum of the row's softmax, unless by `inverse_sum`
    dot: Array  # the product of the output and `d_out`
    row_max: Array  # the row's largest logit
    row_sum: Array | None  # the sum of its softmax, where a kernel asks
    inverse_sum: Array | None  # 1 / sum, where `d_out` is not divided by it


def query_rows(
    d_out: Float[Array, "B T N V"],
    out: Float[Array, "B T N V"],
    row_max: Float[Array, "B N T"],
    row_sum: Float[Array, "B N T"],
    ids: Int[Array, "B T"] | None,
) -> QueryRows:
    """`QueryRows` of the gradient of the output and the results of the forward pass.

    With the segments `ids`, the gradient is zeros at padding.

    `d_out` is divided by the sum of the softmax, so that the weights need not be. Float16 may not
    hold the quotient: there the weights are multiplied by `inverse_sum` instead.

    `dot` is D_i = sum_j P_ij dP_ij = dO_i . O_i (Dao et al. 2022, appendix B.2).
    """
    inverse_sum = 1.0 / nonzero(row_sum)
    dtype, d_out = out.dtype, d_out.astype(jnp.float32)
    d_out = d_out if ids is None else tokens_only(d_out, ids)
    if dtype != jnp.float16:
        d_out, inverse_sum = d_out * jnp.swapaxes(inverse_sum, 1, 2)[..., None], None
    dot = jnp.swapaxes(jnp.sum(d_out * out.astype(jnp.float32), axis=-1), 1, 2)
    return QueryRows(d_out.astype(dtype), dot, row_max, None, inverse_sum)


def recompute_weights(
    logits: Float[Array, "I J"], row_max: Array, inverse_sum: Array | None, size: int
) -> Float[Array, "I J"]:
    """The weights of a tile, in a backward pass, not yet divided by their sum.

    Args:
      logits: as in `softmax_step`, or transposed.
      row_max: the rows' largest logits times `LOG2_E / sqrt(size)`, as a side of the tile.
      share: as in `QueryRows`, as a side of the tile; it divides them.
      size: H.
    """
    weights = jnp.exp2(logits * (LOG2_E / math.sqrt(size)) - row_max)
    return weights if inverse_sum is None else weights * inverse_sum


def dropout_mask(
    seed: Any, rate: float, batch: Any, head: Any, query: Array, key: Array
) -> Float[Array, "I J"] | float:
    """`ops.softmax.dropout.dropout_mask`, given a reference to the seed; 1.0 if that is None."""
    if seed is None:
        return 1.0
    return dropout.dropout_mask(tuple(seed[i] for i in range(6)), rate, batch, head, query, key)


def launch(
    kernel: Callable[..., None],
    inputs: tuple,
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Runs a kernel and returns its outputs.

    Args:
      kernel: called with references to the inputs and then to the outputs, trees as given here.
      inputs: trees of arrays.
      out_shape: a tree of shapes, or a tuple of trees.
      grid: programs along each axis.
      num_warps: warps of a program.
      num_stages: how many steps of a loop have their loads under way.
      interpret: whether to run anywhere, slowly.
      name: the kernel's, in profiles.
      aliases: which output, of all leaves, takes the place of which input.

    Raises:
      NotImplementedError: it is to be interpreted in a `jax.shard_map` with `check_vma=True`.
    """
    if interpret and varying_axes(inputs):
        raise NotImplementedError(
            "impl='pallas_interpret' in a jax.shard_map: pass it check_vma=False, which JAX's "
            "interpreter of kernels needs, or use impl='auto' or 'xla'"
        )

    def empty():
        # Where JAX checks along which axes arrays vary, outputs do as inputs.
        return varying_as(inputs, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape))

    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.eval_shape(empty),
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*inputs)

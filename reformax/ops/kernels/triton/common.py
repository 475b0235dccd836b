"""Functions of all kernels: reads and writes of tiles, products, the online softmax, launches.

A *tile* is an array that a program holds on the chip. Its sides are powers of two. A *block* is
several positions, a NamedTuple of arrays. `column` and `line` make it one of a tile's two sides.

Letters as in `reformax.ops.base`; I, J and K are sides of tiles, L is the length of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.devices import varying_as, varying_axes
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import Side, all_of
from reformax.ops.softmax import dropout
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax, lowest, nonzero

# The initial maximum of a row.
LOWEST = lowest(jnp.float32)
LOG2_E = math.log2(math.e)

T = TypeVar("T")


def tile_side(n: int) -> int:
    """The side of a tile that holds `n` numbers: a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


# Blocks.


def column(block: T) -> T:
    """A block, or any tree of arrays `[L]` and of scalars, as a side of a tile, `[L, 1]`."""
    return jax.tree.map(lambda x: x[:, None] if jnp.ndim(x) else x, block)


def line(block: T) -> T:
    """A block, or any such tree, as the other side of a tile, `[1, L]`."""
    return jax.tree.map(lambda x: x[None, :] if jnp.ndim(x) else x, block)


# Reading and writing. A mask of None reads, or writes, everything.


def load(view: Any, mask: Bool[Array, "*d"] | None, other: float = 0) -> Array:
    """Reads a view of a reference; `other` where the mask is False."""
    return pltriton.load(view) if mask is None else pltriton.load(view, mask=mask, other=other)


def bits_of(chosen: Int[Array, "B T K"], n_keys: int) -> Int[Array, "B T words"]:
    """Words with a bit for each key, set where the query chose it."""
    n_batch, length, _ = chosen.shape
    n_words = -(-n_keys // 32)
    row, query, _ = jnp.ogrid[:n_batch, :length, :1]
    word = jnp.where(chosen < 0, n_words, chosen >> 5)
    bit = jnp.left_shift(jnp.int32(1), chosen & 31)
    # Each position is chosen at most once, so the sum of the bits is their union.
    return (
        jnp.zeros((n_batch, length, n_words), jnp.int32).at[row, query, word].add(bit, mode="drop")
    )


def tile_bits(
    ref: Any, batch: Any, query: Side, key: Side, first: Any, n_keys: int
) -> Bool[Array, "I J"]:
    """Whether each query has chosen each key of a tile, by the words of `bits_of`.

    Args:
      query, key: two sides of the tile; False where either does not exist.
      first, n_keys: the tile's first key, and their number: 16, or a multiple of a word's 32. The
        first is a multiple of it.
    """
    n_words, first_word = ref.shape[2], lax.shift_right_logical(first, jnp.int32(5))
    words = None
    for i in range(-(-n_keys // 32)):
        word = first_word + i
        exists = jnp.broadcast_to(word < n_words, query.position.shape)
        exists = all_of(exists, query.exists)
        position = jnp.where(exists, query.position, 0)
        found = load(ref.at[batch, position, jnp.where(word < n_words, word, 0)], exists, 0)
        is_later = key.position >= (word << 5)
        words = found if words is None else jnp.where(is_later, found, words)
    bit = (lax.shift_right_logical(words, key.position & jnp.int32(31)) & jnp.int32(1)) != 0
    return bit if key.exists is None else bit & key.exists


def view_rows(
    ref: Any, batch: Any, position: Int[Array, " L"], head: Any, width: int, exists: Array | None
) -> tuple[Any, Bool[Array, "L J"] | None]:
    """A view of rows of `[B, T, N, H]` as a tile, for `load` and `store`, and its mask.

    Args:
      width: J, the columns of the tile. Columns from H on are masked.
      exists: whether each row exists; None: all rows exist.
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


def matmul(
    a: Float[Array, "I J"], b: Float[Array, "J K"], transpose_b: bool = False
) -> Float[Array, "I K"]:
    """The product of two tiles, summed in float32."""
    return tile_product(a, b, "11" if transpose_b else "10")


def tile_product(a, b, contract: str = "10") -> Float[Array, "I K"]:
    """The product of two tiles, summed in float32 over the axes `contract`."""
    dims = (((int(contract[0]),), (int(contract[1]),)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def matmul_in_parts(
    a: Sequence[Float[Array, "I J"]],
    b: Sequence[Any],
    read: Callable[[Any], Float[Array, "K J"]] = lambda part: part,
    transposed: bool = False,
    contract: str = "11",
) -> Float[Array, "I K"]:
    """The product of tiles that are sums of parts; with three of bfloat16, it is exact to float32.

    Args:
      a: the parts of the left side, the largest first.
      b: the parts of the right side, the largest first.
      read: loads a part of b just before its products.
      transposed: whether b is the left side.
      contract: the axes that are summed over.
    """
    total, n_parts = None, max(len(a), len(b))
    for i, ref in reversed(list(enumerate(b))):  # the smallest first
        part = read(ref)
        for other in reversed(a[: n_parts - i]):  # smaller products do not change the result
            pair = (part, other) if transposed else (other, part)
            found = tile_product(*pair, contract)
            total = found if total is None else total + found
    return total


def hide(logits: Float[Array, "I J"], visible: Bool[Array, "I J"] | None) -> Float[Array, "I J"]:
    """The logits where `visible`, minus infinity elsewhere; None: all keys are visible."""
    return logits if visible is None else jnp.where(visible, logits, -jnp.inf)


def empty_softmax(n_rows: int, d_v: int) -> Softmax:
    """The softmax of rows before the first key."""
    acc = jnp.zeros((n_rows, tile_side(d_v)), jnp.float32)
    row_max = jnp.full((n_rows,), LOWEST, jnp.float32)
    return Softmax(acc, row_max, jnp.zeros_like(row_max))


def statistics_step(
    row_max: Float[Array, " I"],
    row_sum: Float[Array, " I"],
    logits: Float[Array, "I J"],
    scale: float,
) -> tuple[Array, Array, Array, Array]:
    """Adds a tile of keys to the maximum and the sum of its rows.

    Within a kernel, maxima are those of the unscaled products: one multiply-add in the exponent
    applies the scale and the base. A kernel stores the largest logits: maxima times 1 / sqrt(H).

    Returns:
      The maximum and the sum, the tile's weights, and the factor of earlier weights.
    """
    new_max = jnp.maximum(row_max, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits * scale - (new_max * scale)[:, None])
    decay = jnp.exp2((row_max - new_max) * scale)
    return new_max, row_sum * decay + jnp.sum(weights, axis=1), weights, decay


def softmax_shapes(q: Float[Array, "B T N H"], v: Float[Array, "B S G V"]) -> Softmax:
    """The shapes of a finished softmax: its output, and each row's maximum and sum."""
    n_batch, length, n_heads, _ = q.shape
    statistic = jax.ShapeDtypeStruct((n_batch, n_heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype)
    return Softmax(out, statistic, statistic)


class QueryRows(NamedTuple):
    """The arrays that a backward pass reads of each query.

    Statistics of rows are `[B, N, T]`, or in another order of the positions.
    """

    # The gradient of the output, divided by the row's sum where `inverse_sum` is None.
    d_out: Float[Array, "B T N V"]
    dot: Array  # the product of the output and its gradient
    row_max: Array  # the row's largest logit
    row_sum: Array | None  # the sum of the row's softmax; None where no kernel reads it
    inverse_sum: Array | None  # 1 / `row_sum`; None where `d_out` is already divided by the sum

    @classmethod
    def of(cls, d_out: Float[Array, "B T N V"], results: Results, ids: Array | None) -> Self:
        """Makes them from the gradient of the output and the results of the forward pass.

        With the segments `ids [B, T]`, the gradient is zeros at padding.

        Dividing `d_out` by the sum of the softmax saves the division of the weights. Float16 may
        not hold the quotient: kernels then multiply the weights by `inverse_sum`.

        `dot` is D_i = sum_j P_ij dP_ij = dO_i . O_i (Dao et al. 2022, appendix B.2).
        """
        out, row_max, row_sum = results
        inverse_sum = 1.0 / nonzero(row_sum)
        dtype, d_out = out.dtype, d_out.astype(jnp.float32)
        d_out = d_out if ids is None else tokens_only(d_out, ids)
        if dtype != jnp.float16:
            d_out, inverse_sum = d_out * jnp.swapaxes(inverse_sum, 1, 2)[..., None], None
        dot = jnp.swapaxes(jnp.sum(d_out * out.astype(jnp.float32), axis=-1), 1, 2)
        return cls(d_out.astype(dtype), dot, row_max, None, inverse_sum)


def recompute_weights(
    logits: Float[Array, "I J"], row_max: Array, inverse_sum: Array | None, size: int
) -> Float[Array, "I J"]:
    """The weights of a tile in a backward pass.

    Args:
      logits: unscaled products of queries and keys, from `hide`, or transposed.
      row_max: the rows' largest logits times `LOG2_E`, as a side of the tile.
      inverse_sum: as in `QueryRows`, as a side of the tile. With None the weights are not divided
        by their sum.
      size: H.
    """
    weights = jnp.exp2(logits * (LOG2_E / math.sqrt(size)) - row_max)
    return weights if inverse_sum is None else weights * inverse_sum


def tile_dropout_mask(
    seed: Any, rate: float, batch: Any, head: Any, query: Array, key: Array
) -> Float[Array, "I J"] | float:
    """`ops.softmax.dropout.dropout_mask` of a reference to the seed; 1.0 where that is None."""
    if seed is None:
        return 1.0
    return dropout.dropout_mask(tuple(seed[i] for i in range(6)), rate, batch, head, query, key)


def name_of(kernel: Callable[..., None]) -> str:
    """The name of a kernel, such as "forward" of the function `_forward_kernel`."""
    return getattr(kernel, "func", kernel).__name__.strip("_").removesuffix("_kernel")


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
      kernel: called with references to the inputs and then to the outputs, in the same trees.
      inputs: trees of arrays.
      out_shape: a tree of shapes, or a tuple of trees.
      grid: programs along each axis.
      num_warps: warps of a program.
      num_stages: pipeline stages, the steps of a loop whose loads are in flight.
      interpret: whether to run on any device, slowly.
      name: the name in profiles.
      aliases: the output that overwrites each input, both by their index among all leaves.

    Raises:
      NotImplementedError: `interpret` within a `jax.shard_map` with `check_vma=True`.
    """
    if interpret and varying_axes(inputs):
        raise NotImplementedError(
            "impl=INTERPRETED in a jax.shard_map: pass it check_vma=False, which JAX's "
            "interpreter of kernels needs, or use impl='auto' or 'xla'"
        )

    def empty():
        # With `check_vma=True`, outputs vary along the mesh axes of the inputs.
        return varying_as(inputs, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape))

    shapes, tree = jax.tree.flatten(jax.eval_shape(empty))
    static = tuple(shapes), tree, grid, num_warps, num_stages, interpret, name
    static += (tuple((aliases or {}).items()),)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        return _launcher(kernel, *static)(*inputs)
    return _kept_launcher(_Kernel(kernel), *static)(*inputs)


class _Kernel(functools.partial):
    """A kernel with its static arguments, equal to another of equal ones."""

    @property
    def _parts(self) -> Any:
        return self.func, self.args, frozenset(self.keywords.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


def _launcher(
    kernel, shapes, tree, grid, num_warps, num_stages, interpret, name, aliases
) -> Callable[..., Any]:
    """A function that JAX compiles, once for each choice of shapes."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.tree.unflatten(tree, shapes),
        input_output_aliases=dict(aliases),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )


# For calls outside of `jax.jit`, such as of a step of decoding, which would compile every time.
_kept_launcher = functools.lru_cache(maxsize=256)(_launcher)

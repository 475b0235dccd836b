"""Attention of groups of heads to the keys that a list names: Pallas kernels for Triton.

Each query has a list of keys, or of summaries, for all heads. A program has one query: the heads of
a key head are the rows of its tile (Yuan et al. 2025, "Native Sparse Attention", sec. 3.4), and it
loops over the list.

The gradient of keys is a sum over the queries whose lists name them. It has one order and no
atomics, so that training resumes bit for bit. For a chunk of queries at a time,

  * the program of a query writes what each key of its list gets from its heads. It computes the
    gradient of the query from the same weights: five products instead of the three of that alone;
  * a stable sort of the chunk's pairs by their keys lists the queries of each key, in order;
  * the program of a key adds what these wrote, in that order, to float32 sums.

A chunk is of few enough queries that their contributions take `MAX_BYTES`. So no key has a long
list of queries, not even one that every query sees.

The cost of a query and key head with K keys of H and V numbers, M query heads, b bytes a number:

    read K (H + V) b in both passes; written, and read by the sums, as much each
    products of max(M, 16) rows and K keys: 2 forward, 5 backward

Tiles share keys among 64 or 128 queries, lists among one query's heads. So tiles take less where a
key head has few query heads or a query sees many of the keys: `pays` compares the two. With 65,536
queries that each see 2,048 keys, in bfloat16 and 32 heads of 128 on one key head, an H200 took:

    forward        11.1 ms    69 GB are read, of 34 MB that the second cache holds
    gradients      40.2       as much is read, and written
    sorts           6.0       of 134 million pairs
    sums           26.1       what was written is read
    all tiles   1,324         both passes, with masks that were read bit by bit

Letters as in `reformax.ops.base`; K keys of a list, S keys, M query heads of a key head, P programs
of a key head, C queries of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.common import (
    QueryRows,
    launch,
    load,
    name_of,
    softmax_shapes,
    tile_side,
)
from reformax.ops.kernels.triton.group_rows import GroupInputs, GroupProgram, GroupRows
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax

# Bytes of the rows of a program's queries. Wider groups are several programs' rows.
MAX_ROW_BYTES = 64 * 128 * 2
# Numbers of a tile of keys by the bytes of their dtype, and most keys of a tile.
TILE_NUMBERS, MAX_KEYS = {2: 64 * 128, 4: 32 * 128}, 64
# Bytes of the contributions of a chunk of queries, unless a key would get fewer of them on average
# than this: each chunk has a program for each key. One query of each row may take more.
MAX_BYTES, LEAST_PAIRS = 2**30, 8
# Numbers of a tile of contributions, which a warp adds.
SUM_NUMBERS = 2048
# The cost of a byte of each number of a chosen key, and of a row of its products, where that of a
# row of all tiles is 1.
BYTE_COST, ROW_COST, FEWEST_ROWS = 44, 2, 16


def pays(n_listed: int, n_keys: int, group: int, itemsize: int, causal: bool = True) -> bool:
    """Whether reading lists takes less time than a mask over all tiles, in both passes.

    The costs are estimates, of 117 ms for the lists of the module's docstring. Per number of a
    row, a list takes for each of its keys 1 ps a byte, of two passes at 5.7 TB/s and two at 3.5,
    and 14 operations for each of max(M, 16) rows at 180 TFLOP/s. All tiles take 18 for each of M
    rows and each key that causality leaves, at 200: half of S on average.

    Args:
      n_listed: K.
      n_keys: S.
      group: M.
      itemsize: b.
      causal: whether a query sees half of the keys on average.
    """
    of_lists = n_listed * (BYTE_COST * itemsize + ROW_COST * max(group, FEWEST_ROWS))
    return of_lists <= n_keys * group * (1 if causal else 2)


class ListedSizes(NamedTuple):
    """The kernels' static settings."""

    group: int  # M
    dropout: float
    logits: Logits
    causal: bool = True
    span: int = 1  # positions that a key summarizes; it is seen from the last one on
    far: bool = False  # as in `GroupProgram`

    @property
    def rule(self) -> Visibility:
        return Visibility(self.causal)


def _width(x: GroupInputs) -> int:
    """The columns of a tile."""
    return tile_side(max(x.q.shape[3], x.v.shape[3]))


def _n_programs(x: GroupInputs) -> int:
    """P, the programs of a key head."""
    group = x.q.shape[2] // x.k.shape[2]
    return -(-group // max(1, MAX_ROW_BYTES // (_width(x) * x.q.dtype.itemsize)))


def _n_rows(x: GroupInputs) -> int:
    """Query heads of a program."""
    return -(-(x.q.shape[2] // x.k.shape[2]) // _n_programs(x))


def _n_keys(x: GroupInputs) -> int:
    """Keys of a tile."""
    most = TILE_NUMBERS[x.k.dtype.itemsize] // _width(x)
    return min(MAX_KEYS, most, tile_side(x.chosen.shape[2]))


class ListedKeys(NamedTuple):
    """The keys of a tile, the position from which on each is seen, and their slots."""

    key: Array
    last: Array
    slot: Array
    ids: Array | None
    exists: Array


class Contributions(NamedTuple):
    """The gradients of keys and values by each pair of a query and a key of its list."""

    k: Any  # [B, G P, C, K, H]
    v: Any  # [B, G P, C, K, V]


@dataclasses.dataclass(frozen=True, eq=False)
class ListedProgram(GroupProgram):
    """One program: a query's heads of a key head, or as many as a tile holds.

    Attributes:
      head: of G P.
      index: the query's, in the lists.
    """

    sizes: ListedSizes

    @property
    def key_head(self):
        return lax.div(self.head, jnp.int32(_n_programs(self.x)))

    def queries(self) -> GroupRows:
        x, group = self.x, self.sizes.group
        position = self.index if x.start is None else x.start[0] + self.index
        row = jnp.arange(tile_side(_n_rows(x)), dtype=jnp.int32)
        member = lax.rem(self.head, jnp.int32(_n_programs(x))) * _n_rows(x) + row
        exists = (row < _n_rows(x)) & (member < group) & (position < x.q.shape[1])
        position = jnp.where(exists, position, 0)
        head = jnp.where(exists, self.key_head * group + member, 0)
        ids = None if x.ids is None else load(x.ids.at[self.batch, position], exists, 0)
        return GroupRows(position, head, ids, exists)

    def over_keys(self, queries: GroupRows, body: Callable, carry: Any) -> Any:
        x, n_listed, n_keys = self.x, self.x.chosen.shape[2], _n_keys(self.x)

        def step(i, carry):
            slot = i * n_keys + jnp.arange(n_keys, dtype=jnp.int32)
            exists = slot < n_listed
            at = jnp.where(exists, slot, 0)
            key = load(x.chosen.at[self.batch, self.index, at], exists, -1)
            exists, key = key >= 0, jnp.maximum(key, 0)
            ids = None if x.key_ids is None else load(x.key_ids.at[self.batch, key], exists, 0)
            last = key * self.sizes.span + (self.sizes.span - 1)
            return body(ListedKeys(key, last, slot, ids, exists), carry)

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n_listed // n_keys)), step, carry)

    def visible(self, rows: GroupRows, keys: ListedKeys) -> Array:
        side = Side(keys.key, keys.ids, keys.exists, keys.last)
        return self.sizes.rule.sees(Side(rows.position, rows.ids, rows.exists), side)


def put_contributions(
    ref: Any, at: tuple[Any, Any, Any], keys: Any, value: Float[Array, "J H"]
) -> None:
    """Writes what a query adds to the gradients of a tile of its list, rows of `[B, P, C, K, H]`.

    Args:
      at: the sequence, the program and the query.
      keys: the tile, with the `slot` of each key in the list, and whether it `exists`.
    """
    column = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
    view = ref.at[(*at, keys.slot[:, None], column)]
    mask = keys.exists[:, None] & (column < ref.shape[4])
    pltriton.store(view, value.astype(ref.dtype), mask=mask)


def _forward_kernel(x: GroupInputs, out: Softmax, *, sizes):
    program = ListedProgram.located(sizes, x)
    rows = program.queries()
    program.put_softmax(out, rows, flash.forward(program, rows))


def _gradients_kernel(x: GroupInputs, row: QueryRows, _, dq, out: Contributions, *, sizes):
    """The gradient of a query, and what it adds to those of the keys of its list."""
    program = ListedProgram.located(sizes, x, row)
    rows, at = program.queries(), (program.batch, program.head, program.index)

    def put(keys: ListedKeys, dk, dv):
        put_contributions(out.k, at, keys, dk * program.scale)
        put_contributions(out.v, at, keys, dv)

    sums = flash.d_queries(program, rows, program.rows(x.q, rows), put_keys=put)
    program.put_rows(dq, rows, sums * program.scale)


def _sums_kernel(pair, bounds, x: Sequence[Array], before, after, *, n_programs):
    """Adds the contributions to a key's gradients, in the order of the pairs."""
    key, head, batch = (pl.program_id(i) for i in range(3))
    first, end = (bounds[batch, key + jnp.int32(i)] for i in (0, 1))
    n_pairs = x[0].shape[2]
    widths = [tile_side(ref.shape[3]) for ref in x]
    n_rows = max(1, SUM_NUMBERS // max(widths))

    def rows(ref, width: int, program, at, exists) -> Array:
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        view = ref.at[batch, head * n_programs + program, at[:, None], column]
        return load(view, exists[:, None] & (column < ref.shape[3]), 0.0).astype(jnp.float32)

    def step(i, totals):
        number = first + i * n_rows + jnp.arange(n_rows, dtype=jnp.int32)
        exists = number < end
        at = load(pair.at[jnp.where(exists, number, 0)], exists, 0) - batch * n_pairs
        at = jnp.where(exists, at, 0)
        for program in range(n_programs):
            found = (rows(*of, program, at, exists) for of in zip(x, widths, strict=True))
            totals = tuple(map(jnp.add, totals, found))
        return totals

    @pl.when(end > first)
    def _():
        totals = tuple(jnp.zeros((n_rows, width), jnp.float32) for width in widths)
        n_tiles = lax.div(end - first + (n_rows - 1), jnp.int32(n_rows))
        totals = lax.fori_loop(jnp.int32(0), n_tiles, step, totals)
        for old, new, total in zip(before, after, totals, strict=True):
            column = jnp.arange(total.shape[1], dtype=jnp.int32)
            exists = column < old.shape[3]
            total = load(old.at[batch, key, head, column], exists, 0.0) + jnp.sum(total, axis=0)
            pltriton.store(new.at[batch, key, head, column], total, mask=exists)


def _launch(kernel, sizes: ListedSizes, interpret, inputs, shapes, aliases=None):
    x = inputs[0]
    return launch(
        functools.partial(kernel, sizes=sizes),
        inputs,
        shapes,
        grid=(x.chosen.shape[1], x.k.shape[2] * _n_programs(x), len(x.chosen)),
        num_warps=_warps(x, kernel is _gradients_kernel),
        num_stages=2,
        interpret=interpret,
        name=f"listed_{name_of(kernel)}",
        aliases=aliases,
    )


def _warps(x: GroupInputs, gradients: bool) -> int:
    """Two for the outputs of few heads, so that more programs wait for memory at once."""
    n_bytes = tile_side(_n_rows(x)) * _width(x) * x.q.dtype.itemsize
    if gradients:
        return 4 if n_bytes <= MAX_ROW_BYTES // 2 else 8
    return 2 if n_bytes <= MAX_ROW_BYTES // 2 else 4


def forward(sizes: ListedSizes, x: GroupInputs, interpret: bool) -> Results:
    """The results of `flash.attention`."""
    shapes = softmax_shapes(x.q, x.v)
    return tuple(_launch(_forward_kernel, sizes, interpret, (x,), (shapes,))[0])


def backward(
    sizes: ListedSizes, x: GroupInputs, results: Results, d_out, interpret: bool
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S G H"], Float[Array, "B S G V"]]:
    """The gradients of q, k and v."""
    (q, k, v), (n_batch, length, n_listed) = x[:3], x.chosen.shape
    row = QueryRows.of(d_out, results, x.ids)
    n_heads = k.shape[2] * _n_programs(x)
    n_bytes = n_heads * (k.shape[3] + v.shape[3]) * q.dtype.itemsize
    n_chunks = -(-length // n_in_chunk(n_batch, n_listed, k.shape[1], n_bytes))
    size = -(-length // n_chunks)
    padding = (0, 0), (0, n_chunks * size - length), (0, 0)
    padded = jnp.pad(x.chosen, padding, constant_values=-1)

    def contributions(y):
        return jax.ShapeDtypeStruct((n_batch, n_heads, size, n_listed, y.shape[3]), y.dtype)

    def of_chunk(carry, start):
        dq, sums = carry
        chunk = lax.dynamic_slice_in_dim(padded, start, size, axis=1)
        inputs = x._replace(chosen=chunk, start=start[None]), row, dq
        aliases = {len(jax.tree.leaves(inputs)) - 1: 0}
        shapes = (
            jax.ShapeDtypeStruct(dq.shape, dq.dtype),
            Contributions(contributions(k), contributions(v)),
        )
        dq, found = _launch(_gradients_kernel, sizes, interpret, inputs, shapes, aliases)
        return (dq, added(sums, found, chunk, _n_programs(x), interpret)), None

    sums = tuple(jnp.zeros(y.shape, jnp.float32) for y in (k, v))
    starts = size * jnp.arange(n_chunks, dtype=jnp.int32)
    (dq, (dk, dv)), _ = lax.scan(of_chunk, (jnp.zeros(q.shape, q.dtype), sums), starts)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def n_in_chunk(n_batch: int, n_listed: int, n_keys: int, n_bytes: int) -> int:
    """Queries of a chunk, of which a pair contributes so many bytes."""
    most = max(MAX_BYTES // n_bytes, LEAST_PAIRS * n_keys)
    return max(1, most // (n_batch * n_listed))


def queries_of_keys(
    listed: Int[Array, "B C K"], n_keys: int
) -> tuple[Int[Array, " B*C*K"], Int[Array, "B S+1"]]:
    """The pairs of queries and keys in the order of their keys, and then of their queries.

    Returns:
      The indices of the pairs in `listed`, all rows one after the other; then the first pair of
      each key, and the end of the row's pairs that exist.
    """
    row = jnp.arange(len(listed), dtype=jnp.int32)[:, None] * (n_keys + 1)
    key = (jnp.where(listed < 0, n_keys, listed) + row[..., None]).reshape(-1)
    number = jnp.arange(key.size, dtype=jnp.int32)
    in_order, pair = lax.sort((key, number), num_keys=1, is_stable=True)
    wanted = row + jnp.arange(n_keys + 1, dtype=jnp.int32)
    bounds = jnp.searchsorted(in_order, wanted.reshape(-1), method="scan_unrolled")
    return pair, bounds.reshape(wanted.shape).astype(jnp.int32)


def added(
    sums: tuple[Float[Array, "B S G _"], ...],
    found: Sequence[Float[Array, "B GP C K _"]],
    listed: Int[Array, "B C K"],
    n_programs: int,
    interpret: bool,
) -> tuple[Float[Array, "B S G _"], ...]:
    """The float32 sums of gradients of keys, with what the pairs of a chunk contribute.

    Args:
      sums: of one or more arrays.
      found: contributions to each, of `n_programs` programs of a key head.
      listed: the lists of the chunk's queries.
      n_programs: P.
    """
    (n_batch, n_keys, n_kv, _), n = sums[0].shape, len(sums)
    found = tuple(x.reshape(*x.shape[:2], -1, x.shape[4]) for x in found)
    return launch(
        functools.partial(_sums_kernel, n_programs=n_programs),
        (*queries_of_keys(listed, n_keys), found, sums),
        (tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in sums),),
        grid=(n_keys, n_kv, n_batch),
        num_warps=1,
        num_stages=2,
        interpret=interpret,
        name="listed_sums",
        aliases={2 + n + i: i for i in range(n)},
    )[0]

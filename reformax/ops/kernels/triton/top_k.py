"""The largest scores of each row, as a Pallas kernel for NVIDIA GPUs (Triton).

A program has a row, and reads it once. It does not sort.

  * A sample of the row gives a bound, which a few more than K scores reach.
  * The scores that reach it, and their positions, go to a list in order.
  * The list is held on the chip, and bisection finds its K-th largest score.
  * The positions whose scores reach that one are written in order. Of equal scores the first
    positions are chosen.

Exact counts decide. Where the list has less than K scores, or more than it holds, bisection over
the row finds another bound. Many scores may be equal to the bound (a sum of ReLUs is often 0): the
list has the first K of those, and all above. A short row is its own list.

Letters: F numbers of a row in memory, K positions of a row, M scores of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from reformax.ops.kernels.triton.common import launch, load, tile_side

# Scores of a tile of a row; the most of a tile of a list, which is held whole where it is one.
ROW_TILE, LIST_TILE, WARPS = 1024, 8192, 4
# A sample has so many groups of neighbours, which one read of memory fetches.
SAMPLES, NEIGHBOURS = 512, 8
# A row's length in memory is a multiple of this, so that a thread reads several numbers at once.
ALIGNED = 64
# The least scores of a list, and of a row that has one. Samples differ from their rows by less than
# half of a list.
MIN_LIST, MIN_ROW = 2048, 4096
# The score of what may not be chosen, and the largest.
HIDDEN, HIGHEST = -(2**31), 2**31 - 1


class RowRule(NamedTuple):
    """Where the rows of scores end."""

    length: int  # rows from this one on have no scores
    n_keys: int  # scores of a row
    # Whether a row has scores only of the keys up to itself. One below 0 has none.
    causal: bool = False
    span: int = 1  # positions of a key

    def end(self, row: Any) -> Any:
        seen = lax.div(row + 1, jnp.int32(self.span)) if self.causal else jnp.int32(self.n_keys)
        return jnp.where(row < self.length, jnp.clip(seen, 0, self.n_keys), 0)


class _TopKOutputs(NamedTuple):
    chosen: Array  # [B, Q, K]
    listed: Array | None = None  # [B, Q, M, 2]: a score and its position


class _Tiles(NamedTuple):
    """Scores that a program reads in tiles."""

    n: Any  # the number of tiles
    width: int  # scores of a tile
    read: Callable[[Any], Int[Array, " width"]]  # the scores of a tile, HIDDEN where there are none

    def position(self, i: Any) -> Int[Array, " width"]:
        return i * self.width + jnp.arange(self.width, dtype=jnp.int32)

    def held(self) -> tuple[_Tiles, Any]:
        """The tiles, read once if there is one, and an upper bound of their scores."""
        if self.n > 1:
            return self, HIGHEST
        scores = self.read(0)
        return self._replace(read=lambda i: scores), jnp.max(scores)

    def count(self, condition: Callable) -> Any:
        """How many scores satisfy a condition."""
        if isinstance(self.n, int) and self.n == 1:
            return _count(condition(self.read(0)))

        def add(i, n):
            return n + condition(self.read(i)).astype(jnp.int32)

        none = jnp.zeros((self.width,), jnp.int32)
        return _count(lax.fori_loop(jnp.int32(0), jnp.int32(self.n), add, none))

    def n_reaching(self, bound: Any) -> Any:
        return self.count(lambda score: score >= bound)


class _Kept(NamedTuple):
    """Keeps, of scores in order, those above a bound and the first few that equal it."""

    bound: Any  # HIDDEN: none that equals it is kept
    most_equal: Any  # how many that equal it are kept
    # Of the scores so far.
    n_above: Any
    n_equal: Any

    @classmethod
    def none(cls, bound: Any, most_equal: Any) -> Self:
        most_equal = most_equal * (bound > HIDDEN).astype(jnp.int32)
        return cls(bound, most_equal, jnp.int32(0), jnp.int32(0))

    def step(self, score) -> tuple[Self, Array, Array]:
        """With a tile of scores: the next state, which scores are kept, and their slots."""
        above, equal = score > self.bound, score == self.bound
        # Two counts of less than 2^16 are one sum.
        each = jnp.where(equal, jnp.int32(1 << 16), above.astype(jnp.int32))
        counts, total = jnp.cumsum(each), _count(each)
        n_equal = self.n_equal + (counts >> 16)
        kept = above | (equal & (n_equal <= self.most_equal))
        slot = (self.n_above - 1) + (counts & 0xFFFF) + jnp.minimum(n_equal, self.most_equal)
        n_above, n_equal = self.n_above + (total & 0xFFFF), self.n_equal + (total >> 16)
        return self._replace(n_above=n_above, n_equal=n_equal), kept, slot

    @property
    def n(self) -> Any:
        return self.n_above + jnp.minimum(self.n_equal, self.most_equal)


def _count(x) -> Array:
    return jnp.sum(x, dtype=jnp.int32)


def _bisect(n_reaching: Callable, least: Any, most: Any, n_least: Any, n_most: Any) -> Any:
    """A bound from `least` to `most` that `n_least` to `n_most` scores reach.

    Where there is none, because many scores are equal, the largest that at least `n_least` reach,
    or `least`.
    """

    def halve(carry):
        least, most = carry
        middle = (least | most) - ((least ^ most) >> 1)  # rounded up, and never out of range
        n = n_reaching(middle)
        enough = n >= n_least
        most = jnp.where(enough, jnp.where(n <= n_most, middle, most), middle - 1)
        return jnp.where(enough, middle, least), most

    least, most = (jnp.asarray(x, jnp.int32) for x in (least, most))
    return lax.while_loop(lambda carry: carry[0] < carry[1], halve, (least, most))[0]


def _bound_of_sample(scores, batch, row, end, n_best: int, n_list: int):
    """A bound that about (K + M) / 2 scores of the row reach, by a sample of the row.

    With samples in random order the standard deviation is less than a fifth of (M - K) / 2.
    """
    step = jnp.maximum(lax.div(end + (SAMPLES * NEIGHBOURS - 1), SAMPLES * NEIGHBOURS), 1)
    number = jnp.arange(SAMPLES * NEIGHBOURS, dtype=jnp.int32)
    position = (number // NEIGHBOURS) * (NEIGHBOURS * step) + number % NEIGHBOURS
    exists = (position < end) & (end > n_list)
    sample = load(scores.at[batch, row, jnp.where(exists, position, 0)], exists, HIDDEN)
    share = _count(exists).astype(jnp.float32) / jnp.maximum(end, 1).astype(jnp.float32)
    wanted = 0.5 * (n_best + n_list) * share
    n_least, n_most = ((x * wanted).astype(jnp.int32) for x in (0.95, 1.05))
    tiles = _Tiles(1, sample.size, lambda i: sample)
    return _bisect(tiles.n_reaching, HIDDEN, jnp.max(sample), jnp.maximum(n_least, 1), n_most)


def _write_list(out: _TopKOutputs, batch, row, tiles: _Tiles, bound) -> _Kept:
    """Writes the scores above the bound and the first K that equal it, and counts them."""
    n_best, n_list = out.chosen.shape[2], out.listed.shape[2]

    def step(i, state):
        score = tiles.read(i)
        state, kept, slot = state.step(score)
        kept = kept & (slot < n_list)
        # Other positions have a slot out of bounds: the interpreter also writes where it masks.
        slot = jnp.where(kept, slot, n_list)
        # One write for both numbers.
        which = jnp.arange(2, dtype=jnp.int32)[None, :]
        pair = jnp.where(which == 0, score[:, None], tiles.position(i)[:, None])
        view = out.listed.at[batch, row, slot[:, None], which]
        pltriton.store(view, pair, mask=jnp.broadcast_to(kept[:, None], pair.shape))
        return state

    return lax.fori_loop(jnp.int32(0), tiles.n, step, _Kept.none(bound, n_best))


def _listed(scores, out: _TopKOutputs, batch, row, end, barrier) -> tuple[Any, Any]:
    """Makes the list: how many scores it has, and the bound that they reach."""
    n_best, n_list = out.chosen.shape[2], out.listed.shape[2]
    # What follows a row's end is HIDDEN up to a multiple of ALIGNED.
    aligned = lax.div(end + (ALIGNED - 1), jnp.int32(ALIGNED)) * ALIGNED

    def read(i):
        position = i * ROW_TILE + jnp.arange(ROW_TILE, dtype=jnp.int32)
        return load(scores.at[batch, row, position], position < aligned, HIDDEN)

    tiles = _Tiles(lax.div(aligned + (ROW_TILE - 1), jnp.int32(ROW_TILE)), ROW_TILE, read)
    bound = _bound_of_sample(scores, batch, row, end, n_best, n_list)
    found = _write_list(out, batch, row, tiles, bound)
    enough = (found.n >= n_best) | (bound == HIDDEN)

    def keep():
        return found.n, bound

    def again():
        """With a bound that K to M scores reach, or one that less than K exceed."""
        low = found.n_above >= n_best
        higher = jnp.where(found.n_above <= n_list, bound + 1, jnp.int32(HIGHEST))
        least = jnp.where(low, bound + 1, jnp.int32(HIDDEN))
        most = jnp.where(low, higher, bound - 1)
        other = _bisect(tiles.n_reaching, least, most, n_best, n_list)
        barrier()
        return _write_list(out, batch, row, tiles, other).n, other

    n, bound = lax.cond(enough & (found.n <= n_list), keep, again)
    barrier()
    return n, bound


def _top_k_kernel(scores, start, out: _TopKOutputs, *, rule: RowRule, barrier: Callable):
    """A row's best positions, in order, followed by -1."""
    row, batch = pl.program_id(0), pl.program_id(1)
    end, n_best = rule.end(start[0] + row), out.chosen.shape[2]
    if out.listed is None:
        length, n, bound = scores.shape[2], end, jnp.int32(HIDDEN)
    else:
        length = out.listed.shape[2]
        n, bound = _listed(scores, out, batch, row, end, barrier)

    def tiles(width: int) -> _Tiles:
        def read(i):
            index = i * width + jnp.arange(width, dtype=jnp.int32)
            exists = index < n
            at = batch, row, jnp.where(exists, index, 0)
            view = scores.at[at] if out.listed is None else out.listed.at[*at, 0]
            return load(view, exists, HIDDEN)

        return _Tiles(-(-length // width), width, read)

    held, most = tiles(min(LIST_TILE, tile_side(length))).held()
    bound = _bisect(held.n_reaching, bound, most, n_best, n_best)
    most_equal = n_best - held.count(lambda score: score > bound)
    some = tiles(min(ROW_TILE, tile_side(length)))

    def write(i, state):
        state, kept, slot = state.step(some.read(i))
        position = some.position(i)
        if out.listed is not None:
            position = load(out.listed.at[batch, row, jnp.where(kept, position, 0), 1], kept, 0)
        slot = jnp.where(kept, slot, n_best)
        pltriton.store(out.chosen.at[batch, row, slot], position, mask=kept)
        return state

    n_tiles = lax.div(n + (some.width - 1), jnp.int32(some.width))
    none = _Kept.none(bound, most_equal)
    n_written = lax.fori_loop(jnp.int32(0), n_tiles, write, none).n

    def fill(i, _):
        slot = i * ROW_TILE + jnp.arange(ROW_TILE, dtype=jnp.int32)
        none = (slot >= n_written) & (slot < n_best)
        slot = jnp.where(none, slot, n_best)
        nothing = jnp.full(slot.shape, -1, jnp.int32)
        pltriton.store(out.chosen.at[batch, row, slot], nothing, mask=none)

    first = lax.div(n_written, jnp.int32(ROW_TILE))
    lax.fori_loop(first, jnp.int32(-(-n_best // ROW_TILE)), fill, None)


def list_size(n_best: int, n_scores: int) -> int | None:
    """M; None where a row is its own list."""
    n_list = max(tile_side(2 * n_best), MIN_LIST)
    return n_list if max(n_list, MIN_ROW) < n_scores else None


def top_k(
    n_best: int,
    interpret: bool,
    scores: Int[Array, "B Q F"],
    rule: RowRule,
    start: Int[Array, 1] | None = None,
) -> Int[Array, "B Q K"]:
    """The positions of each row's largest scores, in order; -1 is none.

    Args:
      n_best: K.
      scores: F is a multiple of `ALIGNED`. From a row's end on they are `HIDDEN` up to the next
        multiple, and are not read from there on.
      rule: where rows end.
      start: the number of the first row; None: 0.
    """
    n_batch, n_rows, _ = scores.shape
    start = jnp.zeros(1, jnp.int32) if start is None else start

    def shape(*n: int):
        return jax.ShapeDtypeStruct((n_batch, n_rows, *n), jnp.int32)

    n_list = list_size(n_best, rule.n_keys)
    listed = None if n_list is None else shape(n_list, 2)
    barrier = (lambda: None) if interpret else pltriton.debug_barrier
    (out,) = launch(
        functools.partial(_top_k_kernel, rule=rule, barrier=barrier),
        (scores, start),
        (_TopKOutputs(shape(n_best), listed),),
        grid=(n_rows, n_batch),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="dsa_best",
    )
    return out.chosen

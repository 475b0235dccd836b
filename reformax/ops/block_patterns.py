"""Patterns of block-sparse attention: which block of keys each block of queries sees.

A pattern is a function of the two lengths in blocks, so that one gin line serves every length:

    block_sparse.block_sparse.pattern = @block_patterns.butterfly()

Whether a block of queries sees a block of keys does not depend on the number of blocks. A longer
sequence only adds rows and columns, padding changes nothing, and decoding step by step computes the
same as one call. Patterns do not depend on causality: a causal call skips the blocks above the
diagonal of any pattern.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated

import numpy as np
from jaxtyping import Bool

from reformax.declared import Bounds, Count, SettingError, Size, checked

Mask = Bool[np.ndarray, "n_blocks_q n_blocks_k"] | Bool[np.ndarray, "N n_blocks_q n_blocks_k"]
Pattern = Callable[[int, int], Mask]
# A factor is a bit of a block's number.
Factors = Annotated[int, Bounds(1, 31)]


def _named(factory: Callable[..., Pattern]) -> Callable[..., Pattern]:
    """Checks the options of a pattern, and names it by its call, for an op's repr.

    The same options make the same function, so that ops of it are equal.
    """
    signature = inspect.signature(factory)

    @functools.lru_cache(maxsize=256, typed=True)  # True is not 1
    def make(**options) -> Pattern:
        pattern = factory(**options)
        defaults = signature.parameters
        changed = (f"{x}={value!r}" for x, value in options.items() if value != defaults[x].default)
        pattern.__name__ = f"{factory.__name__}({', '.join(changed)})"
        return pattern

    @functools.wraps(factory)
    def call(*args, **options) -> Pattern:
        return make(**signature.bind(*args, **options).arguments)

    return checked(call)


@_named
def butterfly(*, n_factors: Factors | None = None, n_global: Count = 0) -> Pattern:
    """The fixed butterfly of block-sparse FlashAttention (Dao et al. 2022, sec. 3.3).

    It is the flat block butterfly of Dao et al. 2021 ("Pixelated Butterfly", def. 3.4). A butterfly
    matrix is a product of log2(n) factors, the m-th of which mixes positions whose numbers differ
    only in bit m; a flat butterfly is the sum of these factors. Block i therefore sees itself and
    the blocks `i XOR 2^m`, together 1 + log2(n) blocks. `n_global` adds the paper's low-rank term
    in its form for masks: blocks that see all and are seen by all.

    Args:
      n_factors: the number of factors, beginning with the nearest blocks; None is all of them.
      n_global: how many of the first blocks see all and are seen by all.

    Raises:
      ValueError: n_factors below 1, or n_global below 0.
    """

    def rule(query, key):
        differs = query ^ key
        is_power_or_0 = (differs & (differs - 1)) == 0
        near = True if n_factors is None else differs < 2**n_factors
        return (is_power_or_0 & near) | _global(query, key, n_global)

    return _blockwise(rule)


@_named
def strided(*, stride: Size = 8) -> Pattern:
    """The strided pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3), in blocks.

    A block sees the blocks up to `stride` away and those at a multiple of `stride` from it. This is
    the union of the paper's two sets, which every head attends to (the paper's "merged" head).

    Args:
      stride: the paper's l, in blocks; the cost is least near the square root of the length.

    Raises:
      ValueError: stride below 1.
    """

    def rule(query, key):
        distance = np.abs(query - key)
        return (distance <= stride) | (distance % stride == 0)

    return _blockwise(rule)


@_named
def fixed(*, stride: Size = 8, n_summary: Size = 1) -> Pattern:
    """The fixed pattern of the Sparse Transformer (Child et al. 2019, sec. 4.3), in blocks.

    The sequence is cut into groups of `stride` blocks. A block sees its own group, and the last
    `n_summary` blocks of every group, which summarize it.

    Args:
      stride: the paper's l, in blocks.
      n_summary: the paper's c, in blocks.

    Raises:
      ValueError: stride or n_summary below 1, or a summary longer than its group.
    """
    if n_summary > stride:
        raise SettingError(f"n_summary is {n_summary}: expected at most the stride, {stride}")

    def rule(query, key):
        return (query // stride == key // stride) | (key % stride >= stride - n_summary)

    return _blockwise(rule)


@_named
def local_global(*, n_before: Count = 1, n_after: Count = 1, n_global: Count = 1) -> Pattern:
    """A sliding window and some global blocks (Longformer, Beltagy et al. 2020, sec. 3.1).

    The first blocks are global: they see all and are seen by all. `bigbird` adds random blocks.

    Args:
      n_before: how many blocks before its own a block sees.
      n_after: how many blocks after its own a block sees; useful if not causal.
      n_global: how many of the first blocks are global.

    Raises:
      ValueError: a number below 0.
    """

    def rule(query, key):
        near = (key >= query - n_before) & (key <= query + n_after)
        return near | _global(query, key, n_global)

    return _blockwise(rule)


@_named
def bigbird(
    *,
    n_before: Count = 1,
    n_after: Count = 1,
    n_global: Count = 2,
    n_random: Count = 3,
    seed: Count = 0,
) -> Pattern:
    """A sliding window, global blocks and random ones (BigBird, Zaheer et al. 2020, sec. 2).

    The first blocks are global. In the paper's ITC form they hold the first tokens of the sequence,
    in its ETC form tokens that are put in front of it; the mask is the same.

    In the paper, each block of queries draws from all blocks, and a longer sequence would draw
    others. In this pattern, each block draws from the earlier blocks outside of its window and of
    the global ones, and both blocks of a drawn pair see each other. In causal attention a block
    sees `n_random` drawn blocks, or all if there are fewer. Without causality it sees twice as many
    on average, the first blocks more than the last.

    Args:
      n_before: how many blocks before its own a block sees.
      n_after: how many blocks after its own a block sees; useful if not causal.
      n_global: how many of the first blocks are global.
      n_random: the paper's r: how many of the earlier blocks each block draws.
      seed: the seed of the draws. Layers with different seeds see different blocks.

    Raises:
      ValueError: a number below 0.
    """
    near = local_global(n_before=n_before, n_after=n_after, n_global=n_global)
    n_near = max(n_before, n_after)

    def pattern(n_blocks_q: int, n_blocks_k: int) -> Bool[np.ndarray, "n_blocks_q n_blocks_k"]:
        mask = near(n_blocks_q, n_blocks_k)
        later, earlier = _drawn(max(n_blocks_q, n_blocks_k), n_global, n_near, n_random, seed)
        for query, key in ((later, earlier), (earlier, later)):
            inside = (query < n_blocks_q) & (key < n_blocks_k)
            mask[query[inside], key[inside]] = True
        return mask

    return pattern


def _drawn(n_blocks: int, n_global: int, n_near: int, n_random: int, seed: int):
    """Pairs of a block and one that it draws from block `n_global` to `n_near` before itself.

    Floyd's algorithm draws `n_random` blocks uniformly without repetition, for all blocks at once.
    It replaces a repeated choice by the largest candidate.
    """
    block = np.arange(n_blocks)
    n_candidates = np.maximum(block - n_near - n_global, 0)
    # No block has as many candidates as the draws before these leave over.
    first = max(0, n_random - int(n_candidates.max(initial=0)))
    drawn = np.full((n_blocks, n_random - first), -1)
    for i_draw in range(first, n_random):
        last = n_candidates - n_random + i_draw
        choice = (
            _scrambled(seed, block, i_draw) % np.maximum(last + 1, 1).astype(np.uint64)
        ).astype(int)
        repeats = (drawn == choice[:, None]).any(axis=1)
        drawn[:, i_draw - first] = np.where(last < 0, -1, np.where(repeats, last, choice))
    later, i_draw = np.nonzero(drawn >= 0)
    return later, drawn[later, i_draw] + n_global


def _scrambled(seed: int, block: np.ndarray, i_draw: int) -> np.ndarray:
    """64 pseudorandom bits for each block: splitmix64 (Steele et al. 2014) of the arguments.

    NumPy's generators may change with its version, and a trained model must keep its pattern.
    """
    x = block.astype(np.uint64)
    for number in (seed % 2**64, i_draw):
        x = (x ^ np.uint64(number)) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x


def _global(query, key, n_global: int):
    return (query < n_global) | (key < n_global)


def _blockwise(rule: Callable) -> Pattern:
    """The pattern of a rule for the indices of two blocks, which broadcast."""

    def pattern(n_blocks_q: int, n_blocks_k: int) -> Bool[np.ndarray, "n_blocks_q n_blocks_k"]:
        return rule(*np.indices((n_blocks_q, n_blocks_k), np.int32, sparse=True))

    return pattern

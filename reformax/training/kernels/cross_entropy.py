"""Cross-entropy and its gradient as a Pallas kernel for NVIDIA GPUs (Triton).

A program has a row of logits. It reads them once from memory, for the maximum and the sum of the
softmax (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"), and once more,
from the cache, for the gradient, which it writes in the dtype of the products that read it. In
array operations XLA reads the logits three times from memory.

Letters: R rows, V the vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import LOG2_E, LOWEST, launch, load, tile_side

# Numbers that a program holds, and its warps; and the neighbours that a thread reads at once.
BLOCK, WARPS, GROUP = 8192, 32, 8


class Results(NamedTuple):
    """The results of each row.

    Attributes:
      lse: the log of the sum of exponentials of the logits.
      target: the target's logit.
      best: the first token of the largest logit.
      total: the sum of logits, for label smoothing; 0 without it.
      d_logits: the gradient of the weighted loss.
    """

    lse: Float[Array, " R"]
    target: Float[Array, " R"]
    best: Int[Array, " R"]
    total: Float[Array, " R"]
    d_logits: Float[Array, "R V"]


def _kernel(logits, targets, weights, *results, block: int, label_smoothing: float, z_loss: float):
    row, size = pl.program_id(0), logits.shape[1]
    results = Results(*results)
    # The gradient may overwrite the logits: each is read before it is overwritten.
    target, weight = load(targets.at[row], None), load(weights.at[row], None)
    target_logit = load(logits.at[row, target], None).astype(jnp.float32)
    pltriton.store(results.target.at[row], target_logit)
    n_blocks = pl.cdiv(size, block)
    group = jnp.arange(block // GROUP, dtype=jnp.int32)
    lane = group[:, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, :]

    def read(first, other):
        column = first + lane
        mask = None if size % block == 0 else column < size
        return column, mask, load(logits.at[row, column], mask, other).astype(jnp.float32)

    # Every group of lanes, which one thread has, has a softmax of its own columns: nothing is
    # exchanged within the loop.
    def gather(i, state):
        group_max, group_sum, best, total = state
        _, mask, x = read(i * block, -jnp.inf)
        higher = jnp.maximum(group_max, jnp.max(x, axis=1))
        scaled = jnp.exp2(x * LOG2_E - (higher * LOG2_E)[:, None])
        decay = jnp.exp2((group_max - higher) * LOG2_E)
        group_sum = group_sum * decay + jnp.sum(scaled, axis=1)
        best = jnp.where(higher > group_max, i, best)
        if label_smoothing:
            total += jnp.sum(x if mask is None else jnp.where(mask, x, 0.0), axis=1)
        return higher, group_sum, best, total

    zeros = jnp.zeros(block // GROUP, jnp.float32)
    start = jnp.full_like(zeros, LOWEST), zeros, jnp.zeros_like(group), zeros
    group_max, group_sum, best, totals = lax.fori_loop(0, n_blocks, gather, start)
    row_max = jnp.max(group_max)
    lse = row_max + jnp.log(jnp.sum(group_sum * jnp.exp2((group_max - row_max) * LOG2_E)))
    pltriton.store(results.lse.at[row], lse)
    # A group's first largest logit is in the block that it has noted.
    column, _, x = read((best * block)[:, None], -jnp.inf)
    pltriton.store(results.best.at[row], jnp.min(jnp.where(x == row_max, column, size)))
    pltriton.store(results.total.at[row], jnp.sum(totals))

    grown = weight * (1 + 2 * z_loss * lse) if z_loss else weight
    scaled_lse = lse * LOG2_E

    def softmax(x):
        return jnp.exp2(x * LOG2_E - scaled_lse) * grown

    d_target = softmax(target_logit) - (1 - label_smoothing) * weight

    def write(i, nothing):
        column, mask, x = read(i * block, 0.0)
        d = jnp.where(lane == target - i * block, d_target, softmax(x))
        if label_smoothing:
            d -= label_smoothing / size * weight
        view = results.d_logits.at[row, column]
        pltriton.store(view, d.astype(results.d_logits.dtype), mask=mask)
        return nothing

    lax.fori_loop(0, n_blocks, write, 0)


def differentiate(
    logits: Float[Array, "R V"],
    targets: Int[Array, " R"],
    weights: Float[Array, " R"],
    label_smoothing: float,
    z_loss: float,
    dtype: str,
    interpret: bool = False,
) -> Results:
    """The parts of the loss of each row, and its gradient in `dtype`.

    Args:
      logits: float32.
      targets: below V.
      weights: of the rows, float32.
      label_smoothing, z_loss: as in `training.loss.cross_entropy`.
      dtype: of the gradient.
      interpret: whether to run anywhere, slowly.
    """
    n_rows, size = logits.shape
    row, number = (jax.ShapeDtypeStruct((n_rows,), x) for x in (jnp.float32, jnp.int32))
    shapes = Results(row, row, number, row, jax.ShapeDtypeStruct(logits.shape, dtype))
    block = min(BLOCK, tile_side(size))
    in_place = {0: len(shapes) - 1} if logits.dtype == jnp.dtype(dtype) else None
    return launch(
        functools.partial(_kernel, block=block, label_smoothing=label_smoothing, z_loss=z_loss),
        (logits, targets, weights),
        shapes,
        grid=(n_rows,),
        num_warps=max(1, WARPS * block // BLOCK),
        num_stages=1,
        interpret=interpret,
        name="cross_entropy",
        aliases=in_place,
    )

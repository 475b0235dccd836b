"""DeepSeek sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

The kernels of `kernels.block_sparse` compute the attention over all tiles, with a mask of one bit
for each query and key. Gathering the chosen keys would be slower: it reads `2 K H` numbers for each
query and head, and reuses none, because each head has its own keys. At 65,536 tokens, 16 heads of
64 and 2,048 positions it reads 550 GB, 115 ms of an H200's memory. All tiles take 8.8 TFLOP, 22 ms
at 400 TFLOP/s. Both take as long where a query chooses one of 170 positions. The bits of a sequence
are T^2 / 8 bytes, as much as a plan of 2,048 positions at 65,536 tokens.

The indexer's gradient is that of `kernels.indexer_gradient`.

Letters as in `kernels.indexer`.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton import block_sparse
from reformax.ops.kernels.triton.common import bits_of
from reformax.ops.kernels.triton.indexer_gradient import (
    AttentionInputs,
    IndexerArrays,
    KeyRule,
    indexer_gradient,
)
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.block_lists import FullLayout


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    layout: FullLayout,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    index: IndexerArrays,
    factor: Float[Array, ""],
    chosen: Int[Array, "B T K"],
    ids: Int[Array, "B T"] | None,
    seed: Int[Array, 6] | None,
) -> Float[Array, "B T N V"]:
    """The attention of a plan by these kernels, with the gradients of the output and the indexer.

    The indexer's gradient is that of an auxiliary loss whose value is not returned, as in
    `numerics.auxiliary_loss.with_loss`.

    Args:
      layout: all tiles.
      interpret: whether to run the kernels on any device, slowly.
      q, k, v: queries, keys, values, zeros at padding.
      index: the indexer's queries, weights and keys.
      factor: the factor of the sum of eq. 4 over queries.
      chosen: the plan.
      ids: the segments; None: one segment.
      seed: `seed_words` of dropout; None without dropout.
    """
    return _attend_forward(layout, interpret, q, k, v, index, factor, chosen, ids, seed)[0]


def _segments(ids, chosen) -> tuple:
    return ids, ids, None, None, bits_of(chosen, chosen.shape[1])


def _attend_forward(layout, interpret, q, k, v, index, factor, chosen, ids, seed):
    q, k, v, index = first_order((q, k, v, index))
    args = q, k, v, _segments(ids, chosen), seed
    results = block_sparse.forward(layout, *args, interpret=interpret)
    return results[0], ((q, k, v, index, factor, chosen, ids, seed), results)


def _attend_backward(layout, interpret, residuals, d_out):
    (q, k, v, index, factor, chosen, ids, seed), results = residuals
    results, d_out = first_order((results, d_out))
    segment_ids = _segments(ids, chosen)
    args = q, k, v, segment_ids, seed, *results, d_out
    gradients = block_sparse.backward(layout, *args, interpret=interpret)
    attention = AttentionInputs(q, k, *results[1:])
    rule = KeyRule(layout.causal, layout.logits)
    of_index = indexer_gradient(rule, interpret, index, attention, chosen, ids, ids)
    of_index = jax.tree.map(lambda x: x * factor, of_index)
    return *gradients, of_index, None, None, None, None


attend.define(_attend_forward, _attend_backward)

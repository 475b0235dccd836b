"""Compressed attention as Pallas kernels for NVIDIA GPUs (Triton): parts of one softmax.

The keys of the window and the summaries are two calls of the kernels of `nsa`, or of `listed` where
lists of summaries pay, which return each row's maximum and sum. These merge both (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"), and the sinks. In the backward pass
both parts use the maximum and the sum of the whole row. Blocks that an indexer chose, and a query's
own, are two such parts too (`block_sizes`).

Letters as in `reformax.ops.base`; S is the number of keys of a part.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton import listed, nsa
from reformax.ops.kernels.triton.chosen_keys import ChoiceLearner
from reformax.ops.kernels.triton.common import bits_of
from reformax.ops.kernels.triton.group_rows import GroupInputs
from reformax.ops.kernels.triton.indexer_gradient_lists import AttentionInputs, KeyRule
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.learned_sinks import Results, d_sinks, with_sinks
from reformax.ops.softmax.online import Softmax, nonzero


class Part(NamedTuple):
    """Keys and values of one kind, zeros at padding.

    Attributes:
      k, v: the vectors.
      chosen: the keys that each query sees, by number, or with `NsaSizes.block` the blocks of keys;
        -1 is none. None: the query sees all up to itself.
    """

    k: Float[Array, "B S G H"]
    v: Float[Array, "B S G V"]
    ids: Int[Array, "B S"] | None
    chosen: Int[Array, "B T K"] | None = None


def window_sizes(window: int, rows: int, **common: Any) -> nsa.NsaSizes:
    """The static settings of the part of the positions in a window."""
    return nsa.NsaSizes(**common, rows=rows, window=window)


def summary_sizes(
    blocks: Any, rows: int, by_list: bool, **common: Any
) -> nsa.NsaSizes | listed.ListedSizes:
    """The static settings of the part of the summaries of `Blocks`, all or those of lists."""
    size, n_each, delay = blocks
    if by_list:
        assert (n_each, delay) == (1, 0), blocks
        return listed.ListedSizes(**common, span=size, far=True)
    of_blocks = dict(stride=size, span=size + delay, n_each=n_each, far=True)
    return nsa.NsaSizes(**common, rows=rows, **of_blocks)


def block_sizes(
    block_size: int, n_chosen: int, rows: int, by_block: bool, **common: Any
) -> tuple[listed.ListedSizes, nsa.NsaSizes | listed.ListedSizes]:
    """The static settings of a query's own block, a list of positions, and of chosen blocks."""
    own = listed.ListedSizes(**common)
    if not by_block:  # a list of their positions too
        return own, own
    return own, nsa.NsaSizes(**common, rows=rows, block=block_size, n_selected=n_chosen)


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    sizes: tuple[nsa.NsaSizes | listed.ListedSizes, nsa.NsaSizes | listed.ListedSizes],
    interpret: bool,
    q: Float[Array, "B T N H"],
    near: Part,
    far: Part,
    sinks: Float[Array, " N"] | None,
    learner: ChoiceLearner | None,
    ids: Int[Array, "B T"] | None,
    seed: Int[Array, 6] | None,
) -> Results:
    """The attended values of one softmax over both parts and the sinks; its maximum and its sum.

    The maximum and the sum have no gradient. The indexer's is that of an auxiliary loss whose value
    is not returned, as in `numerics.auxiliary_loss.with_loss`.

    Args:
      sizes: the static settings of both parts.
      q: queries, zeros at padding.
      near, far: keys that each query sees in any case, and those that it may choose.
      sinks: of `softmax.learned_sinks`; None: there are none. Gradients of padding's outputs must
        then be zeros.
      learner: of the choice of `far`; None: no indexer learns.
    """
    return _forward(sizes, interpret, q, near, far, sinks, learner, ids, seed)[0]


def _call(sizes, q, x: Part, ids, seed):
    """The kernels of a part, and the first arguments of both of their passes."""
    n_batch, n_keys, n_kv, _ = x.k.shape
    arrays, chosen, bits = (q, x.k, x.v, ids, x.ids, seed), x.chosen, None
    if isinstance(sizes, listed.ListedSizes):
        return listed, sizes, GroupInputs(*arrays, chosen)
    if sizes.block:
        chosen = jnp.broadcast_to(chosen[:, None], (n_batch, n_kv, *chosen.shape[1:]))
    elif chosen is not None:
        chosen, bits = None, bits_of(chosen, n_keys)
    return nsa, sizes, GroupInputs(*arrays, chosen, bits)


def _forward(sizes, interpret, q, near, far, sinks, learner, ids, seed):
    q, near, far, sinks, learner = first_order((q, near, far, sinks, learner))
    of_parts = []
    for size, x in zip(sizes, (near, far), strict=True):
        kernels, *arguments = _call(size, q, x, ids, seed)
        of_parts.append(kernels.forward(*arguments, interpret=interpret))
    of_near, of_far = of_parts
    whole = Softmax.of_results(of_near).merge(Softmax.of_results(of_far))
    results = with_sinks(whole.results(of_near[0].dtype), sinks)
    total = None
    if learner is not None:  # the sum of all heads' weights of what is chosen
        _, far_max, far_sum = of_far
        _, row_max, row_sum = results
        total = jnp.sum(far_sum * jnp.exp(far_max - row_max) / nonzero(row_sum), axis=1)
    return results, ((q, near, far, sinks, learner, ids, seed), results, total)


def _backward(sizes, interpret, residuals, cotangents):
    (q, near, far, sinks, learner, ids, seed), results, total = residuals
    results, d_out = first_order((results, cotangents[0]))
    dq, of_parts = jnp.zeros(q.shape, jnp.float32), []
    for size, x in zip(sizes, (near, far), strict=True):
        kernels, *arguments = _call(size, q, x, ids, seed)
        of_q, *of_keys = kernels.backward(*arguments, results, d_out, interpret=interpret)
        dq = dq + of_q.astype(jnp.float32)
        of_parts.append(Part(*of_keys, None))
    of_learner = None
    if learner is not None:
        rule = KeyRule(True, sizes[1].logits, sizes[1].span)
        attention = AttentionInputs(q, far.k, *results[1:], total)
        of_learner = learner.gradient(rule, interpret, attention, ids, far.ids)
    of_sinks = d_sinks(results, sinks, d_out)
    return dq.astype(q.dtype), *of_parts, of_sinks, of_learner, None, None


attend.define(_forward, _backward)

"""Attention to the keys that an indexer chose: kernels for NVIDIA GPUs (Triton), lists or tiles.

`kernels.listed` reads the keys of each query by its list. Where that does not pay, the kernels of
`kernels.block_sparse` visit all tiles, with a mask of a bit for each query and key: T^2 / 8 bytes,
as much as lists of 2,048 keys at 65,536 tokens. `listed.pays` decides by the sizes.

Letters as in `reformax.ops.base`; G key heads, K keys of a list.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.kernels.triton import block_sparse, indexer_gradient, listed
from reformax.ops.kernels.triton.common import bits_of
from reformax.ops.kernels.triton.group_rows import GroupInputs
from reformax.ops.kernels.triton.indexer_gradient import IndexerArrays
from reformax.ops.kernels.triton.indexer_gradient_lists import AttentionInputs, KeyRule
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout


class ChoiceLearner(NamedTuple):
    """The indexer's arrays by whose gradient a choice is learnt."""

    index: IndexerArrays  # the indexer's vectors
    factor: Float[Array, ""]  # of the sum of its divergence over queries
    chosen: Int[Array, "B T K"]  # the keys of each query over which that is, -1 for none

    def gradient(
        self,
        rule: KeyRule,
        interpret: bool,
        attention: AttentionInputs,
        ids: Int[Array, "B T"] | None,
        key_ids: Int[Array, "B S"] | None,
    ) -> Self:
        """The gradient of the sum times the factor; the arguments are `indexer_gradient`'s."""
        inputs = self.index, attention, self.chosen, ids, key_ids
        found = indexer_gradient.indexer_gradient(rule, interpret, *inputs)
        return type(self)(jax.tree.map(lambda x: x * self.factor, found), None, None)


def reads_lists(n_listed: int, n_keys: int, q: Array, k: Array, causal: bool = True) -> bool:
    """Whether attention to lists of so many of the keys, or of their summaries, pays by lists."""
    return listed.pays(n_listed, n_keys, q.shape[2] // k.shape[2], q.dtype.itemsize, causal)


def makes_bits(n_listed: int, n_keys: int, q: Array, k: Array, by_list: bool, learns: bool) -> bool:
    """Whether kernels make a bit for each query and key.

    Args:
      n_keys: the number of keys, or of their summaries.
      by_list: whether the attention reads lists, of keys or of blocks.
    """
    sizes = n_listed, n_keys, q.shape[2], k.shape[2]
    return not by_list or (learns and not indexer_gradient.reads_lists(*sizes))


@functools.partial(CustomDerivatives, n_static=3)
def attend(
    sizes: listed.ListedSizes,
    by_list: bool,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G V"],
    learner: ChoiceLearner | None,
    chosen: Int[Array, "B T K"],
    ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
    seed: Int[Array, 6] | None,
) -> Float[Array, "B T N V"]:
    """The attended values, with the gradients of the output and of the indexer.

    The indexer's gradient is that of an auxiliary loss whose value is not returned, as in
    `numerics.auxiliary_loss.with_loss`.

    Args:
      by_list: whether programs read lists; False: they visit all tiles.
      q, k, v: queries, keys, values, zeros at padding.
      learner: None: no indexer learns.
      chosen: the keys that each query sees, -1 for none.
    """
    return _forward(sizes, by_list, interpret, q, k, v, learner, chosen, ids, key_ids, seed)[0]


def _call(sizes: listed.ListedSizes, by_list: bool, q, k, v, chosen, ids, key_ids, seed) -> tuple:
    """The kernels, and the first arguments of both of their passes."""
    if by_list:
        return listed, sizes, GroupInputs(q, k, v, ids, key_ids, seed, chosen)
    n_keys = k.shape[1]
    layout = FullLayout(q.shape[1], n_keys, sizes.causal, sizes.dropout, sizes.logits)
    bits = bits_of(chosen, n_keys)
    x = BlockInputs(q, *repeat_heads(q, k, v), ids, key_ids, seed, chosen=bits)
    return block_sparse, layout, x


def _forward(sizes, by_list, interpret, q, k, v, learner, chosen, ids, key_ids, seed):
    q, k, v, learner = first_order((q, k, v, learner))
    kernels, *arguments = _call(sizes, by_list, q, k, v, chosen, ids, key_ids, seed)
    results = kernels.forward(*arguments, interpret=interpret)
    return results[0], ((q, k, v, learner, chosen, ids, key_ids, seed), results)


def _backward(sizes, by_list, interpret, residuals, d_out):
    (q, k, v, learner, chosen, ids, key_ids, seed), results = residuals
    results, d_out = first_order((results, d_out))
    kernels, *arguments = _call(sizes, by_list, q, k, v, chosen, ids, key_ids, seed)
    dq, dk, dv = kernels.backward(*arguments, results, d_out, interpret=interpret)
    dk, dv = (_of_key_heads(d, x) for d, x in ((dk, k), (dv, v)))
    of_learner = None
    if learner is not None:
        rule, attention = KeyRule(sizes.causal, sizes.logits), AttentionInputs(q, k, *results[1:])
        of_learner = learner.gradient(rule, interpret, attention, ids, key_ids)
    return dq, dk, dv, of_learner, None, None, None, None


def _of_key_heads(d: Float[Array, "B T _ H"], x: Float[Array, "B T G H"]) -> Array:
    """The gradients of the key heads of `x`: `d`, or its sums where it has all query heads."""
    if d.shape == x.shape:
        return d
    d = d.reshape(*x.shape[:3], -1, x.shape[3])
    return jnp.sum(d, axis=3, dtype=jnp.float32).astype(x.dtype)


attend.define(_forward, _backward)

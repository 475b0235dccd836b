"""The softmax of a tile of queries over the keys that were gathered for it by index.

Letters besides those of `reformax.ops.base`: Q queries of a tile, K keys.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.softmax.dropout import dropped_factors
from reformax.ops.softmax.online import Softmax, softmax_over


def gather_rows(x: Array, index: Int[Array, "B N *d"]) -> Array:
    """`x[b, n, index[b, n]]` of `[B, N or 1, I, ...]`."""
    x = jnp.broadcast_to(x, (*index.shape[:2], *x.shape[2:]))
    take = functools.partial(jnp.take, axis=0, mode="clip")
    return jax.vmap(jax.vmap(take))(x, index)


def gathered_softmax(
    call: Call,
    q: Float[Array, "B N Q H"],
    k: Float[Array, "B N K H"],
    v: Float[Array, "B N K V"],
    mask: Bool[Array, "B N Q K"],
    positions: tuple[Int[Array, "B N Q 1"], Int[Array, "B N 1 K"]],
) -> Softmax:
    """The softmax of a tile's queries over its keys.

    Args:
      call: of the op, which says what is dropped.
      positions: the positions of queries and of keys, by which dropout is drawn.
    """
    dropped = dropped_factors(call, q.shape[:2], *positions)
    logits = call.logits.of("bnqh,bnkh->bnqk", q, k)
    return softmax_over(logits, mask, "bnqk,bnkv->bnqv", v, dropped)

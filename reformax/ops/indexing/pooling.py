"""Mean keys of blocks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.masking.visibility import Side, Visibility, is_token
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.query_chunks import in_blocks


def pooled_blocks(
    k: Float[Array, "B T N H"], ids: Int[Array, "B T"], size: int
) -> tuple[Int[Array, "B C"], Float[Array, "B C N H"]]:
    """The segment of each block's last token, and the mean of the block's keys of that segment."""
    keys, ids = in_blocks(k.astype(accum_dtype(k.dtype)), size), in_blocks(ids, size)
    last = jnp.max(jnp.where(is_token(ids), jnp.arange(ids.shape[2])[None, None], 0), axis=2)
    block_ids = jnp.take_along_axis(ids, last[..., None], axis=2)
    included = Visibility().sees(Side(None, block_ids), Side(None, ids))
    count = jnp.maximum(included.sum(axis=2), 1).astype(keys.dtype)
    key_sum = jnp.where(included[..., None, None], keys, 0).sum(axis=2)
    return block_ids[..., 0], key_sum / count[..., None, None]

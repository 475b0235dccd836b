"""A peer of exact attention: the code that Rabe and Staats printed.

`printed` follows figure 1 of "Self-attention Does Not Need O(n^2) Memory" step by step, with the
figure's names, chunk sizes and checkpoint, written from the paper. The figure has one sequence, no
mask and chunks that divide the length. Here examples are computed one after the other, and the
future is hidden but not skipped, since the figure skips no chunk.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

QUERY_CHUNK_SIZE, KEY_CHUNK_SIZE = 1024, 4096


def printed(q: Array, k: Array, v: Array, rng: Any = None) -> Array:
    """Causal attention `[B, T, N, H]` by the code of the paper's figure 1."""
    return lax.map(lambda example: _attention(*example), (q, k, v))


def _attention(query, key, value):
    n_queries, size = query.shape[0], min(QUERY_CHUNK_SIZE, query.shape[0])

    def chunk_scanner(start, _):
        chunk = lax.dynamic_slice_in_dim(query, start, size)
        return start + size, _query_chunk_attention(chunk, start, key, value)

    _, chunks = lax.scan(chunk_scanner, 0, None, length=n_queries // size)
    return chunks.reshape(query.shape).astype(value.dtype)


def _query_chunk_attention(query, start, key, value):
    n_keys, size = key.shape[0], min(KEY_CHUNK_SIZE, key.shape[0])
    query = query / math.sqrt(query.shape[-1])
    position = start + jnp.arange(query.shape[0])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def summarize_chunk(query, key, value, first):
        weights = jnp.einsum("qhd,khd->qhk", query, key, preferred_element_type=jnp.float32)
        future = position[:, None] < first + jnp.arange(size)
        weights = jnp.where(future[:, None], -1e30, weights)
        row_max = lax.stop_gradient(jnp.max(weights, axis=-1, keepdims=True))
        weights = jnp.exp(weights - row_max)
        values = jnp.einsum(
            "khf,qhk->qhf", value, weights.astype(value.dtype), preferred_element_type=jnp.float32
        )
        return values, weights.sum(axis=-1), row_max[..., 0]

    def chunk_scanner(first):
        keys, values = (lax.dynamic_slice_in_dim(x, first, size) for x in (key, value))
        return summarize_chunk(query, keys, values, first)

    values, weights, row_max = lax.map(chunk_scanner, jnp.arange(0, n_keys, size))
    scale = jnp.exp(row_max - jnp.max(row_max, axis=0))
    return jnp.sum(values * scale[..., None], axis=0) / jnp.sum(weights * scale, axis=0)[..., None]

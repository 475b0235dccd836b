"""Attention in chunks that are summarised one by one (Rabe and Staats 2021, figure 1).

Queries come in chunks, one after the other. For each, every chunk of keys is summarised by itself:
its maximal score, the sum of its weights relative to that, and the sum of its weighted values. In
the end the summaries are rescaled to the largest maximum and added up. At no time is there more
than one chunk of scores.

The gradient computes the scores of each chunk again, which is what the paper's checkpoint around
the summary is for. It is analytic and not left to automatic differentiation, which goes through the
loop over keys of every chunk of queries and so keeps, for each of them, copies of all keys and
values: memory of `T / query_chunk_size` times the inputs.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax

from reformax.ops import tiles
from reformax.ops.base import AttentionOp, Traits, check_sizes, no_params, no_plan
from reformax.ops.cache import ring_decoding


def memory_efficient(
    *, query_chunk_size: int | str = 1024, key_chunk_size: int | str = 4096
) -> AttentionOp:
    """Attention of each query to every visible key, one chunk of scores at a time.

    Chunks that a causal mask hides are not computed, and those around the diagonal are no larger
    than the queries' chunk, or an eighth of the others.

    Args:
      query_chunk_size: queries of a chunk; `"sqrt"` is the square root of their number.
      key_chunk_size: keys of a chunk, likewise. A chunk of queries has as many summaries as there
        are chunks of keys; `"sqrt"` makes them as many as the keys of one, the least memory.

    Raises:
      ValueError: a size that is neither 1 or more nor `"sqrt"`.
    """
    check_sizes("sqrt", query_chunk_size=query_chunk_size, key_chunk_size=key_chunk_size)

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng, bias=None):
        del params, plan
        query_size = chunk_size(query_chunk_size, q.shape[1])
        key_size = chunk_size(key_chunk_size, k.shape[1])
        tiling = tiles.Tiling(
            query_size=query_size,
            key_size=min(max(query_size, key_size // 8), key_size) if causal else key_size,
            causal=causal,
            scale=1 / math.sqrt(q.shape[-1]),
            dropout=dropout,
        )
        every = tiles.every_tile(tiling, q.shape[1], k.shape[1])
        x = tiles.inputs(q, k, v, bias, segments, dropout, rng)
        return tiles.attend(functools.partial(forward, key_size), tiling, x, every)

    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=apply,
        traits=Traits(cross=True, bias=True, exact=True),
        **ring_decoding(shared_qk=False, n_slots=lambda capacity: capacity, first=lambda now: 0),
    )


def chunk_size(size: int | str, length: int) -> int:
    """A chunk's size for a length: no more than that, its square root for `"sqrt"`."""
    return math.isqrt(length - 1) + 1 if size == "sqrt" else min(size, length)


def forward(
    key_chunk_size: int, tiling: tiles.Tiling, x: tiles.Inputs, visits: tiles.Visits
) -> tiles.Results:
    """What `tiles.forward` returns, by summaries of chunks of keys.

    Args:
      key_chunk_size: keys of a chunk that no query of a chunk is hidden from. Those around the
        diagonal have `tiling.key_size`.
      tiling, x, visits: as in `tiles.forward`.
    """
    n_batch, length, n_heads, _ = x.q.shape
    n_keys = x.k.shape[1]
    query_size, small = tiling.query_size, tiling.key_size
    n_large = -(-n_keys // key_chunk_size)
    n_slots = n_large + (-(-(query_size + key_chunk_size) // small) if tiling.causal else 0)

    def query_chunk(group, i, results):
        queries = tiles.block(i * query_size, query_size, length)
        q = tiles.rows(x.q, group, queries)

        def summaries(found, tiling, first_slot, count, first_key, size):
            def one(n, found):
                # Where sizes do not divide each other, any chunk may be the last.
                aligned = n_keys % size == 0 and key_chunk_size % size == 0
                keys = tiles.block(first_key + n * size, size, n_keys, aligned)
                here = tiles.summary(tiling, x, group, queries, keys, q)
                return tiles.Softmax(
                    *(
                        lax.dynamic_update_index_in_dim(all_, part, first_slot + n, 0)
                        for all_, part in zip(found, here, strict=True)
                    )
                )

            return lax.fori_loop(0, count, one, found)

        shape = n_slots, group.n_batch, group.n_heads, query_size
        found = tiles.empty(shape, x.v.shape[3])
        if tiling.causal:
            # Up to the chunk's first query all keys are seen, by causality, by all of its queries.
            n_whole = jnp.minimum(
                (queries.position[0] + 1) // key_chunk_size, n_keys // key_chunk_size
            )
            rest = n_whole * key_chunk_size
            end = jnp.minimum(queries.position[-1] + 1, n_keys)
            found = summaries(found, tiling._replace(causal=False), 0, n_whole, 0, key_chunk_size)
            found = summaries(found, tiling, n_whole, -(-(end - rest) // small), rest, small)
        else:
            found = summaries(found, tiling, 0, n_large, 0, key_chunk_size)
        top = found.top.max(axis=0)
        scale = jnp.exp(found.top - top)
        whole = tiles.Softmax(
            jnp.sum(found.acc * scale[..., None], axis=0), top, jnp.sum(found.total * scale, axis=0)
        )
        return results.with_rows(whole, group, queries)

    sizes = tiles.groups(tiling._replace(key_size=key_chunk_size), n_batch, n_heads)
    n_chunks = visits.start.shape[1]
    return tiles.over_groups(sizes, n_batch, n_heads, n_chunks, query_chunk, tiles.no_results(x))

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
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.parts import tiles
from reformax.ops.parts.arguments import check_sizes
from reformax.ops.parts.block_lists import MIN_TILE, Layout
from reformax.ops.parts.cache import ring_decoding
from reformax.ops.parts.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.parts.softmax import Softmax


@named
def memory_efficient(
    *,
    query_chunk_size: int | str = 1024,
    key_chunk_size: int | str = 4096,
    impl: str = "auto",
) -> AttentionOp:
    """Attention of each query to every visible key, one chunk of scores at a time.

    Chunks that a causal mask hides are not computed, and those around the diagonal have the size of
    the queries' chunk where that is smaller.

    Args:
      query_chunk_size: queries of a chunk; `"sqrt"` is the square root of their number.
      key_chunk_size: keys of a chunk, likewise. A chunk of queries has as many summaries as there
        are chunks of keys; `"sqrt"` makes them as many as the keys of one, the least memory.
      impl: how the forward pass summarises a chunk. `"xla"` runs everywhere. `"pallas"` is the
        kernel of `block_sparse`, for NVIDIA GPUs of Ampere or later and heads of 128 or less,
        without segments, bias and dropout, for chunks of a multiple of 16 that divide the lengths
        and, if causal, each other; `"pallas_interpret"` runs it anywhere, slowly, for tests.
        `"auto"` takes the kernel where it can. The gradient is in array operations.

    Raises:
      ValueError: a size that is neither 1 or more nor `"sqrt"`, an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """
    check_impl(impl, *KERNELS)
    check_sizes("sqrt", query_chunk_size=query_chunk_size, key_chunk_size=key_chunk_size)

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng, bias=None):
        del params, plan
        query_size = chunk_size(query_chunk_size, q.shape[1])
        key_size = chunk_size(key_chunk_size, k.shape[1])
        tiling = tiles.Tiling(
            query_size=query_size,
            key_size=min(query_size, key_size) if causal else key_size,
            causal=causal,
            scale=1 / math.sqrt(q.shape[-1]),
            dropout=dropout,
        )
        options = dict(
            segments="given" if segments is not None else None,
            bias=None if bias is None else bias.shape,
            dropout=dropout,
            chunks=_uneven(tiling, key_size, q.shape[1], k.shape[1]),
        )
        chosen = choose(impl, **kernel_obstacles(q, k, v, **options))
        summary = tiles.summary
        if chosen != "xla":
            summary = functools.partial(kernel_summary, chosen == "pallas_interpret")
        every = tiles.every_tile(tiling, q.shape[1], k.shape[1])
        x = tiles.inputs(q, k, v, bias, segments, dropout, rng)
        return tiles.attend(functools.partial(forward, key_size, summary), tiling, x, every)

    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=apply,
        traits=Traits(cross=True, bias=True, exact=True, beams=True),
        **ring_decoding(shared_qk=False, n_slots=lambda capacity: capacity, first=lambda now: 0),
    )


def chunk_size(size: int | str, length: int) -> int:
    """A chunk's size for a length: no more than that, its square root for `"sqrt"`."""
    return math.isqrt(length - 1) + 1 if size == "sqrt" else min(size, length)


def _uneven(
    tiling: tiles.Tiling, key_chunk_size: int, n_queries: int, n_keys: int
) -> tuple[int, int] | None:
    """The sizes of chunks that a kernel cannot summarise; None if it can."""
    sizes = tiling.query_size, key_chunk_size
    small = tiling.query_size if tiling.causal else MIN_TILE
    even = not any(size % MIN_TILE for size in sizes) and key_chunk_size % small == 0
    even = even and n_queries % tiling.query_size == 0 and n_keys % key_chunk_size == 0
    return None if even and not (tiling.causal and n_queries > n_keys) else sizes


def kernel_summary(
    interpret: bool, tiling: tiles.Tiling, x: tiles.Inputs, group, queries, keys, q
) -> Softmax:
    """`tiles.summary` by the kernel of block-sparse attention, to which the tile is one block.

    If causal, the tile is square and on the diagonal.
    """
    from reformax.ops.kernels import block_sparse as kernel

    q, k, v = (jnp.swapaxes(y, 1, 2) for y in (q, *(tiles.rows(y, group, keys) for y in x[1:3])))
    n_queries, n_keys = q.shape[1], k.shape[1]
    block = np.ones((1, 1, 1), bool)
    layout = Layout(block, n_queries, n_keys, n_queries, n_keys, tiling.causal, 0.0)
    out, top, total = kernel.forward(layout, q, k, v, (None, None), None, interpret=interpret)
    acc = jnp.swapaxes(out, 1, 2).astype(jnp.float32) * total[..., None]
    return Softmax(acc, top * tiling.scale, total)


def forward(
    key_chunk_size: int,
    summary: Callable[..., Softmax],
    tiling: tiles.Tiling,
    x: tiles.Inputs,
    visits: tiles.Visits,
) -> tiles.Results:
    """What `tiles.forward` returns, by summaries of chunks of keys.

    Args:
      key_chunk_size: keys of a chunk that no query of a chunk is hidden from. Those around the
        diagonal have `tiling.key_size`.
      summary: `tiles.summary`, or another function of its arguments with the same results.
      tiling, x, visits: as in `tiles.forward`.
    """
    n_batch, length, n_heads, _ = x.q.shape
    n_keys = x.k.shape[1]
    query_size, small = tiling.query_size, tiling.key_size
    n_large = -(-n_keys // key_chunk_size)
    n_slots = n_large + (-(-(query_size + key_chunk_size) // small) + 1 if tiling.causal else 0)

    def query_chunk(group, i, results):
        queries = tiles.block(i * query_size, query_size, length)
        q = tiles.rows(x.q, group, queries)

        def summaries(found, tiling, first_slot, count, first_key, size):
            def one(n, found):
                # Where sizes do not divide each other, any chunk may be the last.
                aligned = n_keys % size == 0 and key_chunk_size % size == 0
                keys = tiles.block(first_key + n * size, size, n_keys, aligned)
                here = summary(tiling, x, group, queries, keys, q)
                return Softmax(
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
            whole = tiling._replace(causal=False)
            n_seen = jnp.minimum(queries.position[0] + 1, n_keys)
            end = jnp.minimum(queries.position[-1] + 1, n_keys)
            n_large_seen = n_seen // key_chunk_size
            first = n_large_seen * key_chunk_size
            n_small_seen = (n_seen - first) // small
            rest = first + n_small_seen * small
            found = summaries(found, whole, 0, n_large_seen, 0, key_chunk_size)
            found = summaries(found, whole, n_large_seen, n_small_seen, first, small)
            n_done = n_large_seen + n_small_seen
            found = summaries(found, tiling, n_done, -(-(end - rest) // small), rest, small)
        else:
            found = summaries(found, tiling, 0, n_large, 0, key_chunk_size)
        top = found.top.max(axis=0)
        scale = jnp.exp(found.top - top)
        whole = Softmax(
            jnp.sum(found.acc * scale[..., None], axis=0), top, jnp.sum(found.total * scale, axis=0)
        )
        return results.with_rows(whole, group, queries)

    sizes = tiles.groups(tiling._replace(key_size=key_chunk_size), n_batch, n_heads)
    if summary is not tiles.summary:  # a kernel has no array of scores
        sizes = n_batch, n_heads
    n_chunks = visits.start.shape[1]
    return tiles.over_groups(sizes, n_batch, n_heads, n_chunks, query_chunk, tiles.no_results(x))

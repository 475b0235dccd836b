"""Attention in chunks of keys, each with a summary (Rabe and Staats 2021, figure 1).

Chunks of queries are computed one after the other. For each, every chunk of keys has a summary: its
largest logit, the sum of its weights relative to that logit, and the sum of its weighted values. At
the end the summaries are rescaled to the largest logit of all and added up. There is never more
than one chunk of logits in memory.

The gradient computes the logits of each chunk again, as the paper's checkpoint around the summary
does. It is written out, because automatic differentiation would keep copies of all keys and values
for each chunk of queries: `T / query_chunk_size` times the inputs. On NVIDIA GPUs the kernels of
flash attention compute it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from reformax.declared import Size
from reformax.derivatives import KERNEL_REFUSAL, CustomDerivatives
from reformax.devices import varying_as
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, choose_impl
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.ring import RingDecoding
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.row_blocks import block_at, ids_of, over_groups, rows
from reformax.ops.softmax import block_kernels, tiles
from reformax.ops.softmax.block_lists import MIN_TILE, BlockInputs, FullLayout
from reformax.ops.softmax.online import Softmax


@options
class memory_efficient(RingDecoding, AttentionOp):
    """Attention of each query to every visible key, one chunk of logits at a time.

    Chunks that a causal mask hides are not computed. Chunks around the diagonal are no larger than
    the queries' chunk.

    Args:
      query_chunk_size: queries in a chunk; `"sqrt"` is the square root of their number.
      key_chunk_size: keys in a chunk; `"sqrt"` is the square root of their number, which takes the
        least memory: as many summaries as there are keys in a chunk.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 256 or less, without bias: that of `block_sparse` summarises a chunk, and those of
        `flash` compute the gradient. The former also needs chunks of a multiple of 16 that divide
        the lengths and, if causal, each other, and no dropout. `"auto"` takes a kernel for each
        pass that it can compute.

    Raises:
      ValueError: a size that is neither 1 or more nor `"sqrt"`, an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """

    query_chunk_size: Size | Literal["sqrt"] = 1024
    key_chunk_size: Size | Literal["sqrt"] = 4096
    impl: str = "auto"

    cross = True
    bias = True
    shards = ("heads",)
    _grouped = True
    _hides_padding = "finite"
    _impls = KERNELS

    def _apply(self, call, params, q, k, v, plan):
        bias = call.bias
        k, v = repeat_heads(q, k, v)
        n_queries, n_keys = q.shape[1], k.shape[1]
        query_size = chunk_size(self.query_chunk_size, n_queries)
        key_size = chunk_size(self.key_chunk_size, n_keys)
        # If causal, chunks of keys around the diagonal are no larger than those of queries.
        small = min(query_size, key_size) if call.causal else key_size
        tiling = tiles.tiling_of(call, q, k, query_size, small)
        obstacles = functools.partial(
            kernel_obstacles, q, k, v, call.logits, bias=None if bias is None else bias.shape
        )
        of_forward = obstacles(
            dropout=call.dropout, chunks=_uneven(tiling, key_size, n_queries, n_keys)
        )
        of_passes = of_forward, obstacles()  # the forward pass and the gradient
        forwards, backwards = (choose_impl(self.impl, pallas=found) for found in of_passes)
        summary = tiles.tile_softmax
        if forwards != "xla":
            summary = functools.partial(kernel_summary, forwards == INTERPRETED)
        forward_pass = functools.partial(forward, key_size, summary)
        every, x = tiles.every_tile(tiling, n_queries, n_keys), tiles.inputs(call, q, k, v)
        if backwards == "xla":
            return tiles.attend(forward_pass, tiling, x, every)
        return _with_kernel_gradient(forward_pass, tiling, backwards == INTERPRETED, x, every)


@functools.partial(CustomDerivatives, n_static=3)
def _with_kernel_gradient(forward_pass, tiling, interpret, x, every):
    return forward_pass(tiling, x, every.by_query).out


def _attend_forward(forward_pass, tiling, interpret, x, every):
    return _with_kernel_gradient.function(forward_pass, tiling, interpret, first_order(x), every), x


def _attend_backward(forward_pass, tiling, interpret, x, d_out):
    """The gradient of flash attention's kernels, which compute the rows' statistics again.

    Those of the summaries are of logits that another program has rounded.
    """
    x, d_out = first_order((x, d_out))
    layout = FullLayout(x.q.shape[1], x.k.shape[1], tiling.causal, tiling.dropout, tiling.logits)
    kernel = block_kernels.kernels()
    results = kernel.forward(layout, x, interpret=interpret)
    gradients = kernel.backward(layout, x, results, d_out, interpret=interpret)
    return BlockInputs(*gradients, None, None, None), None


def _attend_tangent(forward_pass, tiling, interpret, residuals, tangents):
    raise NotImplementedError(KERNEL_REFUSAL)


_with_kernel_gradient.define(_attend_forward, _attend_backward, _attend_tangent)


def chunk_size(size: int | str, length: int) -> int:
    """The size of a chunk, at most the length; `"sqrt"` is its square root."""
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
    interpret: bool, tiling: tiles.Tiling, x: BlockInputs, group, queries, keys, q
) -> Softmax:
    """`tiles.tile_softmax` by the kernel of block-sparse attention, to which the tile is all.

    If causal, the tile is square and on the diagonal.
    """
    q, k, v = (jnp.swapaxes(y, 1, 2) for y in (q, *(rows(y, group, keys) for y in x[1:3])))
    ids = None, None
    if x.query_segment_ids is not None:
        ids = ids_of(x.query_segment_ids, group, queries), ids_of(x.key_segment_ids, group, keys)
    layout = FullLayout(q.shape[1], k.shape[1], tiling.causal, 0.0, tiling.logits)
    x = BlockInputs(q, k, v, *ids, None)
    return Softmax.of_results(block_kernels.kernels().forward(layout, x, interpret=interpret))


def forward(
    key_chunk_size: int,
    summary: Callable[..., Softmax],
    tiling: tiles.Tiling,
    x: BlockInputs,
    visits: tiles.Visits,
) -> tiles.TiledResults:
    """`tiles.forward` by summaries of chunks of keys.

    Args:
      key_chunk_size: keys in a chunk below the diagonal, which all queries of a chunk see. Chunks
        around the diagonal have `tiling.key_size`.
      summary: `tiles.tile_softmax`, or another function of its arguments with the same results.
      tiling, x, visits: as in `tiles.forward`.
    """
    n_batch, length, n_heads, _ = x.q.shape
    n_keys = x.k.shape[1]
    query_size, small = tiling.query_size, tiling.key_size
    n_large = -(-n_keys // key_chunk_size)
    n_slots = n_large + (-(-(query_size + key_chunk_size) // small) + 1 if tiling.causal else 0)

    def query_chunk(group, i, results):
        queries = block_at(i * query_size, query_size, length)
        q = rows(x.q, group, queries)

        def summaries(found, tiling, first_slot, count, first_key, size):
            def one(n, found):
                # If the sizes do not divide each other, any chunk may be the last one.
                aligned = n_keys % size == 0 and key_chunk_size % size == 0
                keys = block_at(first_key + n * size, size, n_keys, aligned)
                of_chunk = summary(tiling, x, group, queries, keys, q)
                return Softmax(
                    *(
                        lax.dynamic_update_index_in_dim(all_, part, first_slot + n, 0)
                        for all_, part in zip(found, of_chunk, strict=True)
                    )
                )

            return lax.fori_loop(np.int32(0), jnp.int32(count), one, found)

        shape = n_slots, group.n_batch, group.n_heads, query_size
        found = varying_as(x, Softmax.empty(shape, x.v.shape[3], x.dtype))
        if tiling.causal:
            # All queries of the chunk see the keys up to the position of the first of them.
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
        return results.with_rows(found.merged(axis=0), group, queries)

    sizes = tiles.groups(tiling._replace(key_size=key_chunk_size), n_batch, n_heads)
    if summary is not tiles.tile_softmax:  # a kernel has no array of logits
        sizes = n_batch, n_heads
    n_chunks = visits.start.shape[1]
    return over_groups(sizes, n_batch, n_heads, n_chunks, query_chunk, tiles.no_results(x))

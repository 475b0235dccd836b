"""Local attention: each chunk sees itself and its neighbours (Parmar et al. 2018).

Linear in the length. With `window` it is exact sliding-window attention (Longformer, sec. 3.1), and
the chunks are only how it is computed.
"""

from __future__ import annotations

import jax.numpy as jnp

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.parts.cache import ring_decoding
from reformax.ops.parts.chunked import (
    Chunks,
    Order,
    check_chunks,
    chunked_attention,
    in_a_circle,
    padding,
)
from reformax.ops.parts.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.parts.dispatch import KERNELS, check_impl, choose, kernel_obstacles


@named
def local(
    *,
    chunk_len: int = 64,
    n_chunks_before: int = 1,
    n_chunks_after: int = 0,
    window: int | None = None,
    shared_qk: bool = False,
    wrap: bool = False,
    pad_chunks: int = 1,
    self_score: float | None = None,
    impl: str = "auto",
) -> AttentionOp:
    """Attention within a position's own chunk and its neighbours.

    The first chunk has no chunk before it, unless `wrap` is set.

    Args:
      chunk_len: positions in a chunk.
      n_chunks_before: how many chunks before its own a position sees.
      n_chunks_after: how many chunks after its own a position sees; useful if not causal.
      window: if set, a position sees exactly those less than `window` positions away, before it
        and, if not causal, after it. The chunk counts must then be large enough to hold it.
      shared_qk: whether keys are the length-normalised queries.
      wrap: True sets the chunks in a circle, as Trax and Hugging Face do: before the first is the
        last one. A key that stands in a window twice then counts twice. Causal attention can tell
        only where `n_chunks_before` reaches around to the chunk itself.
      pad_chunks: the sequence is padded to a multiple of so many chunks, which only `wrap` can
        tell.
      self_score: as in `lsh.lsh`; only where `shared_qk` and `wrap` show a position its own key
        twice can it be told from 1.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 128 or less, without `wrap`; `"pallas_interpret"` runs it anywhere, slowly, for
        tests. `"cudnn"` is NVIDIA's own, for causal attention with a `window` under the conditions
        of `dense.dense`. `"auto"` takes cuDNN or the kernel where they compute this same function.

    Raises:
      ValueError: sizes out of range, a window that the chunks cannot hold, an unknown `impl`.
      NotImplementedError: at the call, when `"cudnn"` or `"pallas"` is asked for what it cannot do.
    """
    check_chunks(chunk_len, n_chunks_before, n_chunks_after, pad_chunks)
    check_impl(impl, "cudnn", *KERNELS)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: expected at least 1, the position itself")
    if wrap and window is not None:
        raise ValueError(f"wrap is True and window is {window}: a window has no circle, leave one")
    # Chunks on either side that a window reaches into.
    reach = 0 if window is None else -(-(window - 1) // chunk_len)
    if reach > n_chunks_before:
        raise ValueError(
            f"window is {window}: expected at most {n_chunks_before * chunk_len + 1} with "
            f"chunk_len={chunk_len}; raise n_chunks_before to {reach}"
        )

    def not_for_cudnn(q, k, v, segments, causal, dropout):
        if window is None or shared_qk or not causal:
            return f"window={window}, shared_qk={shared_qk}, causal={causal}"
        return cudnn_obstacle(q, k, v, segments, dropout)

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng):
        del params, plan
        if not causal and reach > n_chunks_after:
            raise ValueError(
                f"window is {window} and causal=False, but n_chunks_after is {n_chunks_after}: "
                f"raise it to {reach}"
            )
        chosen = choose(
            impl,
            cudnn=not_for_cudnn(q, k, v, segments, causal, dropout),
            **kernel_obstacles(q, k, v, wrap=wrap),
        )
        if chosen == "cudnn":
            return cudnn_attention(q, k, v, causal=True, window=window)
        batch, length, n_heads = q.shape[:3]
        chunks = Chunks(
            length=length,
            chunk_len=min(chunk_len, length),
            n_chunks_before=n_chunks_before,
            n_chunks_after=n_chunks_after,
            causal=causal,
            shared_qk=shared_qk,
            window=window,
            dropout=dropout,
            wrap=wrap and length > chunk_len,
            n_pad=padding(length, chunk_len, pad_chunks),
            self_score=self_score,
        )
        order = None
        if chunks.wrap:
            shape = (batch, n_heads, 1, length + chunks.padding)
            position = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
            order = in_a_circle(
                Order(position, position), chunk_len, n_chunks_before, n_chunks_after
            )
        return chunked_attention(q, k, v, chunks, order, segments, rng, chosen)

    def first(now):
        chunk = (now // chunk_len - n_chunks_before) * chunk_len
        return chunk if window is None else jnp.maximum(chunk, now - window + 1)

    decoding = ring_decoding(
        shared_qk,
        n_slots=lambda capacity: min(window or (n_chunks_before + 1) * chunk_len, capacity),
        first=first,
    )
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=apply,
        traits=Traits(shared_qk=shared_qk, beams=not wrap),
        **({} if wrap else decoding),
    )

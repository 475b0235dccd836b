"""Local attention: each chunk sees itself and its neighbours (Parmar et al. 2018).

Time and memory are linear in the length. With `window` it is exact sliding-window attention
(Longformer, sec. 3.1), and the chunks are only how it is computed.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.parts.cache import ring_decoding
from reformax.ops.parts.chunked import chunked_attention
from reformax.ops.parts.circle import own_weight, sequence_in_a_circle
from reformax.ops.parts.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.parts.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.parts.orders import ChunkSizes, check_chunks


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
      wrap: True sets the chunks in a circle, as Trax and Hugging Face do: before the first stands
        the last one. A key that a query's chunks show twice then counts twice. In causal attention
        it changes something only where `n_chunks_before` reaches around to the chunk itself.
      pad_chunks: with `wrap`, the sequence is padded to a multiple of so many chunks.
      self_score: as in `lsh.lsh`. It changes something only where `shared_qk` and `wrap` show a
        position its own key twice.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 128 or less, without `wrap`; `"pallas_interpret"` runs it anywhere, slowly, for
        tests. `"cudnn"` is NVIDIA's own, for causal attention with a `window` under the conditions
        of `dense.dense`. `"auto"` takes cuDNN or the kernel where they compute the same function.

    Raises:
      ValueError: sizes out of range, a window that the chunks cannot hold, an unknown `impl`.
      NotImplementedError: at the call, when `"cudnn"` or `"pallas"` is asked for what it cannot do.
    """
    check_chunks(chunk_len, n_chunks_before, n_chunks_after, pad_chunks)
    check_impl(impl, "cudnn", *KERNELS)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: expected at least 1, the position itself")
    if wrap and window is not None:
        raise ValueError(f"wrap is True and window is {window}: leave one out")
    reach = _reach(window, chunk_len)
    if reach > n_chunks_before:
        raise ValueError(
            f"window is {window}: expected at most {n_chunks_before * chunk_len + 1} with "
            f"chunk_len={chunk_len}; raise n_chunks_before to {reach}"
        )

    sizes = ChunkSizes(chunk_len, n_chunks_before, n_chunks_after)
    decoding = ring_decoding(
        shared_qk,
        n_slots=lambda capacity: min(window or (n_chunks_before + 1) * chunk_len, capacity),
        first=functools.partial(_first_key, sizes=sizes, window=window),
    )
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=functools.partial(
            _apply,
            sizes=sizes,
            window=window,
            shared_qk=shared_qk,
            pad_chunks=pad_chunks if wrap else None,
            self_score=self_score,
            impl=impl,
        ),
        traits=Traits(shared_qk=shared_qk, beams=not wrap),
        **({} if wrap else decoding),
    )


def _reach(window: int | None, chunk_len: int) -> int:
    """How many chunks on either side a window reaches into."""
    return 0 if window is None else -(-(window - 1) // chunk_len)


def _first_key(now, *, sizes: ChunkSizes, window: int | None):
    """The first position that a query at `now` sees in decoding."""
    chunk = (now // sizes.chunk_len - sizes.n_chunks_before) * sizes.chunk_len
    return chunk if window is None else jnp.maximum(chunk, now - window + 1)


def _apply(
    params,
    q,
    k,
    v,
    *,
    plan,
    segments,
    causal,
    dropout,
    rng,
    sizes: ChunkSizes,
    window: int | None,
    shared_qk: bool,
    pad_chunks: int | None,
    self_score: float | None,
    impl: str,
):
    del params, plan
    reach = _reach(window, sizes.chunk_len)
    if not causal and reach > sizes.n_chunks_after:
        raise ValueError(
            f"window is {window} and causal=False, but n_chunks_after is {sizes.n_chunks_after}: "
            f"raise it to {reach}"
        )
    not_for_cudnn = f"window={window}, shared_qk={shared_qk}, causal={causal}"
    if window is not None and not shared_qk and causal:
        not_for_cudnn = cudnn_obstacle(q, k, v, segments, dropout)
    impl = choose(
        impl, cudnn=not_for_cudnn, **kernel_obstacles(q, k, v, wrap=pad_chunks is not None)
    )
    if impl == "cudnn":
        return cudnn_attention(q, k, v, causal=True, window=window)
    n_batch, length, n_heads = q.shape[:3]
    order = alone = None
    if pad_chunks is not None and length > sizes.chunk_len:
        n_places = length + -length % (sizes.chunk_len * pad_chunks)
        order = sequence_in_a_circle(n_batch, n_heads, n_places, sizes)
        alone = None if self_score is None else own_weight(self_score, order, sizes)
    chunks = sizes.cut(length, causal=causal, shared_qk=shared_qk, window=window, dropout=dropout)
    return chunked_attention(q, k, v, chunks, order, segments, rng, impl, own_weight=alone)

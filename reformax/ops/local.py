"""Local attention: each chunk sees itself and its neighbours (Parmar et al. 2018).

Time and memory are linear in the length. With `window` it is exact sliding-window attention
(Longformer, sec. 3.1), and the chunks decide only how it is computed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.declared import SettingError, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import KERNELS, choose_impl
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import kernel_obstacles, mosaic_obstacles
from reformax.ops.decoding.cache import KeyValues
from reformax.ops.decoding.reading import add_all_to_ring
from reformax.ops.decoding.ring import RingDecoding
from reformax.ops.hashing import circle
from reformax.ops.sharding.borders import Reach
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.softmax.orders import ChunkCount, ChunkSizes, PadChunks

_FARTHEST = 2**30  # positions are below it


@options
class local(RingDecoding, AttentionOp):
    """Attention within a position's own chunk and its neighbours.

    The first chunk has no chunk before it, unless `wrap` is set.

    Args:
      chunk_len: positions in a chunk.
      n_chunks_before: how many chunks before its own a position sees.
      n_chunks_after: how many chunks after its own a position sees; useful if not causal.
      window: if set, a position sees exactly those less than `window` positions away, before it
        and, if not causal, after it. The chunk counts must then be large enough to hold it.
      shared_qk: whether keys are the length-normalised queries.
      wrap: True joins the chunks to a circle, as Trax and Hugging Face do: the last chunk comes
        before the first. A key that is twice among a query's chunks then counts twice. In causal
        attention this matters only where `n_chunks_before` reaches around to the chunk itself, or
        `n_chunks_after` from the last chunk to the first.
      pad_chunks: with `wrap`, the sequence is padded to a multiple of so many chunks.
      self_score: as in `lsh.lsh`. It matters only with `shared_qk` and `wrap`, where a position's
        own key is twice among its chunks.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 256 or less, without `wrap`. `"cudnn"` is NVIDIA's own, for causal attention with a
        `window` under the conditions of `dense.dense`. `"auto"` takes cuDNN or the kernel where
        they compute the same function, and never `"mosaic"`, as in `lsh.lsh`.

    Raises:
      ValueError: sizes out of range, a window that the chunks cannot hold, an unknown `impl`.
      NotImplementedError: at the call, when a kernel is asked for what it cannot do.
    """

    chunk_len: Size = 64
    n_chunks_before: ChunkCount = 1
    n_chunks_after: ChunkCount = 0
    window: Size | None = None
    shared_qk: bool = False
    wrap: bool = False
    pad_chunks: PadChunks = 1
    self_score: float | None = None
    impl: str = "auto"

    shards = ("heads",)
    local = True
    divides_cache = False
    _hides_padding = True
    _takes_lengths = True
    _impls = ("cudnn", *KERNELS, "mosaic")

    @property
    def _grouped(self) -> bool:
        return not self.shared_qk

    @property
    def decoding(self) -> str:
        return "no" if self.wrap else "beams"

    @property
    def _chunks(self) -> ChunkSizes:
        """The sizes of chunks."""
        return ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)

    @property
    def _chunks_reached(self) -> int:
        """The number of chunks on either side that the window reaches into."""
        return 0 if self.window is None else -(-(self.window - 1) // self.chunk_len)

    def reach(self, causal: bool) -> Reach | None:
        if self.wrap:
            return None
        if self.window is not None:
            return Reach(self.window - 1, 0 if causal else self.window - 1)
        before, after = (self.chunk_len * n for n in (self.n_chunks_before, self.n_chunks_after))
        # If not causal, a position also sees the rest of its own chunk.
        after = 0 if causal else after + self.chunk_len - 1
        return Reach(before, after, self.chunk_len)

    @property
    def endless_from(self) -> int:
        return self.window or (self.n_chunks_before + 1) * self.chunk_len

    def _n_slots(self, capacity: int) -> int:
        """The number of positions that decoding holds."""
        return min(self.endless_from, capacity)

    def _first_key(self, position):
        """The first position that a query at `position` sees in decoding."""
        before = min(self.n_chunks_before * self.chunk_len, _FARTHEST)
        chunk = position // self.chunk_len * self.chunk_len - before
        return chunk if self.window is None else jnp.maximum(chunk, position - self.window + 1)

    def _read_on(self, call, params, q, k, v, cache: KeyValues):
        """One sequence of what the ring holds and the new positions, from a chunk's first one on.

        The ring holds what new positions see. What it still holds besides is out of their reach.
        """
        reach, n_slots, length = self.reach(True), cache.keys.shape[2], q.shape[1]
        n_past = min(reach.before + reach.unit - 1, n_slots)
        first = call.position // reach.unit * reach.unit - min(reach.before, _FARTHEST)
        if n_past == n_slots:  # which holds all positions so far, or more chunks than are seen
            first = jnp.maximum(first, 0)
        at = first[:, None] + jnp.arange(n_past + length, dtype=jnp.int32)[None]
        new = at - call.position[:, None]

        def joined(past: Array | None, x: Array) -> Array:
            x = jnp.take_along_axis(x, jnp.clip(new, 0, length - 1)[..., None, None], axis=1)
            if past is None:
                return x
            slot = (at % n_slots)[:, None, :, None]
            past = jnp.swapaxes(jnp.take_along_axis(past, slot, axis=2), 1, 2)
            return jnp.where((new >= 0)[..., None, None], x, past.astype(x.dtype))

        ids = ((at >= 0) & (new < call.lengths[:, None])).astype(jnp.int32)
        masks = dict(segment_ids=ids, one_segment=True, lengths=None, position=None)
        keys = None if self.shared_qk else joined(cache.keys, k)
        queries = joined(cache.keys if self.shared_qk else None, q)
        arrays = queries, keys, joined(cache.values, v)
        out = self._apply(call.but(**masks), params, *arrays, ())
        of_new = (call.position - first)[:, None] + jnp.arange(length)[None]
        out = jnp.take_along_axis(out, of_new[..., None, None], axis=1)
        new = self.keys_of(q, k), v
        return out, add_all_to_ring(cache, *new, call.position, call.lengths), ()

    def _check(self) -> None:
        if self.pad_chunks > 1 and not self.wrap:
            raise SettingError(
                f"pad_chunks is {self.pad_chunks} and wrap is False: set wrap=True or leave it out"
            )
        if self.wrap and self.window is not None:
            raise SettingError(f"wrap is True and window is {self.window}: leave one out")
        if self._chunks_reached > self.n_chunks_before:
            raise SettingError(
                f"window is {self.window}: expected at most "
                f"{self.n_chunks_before * self.chunk_len + 1} with chunk_len={self.chunk_len}; "
                f"raise n_chunks_before to {self._chunks_reached}"
            )

    def _apply(self, call, params, q, k, v, plan):
        window, shared_qk, causal = self.window, self.shared_qk, call.causal
        if not causal and self._chunks_reached > self.n_chunks_after:
            raise SettingError(
                f"window is {window} and causal=False, but n_chunks_after is "
                f"{self.n_chunks_after}: raise it to {self._chunks_reached}"
            )
        not_for_cudnn = f"window={window}, shared_qk={shared_qk}, causal={causal}"
        if window is not None and not shared_qk and causal:
            not_for_cudnn = cudnn_obstacle(call, q, k, v)

        def in_cudnn() -> Float[Array, "B T N V"]:
            scale = call.logits.scale
            masks = dict(causal=True, window=window, lengths=call.lengths)
            return cudnn_attention(q, k, v, scale=scale, **masks)

        arrays, options = (q, k, v, call.logits), dict(wrap=self.wrap)
        impl = choose_impl(
            self.impl,
            cudnn=not_for_cudnn,
            pallas=kernel_obstacles(*arrays, **options),
            mosaic=mosaic_obstacles(*arrays, **options, dropout=call.dropout),
        )
        return in_cudnn() if impl == "cudnn" else self._in_chunks(call, impl, q, k, v)

    def _in_chunks(self, call: Call, impl: str, q, k, v):
        k, v = repeat_heads(q, k, v)
        sizes, (n_batch, length, n_heads) = self._chunks, q.shape[:3]
        order = self_weight = None
        if self.wrap and length > self.chunk_len:
            n_slots = length + -length % (self.chunk_len * self.pad_chunks)
            order = circle.sequence_in_a_circle(n_batch, n_heads, n_slots, sizes)
            if self.self_score is not None:
                self_weight = circle.self_weight(self.self_score, order, sizes)
        options = dict(shared_qk=self.shared_qk, window=self.window)
        chunks = sizes.cut(call, length, circle=self.wrap, **options)
        masks = call.segment_ids, call.seed
        others = impl, self_weight, call.lengths
        return chunked_attention(q, k, v, chunks, order, *masks, *others)

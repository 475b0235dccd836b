"""A sliding window with attention sinks: the last positions, and the first ones.

Xiao et al. 2023 ("Efficient Streaming Language Models with Attention Sinks", sec. 3): a softmax
puts weight that it does not need on the first tokens, and a model fails once its window has left
them. Keeping some of them, the sinks, lets it run for any length with a cache of constant size.
Time is O(T (window + n_sinks)).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.declared import Count, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import KERNELS
from reformax.ops.decoding import band as band_cache
from reformax.ops.masking.bands import first_where
from reformax.ops.masking.visibility import Visibility, is_token
from reformax.ops.softmax import band


@options
class sinks(AttentionOp):
    """Attention to a window and to the first tokens of the sequence.

    The paper numbers positions by their slot in the cache (sec. 3.2). This op, like all others,
    leaves rotations to positions in the sequence, so a sink's distance grows. Packed sequences are
    refused, because each would have its own sinks.

    Args:
      window: a position sees those less than `window` positions away, before it and, if not causal,
        after it.
      n_sinks: how many of the first tokens it sees besides.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 256 or less. `"auto"` takes the kernel where it computes the same function.

    Raises:
      ValueError: a size out of range, an unknown `impl`.
      NotImplementedError: at the call, with several segments in a row, or when `"pallas"` is asked
        for what it cannot do.
    """

    window: Size = 256
    n_sinks: Count = 4
    impl: str = "auto"

    packed = False
    shards = ("heads",)
    _hides_padding = "finite"
    _takes_lengths = True
    _impls = KERNELS

    @property
    def local(self) -> bool:
        return self.n_sinks == 0

    @property
    def endless_from(self) -> int:
        return max(self.window, self.n_sinks)

    def _apply(self, call, params, q, k, v, plan) -> Array:
        ids = call.segment_ids
        real = jnp.ones((1, q.shape[1]), bool) if ids is None else is_token(ids)
        sink_tokens = first_where(real, self.n_sinks) if self.n_sinks else None
        bands = (Visibility(call.causal, self.window),)
        return band.attend(call, bands, q, k, v, sink_tokens, self.impl)

    def _init_cache(self, call, params, q, k, v, plan) -> band_cache.BandCache:
        first: Int[Array, " G"] = jnp.arange(min(self.n_sinks, call.length))
        sink_tokens = jnp.tile(first[None], (len(k), 1))
        return band_cache.fill(call, self._bands, k, v, sink_tokens)

    def _step(self, call, params, q, k, v, cache: band_cache.BandCache):
        return band_cache.step(call, self._bands, q, k, v, cache, self.impl)

    @property
    def _bands(self) -> tuple[Visibility, ...]:
        """The band of a causal call."""
        return (Visibility(True, self.window),)

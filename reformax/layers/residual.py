"""Residual layers, pre-norm or post-norm: the stack that `jax.grad` differentiates as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from reformax.layers.stacks import Block, BlockStack


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ResidualStack(BlockStack):
    """Transformer layers, pre-norm: `x += attention(norm(x)); x += feed_forward(norm(x))`.

    Post-norm: `x = norm(x + attention(x)); x = norm(x + feed_forward(x))`.

    `[B, T, D] -> [B, T, D]`, float32. Further inputs and arguments are those of `BlockStack`.

    Args:
      remat: whether the gradient computes each layer again and keeps only the stream between
        layers, instead of keeping each layer's activations.
      post_norm: whether a norm follows each sum, as in Vaswani et al. 2017, instead of preceding
        each sublayer.
    """

    remat: bool = False
    post_norm: bool = False

    def apply(self, params, x, segments=None, memory=None, memory_segments=None, rng=None):
        mask = () if segments is None else (segments,)
        masks = () if segments is None else (segments, memory_segments)

        # Between layers that are written out, what the next one reads the stream by stays with it.
        open_ends = not (self.remat or self.scan_layers)

        def repeat(streams, this):
            for i, block in enumerate(self.blocks):
                rngs = self._rngs(rng, this, i)

                def layer(p, streams, memory, block=block, rngs=rngs):
                    def attend(p, h):
                        return block.attention.apply(p, h, *mask, rng=rngs["attention"]), None

                    cross = _cross(block, memory, masks, rngs)
                    feed = functools.partial(block.feed_forward.apply, rng=rngs["feed_forward"])
                    streams, _ = self._layer(block, p, streams, attend, cross, feed)
                    return streams if open_ends else self._closed(streams)

                layer = jax.checkpoint(layer) if self.remat else layer
                streams = layer(this.params[f"block_{i}"], streams, memory)
            return streams, None

        streams = self._opened((x,))
        if open_ends:
            streams += ((x if self.post_norm else jnp.zeros_like(x)).astype(self.dtype),)
        return self._closed(self._scan(repeat, streams, params)[0])[0]


def _cross(block: Block, memory, masks, rngs) -> Callable | None:
    """A block's cross-attention as a function of its weights and input alone."""
    if block.cross_attention is None:
        return None
    return lambda params, x: block.cross_attention.apply(
        params, x, memory, *masks, rng=rngs["cross_attention"]
    )

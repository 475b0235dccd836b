"""The two residual functions of a Transformer layer, and stacks of them scanned over the depth.

A stack of `n_layers` repeats a cycle of blocks, such as (local, local, LSH, local). Weights of the
same place in the cycle are stacked along a leading axis, and the layers run under `lax.scan` over
the repeats: program size and compile time depend on the cycle, not on the depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.layers._trax import Layer
from reformax.layers.attention import Attention
from reformax.layers.feed_forward import FeedForward
from reformax.layers.layer_norm import LayerNorm

DTYPES = ("float32", "bfloat16", "float16")


class Block(NamedTuple):
    """One layer of the cycle; each half reads a normalised stream."""

    attention: Attention
    feed_forward: FeedForward


class Repeat(NamedTuple):
    """What a scan over the depth hands to one repeat of the cycle."""

    index: Array
    params: Any


class BlockStack(Layer):
    """Layers that repeat a cycle of blocks: weights, rngs and the scan. See its subclasses."""

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str,
        masked: bool,
        norm_epsilon: float,
        n_streams: int,
    ):
        super().__init__(n_in=n_streams + masked, n_out=n_streams)
        self._blocks = tuple(Block(*block) for block in blocks)
        if not self._blocks or n_layers < 1 or n_layers % len(self._blocks):
            raise ValueError(
                f"n_layers is {n_layers}: expected a multiple of the {len(self._blocks)} blocks "
                "of the cycle"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
        self._n_layers = n_layers
        self._dtype = dtype
        self._masked = masked
        # Streams are float32; a sublayer computes in `dtype` from its normalised input on.
        self._norm = LayerNorm(norm_epsilon, dtype=dtype)

    def init_params(self, rng, shape, *shapes):
        def init_block(rng, block):
            rngs = jax.random.split(rng, 4)
            params = {
                "attention_norm": self._norm.init_params(rngs[0], shape),
                "attention": block.attention.init_params(rngs[1], shape),
                "feed_forward_norm": self._norm.init_params(rngs[2], shape),
                "feed_forward": block.feed_forward.init_params(rngs[3], shape),
            }
            # The stream is a sum over the depth: without this the last layers would find the
            # tokens drowned in what the first ones added (Radford et al. 2019, sec. 2.3).
            params["attention"]["w_o"] /= math.sqrt(2 * self._n_layers)
            params["feed_forward"]["w2"] /= math.sqrt(2 * self._n_layers)
            return params

        n_repeats = self._n_layers // len(self._blocks)
        params = {}
        for i, block in enumerate(self._blocks):
            rngs = jax.random.split(jax.random.fold_in(rng, i), n_repeats)
            layers = [init_block(r, block) for r in rngs]
            params[f"block_{i}"] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        return params

    def _scan(self, body: Callable, carry: Any, params: Any, *extra: Any, reverse: bool = False):
        """`lax.scan` of `body(carry, Repeat, *extra)` over the repeats of the cycle."""
        n_repeats = self._n_layers // len(self._blocks)
        xs = (Repeat(jnp.arange(n_repeats), params), *extra)
        return jax.lax.scan(lambda c, x: body(c, *x), carry, xs, reverse=reverse)

    def _rngs(self, rng, repeat: Repeat, i: int):
        """The rngs of the two halves of block `i` in this repeat; None without an rng."""
        if rng is None:
            return None, None
        rng = jax.random.fold_in(jax.random.fold_in(rng, repeat.index), i)
        return jax.random.fold_in(rng, 0), jax.random.fold_in(rng, 1)

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What a sublayer adds to a stream, as it is added."""
        return x.astype(jnp.float32)

    # Decoding. A layer reads its last stream and adds to its first, then the other way around:
    # with one stream that is a Transformer layer, with two a reversible one.

    def prefill(
        self, params, streams: Sequence[Array], lengths: Int[Array, " B"], capacity: int, rng=None
    ) -> tuple[tuple[Array, ...], Any]:
        """The streams after the stack, and every layer's cache; see `Attention.prefill`."""

        def repeat(streams, this):
            caches = []
            for i, block in enumerate(self._blocks):
                attend = functools.partial(
                    block.attention.prefill,
                    lengths=lengths,
                    capacity=capacity,
                    rng=self._rngs(rng, this, i)[0],
                )
                streams, cache = self._layer(block, this.params[f"block_{i}"], streams, attend)
                caches.append(cache)
            return streams, tuple(caches)

        streams, caches = self._scan(repeat, tuple(map(self._residual, streams)), params)
        return streams, self._unstacked(caches)

    def step(
        self, params, streams: Sequence[Array], caches: Any, position: Int[Array, " B"]
    ) -> tuple[tuple[Array, ...], Any]:
        """The streams `[B, 1, D]` of each row's next position, and the caches with it.

        `params` are those of `for_decoding`. A scan would copy each layer's weights and cache, all
        of it, for the little that a step reads and writes: the layers are written out instead.
        """
        streams, after = tuple(map(self._residual, streams)), []
        for params_here, caches_here in zip(params, caches, strict=True):
            after.append([])
            for i, block in enumerate(self._blocks):
                attend = functools.partial(
                    block.attention.step, cache=caches_here[i], position=position
                )
                streams, cache = self._layer(block, params_here[f"block_{i}"], streams, attend)
                after[-1].append(cache)
        return streams, tuple(map(tuple, after))

    def _unstacked(self, tree: Any) -> tuple[Any, ...]:
        """What is stacked along a leading axis, for each repeat of the cycle."""
        n_repeats = self._n_layers // len(self._blocks)
        return tuple(jax.tree.map(lambda x: x[i], tree) for i in range(n_repeats))  # noqa: B023

    def _layer(self, block: Block, params, streams, attend: Callable):
        """A layer's streams and cache, for its attention `(params, input) -> (output, cache)`."""
        streams = list(streams)
        h = self._norm.apply(params["attention_norm"], streams[-1])
        attended, cache = attend(params["attention"], h)
        streams[0] += self._residual(attended)
        h = self._norm.apply(params["feed_forward_norm"], streams[0])
        streams[-1] += self._residual(block.feed_forward.apply(params["feed_forward"], h))
        return tuple(streams), cache

    def for_decoding(self, params) -> tuple[Any, ...]:
        """The weights for `step`: apart for each repeat, in the dtype that sublayers compute in."""

        def for_step(i, params):
            attention = self._blocks[i].attention.for_decoding(params["attention"], self._dtype)
            feed_forward = jax.tree.map(lambda w: w.astype(self._dtype), params["feed_forward"])
            return params | {"attention": attention, "feed_forward": feed_forward}

        return tuple(
            {f"block_{i}": for_step(i, layer[f"block_{i}"]) for i in range(len(self._blocks))}
            for layer in self._unstacked(params)
        )


class ResidualStack(BlockStack):
    """Pre-norm Transformer layers: `x += attention(norm(x)); x += feed_forward(norm(x))`.

    `[B, T, D] -> [B, T, D]`, float32, with `masked` also the segments `[B, T]`.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str = "float32",
        remat: bool = False,
        masked: bool = False,
        norm_epsilon: float = 1e-6,
    ):
        """Args:
        blocks: the cycle.
        n_layers: a multiple of its length.
        dtype: what the sublayers compute in.
        remat: whether the gradient keeps only the stream between layers and computes each layer
          again, instead of keeping its activations.
        masked: whether segments come along, as in `Attention`.
        norm_epsilon: what the layers' norms add to the variance.
        """
        super().__init__(blocks, n_layers, dtype, masked, norm_epsilon, n_streams=1)
        self._remat = remat

    def apply(self, params, x, segments=None, rng=None):
        def repeat(x, this):
            for i, block in enumerate(self._blocks):
                p = this.params[f"block_{i}"]
                attention_rng, feed_forward_rng = self._rngs(rng, this, i)

                def layer(p, x, block=block, rngs=(attention_rng, feed_forward_rng)):
                    h = self._norm.apply(p["attention_norm"], x)
                    mask = () if segments is None else (segments,)
                    h = block.attention.apply(p["attention"], h, *mask, rng=rngs[0])
                    x = x + h.astype(jnp.float32)
                    h = self._norm.apply(p["feed_forward_norm"], x)
                    h = block.feed_forward.apply(p["feed_forward"], h, rng=rngs[1])
                    return x + h.astype(jnp.float32)

                x = (jax.checkpoint(layer) if self._remat else layer)(p, x)
            return x, None

        return self._scan(repeat, x.astype(jnp.float32), params)[0]

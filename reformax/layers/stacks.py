"""The residual sublayers of a Transformer layer, and stacks of layers scanned over the depth.

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
from reformax.layers.attention import Attention, CrossAttention
from reformax.layers.feed_forward import FeedForward
from reformax.layers.layer_norm import LayerNorm

DTYPES = ("float32", "bfloat16", "float16")
# The sublayers of a block, and the number that makes the rng of each.
SUBLAYERS = {"attention": 0, "feed_forward": 1, "cross_attention": 2}


class Block(NamedTuple):
    """One layer of the cycle: two sublayers, or with cross-attention three."""

    attention: Attention
    feed_forward: FeedForward
    cross_attention: CrossAttention | None = None  # between the two, to a memory

    @property
    def attentions(self) -> dict[str, Attention]:
        """The sublayers but the last, in their order, by the names that their weights have."""
        both = {"attention": self.attention, "cross_attention": self.cross_attention}
        return {name: layer for name, layer in both.items() if layer is not None}


class Repeat(NamedTuple):
    """What a scan over the depth hands to one repeat of the cycle."""

    index: Array
    params: Any


class BlockStack(Layer):
    """Layers that repeat a cycle of blocks: weights, rngs and the scan. See its subclasses.

    Every sublayer reads the stream that was written last and adds to the other; where there is one
    stream, it reads that and adds to it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str,
        masked: bool,
        norm_epsilon: float,
        n_streams: int,
        post_norm: bool = False,
        scan_layers: bool = True,
    ):
        self._blocks = tuple(Block(*block) for block in blocks)
        if not self._blocks or n_layers < 1 or n_layers % len(self._blocks):
            raise ValueError(
                f"n_layers is {n_layers}: expected a multiple of the {len(self._blocks)} blocks "
                "of the cycle"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
        crossing = {block.cross_attention is not None for block in self._blocks}
        if len(crossing) > 1:
            raise ValueError("some blocks have cross_attention and some none: give all or none one")
        self._cross = crossing.pop()
        super().__init__(n_in=n_streams + (3 if self._cross else masked), n_out=n_streams)
        self._n_layers = n_layers
        self._dtype = dtype
        self._masked = masked
        self._post_norm = post_norm
        self._scan_layers = scan_layers
        # Streams are float32; a sublayer computes in `dtype` from its input on.
        self._norm = LayerNorm(norm_epsilon, dtype=dtype)

    def init_params(self, rng, shape, *shapes):
        n_sublayers = self._n_layers * (3 if self._cross else 2)

        def init_block(rng, block):
            rngs = jax.random.split(rng, 6)
            sublayers = {**block.attentions, "feed_forward": block.feed_forward}
            params = {}
            for name, layer in sublayers.items():
                norm_rng, own_rng = (rngs[2 * SUBLAYERS[name] + i] for i in range(2))
                params[f"{name}_norm"] = self._norm.init_params(norm_rng, shape)
                params[name] = layer.init_params(own_rng, shape)
                if not self._post_norm:
                    # The stream is a sum over the depth: without this the last layers would find
                    # the tokens drowned in what the first ones added (Radford et al. 2019, 2.3).
                    last = "w2" if name == "feed_forward" else "w_o"
                    params[name][last] /= math.sqrt(n_sublayers)
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
        unroll = 1 if self._scan_layers else n_repeats
        return jax.lax.scan(lambda c, x: body(c, *x), carry, xs, reverse=reverse, unroll=unroll)

    def _rngs(self, rng, repeat: Repeat, i: int) -> dict[str, Any]:
        """The rng of each sublayer of block `i` in this repeat; None without an rng."""
        if rng is None:
            return dict.fromkeys(SUBLAYERS)
        rng = jax.random.fold_in(jax.random.fold_in(rng, repeat.index), i)
        return {name: jax.random.fold_in(rng, number) for name, number in SUBLAYERS.items()}

    # A sublayer, from what it reads to the streams after it.

    def _read(
        self, params, name: str, streams, normed: Array | None = None
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        """A sublayer's input, of the last stream; and the streams, for what else reads them.

        `normed` is what `_add` made of the stream beside it, if known.
        """
        *others, stream = streams
        if self._post_norm:
            return (stream.astype(self._dtype) if normed is None else normed), streams
        h, stream = self._norm.with_residual(params[f"{name}_norm"], stream)
        return h, (*others, stream)

    def _add(
        self, params, name: str, streams, out: Float[Array, "B T D"]
    ) -> tuple[tuple[Array, ...], Array | None]:
        """The streams after a sublayer and, post-norm, what the next one reads."""
        if not self._post_norm:
            return (*streams[1:], streams[0] + self._residual(out)), None
        norm = params[f"{name}_norm"]
        x, normed = self._norm.of_sum(norm, streams[0], out, "float32", self._dtype)
        return (*streams[1:], x), normed

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What a sublayer adds to a stream, as it is added."""
        return x.astype(jnp.float32)

    def _layer(self, block: Block, params, streams, attend: Callable, cross: Callable, rng=None):
        """A layer's streams, and what else `attend` made.

        Args:
          block: the layer.
          params: its weights.
          streams: what it reads and adds to.
          attend: `(params, input) -> (output, anything)`.
          cross: `(params, input) -> output`, for the cross-attention if there is one.
          rng: of the feed-forward layer.
        """
        h, streams = self._read(params, "attention", streams)
        attended, other = attend(params["attention"], h)
        streams, normed = self._add(params, "attention", streams, attended)
        if self._cross:
            h, streams = self._read(params, "cross_attention", streams, normed)
            crossed = cross(params["cross_attention"], h)
            streams, normed = self._add(params, "cross_attention", streams, crossed)
        h, streams = self._read(params, "feed_forward", streams, normed)
        fed = block.feed_forward.apply(params["feed_forward"], h, rng=rng)
        return self._add(params, "feed_forward", streams, fed)[0], other

    # Decoding.

    def prefill(
        self,
        params,
        streams: Sequence[Array],
        lengths: Int[Array, " B"],
        capacity: int,
        rng=None,
        memory: Float[Array, "B S D"] | None = None,
        memory_segments: Int[Array, "B S"] | None = None,
    ) -> tuple[tuple[Array, ...], Any, Any]:
        """The streams after the stack, and what `step` reads: every layer's cache and memory.

        See `Attention.prefill` and `CrossAttention.precompute_kv`. With a memory the streams have
        one position, that of the token which a target starts with, `params` are those of
        `for_decoding` and the layers are written out as in `step`; without one `memory_kv` is None.
        """

        def repeat(streams, this):
            caches, memory_kv = [], []
            for i, block in enumerate(self._blocks):
                rngs = self._rngs(rng, this, i)
                attend = functools.partial(
                    block.attention.prefill,
                    lengths=lengths,
                    capacity=capacity,
                    rng=rngs["attention"],
                )

                def cross(p, h, layer=block.cross_attention):
                    memory_kv.append(layer.precompute_kv(p, memory, self._dtype))
                    return layer.step(p, h, memory_kv[-1], memory_segments)

                p = this.params[f"block_{i}"]
                streams, cache = self._layer(block, p, streams, attend, cross)
                caches.append(cache)
            return streams, (tuple(caches), tuple(memory_kv))

        streams = tuple(map(self._residual, streams))
        if not self._cross:
            streams, (caches, _) = self._scan(repeat, streams, params)
            return streams, self._unstacked(caches), None
        kept = []
        for index, params_here in enumerate(params):
            streams, kept_here = repeat(streams, Repeat(index, params_here))
            kept.append(kept_here)
        return streams, *zip(*kept, strict=True)

    def step(
        self,
        params,
        streams: Sequence[Array],
        caches: Any,
        position: Int[Array, " B"],
        origins: Int[Array, "G K C"] | None = None,
        memory_kv: Any = None,
        memory_segments: Int[Array, "E S"] | None = None,
    ) -> tuple[tuple[Array, ...], Any]:
        """The streams `[B, 1, D]` of each row's next position, and the caches with it.

        `params` are those of `for_decoding`, `memory_kv` what `prefill` gave; for `origins` see
        `Attention.step`. A scan would copy each layer's weights and cache, all of it, for the
        little that a step reads and writes: the layers are written out instead.
        """
        streams, after = tuple(map(self._residual, streams)), []
        for repeat, (params_here, caches_here) in enumerate(zip(params, caches, strict=True)):
            after.append([])
            for i, block in enumerate(self._blocks):
                attend = functools.partial(
                    block.attention.step,
                    cache=caches_here[i],
                    position=position,
                    origins=origins,
                )
                cross = None
                if self._cross:
                    cross = functools.partial(
                        block.cross_attention.step,
                        memory_kv=memory_kv[repeat][i],
                        memory_segments=memory_segments,
                    )
                p = params_here[f"block_{i}"]
                streams, cache = self._layer(block, p, streams, attend, cross)
                after[-1].append(cache)
        return streams, tuple(map(tuple, after))

    def reorder_cache(self, caches: Any, rows: Int[Array, " R"]) -> Any:
        """The caches of beams that go on from others; see `Attention.reorder_cache`."""
        return tuple(
            tuple(
                block.attention.reorder_cache(cache, rows)
                for block, cache in zip(self._blocks, repeat, strict=True)
            )
            for repeat in caches
        )

    def _unstacked(self, tree: Any) -> tuple[Any, ...]:
        """What is stacked along a leading axis, for each repeat of the cycle."""
        n_repeats = self._n_layers // len(self._blocks)
        return tuple(jax.tree.map(lambda x: x[i], tree) for i in range(n_repeats))  # noqa: B023

    def for_decoding(self, params) -> tuple[Any, ...]:
        """The weights for decoding: apart for each repeat, in the dtype sublayers compute in."""

        def for_step(i, params):
            merged = {
                name: layer.for_decoding(params[name], self._dtype)
                for name, layer in self._blocks[i].attentions.items()
            }
            feed_forward = jax.tree.map(lambda w: w.astype(self._dtype), params["feed_forward"])
            return params | merged | {"feed_forward": feed_forward}

        return tuple(
            {f"block_{i}": for_step(i, layer[f"block_{i}"]) for i in range(len(self._blocks))}
            for layer in self._unstacked(params)
        )


def _crossing(block: Block, memory, masks, rngs) -> Callable | None:
    """A block's cross-attention as a function of its weights and input alone."""
    if block.cross_attention is None:
        return None
    return lambda params, x: block.cross_attention.apply(
        params, x, memory, *masks, rng=rngs["cross_attention"]
    )


class ResidualStack(BlockStack):
    """Transformer layers, pre-norm: `x += attention(norm(x)); x += feed_forward(norm(x))`.

    Post-norm: `x = norm(x + attention(x)); x = norm(x + feed_forward(x))`.

    `[B, T, D] -> [B, T, D]`, float32, with `masked` also the segments `[B, T]`. Blocks with
    cross-attention take three more inputs: the segments, the memory `[B, S, D]` and its segments
    `[B, S]`.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str = "float32",
        remat: bool = False,
        masked: bool = False,
        norm_epsilon: float = 1e-6,
        post_norm: bool = False,
        scan_layers: bool = True,
    ):
        """Args:
        blocks: the cycle.
        n_layers: a multiple of its length.
        dtype: what the sublayers compute in.
        remat: whether the gradient keeps only the stream between layers and computes each layer
          again, instead of keeping its activations.
        masked: whether segments come along, as in `Attention`.
        norm_epsilon: what the layers' norms add to the variance.
        post_norm: whether a norm follows each sum, as in Vaswani et al. 2017, instead of preceding
          each sublayer.
        scan_layers: whether the cycles are a loop to the compiler, whose time then does not depend
          on the depth. Written out one by one they run faster on a GPU, for nothing is copied
          into arrays of all layers and out of them.
        """
        super().__init__(
            blocks,
            n_layers,
            dtype,
            masked,
            norm_epsilon,
            n_streams=1,
            post_norm=post_norm,
            scan_layers=scan_layers,
        )
        self._remat = remat

    def apply(self, params, x, segments=None, memory=None, memory_segments=None, rng=None):
        mask = () if segments is None else (segments,)
        masks = () if segments is None else (segments, memory_segments)

        def repeat(x, this):
            for i, block in enumerate(self._blocks):
                rngs = self._rngs(rng, this, i)

                def layer(p, x, memory, block=block, rngs=rngs):
                    def attend(p, h):
                        return block.attention.apply(p, h, *mask, rng=rngs["attention"]), None

                    cross = _crossing(block, memory, masks, rngs)
                    ((x,), _) = self._layer(block, p, (x,), attend, cross, rng=rngs["feed_forward"])
                    return x

                layer = jax.checkpoint(layer) if self._remat else layer
                x = layer(this.params[f"block_{i}"], x, memory)
            return x, None

        return self._scan(repeat, x.astype(jnp.float32), params)[0]

"""Decoding with a stack: prompts or a memory, several more positions of each row, or one.

In a step a sublayer's first product also computes its norm, and the last one adds to the stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.layers.matrices import FOR_DECODING, Unnormed, computed


class Repeat(NamedTuple):
    """One repeat of the cycle, as a scan over the depth reads it."""

    index: Array
    params: Any


class StackDecoding:
    """A mixin of `BlockStack`: its layers one after the other, each with a cache."""

    def _unnormed(self, params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"] | Unnormed:
        """A sublayer's input in decoding."""
        return Unnormed(self._norm, params, x) if params else x.astype(self.dtype)

    def _decode(
        self, params, name: str, streams: tuple[Array, ...], sublayer: Callable
    ) -> tuple[tuple[Array, ...], tuple]:
        """The streams after a sublayer, and what it returns besides its output.

        Args:
          params: the layer's weights.
          name: the sublayer's.
          streams: those before it.
          sublayer: `(params, input, added=stream) -> (output, *others)`. The input is an array or
            `Unnormed`, and the output is added to the stream unless that is None.
        """
        raise NotImplementedError

    def _decode_repeat(
        self,
        streams: tuple[Array, ...],
        repeat: Repeat,
        sublayers_of: Callable,
        divided: bool = False,
    ) -> tuple[tuple[Array, ...], tuple[tuple, tuple]]:
        """The streams after a repeat of the cycle.

        Args:
          streams: those before it.
          repeat: its weights.
          sublayers_of: `(repeat, i, source) -> {name: sublayer}`, the sublayers of block `i` as
            `_decode` takes them. That of attention returns `(output, cache, *others)`, and `source`
            is `(cache, *others)` of the block whose plan block `i` reuses; None: it makes its own.
          divided: whether devices share the positions of the streams.

        Returns:
          The streams, the cache of each block, and what its cross-attention returned.
        """
        attention, cross = [], []
        for i, source in enumerate(self._sources):
            p, found = repeat.params[f"block_{i}"], {}
            source = None if source is None else attention[source]
            for name, sublayer in sublayers_of(repeat, i, source).items():
                streams, found[name] = self._decode(p, name, streams, sublayer)
            if divided:
                streams = tuple(map(devices.over_sequence, streams))
            attention.append(found["attention"])
            cross.append(found.get("cross_attention"))
        return streams, (tuple(cache for cache, *_ in attention), tuple(cross))

    def _decode_all(
        self, params, streams: Sequence[Array], sublayers_of: Callable, divided: bool = False
    ) -> tuple[tuple[Array, ...], tuple, tuple]:
        """The streams after the stack, and what `_decode_repeat` returns of each repeat.

        `params` are of each repeat. The layers are written out: a scan would copy each layer's
        weights and cache whole, and a step touches little of them.
        """
        streams, found = self._opened(streams), []
        for index, of_repeat in enumerate(params):
            repeat = Repeat(index, of_repeat)
            streams, outputs = self._decode_repeat(streams, repeat, sublayers_of, divided)
            found.append(outputs)
        return streams[: self.n_streams], *zip(*found, strict=True)

    def for_decoding(self, params) -> tuple[Any, ...]:
        """The weights for decoding: a tree for each repeat, in the dtype sublayers compute in."""
        self._check_depth(params)

        def for_step(i, params):
            merged = {
                name: layer.for_decoding(params[name], self.dtype)
                for name, layer in self.blocks[i].attentions.items()
            }
            feed_forward = self.blocks[i].feed_forward
            cast = feed_forward.for_decoding(params["feed_forward"], self.dtype)
            return params | merged | {"feed_forward": cast}

        return tuple(
            {f"block_{i}": for_step(i, layer[f"block_{i}"]) for i in range(len(self.blocks))}
            for layer in self._unstack(params)
        )

    def prefill(
        self,
        params,
        streams: Sequence[Array],
        lengths: Int[Array, " B"],
        capacity: int,
        rng=None,
        memory: Float[Array, "B S D"] | None = None,
        memory_segment_ids: Int[Array, "B S"] | None = None,
    ) -> tuple[tuple[Array, ...], Any, Any]:
        """Reads prompts, or with a memory each target's first token.

        See `Attention.prefill` and `CrossAttention.precompute_kv`. With a memory the streams have
        one position, and `params` are those of `for_decoding`.

        Returns:
          The streams after the stack, the caches, and the keys and values of the memory, None
          without one.
        """

        def sublayers(repeat: Repeat, i: int, source):
            attention, feed_forward, cross = self.blocks[i]
            rngs = self._rngs(rng, repeat, i)
            options = lengths, capacity, rngs["attention"], None if source is None else source[1]
            found = {"attention": _unfused(lambda p, x: attention.prefill(p, x, *options))}
            if not cross:
                return found | {"feed_forward": _unfused(lambda p, x: (feed_forward.apply(p, x),))}

            def attend_to_memory(p, x, added):
                memory_kv = cross.precompute_kv(p, memory, self.dtype, rngs["cross_attention"])
                return cross.step(p, x, memory_kv, memory_segment_ids, added), *memory_kv

            found["cross_attention"] = attend_to_memory
            return found | {"feed_forward": lambda p, x, added: (feed_forward.step(p, x, added),)}

        if self._cross:
            return self._decode_all(params, streams, sublayers)
        body = functools.partial(self._decode_repeat, sublayers_of=sublayers)
        streams, (caches, _) = self._scan(body, self._opened(streams), params)
        return streams[: self.n_streams], self._unstack(caches), None

    def first_caches(self, params, batch: int, capacity: int, rng=None) -> Any:
        """The caches of all layers before the first position; see `Attention.first_cache`."""

        def of(index, i, p):
            this = Repeat(index, p)
            options = batch, capacity, self.dtype, self._rngs(rng, this, i)["attention"]
            p = devices.gathered(p[f"block_{i}"]["attention"])
            return self.blocks[i].attention.first_cache(p, *options)

        return tuple(
            tuple(of(index, i, p) for i in range(len(self.blocks)))
            for index, p in enumerate(self._unstack(params))
        )

    def read_on(
        self,
        params,
        streams: Sequence[Array],
        lengths: Int[Array, " B"],
        position: Int[Array, " B"],
        caches: Any,
    ) -> tuple[tuple[Array, ...], Any]:
        """The streams of several more positions of each row, and the caches with them.

        See `Attention.read_on`.
        """

        def sublayers(repeat: Repeat, i: int, source):
            attention, feed_forward, _ = self.blocks[i]
            chosen = () if source is None else source[1]
            options = lengths, position, caches[repeat.index][i], chosen
            return {
                "attention": _unfused(lambda p, x: attention.read_on(p, x, *options)),
                "feed_forward": _unfused(lambda p, x: (feed_forward.apply(p, x),)),
            }

        params = map(devices.gathered, self._unstack(params))
        return self._decode_all(params, streams, sublayers, divided=True)[:2]

    def step(
        self,
        params,
        streams: Sequence[Array],
        caches: Any,
        position: Int[Array, " B"],
        origins: Int[Array, "G K C"] | None = None,
        memory_kv: Any = None,
        memory_segment_ids: Int[Array, "E S"] | None = None,
    ) -> tuple[tuple[Array, ...], Any]:
        """The streams `[B, 1, D]` of each row's next position, and the caches with it.

        `params` are the weights from `for_decoding`, `memory_kv` is from `prefill`; for `origins`
        see `Attention.step`.
        """

        if isinstance(params, dict):
            raise ValueError(f"params are those of `apply`: {FOR_DECODING}")

        def sublayers(repeat: Repeat, i: int, source):
            (attention, feed_forward, cross), chosen = self.blocks[i], None
            if source is not None:
                chosen = self.blocks[self._sources[i]].attention.newest_choice(*source)
            options = caches[repeat.index][i], position, origins
            found = {"attention": lambda p, x, added: attention.step(p, x, *options, added, chosen)}
            if cross:
                of_memory = memory_kv[repeat.index][i], memory_segment_ids
                found["cross_attention"] = lambda p, x, added: (
                    cross.step(p, x, *of_memory, added),
                )
            return found | {"feed_forward": lambda p, x, added: (feed_forward.step(p, x, added),)}

        return self._decode_all(params, streams, sublayers)[:2]

    def reorder_cache(self, caches: Any, rows: Int[Array, " R"]) -> Any:
        """The caches of beams that continue `rows`; see `Attention.reorder_cache`."""
        return tuple(
            tuple(
                block.attention.reorder_cache(cache, rows)
                for block, cache in zip(self.blocks, repeat, strict=True)
            )
            for repeat in caches
        )

    def _unstack(self, tree: Any) -> tuple[Any, ...]:
        """The tree of each repeat, from arrays with a leading axis of repeats."""
        return tuple(
            jax.tree.map(lambda x: x[i], tree)  # noqa: B023
            for i in range(self._n_repeats)
        )


def _unfused(sublayer: Callable) -> Callable:
    """A sublayer for `_decode` whose products neither compute a norm nor add to a stream."""

    def run(params, x, added):
        out, *others = sublayer(params, computed(x))
        return out if added is None else added + out.astype(added.dtype), *others

    return run

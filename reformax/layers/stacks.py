"""Transformer layers as cycles of blocks, scanned over the depth.

A stack of `n_layers` repeats a cycle of blocks, such as (local, local, LSH, local). Weights of the
same block of the cycle are stacked along a leading axis, and the layers run under `lax.scan` over
the repeats: program size and compile time depend on the cycle, not on the depth.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax import devices
from reformax.buffers import Buffer
from reformax.declared import Depth, NonNegative, SettingError, Unsupported, check_fields, shown
from reformax.layers.attention import Attention
from reformax.layers.base import Layer, check_shape
from reformax.layers.cross_attention import CrossAttention
from reformax.layers.feed_forward import FeedForward
from reformax.layers.layer_norm import NORMS, LayerNorm, NoNorm, NormName, NormPlace, norm_places
from reformax.layers.planned_attention import KEPT_MASS, PlannedAttention
from reformax.layers.stack_decoding import Repeat, StackDecoding
from reformax.ops.calls.arguments import check_mask
from reformax.ops.numerics.arrays import check_floats

Dtype = Literal["float32", "bfloat16", "float16"]
# The sublayers of a block, and the number that makes the rng of each.
SUBLAYERS = {"attention": 0, "feed_forward": 1, "cross_attention": 2}


# What an error suggests for a sublayer of a block.
_EXAMPLES = {
    "attention": "Attention(lsh.lsh(), n_heads=8, d_qk=64, d_v=64)",
    "feed_forward": "FeedForward(2048)",
    "cross_attention": "CrossAttention(dense.dense(), n_heads=8, d_qk=64, d_v=64)",
}


class TransformerBlock(NamedTuple):
    """One layer of the cycle: two sublayers, or three with cross-attention.

    Attributes:
      attention: of the sequence to itself.
      feed_forward: of each position.
      cross_attention: between the two, to a memory; None: there is none.
    """

    attention: Attention
    feed_forward: FeedForward
    cross_attention: CrossAttention | None = None

    @property
    def attentions(self) -> dict[str, PlannedAttention]:
        """The attention sublayers in their order, by the names that their weights have."""
        both = {"attention": self.attention, "cross_attention": self.cross_attention}
        return {name: layer for name, layer in both.items() if layer is not None}


def _checked_block(block: Any) -> TransformerBlock:
    """A block, which may be given as a tuple or list; `SettingError` for what is none."""
    if not isinstance(block, tuple | list) or len(block) not in (2, 3):
        raise SettingError(
            f"blocks has {shown(block)}: expected a list of "
            "TransformerBlock(attention, feed_forward)"
        )
    kinds = Attention, Layer, CrossAttention | None
    for name, layer, kind in zip(TransformerBlock._fields, block, kinds, strict=False):
        if not isinstance(layer, kind):
            raise SettingError(
                f"blocks has {name} {shown(layer)}: expected a layer of reformax, such as "
                f"{_EXAMPLES[name]}"
            )
    return TransformerBlock(*block)


@dataclasses.dataclass(eq=False, repr=False)
class BlockStack(StackDecoding, Layer):
    """The layers of `ResidualStack` and `ReversibleStack`: weights, rngs, the scan, decoding.

    Every sublayer reads the stream and adds to it; reversible stacks have two, or slots
    (`layers.coupling`). Streams are `[B, T, D]` float32. After the streams come,
    with `masked`, the segments `[B, T]`; blocks with cross-attention read three inputs instead: the
    segments, the memory `[B, S, D]` and its segments `[B, S]`.

    Args:
      blocks: the cycle.
      n_layers: a multiple of its length.
      dtype: what the sublayers compute in.
      masked: whether segments are an input, as in `Attention`.
      norm: of the layers, "layer" (`LayerNorm`), "rms" (`RMSNorm`) or "rms_plus_one"
        (`RMSPlusOne`).
      norm_epsilon: added to the mean square in the layers' norms.
      norm_place: with "output" sublayers read the stream as it is. The norms of outputs are the
        sublayers' own, `output_norm`. A sequence has one for each block of the cycle.
      scan_layers: whether the layers compile as a loop over the cycle. Then the depth does not
        change compile time. Written out, layers run faster on a GPU, because nothing is copied to
        and from arrays of all layers.

    Raises:
      SettingError: what is no block, a depth that the cycle does not divide, or an algorithm that
        reuses a choice which no block before it makes.
      ValueError: some blocks have cross-attention and some have none.
    """

    blocks: Sequence[TransformerBlock]
    n_layers: Depth
    _: dataclasses.KW_ONLY
    dtype: Dtype = "float32"
    masked: bool = False
    norm: NormName = "layer"
    norm_epsilon: NonNegative = 1e-6
    norm_place: NormPlace | Sequence[NormPlace] = "input"
    scan_layers: bool = True

    n_streams = 1
    post_norm = False  # an argument of `ResidualStack`

    def __post_init__(self):
        self.blocks = tuple(map(_checked_block, self.blocks))
        check_fields(self)
        if not self.blocks:
            raise SettingError("blocks is empty: give at least one")
        if self.n_layers % len(self.blocks):
            raise SettingError(
                f"n_layers is {self.n_layers}: expected a multiple of the {len(self.blocks)} "
                "blocks of the cycle"
            )
        crossing = {block.cross_attention is not None for block in self.blocks}
        if len(crossing) > 1:
            raise ValueError("some blocks have cross_attention and some none: give all or none one")
        self._cross = crossing.pop()
        # The block whose plan each block's attention reuses; None: it makes its own.
        self._sources = tuple(self._source(i) for i in range(len(self.blocks)))
        self._n_repeats = self.n_layers // len(self.blocks)
        # Streams are float32; a sublayer's norm puts out the dtype that the sublayer computes in.
        self._norm, self._no_norm = (
            norm(self.norm_epsilon, dtype=self.dtype) for norm in (NORMS[self.norm], NoNorm)
        )
        n_others = 3 if self._cross else int(self.masked)
        super().__init__(n_in=self.n_streams + n_others, n_out=self.n_streams)

    @property
    def causal(self) -> bool:
        """Whether a position of some layer sees only itself and what came before it."""
        return any(block.attention.causal for block in self.blocks)

    @property
    def drops(self) -> bool:
        return any(layer.drops for block in self.blocks for layer in block if layer is not None)

    def _source(self, i: int) -> int | None:
        """The last block before block `i` of the cycle whose plan it may reuse, if it reuses one.

        Raises:
          SettingError: there is none.
        """
        op = self.blocks[i].attention.op
        if not op.reuses:
            return None
        before = [j for j in range(i) if op.may_reuse(self.blocks[j].attention.op)]
        if not before:
            raise SettingError(
                f"layer {i} of the cycle is {op}, which reuses a choice, and no layer before it in "
                "the cycle makes one for it: put one with reuse=False and its other options first"
            )
        return before[-1]

    def _check_inputs(
        self, params, streams, segment_ids=None, memory=None, memory_segment_ids=None
    ) -> None:
        """Raises `ValueError` unless the stack's inputs fit its weights and one another."""
        if not isinstance(params, Mapping) or "block_0" not in params:
            raise ValueError(f"params is {shown(params)}: expected the dict of init_params")
        (x, *others), d_model = streams, params["block_0"]["attention"]["w_o"].shape[-1]
        check_floats("x", x, "batch", "length", d_model)
        for other in others:
            check_floats("stream 2", other, *x.shape)
        check_mask("segment_ids", segment_ids, "x", x)
        if self._cross and memory is None:
            raise SettingError("memory is None and blocks have cross_attention: give a memory")
        if memory is None:
            return
        if not self._cross:
            raise SettingError("memory is given and no block has cross_attention: leave it out")
        check_floats("memory", memory, len(x), "length", d_model)
        check_mask("memory_segment_ids", memory_segment_ids, "memory", memory)

    def init_params(self, rng, shape, *shapes):
        check_shape(shape)
        params = {}
        places = norm_places(self.norm_place, len(self.blocks))
        for i, (block, place) in enumerate(zip(self.blocks, places, strict=True)):
            rngs = jax.random.split(jax.random.fold_in(rng, i), self._n_repeats)
            # One after the other they would be as many programs, which a GPU's compiler takes a
            # minute for.
            norm = self._no_norm if place == "output" else self._norm
            init = functools.partial(self._init_block, block=block, norm=norm, shape=shape)
            params[f"block_{i}"] = jax.vmap(init)(rngs)
        return params

    def _init_block(self, rng, block: TransformerBlock, norm, shape) -> dict[str, Any]:
        rngs = jax.random.split(rng, 6)
        n_sublayers = self.n_layers * (3 if self._cross else 2)
        params = {}
        for name, layer in {**block.attentions, "feed_forward": block.feed_forward}.items():
            norm_rng, layer_rng = (rngs[2 * SUBLAYERS[name] + i] for i in range(2))
            params[f"{name}_norm"] = norm.init_params(norm_rng, shape)
            params[name] = layer.init_params(layer_rng, shape)
            if not self.post_norm:
                # The stream is a sum over the depth: without this, what the first layers added
                # would drown the tokens before the last ones (Radford et al. 2019, 2.3).
                last = "w2" if name == "feed_forward" else "w_o"
                params[name][last] /= math.sqrt(n_sublayers)
        return params

    def _check_depth(self, params) -> None:
        n_layers = {len(self.blocks) * len(x) for x in jax.tree.leaves(params)}
        if n_layers != {self.n_layers}:
            raise ValueError(
                f"params are of {max(n_layers)} layers: expected those of n_layers={self.n_layers}"
            )

    def _scan(self, body: Callable, carry: Any, params: Any, *extra: Any, reverse: bool = False):
        """`lax.scan` of `body(carry, Repeat, *extra)` over the repeats of the cycle.

        Devices gather sharded weights of one repeat at a time.

        Raises:
          ValueError: `params` are of a stack of another depth.
        """
        self._check_depth(params)
        xs = (Repeat(jnp.arange(self._n_repeats), params), *extra)
        unroll = 1 if self.scan_layers else self._n_repeats

        def each(carry, xs):
            this, *extra = xs
            return body(carry, this._replace(params=devices.gathered(this.params)), *extra)

        return jax.lax.scan(each, carry, xs, reverse=reverse, unroll=unroll)

    def _rngs(self, rng, repeat: Repeat, i: int) -> dict[str, Any]:
        """The rng of each sublayer of block `i` in this repeat; None without an rng."""
        if rng is None:
            return dict.fromkeys(SUBLAYERS)
        rng = jax.random.fold_in(jax.random.fold_in(rng, repeat.index), i)
        return {name: jax.random.fold_in(rng, number) for name, number in SUBLAYERS.items()}

    def _opened(self, streams: Sequence[Array]) -> tuple[Array, ...]:
        """The streams before the first sublayer, from the stack's inputs."""
        return tuple(map(self._residual, streams))

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """`x` as it is added to a stream."""
        return x.astype(jnp.float32)

    # What is measured of layers whose algorithms choose keys (`ops.softmax.kept_mass`).

    def meters(self) -> dict[str, Buffer]:
        """A meter of kept mass for each block of the cycle that can be measured."""
        return {
            f"block_{i}": Buffer(jnp.zeros(self._n_repeats))
            for i, block in enumerate(self.blocks)
            if block.attention.op.chooses_keys
        }

    def with_meters(self, params, meters: dict[str, Buffer]) -> dict[str, Any]:
        """The weights with meters, whose gradient then is the kept mass of their layers."""
        metered = dict(params)
        for name, meter in meters.items():
            attention = params[name]["attention"] | {KEPT_MASS: meter}
            metered[name] = params[name] | {"attention": attention}
        return metered

    def by_layer(self, meters: dict[str, Buffer]) -> dict[int, Float[Array, ""]]:
        """The values of meters by their layer, in order; the first layer is 1."""
        n, found = len(self.blocks), {}
        for i in range(self.n_layers):
            if (meter := meters.get(f"block_{i % n}")) is not None:
                found[i + 1] = meter.value[i // n]
        return found

    # Parts of a sequence, from the states of the parts before.

    def first_states(self, batch: int) -> Any:
        """The states of all layers before the first position of `batch` rows.

        Raises:
          Unsupported: a layer carries no state.
        """
        raise Unsupported(
            f"{type(self).__name__} carries no states from one part of a sequence to the next: "
            "use a Transformer, such as lm.TransformerLM"
        )

    def apply_from(
        self, params, x: Float[Array, "B T D"], states: Any, segment_ids=None, rng=None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` to a part of a sequence, and the states after it."""
        raise NotImplementedError

    def _norm_of(self, params) -> LayerNorm:
        """The norm of a sublayer's input; a place without one has no weights."""
        return self._norm if params else self._no_norm

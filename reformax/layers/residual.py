"""Residual layers, pre-norm or post-norm: the stack that `jax.grad` differentiates as it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import SettingError
from reformax.layers import remat
from reformax.layers.layer_norm import norm_places
from reformax.layers.remat import RematPolicy
from reformax.layers.stacks import BlockStack
from reformax.ops.masking.masks import Ids, Tokens


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ResidualStack(BlockStack):
    """Transformer layers, pre-norm: `x += attention(norm(x)); x += feed_forward(norm(x))`.

    Post-norm: `x = norm(x + attention(x)); x = norm(x + feed_forward(x))`.

    `[B, T, D] -> [B, T, D]`, float32. Further inputs and arguments are those of `BlockStack`.

    Args:
      remat_policy: what the gradient keeps of each layer besides the stream between layers:
        "nothing", "attention" or "all" (`layers.remat`). It computes the rest again.
      offload_activations: whether the stream between layers and what else the policy keeps lie in
        the host's memory between the passes; not with "all".
      post_norm: whether a norm follows each sum, as in Vaswani et al. 2017, instead of preceding
        each sublayer.
    """

    remat_policy: RematPolicy = "all"
    offload_activations: bool = False
    post_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.post_norm and set(norm_places(self.norm_place, len(self.blocks))) != {"input"}:
            raise SettingError(
                f"post_norm is True and norm_place {self.norm_place!r}: leave one of them out"
            )
        remat.check_policy(self.remat_policy, self.offload_activations)

    def apply(
        self,
        params,
        x: Float[Array, "B T D"],
        segment_ids: Ids | Tokens | None = None,
        memory: Float[Array, "B S D"] | None = None,
        memory_segment_ids: Int[Array, "B S"] | None = None,
        rng: PRNGKeyArray | None = None,
    ) -> Float[Array, "B T D"]:
        return self._run(params, x, segment_ids, memory, memory_segment_ids, rng)[0]

    def first_states(self, batch):
        states = tuple(block.attention.first_state(batch, self.dtype) for block in self.blocks)
        return jax.tree.map(lambda x: jnp.tile(x[None], (self._n_repeats, *[1] * x.ndim)), states)

    def apply_from(self, params, x, states, segment_ids=None, rng=None):
        return self._run(params, x, segment_ids, rng=rng, states=states)

    def _run(
        self,
        params,
        x,
        segment_ids=None,
        memory=None,
        memory_segment_ids=None,
        rng=None,
        states: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The stream after the stack, and where there are states before a part, those after it."""
        self._check_inputs(params, (x,), segment_ids, memory, memory_segment_ids)
        if self.offload_activations:
            remat.check_offload()
        run = remat.named if self.remat_policy == "attention" else remat.direct

        def layer(i, rngs, p, streams, memory, plan, state):
            """The streams after block `i`; the plan that others reuse, or the state after it."""
            block, masks = self.blocks[i], (segment_ids, rngs["attention"])
            if self.offload_activations:
                streams = checkpoint_name(streams, remat.STREAM)
            h, streams = self._read(p, "attention", streams)
            weights, bias = block.attention.without_output_bias(p["attention"])
            if state is not None:
                out, kept = block.attention.apply_from(weights, h, state, *masks)
            else:
                out, kept = block.attention.apply_by(weights, h, plan, *masks, run)
                kept = kept if i in self._sources else None
            streams = self._add(p, "attention", streams, out, bias)
            if self._cross:
                h, streams = self._read(p, "cross_attention", streams)
                masks = segment_ids, memory_segment_ids, rngs["cross_attention"]
                weights, bias = block.cross_attention.without_output_bias(p["cross_attention"])
                out = block.cross_attention.apply(weights, h, memory, *masks, run)
                streams = self._add(p, "cross_attention", streams, out, bias)
            h, streams = self._read(p, "feed_forward", streams)
            weights, bias = self._of_last(block.feed_forward, p["feed_forward"])
            out = block.feed_forward.apply(weights, h, rngs["feed_forward"])
            streams = self._add(p, "feed_forward", streams, out, bias)
            return (streams if self._leaves_output else self._summed(streams)), kept

        def repeat(streams, this, states=None):
            kept = []
            for i, source in enumerate(self._sources):
                of_block = functools.partial(layer, i, self._rngs(rng, this, i))
                of_block = remat.checkpointed(of_block, self.remat_policy, self.offload_activations)
                plan = None if source is None else kept[source]
                state = None if states is None else states[i]
                p = this.params[f"block_{i}"]
                streams, found = of_block(p, streams, memory, plan, state)
                kept.append(found)
            return streams, None if states is None else tuple(kept)

        streams = (self._residual(x),)
        if self.post_norm and self._leaves_output:
            streams += (x.astype(self.dtype),)
        elif self._leaves_output:
            # As a repeat of the cycle leaves them; the bias has an axis of repeats here.
            weights = params[f"block_{len(self.blocks) - 1}"]["feed_forward"]
            bias = self._of_last(self.blocks[-1].feed_forward, weights)[1]
            zeros = None if bias is None else jnp.zeros_like(bias[0])
            streams += (jnp.zeros_like(x, self.dtype), zeros)
        given = () if states is None else (states,)
        streams, after = self._scan(repeat, streams, params, *given)
        return self._summed(streams)[0], after

    @property
    def _leaves_output(self) -> bool:
        """Whether the norm of the next layer adds the last output of a layer: without a scan."""
        return self.remat_policy == "all" and not self.scan_layers

    def _of_last(self, sublayer, params) -> tuple[Any, Float[Array, " D"] | None]:
        """`without_output_bias` of a layer's last sublayer, if a norm is to add it."""
        added_by_norm = self.post_norm or self._leaves_output
        return sublayer.without_output_bias(params) if added_by_norm else (params, None)

    # `streams` between sublayers. Pre-norm: the stream, and maybe the last output, which the next
    # norm adds to it in one pass, and that output's bias or None. Post-norm: the stream, and the
    # same in the dtype that sublayers read.

    def _read(
        self, params, name: str, streams: Sequence[Array]
    ) -> tuple[Float[Array, "B T D"], tuple[Array, ...]]:
        """A sublayer's input, and the stream for its other readers."""
        if self.post_norm:
            return streams[-1].astype(self.dtype), streams
        norm = params[f"{name}_norm"]
        h, stream = self._norm_of(norm).with_residual(norm, *streams)
        return h, (stream,)

    def _add(
        self,
        params,
        name: str,
        streams: Sequence[Array],
        out: Float[Array, "B T D"],
        bias: Float[Array, " D"] | None = None,
    ) -> tuple[Array, ...]:
        """The streams after a sublayer, whose output has that bias."""
        if not self.post_norm:
            return *streams, out, bias
        norm = params[f"{name}_norm"]
        return self._norm.of_sum(norm, streams[0], out, "float32", self.dtype, y_bias=bias)

    def _summed(self, streams: Sequence[Array]) -> tuple[Array, ...]:
        """The stream alone, with the output that was not added yet."""
        if self.post_norm:
            return (streams[0],)
        x, *out = streams
        out = (y if y.ndim == x.ndim else y[None, None] for y in out if y is not None)
        return (sum(map(self._residual, (x, *out))),)

    def _opened(self, streams):
        (x,) = super()._opened(streams)
        return (x, x.astype(self.dtype)) if self.post_norm else (x,)

    def _decode(self, params, name, streams, sublayer):
        x, *read = streams
        if self.post_norm:
            out, *kept = sublayer(params[name], *read, added=None)
            return self._add(params, name, (x,), out), tuple(kept)
        read = self._unnormed(params[f"{name}_norm"], x)
        x, *kept = sublayer(params[name], read, added=x)
        return (x,), tuple(kept)

"""Learned sinks: each head's softmax has one more term in its denominator, `exp(sink)`.

`sink` is a learnt logit of the head, so that a head may give less than all of its weight to keys
(OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sec. 2.2). It is as if each query saw one
more key with this logit and the value 0. The first tokens of a sequence, which softmax uses so
otherwise (`ops.sinks`), are no longer needed for it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.calls.call import Call
from reformax.ops.calls.options import Options, options
from reformax.ops.sharding.shard import of_heads
from reformax.ops.softmax.online import nonzero

# `(out [B, T, N, V], row_max [B, N, T], row_sum [B, N, T])` of a softmax.
Results = tuple[Array, Array, Array]


def with_sinks(results: Results, sinks: Float[Array, " N"] | None) -> Results:
    """The results of a forward pass whose denominators have the heads' sinks; None: none.

    The backward pass of a softmax without sinks, given these results, returns the gradients of its
    inputs: its weights are divided by the whole denominator, and a sink's value is 0.
    """
    if sinks is None:
        return results
    out, of_keys_max, of_keys_sum = results
    sink = _of_rows(sinks, of_keys_sum)
    row_max = jnp.maximum(of_keys_max, sink)
    of_keys = of_keys_sum * jnp.exp(of_keys_max - row_max)
    row_sum = of_keys + jnp.exp(sink - row_max)
    weight = jnp.swapaxes(of_keys / row_sum, 1, 2)[..., None]  # of all keys together
    return (out * weight).astype(out.dtype), row_max, row_sum


def d_sinks(
    results: Results, sinks: Float[Array, " N"] | None, d_out: Float[Array, "B T N V"]
) -> Float[Array, " N"] | None:
    """The gradient of the sinks: the weight of a sink times its value, 0, minus the output.

    Args:
      results: of `with_sinks`.
      sinks: the logits; None: there are none.
      d_out: the gradient of the output, zeros at padding.
    """
    if sinks is None:
        return None
    out, row_max, row_sum = results
    weight = jnp.exp(_of_rows(sinks, row_sum) - row_max) / nonzero(row_sum)
    f32 = dict(preferred_element_type=row_sum.dtype)
    dot = jnp.einsum("btnv,btnv->bnt", d_out, out, **f32)
    return -jnp.sum(weight * dot, axis=(0, 2)).astype(sinks.dtype)


def _of_rows(sinks: Float[Array, " N"], row_sum: Float[Array, "B N T"]) -> Float[Array, "1 N 1"]:
    return sinks.astype(row_sum.dtype)[None, :, None]


@options
class LearnedSinks(Options):
    """The option `learned_sinks` of an op: its first base class. Weights: `sinks [N]`."""

    learned_sinks: bool = False

    def _init(self, rng, dims) -> Any:
        """The logits of the sinks, 0 at first: as one more key that is orthogonal to queries."""
        return {"sinks": jnp.zeros(dims.n_heads)} if self.learned_sinks else ()

    def _step(self, call, params, q, k, v, cache):
        return super()._step(self._with_sinks(call, params, q.shape[2]), params, q, k, v, cache)

    def _read_on(self, call, params, q, k, v, cache):
        return super()._read_on(self._with_sinks(call, params, q.shape[2]), params, q, k, v, cache)

    def _with_sinks(self, call: Call, params, n_heads: int) -> Call:
        """The call with the sinks of the heads that its arrays have."""
        if not self.learned_sinks:
            return call
        return call.but(sinks=of_heads(params["sinks"], call.shard, n_heads))

"""Learned sinks: each head's softmax has one more term in its denominator, `exp(sink)`.

`sink` is a learnt logit of the head, so that a head may give less than all of its weight to keys
(OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sec. 2.2). It is as if each query saw one
more key with this logit and the value 0. The first tokens of a sequence, which softmax uses so
otherwise (`ops.sinks`), are no longer needed for it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from reformax.ops.calls.call import Call
from reformax.ops.sharding.shard import of_heads


class LearnedSinks:
    """The option `learned_sinks` of an op: its first base class. Weights: `sinks [N]`."""

    learned_sinks: bool = False

    def _init(self, rng, dims) -> Any:
        """The logits of the sinks, 0 at first: as one more key that is orthogonal to queries."""
        del rng
        return {"sinks": jnp.zeros(dims.n_heads)} if self.learned_sinks else ()

    def _step(self, call, params, q, k, v, cache):
        return super()._step(self._with_sinks(call, params, q.shape[2]), params, q, k, v, cache)

    def _with_sinks(self, call: Call, params, n_heads: int) -> Call:
        """The call with the sinks of the heads that its arrays have."""
        if not self.learned_sinks:
            return call
        return call.but(sinks=of_heads(params["sinks"], call.shard, n_heads))

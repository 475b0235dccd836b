"""Kimi Delta Attention: the gated delta rule with a decay for each feature of the keys.

Zhang et al. 2025 (Kimi Team, "Kimi Linear", arXiv 2510.26692, eq. 1 and sec. 4):

    S_t = (1 - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T,    out_t = S_t^T q_t / sqrt(H)

with queries and keys of length 1, `b_t = sigmoid(beta_t)` and `a_t = exp(-rate softplus(forget_t +
bias))`, a number for each feature. `gated_delta` has one for each head. The output of each head is
normalised, and multiplied by the sigmoid of its gate. `forget` and the gate are projected through
the size of a head. With `conv_size=4` queries, keys and values are convolved first, as there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Projection
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.op_functions import GatedRecurrence, Span, decay_params
from reformax.ops.recurrence.short_convolution import conv_params


@options
class kda(GatedRecurrence, AttentionOp):
    """Kimi Delta Attention.

    Extra projections: `beta [N, 1]`, `forget [N, H]`; with `gated` also `output_gate [N, V]`.
    Weights: `rate [N]`, as its logarithm, `bias [N, H]`; with `normalized` also `scale [N, V]`.

    Args:
      normalized: whether each head's output is brought to unit root mean square, and scaled.
      gated: whether the output is multiplied by the sigmoid of a projection of the layer's input.
      low_rank: whether layers project `forget` and the output's gate through the size of a head, as
        in the paper; or else by one whole matrix each.
      memory: the positions in which a feature decays to 1 / e when training begins and `forget` is
        0. None draws each feature's as Mamba 2 does, as in `gated_delta`.
      conv_size, chunk_len, impl: as in `linear.linear`.

    Raises:
      ValueError: chunk_len below 1, an unknown `impl`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do, such as float32 heads above 64.
    """

    low_rank: bool = True
    memory: Span | None = None
    _unit_length = True
    _gate_activation = staticmethod(jax.nn.sigmoid)

    def extra_projections(self, dims) -> dict[str, Projection]:
        ranks = (dims.d_qk, dims.d_v) if self.low_rank else (None, None)
        forget = Projection(dims.n_heads, dims.d_qk, rank=ranks[0])
        rates = {"beta": Projection(dims.n_heads, 1), "forget": forget}
        return rates | self._output_gate(dims, ranks[1])

    def _init(self, rng, dims) -> dict[str, Array]:
        decays = decay_params(rng, self.memory, dims.n_heads, dims.d_qk)
        conv = conv_params(self.conv_size, jax.random.fold_in(rng, 2), dims)
        return decays | self._output_scale(dims) | conv

    def _inputs(self, params, q, k, v, extra_projections) -> RecurrenceInputs:
        dtype, forget = accum_dtype(q.dtype), extra_projections["forget"]

        @jax.checkpoint  # keeps `forget` in its dtype
        def log_decay(forget, rate, bias):
            logits = forget.astype(dtype) + bias.astype(dtype)[None, None]
            return -jnp.exp(rate.astype(dtype))[None, None, :, None] * jax.nn.softplus(logits)

        beta = jax.nn.sigmoid(extra_projections["beta"].astype(dtype))
        decays = log_decay(forget, params["rate"], params["bias"])
        return RecurrenceInputs(q, k, v, decays, beta)

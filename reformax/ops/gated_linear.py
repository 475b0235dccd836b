"""Gated linear attention: the state decays by feature, at rates that depend on the input.

Yang et al. 2023 ("Gated Linear Attention Transformers", eq. 3-4 and sec. 4.4):
`S_t = diag(a_t) S_{t-1} + k_t v_t^T`, `out_t = S_t^T q_t / sqrt(H)`, with
`a_t = sigmoid(gate_t + b)^(1/16)`. The output of each head is normalised and gated. The paper
projects `gate` through 16 numbers (sec. 4.4), which is `gate_rank=16`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax.declared import Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Projection
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.op_functions import GatedRecurrence, Span
from reformax.ops.recurrence.short_convolution import conv_params
from reformax.ops.recurrence.unit_length import scaled


@options
class gated_linear(GatedRecurrence, AttentionOp):
    """Linear attention with a decay for each feature of the keys.

    Extra projections: `gate [N, H]`; with `gated` also `output_gate [N, V]`. Weights: `bias [N,
    H]`; with `normalized` also `scale [N, V]`.

    Args:
      normalized: whether each head's output is brought to unit root mean square, and scaled.
      gated: whether the output is multiplied by silu of a projection of the layer's input. The
        gate begins near 0 with random signs, so a shallow model learns slowly
        what to copy (docs/zoo_measured.md).
      gate_rank: the rank of the matrix that layers make `gate` by, a product of two thin ones; 16
        in the paper. None: one whole matrix.
      temperature: the root that is taken of the gates; a larger one slows the decay.
      memory: the positions in which a feature decays to 1 / e when training begins and `gate` is 0.
        None is the paper's bias of 0: `temperature / log(2)`, 23 positions.
      conv_size, chunk_len, impl: as in `linear.linear`.

    Raises:
      ValueError: a setting out of range, an unknown `impl`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do.
    """

    gate_rank: Size | None = None
    temperature: Span = 16.0
    memory: Span | None = None

    def _init(self, rng, dims) -> dict[str, Array]:
        lost = math.log(2) if self.memory is None else self.temperature / self.memory
        bias = -(lost + math.log(-math.expm1(-lost)))  # log_sigmoid(bias) = -lost
        weights = {"bias": jnp.full((dims.n_heads, dims.d_qk), bias, float)}
        conv = conv_params(self.conv_size, rng, dims)
        return weights | self._output_scale(dims) | conv

    def extra_projections(self, dims) -> dict[str, Projection]:
        gate = {"gate": Projection(dims.n_heads, dims.d_qk, rank=self.gate_rank)}
        return gate | self._output_gate(dims)

    def _inputs(self, params, q, k, v, extra_projections) -> RecurrenceInputs:
        dtype, gate = accum_dtype(q.dtype), extra_projections["gate"]

        @jax.checkpoint  # keeps the gates in their dtype
        def log_decay(gate, bias):
            logits = gate.astype(dtype) + bias.astype(dtype)[None, None]
            return jax.nn.log_sigmoid(logits) / self.temperature

        return RecurrenceInputs(scaled(q), k, v, log_decay(gate, params["bias"]), None)

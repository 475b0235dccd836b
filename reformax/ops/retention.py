"""Retention: linear attention whose state decays at a fixed rate for each head.

Sun et al. 2023 ("Retentive Network", eq. 5-8): `S_t = g S_{t-1} + k_t v_t^T` and
`out_t = S_t^T q_t / sqrt(H)`, with `g = 1 - 2^(-5 - h)` for head h. The output of each head is
normalised, and gated by a projection of the layer's input. The paper uses rotary positions (eq. 3).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Projection
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.op_functions import GatedRecurrence
from reformax.ops.recurrence.short_convolution import conv_params
from reformax.ops.recurrence.unit_length import scaled


@options
class retention(GatedRecurrence, AttentionOp):
    """Linear attention with decay. The first head halves its state every 22 positions.

    Each further head takes twice as long. Extra projections: with `gated`, `output_gate [N, V]`.
    Weights: with `normalized`, `scale [N, V]`.

    Args:
      normalized: whether each head's output is brought to unit root mean square, and scaled.
      gated: whether the output is multiplied by silu of a projection of the layer's input. The
        gate begins near 0 with random signs, so a shallow model learns slowly
        what to copy (docs/zoo_measured.md).
      conv_size, chunk_len, impl: as in `linear.linear`.

    Raises:
      ValueError: chunk_len below 1, an unknown `impl`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do.
    """

    def _init(self, rng, dims) -> Any:
        return self._output_scale(dims) | conv_params(self.conv_size, rng, dims) or ()

    def extra_projections(self, dims) -> dict[str, Projection]:
        return self._output_gate(dims)

    def _constants(self, n_heads: int) -> dict[str, Float[np.ndarray, " N"]]:
        """The log decay of each head, from one position to the next."""
        return {"rates": np.log1p(-(2.0 ** (-5.0 - np.arange(n_heads))))}

    def _inputs(self, params, q, k, v, extra_projections) -> RecurrenceInputs:
        log_decay = jnp.asarray(params["rates"], accum_dtype(q.dtype))[None, None, :, None]
        log_decay = jnp.broadcast_to(log_decay, (*q.shape[:3], 1))
        return RecurrenceInputs(scaled(q), k, v, log_decay, None)

"""The gated delta rule: a state that decays, and replaces the value stored for a key.

Yang et al. 2024 ("Gated Delta Networks", eq. 10):

    S_t = a_t (1 - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,    out_t = S_t^T q_t / sqrt(H)

with queries and keys of length 1, `b_t = sigmoid(beta_t)` and `a_t = sigmoid(keep_t - bias)^rate`,
which is Mamba 2's `exp(-rate softplus(bias - keep_t))`. The output of each head is normalised. The
paper gates it too, which is `gated=True`. With `conv_size=4` queries, keys and values are convolved
first, as in the paper (sec. 3.4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax.declared import NonNegative, SettingError
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Projection
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.op_functions import (
    NORM_EPSILON,
    GatedRecurrence,
    Span,
    decay_params,
)
from reformax.ops.recurrence.short_convolution import conv_params


@options
class gated_delta(GatedRecurrence, AttentionOp):
    """Gated DeltaNet's attention.

    Extra projections: `beta [N, 1]`, `keep [N, 1]`; with `gated` also `output_gate [N, V]`.
    Weights: `rate [N]`, as its logarithm, `bias [N]`; with `normalized` also `scale [N, V]`.

    Args:
      normalized: whether each head's output is brought to unit root mean square, and scaled.
      norm_epsilon: added to the mean square in it.
      gated: whether the output is multiplied by silu of a projection of the layer's input, as in
        the paper. The gate begins near 0 with random signs, so a model learns slowly what to copy.
      negative_eigenvalues: whether `b_t` is twice the sigmoid, so that a step may turn the sign of
        what the state holds for a key (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs
        Through Negative Eigenvalues", sec. 4).
      memory: the positions in which a head decays to 1 / e when training begins and `keep` is 0.
        None draws each head's as Mamba 2 does, from 0.6 to 1,000 and half of them below 14. With
        few heads all of them may be short, and then nothing farther away is learnt.
      conv_size, chunk_len, impl: as in `linear.linear`.

    Raises:
      ValueError: chunk_len below 1, an unknown `impl`, `norm_epsilon` without `normalized`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do.
    """

    norm_epsilon: NonNegative = NORM_EPSILON
    gated: bool = False
    negative_eigenvalues: bool = False
    memory: Span | None = None
    _unit_length = True

    def _check(self) -> None:
        if not self.normalized and self.norm_epsilon != NORM_EPSILON:
            raise SettingError(
                f"norm_epsilon is {self.norm_epsilon} and normalized is False: leave one out"
            )

    def extra_projections(self, dims) -> dict[str, Projection]:
        one = Projection(dims.n_heads, 1)
        return {"beta": one, "keep": one} | self._output_gate(dims)

    def _init(self, rng, dims) -> dict[str, Array]:
        decays = decay_params(rng, self.memory, dims.n_heads)
        conv = conv_params(self.conv_size, jax.random.fold_in(rng, 2), dims)
        return decays | self._output_scale(dims) | conv

    def _inputs(self, params, q, k, v, extra_projections) -> RecurrenceInputs:
        dtype = accum_dtype(q.dtype)
        rate, bias = (params[name].astype(dtype)[None, None, :, None] for name in ("rate", "bias"))
        log_decay = jnp.exp(rate) * jax.nn.log_sigmoid(
            extra_projections["keep"].astype(dtype) - bias
        )
        beta = jax.nn.sigmoid(extra_projections["beta"].astype(dtype))
        beta = 2 * beta if self.negative_eigenvalues else beta
        return RecurrenceInputs(q, k, v, log_decay, beta)

"""Linear attention: weights are products of features, so that sums over keys serve all queries.

Katharopoulos et al. 2020 ("Transformers are RNNs", eq. 5-12): in place of `exp(q . k)` the weight
is `phi(q) . phi(k)` with `phi(x) = elu(x) + 1`. Then

    out_i = phi(q_i) . sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j),

where the sums are over all j, or in causal attention over j up to i, by a recurrence. Time and
memory are O(T).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, options
from reformax.ops.masking.padding import tokens_only
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.means import mean_of_all, quotient, with_ones
from reformax.ops.recurrence.op_functions import Recurrence
from reformax.ops.recurrence.recurrence import bidirectional
from reformax.ops.recurrence.short_convolution import conv_params


@options
class linear(Recurrence, AttentionOp):
    """Attention with the weights `(elu(q) + 1) . (elu(k) + 1)`, divided by their sum.

    A row whose weights sum up to less than 1e-18 is zeros.

    Args:
      conv_size: if set, queries, keys and values are convolved over this many positions first
        (`recurrence.short_convolution`); the papers have 4.
      chunk_len: positions whose products are computed at once, rounded up to a power of two. It
        changes no number but by rounding.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later, with
        chunks of 64. `"auto"` takes them where they can compute the call. Attention that is not
        causal has no recurrence: its sums are products of matrices, whatever `impl` is. A call with
        a state has one more column of values, so values of 128 take array operations there.

    Raises:
      ValueError: chunk_len below 1, an unknown `impl`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do.
    """

    _means = True

    @property
    def causality(self) -> str:
        return "either" if self.conv_size is None else "only"

    def _init(self, rng, dims) -> Any:
        return () if self.conv_size is None else conv_params(self.conv_size, rng, dims)

    def _apply(self, call, params, q, k, v, plan):
        if call.causal:
            return super()._apply(call, params, q, k, v, plan)
        x, _, ids = self._read_tokens(call, params, q, k, v)
        if ids is None:
            out = mean_of_all(*x[:3])
            return out if call.segment_ids is None else tokens_only(out, call.segment_ids)
        options = dict(segment_ids=ids, chunk_len=self.chunk_len)
        out = quotient(bidirectional(x.q, x.k, with_ones(x.v), **options)).astype(v.dtype)
        return tokens_only(out, call.segment_ids)

    def _inputs(self, params, q, k, v, extra_projections=None) -> RecurrenceInputs:
        return RecurrenceInputs(_features(q), _features(k), v, None, None)


def _features(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`elu(x) + 1`, computed as `exp(x)` below 0, where adding 1 would round small numbers away."""
    y = x.astype(accum_dtype(x.dtype))
    return jnp.where(y > 0, y + 1, jnp.exp(jnp.minimum(y, 0))).astype(x.dtype)

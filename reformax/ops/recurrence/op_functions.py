"""The functions of an op that is a linear recurrence with other inputs and another output."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from reformax.declared import Bounds, Size, Width
from reformax.ops.calls.dims import Dims, Projection
from reformax.ops.calls.dispatch import KERNELS
from reformax.ops.calls.heads import repeat_to_values
from reformax.ops.calls.options import Options, options
from reformax.ops.masking.contiguous import restore_order, tokens_first
from reformax.ops.masking.masks import tokens_before
from reformax.ops.masking.padding import tokens_only
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.means import mean, quotient, with_ones
from reformax.ops.recurrence.recurrence import advance, recurrence, recurrence_from, state_after
from reformax.ops.recurrence.short_convolution import (
    Projected,
    convolve,
    convolve_from,
    convolve_next,
    last_inputs,
    zero_inputs,
)
from reformax.ops.recurrence.unit_length import of_unit_length
from reformax.ops.sharding.shard import all_heads, of_heads

NORM_EPSILON = 1e-5
# Bounds within which float32 holds quotients of spans, and the bias that is made of them.
Span = Annotated[float, Bounds(1e-6, 1e12, name="a number from 1e-6 to 1e12")]


class RecurrenceCache(NamedTuple):
    """The cache of decoding, of constant size."""

    state: Float[Array, "B N H V"]
    last: Projected | None  # the last inputs of short convolutions


@options
class Recurrence(Options):
    """The functions and options of a linear recurrence: a second base class of the op.

    The op defines `_inputs`. Where its weights have `conv_params`, queries, keys and values are
    convolved first. The first axis of weights and constants is heads. The options are documented in
    `linear.linear`.
    """

    conv_size: Width | None = None
    chunk_len: Size = 64
    impl: str = "auto"

    causality = "only"
    _impls = KERNELS
    dropout = False
    shards = ("heads",)
    _repeats_qk = True
    _hides_padding = True
    _takes_lengths = True
    _means = False  # whether it computes means of values (`recurrence.means`), without `_output`
    _unit_length = False  # whether queries and keys of `_inputs` are to have unit length

    def _inputs(self, params, q, k, v, extra_projections) -> RecurrenceInputs:
        """The inputs of the recurrence; with `_unit_length`, before queries and keys have it."""
        raise NotImplementedError

    def _output(self, params, out: Float[Array, "B T N V"], extra_projections) -> Array:
        """The op's output, of the recurrence's in float32."""
        raise NotImplementedError

    def _read(self, params, x: Projected, gates) -> RecurrenceInputs:
        """`_inputs` of queries and keys for each head of values, before they have unit length."""
        q, k = (repeat_to_values(y, x.v) for y in x[:2])
        return self._inputs(params, q, k, x.v, gates)

    def _read_units(self, params, x: Projected, gates) -> RecurrenceInputs:
        """The inputs of the recurrence."""
        x = self._read(params, x, gates)
        return of_unit_length(x) if self._unit_length else x

    def _constants(self, n_heads: int) -> dict[str, Array]:
        """Arrays `[N, ...]` for `_inputs`, along with the weights."""
        return {}

    def _of_these_heads(self, params, n_heads: int, shard=None) -> dict[str, Array]:
        """The weights and constants of the heads that the arrays have."""
        whole = dict(params) | self._constants(all_heads(shard, n_heads))
        if shard is None:
            return whole
        return {name: of_heads(x, shard, n_heads) for name, x in whole.items()}

    def _apply(self, call, params, q, k, v, plan):
        params, dtype = self._of_these_heads(params, v.shape[2], call.shard), v.dtype
        x, gates, ids = self._read_tokens(call, params, q, k, v)
        options = dict(segment_ids=ids, chunk_len=self.chunk_len, impl=self.impl)
        if self._means:
            out = mean(*x[:4], **options)
        else:
            out = recurrence(*x, unit_length=self._unit_length, **options)
            out = self._output(params, out, gates).astype(dtype)
        return out if call.segment_ids is None else tokens_only(out, call.segment_ids)

    def _read_tokens(self, call, params, q, k, v):
        """`_read` of tokens alone, the gates, and the segment ids that the recurrence needs.

        A row of one segment needs no ids. Padding within it has keys of zeros, which write nothing,
        and forgets nothing. No token of a causal call reads the padding behind it.
        """
        ids, gates = call.segment_ids, call.extra_projections
        if ids is None or call.lengths is not None:
            x = self._read(params, convolve(params, q, k, v), gates)
            if ids is not None and not call.causal:
                x = x._replace(k=tokens_only(x.k, ids))
            return x, gates, None
        q, k, v = (tokens_only(x, ids) for x in (q, k, v))
        gates = jax.tree.map(lambda x: tokens_only(x, ids), gates)
        x = self._read(params, convolve(params, q, k, v, ids), gates)
        if not call.one_segment:
            return x, gates, ids
        written = x.k, x.log_decay, x.beta
        k, log_decay, beta = jax.tree.map(lambda x: tokens_only(x, ids), written)
        return x._replace(k=k, log_decay=log_decay, beta=beta), gates, None

    # The state before and after a part of a sequence; decoding goes on from it too.

    def first_state(self, batch: int, dims: Dims, dtype: Any = jnp.float32) -> RecurrenceCache:
        params = jax.eval_shape(lambda: self.init(jax.random.key(0), dims))
        sizes = dims.n_heads, dims.d_qk, dims.d_v + self._means
        state = jnp.zeros((batch, *sizes), accum_dtype(jnp.dtype(dtype)))
        return RecurrenceCache(state, zero_inputs(dict(params), batch, dtype))

    def _apply_from(self, call, params, q, k, v, state: RecurrenceCache):
        params, shape = self._of_these_heads(params, v.shape[2], call.shard), q.shape[:2]
        arrays = Projected(q, k, v), call.extra_projections
        order, (arrays, gates), ids, lengths = tokens_first(arrays, call.segment_ids, shape)
        convolved, last = convolve_from(params, arrays, state.last, ids, lengths)
        x = self._read_units(params, convolved, gates)
        x = x._replace(v=with_ones(x.v)) if self._means else x
        if ids is not None:  # padding writes nothing, and nothing is forgotten at it
            real = tokens_before(lengths, shape[1])[..., None, None]
            x = jax.tree.map(lambda a: jnp.where(real, a, 0), x)
        options = dict(segment_ids=ids, chunk_len=self.chunk_len, impl=self.impl)
        out, after = recurrence_from(x, state.state, **options)
        out = quotient(out) if self._means else self._output(params, out, gates)
        return restore_order(out.astype(v.dtype), order), RecurrenceCache(after, last)

    def _init_cache(self, call, params, q, k, v, plan) -> RecurrenceCache:
        params, lengths = self._of_these_heads(params, v.shape[2]), call.lengths
        x = self._read_units(params, convolve(params, q, k, v), call.extra_projections)
        last = last_inputs(params, Projected(q, k, v), lengths)
        x = x._replace(v=with_ones(x.v)) if self._means else x
        return RecurrenceCache(state_after(x, lengths, chunk_len=self.chunk_len), last)

    def _step(self, call, params, q, k, v, cache):
        params, gates = self._of_these_heads(params, v.shape[2]), call.extra_projections
        new, last = convolve_next(params, Projected(q, k, v), cache.last)
        x = self._read_units(params, new, gates)
        if self._means:
            out, state = advance(cache.state, *x._replace(v=with_ones(x.v)))
            return quotient(out).astype(v.dtype), RecurrenceCache(state, last)
        out, state = advance(cache.state, *x)
        out = self._output(params, out, gates)
        return out.astype(v.dtype), RecurrenceCache(state, last)


@options
class GatedRecurrence(Recurrence):
    """A recurrence with an output that is normalised, scaled by channel and gated, all by options.

    Each head's output is brought to unit root mean square (Sun et al. 2023, eq. 8). DeltaNet has no
    gate (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule").
    """

    normalized: bool = True
    gated: bool = True

    norm_epsilon = NORM_EPSILON  # an option of `gated_delta`
    _gate_activation = staticmethod(jax.nn.silu)

    def _output_gate(self, dims: Dims, rank: int | None = None) -> dict[str, Projection]:
        """The projection of the gate."""
        return {"output_gate": Projection(dims.n_heads, dims.d_v, rank=rank)} if self.gated else {}

    def _output_scale(self, dims: Dims) -> dict[str, Array]:
        """The scale of the normalised output."""
        return {"scale": jnp.ones((dims.n_heads, dims.d_v))} if self.normalized else {}

    def _output(self, params, out, extra_projections):
        if self.normalized:
            out = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + self.norm_epsilon)
            out = out * params["scale"].astype(out.dtype)[None, None]
        if self.gated:
            out = out * self._gate_activation(extra_projections["output_gate"].astype(out.dtype))
        return out


# Decays `exp(-rate softplus(bias + x))`, as in Mamba 2 (Dao and Gu 2024).


def decay_params(rng, memory: float | None, n_heads: int, *size: int) -> dict[str, Array]:
    """`rate [N]` as its logarithm, from 1 to 16, and `bias [N, *size]` for steps of 0.001 to 0.1.

    With `memory` the step is `1 / (memory * rate)`: a head decays by `1 / memory` a position.
    """
    rate_rng, step_rng = jax.random.split(rng)
    rate = jax.random.uniform(rate_rng, (n_heads,), minval=1.0, maxval=16.0)
    least, most = math.log(1e-3), math.log(0.1)
    shape = (n_heads, *size)
    step = jnp.exp(jax.random.uniform(step_rng, shape, minval=least, maxval=most))
    if memory is not None:
        step = jnp.broadcast_to(1 / (memory * rate[(..., *[None] * len(size))]), shape)
    bias = step + jnp.log(-jnp.expm1(-step))  # softplus(bias) = step, where x is 0
    return {"rate": jnp.log(rate), "bias": bias}

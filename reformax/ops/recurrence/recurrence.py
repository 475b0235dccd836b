"""Linear recurrences over a sequence, and their gradient.

Keys and values write into a state `S [H, V]` of constant size, and queries read it:

    S_t = a_t S_{t-1} + k_t v_t^T,                          out_t = S_t^T q_t
    S_t = a_t (1 - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T   with the delta rule

The first is linear attention (Katharopoulos et al. 2020, eq. 18-20). With a decay a for each head
it is retention (Sun et al. 2023, eq. 6), and with a decay for each feature of the keys gated linear
attention (Yang et al. 2023, eq. 4). The second replaces the value that the state holds for a key
(Yang et al. 2024, "Gated Delta Networks", eq. 10).

`recurrence.chunks` computes both, a chunk of positions at a time, and so does
`kernels.triton.recurrence` on NVIDIA GPUs. The gradient computes the states again. Between the
passes the inputs are kept. Kernels also keep the states before groups of chunks, less than 30 MB
with heads up to 128, and the inverses of the delta rule's triangular systems, 64 numbers a position
and head in the dtype of products. With `unit_length` they keep the outputs, and queries and keys
after they are normalised, not before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import KERNEL_REFUSAL, CustomDerivatives, tangent_of
from reformax.devices import varying_as
from reformax.ops.calls import dispatch, obstacles, this_gpu
from reformax.ops.masking.contiguous import (
    contiguous_segments,
    order_of_segments,
    reorder,
    restore_order,
)
from reformax.ops.masking.masks import tokens_before
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.precision import accum_dtype, product
from reformax.ops.recurrence import chunks
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.unit_length import of_unit_length, with_factors


def recurrence(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    log_decay: Float[Array, "B T N _"] | None = None,
    beta: Float[Array, "B T N 1"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    unit_length: bool = False,
    chunk_len: int = 64,
    impl: str = "auto",
) -> Float[Array, "B T N V"]:
    """The outputs of a causal linear recurrence, whose state is zeros at the start of each segment.

    Products are computed in the widest dtype of q, k and v. The state and all sums are float32.

    Args:
      q: queries, scaled.
      k: keys.
      v: values.
      log_decay: log a_t, at most 0, `[B, T, N, 1]` or for each feature of the keys `[B, T, N, H]`;
        None is 0.
      beta: b_t of the delta rule; None: no delta rule.
      segment_ids: ids; positions of one id are a sequence, contiguous or not.
      unit_length: whether queries and keys are first divided by their lengths, in the dtype of v,
        and queries then by the square root of their size.
      chunk_len: positions whose products are computed at once, rounded up to a power of two. It
        changes results by rounding only.
      impl: `"xla"` runs everywhere. `"pallas"` is kernels for NVIDIA GPUs of Ampere or later, with
        chunks of 64. `"auto"` takes the kernels where they can compute the call.

    Returns:
      The outputs in float32, or float64 for float64 inputs.

    Raises:
      SettingError: an unknown `impl`.
      NotImplementedError: the kernel cannot compute the call.
    """
    dispatch.check_impl(impl, *dispatch.KERNELS)
    x = RecurrenceInputs(q, k, v, log_decay, beta)
    x = varying_as(x, x)
    if unit_length:
        x = x._replace(q=x.q.astype(v.dtype), k=x.k.astype(v.dtype))
    impl = dispatch.choose_impl(impl, pallas=_obstacles(x))
    if unit_length and impl == "xla":
        x, unit_length = of_unit_length(x), False
    size = chunks.chunk_size(chunk_len, q.shape[1])
    out, _ = _recurrence(size, impl, unit_length, x, None, segment_ids)
    return out.astype(accum_dtype(out.dtype))


def recurrence_from(
    inputs: RecurrenceInputs,
    initial: Float[Array, "B N H V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_len: int = 64,
    impl: str = "auto",
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
    """`recurrence` whose first segment begins with the state `initial`, and the last one's state.

    Both have gradients. Arguments are as in `recurrence`, but that the positions of a segment are
    contiguous, and padding has zeros for inputs and the id of the segment before it.

    Raises:
      NotImplementedError: the kernel cannot compute the call.
    """
    dispatch.check_impl(impl, *dispatch.KERNELS)
    inputs, initial = varying_as((inputs, initial), (inputs, initial))
    impl = dispatch.choose_impl(impl, pallas=_obstacles(inputs))
    size = chunks.chunk_size(chunk_len, inputs.q.shape[1])
    out, final = _recurrence(size, impl, False, inputs, initial, segment_ids)
    return out.astype(accum_dtype(out.dtype)), final


def _obstacles(x: RecurrenceInputs) -> obstacles.KernelObstacles:
    by_feature = x.log_decay is not None and x.log_decay.shape[-1] > 1
    # The delta rule's programs hold whole rows of keys. Wide rows of float32 need a large chip.
    if x.q.dtype == jnp.float32:
        wide = x.beta is None and this_gpu.shared_kib() >= this_gpu.LARGE_CHIP
    else:
        wide = x.beta is None or not by_feature
    return obstacles.kernel_obstacles(
        *x[:3],
        most=obstacles.MAX_HEAD_SIZE if wide else obstacles.NARROW_HEAD,
        small_row=obstacles.SMALL_ROW // 2 if by_feature else obstacles.SMALL_ROW,
    )


def bidirectional(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_len: int = 64,
) -> Float[Array, "B T N V"]:
    """`q_t . sum_s k_s v_s^T` over all positions s of the segment of t, earlier and later ones.

    Arguments and dtypes are as in `recurrence`.
    """
    if segment_ids is None:
        dtype = jnp.result_type(q, k, v)
        state = product("bsnh,bsnv->bnhv", k, v, dtype)
        return product("btnh,bnhv->btnv", q, state, dtype)
    order, qkv, ids = contiguous_segments((q, k, v), segment_ids)
    return restore_order(_of_segment(chunks.chunk_size(chunk_len, q.shape[1]), qkv, ids), order)


@functools.partial(CustomDerivatives, n_static=1)
def _of_segment(size: int, qkv: tuple[Array, Array, Array], ids: Int[Array, "B T"]) -> Array:
    """`bidirectional` for contiguous segments."""
    return _sums_of_segment(size, qkv, ids)


def _sums_of_segment(size: int, qkv, ids) -> Array:
    """`_of_segment`, without its gradient.

    A chunk reads a state of earlier chunks, for rows of its first segment, and one of later chunks,
    for rows of its last segment.
    """
    x = chunks.chunked(RecurrenceInputs(*qkv, None, None), ids, size)
    same = x.so_far | jnp.swapaxes(x.so_far, -1, -2)
    pairs = jnp.where(same, x.product("ih,jh->ij", x.q, x.k), 0)
    to_next, to_last = (
        x.product("lh,lv->hv", jnp.where(rows, x.k, 0), x.v) for rows in (x.new, x.old)
    )
    before = chunks.prefix(x.kept(), to_next)
    behind = chunks.prefix(x.kept()[::-1], to_last[::-1])[::-1]
    out = x.product("ij,jv->iv", pairs, x.v)
    out = out + jnp.where(x.old, x.product("ih,hv->iv", x.q, before), 0)
    out = out + jnp.where(x.new, x.product("ih,hv->iv", x.q, behind), 0)
    return chunks.joined(out, qkv[0].shape[1])


def _of_segment_backward(size: int, results, d_out):
    """`_of_segment` is linear in q, k and v: each gradient is the same function of others."""
    ((q, k, v), ids), d = first_order((results, d_out))
    d = d.astype(jnp.result_type(q, k, v))
    each = (d, v, k), (v, d, q), (k, q, d)
    gradients = (_sums_of_segment(size, x, ids) for x in each)
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), None


_of_segment.define(
    lambda size, qkv, ids: (_of_segment(size, qkv, ids), (qkv, ids)),
    _of_segment_backward,
    lambda size, primals, tangents: tangent_of(
        functools.partial(_sums_of_segment, size), primals, tangents
    ),
)


@functools.partial(CustomDerivatives, n_static=3)
def _recurrence(
    size: int,
    impl: str,
    unit_length: bool,
    inputs: RecurrenceInputs,
    initial: Float[Array, "B N H V"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"] | None]:
    """The outputs of both functions above, and with the state `initial` the last one.

    Kernels write outputs in the dtype of products, and have `unit_length`.
    """
    order, ids = _order(initial, segment_ids)
    if impl != "xla":
        from reformax.ops.kernels.triton import recurrence as kernel

        inputs = with_factors(inputs)[0] if unit_length else inputs
        interpret = impl == dispatch.INTERPRETED
        return kernel.forward(inputs, ids, order, initial, interpret=interpret)[0]
    x = _chunked(size, inputs, initial, order, ids)
    out = restore_order(chunks.joined(chunks.outputs(x), inputs.q.shape[1]), order)
    return out, initial if initial is None else chunks.final_state(x, *chunks.states_and_values(x))


def _order(initial: Array | None, segment_ids) -> tuple[Array | None, Array | None]:
    """The order that makes each segment contiguous, as those of a row with a state are; its ids."""
    return order_of_segments(segment_ids) if initial is None else (None, segment_ids)


def _chunked(size: int, inputs: RecurrenceInputs, initial, order, ids) -> chunks.RecurrenceChunks:
    inputs = jax.tree.map(lambda x: reorder(x, order), inputs)
    return chunks.chunked(inputs, ids, size, initial)


def _forward(size: int, impl: str, unit_length: bool, inputs, initial, segment_ids):
    given, begins = first_order((inputs, initial))
    if impl == "xla":
        results = _recurrence.function(size, "xla", False, given, begins, segment_ids)
        return results, (inputs, initial, segment_ids, None, None)
    from reformax.ops.kernels.triton import recurrence as kernel

    order, ids = _order(initial, segment_ids)
    units = None
    if unit_length:  # the queries and keys before are not kept
        given, units = with_factors(given)
        inputs = inputs._replace(q=given.q, k=given.k)
    options = dict(keep=True, interpret=impl == dispatch.INTERPRETED)
    results, of_kernels = kernel.forward(given, ids, order, begins, **options)
    units = units and units._replace(out=results[0])
    return results, (inputs, initial, segment_ids, of_kernels, units)


def _backward(size: int, impl: str, unit_length: bool, residuals, d_results):
    residuals, (d_out, d_final) = first_order((residuals, d_results))
    # Without the barrier the compiler would keep intermediate arrays of the forward pass.
    inputs, initial, segment_ids, of_kernels, units = lax.optimization_barrier(residuals)
    order, ids = _order(initial, segment_ids)
    if impl != "xla":
        from reformax.ops.kernels.triton import recurrence as kernel

        given = inputs, ids, of_kernels, d_out, order, units, initial, d_final
        gradients = kernel.backward(*given, interpret=impl == dispatch.INTERPRETED)
    else:
        x = _chunked(size, inputs, initial, order, ids)
        d_inputs, d_initial = chunks.gradients(x, chunks.cut(reorder(d_out, order), size), d_final)
        d_inputs = jax.tree.map(
            lambda g: restore_order(chunks.joined(g, d_out.shape[1]), order), d_inputs
        )
        gradients = d_inputs, initial if initial is None else d_initial
    return *jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, (inputs, initial)), None


def _tangent(size: int, impl: str, unit_length: bool, residuals, tangents):
    if impl != "xla":
        raise NotImplementedError(KERNEL_REFUSAL)
    function = functools.partial(_recurrence.function, size, "xla", unit_length)
    return tangent_of(function, residuals[:3], tangents)


_recurrence.define(_forward, _backward, _tangent)


# Decoding.


def state_after(inputs: RecurrenceInputs, lengths: Int[Array, " B"], *, chunk_len: int) -> Array:
    """The state `[B, N, H, V]` after the first `lengths` positions of each row."""
    real = tokens_before(lengths, inputs.q.shape[1])[..., None, None]
    inputs = jax.tree.map(lambda x: jnp.where(real, x, 0), inputs)
    x = chunks.chunked(inputs, None, chunks.chunk_size(chunk_len, inputs.q.shape[1]))
    return chunks.final_state(x, *chunks.states_and_values(x))


def advance(
    state: Float[Array, "B N H V"],
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 N H"],
    v: Float[Array, "B 1 N V"],
    log_decay: Float[Array, "B 1 N _"] | None = None,
    beta: Float[Array, "B 1 N 1"] | None = None,
) -> tuple[Float[Array, "B 1 N V"], Float[Array, "B N H V"]]:
    """One more position: its output and the state after it."""
    dtype = state.dtype
    q, k, v = (x[:, 0].astype(dtype) for x in (q, k, v))
    if log_decay is not None:
        state = state * jnp.exp(log_decay[:, 0, ..., None].astype(dtype))
    if beta is not None:
        v = (v - jnp.einsum("bnh,bnhv->bnv", k, state)) * beta[:, 0].astype(dtype)
    state = state + k[..., None] * v[..., None, :]
    return jnp.einsum("bnh,bnhv->bnv", q, state)[:, None], state

"""`recurrence.recurrence` in array operations: products of matrices for each chunk.

A chunk of L positions reads its own positions by an L x L matrix, and earlier ones by the state at
the chunk's start (Yang et al. 2023, sec. 4.2). The delta rule becomes the first recurrence with
other values u, the solution of a triangular system (Yang et al. 2024, sec. 3.3):

    (1 + M) u = b (v - e^c k S),    M_ij = b_i e^(c_i - c_j) k_i . k_j  for j < i

Only states pass from chunk to chunk. Time is O(T L), and memory O(T). Arrays are
`[C, B, N, L, ...]`, chunks first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax.devices import varying_as
from reformax.ops.masking.visibility import same_segment
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence import decay_products as chunk_products
from reformax.ops.recurrence.decay_products import decayed_products, decayed_products_vjp


class RecurrenceInputs(NamedTuple):
    """The inputs of a recurrence."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N V"]
    log_decay: Float[Array, "B T N _"] | None
    beta: Float[Array, "B T N 1"] | None


# Chunks.


class RecurrenceChunks(NamedTuple):
    """The inputs in chunks, `[C, B, N, L, ...]`, and masks of segments."""

    q: Float[Array, "C B N L H"]
    k: Float[Array, "C B N L H"]
    v: Float[Array, "C B N L V"]
    decay: Float[Array, "C B N L _"] | None  # the cumulative sum of log_decay in the chunk
    beta: Float[Array, "C B N L 1"] | None
    so_far: Bool[Array, "*c L L"]  # whether row j is of row i's segment, and not behind row i
    old: Bool[Array, "*c L 1"]  # whether a row is of the segment of the state before the chunk
    new: Bool[Array, "*c L 1"]  # whether a row is of the segment of the state after it
    initial: Float[Array, "B N H V"] | None = None  # the first chunk's state; None: zeros

    def product(self, spec: str, x: Array, y: Array) -> Array:
        """`einsum` over the last two axes, in the inputs' dtype, summed in float32."""
        dtype = jnp.result_type(self.q, self.k, self.v)
        one, other, result = spec.replace("->", ",").split(",")
        spec = f"...{one},...{other}->...{result}"
        return chunk_products.product(spec, x, y, dtype)

    def pairs(self) -> Float[Array, "C B N L L"]:
        """The weight of each key of a chunk for each of its queries."""
        dtype = jnp.result_type(self.q, self.k)
        return decayed_products(self.q, self.k, self.decay, self.so_far, dtype)

    # Decays between a row and its chunk's start or end; 0 for rows of other segments.

    def from_old(self, x: Float[Array, "C B N L H"]) -> Float[Array, "C B N L H"]:
        """`x` times the decay since the state before the chunk."""
        if self.decay is not None:
            x = _to_accum_dtype(x) * jnp.exp(self.decay)
        return jnp.where(self.old, x, 0)

    def to_new(self, x: Float[Array, "C B N L H"]) -> Float[Array, "C B N L H"]:
        """`x` times the decay until the state after the chunk."""
        if self.decay is not None:
            left = self.decay[..., -1:, :] - self.decay
            x = _to_accum_dtype(x) * jnp.exp(jnp.where(self.new, left, 0))
        return jnp.where(self.new, x, 0)

    def kept(self) -> Float[Array, "C B N _ 1"]:
        """The factor of the state before a chunk in the state after it."""
        whole = jnp.swapaxes(self.old[..., -1:, :], -1, -2)
        if self.decay is None:
            whole = jnp.broadcast_to(whole, (self.q.shape[0], *whole.shape[-4:]))
            return whole.astype(accum_dtype(self.q.dtype, self.k.dtype, self.v.dtype))
        return jnp.where(whole, jnp.swapaxes(jnp.exp(self.decay[..., -1:, :]), -1, -2), 0)


def chunked(
    inputs: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    size: int,
    initial: Float[Array, "B N H V"] | None = None,
) -> RecurrenceChunks:
    """Cuts the inputs into chunks of `size`; `ids` are of contiguous segments.

    The first segment begins with the state `initial`, or zeros.
    """
    dtype = accum_dtype(*(x.dtype for x in inputs[:3]))
    q, k, v = (cut(x, size) for x in inputs[:3])
    log_decay, beta = (None if x is None else cut(x.astype(dtype), size) for x in inputs[3:])
    so_far = jnp.tril(jnp.ones((1, 1, 1, size, size), bool))
    old = new = jnp.ones((1, 1, 1, size, 1), bool)
    if ids is not None:
        padding = -ids.shape[1] % size
        ids = jnp.pad(ids, ((0, 0), (0, padding)), mode="edge")[..., None, None]
        ids = cut(ids, size)
        so_far = so_far & same_segment(ids, jnp.swapaxes(ids, -1, -2))
        new = same_segment(ids, ids[..., -1:, :])
        # The state before the first chunk is of the first segment.
        last = jnp.concatenate([ids[:1, ..., :1, :], ids[:-1, ..., -1:, :]])
        old = same_segment(ids, last)
    decay = None
    if log_decay is not None:
        # The exponential of smaller numbers is 0 too, and their sums would not be exact.
        log_decay = jnp.maximum(log_decay, math.log(jnp.finfo(dtype).smallest_subnormal) - 1)
        sums = so_far.astype(dtype)
        decay = jnp.einsum("...ij,...jh->...ih", sums, log_decay, precision=lax.Precision.HIGHEST)
    return RecurrenceChunks(q, k, v, decay, beta, so_far, old, new, initial)


def chunk_size(chunk_len: int, length: int) -> int:
    """`chunk_len`, or a shorter sequence's length, rounded up to a power of two."""
    return 1 << (min(chunk_len, length) - 1).bit_length()


def cut(x: Float[Array, "B T N H"], size: int) -> Float[Array, "C B N L H"]:
    """Chunks of `size` positions; zeros fill up the last one."""
    n_chunks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, n_chunks * size - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], n_chunks, size, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, 4))


def joined(x: Float[Array, "C B N L H"], length: int) -> Float[Array, "B T N H"]:
    """The inverse of `cut`."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


# Outputs.


def outputs(x: RecurrenceChunks) -> Float[Array, "C B N L V"]:
    """The outputs."""
    states, values = states_and_values(x)
    out = x.product("ij,jv->iv", x.pairs(), values)
    return out + jnp.where(x.old, x.product("ih,hv->iv", x.from_old(x.q), states), 0)


def states_and_values(
    x: RecurrenceChunks,
) -> tuple[Float[Array, "C B N H V"], Float[Array, "C B N L V"]]:
    """The states before each chunk, and the written values."""
    if x.beta is None:
        return prefix(x.kept(), x.product("lh,lv->hv", x.to_new(x.k), x.v), x.initial), x.v
    solved = _solved(x)

    def write(state, chunk):
        kept, keys, reads, values, old = chunk
        values = values - jnp.where(old, x.product("lh,hv->lv", reads, state), 0)
        after = forget(kept, state) + x.product("lh,lv->hv", keys, values)
        return after, (state, values)

    values = x.product("ij,jv->iv", solved.inverse, x.beta * _to_accum_dtype(x.v))
    old = jnp.broadcast_to(x.old, (*values.shape[:2], *x.old.shape[-3:]))
    chunks = x.kept(), x.to_new(x.k), solved.reads, values, old
    if x.initial is None:
        state = jnp.zeros((*x.k.shape[1:3], x.k.shape[-1], x.v.shape[-1]), values.dtype)
    else:
        state = x.initial.astype(values.dtype)
    return lax.scan(write, varying_as(values, state), chunks)[1]


def final_state(
    x: RecurrenceChunks, states: Float[Array, "C B N H V"], values: Float[Array, "C B N L V"]
) -> Float[Array, "B N H V"]:
    """The state after the last chunk, of the last row's segment."""
    return (forget(x.kept(), states) + x.product("lh,lv->hv", x.to_new(x.k), values))[-1]


def prefix(
    kept: Float[Array, "C B N _ 1"],
    added: Float[Array, "C B N H V"],
    initial: Float[Array, "B N H V"] | None = None,
) -> Float[Array, "C B N H V"]:
    """The states before each step of `S_{c+1} = kept_c S_c + added_c`, from `initial` or zeros.

    It takes about sqrt(C) steps within blocks, in parallel, then as many from block to block.
    """
    n = len(added)
    size = n if n <= 16 else 1 << ((n - 1).bit_length() + 1) // 2
    n_blocks = -(-n // size)
    padding = [(0, n_blocks * size - n)] + [(0, 0)] * (added.ndim - 1)

    def in_blocks(x):  # [steps of a block, blocks, ...]
        x = jnp.pad(x, padding)
        return jnp.swapaxes(x.reshape(n_blocks, size, *x.shape[1:]), 0, 1)

    def step(carry, x):
        (state, rest), (kept, added) = carry, x
        return (forget(kept, state) + added, kept * rest), carry

    kept, added = in_blocks(kept), in_blocks(added)
    empty = jnp.zeros_like(added[0]), jnp.ones_like(kept[0])
    ends, (states, rests) = lax.scan(step, empty, (kept, added))

    def next_block(state, end):
        return forget(end[1], state) + end[0], state

    first = jnp.zeros_like(added[0, 0])
    if initial is not None:
        first = varying_as(first, initial.astype(first.dtype))
    _, begins = lax.scan(next_block, first, ends)
    states = states + forget(rests, begins[None])
    return jnp.swapaxes(states, 0, 1).reshape(-1, *states.shape[2:])[:n]


def forget(kept: Float[Array, "*c H 1"], state: Float[Array, "*c H V"]) -> Float[Array, "*c H V"]:
    """`kept * state`; zeros where `kept` is 0, even if the state overflowed."""
    return jnp.where(kept > 0, kept * state, 0)


class _Solved(NamedTuple):
    """The solved triangular systems of the delta rule."""

    pairs: Float[Array, "C B N L L"]  # e^(c_i - c_j) k_i . k_j
    below: Bool[Array, "*c L L"]  # where M is not 0
    inverse: Float[Array, "C B N L L"]  # (1 + M)^-1
    keys: Float[Array, "C B N L H"]  # times the decay since the state before the chunk
    reads: Float[Array, "C B N L H"]  # u = (1 + M)^-1 b v - reads S


def _solved(x: RecurrenceChunks) -> _Solved:
    below = x.so_far & jnp.tril(jnp.ones((1, 1, 1, *x.so_far.shape[-2:]), bool), -1)
    pairs = decayed_products(x.k, x.k, x.decay, below, jnp.result_type(x.k))
    inverse = chunk_products.inverse(x.beta * pairs)
    keys = x.from_old(x.k)
    return _Solved(
        pairs, below, inverse, keys, x.product("ij,jh->ih", inverse, x.beta * _to_accum_dtype(keys))
    )


# Gradients.


def gradients(
    x: RecurrenceChunks,
    d_out: Float[Array, "C B N L V"],
    d_final: Float[Array, "B N H V"] | None = None,
) -> tuple[RecurrenceInputs, Float[Array, "B N H V"]]:
    """The gradients of the inputs, in chunks, and of the first chunk's state.

    `d_final` is the gradient of `final_state`; None is zeros. The gradient of a cumulative decay
    needs no other product, because the recurrence is a function of `q_t e^(c_t)` and `k_t
    e^(-c_t)`.
    """
    solved = None if x.beta is None else _solved(x)
    states, values = states_and_values(x)
    d_values = x.product("ij,iv->jv", x.pairs(), d_out)
    d_states, d_values, d_initial = _d_states(x, solved, d_out, d_values, d_final)

    d_pairs = jnp.where(x.so_far, x.product("iv,jv->ij", d_out, values), 0)
    dtype = jnp.result_type(x.q, x.k)
    dq, dk = decayed_products_vjp(d_pairs, x.q, x.k, x.decay, x.so_far, dtype)
    dq = dq + x.from_old(x.product("iv,hv->ih", d_out, states))
    dk_new = x.to_new(x.product("lv,hv->lh", values, d_states))
    dk = dk + dk_new
    dv, d_beta = d_values, None
    q, k = _to_accum_dtype(x.q), _to_accum_dtype(x.k)
    dc = None if x.decay is None else q * dq - k * dk
    if solved is not None:
        dv, d_beta, dk_read, dk_written = _solved_vjp(x, solved, states, values, d_values)
        dk = dk + dk_read + dk_written
        dc = None if dc is None else dc + k * (dk_read - dk_written)
    if dc is None:
        return RecurrenceInputs(dq, dk, dv, None, d_beta), d_initial
    d_kept = forget(x.kept(), states * d_states).sum(axis=-1)[..., None, :]
    at_end = (k * dk_new).sum(axis=-2, keepdims=True) + d_kept
    row = lax.broadcasted_iota(jnp.int32, dc.shape, dc.ndim - 2)
    dc = dc + jnp.where(row == dc.shape[-2] - 1, at_end, 0)
    dc = dc if x.decay.shape[-1] > 1 else dc.sum(axis=-1, keepdims=True)
    so_far = x.so_far.astype(dc.dtype)
    d_log_decay = jnp.einsum("...ij,...ih->...jh", so_far, dc, precision=lax.Precision.HIGHEST)
    return RecurrenceInputs(dq, dk, dv, d_log_decay, d_beta), d_initial


def _d_states(x: RecurrenceChunks, solved: _Solved | None, d_out, d_values, d_final):
    """The gradients of the states after each chunk, of the written values, and of `initial`."""
    read = x.product("ih,iv->hv", x.from_old(x.q), d_out)
    keys = x.to_new(x.k)
    if solved is None:
        d_states = prefix(x.kept()[::-1], read[::-1], d_final)[::-1]
        d_initial = forget(x.kept()[0], d_states[0]) + read[0]
        return d_states, d_values + x.product("lh,hv->lv", keys, d_states), d_initial

    def step(d_state, chunk):
        kept, keys, reads, read, d_values = chunk
        d_values = d_values + x.product("lh,hv->lv", keys, d_state)
        before = forget(kept, d_state) + read - x.product("lh,lv->hv", reads, d_values)
        return before, (d_state, d_values)

    chunks = x.kept(), keys, solved.reads, read, d_values
    last = jnp.zeros_like(read[0]) if d_final is None else varying_as(read, d_final)
    d_initial, (d_states, d_values) = lax.scan(step, last, chunks, reverse=True)
    return d_states, d_values, d_initial


def _solved_vjp(x: RecurrenceChunks, solved: _Solved, states, values, d_values):
    """The gradients of v and b, and of keys as they read and as they are written."""
    d_right = x.product("ij,iv->jv", solved.inverse, d_values)
    left = _to_accum_dtype(x.v) - jnp.where(x.old, x.product("lh,hv->lv", solved.keys, states), 0)
    d_below = jnp.where(solved.below, -x.product("iv,jv->ij", d_right, values), 0)
    d_beta = (d_right * left).sum(axis=-1, keepdims=True)
    d_beta = d_beta + (d_below * solved.pairs).sum(axis=-1, keepdims=True)
    dtype = jnp.result_type(x.k)
    d_pairs = x.beta * d_below
    read, written = decayed_products_vjp(d_pairs, x.k, x.k, x.decay, solved.below, dtype)
    d_left = x.beta * d_right
    read = read - x.from_old(x.product("lv,hv->lh", d_left, states))
    return d_left, d_beta, read, written


def _to_accum_dtype(x: Array) -> Array:
    """`x` in its accumulation dtype."""
    return x.astype(accum_dtype(x.dtype))

"""Linear recurrences over a sequence, a chunk of positions at a time.

A state `S [H, V]` of constant size is read by queries and written by keys and values:

    S_t = a_t S_{t-1} + k_t v_t^T,                          out_t = S_t^T q_t
    S_t = a_t (1 - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T   with the delta rule

The first is linear attention (Katharopoulos et al. 2020, eq. 18-20). With a decay a of its head it
is retention (Sun et al. 2023, eq. 6), and with one of each feature of its keys gated linear
attention (Yang et al. 2023, eq. 4). The second first takes out what the state holds for a key, and
so replaces it (Yang et al. 2024, "Gated Delta Networks", eq. 10).

A chunk of L positions is products of matrices: positions of the chunk see each other by an L x L
matrix, and what came before by the state at the chunk's border (Yang et al. 2023, sec. 4.2). The
delta rule becomes the first recurrence with other values u, for which a triangular system is solved
(Yang et al. 2024, sec. 3.3):

    (1 + M) u = b (v - e^c k S),    M_ij = b_i e^(c_i - c_j) k_i . k_j  for j < i

Only states at the borders pass from chunk to chunk. Time is O(T L), and memory O(T). The gradient
computes all of this again, and keeps nothing but the inputs between the passes.

Inside this module arrays are `[C, B, N, L, ...]`, chunks first. On NVIDIA GPUs
`kernels.recurrence` computes the same function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.parts import chunk_products
from reformax.ops.parts.chunk_products import decayed_products, decayed_products_vjp
from reformax.ops.parts.containment import finite, is_finite
from reformax.ops.parts.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.parts.first_order import first_order
from reformax.ops.parts.side_by_side import back, sees, side_by_side, taken
from reformax.ops.parts.softmax import wide


class Inputs(NamedTuple):
    """What a recurrence reads."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N V"]
    log_decay: Float[Array, "B T N _"] | None
    beta: Float[Array, "B T N 1"] | None


def recurrence(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    log_decay: Float[Array, "B T N _"] | None = None,
    beta: Float[Array, "B T N 1"] | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    chunk_len: int = 64,
    strict: bool = False,
    impl: str = "auto",
) -> Float[Array, "B T N V"]:
    """The outputs of a linear recurrence, causal, from a state of zeros at each segment's begin.

    Products are computed in the widest dtype of q, k and v, and summed in float32, as the state is.
    A row that sees what is not finite is NaN and has no gradient.

    Args:
      q: queries, scaled.
      k: keys.
      v: values.
      log_decay: log a_t, at most 0, `[B, T, N, 1]` or for each feature of the keys `[B, T, N, H]`;
        None is 0.
      beta: b_t of the delta rule; None leaves the rule out.
      segments: ids; positions of one id are a sequence, wherever they stand.
      chunk_len: positions whose products are computed at once, rounded up to a power of two. It
        changes no number but by rounding.
      strict: whether a position is hidden from itself; not with `beta`.
      impl: `"xla"` runs everywhere. `"pallas"` is kernels for NVIDIA GPUs of Ampere or later, with
        chunks of 64, and `"pallas_interpret"` the same, run anywhere, slowly. `"auto"` takes them
        where they can compute the call.

    Returns:
      The outputs in float32, or float64 for float64 inputs.

    Raises:
      SettingError: an unknown `impl`.
      NotImplementedError: the kernel cannot compute the call.
    """
    check_impl(impl, *KERNELS)
    x = Inputs(q, k, v, log_decay, beta)
    obstacles = kernel_obstacles(q, k, v)
    impl = choose(impl, **obstacles | {"pallas": obstacles["pallas"] or _chip_obstacle(x)})
    return _recurrence(_chunk_size(chunk_len, q.shape[1]), strict, impl, x, segments)


def _chip_obstacle(x: Inputs) -> str | None:
    """What a GPU's chip cannot hold beside that which `kernel_obstacles` knows."""
    size = max(x.k.shape[-1], x.v.shape[-1])
    by_feature = x.log_decay is not None and x.log_decay.shape[-1] > 1
    if x.beta is None or not by_feature or size <= 64 or x.q.dtype != jnp.float32:
        return None
    return f"beta, decays by feature and head size {size}, which is above 64, in float32"


def everything(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    *,
    segments: Int[Array, "B T"] | None = None,
    chunk_len: int = 64,
) -> Float[Array, "B T N V"]:
    """`q_t . sum_s k_s v_s^T` over all positions s of the row's segment, before it and behind it.

    Arguments, dtypes and rows that see what is not finite are as in `recurrence`.
    """
    if segments is None:
        dtype = jnp.result_type(q, k, v)
        real = is_finite(q) & is_finite(k, v).all(axis=1, keepdims=True)
        state = chunk_products.product("bsnh,bsnv->bnhv", finite(k), finite(v), dtype)
        out = chunk_products.product("btnh,bnhv->btnv", finite(q), state, dtype)
        return jnp.where(real, out, jnp.nan)
    order, here, ids = side_by_side((q, k, v), segments)
    out = _of_segment(_chunk_size(chunk_len, q.shape[1]), here, ids)
    bad = ~is_finite(*here[1:])
    behind = sees(jnp.flip(bad, axis=1), jnp.flip(ids, axis=1))
    sees_bad = sees(bad, ids) | jnp.flip(behind, axis=1)
    real = is_finite(here[0], out) & ~sees_bad
    return back(jnp.where(real, out, jnp.nan), order)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_segment(size: int, qkv: tuple[Array, Array, Array], ids: Int[Array, "B T"]) -> Array:
    """`q_t . sum_s k_s v_s^T` over the row's segment, where those are side by side."""
    return _sums_of_segment(size, qkv, ids, lambda x: x)


def _sums_of_segment(size: int, qkv, ids, read: Callable[[Array], Array]) -> Array:
    """`_of_segment`, whose products go through `read` before they are read.

    A chunk reads a state of what came before it and one of what follows, whose rows are of the
    segments that it begins and ends in.
    """
    x = _chunked(Inputs(*qkv, None, None), ids, size, strict=False)
    same = x.so_far | jnp.swapaxes(x.so_far, -1, -2)
    pairs = read(jnp.where(same, x.product("ih,jh->ij", x.q, x.k), 0))
    to_next, to_last = (
        x.product("lh,lv->hv", jnp.where(rows, x.k, 0), x.v) for rows in (x.new, x.old)
    )
    before = read(_prefix(x.kept(), to_next))
    behind = read(_prefix(x.kept()[::-1], to_last[::-1])[::-1])
    out = x.product("ij,jv->iv", pairs, x.v)
    out = out + jnp.where(x.old, x.product("ih,hv->iv", x.q, before), 0)
    out = out + jnp.where(x.new, x.product("ih,hv->iv", x.q, behind), 0)
    return _joined(out, qkv[0].shape[1])


def _of_segment_backward(size: int, results, d_out):
    """The function is linear in each of the three, and its derivatives are of its own form.

    A product that overflowed has no gradient, as in `_gradients`.
    """
    ((q, k, v), ids), d = first_order((results, d_out))
    d = d.astype(jnp.result_type(q, k, v))
    each = (d, v, k), (v, d, q), (k, q, d)
    gradients = (_sums_of_segment(size, x, ids, finite) for x in each)
    return tuple(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), None


_of_segment.defvjp(
    lambda size, qkv, ids: (_of_segment(size, qkv, ids), (qkv, ids)), _of_segment_backward
)


def _chunk_size(chunk_len: int, length: int) -> int:
    return 1 << (min(chunk_len, length) - 1).bit_length()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _recurrence(size: int, strict: bool, impl: str, inputs: Inputs, segments):
    return _forward(size, strict, impl, inputs, segments)[0]


def _forward(size: int, strict: bool, impl: str, inputs: Inputs, segments):
    order, here, ids = side_by_side(first_order(inputs), segments)
    if impl in KERNELS:
        from reformax.ops.kernels import recurrence as kernel

        options = dict(strict=strict, interpret=impl == "pallas_interpret")
        out, values = kernel.forward(here, ids, **options)
    else:
        x = _chunked(here, ids, size, strict)
        states, values = _states(x)
        out = x.product("ij,jv->iv", x.pairs(), finite(values))
        out = out + jnp.where(x.old, x.product("ih,hv->iv", x.from_old(x.q), states), 0)
        out, values = (_joined(a, here.q.shape[1]) for a in (out, values))
    seen = is_finite(*here[1:], values)
    real = is_finite(here.q, out) & ~sees(~seen, ids, strict)
    out = back(jnp.where(real, out, jnp.nan), order)
    return out, (inputs, segments, real)


def _backward(size: int, strict: bool, impl: str, results, d_out):
    results, d_out = first_order((results, d_out))
    # Fenced, or the compiler would keep what the other pass computed.
    inputs, segments, real = lax.optimization_barrier(results)
    order, here, ids = side_by_side(inputs, segments)
    d_out = jnp.where(real, taken(d_out, order), 0)
    if impl in KERNELS:
        from reformax.ops.kernels import recurrence as kernel

        options = dict(strict=strict, interpret=impl == "pallas_interpret")
        gradients = kernel.backward(here, ids, d_out, **options)
    else:
        gradients = _gradients(_chunked(here, ids, size, strict), _cut(d_out, size))
        gradients = jax.tree.map(lambda g: _joined(g, d_out.shape[1]), gradients)
    return jax.tree.map(lambda g, x: back(g, order).astype(x.dtype), gradients, inputs), None


_recurrence.defvjp(_forward, _backward)


class _Chunks(NamedTuple):
    """The inputs in chunks, `[C, B, N, L, ...]`, and which positions are of one segment."""

    q: Float[Array, "C B N L H"]
    k: Float[Array, "C B N L H"]
    v: Float[Array, "C B N L V"]
    decay: Float[Array, "C B N L _"] | None  # log_decay summed up, from the chunk's begin
    beta: Float[Array, "C B N L 1"] | None
    so_far: Bool[Array, "*c L L"]  # whether row j is of row i's segment, and not behind it
    seen: Bool[Array, "*c L L"]  # `so_far`, without the row itself if that is hidden
    old: Bool[Array, "*c L 1"]  # whether a row is of the segment that the chunk begins in
    new: Bool[Array, "*c L 1"]  # or of the one that it ends in

    def product(self, spec: str, x: Array, y: Array) -> Array:
        """`einsum` over the last two axes, in the inputs' dtype, summed in float32."""
        dtype = jnp.result_type(self.q, self.k, self.v)
        one, other, result = spec.replace("->", ",").split(",")
        spec = f"...{one},...{other}->...{result}"
        return chunk_products.product(spec, x, y, dtype)

    def pairs(self) -> Float[Array, "C B N L L"]:
        """What each query reads of each key of its chunk."""
        dtype = jnp.result_type(self.q, self.k)
        return decayed_products(self.q, self.k, self.decay, self.seen, dtype)

    # Decays between a row and its chunk's borders; 0 for rows of other segments.

    def from_old(self, x: Float[Array, "C B N L H"]) -> Float[Array, "C B N L H"]:
        """`x` as it meets the state before the chunk."""
        if self.decay is not None:
            x = _wide(x) * jnp.exp(self.decay)
        return jnp.where(self.old, x, 0)

    def to_new(self, x: Float[Array, "C B N L H"]) -> Float[Array, "C B N L H"]:
        """`x` as it is added to the state after the chunk."""
        if self.decay is not None:
            left = self.decay[..., -1:, :] - self.decay
            x = _wide(x) * jnp.exp(jnp.where(self.new, left, 0))
        return jnp.where(self.new, x, 0)

    def kept(self) -> Float[Array, "C B N _ 1"]:
        """How much of the state before a chunk is in the one after it."""
        whole = jnp.swapaxes(self.old[..., -1:, :], -1, -2)
        if self.decay is None:
            whole = jnp.broadcast_to(whole, (self.q.shape[0], *whole.shape[-4:]))
            return whole.astype(wide(self.q.dtype, self.k.dtype, self.v.dtype))
        return jnp.where(whole, jnp.swapaxes(jnp.exp(self.decay[..., -1:, :]), -1, -2), 0)


class _Solved(NamedTuple):
    """What makes the delta rule a recurrence of other values."""

    pairs: Float[Array, "C B N L L"]  # e^(c_i - c_j) k_i . k_j
    below: Bool[Array, "*c L L"]  # where M has numbers
    inverse: Float[Array, "C B N L L"]  # (1 + M)^-1
    keys: Float[Array, "C B N L H"]  # as they meet the state before the chunk
    reads: Float[Array, "C B N L H"]  # u = (1 + M)^-1 b v - reads S


def _solved(x: _Chunks) -> _Solved:
    below = x.so_far & jnp.tril(jnp.ones((1, 1, 1, *x.so_far.shape[-2:]), bool), -1)
    pairs = decayed_products(x.k, x.k, x.decay, below, jnp.result_type(x.k))
    inverse = chunk_products.inverse(x.beta * pairs)
    keys = x.from_old(x.k)
    return _Solved(
        pairs, below, inverse, keys, x.product("ij,jh->ih", inverse, x.beta * _wide(keys))
    )


def _states(x: _Chunks) -> tuple[Float[Array, "C B N H V"], Float[Array, "C B N L V"]]:
    """The states before each chunk, and the values that are written."""
    if x.beta is None:
        return _prefix(x.kept(), x.product("lh,lv->hv", x.to_new(x.k), x.v)), x.v
    solved = _solved(x)

    def write(state, chunk):
        kept, keys, reads, values, old = chunk
        values = values - jnp.where(old, x.product("lh,hv->lv", reads, state), 0)
        after = _forget(kept, state) + x.product("lh,lv->hv", keys, finite(values))
        return after, (state, values)

    values = x.product("ij,jv->iv", solved.inverse, x.beta * _wide(x.v))
    old = jnp.broadcast_to(x.old, (*values.shape[:2], *x.old.shape[-3:]))
    chunks = x.kept(), x.to_new(x.k), solved.reads, values, old
    state = jnp.zeros((*x.k.shape[1:3], x.k.shape[-1], x.v.shape[-1]), values.dtype)
    return lax.scan(write, state, chunks)[1]


def _gradients(x: _Chunks, d_out: Float[Array, "C B N L V"]) -> Inputs:
    """The gradients of the inputs, in chunks.

    That of a cumulative decay needs no product of its own: what is read at t is a function of
    `q_t e^(c_t)` and what is written there of `k_t e^(-c_t)`.
    """
    solved = None if x.beta is None else _solved(x)
    states, values = (finite(a) for a in _states(x))
    d_values = x.product("ij,iv->jv", finite(x.pairs()), d_out)
    d_states, d_values = _d_states(x, solved, d_out, d_values)

    d_pairs = jnp.where(x.seen, x.product("iv,jv->ij", d_out, values), 0)
    dtype = jnp.result_type(x.q, x.k)
    dq, dk = decayed_products_vjp(d_pairs, x.q, x.k, x.decay, x.seen, dtype)
    dq = dq + x.from_old(x.product("iv,hv->ih", d_out, states))
    dk_new = x.to_new(x.product("lv,hv->lh", values, d_states))
    dk = dk + dk_new
    dv, d_beta = d_values, None
    q, k = _wide(x.q), _wide(x.k)
    dc = None if x.decay is None else q * dq - k * dk
    if solved is not None:
        dv, d_beta, dk_read, dk_written = _solved_vjp(x, solved, states, values, d_values)
        dk = dk + dk_read + dk_written
        dc = None if dc is None else dc + k * (dk_read - dk_written)
    if dc is None:
        return Inputs(dq, dk, dv, None, d_beta)
    d_kept = _forget(x.kept(), states * d_states).sum(axis=-1)[..., None, :]
    at_end = (k * dk_new).sum(axis=-2, keepdims=True) + d_kept
    row = lax.broadcasted_iota(jnp.int32, dc.shape, dc.ndim - 2)
    dc = dc + jnp.where(row == dc.shape[-2] - 1, at_end, 0)
    dc = dc if x.decay.shape[-1] > 1 else dc.sum(axis=-1, keepdims=True)
    so_far = x.so_far.astype(dc.dtype)
    d_log_decay = jnp.einsum("...ij,...ih->...jh", so_far, dc, precision=lax.Precision.HIGHEST)
    return Inputs(dq, dk, dv, d_log_decay, d_beta)


def _d_states(x: _Chunks, solved: _Solved | None, d_out, d_values):
    """The gradients of the states after each chunk, and of the values that are written."""
    read = x.product("ih,iv->hv", x.from_old(x.q), d_out)
    keys = x.to_new(x.k)
    if solved is None:
        d_states = _prefix(x.kept()[::-1], read[::-1])[::-1]
        return d_states, d_values + x.product("lh,hv->lv", keys, d_states)

    def step(d_state, chunk):
        kept, keys, reads, read, d_values = chunk
        d_values = d_values + x.product("lh,hv->lv", keys, d_state)
        before = _forget(kept, d_state) + read - x.product("lh,lv->hv", reads, d_values)
        return before, (d_state, d_values)

    chunks = x.kept(), keys, solved.reads, read, d_values
    return lax.scan(step, jnp.zeros_like(read[0]), chunks, reverse=True)[1]


def _solved_vjp(x: _Chunks, solved: _Solved, states, values, d_values):
    """The gradients of v, of b, and of the keys where they read and where they are written."""
    d_right = x.product("ij,iv->jv", solved.inverse, d_values)
    left = _wide(x.v) - jnp.where(x.old, x.product("lh,hv->lv", solved.keys, states), 0)
    d_below = jnp.where(solved.below, -x.product("iv,jv->ij", d_right, values), 0)
    d_beta = (d_right * left).sum(axis=-1, keepdims=True)
    d_beta = d_beta + (d_below * solved.pairs).sum(axis=-1, keepdims=True)
    dtype = jnp.result_type(x.k)
    d_pairs = x.beta * d_below
    read, written = decayed_products_vjp(d_pairs, x.k, x.k, x.decay, solved.below, dtype)
    d_left = x.beta * d_right
    read = read - x.from_old(x.product("lv,hv->lh", d_left, states))
    return d_left, d_beta, read, written


# The states.


def _wide(x: Array) -> Array:
    """The same numbers in float32, or float64."""
    return x.astype(wide(x.dtype))


def _forget(kept: Float[Array, "*c H 1"], state: Float[Array, "*c H V"]) -> Array:
    """`kept * state`; nothing of it, whatever it holds, where nothing is kept."""
    return jnp.where(kept > 0, kept * state, 0)


def _prefix(
    kept: Float[Array, "C B N _ 1"], added: Float[Array, "C B N H V"]
) -> Float[Array, "C B N H V"]:
    """The states before each step of `S_{c+1} = kept_c S_c + added_c`, from zeros.

    About sqrt(C) steps in blocks of as many, all blocks side by side, then from block to block.
    """
    n = len(added)
    size = n if n <= 16 else 1 << ((n - 1).bit_length() + 1) // 2
    n_blocks = -(-n // size)
    padding = [(0, n_blocks * size - n)] + [(0, 0)] * (added.ndim - 1)

    def in_blocks(x):  # steps of a block in front, then blocks
        x = jnp.pad(x, padding)
        return jnp.swapaxes(x.reshape(n_blocks, size, *x.shape[1:]), 0, 1)

    def step(carry, x):
        (state, rest), (kept, added) = carry, x
        return (_forget(kept, state) + added, kept * rest), carry

    kept, added = in_blocks(kept), in_blocks(added)
    empty = jnp.zeros_like(added[0]), jnp.ones_like(kept[0])
    ends, (states, rests) = lax.scan(step, empty, (kept, added))

    def next_block(state, end):
        return _forget(end[1], state) + end[0], state

    _, begins = lax.scan(next_block, jnp.zeros_like(added[0, 0]), ends)
    states = states + _forget(rests, begins[None])
    return jnp.swapaxes(states, 0, 1).reshape(-1, *states.shape[2:])[:n]


# Chunks.


def _cut(x: Float[Array, "B T N H"], size: int) -> Float[Array, "C B N L H"]:
    """Chunks of `size` positions, the last one filled up with zeros."""
    n_chunks = -(-x.shape[1] // size)
    x = jnp.pad(x, ((0, 0), (0, n_chunks * size - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], n_chunks, size, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, 4))


def _joined(x: Float[Array, "C B N L H"], length: int) -> Float[Array, "B T N H"]:
    """The inverse of `_cut`."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _chunked(inputs: Inputs, ids: Int[Array, "B T"] | None, size: int, strict: bool) -> _Chunks:
    dtype = wide(*(x.dtype for x in inputs[:3]))
    q, k, v = (_cut(finite(x), size) for x in inputs[:3])
    log_decay, beta = (
        None if x is None else _cut(finite(x.astype(dtype)), size) for x in inputs[3:]
    )
    so_far = jnp.tril(jnp.ones((1, 1, 1, size, size), bool))
    old = new = jnp.ones((1, 1, 1, size, 1), bool)
    if ids is not None:
        padding = -ids.shape[1] % size
        ids = jnp.pad(ids, ((0, 0), (0, padding)), mode="edge")[..., None, None]
        ids = _cut(ids, size)
        so_far = so_far & (ids == jnp.swapaxes(ids, -1, -2))
        new = ids == ids[..., -1:, :]
        # Before the first chunk the state is zeros, as of the first segment.
        last = jnp.concatenate([ids[:1, ..., :1, :], ids[:-1, ..., -1:, :]])
        old = ids == last
    decay = None
    if log_decay is not None:
        # The exponential of less is 0 too; sums of less would not be exact.
        log_decay = jnp.maximum(log_decay, math.log(jnp.finfo(dtype).smallest_subnormal) - 1)
        sums = so_far.astype(dtype)
        decay = jnp.einsum("...ij,...jh->...ih", sums, log_decay, precision=lax.Precision.HIGHEST)
    below = jnp.tril(jnp.ones((1, 1, 1, size, size), bool), -1)
    return _Chunks(q, k, v, decay, beta, so_far, so_far & below if strict else so_far, old, new)


# Decoding.


def state_after(inputs: Inputs, lengths: Int[Array, " B"], *, chunk_len: int = 64) -> Array:
    """The state `[B, N, H, V]` after the first `lengths` positions of each row."""
    real = (jnp.arange(inputs.q.shape[1])[None] < lengths[:, None])[..., None, None]
    here = jax.tree.map(lambda x: jnp.where(real, x, 0), inputs)
    x = _chunked(here, None, _chunk_size(chunk_len, inputs.q.shape[1]), strict=False)
    states, values = _states(x)
    written = x.product("lh,lv->hv", x.to_new(x.k), finite(values))
    after = (_forget(x.kept(), states) + written)[-1]
    whole = is_finite(*here[1:]).all(axis=1)[..., None]
    return jnp.where(whole, after, jnp.nan)


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

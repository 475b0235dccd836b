"""Ring attention: one sequence over several devices, which pass keys and values around a ring.

Each device holds a shard of the sequence. In each step a device attends with its queries to the
keys that it holds, and sends these to the next device. A row's softmax is merged from those of the
steps (Liu et al. 2023). The backward pass computes the weights again from the merged statistics.
The gradients of keys and values travel with them, and return to the device of the shard.

In a causal call the first shard sees only itself and the last one sees all, so devices would wait
for the last. Shards are therefore cut into halves, of which device i of p gets numbers i and
2p - 1 - i (zigzag, as in Llama 3, section 3.3.2). Each device then computes two of its four pairs
of halves in each step.

All functions run inside `jax.shard_map`. Letters besides those of `reformax.ops.base`: t and s the
positions of a shard, h of a half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import KERNEL_REFUSAL, CustomDerivatives, tangent_of
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import seed_at
from reformax.ops.softmax.online import Softmax

Pair = tuple[Any, Any]  # of a device's early and late half


class PartialAttention(Protocol):
    """Attention of some queries to some keys. Implementations are hashable.

    A result is `(out [B, T, N, V], row_max [B, N, T], row_sum [B, N, T])`: the attended values, and
    the maximum and the sum of `Softmax`.
    """

    impl: str  # of `choose_impl`

    def forward(self, causal: bool, q, k, v, segment_ids: tuple, seed: Any) -> tuple:
        """The result. `segment_ids` are of queries and of keys, `seed` is of their dropout."""

    def backward(
        self, causal: bool, q, k, v, segment_ids: tuple, seed: Any, results: tuple, d_out
    ) -> tuple:
        """The gradients of q, k and v, given the results of rows over all their keys."""


class _Side(NamedTuple):
    """Some queries, or some keys and values, and their position."""

    arrays: tuple[Array, ...]  # [B, h, N, H]
    segment_ids: Int[Array, "B h"] | None
    position: Int[Array, ""]  # of the first row


def attend(
    pieces: PartialAttention,
    causal: bool,
    q: Float[Array, "B t N H"],
    k: Float[Array, "B s G H"],
    v: Float[Array, "B s G V"],
    segment_ids: tuple[Int[Array, "B t"], Int[Array, "B s"]] | tuple[None, None],
    axis: str,
    seed: Int[Array, 6] | None,
) -> Float[Array, "B t N V"]:
    """Attention of a shard of queries to the keys of all shards.

    Args:
      pieces: computes attention of some queries to some keys.
      causal: whether later keys are hidden. Queries and keys are then one sequence.
      q, k, v: the shard's arrays. Keys and values may have fewer heads.
      segment_ids: the shard's ids of queries and keys; twice None: one segment.
      axis: the mesh axis of the devices.
    """
    sides = (q,), (k, v)
    if causal and q.shape[1] % 2 and segment_ids[0] is None:
        segment_ids = (jnp.ones(q.shape[:2], jnp.int32),) * 2  # halves end in padding
    device = lax.axis_index(axis)
    halves = []
    for arrays, ids in zip(sides, segment_ids, strict=True):
        length = arrays[0].shape[1]
        if causal:
            pair = _zigzag((arrays, ids), axis)
            starts = (_start(c, length) for c in _numbers(device, axis))
        else:
            pair, starts = ((arrays, ids),), (device * length,)
        halves.append(tuple(_Side(*half, at) for half, at in zip(pair, starts, strict=True)))
    out = _ring(pieces, causal, axis, *halves, seed)
    return _in_order(out, axis)[:, : q.shape[1]] if causal else out[0]


# The halves of the devices.


def _numbers(device: Any, axis: str) -> Pair:
    """The numbers, from 0 to 2p - 1, of a device's halves."""
    return device, 2 * lax.axis_size(axis) - 1 - device


def _start(number: Any, length: int) -> Any:
    """The first position of a half, where shards have `length` positions."""
    return number // 2 * length + number % 2 * -(-length // 2)


def _routes(axis: str) -> tuple[list, list]:
    """The (source, target) devices of the first halves of shards, and of the second halves."""
    n = lax.axis_size(axis)
    owner = [c if c < n else 2 * n - 1 - c for c in range(2 * n)]
    return [(i, owner[2 * i]) for i in range(n)], [(i, owner[2 * i + 1]) for i in range(n)]


def _zigzag(tree: Any, axis: str) -> Pair:
    """A device's halves, from the shards `[B, t, ...]` of all devices."""

    def half(x, which):
        h = -(-x.shape[1] // 2)
        x = jnp.pad(x, ((0, 0), (0, 2 * h - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
        return x[:, h * which : h * (which + 1)]

    def receive(which, route):
        return jax.tree.map(lambda x: lax.ppermute(half(x, which), axis, route), tree)

    return _if(lax.axis_index(axis) % 2 == 0, *map(receive, (0, 1), _routes(axis)))


def _in_order(halves: Pair, axis: str) -> Array:
    """Shards, with their padding, from halves."""
    pairs = zip(_if(lax.axis_index(axis) % 2 == 0, *halves), _routes(axis), strict=True)
    back = [lax.ppermute(x, axis, [(j, i) for i, j in route]) for x, route in pairs]
    return jnp.concatenate(back, axis=1)


def _if(condition: Any, one: Any, other: Any) -> Pair:
    """`(one, other)` where the condition holds, `(other, one)` elsewhere."""

    def choose(condition):
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)

    return choose(condition), choose(~condition)


# The ring.


def _around(axis: str, keys: Any, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """`carry = step(s, keys, carry)` for the keys of the device s before, from s = 1 on.

    The keys of the next step travel while a step is computed.
    """
    n = lax.axis_size(axis)

    def body(s, held):
        keys, carry = held
        return _sent_on(axis, keys), step(s, keys, carry)

    keys, carry = lax.fori_loop(1, n - 1, body, (_sent_on(axis, keys), carry))
    return step(n - 1, keys, carry)


def _sent_on(axis: str, tree: Any) -> Any:
    n = lax.axis_size(axis)
    send = functools.partial(
        lax.ppermute, axis_name=axis, perm=[(i, (i + 1) % n) for i in range(n)]
    )
    return jax.tree.map(send, tree)


def _within(causal: bool) -> list[tuple[int, int, bool]]:
    """The pairs of one device's halves, and whether each is causal."""
    return [(0, 0, True), (1, 0, False), (1, 1, True)] if causal else [(0, 0, False)]


def _chosen(queries: tuple, keys: tuple, s: Any, axis: str) -> list[tuple]:
    """The pairs of halves to compute where the keys are of the device s before.

    Both halves of queries see the early half of an earlier device's keys, and not its late half.
    Only the late half of queries sees a later device's keys.
    """
    if len(keys) == 1:
        return [(queries[0], keys[0])]
    earlier = lax.axis_index(axis) >= s
    return [(_if(earlier, *queries)[0], keys[0]), (queries[1], _if(earlier, *keys)[0])]


def _put(pair: tuple, s: Any, axis: str, values: list, of_keys: bool, merge: Callable) -> tuple:
    """`pair` with the values of `_chosen`'s pairs merged into their halves."""
    if len(pair) == 1:
        return (merge(pair[0], values[0]),)
    earlier = lax.axis_index(axis) >= s
    if of_keys:
        pair = merge(pair[0], values[0]), pair[1]
        one, other = _if(earlier, *pair)
        return _if(earlier, merge(one, values[1]), other)
    one, other = _if(earlier, *pair)
    pair = _if(earlier, merge(one, values[0]), other)
    return pair[0], merge(pair[1], values[1])


@functools.partial(CustomDerivatives, n_static=3)
def _ring(pieces, causal, axis, queries, keys, seed) -> tuple[Array, ...]:
    return _forward(pieces, causal, axis, queries, keys, seed)[0]


def _call(causal: bool, seed, query: _Side, key: _Side) -> tuple:
    """The arguments of a method of `PartialAttention`."""
    seed = seed_at(seed, query.position, key.position)
    return causal, *query.arrays, *key.arrays, (query.segment_ids, key.segment_ids), seed


def _forward(pieces, causal, axis, queries, keys, seed):
    (q,), v = queries[0].arrays, keys[0].arrays[1]
    dtype = accum_dtype(q.dtype, v.dtype)
    states = [Softmax.empty((q.shape[0], q.shape[2], q.shape[1]), v.shape[3], dtype)] * len(queries)

    def found(cut: bool, query: _Side, key: _Side) -> Softmax:
        return Softmax.of_results(pieces.forward(*_call(cut, seed, query, key)))

    for i, j, cut in _within(causal):
        states[i] = states[i].merge(found(cut, queries[i], keys[j]))

    def step(s, keys, states):
        parts = [found(False, *pair) for pair in _chosen(queries, keys, s, axis)]
        return _put(states, s, axis, parts, False, Softmax.merge)

    states = _around(axis, keys, step, tuple(states))
    results = tuple(x.results(v.dtype) for x in states)
    return tuple(out for out, *_ in results), (queries, keys, seed, results)


def _backward(pieces, causal, axis, residuals, d_out):
    queries, keys, seed, results = residuals
    rows = tuple(zip(queries, *first_order((results, d_out)), strict=True))
    dtype = accum_dtype(queries[0].arrays[0].dtype)

    def zeros(sides):
        return [jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), side.arrays) for side in sides]

    def add(x, y):
        return jax.tree.map(lambda x, y: x + y.astype(dtype), x, y)

    def gradients(cut, row, key):
        query, results, d_out = row
        dq, *of_key = pieces.backward(*_call(cut, seed, query, key), results, d_out)
        return (dq,), tuple(of_key)

    of_queries, of_keys = zeros(queries), zeros(keys)
    for i, j, cut in _within(causal):
        dq, dk = gradients(cut, rows[i], keys[j])
        of_queries[i], of_keys[j] = add(of_queries[i], dq), add(of_keys[j], dk)

    def step(s, keys, sums):
        of_queries, of_keys = sums[0], _sent_on(axis, sums[1])
        found = [gradients(False, *pair) for pair in _chosen(rows, keys, s, axis)]
        dq, dk = (list(x) for x in zip(*found, strict=True))
        return _put(of_queries, s, axis, dq, False, add), _put(of_keys, s, axis, dk, True, add)

    of_queries, of_keys = _around(axis, keys, step, (tuple(of_queries), tuple(of_keys)))
    of_keys = _sent_on(axis, of_keys)

    def sides(of, gradients):
        return tuple(
            _Side(jax.tree.map(lambda x, d: d.astype(x.dtype), side.arrays, d), None, None)
            for side, d in zip(of, gradients, strict=True)
        )

    return sides(queries, of_queries), sides(keys, of_keys), None


def _tangent(pieces, causal, axis, residuals, tangents):
    if pieces.impl != "xla":
        raise NotImplementedError(KERNEL_REFUSAL)
    ring = functools.partial(_ring.function, pieces, causal, axis)
    return tangent_of(ring, residuals[:3], tangents)


_ring.define(_forward, _backward, _tangent)

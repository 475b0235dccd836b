"""Attention on several devices: rows are split between them, and along `context` the sequence is.

Each row is computed alone, so devices with different rows do not talk. Along `context` a device has
a stretch of each sequence, and there are three ways to what lies in the others:

* **Heads for positions** (Ulysses, Jacobs et al. 2023). An all-to-all gives each device the whole
  sequence and a share of the heads, and another one takes the result back. Whatever an algorithm
  does with a sequence, such as to sort it, it does so within a device.
* **Borders** (`ops.sharding.borders`). An algorithm that sees no further than a `Reach` reads the
  ends of the neighbouring stretches.
* **A ring** (`ops.softmax.ring`). Where many heads would be of zeros, keys and values go round. The
  algorithm has the trait `sequence_shards`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float

from reformax import devices
from reformax.declared import SettingError
from reformax.ops.base import AttentionOp, no_plan
from reformax.ops.calls.heads import repeat_heads, splits_head_groups
from reformax.ops.sharding import borders
from reformax.ops.sharding.shard import Shard

T = TypeVar("T")
STRETCH = Spec(devices.ROWS, devices.CONTEXT)  # [B, t, ...]
HEADS = Spec(devices.ROWS, None, devices.CONTEXT)  # [B, T, n, H]
# What each device makes and reads alone: its first axis is all that is known of it.
OWN = Spec((*devices.ROWS, devices.CONTEXT))


# A ring computes no heads of zeros, and its pieces take up to 1.5 times as long as one call of
# cuDNN's (docs/devices.md).
RING = 1.5


def by_ring(op: AttentionOp, n_heads: int, biased: bool) -> bool:
    """Whether keys and values go round the devices to compute `op`."""
    n = devices.n_stretches()
    filled = -(-n_heads // n) * n
    return n > 1 and op.traits.sequence_shards and not biased and filled >= RING * n_heads


def by_heads(op: AttentionOp, n_heads: int, biased: bool) -> bool:
    """Whether devices trade positions for heads to compute `op`."""
    there = devices.n_stretches() > 1 and op.reach is None
    return there and not by_ring(op, n_heads, biased)


def arrange(op: AttentionOp, qkv: T, biased: bool = False) -> T:
    """Queries, keys and values as `plan` and `attend` read them: `[B, T, M, H]`.

    M is the number of heads N, or where devices trade heads and do not divide them the next
    multiple: heads of zeros follow, which `attend` takes off again.

    Args:
      op: the algorithm.
      qkv: of the layer.
      biased: whether `attend` gets a bias.

    Raises:
      SettingError: the devices cannot share the heads.
    """
    if not by_heads(op, qkv.q.shape[2], biased):
        return qkv
    n = devices.n_stretches()
    if not op.traits.head_shards:
        raise SettingError(
            f"mesh has context={n} and op is {op}, which computes all heads together: use "
            "context=1, or an op whose traits say heads_apart=True"
        )
    n_heads, n_kv_heads = qkv.q.shape[2], qkv.v.shape[2]
    if op.traits.choose_together and splits_head_groups(n, n_heads, n_kv_heads):
        raise SettingError(
            f"mesh has context={n} and op is {op}, whose heads of queries choose together for each "
            f"of {n_kv_heads} heads of keys: expected a multiple of {n}, or as many as of queries"
        )
    if n_heads % n or n_kv_heads % n:  # heads of keys for several heads of queries
        k, v = repeat_heads(qkv.q, qkv.k, qkv.v)
        qkv = qkv._replace(k=k, v=v)

    def filled(x: Array) -> Array:
        if n_heads % n == 0 == x.shape[2] % n:
            return x
        if x.shape[2] % n_heads:
            raise SettingError(
                f"mesh has context={n} and op is {op}, which reads {x.shape[2]} heads for "
                f"{n_heads}: expected a multiple, for each device takes a share of the heads"
            )
        more = -n_heads % n * (x.shape[2] // n_heads)
        return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))

    qkv = jax.tree.map(filled, qkv)
    trade = functools.partial(jax.tree.map, _heads_for_positions)
    return devices.per_shard(trade, (STRETCH,), HEADS)(qkv)


def plan(function: Callable[..., T], op: AttentionOp, n_heads: int, qkv, tokens, params, rng) -> T:
    """`function(qkv, tokens, params, rng)`, an op's plan, on the devices of the mesh.

    Args:
      function: as it is called.
      op: whose plan it is.
      n_heads: N, of the layer.
      qkv: from `arrange`.
      tokens: a tree of arrays `[B, T]`.
      params: the op's weights.
      rng: for `function`, which gets a `Shard` in its place where heads are shared.
    """
    if inspect.unwrap(op.plan) is no_plan:
        return ()
    if not by_heads(op, n_heads, False):
        return devices.by_rows(function, (qkv, tokens), (params, rng))

    def of_heads(qkv, tokens, params, rng):
        return function(qkv, tokens, params, _shard(rng, qkv, n_heads))

    specs = HEADS, Spec(devices.ROWS), Spec(), Spec()
    return devices.per_shard(of_heads, specs, OWN)(qkv, tokens, params, rng)


def attend(
    function: Callable[..., Float[Array, "B T N V"]],
    op: AttentionOp,
    causal: bool,
    n_heads: int,
    qkv,
    plan,
    segment_ids,
    params,
    rng,
    bias: Float[Array, "#B #N #T #S"] | None = None,
) -> Float[Array, "B T N V"]:
    """`function(qkv, plan, segment_ids, params, rng, bias)`, an op's `apply`, likewise."""
    if devices.n_stretches() == 1:
        return devices.by_rows(function, (qkv, plan, segment_ids), (params, rng, bias))

    def of_heads(qkv, plan, segment_ids, params, rng, bias):
        shard = _shard(rng, qkv, n_heads)
        return _positions_for_heads(function(qkv, plan, segment_ids, params, shard, bias))

    def of_stretch(qkv, plan, segment_ids, params, rng, bias):
        def near(q, k, v, segment_ids, shard):
            return function(qkv._replace(q=q, k=k, v=v), plan, segment_ids, params, shard, bias)

        reach = op.reach(causal)
        return borders.attend(near, reach, devices.CONTEXT, *qkv[:3], segment_ids, Shard(rng))

    def of_ring(qkv, plan, segment_ids, params, rng, bias):
        return function(qkv, plan, segment_ids, params, Shard(rng, axis=devices.CONTEXT), bias)

    if by_heads(op, n_heads, bias is not None):
        all_heads = bias is not None and bias.shape[1] == n_heads
        of_bias = Spec(None, devices.CONTEXT) if all_heads else Spec()
        if all_heads:
            more = qkv.q.shape[2] - n_heads
            bias = jnp.pad(bias, ((0, 0), (0, more), (0, 0), (0, 0)))
        region, specs = of_heads, (HEADS, OWN, Spec(devices.ROWS), Spec(), Spec(), of_bias)
    else:
        region = of_stretch if op.reach is not None else of_ring
        specs = STRETCH, OWN, STRETCH, Spec(), Spec(), Spec()
    region = devices.per_shard(region, specs, STRETCH)
    return region(qkv, plan, segment_ids, params, rng, bias)[:, :, :n_heads]


def _shard(rng, qkv, n_heads: int) -> Shard:
    """Which heads a device has."""
    return Shard(rng, head=lax.axis_index(devices.CONTEXT) * qkv.q.shape[2], n_heads=n_heads)


# What goes to one device must lie in one piece. Pieces are made as the side of heads wants them, so
# that the sequence is whole as they come: a trade takes one copy, on the side of positions. With
# heads as pieces it would take one on either side.


def _heads_for_positions(x: Array) -> Array:
    """`[B, t, N, H] -> [B, T, n, H]`."""
    n_batch, length, _, size = x.shape
    n = lax.axis_size(devices.CONTEXT)
    pieces = x.reshape(n_batch, length, n, -1, size).swapaxes(1, 2)
    return _traded(pieces.reshape(n_batch, n * length, -1, size))


def _positions_for_heads(x: Array) -> Array:
    """`[B, T, n, H] -> [B, t, N, H]`."""
    n_batch, length, _, size = x.shape
    n = lax.axis_size(devices.CONTEXT)
    pieces = _traded(x).reshape(n_batch, n, length // n, -1, size)
    return pieces.swapaxes(1, 2).reshape(n_batch, length // n, -1, size)


def _traded(x: Array) -> Array:
    """A stretch of the second axis to each device, and one from each."""
    return lax.all_to_all(x, devices.CONTEXT, split_axis=1, concat_axis=1, tiled=True)

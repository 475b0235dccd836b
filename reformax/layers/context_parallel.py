"""Attention on several devices: rows are split between them, and along `context` the sequence is.

Each row is computed alone, so devices with different rows do not communicate. Along `context` each
device has a shard of each sequence. There are four ways to attend to the other shards:

* **Heads for positions** (Ulysses, Jacobs et al. 2023). An all-to-all gives each device the whole
  sequence and a shard of the heads, and another one takes the result back. An algorithm that sorts
  a sequence, for example, does so within a device.
* **Borders** (`ops.sharding.borders`). An algorithm that sees no further than a `Reach` reads the
  ends of the neighbouring shards.
* **A ring** (`ops.softmax.ring`). Where heads would mostly be padded with zeros, keys and values
  are passed around the devices. The algorithm has shards of the sequence.
* **Gathered keys** (`ops.sharding.queries`). Where all heads choose keys together, or there are too
  few heads of keys to exchange, each device computes its queries, for which the algorithm gathers
  keys and values, or summaries of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Float

from reformax import devices
from reformax.declared import SettingError
from reformax.ops.base import AttentionOp
from reformax.ops.calls.heads import repeat_heads, splits_head_groups
from reformax.ops.decoding.cache import SharedByBatch
from reformax.ops.sharding import borders
from reformax.ops.sharding.shard import Shard

T, U = TypeVar("T"), TypeVar("U")
SEQUENCE_SHARDS = Spec(devices.ROWS, devices.CONTEXT)  # [B, t, ...]
HEAD_SHARDS = Spec(devices.ROWS, None, devices.CONTEXT)  # [B, T, n, H]
# Arrays that each device makes and reads alone: only their first axis is known.
PER_DEVICE = Spec((*devices.ROWS, devices.CONTEXT))


# A ring computes no heads of zeros. Its parts together take up to 1.5 times as long as one call
# of cuDNN (docs/devices.md).
RING = 1.5


Way = Literal["rows", "heads", "borders", "ring", "queries"]


def way_of(op: AttentionOp, n_heads: int, n_kv_heads: int, biased: bool) -> Way:
    """How the devices of the mesh compute `op`: "rows" where each has whole sequences.

    Args:
      op: the algorithm.
      n_heads, n_kv_heads: N and G. Before and after `arrange` they lead to one answer.
      biased: whether it gets a bias.
    """
    n = devices.n_sequence_shards()
    if n == 1:
        return "rows"
    if op.reach(True) is not None:
        return "borders"
    filled = -(-n_heads // n) * n
    if "sequence" in op.shards and not biased and filled >= RING * n_heads:
        return "ring"
    whole_groups = "key heads" in op.shards and not splits_head_groups(n, n_heads, n_kv_heads)
    if "queries" in op.shards and not whole_groups:
        return "queries"
    return "heads"


def arrange(op: AttentionOp, qkv: T, biased: bool = False) -> T:
    """Queries, keys and values as `plan` and `attend` read them: `[B, T, M, H]`.

    M is the number of heads N. Where devices exchange heads and do not divide N, M is the next
    multiple: heads of zeros follow, which `attend` removes.

    Args:
      op: the algorithm.
      qkv: of the layer.
      biased: whether `attend` gets a bias.

    Raises:
      SettingError: the heads cannot be sharded over the devices.
    """
    if way_of(op, qkv.q.shape[2], qkv.v.shape[2], biased) != "heads":
        return qkv
    n = devices.n_sequence_shards()
    if not op.divides_heads:
        raise SettingError(
            f"mesh has context={n} and op is {op}, which computes all heads together: use "
            "context=1, or an op whose shards include heads, such as dense.dense()"
        )
    n_heads, n_kv_heads = qkv.q.shape[2], qkv.v.shape[2]
    if n_kv_heads > n_heads:
        raise SettingError(
            f"mesh has context={n} and n_qk_heads is {n_heads}: devices exchange heads of queries "
            "for positions, use context=1"
        )
    if "key heads" in op.shards and splits_head_groups(n, n_heads, n_kv_heads):
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
                f"{n_heads}: expected a multiple, for each device takes a shard of the heads"
            )
        more = -n_heads % n * (x.shape[2] // n_heads)
        return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))

    qkv = jax.tree.map(filled, qkv)
    trade = functools.partial(jax.tree.map, _heads_for_positions)
    return devices.per_shard(trade, (SEQUENCE_SHARDS,), HEAD_SHARDS)(qkv)


def plan(function: Callable[..., T], op: AttentionOp, n_heads: int, qkv, tokens, params, rng) -> T:
    """`function(qkv, tokens, params, rng)`, an op's plan, on the devices of the mesh.

    Args:
      function: called on each device.
      op: whose plan it is.
      n_heads: N, of the layer.
      qkv: from `arrange`.
      tokens: a tree of arrays `[B, T]`.
      params: the op's weights.
      rng: for `function`, which also gets a `Shard` where heads are sharded.
    """
    if op.plan_needs == "nothing":
        return ()
    way = way_of(op, n_heads, qkv.v.shape[2], False)
    if way == "queries":
        of_shard = functools.partial(function, shard=Shard(axis=devices.CONTEXT))
        specs = SEQUENCE_SHARDS, SEQUENCE_SHARDS, Spec(), Spec()
        return devices.per_shard(of_shard, specs, PER_DEVICE)(qkv, tokens, params, rng)
    if way != "heads":
        return devices.by_rows(function, (qkv, tokens), (params, rng))

    def of_heads(qkv, tokens, params, rng):
        return function(qkv, tokens, params, rng, _shard(qkv, n_heads))

    specs = HEAD_SHARDS, Spec(devices.ROWS), Spec(), Spec()
    return devices.per_shard(of_heads, specs, PER_DEVICE)(qkv, tokens, params, rng)


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
    """`function(qkv, plan, segment_ids, params, rng, bias)`, an op's `apply`, on the devices of the
    mesh.
    """
    way = way_of(op, n_heads, qkv.v.shape[2], bias is not None)
    if way == "rows":
        return devices.by_rows(function, (qkv, plan, segment_ids), (params, rng, bias))

    def of_heads(qkv, plan, segment_ids, params, rng, bias):
        shard = _shard(qkv, n_heads)
        return _positions_for_heads(function(qkv, plan, segment_ids, params, rng, bias, shard))

    def of_shard(qkv, plan, segment_ids, params, rng, bias):
        def near(q, k, v, segment_ids, shard):
            qkv_near = qkv._replace(q=q, k=k, v=v)
            return function(qkv_near, plan, segment_ids, params, rng, bias, shard)

        reach = op.reach(causal)
        return borders.attend(near, reach, devices.CONTEXT, *qkv[:3], segment_ids, Shard())

    def of_sequence(qkv, plan, segment_ids, params, rng, bias):
        return function(qkv, plan, segment_ids, params, rng, bias, Shard(axis=devices.CONTEXT))

    if way == "heads":
        all_heads = bias is not None and bias.shape[1] == n_heads
        of_bias = Spec(None, devices.CONTEXT) if all_heads else Spec()
        if all_heads:
            more = qkv.q.shape[2] - n_heads
            bias = jnp.pad(bias, ((0, 0), (0, more), (0, 0), (0, 0)))
        region = of_heads
        specs = HEAD_SHARDS, PER_DEVICE, Spec(devices.ROWS), Spec(), Spec(), of_bias
    else:
        region = of_shard if way == "borders" else of_sequence
        specs = SEQUENCE_SHARDS, PER_DEVICE, SEQUENCE_SHARDS, Spec(), Spec(), Spec()
    region = devices.per_shard(region, specs, SEQUENCE_SHARDS)
    return region(qkv, plan, segment_ids, params, rng, bias)[:, :, :n_heads]


def cache_specs(op: AttentionOp, cache: T) -> T:
    """How each array of an op's cache lies on the mesh of generation.

    `ops.decoding.reading` says which device has which position of those that are divided.
    """
    divided = devices.n_sequence_shards() > 1 and op.divides_cache

    def of_part(axis: int | None, part):
        over_positions = () if axis is None else (*[None] * (axis - 1), devices.CONTEXT)

        def spec(x):
            if isinstance(x, SharedByBatch):
                return jax.tree.map(lambda _: Spec(), x)
            return Spec(devices.ROWS, *over_positions)

        return jax.tree.map(spec, part, is_leaf=lambda x: isinstance(x, SharedByBatch))

    axes = op.cache_axes(cache) if divided else None
    return jax.tree.map(of_part, axes, cache, is_leaf=lambda x: x is None)


def to_cache(function: Callable[..., T], op: AttentionOp, rows: tuple, whole: tuple) -> T:
    """`function(*rows, *whole)` on the devices of the mesh: an op's cache of whole prompts.

    Raises:
      SettingError: devices would have parts of the cache, which are made by reading in pieces.
    """
    if devices.current() is None:
        return function(*rows, *whole)
    if (n := devices.n_sequence_shards()) > 1 and op.divides_cache:
        raise SettingError(
            f"mesh has context={n} and op is {op}, whose cache devices divide by position: read "
            "the prompt by generation.read, or use context=1"
        )
    specs = cache_specs(op, jax.eval_shape(function, *rows, *whole))
    every = (Spec(devices.ROWS),) * len(rows) + (Spec(),) * len(whole)
    return devices.per_shard(function, every, specs)(*rows, *whole)


def placed_cache(op: AttentionOp, cache: T) -> T:
    """A cache that was made for all devices together, as each has its part.

    Raises:
      SettingError: the cache grows with the text, and the op does not divide it.
    """
    if devices.current() is None:
        return cache
    grows = op.endless_from is None
    if (n := devices.n_sequence_shards()) > 1 and grows and not op.divides_cache:
        raise SettingError(
            f"mesh has context={n} and op is {op}, whose cache is not divided by position: use "
            "context=1, or an op such as flash.flash() or shared_qk.shared_qk()"
        )
    return lax.with_sharding_constraint(cache, cache_specs(op, cache))


def from_cache(
    function: Callable[..., tuple[Array, T, U]], op: AttentionOp, rows: tuple, cache: T, params
) -> tuple[Array, T, U]:
    """`function(*rows, cache, params, shard)` on the devices of the mesh: an op's step or the like.

    It returns the outputs, the cache with the new positions, and anything else of rows. Along
    `context` each device has a part of a cache that the op divides, of which `shard` tells. Other
    caches are whole on each, and so is what is computed of them.
    """
    if devices.current() is None:
        return function(*rows, cache, params, None)
    n, length = devices.n_sequence_shards(), rows[0].q.shape[1]
    shard = Shard(axis=devices.CONTEXT) if n > 1 and op.divides_cache else None
    outs = SEQUENCE_SHARDS if shard is not None and length % n == 0 else Spec(devices.ROWS)
    specs = cache_specs(op, cache)
    call = functools.partial(function, shard=shard)
    every = (Spec(devices.ROWS),) * len(rows)
    call = devices.per_shard(call, (*every, specs, Spec()), (outs, specs, Spec(devices.ROWS)))
    return call(*rows, cache, params)


def _shard(qkv, n_heads: int) -> Shard:
    """Which heads a device has."""
    return Shard(head=lax.axis_index(devices.CONTEXT) * qkv.q.shape[2], n_heads=n_heads)


# An all-to-all sends contiguous blocks. They are laid out as the receiver of heads reads them, so
# that an exchange takes one copy, on the side of positions. Blocks of heads would take two.


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
    """Sends a shard of the second axis to each device, and receives one from each."""
    return lax.all_to_all(x, devices.CONTEXT, split_axis=1, concat_axis=1, tiled=True)

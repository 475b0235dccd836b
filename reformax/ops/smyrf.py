"""Smyrf: balanced clusters of queries and of keys (Daras et al. 2020).

"SMYRF: Efficient Attention using Asymmetric Clustering", sec. 3. Asymmetric transformations make
vectors of queries and keys whose distance is small where their product is large. In each round a
random direction orders the queries and, apart from them, the keys. Both orders are cut into
chunks of one length, the clusters, and the queries of cluster i see the keys of cluster i. Queries
and keys have projections of their own, so a dense model's weights fit without training. Time is
O(n_hashes * T * chunk_len), besides sorting.

Queries and keys may be of two sequences. A query then stands where its hash would stand among those
of the keys (`ops.hashing.meeting`), for clusters of few queries could not be as many as those of
the keys. Such hashes have one scale: they are cosines with a direction, of keys less their mean.
"""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.declared import Bounds, Size
from reformax.ops.asymmetric_lsh import TRAITS, attend, crosses, ratio, two_orders
from reformax.ops.base import AttentionOp, named, no_params
from reformax.ops.calls.dispatch import KERNELS, check_impl
from reformax.ops.decoding.cache import (
    KeyValues,
    Shared,
    add_to_ring,
    attend_to,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.decoding.sorted_order import seen_before
from reformax.ops.hashing import asymmetric
from reformax.ops.hashing.meeting import meeting_orders
from reformax.ops.hashing.sorting import sort_by_bucket
from reformax.ops.softmax.orders import ChunkSizes, Order

# Every round orders the whole sequence twice.
Rounds = Annotated[int, Bounds(1, 1024)]

_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


class Settings(NamedTuple):
    """The hyperparameters of `smyrf`, whose arguments they are."""

    chunk_len: int
    n_hashes: int
    count_once: bool
    attend_self_if_alone: bool
    impl: str

    def check(self) -> None:
        """Raises `ValueError` for an unknown implementation."""
        check_impl(self.impl, *KERNELS)


@named
def smyrf(
    *,
    chunk_len: Size = 64,
    n_hashes: Rounds = 4,
    count_once: bool = False,
    attend_self_if_alone: bool = True,
    impl: str = "auto",
) -> AttentionOp:
    """Attention within balanced clusters of queries and keys.

    It is exact attention over the clusters that the rounds show each query; where one cluster
    covers the length, these are all keys, as in `dense.dense()`. The clusters are those of the
    order by hash, of 20 bits, without the paper's offset and its rounding to buckets (E2LSH), which
    sorting makes needless. M is taken over each segment of a row.

    In a causal call later tokens decide what is in a cluster, and a cluster may hold no key that a
    query may see. A step of decoding computes the last row of attention over the tokens so far.

    Across two sequences, of other lengths or with a pair of segments, clusters are those of the
    keys. A query sees the one in which its hash lies; where a cluster is full, it sees the next.

    Args:
      chunk_len: queries, and keys, in a cluster.
      n_hashes: hashing rounds.
      count_once: False counts a key in each round that shows it, as the paper does when it weighs
        rounds by their softmax's sums; True counts it once however many rounds show it.
      attend_self_if_alone: as in `asymmetric_lsh.asymmetric_lsh`.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 128 or less; `"pallas_interpret"` runs them anywhere, slowly, for tests. `"auto"`
        takes them where they run.

    Raises:
      ValueError: sizes out of range or an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """
    settings = Settings(**locals())
    settings.check()
    return AttentionOp(
        init=no_params,
        plan=functools.partial(_plan, settings),
        apply=functools.partial(_apply, settings),
        traits=TRAITS,
        init_cache=functools.partial(_init_cache, settings),
        step=functools.partial(_step, settings),
        replace_value=replace_in_memory,
    )


def _plan(
    settings: Settings, params, q, k, *, segment_ids, causal, rng, train, length=None
) -> Order | None:
    """The orders of queries and of keys in each round; None where one cluster has every key."""
    del params, causal, train, length
    n_heads, size = q.shape[2:]
    if k.shape[1] <= settings.chunk_len:
        return None
    q, k = lax.stop_gradient((q, k))
    directions = asymmetric.draw_directions(n_heads, size, settings.n_hashes, rng)
    if crosses(q, k, segment_ids):
        hashes = asymmetric.cosines(q, k, directions, segment_ids)
        lengths = q.shape[1], k.shape[1]
        return meeting_orders(*hashes, segment_ids, settings.chunk_len, ratio(*lengths))
    squares, most = asymmetric.lengths(q, k, segment_ids)
    n_pad = -q.shape[1] % settings.chunk_len

    def order(x, squares, last) -> Int[Array, "B N R Tp"]:
        hashes = asymmetric.hashes(
            asymmetric.on_directions(x, directions), squares, most, directions[:, last]
        )
        return sort_by_bucket(hashes, asymmetric.N_HASHES, segment_ids, n_pad).queries

    orders = (order(*of) for of in zip((q, k), squares, (-1, -2), strict=True))
    return two_orders(settings, q, k, *orders)


def _apply(settings: Settings, params, q, k, v, **call):
    del params
    sizes = ChunkSizes(settings.chunk_len, 0, 0)
    return attend(sizes, settings, q, k, v, **call)


# Decoding. C is the capacity.


class Clustered(NamedTuple):
    """The cache of Smyrf; entries of positions without a token are arbitrary."""

    memory: KeyValues  # by position
    parts: tuple[Float[Array, "B N R C"], Float[Array, "B N R C"]]  # of queries and of keys
    squares: tuple[Float[Array, "B N C"], Float[Array, "B N C"]]
    directions: Shared  # [N, H + 2, R]


def _init_cache(settings: Settings, params, q, k, v, *, plan, lengths, capacity, rng) -> Clustered:
    del params, plan  # a plan has no hashes
    directions = asymmetric.draw_directions(q.shape[2], q.shape[3], settings.n_hashes, rng)

    def held(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, capacity - q.shape[1])])

    return Clustered(
        fill_ring(k, v, lengths, capacity),
        tuple(held(asymmetric.on_directions(x, directions)) for x in (q, k)),
        tuple(held(asymmetric.squared_lengths(x)) for x in (q, k)),
        Shared(directions),
    )


def _step(
    settings: Settings, params, q, k, v, cache: Clustered, *, position: Int[Array, " B"]
) -> tuple[Float[Array, "B 1 N V"], Clustered]:
    del params
    memory, parts, squares, (directions,) = cache
    memory = add_to_ring(memory, k, v, position)
    row = jnp.arange(q.shape[0])
    parts = tuple(
        x.at[row, :, :, position].set(asymmetric.on_directions(new, directions)[..., 0])
        for x, new in zip(parts, (q, k), strict=True)
    )
    squares = tuple(
        x.at[row, :, position].set(asymmetric.squared_lengths(new)[..., 0])
        for x, new in zip(squares, (q, k), strict=True)
    )
    capacity = memory.keys.shape[2]
    exists = jnp.arange(capacity)[None, None] <= position[:, None, None]
    most = sum(
        asymmetric.largest_of_segment(jnp.where(exists, x, 0), segment_ids=None) for x in squares
    )
    of_query, of_key = (
        jnp.where(exists[:, :, None], asymmetric.hashes(*x, most, last), asymmetric.N_HASHES)
        for *x, last in zip(parts, squares, (directions[:, -1], directions[:, -2]), strict=True)
    )
    # Equal hashes stand by position, and the newest stands behind them.
    now = position[:, None, None, None]
    before = (of_query <= _take(of_query, now, axis=-1)) & exists[:, :, None]
    place = before.sum(axis=-1, keepdims=True) - 1
    n_seen = min(settings.chunk_len, capacity)
    place = place // settings.chunk_len * settings.chunk_len
    place = place + jnp.arange(n_seen)[None, None, None]
    order = sort_by_bucket(of_key, asymmetric.N_HASHES + 1, None, 0).queries
    seen = _take(order, jnp.minimum(place, capacity - 1), axis=-1)
    mask = place <= now
    if settings.count_once:
        mask = mask & ~seen_before(jnp.where(mask, seen, -1))
    index = seen.reshape(*seen.shape[:2], -1)
    out = attend_to(q, *memory, mask.reshape(index.shape), settings.impl, index=index)
    return out, Clustered(memory, parts, squares, Shared(directions))

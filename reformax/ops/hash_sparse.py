"""Hash-sparse flash attention: a query sees every key of its hash bucket (Pagliardini et al. 2023).

"Faster Causal Attention Over Large Sequences Through Sparse Flash Attention", sec. 3.2. Queries and
keys are sorted by bucket, and attention visits the tiles of the sorted arrays whose buckets meet.
Buckets have any size: a query sees all keys of its bucket, without chunks. In a causal call it sees
those up to its position. Time is proportional to the pairs of one bucket, T^2 / n_buckets for equal
buckets and T^2 at worst; memory is linear in T.

Letters besides those of `reformax.ops.base`: X examples with their heads, B N of them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.declared import Bounds, SettingError
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    SharedByBatch,
    add_to_ring,
    attend_to,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.hashing import sorted_groups
from reformax.ops.hashing.angular import MAX_FACTOR, draw_rotations, hash_by
from reformax.ops.hashing.sorted_groups import SortedSequence
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.softmax import block_kernels, tiles
from reformax.ops.softmax.block_lists import BlockInputs, SortedLayout
from reformax.ops.softmax.dropout import dropped_self_values
from reformax.ops.softmax.orders import inverse_permutation

Buckets = Annotated[int, Bounds(2, MAX_FACTOR)]
# Queries, and keys, of a tile. A larger tile has more pairs of different buckets.
TILE = 128


class HashSparsePlan(NamedTuple):
    """The orders of queries and of keys by bucket; shared queries and keys have one order."""

    queries: SortedSequence  # [B, N, T]
    keys: SortedSequence | None

    @property
    def key_order(self) -> SortedSequence:
        """The order of the keys."""
        return self.queries if self.keys is None else self.keys


@options
class hash_sparse(AttentionOp):
    """Exact attention to the keys of a query's bucket.

    Buckets come from angular hashing (Andoni et al. 2015), with one hash for each head. It depends
    on the directions of queries and keys, and not on their lengths. Later tokens do not change what
    a position sees, and a step of decoding computes the same function as one call.

    Args:
      n_buckets: buckets, an even number; 16 in most of the paper's runs.
      shared_qk: whether queries, length-normalised, are also the keys, as in LSH attention. A
        position then sees itself only if it sees nothing else.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        its output zeros.
      impl: `"xla"` runs everywhere, in array operations, head by head. `"pallas"` is the kernel of
        block-sparse attention, and one that hashes, for NVIDIA GPUs of Ampere or later and heads of
        256 or less. `"auto"` takes them where they compute the same function.

    Raises:
      ValueError: a number of buckets that is odd or out of range, an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    n_buckets: Buckets = 16
    shared_qk: bool = False
    attend_self_if_alone: bool = True
    impl: str = "auto"

    plan_needs = "rng"
    shards = ("heads",)
    chooses_keys = True
    _impls = KERNELS
    _replace_value = staticmethod(replace_in_memory)

    def _check(self) -> None:
        if self.n_buckets % 2:
            raise SettingError(f"n_buckets is {self.n_buckets}: expected an even number")

    def _buckets(self, rotations, x: Float[Array, "B T N H"]) -> Int[Array, "B N T"]:
        return hash_by(rotations, x, (self.n_buckets,), self.impl)[:, :, 0]

    def _plan(self, call, params, q, k) -> HashSparsePlan:
        """The orders of queries and of keys by segment, bucket and position."""
        rotations = draw_rotations(q, (self.n_buckets,), 1, call.rng, call.shard)

        def order(x: Float[Array, "B T N H"]) -> SortedSequence:
            buckets = self._buckets(rotations, lax.stop_gradient(x))
            return sorted_groups.sort(buckets, self.n_buckets, call.segment_ids)

        return HashSparsePlan(order(q), None if self.shared_qk else order(k))

    def _apply(self, call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        n_batch, length, n_heads, _ = q.shape
        causal, dropout, seed = call.causal, call.dropout, call.seed
        k = self.keys_of(q, k)
        queries, keys = plan.queries, plan.key_order
        sides = (q, queries), (k, keys), (v, keys)
        flat = queries.folded(), keys.folded()
        groups, orders = ([getattr(y, z) for y in flat] for z in ("group", "position"))
        x = BlockInputs(*(_in_order(*side) for side in sides), *groups, seed, *orders)
        options = dict(exclude_self=self.shared_qk, n_folded=n_heads)

        def in_arrays() -> Float[Array, "X T 1 V"]:
            tiling = tiles.tiling_of(call, x.q, x.k, TILE, TILE, **options)
            visits = sorted_groups.visits(tiling[:2], causal, *flat)
            return tiles.attend(tiles.forward, tiling, x, visits)

        def in_kernels(interpret: bool) -> Float[Array, "X T 1 V"]:
            layout = SortedLayout(length, length, causal, dropout, call.logits, **options)
            return block_kernels.kernels().attend(layout, interpret, x)[0]

        obstacles = kernel_obstacles(q, k, v, call.logits)
        out = compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))
        out = out.reshape(n_batch, n_heads, length, -1)
        slot = inverse_permutation(queries.position)
        out = jnp.take_along_axis(out, slot[..., None], axis=2, mode="promise_in_bounds")
        out = jnp.swapaxes(out, 1, 2)
        if not self.attend_self_if_alone:
            return out
        alone = sorted_groups.sees_no_key(queries, plan.keys, causal)
        alone = jnp.swapaxes(jnp.take_along_axis(alone, slot, axis=2), 1, 2)
        return jnp.where(alone[..., None], dropped_self_values(v, dropout, seed), out)

    def _init_cache(self, call, params, q, k, v, plan) -> HashSparseCache:
        # Only orders, which decoding does not use.
        rotations = draw_rotations(q, (self.n_buckets,), 1, call.rng)
        buckets = self._buckets(rotations, q if self.shared_qk else k)
        return HashSparseCache(
            fill_ring(self.keys_of(q, k), v, call.lengths, call.length),
            jnp.pad(buckets, ((0, 0), (0, 0), (0, call.length - q.shape[1]))),
            SharedByBatch(rotations),
        )

    def _step(self, call, params, q, k, v, cache: HashSparseCache):
        position, (memory, buckets, (rotations,)) = call.position, cache
        query_bucket = self._buckets(rotations, q)
        key_bucket = query_bucket if self.shared_qk else self._buckets(rotations, k)
        memory = add_to_ring(memory, self.keys_of(q, k), v, position)
        buckets = buckets.at[jnp.arange(q.shape[0]), :, position].set(key_bucket[..., 0])
        key = jnp.arange(buckets.shape[2], dtype=jnp.int32)[None, None]
        newest = position[:, None, None]
        rule = Visibility(causal=True, exclude_self=self.shared_qk)
        mask = (buckets == query_bucket) & rule.sees(Side(newest), Side(key))
        alone = v if self.attend_self_if_alone else None
        out = attend_to(call, q, *memory, mask, self.impl, alone)
        return out, HashSparseCache(memory, buckets, SharedByBatch(rotations))


def _in_order(x: Float[Array, "B T N H"], order: SortedSequence) -> Float[Array, "X T 1 H"]:
    """The vectors of each head, sorted by that head's order."""
    x = jnp.swapaxes(x, 1, 2)
    x = jnp.take_along_axis(x, order.position[..., None], axis=2, mode="promise_in_bounds")
    return x.reshape(-1, x.shape[2], 1, x.shape[3])


# Decoding. C is the capacity.


class HashSparseCache(NamedTuple):
    """Keys and values by position, and the buckets of the keys."""

    memory: KeyValues
    buckets: Int[Array, "B N C"]
    rotations: SharedByBatch  # [N, H, 1, F]

"""Smyrf: balanced clusters of queries and of keys (Daras et al. 2020).

"SMYRF: Efficient Attention using Asymmetric Clustering", sec. 3. Asymmetric transformations map
queries and keys to vectors whose distance is small where their product is large. Each hash sorts
queries and keys, separately, along a random direction. Both orders are cut into chunks of one
length, the clusters. The queries of cluster i see the keys of cluster i. Queries and keys have
separate projections, so a dense model's weights fit without training. Time is
O(n_hashes * T * chunk_len), besides sorting. The algorithm is `asymmetric_lsh.SortedByHash`; this
file is its hash.

Queries and keys may be of two sequences. A query's slot is then where its hash would be among those
of the keys (`ops.hashing.alignment`), because a small number of queries cannot fill as many
clusters as the keys do. Such hashes have one scale: cosines with a direction, of keys minus their
mean.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.asymmetric_lsh import HashCodes, QueryKeyHash, SortedByHash
from reformax.ops.base import options
from reformax.ops.calls.call import Call
from reformax.ops.decoding.cache import SharedByBatch
from reformax.ops.hashing import asymmetric
from reformax.ops.hashing.sorting import sort_by_bucket, take_last
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.softmax.orders import ChunkSizes


@options
class smyrf(SortedByHash):
    """Attention within balanced clusters of queries and keys.

    It is exact attention over the union of a query's clusters, one for each hash. Where one cluster
    covers the length, this is `dense.dense()`. Clusters are cut from the order by hash, of 20 bits.
    The paper's offset and rounding to buckets (E2LSH) are left out, because sorting replaces them.
    M, which bounds the lengths of vectors, is taken over each segment of a row.

    In a causal call later tokens decide what is in a cluster, and a cluster may hold no key that a
    query may see. A step of decoding computes the last row of attention over the tokens so far.

    Across two sequences, of other lengths or with a pair of segments, clusters are those of the
    keys. A query sees the one in which its hash lies; where a cluster is full, it sees the next.

    Args:
      chunk_len: queries, and keys, in a cluster.
      n_hashes: hashes.
      count_once: False counts a key once for each hash whose cluster has it, as the paper does when
        it weighs hashes by their softmax's sums; True counts it once in all.
      attend_self_if_alone: as in `asymmetric_lsh.asymmetric_lsh`.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 256 or less. `"auto"` takes them where they run.

    Raises:
      ValueError: sizes out of range or an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """

    count_once: bool = False

    @property
    def _hashing(self) -> QueryKeyHash:
        return AsymmetricHash(self.n_hashes)

    @property
    def _chunks(self) -> ChunkSizes:
        return ChunkSizes(self.chunk_len, 0, 0)


# Decoding. C is the capacity.


class SmyrfState(NamedTuple):
    """The decoding state; entries of positions without a token are arbitrary."""

    products: tuple[Float[Array, "B N R C"], Float[Array, "B N R C"]]  # of queries and of keys
    squares: tuple[Float[Array, "B N C"], Float[Array, "B N C"]]
    directions: SharedByBatch  # [N, H + 2, R]


class AsymmetricHash(NamedTuple):
    """The `QueryKeyHash` of `smyrf`."""

    n_hashes: int

    def codes(self, call: Call, q, k, cross: bool) -> HashCodes:
        segment_ids, sizes = call.segment_ids, (*q.shape[2:], self.n_hashes)
        directions = asymmetric.draw_directions(*sizes, call.rng, call.shard)
        if cross:
            cosines = asymmetric.cosines(q, k, directions, segment_ids, call.one_segment)
            return HashCodes(*cosines, asymmetric.N_CODES)
        squares, most = asymmetric.lengths(q, k, segment_ids, call.one_segment)
        of_each = (
            asymmetric.hashes(
                asymmetric.on_directions(x, directions), of_x, most, directions[:, last]
            )
            for x, of_x, last in zip((q, k), squares, (-1, -2), strict=True)
        )
        return HashCodes(*of_each, asymmetric.N_CODES)

    def start(self, call: Call, q, k) -> SmyrfState:
        directions = asymmetric.draw_directions(*q.shape[2:], self.n_hashes, call.rng)

        def padded(x):
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, call.length - q.shape[1])])

        return SmyrfState(
            tuple(padded(asymmetric.on_directions(x, directions)) for x in (q, k)),
            tuple(padded(asymmetric.squared_lengths(x)) for x in (q, k)),
            SharedByBatch(directions),
        )

    def advance(self, state: SmyrfState, q, k, *, position, capacity):
        products, squares, (directions,) = state
        row = jnp.arange(q.shape[0])
        products = tuple(
            x.at[row, :, :, position].set(asymmetric.on_directions(new, directions)[..., 0])
            for x, new in zip(products, (q, k), strict=True)
        )
        squares = tuple(
            x.at[row, :, position].set(asymmetric.squared_lengths(new)[..., 0])
            for x, new in zip(squares, (q, k), strict=True)
        )
        so_far = Side(jnp.arange(capacity)[None, None])
        exists = CAUSAL.sees(Side(position[:, None, None]), so_far)
        # M may grow with every position, and all hashes change with it.
        most = sum(
            asymmetric.largest_of_segment(jnp.where(exists, x, 0), segment_ids=None)
            for x in squares
        )
        of_query, of_key = (
            jnp.where(exists[:, :, None], asymmetric.hashes(*x, most, last), asymmetric.N_CODES)
            for *x, last in zip(
                products, squares, (directions[:, -1], directions[:, -2]), strict=True
            )
        )
        # Equal hashes are sorted by position, so the newest query comes last.
        newest = take_last(of_query, position[:, None, None, None])
        up_to = (of_query <= newest) & exists[:, :, None]
        query_slot = up_to.sum(axis=-1, keepdims=True) - 1
        order = sort_by_bucket(of_key, asymmetric.N_CODES + 1, None, 0).query_positions
        return SmyrfState(products, squares, SharedByBatch(directions)), order, query_slot

"""Candidates: the keys whose scores an indexer computes, where it does not compute all.

The indexer scores the candidates exactly, so that candidates that cover all keys leave its choice
as it is. Later tokens change no query's candidates in a causal call.

Letters besides those of `reformax.ops.base`: J index heads of size D, Q queries of a chunk, M
candidates of a query, C blocks, L positions of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import SettingError, Size
from reformax.ops.calls.options import Options, options
from reformax.ops.decoding.cache import SharedByBatch
from reformax.ops.hashing.angular import auto_buckets, bucket_factors, draw_rotations, hash_by
from reformax.ops.hashing.centring import centred
from reformax.ops.hashing.sorting import sort_by_bucket
from reformax.ops.indexing.learning import divergence
from reformax.ops.indexing.pooling import pooled_blocks
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import IndexQueries, Score, scores, scores_of_gathered
from reformax.ops.indexing.streaming import best_keys
from reformax.ops.masking.contiguous import ends_of_segment
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import CAUSAL, EARLIER_BLOCKS, Side, Visibility, is_token
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.query_chunks import by_chunks, in_blocks, join_chunks
from reformax.ops.softmax.online import masked_softmax


class IndexedKeys(NamedTuple):
    """The keys of a call as its indexer reads them."""

    keys: Float[Array, "B S D"]
    segment_ids: Int[Array, "B S"] | None
    score: Score
    causal: bool
    length: int  # that settings depend on
    rng: PRNGKeyArray | None
    params: Any = ()  # the weights of the candidates

    @property
    def ids(self) -> Int[Array, "B S"]:
        """The segments."""
        return ids_or_ones(self.segment_ids, self.keys)


class QueryChunk(NamedTuple):
    """Some queries: their vectors, positions and segments."""

    index: IndexQueries
    position: Int[Array, "#B Q"]
    ids: Int[Array, "B Q"]


@options
class Candidates(Options):
    """A way to find candidates: `prepare` reads all keys once, `of` finds those of some queries.

    Attributes:
      draws: whether it draws at random, and needs an rng.
      learns: whether it has weights, from `init`, and a loss, `losses`.
    """

    draws: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def init(self, rng: PRNGKeyArray, size: int) -> dict[str, Array]:
        """The weights, for index vectors of so many features."""
        del rng, size
        return {}

    def losses(self, x: IndexedKeys, queries: QueryChunk) -> Float[Array, "B Q"]:
        """What `learns`: a loss of each query, with a gradient of the weights alone."""
        raise NotImplementedError

    def prepare(self, x: IndexedKeys) -> Any:
        """What `of` reads of the keys."""
        raise NotImplementedError

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        """Numbers in memory for each query, of so many searched vectors, until it is scored.

        Of them `n_each` are of each candidate.
        """
        raise NotImplementedError

    def of(self, prepared: Any, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        """The positions of the candidates, in any order, maybe several times; -1 is none."""
        raise NotImplementedError

    def of_all(
        self, prepared: Any, x: IndexedKeys, index: IndexQueries, interpret: bool
    ) -> Int[Array, "B T M"] | None:
        """`of` for the queries of all positions in kernels; None where there are none."""
        del prepared, x, index, interpret

    # Decoding. The keys are the cache's, of C positions, and all queries are causal.

    def start(self, x: IndexedKeys) -> Any:
        """The state after the tokens of each row, which are the positions of segment 1."""
        raise NotImplementedError

    def advance(
        self, state: Any, x: IndexedKeys, key: Float[Array, "B 1 D"], position: Int[Array, " B"]
    ) -> Any:
        """The state with the key of one more position."""
        raise NotImplementedError

    def of_newest(self, state: Any, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        """`of` for one query a row."""
        raise NotImplementedError


# Blocks


class Level(NamedTuple):
    """The blocks of one size: the mean of a block's keys, and the segment that it is over."""

    means: Float[Array, "B C D"]
    ids: Int[Array, "B C"]


@options
class Pooled(Candidates):
    """The keys of the blocks whose mean keys have the highest scores, from coarse blocks to fine.

    HISA (arXiv 2603.28458) has one size. With several, a query scores all blocks of the first, and
    of each next size those within the blocks that it kept. It always keeps its own block, of each
    size, and the first and the last block that reach into its segment: their means are over a part
    of them. Segments are contiguous; of others, a block's mean is over the segment of its last
    token, and other segments do not find it.

    Args:
      block_sizes: positions of a block, each a multiple of the next; the paper has 128.
      n_blocks: blocks that a query keeps of each size, besides those that it always keeps.

    Time is `T^2 / block_sizes[0]` mean scores, and `T n_blocks` times the ratios of the sizes and
    the last size.
    """

    block_sizes: Sequence[Size] = (128,)
    n_blocks: Size = 64

    def __post_init__(self):
        super().__post_init__()
        sizes = tuple(self.block_sizes)
        object.__setattr__(self, "block_sizes", sizes)
        if not sizes or any(a % b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise SettingError(
                f"block_sizes is {sizes}: expected at least one size, each a multiple of the next"
            )

    def prepare(self, x: IndexedKeys) -> PooledKeys:
        levels = []
        for size in self.block_sizes:
            ids, means = pooled_blocks(x.keys[:, :, None], x.ids, size)
            levels.append(Level(means[:, :, 0], ids))
        return PooledKeys(tuple(levels), None if x.causal else ends_of_segment(x.ids))

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        size_above, n_most = x.keys.shape[1], 0
        n_kept, size = 1, x.keys.shape[1]
        for size in self.block_sizes:
            n_blocks = n_kept * -(-size_above // size)
            keys = 0 if size_above == x.keys.shape[1] else x.keys.shape[2]
            n_most = max(n_most, n_blocks * (n_searched + 1 + keys))
            n_kept, size_above = min(self.n_blocks, n_blocks) + 3, size
        return max(n_most, n_kept * size * n_each)

    def of(self, prepared: PooledKeys, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        n_batch, n_queries = queries.ids.shape
        always = self._kept_always(prepared, queries)
        kept, above = None, 1
        for size, level in zip(self.block_sizes, prepared.levels, strict=True):
            n_blocks = level.means.shape[1]
            if kept is None:
                block = jnp.arange(n_blocks, dtype=jnp.int32)[None, None]
                ids = level.ids[:, None]
                mean_scores = scores(x.score, queries.index, level.means)
            else:
                child = jnp.arange(above // size, dtype=jnp.int32)[None, None, None]
                block = jnp.where(kept < 0, -above, kept)[..., None] * (above // size) + child
                block = block.reshape(n_batch, n_queries, -1)
                at = jnp.clip(block, 0, n_blocks - 1)
                means, ids = (rows_at(y, at) for y in level)
                mean_scores = scores_of_gathered(x.score, queries.index, means)
            exists = (block >= 0) & (block < n_blocks)
            of_query = Side(queries.position[..., None] // size, queries.ids[..., None])
            rule = EARLIER_BLOCKS if x.causal else Visibility()
            ends = without_repeats(always // size)
            allowed = rule.sees(of_query, Side(block, ids, exists=exists))
            allowed &= (block[..., None] != ends[..., None, :]).all(axis=-1)
            best = best_of(mean_scores, allowed, min(self.n_blocks, mean_scores.shape[-1]))
            block = jnp.broadcast_to(block, mean_scores.shape)
            chosen = jnp.take_along_axis(block, jnp.maximum(best, 0), axis=-1)
            kept = jnp.concatenate([ends, jnp.where(best < 0, -1, chosen)], axis=-1)
            kept = jnp.sort(kept, axis=-1)  # of equal scores the first block within is kept next
            above = size
        within = jnp.arange(above, dtype=jnp.int32)[None, None, None]
        position = jnp.where(kept[..., None] < 0, -1, kept[..., None] * above + within)
        return position.reshape(n_batch, n_queries, -1)

    def start(self, x: IndexedKeys) -> Float[Array, "B C D"]:
        """The sum of the keys of each of the smallest blocks."""
        keys = jnp.where(is_token(x.ids)[..., None], x.keys, 0)
        return in_blocks(keys, self.block_sizes[-1]).sum(axis=2)

    def advance(self, state, x: IndexedKeys, key, position) -> Float[Array, "B C D"]:
        del x
        row = jnp.arange(state.shape[0])
        return state.at[row, position // self.block_sizes[-1]].add(key[:, 0])

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        levels = []
        for size in self.block_sizes:
            sums = in_blocks(state, size // self.block_sizes[-1]).sum(axis=2)
            levels.append(Level(sums / size, jnp.ones(sums.shape[:2], jnp.int32)))
        return self.of(PooledKeys(tuple(levels), None), x, queries)

    def _kept_always(self, prepared: PooledKeys, queries: QueryChunk) -> Int[Array, "B Q A"]:
        """Positions whose blocks a query always keeps: its own, and the ends of its segment.

        A causal query needs no ends: the mean of a block before its own one is over the segment of
        the block's last token, which is the query's.
        """
        own = jnp.broadcast_to(queries.position, queries.ids.shape)[..., None]
        if prepared.ends is None:
            return own
        ends = (x[:, queries.position[0]][..., None] for x in prepared.ends)
        return jnp.concatenate([own, *ends], axis=-1)


class PooledKeys(NamedTuple):
    """The blocks of each size, and each position's first and last one of its segment."""

    levels: tuple[Level, ...]
    ends: tuple[Int[Array, "B S"], Int[Array, "B S"]] | None


# Hash buckets


@options
class Hashed(Candidates):
    """The keys of a query's hash buckets.

    Angular hashes (Andoni et al. 2015) of the searched vectors and of the keys: with the score
    "product" of one vector of a query, with "relu" of each index head, because a sum of ReLUs is no
    inner product. Keys are sorted by bucket and position. The candidates are those of the query's
    bucket that are the nearest before the query, in a call that is not causal also after it.

    Args:
      n_hashes: hashes of each vector. More of them miss fewer keys.
      n_buckets: even, or even factors of the number; None: about two buckets to `n_nearest` keys.
      n_nearest: keys of a bucket.
      centre: whether the mean of the earlier keys is subtracted from a key before it is hashed. The
        order of a query's products stays. Use it where all keys point to one side.

    Time is `T n_hashes` times the size of the hash, and `n_nearest` scores.
    """

    n_hashes: Size = 4
    n_buckets: Size | Sequence[Size] | None = None
    n_nearest: Size = 64
    centre: bool = True

    draws: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.n_buckets is not None:
            object.__setattr__(self, "n_buckets", bucket_factors(self.n_buckets))

    def rotations(self, x: IndexedKeys) -> Float[Array, "1 D R F"]:
        """The rotations of all hashes, which queries and keys share."""
        return draw_rotations(x.keys[:, :, None], self._factors(x), self.n_hashes, x.rng)

    def _factors(self, x: IndexedKeys) -> tuple[int, ...]:
        return self.n_buckets or auto_buckets(x.length, self.n_nearest)

    def codes(
        self, rotations: Float[Array, "1 D R F"], x: IndexedKeys, vectors: Float[Array, "B T J D"]
    ) -> Int[Array, "B J R T"]:
        """The buckets of vectors."""
        rotations = jnp.broadcast_to(rotations, (vectors.shape[2], *rotations.shape[1:]))
        return hash_by(rotations, vectors, self._factors(x), "xla")

    def prepare(self, x: IndexedKeys) -> HashedKeys:
        rotations = self.rotations(x)
        keys = tokens_only(x.keys[:, :, None], x.ids)  # sums multiply other segments by 0
        if self.centre:
            keys = centred(keys, x.segment_ids, x.causal)
        codes = self.codes(rotations, x, keys)
        n_buckets = math.prod(self._factors(x))
        return HashedKeys(rotations, _sorted(codes, n_buckets, x))

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        n_codes = n_searched * self.n_hashes
        n_found = n_codes * min(self.n_nearest, x.keys.shape[1])
        return n_codes * sum(self._factors(x)) // 2 + n_found * n_each

    def of(self, prepared: HashedKeys, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        codes = self.codes(prepared.rotations, x, queries.index.searched(x.score))
        return _nearest_of_code(prepared.sorted, x, codes, queries, self.n_nearest)

    def start(self, x: IndexedKeys) -> HashedState:
        rotations = self.rotations(x)
        keys = jnp.where(is_token(x.ids)[..., None], x.keys, 0)
        hashed = keys[:, :, None]
        if self.centre:
            hashed = centred(hashed, None, causal=True)
        codes = self.codes(rotations, x, hashed)[:, 0]
        return HashedState(codes, keys.sum(axis=1), SharedByBatch(rotations))

    def advance(self, state: HashedState, x: IndexedKeys, key, position) -> HashedState:
        codes, total, (rotations,) = state
        n_before = jnp.maximum(position, 1)[:, None, None].astype(key.dtype)
        hashed = key - total[:, None] / n_before if self.centre else key
        code = self.codes(rotations, x, hashed[:, :, None])[:, 0, :, 0]
        codes = codes.at[jnp.arange(len(position)), :, position].set(code)
        return HashedState(codes, total + key[:, 0], state.rotations)

    def of_newest(self, state: HashedState, x: IndexedKeys, queries: QueryChunk):
        codes = self.codes(state.rotations.value, x, queries.index.searched(x.score))
        return _newest_of_code(state.codes, codes, queries, self.n_nearest)


class HashedState(NamedTuple):
    """The keys' buckets by position, the sum of the keys, and the rotations."""

    codes: Int[Array, "B R C"]
    total: Float[Array, "B D"]
    rotations: SharedByBatch  # [1, D, R, F]


class HashedKeys(NamedTuple):
    """The rotations, and the keys in the order of buckets."""

    rotations: Float[Array, "1 D R F"]
    sorted: SortedKeys


# Clusters


@options
class Clustered(Candidates):
    """The keys of the clusters whose centres have the highest scores.

    Every `stride`-th key is a centre, as it is: means of clusters, such as those of k-means, would
    hold later tokens. A key belongs to the nearest centre up to itself in its segment; those before
    the first centre of their segment are a cluster that all its queries search. Of a cluster the
    candidates are the nearest before the query, in a call that is not causal also after it.

    Args:
      stride: positions from a centre to the next.
      n_clusters: clusters that a query searches.
      n_nearest: keys of a cluster.

    Time is `2 T^2 / stride` products of small vectors, and `T n_clusters n_nearest` scores.
    """

    stride: Size = 128
    n_clusters: Size = 8
    n_nearest: Size = 256

    def prepare(self, x: IndexedKeys) -> ClusteredKeys:
        codes = self._codes(x)
        n_centres = -(-x.keys.shape[1] // self.stride)
        firsts = ends_of_segment(x.ids)[0]
        return ClusteredKeys(_sorted(codes[:, None, None], n_centres, x), firsts // self.stride)

    def _codes(self, x: IndexedKeys) -> Int[Array, "B S"]:
        """The number of each key's centre."""
        length, (centres, of_centre) = x.keys.shape[1], self._centres(x)
        keys = tokens_only(x.keys[:, :, None], x.ids)[:, :, 0]
        firsts = ends_of_segment(x.ids)[0] // self.stride

        def nearest(keys, position, ids, first):
            key = Side(position[..., None], ids[..., None])
            found = best_of(_nearness(keys, centres), self._rule(x).sees(key, of_centre), 1)[..., 0]
            return jnp.where(found < 0, first, found)

        n_seen = 3 * centres.shape[1]
        arrays = keys, jnp.arange(length, dtype=jnp.int32)[None], x.ids, firsts
        return join_chunks(by_chunks(nearest, n_seen, *arrays), length)

    def _rule(self, x: IndexedKeys) -> Visibility:
        """Which centres a key, or a query, has."""
        return Visibility(x.causal)

    def _centres(self, x: IndexedKeys) -> tuple[Float[Array, "B C D"], Side]:
        centres = tokens_only(x.keys[:, :, None], x.ids)[:, :: self.stride, 0]
        position = jnp.arange(centres.shape[1], dtype=jnp.int32) * self.stride
        return centres, Side(position[None, None], x.ids[:, None, :: self.stride])

    def _searched(self, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B K 1 Q"]:
        """The clusters that the queries search; -1 is none."""
        centres, of_centre = self._centres(x)
        query = Side(queries.position[..., None], queries.ids[..., None])
        found = scores(x.score, queries.index, centres)
        allowed = self._rule(x).sees(query, of_centre)
        best = best_of(found, allowed, min(self.n_clusters, centres.shape[1]))
        return jnp.moveaxis(best, 2, 1)[:, :, None]

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        n_centres = -(-x.keys.shape[1] // self.stride)
        n_nearest = min(self.n_nearest, x.keys.shape[1])
        n_clusters = min(self.n_clusters, n_centres) + 1
        return n_centres * (n_searched + 2) + n_clusters * n_nearest * n_each

    def of(self, prepared: ClusteredKeys, x: IndexedKeys, queries: QueryChunk):
        own = prepared.firsts[:, queries.position[0]][:, None, None]
        codes = jnp.concatenate([self._searched(x, queries), own], axis=1)
        return _nearest_of_code(prepared.sorted, x, codes, queries, self.n_nearest)

    def start(self, x: IndexedKeys) -> Int[Array, "B C"]:
        return self._codes(x)

    def advance(self, state, x: IndexedKeys, key, position) -> Int[Array, "B C"]:
        centres, of_centre = self._centres(x)
        allowed = CAUSAL.sees(Side(position[:, None, None]), Side(of_centre.position))
        code = best_of(_nearness(key, centres), allowed, 1)[:, 0, 0]
        return state.at[jnp.arange(len(position)), position].set(code)

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        codes = self._searched(x, queries)
        codes = jnp.concatenate([codes, jnp.zeros_like(codes[:, :1])], axis=1)  # the first cluster
        return _newest_of_code(state[:, None], codes, queries, self.n_nearest)


class ClusteredKeys(NamedTuple):
    """The keys in the order of clusters, and the cluster of each position's segment's first one."""

    sorted: SortedKeys
    firsts: Int[Array, "B S"]


def _nearness(keys: Float[Array, "B Q D"], centres: Float[Array, "B C D"]) -> Array:
    """What is larger the smaller the distance from a key to a centre is, `[B, Q, C]`."""
    half_squares = jnp.einsum("bcd,bcd->bc", centres, centres)[:, None] / 2
    return jnp.einsum("bqd,bcd->bqc", keys, centres) - half_squares


# Learnt codes


@options
class Coded(Candidates):
    """The keys whose codes have the highest scores: signs of a learnt projection.

    HATA (arXiv 2506.02572) has codes of a frozen model's queries and keys, for decoding. Here those
    of index vectors are compared as the vectors are, by the score of the indexer, and they learn by
    the indexer's own loss: the divergence of the softmax of the codes' scores, times a learnt
    scale, from that of the scores, over all keys of some queries. The gradient of a sign is that of
    a hyperbolic tangent. At first the projection is random, and codes are alike by the angle.

    Weights: `projection [D, n_bits]` and `scale []`.

    Args:
      n_bits: the length of a code.
      n_best: candidates of a query.

    Time is that of scores of `n_bits` signs for all keys, and of `T n_best` exact ones.
    """

    n_bits: Size = 128
    n_best: Size = 1024

    learns: ClassVar[bool] = True

    def init(self, rng: PRNGKeyArray, size: int) -> dict[str, Array]:
        projection = jax.random.normal(rng, (size, self.n_bits)) / math.sqrt(size)
        return {"projection": projection, "scale": jnp.asarray(math.sqrt(size), jnp.float32)}

    def codes(self, x: IndexedKeys, vectors: Float[Array, "*d D"]) -> Float[Array, "*d bits"]:
        """1 or -1 for each bit."""
        bits = vectors @ x.params["projection"].astype(vectors.dtype)
        smooth = jnp.tanh(bits)
        return smooth + lax.stop_gradient(jnp.where(bits < 0, -1, 1) - smooth)

    def _of_queries(self, x: IndexedKeys, index: IndexQueries) -> IndexQueries:
        weights = index.weights if x.score == "relu" else jnp.ones_like(index.weights[..., :1])
        return IndexQueries(self.codes(x, index.searched(x.score)), weights)

    def prepare(self, x: IndexedKeys) -> Float[Array, "B S bits"]:
        return self.codes(x, tokens_only(x.keys[:, :, None], x.ids)[:, :, 0])

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        return n_searched * self.n_bits + min(self.n_best, x.keys.shape[1]) * n_each

    def of(self, prepared, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        index, side = self._of_queries(x, queries.index), Side(queries.position, queries.ids)
        n_best = min(self.n_best, x.keys.shape[1])
        return best_keys(x.score, ChoiceRule(x.causal), n_best, index, prepared, side, x.ids)

    def of_all(self, prepared, x: IndexedKeys, index: IndexQueries, interpret: bool):
        from reformax.ops.kernels.triton import indexer as kernel

        if x.score != "relu":
            return None
        arrays = *self._of_queries(x, index), prepared, x.segment_ids, x.segment_ids
        n_best = min(self.n_best, x.keys.shape[1])
        return kernel.choose_positions(n_best, x.causal, interpret, *arrays, n_parts=1)

    def losses(self, x: IndexedKeys, queries: QueryChunk) -> Float[Array, "B Q"]:
        index, keys = lax.stop_gradient((queries.index, x.keys))
        position = jnp.arange(x.keys.shape[1], dtype=jnp.int32)[None, None]
        query = Side(queries.position[..., None], queries.ids[..., None])
        mask = Visibility(x.causal).sees(query, Side(position, x.ids[:, None]))
        keys = jnp.where(is_token(x.ids)[..., None], keys, 0)
        n_heads, size = index.queries.shape[2:]
        scale = x.params["scale"].astype(keys.dtype) / (self.n_bits * math.sqrt(n_heads))
        of_codes = scores(x.score, self._of_queries(x, index), self.codes(x, keys))
        exact = scores(x.score, index, keys) / math.sqrt(n_heads * size)
        return divergence(scale * of_codes, masked_softmax(exact, mask), mask)

    def start(self, x: IndexedKeys) -> Int[Array, "B C bits"]:
        return self._held(x, jnp.where(is_token(x.ids)[..., None], x.keys, 0))

    def _held(self, x: IndexedKeys, keys: Float[Array, "B T D"]) -> Int[Array, "B T bits"]:
        return self.codes(x, keys).astype(jnp.int8)

    def advance(self, state, x: IndexedKeys, key, position) -> Int[Array, "B C bits"]:
        return state.at[jnp.arange(len(position)), position].set(self._held(x, key)[:, 0])

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        position = jnp.arange(state.shape[1], dtype=jnp.int32)[None, None]
        so_far = CAUSAL.sees(Side(queries.position[..., None]), Side(position))
        index = self._of_queries(x, queries.index)
        found = scores(x.score, index, state.astype(x.keys.dtype))
        return best_of(found, so_far, min(self.n_best, state.shape[1]))


# Of buckets and of clusters: R codes of each key, and J codes that a query searches in each.


class SortedKeys(NamedTuple):
    """The keys' codes by position, and the positions in the order (segment, code, position)."""

    codes: Int[Array, "B R S"]
    order: Int[Array, "B R S"]


def _sorted(codes: Int[Array, "B 1 R S"], n_codes: int, x: IndexedKeys) -> SortedKeys:
    order = sort_by_bucket(codes, n_codes, x.segment_ids, 0).query_positions
    return SortedKeys(codes[:, 0], order[:, 0])


def _nearest_of_code(
    prepared: SortedKeys,
    x: IndexedKeys,
    codes: Int[Array, "B J R Q"],
    queries: QueryChunk,
    n_nearest: int,
) -> Int[Array, "B Q M"]:
    """The nearest keys of each code; -1 is none."""
    n_keys = x.keys.shape[1]
    n = min(n_nearest, n_keys)
    n_before = _sorted_before(prepared, x, codes, queries)
    first = n_before - (n if x.causal else n // 2)
    slot = first[..., None] + jnp.arange(n, dtype=jnp.int32)[None, None, None, None]
    exists, slot = (slot >= 0) & (slot < n_keys), jnp.clip(slot, 0, n_keys - 1)

    def of_hash(x: Int[Array, "B R S"], at: Int[Array, "B J R Q M"]) -> Array:
        take = jax.vmap(jax.vmap(lambda x, at: x[at], in_axes=(0, 1), out_axes=1))
        return take(x, at)

    position = of_hash(prepared.order, slot)
    exists &= of_hash(prepared.codes, position) == codes[..., None]
    position = jnp.where(exists, position, -1)
    return jnp.moveaxis(position, 3, 1).reshape(*queries.ids.shape, -1)


def _newest_of_code(
    held: Int[Array, "B R C"], codes: Int[Array, "B J R 1"], queries: QueryChunk, n_nearest: int
) -> Int[Array, "B 1 M"]:
    """The newest keys of each code that the newest query searches; -1 is none."""
    position = jnp.arange(held.shape[2], dtype=jnp.int32)[None, None, None]
    so_far = CAUSAL.sees(Side(queries.position[:, None, None]), Side(position))
    same = (held[:, None] == codes) & so_far  # [B, J, R, C]
    nearest = jnp.broadcast_to(position.astype(jnp.float32), same.shape)
    found = best_of(nearest, same, min(n_nearest, same.shape[-1]))
    return found.reshape(len(found), 1, -1)


def _sorted_before(
    prepared: SortedKeys, x: IndexedKeys, codes: Int[Array, "B J R Q"], queries: QueryChunk
) -> Int[Array, "B J R Q"]:
    """How many keys come before a query's next key in the order (segment, bucket, position).

    By bisection: a chunk of queries reads the order log S times.
    """
    order, n_keys = prepared.order, x.keys.shape[1]
    sorted_codes = jnp.take_along_axis(prepared.codes, order, axis=-1)
    last = jnp.iinfo(jnp.int32).max
    ids, query_ids = (jnp.where(is_token(y), y, last) for y in (x.ids, queries.ids))
    sorted_ids = jnp.take_along_axis(jnp.broadcast_to(ids[:, None], order.shape), order, axis=-1)

    def count(sorted_ids, sorted_codes, order, query_ids, codes):  # [S], [S], [S], [Q], [Q]
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            at = jnp.minimum(middle, n_keys - 1)
            one, other = sorted_ids[at], query_ids
            two, second = sorted_codes[at], codes
            third = order[at] <= queries.position[0]
            before = (one < other) | ((one == other) & ((two < second) | ((two == second) & third)))
            before &= middle < n_keys
            return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

        bounds = jnp.zeros_like(codes), jnp.full_like(codes, n_keys)
        return lax.fori_loop(0, n_keys.bit_length(), halve, bounds)[0]

    by_hash = jax.vmap(count, in_axes=(0, 0, 0, None, 0))
    by_head = jax.vmap(by_hash, in_axes=(None, None, None, None, 0))
    return jax.vmap(by_head)(sorted_ids, sorted_codes, order, query_ids, codes)


# Of both


def rows_at(x: Array, index: Int[Array, "B Q M"]) -> Array:
    """`x[b, index[b]]` of `[B, S, ...]`: `[B, Q, M, ...]`."""
    return jax.vmap(lambda x, at: x[at])(x, index)


def without_repeats(position: Int[Array, "*d M"]) -> Int[Array, "*d M"]:
    """The positions in order, with -1 for each that was there before."""
    position = jnp.sort(position, axis=-1)
    none = jnp.full_like(position[..., :1], -1)
    before = jnp.concatenate([none, position[..., :-1]], axis=-1)
    return jnp.where(position == before, -1, position)

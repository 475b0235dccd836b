"""Masks of causality, segments and shared queries, and what a call says of its tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from reformax.ops.masking.visibility import Side, Visibility, all_of, is_token, same_segment

# Booleans, True at tokens: each row is one segment.
Ids = Int[Array, "B T"] | Bool[Array, "B T"]
SegmentIds = Ids | tuple[Ids, Ids]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Segment ids and other numbers of tokens, which layers pass on together.

    Attributes:
      segment_ids: ids; 0 or False is padding. None: no padding, one segment.
      global_tokens: above 0 at global tokens, for ops with `global_tokens`.
      positions: the positions that rotary embeddings read; None: 0 to T - 1.
      right_padded: whether all padding of a row follows its tokens, with finite numbers.
    """

    segment_ids: Ids | None
    global_tokens: Int[Array, "B T"] | None = None
    positions: Int[Array, "B T"] | None = None
    right_padded: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def counted(self) -> bool:
        """Whether lengths can replace segments: each row is one segment, then padding."""
        given = self.segment_ids is not None
        return self.right_padded and given and says_one_segment(self.segment_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokensFirst:
    """Segment ids of rows of one segment, in an order in which padding follows tokens.

    Attributes:
      segment_ids: ids; 0 is padding.
      count: the number of tokens of each row, in place of ids in the order.
    """

    segment_ids: Int[Array, "B T"]
    count: Int[Array, " B"]


def tokens_of(segment_ids: SegmentIds | Tokens | None) -> Tokens:
    """`Tokens` as they are, or made of segment ids."""
    return segment_ids if isinstance(segment_ids, Tokens) else Tokens(segment_ids)


def segment_pair(
    segment_ids: SegmentIds | None,
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | tuple[None, None]:
    """The segment ids of the queries and those of the keys."""
    return segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)


def paired_segment_ids(
    *each: tuple[SegmentIds | Tokens | None, Shaped[Array, "B _ *d"]],
) -> Ids | None:
    """The pair of segment ids of two sequences, each given as (segments, x).

    None: neither has segments. If one has none, or booleans, it and all segments of the other see
    each other.
    """
    found = [(tokens_of(segment_ids).segment_ids, x) for segment_ids, x in each]
    if all(ids is None for ids, _ in found):
        return None
    if not any(says_one_segment(ids) for ids, _ in found):
        return tuple(ids for ids, _ in found)
    return tuple(jnp.ones(x.shape[:2], bool) if ids is None else is_token(ids) for ids, x in found)


def int32_ids(segment_ids: SegmentIds | None) -> SegmentIds | None:
    """Segment ids as arrays of int32, the dtype that ops read."""
    return jax.tree.map(lambda ids: jnp.asarray(ids, jnp.int32), segment_ids)


def int32_or_bool_ids(segment_ids: SegmentIds | None) -> SegmentIds | None:
    """`int32_ids`, but of booleans alone, which say that each row is one segment."""
    if says_one_segment(segment_ids):
        return jax.tree.map(jnp.asarray, segment_ids)
    return int32_ids(segment_ids)


def says_one_segment(segment_ids: SegmentIds | None) -> bool:
    """Whether the dtype of segment ids says that each row is one segment besides padding."""
    return segment_ids is None or all(ids.dtype == bool for ids in jax.tree.leaves(segment_ids))


def tokens_before(lengths: Int[Array, " B"], length: int) -> Bool[Array, "B T"]:
    """Which of `length` positions are among the first `lengths` of their row."""
    return jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]


def row_lengths(ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The number of tokens of each row."""
    return jnp.sum(is_token(ids), axis=1, dtype=jnp.int32)


def ids_or_ones(segment_ids: Ids | None, x: Shaped[Array, "B T *d"]) -> Int[Array, "B T"]:
    """The segment ids of `x`; without any, each row is segment 1."""
    return jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids


def segment_begins(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a segment begins, in ids of contiguous segments."""
    changes = ~same_segment(ids[:, 1:], ids[:, :-1])
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)


def segment_numbers(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The index of each segment id among the sorted ids of its row, from 0 on."""

    def of_row(ids: Int[Array, " T"]) -> Int[Array, " T"]:
        order = jnp.argsort(ids)
        changes = jnp.diff(ids[order], prepend=ids[order][:1]) != 0
        return jnp.zeros_like(ids).at[order].set(jnp.cumsum(changes).astype(ids.dtype))

    return jax.vmap(of_row)(ids)


def visibility(
    n_queries: int, n_keys: int, *, causal: bool, segment_ids: SegmentIds | None = None
) -> Bool[Array, "#B 1 T S"]:
    """Which keys each query sees, by causality and by segment."""
    q = Side(jnp.arange(n_queries)[None, None, :, None])
    k = Side(jnp.arange(n_keys)[None, None, None])
    if segment_ids is not None:
        of_query, of_key = segment_pair(segment_ids)
        q = q._replace(segment_id=of_query[:, None, :, None])
        k = k._replace(segment_id=of_key[:, None, None, :])
    everything = jnp.ones((1, 1, n_queries, n_keys), bool)
    return all_of(everything, Visibility(causal=causal).sees(q, k))


def keys_seen(
    n_queries: int, n_keys: int, *, causal: bool, segment_ids: SegmentIds | None = None
) -> Int[Array, "#B T"]:
    """The number of keys that each query sees by `visibility`, without its matrix."""
    if segment_ids is None:
        seen = jnp.arange(1, n_queries + 1)[None] if causal else jnp.full((1, n_queries), n_keys)
        return jnp.minimum(seen, n_keys)
    ids = segment_pair(segment_ids)
    # Keys and queries in one row, each query after the keys that are not in its future.
    if causal:
        longest = max(n_queries, n_keys)
        ids = [jnp.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in ids]
        ids, is_key = jnp.stack(ids[::-1], axis=2), jnp.array([1, 0], jnp.int32)[None, None]
    else:
        ids = jnp.concatenate(ids[::-1], axis=1)
        is_key = (jnp.arange(ids.shape[1])[None] < n_keys).astype(jnp.int32)
    is_key = jnp.where(is_token(ids), is_key, 0).reshape(len(ids), -1)
    shape, ids = ids.shape, ids.reshape(len(ids), -1)
    order = jnp.argsort(ids, axis=1, stable=True)
    is_key = jnp.take_along_axis(is_key, order, axis=1)
    so_far = jnp.cumsum(is_key, axis=1)
    begins = segment_begins(jnp.take_along_axis(ids, order, axis=1))
    before = jax.lax.cummax(jnp.where(begins, so_far - is_key, 0), axis=1)
    row = jnp.arange(len(ids))[:, None]
    seen = jnp.zeros_like(ids).at[row, order].set(so_far - before).reshape(shape)
    return seen[:, :n_queries, 1] if causal else seen[:, n_keys:]


def except_self(
    mask: Bool[Array, "#B #N T T"], attend_self_if_alone: bool = True
) -> Bool[Array, "#B #N T T"]:
    """Hides each position from itself (Reformer, sec. 2).

    With `attend_self_if_alone`, a position that sees nothing else still sees itself.
    """
    itself = jnp.eye(mask.shape[-1], dtype=bool)[None, None]
    others = mask & ~itself
    if not attend_self_if_alone:
        return others
    alone = ~others.any(axis=-1, keepdims=True)
    return others | (mask & itself & alone)

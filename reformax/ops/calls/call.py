"""The arguments of a call of an op, besides weights, queries, keys, values and plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.ops.masking.masks import SegmentIds, segment_pair
from reformax.ops.masking.padding import tokens_only
from reformax.ops.numerics.logits import PLAIN, Logits

_STATIC = dict(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an op: masks, sources of randomness, and where its arrays lie in the whole call.

    All methods of an algorithm take one, in which an argument that they do not have is the default.

    Attributes:
      causal: whether a position sees only itself and what came before it.
      train: False selects the settings for evaluation.
      dropout: the rate at which attention weights are dropped.
      length: the length that settings depend on, in decoding the capacity of the cache; None: that
        of the queries.
      logits: how products of queries and keys become logits.
      segment_ids: ids of the tokens, or a pair of them for queries and for keys.
      one_segment: whether each row is one segment besides its padding, which `segment_ids` marks.
      lengths: the number of tokens of each row before its padding; None: not known.
      rng: the source of hashes.
      seed: that of dropout (`softmax.dropout.seed_words`); None without dropout.
      shard: which part of the heads, the batch or the sequence the arrays are, a
        `sharding.shard.Shard`; None: all.
      bias: added to the logits. In a step of decoding it is a function of the keys' positions.
      extra_projections: the further projections that the algorithm reads, by name.
      global_tokens: above 0 at global tokens.
      position: in a step of decoding, that of each row.
      origins: in beam search, as in `decoding.ring.RingDecoding`.
      chosen: in a step of decoding of an op that reuses a choice, that of the other op.
      sinks: a logit of each head in the denominator of its softmax (`softmax.learned_sinks`). An op
        sets it of its weights.
    """

    causal: bool = dataclasses.field(default=False, **_STATIC)
    train: bool = dataclasses.field(default=False, **_STATIC)
    dropout: float = dataclasses.field(default=0.0, **_STATIC)
    length: int | None = dataclasses.field(default=None, **_STATIC)
    logits: Logits = dataclasses.field(default=PLAIN, **_STATIC)
    one_segment: bool = dataclasses.field(default=False, **_STATIC)
    segment_ids: SegmentIds | None = None
    lengths: Int[Array, " B"] | None = None
    rng: PRNGKeyArray | None = None
    seed: Int[Array, 6] | None = None
    shard: Any = None
    bias: Any = None
    extra_projections: dict[str, Float[Array, "B T _ _"]] | None = None
    global_tokens: Int[Array, "B T"] | None = None
    position: Int[Array, " B"] | None = None
    origins: Int[Array, "G K C"] | None = None
    chosen: Int[Array, "B K"] | None = None
    sinks: Float[Array, " N"] | None = None

    def but(self, **changes: Any) -> Call:
        """The call with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_token_projections(self) -> Call:
        """The call with extra projections that are zeros at padding."""
        if not self.extra_projections or self.segment_ids is None:
            return self
        ids = segment_pair(self.segment_ids)[0]
        read = {name: tokens_only(x, ids) for name, x in self.extra_projections.items()}
        return self.but(extra_projections=read)

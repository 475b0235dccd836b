"""Language models: the Reformer (Kitaev et al. 2020) and the Transformer it is measured against.

Both read tokens `[B, T]`, shift them right by one, and return logits `[B, T, vocabulary]` of each
token given those before it. Argument names are those of `trax.models`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import Count, SettingError, Unsupported
from reformax.models.arguments import Capacity, check_capacity, check_embedding, check_tokens
from reformax.models.backbone import Backbone
from reformax.models.base import AttentionType, Residual, Reversible
from reformax.models.logits import capped, linear, logits_product
from reformax.models.packing import shift_right, with_positions
from reformax.ops import dense, local, lsh
from reformax.ops.decoding.cache import take_rows, where_rows
from reformax.ops.masking.masks import Tokens
from reformax.ops.numerics.arrays import check_lengths


class LMState(NamedTuple):
    """The state of decoding between steps."""

    position: Int[Array, " B"]  # the next position of each row
    caches: Any  # of every layer
    capacity: Capacity  # of the caches and of the model's positions


class LMParts(NamedTuple):
    """Parts of rows, or one part: what the embedding and the layers read."""

    tokens: Int[Array, "B T"]  # shifted to the right
    segment_ids: Int[Array, "B T"] | None
    positions: Int[Array, "B T"]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LanguageModel(Backbone):
    """A causal backbone and logits: `[B, T] -> [B, T, vocab_size]`, float32.

    `apply` is `logits(features)`; the two are apart so that a loss can take the logits in chunks of
    the sequence. Rows may be packed: each segment is then computed as if it were alone, as those
    of `seq2seq.EncoderDecoder` are. More arguments are those of `Backbone` and `Model`.

    Args:
      tie_embeddings: whether logits are the products of features and the embedding (Press & Wolf
        2017, "Using the Output Embedding to Improve Language Models"), without biases, as in GPT-2.
        It needs features of `d_model`, which two streams do not make, and an `init_std`.
      first_token: the token before a row or segment, which its position 0 reads. GPT-2's is
        50256.
    """

    tie_embeddings: bool = False
    first_token: Count = 0

    def __post_init__(self):
        super().__post_init__()
        if self.first_token >= self.vocab_size:
            raise SettingError(
                f"first_token is {self.first_token}: expected a token below vocab_size, "
                f"{self.vocab_size}"
            )
        if self.tie_embeddings and self.d_features != self.d_model:
            raise SettingError(
                f"tie_embeddings is True and features have size {self.d_features}, not d_model, "
                f"{self.d_model}: take TransformerLM, or n_slots=1"
            )
        if self.tie_embeddings and self.design.init_std is None:
            raise SettingError(
                "tie_embeddings is True and init_std None, whose embeddings would make the first "
                "logits large: set init_std=0.02"
            )

    def init_params(self, rng, shape):
        *rngs, rng_l = jax.random.split(rng, 4)
        params = self.init_backbone(rngs, shape)
        if not self.tie_embeddings:
            params["logits"] = self.head(rng_l, self.d_features, self.vocab_size)
        return params

    def features(
        self,
        params,
        inputs: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B T"]],
        rng: PRNGKeyArray | None = None,
    ) -> Float[Array, "B T D"]:
        """The input of `logits`: `encode` of the tokens shifted to the right by `first_token`.

        Args:
          params: the weights.
          inputs: tokens `[B, T]`; or of packed rows a pair, tokens and segments `[B, T]`: ids from
            1 on, 0 is padding.
          rng: the source of hashes and of dropout.

        Raises:
          ValueError: tokens are no integers `[B, T]`, or weights are of other sizes.
          Unsupported: an algorithm that does not tell segments apart has packed rows.
        """
        if not isinstance(inputs, tuple):
            check_tokens("tokens", inputs)
            return self.encode(params, self._shifted(inputs)[:, :-1], rng=rng)
        for block in self._layers.blocks:
            if not block.attention.op.packed:
                raise Unsupported(
                    f"op is {block.attention.op} and rows are packed, as with document_mask=True: "
                    "leave that out, or use an op whose packed is True, such as flash.flash()"
                )
        tokens, segment_ids = inputs
        check_tokens("tokens", tokens, segment_ids)
        shifted = shift_right(tokens, segment_ids, self.first_token)
        return self.encode(params, shifted, with_positions(segment_ids), rng)

    # Parts of rows, whose states are carried from one to the next: `training.truncated_backprop`.

    def parts(
        self, inputs: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B T"]], n: int
    ) -> LMParts:
        """The inputs of `features` in n parts of one length, with a leading axis of parts."""
        tokens, ids = inputs if isinstance(inputs, tuple) else (inputs, None)
        check_tokens("tokens", tokens, ids)
        if ids is None:
            shifted = self._shifted(tokens)[:, :-1]
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        else:
            shifted = shift_right(tokens, ids, self.first_token)
            ids = ids.astype(jnp.int32)
            positions = with_positions(ids).positions
        parts = LMParts(shifted, ids, positions)
        return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), n, -1), 1, 0), parts)

    def first_states(self, batch: int) -> Any:
        """The states before the first token of `batch` rows, with the last segment of each.

        Raises:
          Unsupported: a layer carries no state.
        """
        return self._layers.first_states(batch), jnp.zeros((batch,), jnp.int32)

    def features_from(
        self, params, part: LMParts, states: Any, rng: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The features of a part, and the states after it.

        A row's state goes on if its part begins in the segment that the part before ended in. A new
        segment begins with a state of zeros.
        """
        states, last = states  # and the id of each row's last segment
        ids = part.segment_ids
        if ids is not None:
            # The id of each row's first token; 0 of a part that is padding alone.
            index = jnp.arange(ids.shape[1])[None]
            first = jnp.min(jnp.where(ids > 0, index, ids.shape[1] - 1), axis=1, keepdims=True)
            first = jnp.take_along_axis(ids, first, axis=1)[:, 0]
            goes_on = (first == last) | (first == 0)

            def kept(x):  # [repeats, B, ...]
                return jnp.where(goes_on.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)

            states = jax.tree.map(kept, states)
            last = jnp.maximum(last, jnp.max(ids, axis=1))  # ids grow along a row
        tokens = Tokens(ids, positions=part.positions)
        features, states = self.encode(params, part.tokens, tokens, rng, states=states)
        return features, (states, last)

    def _shifted(self, tokens: Int[Array, "B T"]) -> Int[Array, "B U"]:
        """The T tokens after `first_token`."""
        return jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=self.first_token)

    def logits(
        self, params, features: Float[Array, "*d D"], dtype: str = "float32"
    ) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities in `dtype`, their product in the dtype of sublayers."""
        if self.tie_embeddings:
            table = params.get("softmax", params["embedding"])  # the former for decoding
            logits = logits_product(features, table, self.compute_dtype, to=dtype)
        else:
            logits = linear(params["logits"], features, self.compute_dtype, dtype)
        return capped(logits, self.design.logits_soft_cap)

    def apply(
        self,
        params,
        tokens: Int[Array, "B T"],
        rng=None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        inputs = tokens if segment_ids is None else (tokens, segment_ids)
        return self.logits(params, self.features(params, inputs, rng))

    # Decoding: `prefill` reads whole prompts, `step` one token of each row.

    def for_decoding(self, params) -> Any:
        """The weights for `step`: a tree for each repeat of the cycle, cast to their dtypes."""
        params = params | {"stack": self._layers.for_decoding(params["stack"])}
        if self.tie_embeddings:
            return params | {"softmax": params["embedding"].astype(self.compute_dtype)}
        return params | {
            "logits": params["logits"] | {"w": params["logits"]["w"].astype(self.compute_dtype)}
        }

    def prefill(
        self,
        params,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        capacity: int,
        rng=None,
        state: LMState | None = None,
    ) -> tuple[Float[Array, "B V"], LMState]:
        """Reads prompts in one forward pass.

        Args:
          params: the weights.
          tokens: prompts, padded on the right.
          lengths: the number of tokens in each row before its padding; 0 is an empty prompt.
          capacity: the largest length of prompt and continuation together.
          rng: the source of hashes, which are those of `apply` with the same rng.
          state: of the text before, from `first_state`, `prefill` or `step`: the prompts go on from
            it, as their steps would, and `capacity` and `rng` are the state's. None: the prompts
            begin a text.

        Returns:
          The logits of each row's next token, and the state that `step` goes on from.

        Raises:
          ValueError: the capacity leaves no room after the prompts or is above that of the
            positions, the prompts are longer than what the state has room for, the model is not
            built for evaluation, tokens are no integers `[B, T]`, lengths no integers `[B]` up to
            T, or weights are of other sizes.
          NotImplementedError: an attention algorithm cannot decode.
        """
        check_tokens("tokens", tokens)
        check_lengths("lengths", lengths, *tokens.shape, "the length of tokens")
        check_embedding(params, "embedding", self.vocab_size, self.d_model)
        if state is not None:
            return self._read_on(params, tokens, lengths, state)
        if capacity <= tokens.shape[1]:
            raise SettingError(
                f"capacity is {capacity}: expected more than {tokens.shape[1]}, the prompts' length"
            )
        check_capacity(capacity, self.max_length)
        # Position t reads token t - 1: n tokens make n + 1 positions.
        x = self._embed(params, devices.looked_up(params["embedding"], self._shifted(tokens)))
        streams, caches, _ = self._layers.prefill(
            params["stack"],
            [x] * self._layers.n_streams,
            lengths + 1,
            capacity,
            self._rng_of_layers(rng),
        )
        last = lengths[:, None, None]
        streams = [jnp.take_along_axis(x, last, axis=1) for x in streams]
        return self._next(params, streams), LMState(lengths + 1, caches, self._held(capacity))

    def _held(self, capacity: int) -> Capacity:
        """The capacity of a state whose caches have this one."""
        return Capacity(self.max_length if self.is_endless(capacity) else capacity)

    @property
    def angles_change_after(self) -> int | None:
        rotary = self.design.rotary
        return rotary.trained_length if rotary.scaling == "longrope" else None

    @property
    def endless_from(self) -> int | None:
        each = [block.attention.op.endless_from for block in self._layers.blocks]
        return None if None in each else max(each)

    @property
    def reads_ahead(self) -> bool:
        # A piece then also computes what it does in the whole prompt.
        same = all(block.attention.op.reads_ahead for block in self._layers.blocks)
        return same and self.angles_change_after is None

    def first_state(self, params, batch: int, capacity: int, rng=None) -> LMState:
        """The state before `first_token`, which is the first token that such texts read.

        Args:
          params: the weights.
          batch: the number of texts.
          capacity: the largest length of a text.
          rng: the source of hashes, as in `prefill`.

        Raises:
          ValueError: the capacity is above that of the positions, or the model is not built for
            evaluation.
          NotImplementedError: an attention algorithm cannot decode.
        """
        check_capacity(capacity, self.max_length)
        rng = self._rng_of_layers(rng)
        caches = self._layers.first_caches(params["stack"], batch, capacity, rng)
        return LMState(jnp.zeros(batch, jnp.int32), caches, self._held(capacity))

    def take_rows(self, state: LMState, rows: Int[Array, " R"]) -> LMState:
        """The state of the rows with these indices, in their order. An index may repeat."""
        caches = take_rows(state.caches, rows)
        return state._replace(position=state.position[rows], caches=caches)

    def where_rows(self, mask: Bool[Array, " B"], state: LMState, other: LMState) -> LMState:
        """The rows of `state` where the mask is True, and of `other` elsewhere."""
        position = jnp.where(mask, state.position, other.position)
        caches = where_rows(mask, state.caches, other.caches)
        return state._replace(position=position, caches=caches)

    def _read_on(self, params, tokens, lengths, state: LMState):
        """`prefill` of tokens that follow a text; logits of rows without one are arbitrary."""
        position, caches, capacity = state
        capacity.check("state.position", position, lengths)
        of_tokens = position[:, None] + jnp.arange(tokens.shape[1])[None]
        if self.max_length is not None:  # of padding
            of_tokens = jnp.minimum(of_tokens, self.max_length - 1)
        x = self._embed(params, devices.looked_up(params["embedding"], tokens), of_tokens)
        streams = [devices.over_sequence(x)] * self._layers.n_streams
        streams, caches = self._layers.read_on(params["stack"], streams, lengths, position, caches)
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        streams = [jnp.take_along_axis(x, last, axis=1) for x in streams]
        return self._next(params, streams), LMState(position + lengths, caches, capacity)

    def step(
        self, params, tokens: Int[Array, " B"], state: LMState
    ) -> tuple[Float[Array, "B V"], LMState]:
        """The logits of the token after the one given, for each row.

        Args:
          params: the weights from `for_decoding`.
          tokens: the last token of each row.
          state: from `first_state`, `prefill` or the step before.

        Raises:
          ValueError: a row has as many positions as the state's capacity. Within `jax.jit` that is
            not known, and the logits of such a row are arbitrary.
        """
        position, caches, capacity = state
        capacity.check("state.position", position)
        x = self._embed(params, params["embedding"][tokens[:, None]], position[:, None])
        streams, caches = self._layers.step(
            params["stack"], [x] * self._layers.n_streams, caches, position
        )
        return self._next(params, streams), LMState(position + 1, caches, capacity)

    def _next(self, params, streams: Sequence[Float[Array, "B 1 D"]]) -> Float[Array, "B V"]:
        """The logits of the next token, from the stack's outputs at the newest one."""
        return self.logits(params, self._joined(params, streams))[:, 0]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReformerLM(Reversible, LanguageModel):
    """A reversible Transformer whose layers cycle through attention algorithms.

    Its arguments are those of `Backbone`, `Reversible` and `Model`.
    """

    attention_type: AttentionType = (local.local(), lsh.lsh())


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class TransformerLM(Residual, LanguageModel):
    """A Transformer decoder, pre-norm unless `post_norm`: the baseline.

    Its arguments are those of `Backbone`, `Residual` and `Model`.
    """

    attention_type: AttentionType = dense.dense()

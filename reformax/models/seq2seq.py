"""Encoder-decoders: the Transformer (Vaswani et al. 2017) and the Reformer (Kitaev et al. 2020).

An encoder reads the source. A decoder writes the target a token at a time and reads the encoder's
output, the memory, by cross-attention. Argument names are those of `trax.models`.

Letters in the shapes: B batch, S source length, T target length, R rows that are decoded (several
of a source in beam search), K beams, C capacity, D d_model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import Called, Depth, Rate, SettingError, VocabSize
from reformax.layers.base import check_shape
from reformax.layers.dropout import dropout
from reformax.layers.rngs import split
from reformax.models.arguments import Capacity, check_capacity, check_embedding, check_tokens
from reformax.models.base import AttentionType, Model, PosType, Residual, Reversible
from reformax.models.designs import A_DESIGN, Design
from reformax.models.logits import capped, logits_product
from reformax.models.packing import segment_positions, segmented, shift_right
from reformax.ops import dense
from reformax.ops.base import AttentionOp
from reformax.ops.decoding.cache import take_rows

CrossAttentionType = Annotated[AttentionOp, Called("an AttentionOp, such as dense.dense()")]


class TranslationState(NamedTuple):
    """The state of decoding that every step changes."""

    position: Int[Array, " R"]  # of the next token
    caches: Any  # of every layer's self-attention
    origins: Int[Array, "B K C"] | None  # in beam search: see `EncoderDecoder.beams`
    capacity: Capacity  # of the caches


class Memory(NamedTuple):
    """The sources as every step of decoding reads them."""

    keys_values: Any  # of every layer's cross-attention
    segment_ids: Int[Array, "B S"]  # 0 is padding


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EncoderDecoder(Model):
    """`[B, S], [B, T] -> [B, T, V]`: logits of each target token given the source and those before.

    A row ends with its last token that is not 0; padding follows it. `apply` is
    `logits(features)`; the two are apart so that a loss can take the logits in chunks of the
    sequence. Sources and targets may be packed: the k-th segment of a target's row translates the
    k-th of its source's row (`models.packing`). Each is then computed as if it were alone:
    positions and the shift to the right start again with it, and it attends to itself and its
    source. Algorithms that sort a row, or cut it into chunks without a window, are an exception:
    they also depend on a segment's position in its row.

    One matrix embeds source and target and, transposed, makes the logits (sec. 3.4); embeddings are
    scaled by sqrt(d_model). A target with another vocabulary has another matrix.
    More arguments are those of `Model`.

    Args:
      input_vocab_size: number of tokens of the source and, by default, of the target.
      output_vocab_size: number of tokens of the target; None: it has the source's vocabulary.
      n_encoder_layers: number of layers, a multiple of the length of the encoder's cycle.
      n_decoder_layers: number of layers, a multiple of the length of the decoder's cycle.
      encoder_attention_type: the encoder's algorithm, or a cycle of them over the layers.
      decoder_attention_type: the same for the decoder's self-attention.
      cross_attention_type: the algorithm of the decoder's attention to the memory; its `cross`
        is True.
    """

    input_vocab_size: VocabSize = dataclasses.field(kw_only=False)
    output_vocab_size: VocabSize | None = dataclasses.field(default=None, kw_only=False)
    n_encoder_layers: Depth = 6
    n_decoder_layers: Depth = 6
    encoder_attention_type: AttentionType = dense.dense()
    decoder_attention_type: AttentionType = dense.dense()
    cross_attention_type: CrossAttentionType = dense.dense()
    design: Annotated[Design, Called(A_DESIGN)] = Design(ff_activation="relu")
    ff_dropout: Rate | None = 0.0
    pos_type: PosType = "sinusoidal"

    n_inputs = 2
    _attention_types = tuple(f"{x}_attention_type" for x in ("encoder", "decoder", "cross"))
    task_kind = "translation"
    needs_past = True  # the decoder is causal

    def __post_init__(self):
        super().__post_init__()
        cross = self.cross_attention_type
        encoder = self._blocks("encoder_attention_type", causal=False)
        decoder = self._blocks("decoder_attention_type", cross=cross)
        self._stacks = {
            "encoder": self._stack(encoder, self.n_encoder_layers),
            "decoder": self._stack(decoder, self.n_decoder_layers),
        }
        self._norm = self._norm_layer() if self.final_norm else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target."""
        return self.output_vocab_size or self.input_vocab_size

    @property
    def source_vocab_size(self) -> int:
        """Number of tokens of the source."""
        return self.input_vocab_size

    def init_params(self, rng, shape, *shapes):
        for each in (shape, *shapes):
            check_shape(each)
        rngs = jax.random.split(rng, 6)
        params = {"embedding": self._embedding(rngs[0], self.vocab_size)}
        if self.output_vocab_size is not None:
            params["source_embedding"] = self._embedding(rngs[1], self.input_vocab_size)
        of_sides = shape, shapes[0] if shapes else shape
        for i, (side, stack) in enumerate(self._stacks.items()):
            hidden = (*of_sides[i], self.d_model)
            params[side] = {"stack": stack.init_params(rngs[2 + i], *[hidden] * stack.n_streams)}
            if self._norm is not None:
                params[side]["norm"] = self._norm.init_params(None, hidden)
            if self._positions is not None:
                params[side]["positions"] = self._positions.init_params(rngs[4 + i], hidden)
        return params

    def _embedding(self, rng, vocab_size: int) -> Float[Array, "V D"]:
        normal = jax.random.normal(rng, (vocab_size, self.d_model))
        if self.design.init_std is not None:
            return self.design.init_std * normal
        return normal / math.sqrt(self.d_model)

    # The forward pass: the encoder's stack, the decoder's stack, the logits.

    def encode(
        self,
        params,
        source: Int[Array, "B S"],
        source_segment_ids: Int[Array, "B S"] | None = None,
        rng=None,
    ) -> Float[Array, "B S D"]:
        """The memory, float32; its rows of padding are arbitrary.

        Args:
          params: the weights.
          source: tokens.
          source_segment_ids: ids; None: a row is one segment, up to its last token that is not 0.
          rng: the source of hashes and of dropout.

        Raises:
          ValueError: tokens are no integers `[B, S]`, or weights are of other sizes.
        """
        check_tokens("source", source, source_segment_ids)
        name = "embedding" if self.output_vocab_size is None else "source_embedding"
        check_embedding(params, name, self.input_vocab_size, self.d_model)
        read = segmented(source, source_segment_ids)
        position, table = segment_positions(read.segment_ids), params[name]
        embed_rng, stack_rng = split(rng, 2)
        x = self._embed(params["encoder"], table, source, position, embed_rng)
        return self._run("encoder", params, x, read, rng=stack_rng)

    def features(self, params, inputs: Sequence[Array], rng=None) -> Float[Array, "B T D"]:
        """The input of `logits`: the decoder's output.

        Args:
          params: the weights.
          inputs: source `[B, S]`, target `[B, T]` and, if any row is packed, the segments of both.
          rng: the source of hashes and of dropout.

        Raises:
          ValueError: tokens are no integers `[B, T]`, source and target have other numbers of rows,
            or weights are of other sizes.
        """
        source, target, *segment_ids = inputs
        source_segment_ids, target_segment_ids = segment_ids or (None, None)
        check_tokens("source", source, source_segment_ids)
        check_tokens("target", target, target_segment_ids)
        if len(source) != len(target):
            raise ValueError(
                f"target has {len(target)} rows and source {len(source)}: expected as many"
            )
        check_embedding(params, "embedding", self.vocab_size, self.d_model)
        encoder_rng, decoder_rng = split(rng, 2)
        memory = self.encode(params, source, source_segment_ids, encoder_rng)
        of_source = segmented(source, source_segment_ids).segment_ids
        read = segmented(target, target_segment_ids)
        embed_rng, stack_rng = split(decoder_rng, 2)
        x = self._embed(
            params["decoder"],
            params["embedding"],
            shift_right(target, read.segment_ids),
            segment_positions(read.segment_ids),
            embed_rng,
        )
        x = self._run("decoder", params, x, read, memory, of_source, rng=stack_rng)
        return x.astype(self.features_dtype)

    def logits(
        self, params, features: Float[Array, "*d D"], dtype: str = "float32"
    ) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities in `dtype`, their product in the dtype of sublayers."""
        logits = logits_product(features, params["embedding"], self.compute_dtype, to=dtype)
        return capped(logits, self.design.logits_soft_cap)

    def apply(
        self,
        params,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_segment_ids: Int[Array, "B S"] | None = None,
        target_segment_ids: Int[Array, "B T"] | None = None,
        rng=None,
    ) -> Float[Array, "B T V"]:
        inputs = source, target, source_segment_ids, target_segment_ids
        return self.logits(params, self.features(params, inputs, rng))

    def _embed(
        self, params, table, tokens: Int[Array, "B T"], position: Int[Array, "B T"], rng=None
    ) -> Float[Array, "B T D"]:
        scale = self.design.embedding_scale or math.sqrt(self.d_model)
        x = devices.looked_up(table, tokens) * scale
        return dropout(self._add_positions(params, x, position), self._dropout_rate, rng)

    def _run(self, side: str, params, x: Float[Array, "B T D"], *inputs, rng):
        """The output of the encoder's or the decoder's stack, `[B, T, D]`."""
        params, stack = params[side], self._stacks[side]
        streams = stack.apply(params["stack"], *[x] * stack.n_streams, *inputs, rng=rng)
        return self._merge(params, streams if stack.n_streams > 1 else (streams,))

    def _merge(self, params, streams: Sequence[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        """The mean of a stack's streams, normalised unless the stack ends in a norm."""
        x = sum(streams) / len(streams) if len(streams) > 1 else streams[0]
        return x if self._norm is None else self._norm.apply(params["norm"], x)

    # Decoding: `prefill` reads sources and makes the first token's logits, `step` the next ones'.

    def for_decoding(self, params) -> Any:
        """The decoder's weights for decoding: one tree a layer, each in the dtype it is used in.

        `softmax [D, V]` is the embedding, transposed for the product that makes logits: with few
        rows, a CPU takes as long to transpose the table as to multiply by it.
        """
        stack = self._stacks["decoder"].for_decoding(params["decoder"]["stack"])
        return {
            "decoder": params["decoder"] | {"stack": stack},
            "embedding": params["embedding"],
            "softmax": params["embedding"].astype(self.compute_dtype).T,
        }

    def prefill(
        self,
        params,
        weights,
        source: Int[Array, "B S"],
        capacity: int,
        rng=None,
        source_segment_ids: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B V"], TranslationState, Memory]:
        """Reads sources in one forward pass.

        Args:
          params: the weights.
          weights: the same from `for_decoding`.
          source: tokens, padded on the right.
          capacity: how many tokens a target can have, at least 1.
          rng: the source of hashes, which are those of `apply` with the same rng.
          source_segment_ids: 0 is padding; None: what is after the last token that is not 0.

        Returns:
          The logits of each target's first token, the state that `step` goes on from, and the
          memory that it reads.

        Raises:
          ValueError: the capacity is below 1 or above that of the positions, the model is not
            built for evaluation, tokens are no integers `[B, S]`, or weights are of other sizes.
          NotImplementedError: an attention algorithm cannot decode.
        """
        if capacity < 1:
            raise SettingError(f"capacity is {capacity}: expected at least 1")
        check_capacity(capacity, self.max_length)
        encoder_rng, decoder_rng = split(rng, 2)
        memory = self.encode(params, source, source_segment_ids, encoder_rng)
        segment_ids = segmented(source, source_segment_ids).segment_ids
        decoder, stack = weights["decoder"], self._stacks["decoder"]
        position = jnp.zeros(source.shape[0], jnp.int32)
        # `shift_right` puts token 0 before a target.
        x = self._embed(decoder, params["embedding"], position[:, None], position[:, None])
        streams, caches, keys_values = stack.prefill(
            decoder["stack"],
            [x] * stack.n_streams,
            position + 1,
            capacity,
            split(decoder_rng, 2)[1],
            memory,
            segment_ids,
        )
        logits = self._next(weights, streams)
        return (
            logits,
            TranslationState(position + 1, caches, None, Capacity(capacity)),
            Memory(keys_values, segment_ids),
        )

    def step(
        self, params, tokens: Int[Array, " R"], decoding: TranslationState, memory: Memory
    ) -> tuple[Float[Array, "R V"], TranslationState]:
        """The logits of the token after the one given, for each row.

        Args:
          params: the weights from `for_decoding`.
          tokens: the last token of each row; R / B rows for each source, one after the other.
          decoding: from `prefill`, `beams`, `select` or the step before.
          memory: from `prefill`.

        Raises:
          ValueError: a target has as many tokens as the capacity. Within `jax.jit` that is not
            known, and the logits of such a row are arbitrary.
        """
        position, caches, origins, capacity = decoding
        capacity.check("decoding.position", position)
        if origins is not None:  # a beam's next position is in the beam's row
            beam = jnp.arange(origins.shape[1], dtype=origins.dtype)[None, :, None]
            now = position.reshape(*origins.shape[:2], 1)
            origins = jnp.where(jnp.arange(origins.shape[2])[None, None] == now, beam, origins)
        decoder, stack = params["decoder"], self._stacks["decoder"]
        x = self._embed(decoder, params["embedding"], tokens[:, None], position[:, None])
        streams, caches = stack.step(
            decoder["stack"], [x] * stack.n_streams, caches, position, origins, *memory
        )
        decoding = TranslationState(position + 1, caches, origins, capacity)
        return self._next(params, streams), decoding

    def _next(self, params, streams: Sequence[Float[Array, "R 1 D"]]) -> Float[Array, "R V"]:
        """`logits` with the weights from `for_decoding`."""
        features = self._merge(params["decoder"], streams)[:, 0].astype(self.compute_dtype)
        logits = jnp.dot(features, params["softmax"], preferred_element_type=jnp.float32)
        return capped(logits, self.design.logits_soft_cap)

    def beams(self, decoding: TranslationState, n_beams: int, capacity: int) -> TranslationState:
        """Each row repeated `n_beams` times, for `select` to choose from.

        `origins` says which beam's row of the cache has each position of a beam's past, so that
        beams need no copies of it. Only an algorithm whose `decoding` is not "beams" copies.
        """
        n_rows = decoding.position.shape[0]
        rows = jnp.repeat(jnp.arange(n_rows), n_beams)
        caches = take_rows(decoding.caches, rows)
        origins = jnp.zeros((n_rows, n_beams, capacity), jnp.int32)
        position = decoding.position[rows]
        return decoding._replace(position=position, caches=caches, origins=origins)

    def select(self, decoding: TranslationState, parents: Int[Array, "B K"]) -> TranslationState:
        """Beams that continue their parents, numbered among the beams of the same source."""
        n_rows, n_beams = parents.shape
        rows = (parents + n_beams * jnp.arange(n_rows)[:, None]).reshape(-1)
        return decoding._replace(
            position=decoding.position[rows],
            caches=self._stacks["decoder"].reorder_cache(decoding.caches, rows),
            origins=jnp.take_along_axis(decoding.origins, parents[..., None], axis=1),
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Transformer(Residual, EncoderDecoder):
    """The Transformer; with `post_norm=True` the base model of Vaswani et al. 2017.

    Their big model has d_model=1024, d_ff=4096, n_heads=16 and dropout=0.3. There is no `max_len`:
    sinusoidal and rotary positions hold any length. Its arguments are those of `EncoderDecoder`,
    `Residual` and `Model`.
    """


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Reformer(Reversible, EncoderDecoder):
    """A reversible Transformer: neither encoder nor decoder keeps activations for the gradient.

    It attends densely by default, as the Reformer paper's models of WMT do, whose sentences are too
    short for hashing. A decoder layer is three reversible sublayers, each reading the stream that
    was written last; the two streams are averaged at the end. Its arguments are those of
    `EncoderDecoder`, `Reversible` and `Model`.
    """

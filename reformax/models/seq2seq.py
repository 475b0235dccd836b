"""Encoder-decoders: the Transformer (Vaswani et al. 2017) and the Reformer (Kitaev et al. 2020).

An encoder reads the source, a decoder writes the target a token at a time, seeing what the encoder
made of the source by cross-attention. Argument names are those of `trax.models`.

Letters in the shapes: B batch, S source length, T target length, R rows that are decoded (several
of a source in beam search), D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.layers import Layer, LayerNorm, ResidualStack, ReversibleStack
from reformax.layers.dropout import dropout, rate_in
from reformax.layers.stacks import BlockStack
from reformax.models.parts import (
    Activation,
    AttentionType,
    added_positions,
    cycle_of_blocks,
    logits_product,
)
from reformax.ops import dense
from reformax.ops.base import AttentionOp
from reformax.ops.parts.cache import take_rows


class Decoding(NamedTuple):
    """What decoding keeps between steps: of each of the R rows, C positions at most."""

    position: Int[Array, " R"]  # of the next token
    caches: Any  # of every layer's self-attention
    origins: Int[Array, "B K C"] | None  # in beam search: see `EncoderDecoder.beams`


class Memory(NamedTuple):
    """What decoding keeps of each of the B sources, the same at every step."""

    keys_values: Any  # of every layer's cross-attention
    segments: Int[Array, "B S"]  # 0 is padding


class EncoderDecoder(Layer):
    """`[B, S], [B, T] -> [B, T, V]`: logits of each target token given the source and those before.

    `apply` is `logits(features)`; the two are apart so that a loss can take the logits in chunks of
    the sequence. Sources and targets may be packed: several in a row, the k-th of a row's targets
    belonging to the k-th of its sources, told apart by segments, 1, 2, ... along the row and 0 for
    padding. Each is then computed as it would be alone: positions and the shift to the right begin
    anew with it, and it attends to itself and its source. (Algorithms that cut a row into chunks or
    sort it, without a window, choose among what a segment shows by where it stands in the row.)

    One matrix embeds source and target and, transposed, makes the logits (sec. 3.4); embeddings are
    scaled by sqrt(d_model). With a vocabulary of its own the target has a matrix of its own.
    """

    def __init__(
        self,
        input_vocab_size: int,
        output_vocab_size: int | None,
        d_model: int,
        positions: Layer | None,
        encoder: BlockStack,
        decoder: BlockStack,
        dropout: float,
        norm_epsilon: float,
        final_norm: bool,
        dtype: str,
        mode: str,
    ):
        super().__init__(n_in=2, name="EncoderDecoder")
        for name, size in (
            ("input_vocab_size", input_vocab_size),
            ("output_vocab_size", output_vocab_size),
        ):
            if size is not None and size < 2:
                raise ValueError(f"{name} is {size}: expected at least 2")
        self._input_vocab_size = input_vocab_size
        self._output_vocab_size = output_vocab_size
        self._d_model = d_model
        self._positions = positions
        self._stacks = {"encoder": encoder, "decoder": decoder}
        self._dropout = rate_in(mode, dropout)
        self._norm = LayerNorm(norm_epsilon) if final_norm else None
        self._dtype = dtype

    @property
    def vocab_size(self) -> int:
        """The number of ids that a target has."""
        return self._output_vocab_size or self._input_vocab_size

    @property
    def source_vocab_size(self) -> int:
        """The number of ids that a source has."""
        return self._input_vocab_size

    @property
    def max_length(self) -> int | None:
        """The largest length that the positions hold; None if they hold any."""
        return None if self._positions is None else self._positions.max_length

    def init_params(self, rng, shape, *shapes):
        rngs = jax.random.split(rng, 6)
        hidden = (*shape, self._d_model)
        params = {"embedding": self._embedding(rngs[0], self.vocab_size)}
        if self._output_vocab_size is not None:
            params["source_embedding"] = self._embedding(rngs[1], self._input_vocab_size)
        for i, (side, stack) in enumerate(self._stacks.items()):
            params[side] = {"stack": stack.init_params(rngs[2 + i], *[hidden] * stack.n_out)}
            if self._norm is not None:
                params[side]["norm"] = self._norm.init_params(None, hidden)
            if self._positions is not None:
                params[side]["positions"] = self._positions.init_params(rngs[4 + i], hidden)
        return params

    def _embedding(self, rng, vocab_size: int) -> Float[Array, "V D"]:
        return jax.random.normal(rng, (vocab_size, self._d_model)) / math.sqrt(self._d_model)

    def encode(
        self,
        params,
        source: Int[Array, "B S"],
        source_segments: Int[Array, "B S"] | None = None,
        rng=None,
    ) -> Float[Array, "B S D"]:
        """What the decoder attends to, float32; what it has at padding means nothing.

        Args:
          params: the weights.
          source: tokens.
          source_segments: ids; None: 1 where the token is not 0.
          rng: the source of hashes and of dropout.
        """
        segments = _segments(source, source_segments)
        table = params.get("source_embedding", params["embedding"])
        rngs = _rngs(rng)
        x = self._embed(params["encoder"], table, source, segment_positions(segments), rngs[0])
        stack = self._stacks["encoder"]
        streams = stack.apply(params["encoder"]["stack"], *[x] * stack.n_out, segments, rng=rngs[1])
        return self._merged(params["encoder"], streams if stack.n_out > 1 else (streams,))

    def features(self, params, inputs: Sequence[Array], rng=None) -> Float[Array, "B T D"]:
        """What the logits are a linear function of.

        Args:
          params: the weights.
          inputs: source `[B, S]`, target `[B, T]` and, if any row is packed, the segments of both.
          rng: the source of hashes and of dropout.
        """
        source, target, *segments = inputs
        source_segments, target_segments = (
            _segments(tokens, given)
            for tokens, given in zip((source, target), segments or (None, None), strict=True)
        )
        encoder_rng, decoder_rng = _rngs(rng)
        memory = self.encode(params, source, source_segments, encoder_rng)
        rngs = _rngs(decoder_rng)
        x = self._embed(
            params["decoder"],
            params["embedding"],
            shift_right(target, target_segments),
            segment_positions(target_segments),
            rngs[0],
        )
        stack = self._stacks["decoder"]
        streams = stack.apply(
            params["decoder"]["stack"],
            *[x] * stack.n_out,
            target_segments,
            memory,
            source_segments,
            rng=rngs[1],
        )
        return self._merged(params["decoder"], streams if stack.n_out > 1 else (streams,))

    def _embed(
        self, params, table, tokens: Int[Array, "B T"], position: Int[Array, "B T"], rng=None
    ) -> Float[Array, "B T D"]:
        x = table[tokens] * math.sqrt(self._d_model)
        if self._positions is not None:
            length = tokens.shape[1]
            if self.max_length is not None and length > self.max_length:
                raise ValueError(
                    f"a row has {length} positions and the model's hold {self.max_length}: enlarge "
                    "pos_axial_shape or shorten the rows"
                )
            x = self._positions.apply_at(params["positions"], x, position)
        return dropout(x, self._dropout, rng)

    def _merged(self, params, streams: Sequence[Float[Array, "B T D"]]) -> Float[Array, "B T D"]:
        """A stack's output: the mean of its streams, normalised if the stack does not end so."""
        x = sum(streams) / len(streams) if len(streams) > 1 else streams[0]
        return x if self._norm is None else self._norm.apply(params["norm"], x)

    def logits(self, params, features: Float[Array, "*d D"]) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities, float32, of a product in the sublayers' dtype."""
        return logits_product(features, params["embedding"], self._dtype)

    def apply(
        self,
        params,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        rng=None,
    ) -> Float[Array, "B T V"]:
        inputs = source, target, *(_segments(source, source_segments),)
        inputs = (*inputs, _segments(target, target_segments))
        return self.logits(params, self.features(params, inputs, rng))

    # Decoding: `prefill` reads sources and makes the first token's logits, `step` the next ones'.

    def for_decoding(self, params) -> Any:
        """The decoder's weights for decoding: layers apart, in the dtypes that they are used in.

        `softmax [D, V]` is the embedding as the logits' product reads it: with few rows a CPU takes
        as long to transpose the table as to multiply by it.
        """
        stack = self._stacks["decoder"].for_decoding(params["decoder"]["stack"])
        return {
            "decoder": params["decoder"] | {"stack": stack},
            "embedding": params["embedding"],
            "softmax": params["embedding"].astype(self._dtype).T,
        }

    def prefill(
        self,
        params,
        weights,
        source: Int[Array, "B S"],
        capacity: int,
        rng=None,
        source_segments: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B V"], Decoding, Memory]:
        """Reads sources in one forward pass.

        Args:
          params: the weights.
          weights: the same as `for_decoding` has them.
          source: tokens, padded on the right.
          capacity: how many tokens a target can have, at least 1.
          rng: the source of hashes: those of `apply` with the same rng.
          source_segments: 0 is padding; None: where the token is 0.

        Returns:
          The logits of each target's first token, what `step` goes on from, and what it reads
          besides.

        Raises:
          ValueError: the capacity is below 1 or above that of the positions, or the model is not
            built for evaluation.
          NotImplementedError: an attention algorithm that cannot decode.
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: expected at least 1")
        if self.max_length is not None and capacity > self.max_length:
            raise ValueError(
                f"capacity is {capacity}: expected at most {self.max_length}, which is what the "
                "model's positions hold"
            )
        segments = _segments(source, source_segments)
        encoder_rng, decoder_rng = _rngs(rng)
        memory = self.encode(params, source, segments, encoder_rng)
        decoder, stack = weights["decoder"], self._stacks["decoder"]
        position = jnp.zeros(source.shape[0], jnp.int32)
        # A target begins with token 0, as the shift to the right has it.
        x = self._embed(decoder, params["embedding"], position[:, None], position[:, None])
        streams, caches, keys_values = stack.prefill(
            decoder["stack"],
            [x] * stack.n_out,
            position + 1,
            capacity,
            _rngs(decoder_rng)[1],
            memory,
            segments,
        )
        logits = self._next(weights, streams)
        return logits, Decoding(position + 1, caches, None), Memory(keys_values, segments)

    def step(
        self, params, tokens: Int[Array, " R"], decoding: Decoding, memory: Memory
    ) -> tuple[Float[Array, "R V"], Decoding]:
        """The logits of the token after the one given, for each row.

        Args:
          params: the weights as `for_decoding` has them.
          tokens: the last token of each row; R / B rows for each source, one after the other.
          decoding: what `prefill`, `beams`, `select` or the step before gave.
          memory: what `prefill` gave.
        """
        position, caches, origins = decoding
        if origins is not None:  # the next position of a beam will be in its own row
            beam = jnp.arange(origins.shape[1])[:, None]
            now = position.reshape(*origins.shape[:2], 1)
            origins = jnp.where(jnp.arange(origins.shape[2]) == now, beam, origins)
        decoder, stack = params["decoder"], self._stacks["decoder"]
        x = self._embed(decoder, params["embedding"], tokens[:, None], position[:, None])
        streams, caches = stack.step(
            decoder["stack"], [x] * stack.n_out, caches, position, origins, *memory
        )
        return self._next(params, streams), Decoding(position + 1, caches, origins)

    def _next(self, params, streams: Sequence[Float[Array, "R 1 D"]]) -> Float[Array, "R V"]:
        """`logits` by the weights of `for_decoding`."""
        features = self._merged(params["decoder"], streams)[:, 0].astype(self._dtype)
        return jnp.dot(features, params["softmax"], preferred_element_type=jnp.float32)

    def beams(self, decoding: Decoding, n_beams: int, capacity: int) -> Decoding:
        """Each row as `n_beams` rows, from which `select` may choose, one after the other.

        Beams share their past: which beam's cache has a position of each is kept, and caches are
        copied for those attention algorithms alone that cannot go by it.
        """
        n_rows = decoding.position.shape[0]
        rows = jnp.repeat(jnp.arange(n_rows), n_beams)
        caches = take_rows(decoding.caches, rows)
        origins = jnp.zeros((n_rows, n_beams, capacity), jnp.int32)
        return Decoding(decoding.position[rows], caches, origins)

    def select(self, decoding: Decoding, parents: Int[Array, "B K"]) -> Decoding:
        """Beams that go on from those of their own search that `parents` names."""
        n_rows, n_beams = parents.shape
        rows = (parents + n_beams * jnp.arange(n_rows)[:, None]).reshape(-1)
        return Decoding(
            decoding.position[rows],
            self._stacks["decoder"].reorder_cache(decoding.caches, rows),
            jnp.take_along_axis(decoding.origins, parents[..., None], axis=1),
        )


def _segments(tokens, segments) -> Int[Array, "B T"]:
    return (tokens != 0).astype(jnp.int32) if segments is None else segments


def _rngs(rng) -> tuple[Any, Any]:
    return (None, None) if rng is None else tuple(jax.random.split(rng))


def _begins(segments: Int[Array, "B T"]):
    """Where a segment begins, or padding."""
    return segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How far each token is from the first of its segment."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return index - jax.lax.cummax(jnp.where(_begins(segments), index, 0), axis=1)


def shift_right(target: Int[Array, "B T"], segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The token before each, and 0 in front of every segment."""
    return jnp.where(_begins(segments), 0, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])


def _encoder_decoder(
    stack,
    input_vocab_size: int,
    output_vocab_size: int | None,
    d_model: int,
    n_encoder_layers: int,
    n_decoder_layers: int,
    encoder_attention_type: AttentionType,
    decoder_attention_type: AttentionType,
    cross_attention_type: AttentionOp,
    pos_type: str,
    pos_axial_shape: Sequence[int],
    pos_d_axial_embs: Sequence[int],
    final_norm: bool,
    norm_epsilon: float,
    scan_layers: bool,
    dtype: str,
    mode: str,
    **options,
) -> EncoderDecoder:
    """An encoder-decoder of `stack(blocks, n_layers)`; `options` are those of the blocks."""
    if not isinstance(cross_attention_type, AttentionOp):
        raise ValueError(
            f"cross_attention_type is {cross_attention_type!r}: expected an AttentionOp, such as "
            "dense.dense()"
        )
    n_heads = options["n_heads"]
    if d_model < 1 or n_heads < 1 or d_model % n_heads:
        raise ValueError(f"d_model is {d_model}: expected a multiple of n_heads, {n_heads}")
    for name in ("d_attention_key", "d_attention_value"):
        options[name] = options[name] or d_model // n_heads
    options |= dict(use_rotary=pos_type == "rotary", mode=mode)
    encoder = cycle_of_blocks(
        encoder_attention_type, causal=False, name="encoder_attention_type", **options
    )
    decoder = cycle_of_blocks(
        decoder_attention_type,
        cross_attention_type=cross_attention_type,
        name="decoder_attention_type",
        **options,
    )
    of_stacks = dict(dtype=dtype, norm_epsilon=norm_epsilon, scan_layers=scan_layers)
    return EncoderDecoder(
        input_vocab_size,
        output_vocab_size,
        d_model,
        added_positions(pos_type, pos_axial_shape, pos_d_axial_embs),
        stack(encoder, n_encoder_layers, **of_stacks),
        stack(decoder, n_decoder_layers, **of_stacks),
        options["dropout"],
        norm_epsilon,
        final_norm,
        dtype,
        mode,
    )


def Transformer(
    input_vocab_size: int,
    output_vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    ff_activation: Activation = "relu",
    ff_dropout: float | None = 0.0,
    attention_dropout: float = 0.0,
    attention_bias: bool = False,
    d_attention_key: int | None = None,
    d_attention_value: int | None = None,
    encoder_attention_type: AttentionType = dense.dense(),  # noqa: B008
    decoder_attention_type: AttentionType = dense.dense(),  # noqa: B008
    cross_attention_type: AttentionOp = dense.dense(),  # noqa: B008
    pos_type: str = "sinusoidal",
    pos_axial_shape: Sequence[int] = (),
    pos_d_axial_embs: Sequence[int] = (),
    ff_chunk_size: int = 0,
    norm_epsilon: float = 1e-6,
    scan_layers: bool = True,
    post_norm: bool = False,
    remat: bool = False,
    dtype: str = "float32",
    mode: str = "train",
) -> EncoderDecoder:
    """The Transformer; with `post_norm=True` that of Vaswani et al. 2017, base as it comes.

    Their big model has d_model=1024, d_ff=4096, n_heads=16 and dropout=0.3. There is no `max_len`:
    sinusoidal and rotary positions hold any length.

    Args:
      input_vocab_size: number of tokens of the source and, unless given apart, of the target.
      output_vocab_size: number of tokens of the target; it then has an embedding of its own.
      d_model: the size of the residual stream.
      d_ff: the width of the feed-forward layers.
      n_encoder_layers: number of layers, a multiple of the length of the encoder's cycle.
      n_decoder_layers: number of layers, a multiple of the length of the decoder's cycle.
      n_heads: number of attention heads.
      dropout: the rate on embeddings and sublayers' outputs.
      ff_activation: the feed-forward layers' nonlinearity, a function or a name: "relu", "gelu",
        its approximation "gelu_tanh", "silu".
      ff_dropout: the rate on the hidden layers of the feed-forward layers, 0 in the paper; None:
        `dropout`.
      attention_dropout: the rate on attention weights.
      attention_bias: whether the projections of attention have biases, the output's too.
      d_attention_key: the size of a head's queries and keys; None: d_model / n_heads.
      d_attention_value: the size of a head's values; None: d_model / n_heads.
      encoder_attention_type: the encoder's algorithm, or a cycle of them over the layers.
      decoder_attention_type: that of the decoder's self-attention.
      cross_attention_type: that of the decoder's attention to the encoder's output; its traits have
        to say `cross`.
      pos_type: "sinusoidal", "rotary" (in self-attention), "axial", or "none".
      pos_axial_shape: for "axial": the grid, its product the largest length.
      pos_d_axial_embs: for "axial": the features of each axis, adding up to `d_model`.
      ff_chunk_size: if > 0, feed-forward layers take this many positions at a time.
      norm_epsilon: what layer norms add to the variance.
      scan_layers: whether the compiler sees one cycle of layers and a loop; False writes them all
        out, which takes it longer and makes a GPU's step faster.
      post_norm: whether a norm follows each residual sum, as in the paper, instead of preceding
        each sublayer.
      remat: whether the gradient computes each layer again instead of keeping its activations.
      dtype: what the sublayers and the logits' product compute in; weights and streams are float32.
      mode: "train" or "eval".
    """

    def stack(blocks, n_layers, **options):
        return ResidualStack(blocks, n_layers, remat=remat, post_norm=post_norm, **options)

    return _encoder_decoder(
        stack,
        input_vocab_size,
        output_vocab_size,
        d_model,
        n_encoder_layers,
        n_decoder_layers,
        encoder_attention_type,
        decoder_attention_type,
        cross_attention_type,
        pos_type,
        pos_axial_shape,
        pos_d_axial_embs,
        final_norm=not post_norm,
        norm_epsilon=norm_epsilon,
        scan_layers=scan_layers,
        dtype=dtype,
        mode=mode,
        n_heads=n_heads,
        d_attention_key=d_attention_key,
        d_attention_value=d_attention_value,
        d_ff=d_ff,
        dropout=dropout,
        ff_dropout=ff_dropout,
        attention_dropout=attention_dropout,
        attention_bias=attention_bias,
        ff_activation=ff_activation,
        ff_chunk_size=ff_chunk_size,
    )


def Reformer(
    input_vocab_size: int,
    output_vocab_size: int | None = None,
    d_model: int = 512,
    d_ff: int = 2048,
    n_encoder_layers: int = 6,
    n_decoder_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    ff_activation: Activation = "relu",
    ff_dropout: float | None = 0.0,
    attention_dropout: float = 0.0,
    attention_bias: bool = False,
    d_attention_key: int | None = None,
    d_attention_value: int | None = None,
    encoder_attention_type: AttentionType = dense.dense(),  # noqa: B008
    decoder_attention_type: AttentionType = dense.dense(),  # noqa: B008
    cross_attention_type: AttentionOp = dense.dense(),  # noqa: B008
    pos_type: str = "sinusoidal",
    pos_axial_shape: Sequence[int] = (),
    pos_d_axial_embs: Sequence[int] = (),
    ff_chunk_size: int = 0,
    norm_epsilon: float = 1e-6,
    scan_layers: bool = True,
    exact: bool = False,
    keep_ff_outputs: bool = False,
    dtype: str = "float32",
    mode: str = "train",
) -> EncoderDecoder:
    """A reversible Transformer: neither encoder nor decoder keeps activations for the gradient.

    As the Reformer paper's models of WMT, whose sentences are too short for hashing, it attends
    densely unless told otherwise. A decoder layer is three sublayers in a reversible row, each
    reading the stream that was written last; the two streams are averaged at the end.

    Args are those of `Transformer`, but for:
      d_model: the size of each of the two streams.
      exact: whether the backward pass rebuilds activations bit for bit (`layers.reversible`).
      keep_ff_outputs: whether it finds the feed-forward layers' outputs kept: fewer products, and
        memory that grows with the depth.
    """

    def stack(blocks, n_layers, **options):
        return ReversibleStack(
            blocks, n_layers, exact=exact, keep_ff_outputs=keep_ff_outputs, **options
        )

    return _encoder_decoder(
        stack,
        input_vocab_size,
        output_vocab_size,
        d_model,
        n_encoder_layers,
        n_decoder_layers,
        encoder_attention_type,
        decoder_attention_type,
        cross_attention_type,
        pos_type,
        pos_axial_shape,
        pos_d_axial_embs,
        final_norm=True,
        norm_epsilon=norm_epsilon,
        scan_layers=scan_layers,
        dtype=dtype,
        mode=mode,
        n_heads=n_heads,
        d_attention_key=d_attention_key,
        d_attention_value=d_attention_value,
        d_ff=d_ff,
        dropout=dropout,
        ff_dropout=ff_dropout,
        attention_dropout=attention_dropout,
        attention_bias=attention_bias,
        ff_activation=ff_activation,
        ff_chunk_size=ff_chunk_size,
    )

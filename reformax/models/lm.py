"""Language models: the Reformer (Kitaev et al. 2020) and the Transformer it is measured against.

Both read tokens `[B, T]`, shift them right by one, and return logits `[B, T, vocabulary]` of each
token given those before it. Argument names are those of `trax.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.layers import Layer, LayerNorm, ResidualStack, ReversibleStack
from reformax.layers.dropout import dropout, rate_in
from reformax.layers.positions import EMBEDDING_SCALE
from reformax.models.parts import (
    Activation,
    AttentionType,
    added_positions,
    cycle_of_blocks,
    logits_product,
)
from reformax.ops import dense, local, lsh

glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")


class Decoding(NamedTuple):
    """What decoding keeps between steps."""

    position: Int[Array, " B"]  # the next position of each row
    caches: Any  # of every layer


class LanguageModel(Layer):
    """Embedding, positions, a stack of layers, a norm, and logits.

    `[B, T] -> [B, T, vocab_size]`, float32. `apply` is `logits(features)`; the two are apart so
    that a loss can take the logits in chunks of the sequence.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        positions: Layer | None,
        stack: ReversibleStack | ResidualStack,
        dropout: float,
        norm_epsilon: float,
        mode: str,
        dtype: str,
    ):
        super().__init__(name="LanguageModel")
        if vocab_size < 2 or d_model < 1:
            raise ValueError(
                f"vocab_size is {vocab_size} and d_model {d_model}: expected at least 2 and 1"
            )
        self._vocab_size = vocab_size
        self._d_model = d_model
        self._positions = positions
        self._stack = stack
        self._reversible = isinstance(stack, ReversibleStack)
        self._dropout = rate_in(mode, dropout)
        self._dtype = dtype
        # Of a mean over many targets float16 would lose the gradient: its features are float32.
        self._norm = LayerNorm(norm_epsilon, "float32" if dtype == "float16" else dtype)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def init_params(self, rng, shape):
        rng_e, rng_p, rng_s, rng_l = jax.random.split(rng, 4)
        hidden = (*shape, self._d_model)
        d_features = self._d_model * (2 if self._reversible else 1)
        params = {
            "embedding": EMBEDDING_SCALE
            * jax.random.normal(rng_e, (self._vocab_size, self._d_model)),
            "stack": self._stack.init_params(rng_s, *[hidden] * (2 if self._reversible else 1)),
            "norm": self._norm.init_params(None, (d_features,)),
            "logits": {
                "w": glorot(rng_l, (d_features, self._vocab_size)),
                "b": jnp.zeros(self._vocab_size),
            },
        }
        if self._positions is not None:
            params["positions"] = self._positions.init_params(rng_p, hidden)
        return params

    def features(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T D"]:
        """What the logits are a linear function of; D is twice `d_model` if reversible."""
        return self.encode(params, jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1], rng=rng)

    def encode(
        self,
        params,
        inputs: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        rng=None,
    ) -> Float[Array, "B T D"]:
        """The features of inputs as they are, unshifted: position t has read those up to t.

        Args:
          params: the weights.
          inputs: what `features` makes of tokens by a shift to the right, with 0 in front.
          segments: ids; a position sees its own id only, and 0 is padding.
          rng: the source of hashes and of dropout.
        """
        rng_e, rng_s, rng_f = (None,) * 3 if rng is None else jax.random.split(rng, 3)
        x = self._embed(params, inputs)
        x = dropout(x, self._dropout, rng_e)
        if self._reversible:
            streams = self._stack.apply(params["stack"], x, x, segments, rng=rng_s)
            x = jnp.concatenate(streams, axis=-1)
        else:
            x = self._stack.apply(params["stack"], x, segments, rng=rng_s)
        return dropout(self._norm.apply(params["norm"], x), self._dropout, rng_f)

    def _embed(self, params, inputs: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = params["embedding"][inputs]
        return x if self._positions is None else self._positions.apply(params["positions"], x)

    def logits(self, params, features: Float[Array, "*d D"]) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities, float32, of a product in the sublayers' dtype."""
        return (
            logits_product(features, params["logits"]["w"].T, self._dtype) + params["logits"]["b"]
        )

    def apply(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T V"]:
        return self.logits(params, self.features(params, tokens, rng))

    # Decoding: `prefill` takes a prompt at once, `step` a token a row.

    @property
    def max_length(self) -> int | None:
        """The largest length that the positions hold; None if they hold any."""
        return None if self._positions is None else self._positions.max_length

    def for_decoding(self, params) -> Any:
        """The weights for `step`: layers apart, in the dtypes that they are used in."""
        logits = params["logits"] | {"w": params["logits"]["w"].astype(self._dtype)}
        return params | {"stack": self._stack.for_decoding(params["stack"]), "logits": logits}

    def prefill(
        self, params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int, rng=None
    ) -> tuple[Float[Array, "B V"], Decoding]:
        """Reads prompts in one forward pass.

        Args:
          params: the weights.
          tokens: prompts, padded on the right.
          lengths: the number of tokens in each row that are no padding; 0 is an empty prompt.
          capacity: how long prompt and continuation can become.
          rng: the source of hashes: those of `apply` with the same rng.

        Returns:
          The logits of each row's next token, and what `step` goes on from.

        Raises:
          ValueError: the capacity leaves no room behind the prompts or is above that of the
            positions, or the model is not built for evaluation.
          NotImplementedError: an attention algorithm that cannot decode.
        """
        if capacity <= tokens.shape[1]:
            raise ValueError(
                f"capacity is {capacity}: expected more than {tokens.shape[1]}, the prompts' length"
            )
        if self.max_length is not None and capacity > self.max_length:
            raise ValueError(
                f"capacity is {capacity}: expected at most {self.max_length}, which is what the "
                "model's positions hold"
            )
        rng = None if rng is None else jax.random.split(rng, 3)[1]
        # Position t reads token t - 1, and position 0 reads none: a prompt of n makes n + 1.
        x = self._embed(params, jnp.pad(tokens, ((0, 0), (1, 0))))
        streams, caches, _ = self._stack.prefill(
            params["stack"], [x] * self._stack.n_out, lengths + 1, capacity, rng
        )
        last = lengths[:, None, None]
        streams = [jnp.take_along_axis(x, last, axis=1) for x in streams]
        return self._next(params, streams), Decoding(lengths + 1, caches)

    def step(
        self, params, tokens: Int[Array, " B"], decoding: Decoding
    ) -> tuple[Float[Array, "B V"], Decoding]:
        """The logits of the token after the one given, for each row.

        Args:
          params: the weights as `for_decoding` has them.
          tokens: the last token of each row.
          decoding: what `prefill` or the step before gave.
        """
        position, caches = decoding
        x = params["embedding"][tokens[:, None]]
        if self._positions is not None:
            x = self._positions.apply_at(params["positions"], x, position[:, None])
        streams, caches = self._stack.step(
            params["stack"], [x] * self._stack.n_out, caches, position
        )
        return self._next(params, streams), Decoding(position + 1, caches)

    def _next(self, params, streams: Sequence[Float[Array, "B 1 D"]]) -> Float[Array, "B V"]:
        x = self._norm.apply(params["norm"], jnp.concatenate(streams, axis=-1))
        return self.logits(params, x)[:, 0]


def ReformerLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int = 2048,
    d_attention_key: int = 64,
    d_attention_value: int = 64,
    n_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    ff_dropout: float | None = None,
    attention_dropout: float = 0.0,
    attention_bias: bool = False,
    attention_type: AttentionType = (local.local(), lsh.lsh()),  # noqa: B008
    pos_type: str = "rotary",
    pos_axial_shape: Sequence[int] = (),
    pos_d_axial_embs: Sequence[int] = (),
    ff_activation: Activation = jax.nn.gelu,
    ff_chunk_size: int = 0,
    norm_epsilon: float = 1e-6,
    scan_layers: bool = True,
    exact: bool = False,
    keep_ff_outputs: bool = False,
    dtype: str = "float32",
    mode: str = "train",
) -> LanguageModel:
    """A reversible Transformer whose layers cycle through attention algorithms.

    Args:
      vocab_size: number of tokens.
      d_model: the size of each of the two streams.
      d_ff: the width of the feed-forward layers.
      d_attention_key: the size of a head's queries and keys.
      d_attention_value: the size of a head's values.
      n_layers: number of layers, a multiple of the cycle's length.
      n_heads: number of attention heads.
      dropout: the rate on embeddings, sublayers' outputs and features.
      ff_dropout: the rate on the hidden layers of the feed-forward layers; None: `dropout`.
      attention_dropout: the rate on attention weights.
      attention_bias: whether the projections of attention have biases, the output's too.
      attention_type: an algorithm, or a cycle of them over the layers.
      pos_type: "rotary", "axial", "sinusoidal", or "none".
      pos_axial_shape: for "axial": the grid, its product the largest length.
      pos_d_axial_embs: for "axial": the features of each axis, adding up to `d_model`.
      ff_activation: the feed-forward layers' nonlinearity, a function or a name: "relu", "gelu",
        its approximation "gelu_tanh", "silu".
      ff_chunk_size: if > 0, feed-forward layers take this many positions at a time.
      norm_epsilon: what layer norms add to the variance.
      scan_layers: whether the compiler sees one cycle of layers and a loop; False writes them all
        out, which takes it longer and makes a GPU's step faster.
      exact: whether the backward pass rebuilds activations bit for bit (`layers.reversible`).
      keep_ff_outputs: whether it finds the feed-forward layers' outputs kept: fewer products, and
        memory that grows with the depth.
      dtype: what the sublayers and the logits' product compute in; weights and streams are float32.
      mode: "train" or "eval".
    """
    blocks = cycle_of_blocks(
        attention_type,
        n_heads=n_heads,
        d_attention_key=d_attention_key,
        d_attention_value=d_attention_value,
        d_ff=d_ff,
        dropout=dropout,
        ff_dropout=ff_dropout,
        attention_dropout=attention_dropout,
        attention_bias=attention_bias,
        use_rotary=pos_type == "rotary",
        ff_activation=ff_activation,
        ff_chunk_size=ff_chunk_size,
        mode=mode,
    )
    positions = added_positions(pos_type, pos_axial_shape, pos_d_axial_embs)
    stack = ReversibleStack(
        blocks,
        n_layers,
        dtype=dtype,
        exact=exact,
        keep_ff_outputs=keep_ff_outputs,
        norm_epsilon=norm_epsilon,
        scan_layers=scan_layers,
    )
    return LanguageModel(vocab_size, d_model, positions, stack, dropout, norm_epsilon, mode, dtype)


def TransformerLM(
    vocab_size: int,
    d_model: int = 512,
    d_ff: int = 2048,
    d_attention_key: int = 64,
    d_attention_value: int = 64,
    n_layers: int = 6,
    n_heads: int = 8,
    dropout: float = 0.1,
    ff_dropout: float | None = None,
    attention_dropout: float = 0.0,
    attention_bias: bool = False,
    attention_type: AttentionType = dense.dense(),  # noqa: B008
    pos_type: str = "rotary",
    pos_axial_shape: Sequence[int] = (),
    pos_d_axial_embs: Sequence[int] = (),
    ff_activation: Activation = jax.nn.gelu,
    ff_chunk_size: int = 0,
    norm_epsilon: float = 1e-6,
    scan_layers: bool = True,
    remat: bool = False,
    dtype: str = "float32",
    mode: str = "train",
) -> LanguageModel:
    """A pre-norm Transformer decoder: the baseline.

    Args are those of `ReformerLM`, but for:
      remat: whether the gradient computes each layer again instead of keeping its activations.
    """
    blocks = cycle_of_blocks(
        attention_type,
        n_heads=n_heads,
        d_attention_key=d_attention_key,
        d_attention_value=d_attention_value,
        d_ff=d_ff,
        dropout=dropout,
        ff_dropout=ff_dropout,
        attention_dropout=attention_dropout,
        attention_bias=attention_bias,
        use_rotary=pos_type == "rotary",
        ff_activation=ff_activation,
        ff_chunk_size=ff_chunk_size,
        mode=mode,
    )
    positions = added_positions(pos_type, pos_axial_shape, pos_d_axial_embs)
    stack = ResidualStack(
        blocks,
        n_layers,
        dtype=dtype,
        remat=remat,
        norm_epsilon=norm_epsilon,
        scan_layers=scan_layers,
    )
    return LanguageModel(vocab_size, d_model, positions, stack, dropout, norm_epsilon, mode, dtype)

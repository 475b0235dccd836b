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
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import Depth, SettingError, Size, VocabSize
from reformax.layers import LayerNorm
from reformax.layers.dropout import dropout
from reformax.layers.positions import EMBEDDING_SCALE
from reformax.models.base import (
    AttentionType,
    Model,
    Residual,
    Reversible,
    check_capacity,
)
from reformax.models.logits import logits_product
from reformax.ops import dense, local, lsh
from reformax.ops.parts.masks import Ids, Tokens

glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")


class Decoding(NamedTuple):
    """The state of decoding between steps."""

    position: Int[Array, " B"]  # the next position of each row
    caches: Any  # of every layer


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LanguageModel(Model):
    """Embedding, positions, a stack of layers, a norm, and logits.

    `[B, T] -> [B, T, vocab_size]`, float32. `apply` is `logits(features)`; the two are apart so
    that a loss can take the logits in chunks of the sequence. More arguments are those of `Model`.

    Args:
      vocab_size: number of tokens.
      n_layers: number of layers, a multiple of the cycle's length.
      attention_type: an algorithm, or a cycle of them over the layers.
    """

    vocab_size: VocabSize = dataclasses.field(kw_only=False)
    n_layers: Depth = 6
    attention_type: AttentionType
    d_attention_key: Size | None = 64
    d_attention_value: Size | None = 64

    def __post_init__(self):
        super().__post_init__()
        self._layers = self._stack(self._blocks("attention_type"), self.n_layers)
        # The gradient of a mean over many targets underflows in float16: features are float32.
        narrow = self.dtype == "float16"
        self._norm = LayerNorm(self.norm_epsilon, "float32" if narrow else self.dtype)

    def init_params(self, rng, shape):
        rng_e, rng_p, rng_s, rng_l = jax.random.split(rng, 4)
        hidden, n_streams = (*shape, self.d_model), self._layers.n_out
        d_features = n_streams * self.d_model
        embedding = jax.random.normal(rng_e, (self.vocab_size, self.d_model))
        params = {
            "embedding": EMBEDDING_SCALE * embedding,
            "stack": self._layers.init_params(rng_s, *[hidden] * n_streams),
            "norm": self._norm.init_params(None, (d_features,)),
            "logits": {
                "w": glorot(rng_l, (d_features, self.vocab_size)),
                "b": jnp.zeros(self.vocab_size),
            },
        }
        if self._positions is not None:
            params["positions"] = self._positions.init_params(rng_p, hidden)
        return params

    def features(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T D"]:
        """The input of `logits`; D is twice `d_model` if the model has two streams."""
        return self.encode(params, jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1], rng=rng)

    def encode(
        self,
        params,
        inputs: Int[Array, "B T"],
        segments: Ids | Tokens | None = None,
        rng=None,
    ) -> Float[Array, "B T D"]:
        """The features of inputs that are not shifted: position t has read those up to t.

        Args:
          params: the weights.
          inputs: tokens; `features` gives them shifted to the right, with 0 in front.
          segments: ids; a position sees its own id only, and 0 is padding. `Tokens` have marks too.
          rng: the source of hashes and of dropout.
        """
        rng_e, rng_s, rng_f = (None,) * 3 if rng is None else jax.random.split(rng, 3)
        x = dropout(self._embed(params, inputs), self._dropout_rate, rng_e)
        streams = self._layers.apply(
            params["stack"], *[x] * self._layers.n_out, segments, rng=rng_s
        )
        x = jnp.concatenate(streams, axis=-1) if self._layers.n_out > 1 else streams
        return dropout(self._norm.apply(params["norm"], x), self._dropout_rate, rng_f)

    def _embed(self, params, inputs: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = devices.gathered(params["embedding"])[inputs]
        return x if self._positions is None else self._positions.apply(params["positions"], x)

    def logits(self, params, features: Float[Array, "*d D"]) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities, float32; their product is computed in `dtype`."""
        w, b = params["logits"]["w"], params["logits"]["b"]
        product = logits_product(features, w.T, self.dtype)
        return product + jnp.expand_dims(b, tuple(range(product.ndim - 1)))

    def apply(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T V"]:
        return self.logits(params, self.features(params, tokens, rng))

    # Decoding: `prefill` reads whole prompts, `step` one token of each row.

    def for_decoding(self, params) -> Any:
        """The weights for `step`: a tree for each repeat of the cycle, cast to their dtypes."""
        logits = params["logits"] | {"w": params["logits"]["w"].astype(self.dtype)}
        return params | {"stack": self._layers.for_decoding(params["stack"]), "logits": logits}

    def prefill(
        self, params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int, rng=None
    ) -> tuple[Float[Array, "B V"], Decoding]:
        """Reads prompts in one forward pass.

        Args:
          params: the weights.
          tokens: prompts, padded on the right.
          lengths: the number of tokens in each row before its padding; 0 is an empty prompt.
          capacity: the largest length of prompt and continuation together.
          rng: the source of hashes, which are those of `apply` with the same rng.

        Returns:
          The logits of each row's next token, and the state that `step` goes on from.

        Raises:
          ValueError: the capacity leaves no room after the prompts or is above that of the
            positions, or the model is not built for evaluation.
          NotImplementedError: an attention algorithm cannot decode.
        """
        if capacity <= tokens.shape[1]:
            raise SettingError(
                f"capacity is {capacity}: expected more than {tokens.shape[1]}, the prompts' length"
            )
        check_capacity(capacity, self.max_length)
        rng = None if rng is None else jax.random.split(rng, 3)[1]
        # Position t reads token t - 1 and position 0 none: n tokens make n + 1 positions.
        x = self._embed(params, jnp.pad(tokens, ((0, 0), (1, 0))))
        streams, caches, _ = self._layers.prefill(
            params["stack"], [x] * self._layers.n_out, lengths + 1, capacity, rng
        )
        last = lengths[:, None, None]
        streams = [jnp.take_along_axis(x, last, axis=1) for x in streams]
        return self._next(params, streams), Decoding(lengths + 1, caches)

    def step(
        self, params, tokens: Int[Array, " B"], decoding: Decoding
    ) -> tuple[Float[Array, "B V"], Decoding]:
        """The logits of the token after the one given, for each row.

        Args:
          params: the weights from `for_decoding`.
          tokens: the last token of each row.
          decoding: from `prefill` or the step before.
        """
        position, caches = decoding
        x = params["embedding"][tokens[:, None]]
        if self._positions is not None:
            x = self._positions.apply_at(params["positions"], x, position[:, None])
        streams, caches = self._layers.step(
            params["stack"], [x] * self._layers.n_out, caches, position
        )
        return self._next(params, streams), Decoding(position + 1, caches)

    def _next(self, params, streams: Sequence[Float[Array, "B 1 D"]]) -> Float[Array, "B V"]:
        x = self._norm.apply(params["norm"], jnp.concatenate(streams, axis=-1))
        return self.logits(params, x)[:, 0]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReformerLM(Reversible, LanguageModel):
    """A reversible Transformer whose layers cycle through attention algorithms.

    Its arguments are those of `LanguageModel`, `Reversible` and `Model`.
    """

    attention_type: AttentionType = (local.local(), lsh.lsh())


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class TransformerLM(Residual, LanguageModel):
    """A pre-norm Transformer decoder: the baseline.

    Its arguments are those of `LanguageModel`, `Residual` and `Model`.
    """

    attention_type: AttentionType = dense.dense()

"""What language models and encoders share: embedding, positions, a stack of layers, a norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import Depth, Size, VocabSize
from reformax.layers import LayerNorm
from reformax.layers.dropout import dropout
from reformax.layers.positions import EMBEDDING_SCALE
from reformax.models.base import AttentionType, Model
from reformax.ops.parts.masks import Ids, Tokens


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Backbone(Model):
    """`[B, T] -> [B, T, D]`, from tokens to features: D is twice `d_model` with two streams.

    More arguments are those of `Model`.

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

    causal = True  # whether a position sees only itself and what came before it

    def __post_init__(self):
        super().__post_init__()
        blocks = self._blocks("attention_type", causal=self.causal)
        self._layers = self._stack(blocks, self.n_layers)
        # The gradient of a mean over many targets underflows in float16: features are float32.
        narrow = self.dtype == "float16"
        self._norm = LayerNorm(self.norm_epsilon, "float32" if narrow else self.dtype)

    @property
    def d_features(self) -> int:
        """The size of a position's features."""
        return self._layers.n_out * self.d_model

    def init_backbone(self, rngs, shape) -> dict[str, Any]:
        """The weights, of three rngs: of the embedding, of the positions and of the stack."""
        rng_e, rng_p, rng_s = rngs
        hidden = (*shape, self.d_model)
        embedding = jax.random.normal(rng_e, (self.vocab_size, self.d_model))
        params = {
            "embedding": EMBEDDING_SCALE * embedding,
            "stack": self._layers.init_params(rng_s, *[hidden] * self._layers.n_out),
            "norm": self._norm.init_params(None, (self.d_features,)),
        }
        if self._positions is not None:
            params["positions"] = self._positions.init_params(rng_p, hidden)
        return params

    def encode(
        self,
        params,
        inputs: Int[Array, "B T"],
        segments: Ids | Tokens | None = None,
        rng=None,
    ) -> Float[Array, "B T D"]:
        """The features of inputs that are not shifted: a causal position t has read those up to t.

        Args:
          params: the weights.
          inputs: tokens.
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
        x = devices.looked_up(params["embedding"], inputs)
        return x if self._positions is None else self._positions.apply(params["positions"], x)

"""What language models and encoders share: embedding, positions, a stack of layers, norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import Depth, SettingError, Size, VocabSize
from reformax.layers.base import check_shape
from reformax.layers.dropout import dropout
from reformax.layers.positions import EMBEDDING_SCALE
from reformax.layers.rngs import split
from reformax.models.arguments import check_embedding
from reformax.models.base import AttentionType, Model
from reformax.models.logits import linear_params
from reformax.ops.masking.masks import Ids, Tokens, tokens_of


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Backbone(Model):
    """`[B, T] -> [B, T, D]`, from tokens to features: D is twice `d_model` with two streams.

    More arguments are those of `Model`.

    Args:
      vocab_size: number of tokens.
      n_layers: number of layers, a multiple of the cycle's length.
      attention_type: an algorithm, or a cycle of them over the layers.
      embedding_norm: whether a norm follows the sum of embeddings and positions, as in BERT.
      d_attention_key, d_attention_value: as of `Model`, but 64 unless they are given, as in Trax.
    """

    vocab_size: VocabSize = dataclasses.field(kw_only=False)
    n_layers: Depth = 6
    attention_type: AttentionType
    embedding_norm: bool = False
    d_attention_key: Size | None = 64
    d_attention_value: Size | None = 64

    # What `init_backbone` makes; the rest are a model's heads.
    backbone_names = ("embedding", "positions", "embedding_norm", "stack", "norm")
    causal = True  # whether a position sees only itself and what came before it

    def __post_init__(self):
        super().__post_init__()
        if self.next_value and not self.causal:
            raise SettingError(
                f"next_value is True and {type(self).__name__} is not causal: set next_value=False"
            )
        blocks = self._blocks("attention_type", causal=self.causal)
        self._layers = self._stack(blocks, self.n_layers)
        self._norm = self._norm_layer(self.features_dtype)
        self._embedding_norm = self._norm_layer()

    @property
    def d_features(self) -> int:
        """The size of a position's features."""
        return self._layers.n_streams * self.d_model

    def init_backbone(self, rngs, shape) -> dict[str, Any]:
        """The weights, of three rngs: of the embedding, of the positions and of the stack."""
        check_shape(shape)
        rng_e, rng_p, rng_s = rngs
        hidden = (*shape, self.d_model)
        params = {
            "embedding": self.embeddings(rng_e, self.vocab_size),
            "stack": self._layers.init_params(rng_s, *[hidden] * self._layers.n_streams),
        }
        if self.final_norm:
            params["norm"] = self._norm.init_params(None, (self.d_features,))
        if self._positions is not None:
            params["positions"] = self._positions.init_params(rng_p, hidden)
        if self.embedding_norm:
            params["embedding_norm"] = self._embedding_norm.init_params(None, hidden)
        return params

    def head(self, rng, d_in: int, d_out: int) -> dict[str, Array]:
        """Fresh weights of `logits.linear` that make logits."""
        return linear_params(rng, d_in, d_out, self.design.init_std, self.design.logits_bias)

    def embeddings(self, rng, n: int) -> Float[Array, "n _"]:
        """So many vectors, as those of tokens begin."""
        scale = EMBEDDING_SCALE if self.design.init_std is None else self.design.init_std
        return scale * jax.random.normal(rng, (n, self.d_model))

    def encode(
        self,
        params,
        inputs: Int[Array, "B T"],
        segment_ids: Ids | Tokens | None = None,
        rng=None,
        cls: Float[Array, " _"] | None = None,
        states: Any = None,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Any]:
        """The features of inputs that are not shifted: a causal position t has read those up to t.

        Args:
          params: the weights.
          inputs: tokens.
          segment_ids: ids; a position sees positions of the same id only, and 0 is padding.
            `Tokens` have global tokens or positions too.
          rng: the source of hashes and of dropout.
          cls: a vector put before the first token; features and segments have it too.
          states: of all layers, that inputs which are a part of a sequence go on from. The result
            is then a pair of features and the states after them.
        """
        check_embedding(params, "embedding", self.vocab_size, self.d_model)
        rng_e, rng_s, rng_f = split(rng, 3)  # of embeddings, layers and features
        x = devices.looked_up(params["embedding"], inputs)
        if cls is not None:
            before = jnp.broadcast_to(cls.astype(x.dtype), (len(x), 1, x.shape[2]))
            x = jnp.concatenate([before, x], axis=1)
        x = self._embed(params, x, tokens_of(segment_ids).positions)
        x = dropout(x, self._dropout_rate, rng_e)
        if states is None:
            streams = self._layers.apply(
                params["stack"], *[x] * self._layers.n_streams, segment_ids, rng=rng_s
            )
        else:
            streams, states = self._layers.apply_from(
                params["stack"], x, states, segment_ids, rng_s
            )
        streams = streams if self._layers.n_streams > 1 else (streams,)
        features = dropout(self._joined(params, streams), self._dropout_rate, rng_f)
        return features if states is None else (features, states)

    def _rng_of_layers(self, rng):
        """The rng of the layers in `encode`, for decoding with the hashes of a whole row."""
        return split(rng, 3)[1]

    @property
    def kept_mass_layers(self) -> tuple[int, ...]:
        return tuple(self._layers.by_layer(self._layers.meters()))

    def kept_mass(self, params, inputs, rng=None) -> dict[int, Float[Array, ""]]:
        def features(meters) -> Float[Array, ""]:
            stack = self._layers.with_meters(params["stack"], meters)
            found = self.features(params | {"stack": stack}, inputs, rng=rng)
            return 0 * jnp.sum(found.astype(jnp.float32))

        return self._layers.by_layer(jax.grad(features)(self._layers.meters()))

    def _joined(self, params, streams: Sequence[Float[Array, "B T _"]]) -> Float[Array, "B T D"]:
        """The features of the streams after the stack."""
        x = jnp.concatenate(streams, axis=-1) if len(streams) > 1 else streams[0]
        if self.final_norm:
            return self._norm.apply(params["norm"], x)
        return x.astype(self.features_dtype)

    def _embed(
        self, params, x: Float[Array, "B T _"], position: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T _"]:
        """The stack's input of tokens' embeddings at these positions; None: at 0 to T - 1."""
        if self.design.embedding_scale is not None:
            x = x * self.design.embedding_scale
        x = self._add_positions(params, x, position)
        return self._embedding_norm.apply(params["embedding_norm"], x) if self.embedding_norm else x

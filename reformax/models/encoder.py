"""Encoders: they read a whole row, and name its class or the tokens that were hidden in it.

A row is tokens `[B, T]`, up to the last one that is not 0; padding follows it. Every position
sees the whole row but its padding. Names of arguments are those of
`trax.models.TransformerEncoder`.

Tay et al. 2020, "Long Range Arena: A Benchmark for Efficient Transformers", have the classifiers,
for one document and for two; Devlin et al. 2018, "BERT", section 3.1, the masked language model.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax import devices
from reformax.declared import Bounds, Count, SettingError, Size
from reformax.models.arguments import check_tokens
from reformax.models.backbone import Backbone
from reformax.models.base import ROTARY, AttentionType, Residual, Reversible, cycle_of
from reformax.models.logits import capped, linear, linear_params, logits_product
from reformax.models.packing import segmented
from reformax.ops import dense, local, lsh
from reformax.ops.masking.masks import Tokens

Classes = Annotated[int, Bounds(2)]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Encoder(Backbone):
    """A backbone that sees whole rows. Its arguments are those of `Backbone` and `Model`, and

    Args:
      n_global: the first so many tokens of a row are marked, which algorithms with
        `global_tokens` let see all and be seen by all, as Longformer's global attention. The vector
        that `pooling="cls"` puts before a row is the first of them.
    """

    n_global: Count = 0

    causal = False

    def __post_init__(self):
        super().__post_init__()
        if self.n_global and not any(op.global_tokens for op in cycle_of(self.attention_type)):
            raise SettingError(
                f"n_global is {self.n_global} and no op of attention_type reads global_tokens: "
                f"leave it out, or take one that does, as "
                f"longformer.longformer(n_global={self.n_global})"
            )

    def read(
        self, params, tokens: Int[Array, "B T"], rng=None, cls: Float[Array, " _"] | None = None
    ) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
        """The features of rows, arbitrary at padding, and which positions are tokens.

        With `cls`, a vector before the first token, which counts as one, rows are longer by it.

        Raises:
          ValueError: tokens are no integers `[B, T]`, weights are of other sizes, or devices share
            a row that has such a vector.
        """
        check_tokens("tokens", tokens)
        segment_ids = segmented(tokens).segment_ids
        if cls is not None:
            if (n := devices.n_sequence_shards()) > 1:
                raise SettingError(
                    f"pooling is 'cls', which makes rows one longer, and {n} "
                    "devices share a row: set pooling='mean' or 'first', or mesh.context=1"
                )
            segment_ids = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=True)
        global_tokens = None
        if self.n_global:
            first = jnp.arange(segment_ids.shape[1])[None] < self.n_global
            global_tokens = (first & segment_ids).astype(jnp.int32)
        read = Tokens(segment_ids, global_tokens, right_padded=True)
        return self.encode(params, tokens, read, rng, cls), segment_ids


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Classifier(Encoder):
    """The class of a row or of a pair of rows: `[B, T] -> [B, 1, n_classes]`, logits in float32.

    The features of a row are pooled to one vector, x. A pair has two, x and y, of two towers with
    the same weights, and is classified by [x, y, x * y, x - y] (Mou et al. 2015, "Natural Language
    Inference by Tree-Based Convolution and Heuristic Matching"). `apply` is `logits(features)`.
    More arguments are those of `Encoder`, `Backbone` and `Model`.

    Args:
      n_classes: number of classes; None: training takes it from the task.
      pooling: "mean" over the row's tokens, the features of the "first" or the "last" one, or
        "cls": those of a learnt vector before the first token, as in BERT and Long
        Range Arena.
      pairs: whether the model reads two documents, `[B, T]` and `[B, S]`.
      d_classifier: the width of a hidden layer with a relu before the classes; None: there is none.
      causal: whether a position sees only itself and what came before it, for algorithms that are
        causal alone, such as recurrences. The mean and the last token then see the whole
        row.
    """

    n_classes: Classes | None = dataclasses.field(default=None, kw_only=False)
    pooling: Literal["mean", "first", "last", "cls"] = "mean"
    pairs: bool = False
    d_classifier: Size | None = None
    causal: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.pooling == "cls" and self.pos_type in ROTARY and self.pos_axial_shape:
            raise SettingError(
                f"pooling is 'cls', whose vector moves the others by one, and pos_axial_shape is "
                f"{tuple(self.pos_axial_shape)}: set pooling='mean', 'first' or 'last'"
            )
        if self.causal and self.pooling in ("first", "cls"):
            raise SettingError(
                f"pooling is {self.pooling!r} and causal is True, so that the first token sees no "
                "other: set pooling='mean' or 'last'"
            )

    @property
    def n_inputs(self) -> int:
        return 2 if self.pairs else 1

    @property
    def task_kind(self) -> str:
        return "pairs" if self.pairs else "labels"

    def init_params(self, rng, shape, *shapes):
        if self.n_classes is None:
            raise SettingError("n_classes is None: set it to the number of classes of the task")
        *rngs, rng_h, rng_l = jax.random.split(rng, 5)
        if has_cls := self.pooling == "cls":
            shape = (shape[0], shape[1] + 1)
        params, d_in = self.init_backbone(rngs, shape), self.d_features * (4 if self.pairs else 1)
        if has_cls:
            params["cls"] = self.embeddings(jax.random.fold_in(rng, 5), 1)[0]
        if self.d_classifier is not None:
            params["hidden"] = linear_params(rng_h, d_in, self.d_classifier, self.design.init_std)
            d_in = self.d_classifier
        return params | {"logits": self.head(rng_l, d_in, self.n_classes)}

    def features(self, params, inputs, rng=None) -> Float[Array, "B 1 D"]:
        """The input of `logits`: one vector for each row, or for each pair of rows.

        Args:
          params: the weights.
          inputs: tokens `[B, T]`, or for `pairs` the tokens of two documents, of one length.
          rng: the source of hashes and of dropout.
        """
        if not self.pairs:
            return self._pooled(params, inputs, rng)[:, None]
        first, second = inputs
        for tokens in inputs:
            check_tokens("tokens", tokens)
        if first.shape != second.shape:
            raise ValueError(
                f"tokens have shapes {first.shape} and {second.shape}: expected one for both "
                "documents of a pair, with 0 after the shorter ones"
            )
        # A pair stays together, on one device.
        rows = jnp.stack([first, second], axis=1).reshape(-1, first.shape[1])
        x, y = jnp.moveaxis(self._pooled(params, rows, rng).reshape(len(first), 2, -1), 1, 0)
        return jnp.concatenate([x, y, x * y, x - y], axis=-1)[:, None]

    def _pooled(self, params, tokens: Int[Array, "B T"], rng) -> Float[Array, "B D"]:
        """One float32 vector a row; zeros where a mean has no token."""
        cls = params["cls"] if self.pooling == "cls" else None
        x, is_token = self.read(params, tokens, rng, cls)
        x = x.astype(jnp.float32)
        n_tokens = jnp.maximum(jnp.sum(is_token, axis=1, keepdims=True), 1)
        if self.pooling == "last":
            return jnp.take_along_axis(x, n_tokens[..., None] - 1, axis=1)[:, 0]
        if self.pooling != "mean":
            return x[:, 0]
        total = jnp.sum(jnp.where(is_token[..., None], x, 0.0), axis=1)
        return total / n_tokens.astype(x.dtype)

    def logits(
        self, params, features: Float[Array, "*d D"], dtype: str = "float32"
    ) -> Float[Array, "*d C"]:
        """Unnormalised log-probabilities of the classes, in `dtype`."""
        if self.d_classifier is not None:
            features = jax.nn.relu(linear(params["hidden"], features, self.compute_dtype))
        logits = linear(params["logits"], features, self.compute_dtype, dtype)
        return capped(logits, self.design.logits_soft_cap)

    def apply(self, params, *inputs: Int[Array, "B T"], rng=None) -> Float[Array, "B 1 C"]:
        read = inputs if self.pairs else inputs[0]
        return self.logits(params, self.features(params, read, rng))


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class MaskedLanguageModel(Encoder):
    """The tokens at every position of a row: `[B, T] -> [B, T, vocab_size]`, float32.

    The loss counts those that were hidden. The head is BERT's: a hidden layer of `d_model` with a
    gelu and a norm; logits are its products with the embedding, and biases. Its arguments are those
    of `Encoder`, `Backbone` and `Model`.
    """

    task_kind = "masked"

    def __post_init__(self):
        super().__post_init__()
        self._head_norm = self._norm_layer()

    def init_params(self, rng, shape):
        *rngs, rng_h = jax.random.split(rng, 4)
        sizes, design = (self.d_features, self.d_model), self.design
        return self.init_backbone(rngs, shape) | {
            "hidden": linear_params(rng_h, *sizes, design.init_std),
            "head_norm": self._head_norm.init_params(None, (self.d_model,)),
            "logits": {"b": jnp.zeros(self.vocab_size)} if design.logits_bias else {},
        }

    def features(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T D"]:
        """The input of `logits`; at padding arbitrary."""
        return self.read(params, tokens, rng)[0]

    def logits(
        self, params, features: Float[Array, "*d D"], dtype: str = "float32"
    ) -> Float[Array, "*d V"]:
        """Unnormalised log-probabilities in `dtype`, their product in the dtype of sublayers."""
        x = jax.nn.gelu(linear(params["hidden"], features, self.compute_dtype), approximate=False)
        x = self._head_norm.apply(params["head_norm"], x)
        bias = params["logits"].get("b")
        logits = logits_product(x, params["embedding"], self.compute_dtype, bias, dtype)
        return capped(logits, self.design.logits_soft_cap)

    def apply(self, params, tokens: Int[Array, "B T"], rng=None) -> Float[Array, "B T V"]:
        return self.logits(params, self.features(params, tokens, rng))


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class TransformerEncoder(Residual, Classifier):
    """A Transformer that names the class of a row, pre-norm unless `post_norm`.

    Its arguments are those of `Classifier`, `Encoder`, `Backbone`, `Residual` and `Model`.
    """

    attention_type: AttentionType = dense.dense()


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReformerEncoder(Reversible, Classifier):
    """A reversible Transformer that names the class of a row.

    Its arguments are those of `Classifier`, `Encoder`, `Backbone`, `Reversible` and `Model`.
    """

    attention_type: AttentionType = (local.local(), lsh.lsh())


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class TransformerMaskedLM(Residual, MaskedLanguageModel):
    """A Transformer that fills in hidden tokens, pre-norm unless `post_norm`.

    Its arguments are those of `Encoder`, `Backbone`, `Residual` and `Model`.
    """

    attention_type: AttentionType = dense.dense()


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReformerMaskedLM(Reversible, MaskedLanguageModel):
    """A reversible Transformer that fills in hidden tokens.

    Its arguments are those of `Encoder`, `Backbone`, `Reversible` and `Model`.
    """

    attention_type: AttentionType = (local.local(), lsh.lsh())

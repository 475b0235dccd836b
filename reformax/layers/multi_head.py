"""The projections of attention: to heads of queries, keys and values, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.declared import (
    Bounds,
    Called,
    Count,
    NonNegative,
    Positive,
    Rate,
    Scale,
    SettingError,
    Size,
    Unsupported,
    check_fields,
)
from reformax.layers import float8
from reformax.layers.base import Layer, check_shape, check_weights
from reformax.layers.dropout import dropout, rate_in
from reformax.layers.layer_norm import NORMS, NormName
from reformax.layers.matrices import FOR_DECODING, Unnormed, affine, products, transposed_on_gpu
from reformax.layers.rngs import fold_in
from reformax.ops.base import AttentionOp, Dims, Projection
from reformax.ops.calls.arguments import check_heads
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.numerics.precision import accum_dtype

# Folded into a layer's rng, each makes the rng of one of its parts.
PLAN, WEIGHTS, OUTPUT = range(3)


Gate = Literal["headwise", "elementwise"]
ConvSize = Annotated[int, Bounds(2, 64)]
QKNorm = bool | Literal["joint"]
ATTENTION_GATE = "attention_gate"  # the name of its projection; recurrences have an "output_gate"

Op = Annotated[AttentionOp, Called("an AttentionOp, such as lsh.lsh()")]


# What Trax's models construct an attention layer with, by name.
_FROM_TRAX = {"n_heads", "d_qk", "d_v", "masked", "attention_dropout", "output_dropout", "mode"}


@dataclasses.dataclass(eq=False, repr=False)
class MultiHead(Layer):
    """The options and the weights of attention layers: projections, norms, gates and dropout.

    `planned_attention` puts an algorithm between the projections. Computes in the dtype of its
    input.

    Weights: `w_q [N, D, H]`, `w_k [G, D, H]` (none where the algorithm shares queries and keys),
    `w_v [G, D, V]`, `w_o [N, V, D]`; with `bias` also `b_q, b_k [_, H]` and `b_v [_, V]`, with
    `output_bias` also `b_o [D]`; for each further projection that the algorithm reads,
    `w_<name> [heads, D, size]`, with `bias` also `b_<name> [heads, size]`, or `w_<name> [1, D, R]`
    and `up_<name> [heads, R, size]` if it has the rank R; and the algorithm's as `op`. With
    `qk_norm` also `<name>_norm [H]`, or `[heads, H]` for "joint", for each projection of queries or
    keys; with `gate` `w_attention_gate [N, D, 1 or V]`, with `bias` `b_attention_gate`; with
    `output_norm` its weights.

    Args:
      op: the algorithm, such as `lsh.lsh(n_hashes=4)`.
      n_heads: N.
      d_qk: H, the size of a head's queries and keys.
      d_v: V, the size of a head's values.
      n_kv_heads: G, the number of heads of keys and values, each for N / G heads of queries
        (Ainslie et al. 2023, GQA; 1 is MQA); None: N.
      n_qk_heads: Q, the number of heads of queries and keys, each for N / Q heads of values, as in
        Mamba 2 and Qwen3-Next; None: N.
      masked: whether each sequence comes with a mask, `[B, T]`: True or a segment id above 0 marks
        a token, False or 0 padding. Tokens see their segment only. The masks follow the
        sequences. A mask may be `Tokens`, with global tokens for the algorithms that read them,
        with positions for rotations, and with the word that padding follows all tokens.
      bias: whether the projections of q, k, v have biases.
      output_bias: whether the output projection has one.
      attention_dropout: the rate on attention weights.
      output_dropout: the rate on the output.
      init_std: the standard deviation of fresh projections; None: Glorot and Bengio's bounds.
      float8: whether the projections multiply FP8 numbers in training (`layers.float8`).
      amax_history: with `float8`, the steps whose largest numbers FP8's scales come from; 0: scales
        are those of the arrays themselves. The weights then have `amax_history`, a buffer a matrix.
      qk_norm: whether queries and keys are normalised before they are rotated, each head by RMSNorm
        with one learnt scale for all heads (Dehghani et al. 2023, "Scaling Vision Transformers to
        22 Billion Parameters", sec. 2; as in Qwen3); "joint": all heads together, with a scale for
        each feature (as in OLMo 2). Shared keys are normalised anyway: their queries are. What is
        key and value at once, as summaries with `share_kv`, is not normalised.
      norm: of outputs; with "rms_plus_one" that of `qk_norm` is such a norm too.
      norm_epsilon: added to the mean square in norms.
      output_norm: whether a norm of the output follows its projection, as in Gemma 2.
      scale: the factor of the products of queries and keys, where the algorithm makes attention
        weights of them; None: the algorithm's, which is mostly `1 / sqrt(H)`.
      gate: whether the algorithm's output is multiplied by the sigmoid of one more projection of
        the layer's input before the output projection (Qiu et al. 2025, "Gated Attention for Large
        Language Models", arXiv 2505.06708, eq. 5): "headwise", a number a head; "elementwise", one
        a feature; None: no gate.
      mode: "train" or "eval". Evaluation has no dropout, and the algorithm plans with its settings
        for evaluation.

    Raises:
      SettingError: an argument of another type or out of range, or two scales.
      Unsupported: fewer heads, a rate or a scale that the algorithm does not have.
    """

    op: Op
    n_heads: Size = 2
    d_qk: Size = 64
    d_v: Size = 64
    _: dataclasses.KW_ONLY
    n_kv_heads: Size | None = None
    n_qk_heads: Size | None = None
    masked: bool = False
    bias: bool = False
    output_bias: bool = False
    attention_dropout: Rate = 0.0
    output_dropout: Rate = 0.0
    init_std: Positive | None = None
    float8: bool = False
    amax_history: Count = 0
    qk_norm: QKNorm = False
    norm: NormName = "rms"
    norm_epsilon: NonNegative = 1e-6
    output_norm: bool = False
    scale: Scale | None = None
    gate: Gate | None = None
    mode: Literal["train", "eval"] = "train"

    n_sequences = 1  # `CrossAttention` reads two
    causal = False  # an argument of `Attention`

    def __new__(cls, *arguments, **options):
        if not arguments and "op" not in options and options.keys() >= _FROM_TRAX:
            raise SettingError(
                f"attention_type is {cls.__name__} in a model of Trax, which gives it no op: give "
                "reformax.layers.LSHSelfAttention or SelfAttention"
            )
        return super().__new__(cls)

    def __post_init__(self):
        super().__init__(n_in=self.n_sequences * (2 if self.masked else 1))
        check_fields(self)
        heads = dict(n_kv_heads=self.n_kv_heads, n_qk_heads=self.n_qk_heads)
        check_heads(self.op, n_heads=self.n_heads, **heads)
        self._check_scale()
        self._weights_rate = rate_in(self.mode, self.attention_dropout)
        self._output_rate = rate_in(self.mode, self.output_dropout)
        if self._weights_rate > 0.0 and not self.op.dropout:
            raise Unsupported(
                f"attention_dropout is {self.attention_dropout}, but {self.op} makes no attention "
                "weights to drop: set it to 0"
            )
        float8.check_history(self.float8, self.amax_history)
        self._float8 = self.float8 and self.mode == "train"
        self._norm = NORMS[self.norm](self.norm_epsilon)

    def _check_scale(self) -> None:
        if self.scale is None:
            return
        if not self.op.dropout:
            raise Unsupported(
                f"scale is {self.scale}, but {self.op} makes no attention weights: leave it out"
            )
        if self.op.scale is not None:
            raise SettingError(
                f"scale is {self.scale} and the scale of {self.op} {self.op.scale}: set one"
            )

    @property
    def _dims(self) -> Dims:
        sizes = self.n_heads, self.d_qk, self.d_v, 0, self.n_kv_heads, self.n_qk_heads
        return Dims(*sizes)

    @property
    def drops(self) -> bool:
        return self._weights_rate > 0.0 or self._output_rate > 0.0

    def projections(self) -> dict[str, Projection]:
        """The projections of the input, by the names that their weights have after `w_`."""
        found = {name: to.of_input for name, to in self.op.projections(self._dims).items()}
        if self.gate:
            size = {"headwise": 1, "elementwise": self.d_v}[self.gate]
            found[ATTENTION_GATE] = Projection(self.n_heads, size)
        return found

    def _extra_projections(self) -> dict[str, Projection]:
        """The extra projections that the algorithm reads."""
        return self.op.extra_projections(self._dims)

    def init_params(self, rng, shape, *shapes):
        check_shape(shape)
        *_, length, d_model = shape
        rng_q, rng_k, rng_v, rng_o, rng_op = jax.random.split(rng, 5)
        rngs = {"q": rng_q, "k": rng_k, "v": rng_v}
        n, v = self.n_heads, self.d_v

        def drawn(rng, n, d_head, d_in=d_model):
            if self.init_std is not None:
                return self.init_std * jax.random.normal(rng, (n, d_in, d_head))
            # With respect to all heads together, as in Trax.
            limit = math.sqrt(6 / (d_in + d_head * n))
            return jax.random.uniform(rng, (n, d_in, d_head), jnp.float32, -limit, limit)

        params = {"w_o": jnp.swapaxes(drawn(rng_o, n, v), 1, 2)}
        for i, (name, to) in enumerate(self.projections().items()):
            rng_of = rngs[name] if name in rngs else jax.random.fold_in(rng, i)
            params[f"w_{name}"] = drawn(rng_of, to.n_heads, to.size)
            if self.bias:
                params[f"b_{name}"] = jnp.zeros((to.n_heads, to.size))
        for name, to in self._extra_projections().items():
            if to.rank is not None:
                up_rng = jax.random.fold_in(jax.random.fold_in(rng, to.rank), len(params))
                params[f"up_{name}"] = drawn(up_rng, to.n_heads, to.size, to.rank)
        if self.output_bias:
            params["b_o"] = jnp.zeros(d_model)
        if self.qk_norm:
            first = jnp.zeros if self.norm == "rms_plus_one" else jnp.ones
            for name, to in self.projections().items():
                if to.role:
                    joint = self.qk_norm == "joint"
                    params[f"{name}_norm"] = first((to.n_heads, to.size) if joint else to.size)
        if self.output_norm:
            params["output_norm"] = self._norm.init_params(None, (d_model,))
        params["op"] = self.op.init(rng_op, self._dims._replace(length=length))
        if self.amax_history:
            names = *self.projections(), "o"
            params[float8.HISTORY] = {x: float8.history(self.amax_history) for x in names}
        return params

    def _project_heads(
        self, params, x: Float[Array, "B T D"], names: Iterable[str]
    ) -> dict[str, Float[Array, "B T _ _"]]:
        """The projections of `x` by `w_<name>`."""
        projections = self.projections()
        biases = [*projections] * self.bias + ["o"] * self.output_bias
        wanted = *(f"w_{name}" for name in (*projections, "o")), *(f"b_{name}" for name in biases)
        check_weights(self, params, wanted)
        d_model = params["w_o"].shape[-1]
        check_floats("x", x, "batch", "length", d_model)
        weights = {name: params[f"w_{name}"] for name in names}
        for name, to in projections.items():
            shape = to.n_heads, d_model, to.size
            if name in weights and weights[name].shape != shape:
                raise ValueError(
                    f"params['w_{name}'] has shape {weights[name].shape}: expected "
                    f"[heads, d_model, size], {shape}"
                )
        # Of matrices, a bias is added in the product's kernel on a GPU.
        matrices = [jnp.moveaxis(w, 0, 1).reshape(x.shape[2], -1) for w in weights.values()]
        if self._float8:
            outs = float8.named_products(params, x, dict(zip(weights, matrices, strict=True)))
        else:
            outs = products(x, [w.astype(x.dtype) for w in matrices])
        if self.bias:
            biases = (params[f"b_{name}"].reshape(1, 1, -1) for name in weights)
            outs = [y + b.astype(x.dtype) for y, b in zip(outs, biases, strict=True)]
        return {
            name: y.reshape(*x.shape[:2], w.shape[0], w.shape[2])
            for (name, w), y in zip(weights.items(), outs, strict=True)
        }

    def _project_merged(
        self, params, x: Float[Array, "B T D"] | Unnormed, names: Iterable[str]
    ) -> dict[str, Float[Array, "B T _ _"]]:
        """The projections of `x` by `w_in`, which has their weights side by side."""
        projections = self.projections()
        made = [(name, projections[name]) for name in names]
        sizes = [to.n_heads * to.size for _, to in made]
        parts = affine(x, params["w_in"], params.get("b_in"), sizes=sizes)
        return {
            name: part.reshape(*part.shape[:2], to.n_heads, to.size)
            for (name, to), part in zip(made, parts, strict=True)
        }

    def _normed(self, params, heads: dict[str, Array]) -> dict[str, Array]:
        """The projections, queries and keys normalised by `qk_norm`, queries times their factor."""
        if not self.qk_norm and self.scale is None:
            return heads
        for name, to in self.projections().items():
            if to.role is None or name not in heads:
                continue
            x = heads[name].astype(accum_dtype(heads[name].dtype))
            if self.qk_norm:
                scale = params[f"{name}_norm"].astype(x.dtype)
                scale = (scale + 1 if self.norm == "rms_plus_one" else scale)[None, None]
                rows = x.reshape(*x.shape[:2], -1) if self.qk_norm == "joint" else x
                normed = length_normalize(rows, self.norm_epsilon).reshape(x.shape)
                normed = normed * (scale if self.qk_norm == "joint" else scale[:, :, None])
                # Rounded as without a factor, which is then applied in the wider dtype.
                x = normed.astype(heads[name].dtype).astype(x.dtype)
            if self.scale is not None and to.role == "query":
                x = x * (self.scale * math.sqrt(self.d_qk))  # the algorithm divides by sqrt(H)
            heads = heads | {name: x.astype(heads[name].dtype)}
        return heads

    def without_output_bias(self, params) -> tuple[dict[str, Any], Float[Array, " D"] | None]:
        """`Layer.without_output_bias`: `b_o`, unless a norm or dropout follows it."""
        if not self.output_bias or self.output_norm or self._output_rate:
            return params, None
        return {**params, "b_o": None}, params["b_o"]

    def combine(
        self, params, out: Float[Array, "B T N V"], gate: Array | None = None, rng=None
    ) -> Float[Array, "B T D"]:
        """The output projection of all heads, times their gate if there is one, and dropout.

        `gate` is `[B, T, N, 1]` or `[B, T, N, V]`, before its sigmoid.
        """
        out = gated(out, gate)
        out, w_o = out.reshape(*out.shape[:2], -1), params["w_o"]
        # A matrix already is from `for_decoding`.
        w_o = w_o.reshape(-1, w_o.shape[-1]) if w_o.ndim == 3 else transposed_on_gpu(w_o)
        if self._float8:
            (out,) = float8.named_products(params, out, {"o": w_o})
        else:
            out = out @ w_o.astype(out.dtype)
        if self.output_bias and params["b_o"] is not None:
            out = out + params["b_o"][None, None].astype(out.dtype)
        if self.output_norm:
            out = self._norm.apply(params["output_norm"], out)
        return dropout(out, self._output_rate, fold_in(rng, OUTPUT))

    def _output(
        self, params, heads: Float[Array, "B T N V"], added: Float[Array, "B T D"] | None
    ) -> Float[Array, "B T D"]:
        """The output of a step, with the weights from `for_decoding`, added to a stream."""
        if params["w_o"].ndim != 2:
            raise ValueError(f"params are those of `apply`: {FOR_DECODING}")
        x, weights = heads.reshape(*heads.shape[:2], -1), (params["w_o"], params.get("b_o"))
        if not self.output_norm:
            return affine(x, *weights, added=added)[0]
        out = self._norm.apply(params["output_norm"], affine(x, *weights)[0])
        return out if added is None else added + out.astype(added.dtype)

    def _merge(self, params, products: dict[str, Sequence[str]], dtype: str) -> dict[str, Any]:
        """The weights for decoding: one matrix a product, its projections side by side."""
        d_model = params["w_o"].shape[-1]
        merged = {"w_o": transposed_on_gpu(params["w_o"].reshape(-1, d_model))}
        for name, letters in products.items():
            columns = [jnp.moveaxis(params[f"w_{x}"], 0, 1) for x in letters]
            columns = [w.reshape(d_model, -1) for w in columns]
            merged[f"w_{name}"] = transposed_on_gpu(jnp.concatenate(columns, axis=1))
            if self.bias:
                biases = [jnp.ravel(params[f"b_{x}"]) for x in letters]
                merged[f"b_{name}"] = jnp.concatenate(biases)
        if self.output_bias:
            merged["b_o"] = params["b_o"]
        others = "next_value", "position_bias", *(f"up_{x}" for x in self._extra_projections())
        merged |= {name: params[name] for name in others if name in params}
        merged = {name: w.astype(dtype) for name, w in merged.items()}
        norms = (f"{name}_norm" for name in (*self.projections(), "output"))
        kept = *norms, "key_conv", "op"
        return merged | {name: params[name] for name in kept if name in params}


def gated(heads: Float[Array, "B T N V"], gate: Array | None) -> Float[Array, "B T N V"]:
    """The heads' outputs times the sigmoid of their gate, if there is one."""
    if gate is None:
        return heads
    dtype = accum_dtype(heads.dtype)
    return (heads.astype(dtype) * jax.nn.sigmoid(gate.astype(dtype))).astype(heads.dtype)

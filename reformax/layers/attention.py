"""Multi-head attention around any attention algorithm: projections, heads, dropout, decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.buffers import updated
from reformax.declared import (
    Bounds,
    Called,
    NonNegative,
    Positive,
    Rate,
    SettingError,
    Size,
    Unsupported,
    check_fields,
)
from reformax.layers import context, remat
from reformax.layers._trax import Layer
from reformax.layers.dropout import dropout, rate_in
from reformax.layers.float8 import product
from reformax.layers.layer_norm import NORMS, NormName
from reformax.layers.matrices import Unnormed, affine, check_input, products, transposed_on_gpu
from reformax.layers.relative import N_BUCKETS, PositionBias, position_bias
from reformax.ops.base import AttentionOp, Dims, ExtraProjection
from reformax.ops.calls.arguments import check_arguments, check_value_heads
from reformax.ops.decoding.cache import take_rows
from reformax.ops.masking.masks import int32_ids, row_lengths, says_one_segment, tokens_of
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.rotary import RotaryAngles, rotary
from reformax.ops.recurrence import short_convolution

# Folded into a layer's rng, each makes the rng of one of its parts.
PLAN, WEIGHTS, OUTPUT = range(3)


Gate = Literal["headwise", "elementwise"]
ConvSize = Annotated[int, Bounds(2, 64)]
QKNorm = bool | Literal["joint"]
Scale = Annotated[float, Bounds(1e-6, 1e6, name="a number from 1e-6 to 1e6")]
KEPT_MASS = "kept_mass"  # a weight that is there where the layer's kept mass is measured
ATTENTION_GATE = "attention_gate"  # the name of its projection; recurrences have an "output_gate"

Op = Annotated[AttentionOp, Called("an AttentionOp, such as lsh.lsh()")]


class QKV(NamedTuple):
    """Queries, keys and values of all heads, `[B, T, N, H]`.

    `k` is None where queries and keys are one. In cross-attention `k` and `v` have the length of
    the memory. `extra_projections` are the further projections that the algorithm reads, if it
    reads any. `gate` is that of the output, `[B, T, N, 1]` or `[B, T, N, V]`, before its sigmoid;
    only the layer reads it.
    """

    q: Array
    k: Array | None
    v: Array
    extra_projections: dict[str, Array] | None = None
    gate: Array | None = None

    @property
    def of_op(self) -> QKV:
        """What the algorithm reads."""
        return self._replace(gate=None)


@dataclasses.dataclass(eq=False, repr=False)
class MultiHead(Layer):
    """The projections and the dropout of attention, and an algorithm between them.

    `apply` is `project`, `plan` and `attend` in turn. They are apart so that a reversible stack can
    keep a plan and attend again by it. A subclass defines `project` and `apply`, and for decoding
    `for_decoding` and `step`, which project with merged weights. Computes in the dtype of its
    input.

    Weights: `w_q [N, D, H]`, `w_k [G, D, H]` (none where the algorithm shares queries and keys),
    `w_v [G, D, V]`, `w_o [N, V, D]`; with `bias` also `b_q, b_k [_, H]` and `b_v [_, V]`, with
    `output_bias` also `b_o [D]`; for each further projection that the algorithm reads,
    `w_<name> [heads, D, size]`, with `bias` also `b_<name> [heads, size]`, or `w_<name> [1, D, R]`
    and `up_<name> [heads, R, size]` if it has the rank R; and the algorithm's as `op`. With
    `qk_norm` also `q_norm [H]` and, if there are keys, `k_norm [H]`; with `gate`
    `w_attention_gate [N, D, 1 or V]`, with `bias` `b_attention_gate`; with `output_norm` its
    weights.

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
        with positions for rotations, and with the word that padding is behind.
      bias: whether the projections of q, k, v have biases.
      output_bias: whether the output projection has one.
      attention_dropout: the rate on attention weights.
      output_dropout: the rate on the output.
      init_std: the standard deviation of fresh projections; None: Glorot and Bengio's bounds.
      float8: whether the projections multiply FP8 numbers in training (`layers.float8`).
      qk_norm: whether queries and keys are normalised before they are rotated, each head by RMSNorm
        with one learnt scale for all heads (Dehghani et al. 2023, "Scaling Vision Transformers to
        22 Billion Parameters", sec. 2; as in Qwen3); "joint": all heads together, with a scale for
        each feature (as in OLMo 2). Shared keys are normalised anyway: their queries are.
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
    qk_norm: QKNorm = False
    norm: NormName = "rms"
    norm_epsilon: NonNegative = 1e-6
    output_norm: bool = False
    scale: Scale | None = None
    gate: Gate | None = None
    mode: Literal["train", "eval"] = "train"

    n_sequences = 1  # `CrossAttention` reads two
    causal = False  # an argument of `Attention`

    def __post_init__(self):
        super().__init__(n_in=self.n_sequences * (2 if self.masked else 1))
        check_fields(self)
        self._check_kv_heads()
        self._check_qk_heads()
        self._check_scale()
        self._weights_rate = rate_in(self.mode, self.attention_dropout)
        self._output_rate = rate_in(self.mode, self.output_dropout)
        if self._weights_rate > 0.0 and not self.op.dropout:
            raise Unsupported(
                f"attention_dropout is {self.attention_dropout}, but {self.op} makes no attention "
                "weights to drop: set it to 0"
            )
        self._float8 = self.float8 and self.mode == "train"
        self._norm = NORMS[self.norm](self.norm_epsilon)

    def _check_kv_heads(self) -> None:
        if self.n_kv_heads is None:
            return
        if self.n_heads % self.n_kv_heads:
            raise SettingError(
                f"n_kv_heads is {self.n_kv_heads}: expected a divisor of n_heads, {self.n_heads}"
            )
        if self.op.shared_qk:
            raise Unsupported(
                f"n_kv_heads is {self.n_kv_heads}, but {self.op} makes its keys of the queries: "
                "leave it out"
            )

    def _check_qk_heads(self) -> None:
        if self.n_qk_heads is None:
            return
        if self.n_heads % self.n_qk_heads:
            raise SettingError(
                f"n_qk_heads is {self.n_qk_heads}: expected a divisor of n_heads, {self.n_heads}"
            )
        if self.n_kv_heads is not None:
            raise SettingError(
                f"n_qk_heads is {self.n_qk_heads} and n_kv_heads {self.n_kv_heads}: leave one out"
            )
        if self.n_qk_heads < self.n_heads:
            check_value_heads(self.op, "n_heads is", self.n_heads, self.n_qk_heads)

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

    def projections(self) -> dict[str, ExtraProjection]:
        """What is projected from the input, by the name that its weights have after `w_`."""
        n, h, v = self.n_heads, self.d_qk, self.d_v
        n_kv, n_qk = self.n_kv_heads or n, self.n_qk_heads
        both = {
            "q": ExtraProjection(n_qk or n, h, rotated=True),
            "k": ExtraProjection(n_qk or n_kv, h, rotated=True),
        }
        if self.op.shared_qk:
            del both["k"]
        gate = {"headwise": ExtraProjection(n, 1), "elementwise": ExtraProjection(n, v)}
        return (
            both
            | {"v": ExtraProjection(n_kv, v)}
            | {name: to.of_input for name, to in self._extra_projections().items()}
            | ({ATTENTION_GATE: gate[self.gate]} if self.gate else {})
        )

    def _extra_projections(self) -> dict[str, ExtraProjection]:
        """Those that the algorithm reads."""
        return self.op.extra_projections(self._dims)

    def init_params(self, rng, shape, *shapes):
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
            for x in ("q", "k"):
                if f"w_{x}" in params:
                    n_heads, _, size = params[f"w_{x}"].shape
                    joint = self.qk_norm == "joint"
                    params[f"{x}_norm"] = first((n_heads, size) if joint else size)
        if self.output_norm:
            params["output_norm"] = self._norm.init_params(None, (d_model,))
        params["op"] = self.op.init(rng_op, self._dims._replace(length=length))
        return params

    def _heads(
        self, params, x: Float[Array, "B T D"], names: Iterable[str]
    ) -> dict[str, Float[Array, "B T _ _"]]:
        """The projections of `x` by `w_<name>`."""
        d_model = params["w_o"].shape[-1]
        check_input(x, d_model)
        weights = {name: params[f"w_{name}"] for name in names}
        for name, to in self.projections().items():
            shape = to.n_heads, d_model, to.size
            if name in weights and weights[name].shape != shape:
                raise ValueError(
                    f"params['w_{name}'] has shape {weights[name].shape}: expected "
                    f"[heads, d_model, size], {shape}"
                )
        # Of matrices, a bias is added in the product's kernel on a GPU.
        matrices = [jnp.moveaxis(w, 0, 1).reshape(x.shape[2], -1) for w in weights.values()]
        if self._float8:
            outs = [product(x, w) for w in matrices]
        else:
            outs = products(x, [w.astype(x.dtype) for w in matrices])
        if self.bias:
            biases = (params[f"b_{name}"].reshape(1, 1, -1) for name in weights)
            outs = [y + b.astype(x.dtype) for y, b in zip(outs, biases, strict=True)]
        return {
            name: y.reshape(*x.shape[:2], w.shape[0], w.shape[2])
            for (name, w), y in zip(weights.items(), outs, strict=True)
        }

    def _merged_heads(
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
        for name in ("q", "k") if self.qk_norm else ():
            if name in heads:
                wide = heads[name].astype(accum_dtype(heads[name].dtype))
                scale = params[f"{name}_norm"].astype(wide.dtype)
                scale = (scale + 1 if self.norm == "rms_plus_one" else scale)[None, None]
                rows = wide.reshape(*wide.shape[:2], -1) if self.qk_norm == "joint" else wide
                normed = length_normalize(rows, self.norm_epsilon).reshape(wide.shape)
                normed = normed * (scale if self.qk_norm == "joint" else scale[:, :, None])
                heads = heads | {name: normed.astype(heads[name].dtype)}
        if self.scale is not None and "q" in heads:
            q = heads["q"].astype(accum_dtype(heads["q"].dtype)) * self._query_factor
            heads = heads | {"q": q.astype(heads["q"].dtype)}
        return heads

    @property
    def _query_factor(self) -> float:
        """What queries are multiplied by, for products with `scale` by the algorithm's factor."""
        return self.scale * math.sqrt(self.d_qk)

    def plan(self, params, qkv: QKV, segment_ids=None, rng=None, length: int | None = None) -> Any:
        """Where each query will look: integers, through which no gradient flows.

        Settings that depend on a length use `length` if it is given, as in `AttentionOp.plan`.
        """
        qkv = qkv.of_op
        q, k, v, extra_projections, _ = qkv
        tokens = tokens_of(segment_ids)
        global_tokens = tokens.global_tokens if self.op.global_tokens else None
        check_arguments(
            self.op,
            *(q, k, v),
            causal=self.causal,
            segment_ids=tokens.segment_ids,
            dropout=self._weights_rate,
            rng=rng,
            extra_projections=extra_projections,
            global_tokens=global_tokens,
        )

        one_segment = says_one_segment(tokens.segment_ids)

        def plan(qkv, tokens, params, rng, shard=None):
            segment_ids, global_tokens = tokens
            return self.op.plan(
                params,
                *self.op.of_value_heads(*qkv[:3]),
                segment_ids=segment_ids,
                causal=self.causal,
                rng=rng,
                shard=shard,
                one_segment=one_segment,
                train=self.mode == "train",
                length=length,
                global_tokens=global_tokens,
            )

        arrays = (int32_ids(tokens.segment_ids), global_tokens), params["op"], _fold_in(rng, PLAN)
        return context.plan(plan, self.op, self.n_heads, qkv, *arrays)

    def attend(
        self, params, qkv: QKV, plan, segment_ids=None, rng=None, run: remat.Run = remat.direct
    ) -> Float[Array, "B T D"]:
        """Attention by a plan, and the output projection; `run` calls the algorithm."""
        heads = self.heads(params, qkv, plan, segment_ids, rng, run)
        return self.combine(params, heads, qkv.gate, rng)

    def heads(
        self, params, qkv: QKV, plan, segment_ids=None, rng=None, run: remat.Run = remat.direct
    ) -> Float[Array, "B T N V"]:
        """Each head's attention by a plan."""
        read = {name: params[name] for name in ("op", "position_bias") if name in params}
        rng = _fold_in(rng, WEIGHTS)
        out = run(self._apply_op, read, qkv.of_op, plan, segment_ids, rng)
        if KEPT_MASS not in params or run is remat.stored:
            return out
        share = self._kept_mass(read, qkv.of_op, plan, segment_ids)
        return out + (0 * updated(params[KEPT_MASS], share)).astype(out.dtype)

    def combine(
        self, params, out: Float[Array, "B T N V"], gate: Array | None = None, rng=None
    ) -> Float[Array, "B T D"]:
        """The output projection of all heads, times their gate if there is one, and dropout."""
        out = gated(out, gate)
        out, w_o = out.reshape(*out.shape[:2], -1), params["w_o"]
        # A matrix already is from `for_decoding`.
        w_o = w_o.reshape(-1, w_o.shape[-1]) if w_o.ndim == 3 else transposed_on_gpu(w_o)
        out = product(out, w_o) if self._float8 else out @ w_o.astype(out.dtype)
        if self.output_bias:
            out = out + params["b_o"][None, None].astype(out.dtype)
        if self.output_norm:
            out = self._norm.apply(params["output_norm"], out)
        return dropout(out, self._output_rate, _fold_in(rng, OUTPUT))

    def _output(
        self, params, heads: Float[Array, "B T N V"], added: Float[Array, "B T D"] | None
    ) -> Float[Array, "B T D"]:
        """The output of a step, with the weights from `for_decoding`, added to a stream."""
        x, weights = heads.reshape(*heads.shape[:2], -1), (params["w_o"], params.get("b_o"))
        if not self.output_norm:
            return affine(x, *weights, added=added)[0]
        out = self._norm.apply(params["output_norm"], affine(x, *weights)[0])
        return out if added is None else added + out.astype(added.dtype)

    def _apply_op(self, params, qkv: QKV, plan, segment_ids, rng=None) -> Float[Array, "B T N V"]:
        options = dict(dropout=self._weights_rate)
        return self._on_devices(self.op.apply, params, qkv, plan, segment_ids, rng, **options)

    def _kept_mass(self, params, qkv: QKV, plan, segment_ids) -> Float[Array, ""]:
        """The mean of `AttentionOp.kept_mass` over rows, queries and heads."""
        n_shards = devices.n_sequence_shards()

        def measured(*arrays, **call) -> Float[Array, "B C N 2"]:
            found = self.op.kept_mass(*arrays, **call)  # its queries are split as a sequence is
            return jnp.pad(found, ((0, 0), (0, -found.shape[1] % n_shards), (0, 0), (0, 0)))

        found = self._on_devices(measured, params, qkv, plan, segment_ids)
        share, weight = jnp.sum(found.astype(jnp.float32), axis=(0, 1, 2))
        return share / jnp.maximum(weight, 1)

    def _on_devices(self, function, params, qkv: QKV, plan, segment_ids, rng=None, **options):
        """`function`, an algorithm's `apply` or the like, on the devices of the mesh."""
        tokens = tokens_of(segment_ids)

        def attend(qkv, plan, segment_ids, params, rng, bias, shard=None):
            *arrays, extra_projections, _ = qkv
            lengths = row_lengths(segment_ids) if tokens.counted else None
            return function(
                params,
                *arrays,
                plan=plan,
                segment_ids=segment_ids,
                one_segment=says_one_segment(tokens.segment_ids),
                causal=self.causal,
                rng=rng,
                shard=shard,
                extra_projections=extra_projections,
                bias=bias,
                lengths=lengths,
                **options,
            )

        arrays = qkv, plan, int32_ids(tokens.segment_ids), params["op"], rng
        bias = self._bias(params, qkv.q.shape[1])
        return context.attend(attend, self.op, self.causal, self.n_heads, *arrays, bias)

    def _bias(self, params, length: int) -> Float[Array, "1 N T T"] | None:
        """What is added to the logits, if anything."""
        del params, length
        return None

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
        kept = "q_norm", "k_norm", "output_norm", "key_conv", "op"
        return merged | {name: params[name] for name in kept if name in params}


class KeyConvCache(NamedTuple):
    """The cache of a layer with `key_conv`."""

    of_layer: Any  # that of the layer without it
    last: Float[Array, "B W-1 G H"]  # the last keys before the convolution


class NextValueCache(NamedTuple):
    """The cache of a layer with `next_value`."""

    op: Any  # the algorithm's
    last: Float[Array, "B 1 N V"]  # the newest position's value, without the next one in it


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(MultiHead):
    """Self-attention, `[B, T, D] -> [B, T, D]`. Weights and more arguments: see `MultiHead`.

    **Shifted values: `next_value`.** With this option the value of key s is
    `a * v_s + b * v_{s+1}`: the value at s and the value of the next position, with factors a and b
    learnt by channel, `next_value [2, N, V]`. In text the token after an earlier occurrence of a
    word tells what may follow now. A position must see earlier ones alone, s < t, so that s + 1 is
    at most t. Segments must be contiguous: the last key of a segment has the first value of the
    next segment in it, and no later query of its segment reads it.

    Args:
      causal: whether a position sees only itself and what came before it.
      use_rotary: whether queries and keys are rotated by their position.
      rotary: with `use_rotary`, the angles of positions of a line.
      rotary_grid: with `use_rotary`, the axes' sizes of the grid, row-major, that the positions are
        of, as (32, 32) of an image by its pixels; (): they are of a line.
      position_bias: what is added to the logits by distance: "alibi", minus the distance times a
        slope of the head; "t5", a learnt number of head and distance, `position_bias [32, N]`;
        see `layers.relative`. The algorithm needs `bias`.
      key_conv: W, if keys are `k_t + silu(sum_j w_j k_{t-j})` over the last W positions of their
        segment, with weights `key_conv [G, H, W]` that begin at 0: algorithms that choose keys
        then choose by what a key follows too (Xiao et al. 2025, arXiv 2511.11571, for MoBA). It
        precedes `qk_norm` and rotation; keys that queries are made to, are convolved as queries.
        None: there is none.
      next_value: whether a key's value has that of the next position in it too, as above. It needs
        `causal` and an algorithm with `never_sees_itself`.

    Raises:
      SettingError: `next_value` with an algorithm by which a position sees itself, `position_bias`
        with one that adds no bias, a grid without `use_rotary` or of more axes than heads have
        pairs of features, besides what `MultiHead` refuses.
    """

    causal: bool = False
    use_rotary: bool = False
    rotary: RotaryAngles = RotaryAngles()
    rotary_grid: Sequence[Size] = ()
    position_bias: PositionBias | None = None
    key_conv: ConvSize | None = None
    next_value: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.next_value and not (self.causal and self.op.never_sees_itself):
            raise SettingError(
                f"next_value is True with causal={self.causal} and op={self.op}: a position may "
                "not see itself, as in causal shared_qk.shared_qk(attend_self_if_alone=False) or "
                "lsh.lsh(attend_self_if_alone=False)"
            )

        n_axes = len(self.rotary_grid)
        if n_axes and not self.use_rotary:
            raise SettingError(
                f"rotary_grid is {tuple(self.rotary_grid)} and use_rotary is False: set "
                "use_rotary=True or leave the grid out"
            )
        if self.use_rotary and self.d_qk < 2:
            raise SettingError(
                f"use_rotary is True and d_qk is {self.d_qk}: expected 2 at least, for a pair of "
                "features"
            )
        if self.use_rotary and not self.rotary.n_pairs(self.d_qk):
            raise SettingError(
                f"rotary_fraction is {self.rotary.fraction} and heads have {self.d_qk} features: "
                f"expected at least {2 / self.d_qk:.3g}, for a pair of them"
            )
        n_factors, n_pairs = len(self.rotary.long_factors), self.rotary.n_pairs(self.d_qk)
        if self.use_rotary and n_factors not in (0, n_pairs):
            raise SettingError(
                f"rotary_long_factors has {n_factors} numbers: expected {n_pairs}, one for each "
                "rotated pair of a head's features"
            )
        if self.rotary != RotaryAngles() and (n_axes or not self.use_rotary):
            raise SettingError(
                f"rotary is {self.rotary}, use_rotary {self.use_rotary} and rotary_grid "
                f"{tuple(self.rotary_grid)}: angles are set for the positions of a line"
            )
        if n_axes > self.d_qk // 2:
            raise SettingError(
                f"rotary_grid has {n_axes} axes and d_qk is {self.d_qk}: expected {2 * n_axes} at "
                "least, for a pair of features an axis"
            )
        if self.position_bias and not self.op.bias:
            raise Unsupported(
                f"position_bias is {self.position_bias!r}, but {self.op} adds no bias: use an op "
                "whose bias is True, such as flash.flash()"
            )

    def init_params(self, rng, shape, *shapes):
        params = super().init_params(rng, shape, *shapes)
        if self.position_bias == "t5":
            params["position_bias"] = jnp.zeros((N_BUCKETS, self.n_heads))
        if self.next_value:
            shape = 2, self.n_heads, self.d_v
            params["next_value"] = jnp.full(shape, math.sqrt(0.5), float)
        if self.key_conv:
            keys = self.projections()[self._keys]
            params["key_conv"] = jnp.zeros((keys.n_heads, keys.size, self.key_conv))
        return params

    @property
    def _keys(self) -> str:
        """The projection that keys are made of."""
        return "q" if self.op.shared_qk else "k"

    def project(
        self,
        params,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> QKV:
        """Queries, keys and values of all heads, rotated by their positions if `use_rotary`.

        Plans are made of rotated vectors, for hashing looks for large logits. Of segments only
        `key_conv` reads.
        """
        heads = self._convolved(params, self._all_heads(params, x), segment_ids)
        qkv = self._with_next_value(params, self._rotate(params, heads, positions))
        arranged = context.arrange(self.op, qkv.of_op, self.position_bias is not None)
        return arranged._replace(gate=qkv.gate)

    def _convolved(self, params, heads: dict[str, Array], segment_ids=None) -> dict[str, Array]:
        """The projections with `key_conv`."""
        if not self.key_conv:
            return heads
        keys = short_convolution.of_keys(heads[self._keys], params["key_conv"], segment_ids)
        return heads | {self._keys: keys}

    def _bias(self, params, length):
        position = jnp.arange(length)[None]
        return None if self.position_bias is None else self._bias_at(params, position, position)

    def _bias_at(self, params, query, key) -> Float[Array, "B N T S"]:
        """The bias of queries and keys at these positions."""
        table = params.get("position_bias")
        return position_bias(self.position_bias, table, self.n_heads, query, key, self.causal)

    def _with_next_value(self, params, qkv: QKV) -> QKV:
        """Each position's value with the next one in it; the last position has no next one."""
        if not self.next_value:
            return qkv
        current, following = _of_channels(params, qkv.v.dtype)
        after = jnp.pad(qkv.v[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
        return qkv._replace(v=current * qkv.v + following * after)

    def _all_heads(self, params, x: Float[Array, "B T D"] | Unnormed) -> dict[str, Array]:
        """All projections, of the weights or those from `for_decoding`."""
        names = self.projections()
        return (self._merged_heads if "w_in" in params else self._heads)(params, x, names)

    def _rotate(self, params, heads: dict[str, Array], position=None) -> QKV:
        """The projections, normalised, those that tell positions apart rotated by theirs."""
        for name in heads.keys() - {"q", "k", "v", ATTENTION_GATE}:
            if (up := params.get(f"up_{name}")) is not None:
                low = heads[name][:, :, 0]
                heads |= {name: jnp.einsum("btr,nrh->btnh", low, up.astype(low.dtype))}
        heads = self._normed(params, heads)
        if self.use_rotary:
            rotated = (name for name, to in self.projections().items() if to.rotated)
            how = self.rotary_grid, self.rotary
            heads = heads | {name: rotary(heads[name], position, *how) for name in rotated}
        others = heads.keys() - {"q", "k", "v", ATTENTION_GATE}
        extra_projections = {name: heads[name] for name in others}
        gate = heads.get(ATTENTION_GATE)
        return QKV(heads["q"], heads.get("k"), heads["v"], extra_projections or None, gate)

    def apply(
        self,
        params,
        x: Float[Array, "B T D"],
        mask: Int[Array, "B T"] | None = None,
        rng=None,
        run: remat.Run = remat.direct,
    ) -> Float[Array, "B T D"]:
        return self.apply_by(params, x, None, mask, rng, run)[0]

    def apply_by(
        self, params, x, plan: Any = None, mask=None, rng=None, run: remat.Run = remat.direct
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` by the plan of another layer, or its own where that is None; and the plan."""
        tokens = tokens_of(mask)
        qkv = self.project(params, x, tokens.positions, tokens.segment_ids)
        plan = self.plan(params, qkv, mask, rng) if plan is None else plan
        return self.attend(params, qkv, plan, mask, rng, run), plan

    # A part of a sequence, from the state of the parts before it.

    def first_state(self, batch: int, dtype: Any) -> Any:
        """The state before the first position of `batch` rows, in layers that compute in `dtype`.

        Raises:
          Unsupported: the layer is not causal, has `key_conv`, or its algorithm carries no state.
        """
        if not self.causal:
            raise Unsupported("causal is False: only causal layers carry a state, set causal=True")
        if self.key_conv:
            raise Unsupported(f"key_conv is {self.key_conv}: it carries no state, leave it out")
        return self.op.first_state(batch, self._dims, jnp.dtype(dtype))

    def apply_from(
        self, params, x: Float[Array, "B T D"], state: Any, mask=None, rng=None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` to a part of a sequence, and the state after it; see `AttentionOp.apply_from`.

        A mask of `Tokens` has the positions for rotations, which begin at 0 otherwise.
        """
        tokens = tokens_of(mask)
        qkv = self._rotate(params, self._all_heads(params, x), tokens.positions)
        out, state = self._heads_from(params, qkv.of_op, state, int32_ids(tokens.segment_ids))
        return self.combine(params, out, qkv.gate, rng), state

    def _heads_from(self, params, qkv: QKV, state, segment_ids):
        if (n := devices.n_sequence_shards()) > 1:
            raise SettingError(
                f"mesh has context={n} and a state is carried from one part of a sequence to the "
                "next: use context=1"
            )

        def attend(qkv, state, segment_ids, params):
            *arrays, extra_projections, _ = qkv
            options = dict(segment_ids=segment_ids, extra_projections=extra_projections)
            return self.op.apply_from(params, *arrays, state, **options)

        return devices.by_rows(attend, (qkv, state, segment_ids), (params["op"],))

    # Decoding: `prefill` reads a prompt, `step` one more position of each row.

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `step`: one product for all heads and projections, in `dtype`.

        `w_in [D, N * H + G * (H + V)]`, or `N * (H + V)` with shared queries and keys, and behind
        them the algorithm's further projections; `b_in` likewise, `w_o [N * V, D]`, `b_o [D]`, and
        `op` unchanged. Matrices are `transposed_on_gpu`.
        """
        return self._merge(params, {"in": list(self.projections())}, dtype)

    def prefill(
        self,
        params,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        capacity: int,
        rng=None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`prefill_by` by the layer's own plan, without the plan."""
        return self.prefill_by(params, x, lengths, capacity, rng)[:2]

    def prefill_by(
        self,
        params,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        capacity: int,
        rng=None,
        plan: Any = None,
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """`apply` to the first `lengths` positions of each row, and the cache that `step` reads.

        Later outputs are arbitrary, and no output depends on later inputs.

        Args:
          params: the weights, or those from `for_decoding`.
          x: the input, padded on the right.
          lengths: the number of positions of each row before its padding, at least 1.
          capacity: how many positions the cache must hold in the end.
          rng: the source of hashes; the same as in `apply`.
          plan: of the layer whose choice this one reuses; None: its own.

        Returns:
          The output, the cache and the plan.

        Raises:
          ValueError: the layer is not causal, or not built for evaluation.
          NotImplementedError: the algorithm has no step.
        """
        self._check_decodes()
        heads = self._all_heads(params, x)
        places, positions = jnp.arange(x.shape[1])[None], None
        if self.rotary.scaling == "longrope":  # padding makes no row a long one
            positions = jnp.minimum(places, lengths[:, None] - 1)
        alone = self._rotate(params, self._convolved(params, heads), positions)
        qkv = self._with_next_value(params, alone)
        # Padding on the right is in the future of every token: only a plan has to know of it.
        tokens = places < lengths[:, None]
        if plan is None:
            plan = self.plan(params, qkv, tokens, rng, length=capacity)

        def fill(qkv, plan, lengths, params, rng):
            *arrays, extra_projections, _ = qkv
            options = dict(plan=plan, lengths=lengths, capacity=capacity, rng=rng)
            options["extra_projections"] = extra_projections
            return self.op.init_cache(params, *arrays, **options)

        weights = params["op"], _fold_in(rng, PLAN)
        cache = context.to_cache(fill, self.op, (qkv.of_op, plan, lengths), weights)
        if self.next_value:
            last = jnp.take_along_axis(alone.v, (lengths - 1)[:, None, None, None], axis=1)
            cache = NextValueCache(cache, _of_channels(params, last.dtype)[0] * last)
        if self.key_conv:
            last = short_convolution.last_of(heads[self._keys], self.key_conv, lengths)
            cache = KeyConvCache(cache, last)
        return self.attend(params, qkv, plan, rng=rng), cache, plan

    def _check_decodes(self) -> None:
        """Raises `Unsupported` or `ValueError` for a layer that cannot decode."""
        if self.op.decoding == "no":
            raise Unsupported(
                f"op is {self.op}: it has no step to decode with; use one that has, such as "
                "dense.dense()"
            )
        if not self.causal or self.mode != "eval":
            raise ValueError(
                f"causal={self.causal} and mode={self.mode!r}: decoding needs causal=True and "
                "mode='eval'"
            )

    def first_cache(self, params, batch: int, capacity: int, dtype: Any, rng=None) -> Any:
        """The cache before the first position of `batch` rows, in layers that compute in `dtype`.

        `capacity` and `rng` are those of `prefill_by`. On a mesh with `context` each device has its
        part of the positions.

        Raises:
          ValueError: the layer is not causal, or not built for evaluation.
          NotImplementedError: the algorithm has no step.
        """
        self._check_decodes()
        x = jnp.zeros((batch, 1, params["w_o"].shape[-1]), dtype)
        heads = self._all_heads(params, x)
        qkv = jax.tree.map(jnp.zeros_like, self._rotate(params, heads).of_op)
        if self.op.divides_cache:  # each device has as many positions
            capacity += -capacity % devices.n_sequence_shards()

        *arrays, extra_projections, _ = qkv
        none, rng, plan = jnp.zeros(batch, jnp.int32), _fold_in(rng, PLAN), None
        if not self.op.reuses:
            both = self.op.of_value_heads(*arrays)
            masks = dict(segment_ids=none[:, None], causal=True, train=False)
            plan = self.op.plan(params["op"], *both, rng=rng, length=capacity, **masks)
        options = dict(plan=plan, lengths=none, capacity=capacity, rng=rng)
        options["extra_projections"] = extra_projections
        cache = self.op.init_cache(params["op"], *arrays, **options)
        cache = context.placed_cache(self.op, cache)
        if self.next_value:
            cache = NextValueCache(cache, qkv.v)
        if self.key_conv:
            keys = heads[self._keys]
            cache = KeyConvCache(
                cache, jnp.zeros((batch, self.key_conv - 1, *keys.shape[2:]), dtype)
            )
        return cache

    def read_on(
        self,
        params,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        position: Int[Array, " B"],
        cache: Any,
        chosen: Int[Array, "B T K"] | tuple[()] = (),
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The layer at several more positions of each row: what their steps compute.

        Outputs behind `lengths` are arbitrary.

        Args:
          params: the weights, or those from `for_decoding`.
          x: the input, padded on the right.
          lengths: the number of positions of each row before its padding.
          position: of the first of them in each row.
          cache: from `first_cache`, `prefill`, `step` or the call before.
          chosen: what the queries chose in the layer whose choice this one reuses.

        Returns:
          The output, the cache with the positions, and what each query chose, where layers reuse
          it, otherwise ().
        """
        heads, places = self._all_heads(params, x), jnp.arange(x.shape[1])[None]
        if self.key_conv:
            cache, last = cache
            joined = jnp.concatenate([last, heads[self._keys]], axis=1)
            keys = short_convolution.of_keys(joined, params["key_conv"])[:, last.shape[1] :]
            last = short_convolution.last_of(joined, self.key_conv, lengths + last.shape[1])
            heads = heads | {self._keys: keys}
        at = position[:, None] + jnp.minimum(places, lengths[:, None] - 1)
        alone = self._rotate(params, heads, at)
        qkv, value = self._with_next_value(params, alone), None
        if self.next_value:
            current, following = _of_channels(params, qkv.v.dtype)
            is_read = (lengths > 0)[:, None, None, None]
            cache, before = cache
            value = before + jnp.where(is_read, following * alone.v[:, :1], 0)
            index = jnp.maximum(lengths - 1, 0)[:, None, None, None]
            newest = current * jnp.take_along_axis(alone.v, index, axis=1)
            newest = jnp.where(is_read, newest, before)

        def read(qkv, value, lengths, position, chosen, cache, params, shard):
            *arrays, extra_projections, _ = qkv
            options = dict(position=position, lengths=lengths, extra_projections=extra_projections)
            options |= dict(shard=shard, chosen=None if isinstance(chosen, tuple) else chosen)
            if self.position_bias is not None:
                options["bias"] = lambda q, k: self._bias_at(params, q, k)
            cache = self._with_value(cache, value, position, shard)
            return self.op.read_on(params["op"], *arrays, cache, **options)

        rows = qkv.of_op, value, lengths, position, chosen
        weights = {name: params[name] for name in ("op", "position_bias") if name in params}
        out, cache, choices = context.from_cache(read, self.op, rows, cache, weights)
        if self.next_value:
            cache = NextValueCache(cache, newest)
        if self.key_conv:
            cache = KeyConvCache(cache, last)
        return self.combine(params, out, qkv.gate), cache, choices

    def _with_value(self, cache: Any, value, position, shard) -> Any:
        """The algorithm's cache with another value of the position before; None: as it is."""
        if value is None:
            return cache
        return self.op.replace_value(cache, value, position - 1, shard and shard.axis)

    def step(
        self,
        params,
        x: Float[Array, "B 1 D"] | Unnormed,
        cache: Any,
        position: Int[Array, " B"],
        origins: Int[Array, "G K C"] | None = None,
        added: Float[Array, "B 1 D"] | None = None,
        chosen: Int[Array, "B K"] | None = None,
    ) -> tuple[Float[Array, "B 1 D"], Any]:
        """The layer at the next position of each row, and the cache with it.

        Args:
          params: the weights from `for_decoding`.
          x: the input.
          cache: from `prefill` or the step before.
          position: of each row.
          origins: in beam search, the beam whose cache has each position of a beam's past
            (`ops.decoding.ring.RingDecoding`). Algorithms whose `decoding` is not "beams" ignore
            it: their caches are reordered.
          added: a stream that the output is added to.
          chosen: from `newest_choice` of the layer whose choice this one reuses.
        """
        heads = self._all_heads(params, x)
        if self.key_conv:
            cache, last = cache
            key, last = short_convolution.of_next_key(heads[self._keys], last, params["key_conv"])
            heads = heads | {self._keys: key}
        qkv, value = self._rotate(params, heads, position[:, None]), None
        if self.next_value:
            # So far the newest key's value was without the next one.
            current, following = _of_channels(params, qkv.v.dtype)
            value, cache = cache.last + following * qkv.v, cache.op
            qkv = qkv._replace(v=current * qkv.v)

        def step(qkv, value, position, origins, chosen, cache, params, shard):
            *arrays, extra_projections, _ = qkv
            options = dict(origins=origins, extra_projections=extra_projections, chosen=chosen)
            if self.position_bias is not None:
                now = position[:, None]
                options["bias"] = lambda held: self._bias_at(params, now, held)[:, :, 0]
            cache = self._with_value(cache, value, position, shard)
            options |= dict(position=position, shard=shard)
            return *self.op.step(params["op"], *arrays, cache, **options), ()

        rows = qkv.of_op, value, position, origins if self._shares_beams else None, chosen
        read = {name: params[name] for name in ("op", "position_bias") if name in params}
        out, cache, _ = context.from_cache(step, self.op, rows, cache, read)
        if self.next_value:
            cache = NextValueCache(cache, qkv.v)
        if self.key_conv:
            cache = KeyConvCache(cache, last)
        return self._output(params, gated(out, qkv.gate), added), cache

    def newest_choice(self, cache: Any) -> Any:
        """What the newest query of each row chose, for layers that reuse it; of a step's cache."""
        for wrapped in (self.key_conv, self.next_value):
            cache = cache[0] if wrapped else cache
        return self.op.newest_choice(cache)

    @property
    def _shares_beams(self) -> bool:
        """Whether a beam's past may be in other beams' caches.

        With `next_value`, the last value of that past has this beam's next one in it. With
        `key_conv`, a beam keeps the last keys of its own past.
        """
        return self.op.decoding == "beams" and not self.next_value and not self.key_conv

    def reorder_cache(self, cache: Any, rows: Int[Array, " R"]) -> Any:
        """The cache of beams that continue `rows`; unchanged where caches are shared."""
        return cache if self._shares_beams else take_rows(cache, rows)


def gated(heads: Float[Array, "B T N V"], gate: Array | None) -> Float[Array, "B T N V"]:
    """The heads' outputs times the sigmoid of their gate, if there is one."""
    if gate is None:
        return heads
    wide = accum_dtype(heads.dtype)
    return (heads.astype(wide) * jax.nn.sigmoid(gate.astype(wide))).astype(heads.dtype)


def _of_channels(params, dtype) -> Float[Array, "2 1 1 N V"]:
    """The factors of a value and of the next one."""
    return params["next_value"][:, None, None].astype(dtype)


def _fold_in(rng, number: int):
    return None if rng is None else jax.random.fold_in(rng, number)

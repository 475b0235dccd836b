"""Multi-head attention around any attention algorithm: projections, heads, rng, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from reformax.layers._trax import Layer
from reformax.layers.dropout import check_mode, check_rate, dropout, rate_in
from reformax.layers.positions import rotary
from reformax.ops.base import AttentionOp, Dims
from reformax.ops.parts.arguments import check_arguments
from reformax.ops.parts.cache import take_rows


class QKV(NamedTuple):
    """What the algorithm reads: `[B, T, N, H]` each, `k` None where queries and keys are one.

    In cross-attention `k` and `v` are as long as the memory.
    """

    q: Array
    k: Array | None
    v: Array


class Attention(Layer):
    """`[B, T, D] -> [B, T, D]` through an `AttentionOp`.

    `apply` is `project`, `plan` and `attend` in turn; they are apart so that a reversible stack can
    keep a plan and attend again by it. Computes in the dtype of its input.

    Weights: `w_q, w_k [N, D, H]` (no `w_k` where the algorithm shares queries and keys), `w_v
    [N, D, V]`, `w_o [N, V, D]`, with `bias` also `b_q, b_k [N, H]`, `b_v [N, V]`, with
    `output_bias` also `b_o [D]`, and the algorithm's own as `op`.
    """

    _N_SEQUENCES = 1  # that come in; each has its mask, if masked

    def __init__(
        self,
        op: AttentionOp,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        causal: bool = False,
        masked: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        use_rotary: bool = False,
        mode: str = "train",
    ):
        """Args:
        op: the algorithm, such as `lsh.lsh(n_hashes=4)`.
        n_heads: N.
        d_qk: H, the size of a head's queries and keys.
        d_v: V, the size of a head's values.
        causal: whether a position sees only itself and what came before it.
        masked: whether a second input comes along, `[B, T]`: True or a segment id above 0 marks a
          token, False or 0 padding; tokens see their own segment only.
        bias: whether the projections of q, k, v have biases.
        output_bias: whether the output projection has one.
        attention_dropout: the rate on attention weights.
        output_dropout: the rate on the output.
        use_rotary: whether queries and keys are turned by their position.
        mode: "train" or "eval"; at evaluation dropout is off and the algorithm plans with its
          settings for evaluation.
        """
        super().__init__(n_in=self._N_SEQUENCES * (2 if masked else 1))
        for name, size in (("n_heads", n_heads), ("d_qk", d_qk), ("d_v", d_v)):
            if size < 1:
                raise ValueError(f"{name} is {size}: expected at least 1")
        if not isinstance(op, AttentionOp):
            raise ValueError(f"op is {op!r}: expected an AttentionOp, such as lsh.lsh()")
        self._op = op
        self._n_heads = n_heads
        self._d_qk = d_qk
        self._d_v = d_v
        self._causal = causal
        self._masked = masked
        self._bias = bias
        self._output_bias = output_bias
        self._attention_dropout = check_rate("attention_dropout", attention_dropout)
        self._output_dropout = check_rate("output_dropout", output_dropout)
        self._use_rotary = use_rotary
        self._mode = check_mode(mode)

    def init_params(self, rng, shape, *shapes):
        *_, length, d_model = shape
        rng_q, rng_k, rng_v, rng_o, rng_op = jax.random.split(rng, 5)
        n, h, v = self._n_heads, self._d_qk, self._d_v

        def glorot(rng, d_head):  # with respect to all heads together, as in Trax
            limit = math.sqrt(6 / (d_model + d_head * n))
            return jax.random.uniform(rng, (n, d_model, d_head), jnp.float32, -limit, limit)

        params = {"w_q": glorot(rng_q, h), "w_v": glorot(rng_v, v)}
        params["w_o"] = jnp.swapaxes(glorot(rng_o, v), 1, 2)
        if not self._op.traits.shared_qk:
            params["w_k"] = glorot(rng_k, h)
        if self._bias:
            for letter in "qkv":
                if f"w_{letter}" in params:
                    params[f"b_{letter}"] = jnp.zeros((n, v if letter == "v" else h))
        if self._output_bias:
            params["b_o"] = jnp.zeros(d_model)
        params["op"] = self._op.init(rng_op, Dims(n, h, v, length))
        return params

    def project(self, params, x: Float[Array, "B T D"]) -> QKV:
        """Queries, keys and values of all heads, turned by their positions if they are rotary.

        A plan is made of the turned ones: what hashing looks for are the largest scores.
        """

        return self._rotated(QKV(*(self._heads(params, letter, x) for letter in "qkv")))

    def _project_merged(self, params, x: Float[Array, "B T D"], position=None) -> QKV:
        """`project` by the weights of `for_decoding`."""
        n, shared = self._n_heads, self._op.traits.shared_qk
        ends = n * self._d_qk * np.arange(1, 2 if shared else 3)
        parts = jnp.split(_affine(params, "in", x), ends, axis=-1)
        q, *k, v = (part.reshape(*x.shape[:2], n, -1) for part in parts)
        return self._rotated(QKV(q, k[0] if k else None, v), position)

    def _heads(self, params, letter: str, x: Float[Array, "B T D"]) -> Array | None:
        """One of the projections of `x`; None if the algorithm has none of this letter."""
        if f"w_{letter}" not in params:
            return None
        y = jnp.einsum("btd,ndh->btnh", x, params[f"w_{letter}"].astype(x.dtype))
        return y + params[f"b_{letter}"].astype(x.dtype) if self._bias else y

    def _rotated(self, projections: QKV, position=None) -> QKV:
        q, k, v = projections
        if self._use_rotary:
            q, k = rotary(q, position), None if k is None else rotary(k, position)
        return QKV(q, k, v)

    def plan(
        self, params, projections: QKV, segments=None, rng=None, length: int | None = None
    ) -> Any:
        """Where each query will look: integers, through which no gradient flows.

        Settings that depend on a length go by `length` if it is given, as in `AttentionOp.plan`.
        """
        q, k, v = projections
        check_arguments(
            self._op,
            *(q, k, v),
            causal=self._causal,
            segments=segments,
            dropout=rate_in(self._mode, self._attention_dropout),
            rng=rng,
        )
        return self._op.plan(
            params["op"],
            q,
            k,
            segments=segments,
            causal=self._causal,
            rng=_plan_rng(rng),
            train=self._mode == "train",
            length=length,
        )

    def attend(
        self, params, projections: QKV, plan, segments=None, rng=None
    ) -> Float[Array, "B T D"]:
        """Attention by a plan, and the output projection."""
        weight_rng, output_rng = (
            (None, None) if rng is None else (jax.random.fold_in(rng, i) for i in (1, 2))
        )
        out = self._attended(params, projections, plan, segments, weight_rng)
        w_o = params["w_o"].reshape(*out.shape[2:], -1)  # that of `for_decoding` has heads merged
        out = jnp.einsum("btnv,nvd->btd", out, w_o.astype(out.dtype))
        if self._output_bias:
            out = out + params["b_o"].astype(out.dtype)
        return dropout(out, rate_in(self._mode, self._output_dropout), output_rng)

    def _attended(self, params, projections: QKV, plan, segments, rng):
        return self._op.apply(
            params["op"],
            *projections,
            plan=plan,
            segments=segments,
            causal=self._causal,
            dropout=rate_in(self._mode, self._attention_dropout),
            rng=rng,
        )

    def prefill(
        self, params, x: Float[Array, "B T D"], lengths: Int[Array, " B"], capacity: int, rng=None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` to the first `lengths` positions of each row, and the cache that `step` reads.

        Outputs of the positions behind them mean nothing, and no output depends on them.

        Args:
          params: the weights, or those of `for_decoding`.
          x: the input, padded on the right.
          lengths: the number of positions of each row that are no padding, at least 1.
          capacity: how many positions the cache will have to hold.
          rng: the source of hashes; the same as in `apply`.

        Raises:
          ValueError: the layer is not causal, or not built for evaluation.
          NotImplementedError: the algorithm has no step.
        """
        if self._op.step is None:
            raise NotImplementedError(
                f"op is {self._op}: it has no step to decode with; use one that has, as all of "
                "reformax.ops do"
            )
        if not self._causal or self._mode != "eval":
            raise ValueError(
                f"causal={self._causal} and mode={self._mode!r}: decoding needs causal=True and "
                "mode='eval'"
            )
        project = self._project_merged if "w_in" in params else self.project
        projections = project(params, x)
        # Padding on the right is in the future of every token: only a plan has to know of it.
        tokens = (jnp.arange(x.shape[1]) < lengths[:, None]).astype(jnp.int32)
        plan = self.plan(params, projections, tokens, rng, length=capacity)
        cache = self._op.init_cache(
            params["op"],
            *projections,
            plan=plan,
            lengths=lengths,
            capacity=capacity,
            rng=_plan_rng(rng),
        )
        return self.attend(params, projections, plan, rng=rng), cache

    def step(
        self,
        params,
        x: Float[Array, "B 1 D"],
        cache: Any,
        position: Int[Array, " B"],
        origins: Int[Array, "G K C"] | None = None,
    ) -> tuple[Float[Array, "B 1 D"], Any]:
        """The layer at the next position of each row, and the cache with it.

        Args:
          params: those of `for_decoding`.
          x: the input.
          cache: what `prefill` or the step before gave.
          position: of each row.
          origins: in beam search, whose past a beam has (`ops.cache.ring_decoding`); for algorithms
            without the trait `beams` the cache has to be moved, and this tells them nothing.
        """
        projections = self._project_merged(params, x, position[:, None])
        beams = dict(origins=origins) if origins is not None and self._op.traits.beams else {}
        out, cache = self._op.step(params["op"], *projections, cache, position=position, **beams)
        return _affine(params, "o", out.reshape(*x.shape[:2], -1)), cache

    def reorder_cache(self, cache: Any, rows: Int[Array, " R"]) -> Any:
        """The cache of beams that go on from others; as it is where `step` will find its way."""
        return cache if self._op.traits.beams else take_rows(cache, rows)

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `step`: one product for all heads and projections, in `dtype`.

        `w_in [D, N * (H + H + V)]`, or `N * (H + V)` with shared queries and keys, `b_in` likewise,
        `w_o [N * V, D]`, `b_o [D]`, and `op` as it is.
        """
        return self._merged(params, {"in": [x for x in "qkv" if f"w_{x}" in params]}, dtype)

    def _merged(self, params, products: dict[str, Sequence[str]], dtype: str) -> dict[str, Any]:
        """The weights for each product, by name: those of its projections side by side."""
        d_model = params["w_o"].shape[-1]
        merged = {"w_o": params["w_o"].reshape(-1, d_model)}
        for name, letters in products.items():
            columns = [jnp.moveaxis(params[f"w_{x}"], 0, 1) for x in letters]
            columns = [w.reshape(d_model, -1) for w in columns]
            merged[f"w_{name}"] = jnp.concatenate(columns, axis=1)
            if self._bias:
                biases = [jnp.ravel(params[f"b_{x}"]) for x in letters]
                merged[f"b_{name}"] = jnp.concatenate(biases)
        if self._output_bias:
            merged["b_o"] = params["b_o"]
        return {name: w.astype(dtype) for name, w in merged.items()} | {"op": params["op"]}

    def apply(
        self, params, x: Float[Array, "B T D"], mask: Int[Array, "B T"] | None = None, rng=None
    ) -> Float[Array, "B T D"]:
        segments = None if mask is None else mask.astype(jnp.int32)
        projections = self.project(params, x)
        plan = self.plan(params, projections, segments, rng)
        return self.attend(params, projections, plan, segments, rng)


class CrossAttention(Attention):
    """`[B, T, D], [B, S, D] -> [B, T, D]`: each position of the first reads the second, the memory.

    An encoder-decoder's attention to what the encoder made (Vaswani et al. 2017, sec. 3.2.3). The
    algorithm has to have the trait `cross`. Shared-QK algorithms cannot: their key is the query of
    its own position, and a position of the one sequence is none of the other; nor can those that
    sort or cut one sequence into chunks, whose neighbours mean nothing across two. Weights are
    those of `Attention`; positions turn nothing.
    """

    _N_SEQUENCES = 2

    def __init__(
        self,
        op: AttentionOp,
        n_heads: int = 2,
        d_qk: int = 64,
        d_v: int = 64,
        masked: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        mode: str = "train",
    ):
        """Args are those of `Attention`, but for:

        op: an algorithm whose traits say `cross`.
        masked: whether the two inputs' segments come behind them, `[B, T]` and `[B, S]`: tokens see
          those of their own id.

        Raises:
          NotImplementedError: an algorithm that attends within one sequence.
        """
        super().__init__(
            op,
            n_heads,
            d_qk,
            d_v,
            masked=masked,
            bias=bias,
            output_bias=output_bias,
            attention_dropout=attention_dropout,
            output_dropout=output_dropout,
            mode=mode,
        )
        if not op.traits.cross:
            why = "its keys are its own queries" if op.traits.shared_qk else "it reads one sequence"
            raise NotImplementedError(
                f"op is {op!r}: it cannot attend from one sequence to another, as {why}; use "
                "one whose traits say cross=True, such as dense.dense()"
            )

    def project(self, params, x: Float[Array, "B T D"], memory: Float[Array, "B S D"]) -> QKV:
        """Queries of `x`, keys and values of the memory."""
        memory = memory.astype(x.dtype)
        k, v = (self._heads(params, letter, memory) for letter in "kv")
        return QKV(self._heads(params, "q", x), k, v)

    def precompute_kv(
        self, params, memory: Float[Array, "B S D"], dtype: str
    ) -> tuple[Float[Array, "B N H S"], Float[Array, "B N V S"]]:
        """Keys and values of the memory for `step`, in the order that its products read them.

        `params` are those of `for_decoding`.
        """
        memory = memory.astype(dtype)
        heads = [
            _affine(params, letter, memory).reshape(*memory.shape[:2], self._n_heads, -1)
            for letter in "kv"
        ]
        # Behind a barrier, or the compiler would put the transposition into the loop over steps.
        return jax.lax.optimization_barrier(tuple(jnp.transpose(x, (0, 2, 3, 1)) for x in heads))

    def step(
        self,
        params,
        x: Float[Array, "R 1 D"],
        memory_kv: tuple[Float[Array, "B N H S"], Float[Array, "B N V S"]],
        memory_segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "R 1 D"]:
        """The layer at one position of each row, of what `precompute_kv` made.

        Args:
          params: those of `for_decoding`.
          x: R / B rows for each memory, one after the other.
          memory_kv: keys and values of each memory.
          memory_segments: 0 is padding; every row reads the rest.
        """
        batch = memory_kv[0].shape[0]
        q = _affine(params, "in", x).reshape(batch, -1, self._n_heads, self._d_qk)
        segments = None
        if memory_segments is not None:
            segments = jnp.ones(q.shape[:2], jnp.int32), (memory_segments != 0).astype(jnp.int32)
        projections = QKV(q, *(jnp.transpose(x, (0, 3, 1, 2)) for x in memory_kv))
        plan = self.plan(params, projections, segments)
        out = self._attended(params, projections, plan, segments, None)
        return _affine(params, "o", out.reshape(*x.shape[:2], -1))

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `precompute_kv` and `step`: a product for all heads of each projection.

        `w_in [D, N * H]` of queries, `w_k [D, N * H]`, `w_v [D, N * V]` of the memory, and the rest
        as `Attention` has it.
        """
        return self._merged(params, {"in": "q", "k": "k", "v": "v"}, dtype)

    def apply(
        self,
        params,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Int[Array, "B T"] | None = None,
        memory_mask: Int[Array, "B S"] | None = None,
        rng=None,
    ) -> Float[Array, "B T D"]:
        segments = None if mask is None else tuple(m.astype(jnp.int32) for m in (mask, memory_mask))
        projections = self.project(params, x, memory)
        plan = self.plan(params, projections, segments, rng)
        return self.attend(params, projections, plan, segments, rng)


def _affine(params, name: str, x: Float[Array, "*d D"]) -> Float[Array, "*d E"]:
    """`x` by the matrix and the bias, if any, that `for_decoding` gave a name."""
    return x @ params[f"w_{name}"] + params.get(f"b_{name}", 0)


def _plan_rng(rng):
    return None if rng is None else jax.random.fold_in(rng, 0)

"""Attention by a plan: where queries look, what they read there, on which devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from reformax import devices
from reformax.buffers import updated
from reformax.layers import context_parallel, remat
from reformax.layers.multi_head import PLAN, WEIGHTS, MultiHead
from reformax.layers.rngs import fold_in
from reformax.ops.calls.arguments import check_arguments
from reformax.ops.calls.heads import QKV
from reformax.ops.masking.masks import (
    SegmentIds,
    Tokens,
    int32_or_bool_ids,
    row_lengths,
    tokens_of,
)
from reformax.ops.softmax.kept_mass import kept_mass

KEPT_MASS = "kept_mass"  # a weight that is there where the layer's kept mass is measured


def read_by_op(params: dict[str, Any]) -> dict[str, Any]:
    """The weights of a layer that the call of its algorithm reads."""
    return {name: params[name] for name in ("op", "position_bias") if name in params}


@dataclasses.dataclass(eq=False, repr=False)
class PlannedAttention(MultiHead):
    """An attention algorithm between the projections of `MultiHead`, whose arguments it has.

    `apply` is `project`, `plan`, `attend` and `combine` in turn. They are apart so that a
    reversible stack can keep a plan and attend again by it. A subclass defines `project` and
    `apply`, and for decoding `for_decoding` and `step`, which project with merged weights.
    """

    def plan(
        self,
        params,
        qkv: QKV,
        segment_ids: SegmentIds | Tokens | None = None,
        rng: PRNGKeyArray | None = None,
        length: int | None = None,
    ) -> Any:
        """Where each query will look: integers, through which no gradient flows.

        Settings that depend on a length use `length` if it is given, as in `AttentionOp.plan`.
        """
        tokens = tokens_of(segment_ids)
        global_tokens = tokens.global_tokens if self.op.global_tokens else None
        check_arguments(
            self.op,
            *qkv.arrays,
            causal=self.causal,
            segment_ids=tokens.segment_ids,
            dropout=self._weights_rate,
            rng=rng,
            extra_projections=qkv.extra_projections,
            global_tokens=global_tokens,
        )

        def plan(qkv, tokens, params, rng, shard=None):
            segment_ids, global_tokens = tokens
            return self.op.plan(
                params,
                *qkv.arrays,
                segment_ids=segment_ids,
                causal=self.causal,
                rng=rng,
                shard=shard,
                train=self.mode == "train",
                length=length,
                global_tokens=global_tokens,
            )

        masks = int32_or_bool_ids(tokens.segment_ids), global_tokens
        arrays = qkv, masks, params["op"], fold_in(rng, PLAN)
        return context_parallel.plan(plan, self.op, self.n_heads, *arrays)

    def attend(
        self,
        params,
        qkv: QKV,
        plan: Any,
        segment_ids: SegmentIds | Tokens | None = None,
        rng: PRNGKeyArray | None = None,
        run: remat.Run = remat.direct,
    ) -> Float[Array, "B T N V"]:
        """Each head's attention by a plan; `run` calls the algorithm."""
        read, rng = read_by_op(params), fold_in(rng, WEIGHTS)
        out = run(self._apply_op, read, qkv, plan, segment_ids, rng)
        if KEPT_MASS not in params or run is remat.stored:
            return out
        measured = self._kept_mass(read, qkv, plan, segment_ids)
        return out + (0 * updated(params[KEPT_MASS], measured)).astype(out.dtype)

    def _apply_op(self, params, qkv: QKV, plan, segment_ids, rng=None) -> Float[Array, "B T N V"]:
        options = dict(dropout=self._weights_rate)
        return self._on_devices(self.op.apply, params, qkv, plan, segment_ids, rng, **options)

    def _kept_mass(self, params, qkv: QKV, plan, segment_ids) -> Float[Array, ""]:
        """The mean of `softmax.kept_mass` over rows, queries and heads."""
        n_shards = devices.n_sequence_shards()

        def measured(*arrays, **call) -> Float[Array, "B C N 2"]:
            found = kept_mass(self.op, *arrays, **call)  # its queries are split as a sequence is
            return jnp.pad(found, ((0, 0), (0, -found.shape[1] % n_shards), (0, 0), (0, 0)))

        found = self._on_devices(measured, params, qkv, plan, segment_ids)
        kept, weight = jnp.sum(found.astype(jnp.float32), axis=(0, 1, 2))
        return kept / jnp.maximum(weight, 1)

    def _on_devices(self, function, params, qkv: QKV, plan, segment_ids, rng=None, **options):
        """`function`, an algorithm's `apply` or the like, on the devices of the mesh."""
        tokens = tokens_of(segment_ids)

        def attend(qkv, plan, segment_ids, params, rng, bias, shard=None):
            lengths = row_lengths(segment_ids) if tokens.counted else None
            return function(
                params,
                *qkv.arrays,
                plan=plan,
                segment_ids=segment_ids,
                causal=self.causal,
                rng=rng,
                shard=shard,
                extra_projections=qkv.extra_projections,
                bias=bias,
                lengths=lengths,
                **options,
            )

        arrays = qkv, plan, int32_or_bool_ids(tokens.segment_ids), params["op"], rng
        bias = self._bias(params, qkv.q.shape[1])
        return context_parallel.attend(attend, self.op, self.causal, self.n_heads, *arrays, bias)

    def _bias(self, params, length: int) -> Float[Array, "1 N T T"] | None:
        """The bias that is added to the logits, if there is one."""
        del params, length
        return None

"""An attention sublayer of a reversible stack: its output, and what its backward pass needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from reformax.layers import remat
from reformax.layers.multi_head import QKV
from reformax.layers.planned_attention import PlannedAttention
from reformax.ops.masking.masks import tokens_of


class KeptOfAttention(NamedTuple):
    """The arrays that a stack keeps of an attention sublayer for the backward pass."""

    plan: Any  # None where it is another layer's
    stored: list[Array] | None = None  # from `remat.stored`, with the policy "attention"


class AttentionSublayer(NamedTuple):
    """An attention sublayer as a function of (params, input), with its other inputs."""

    stack: Any  # the `ReversibleStack` that has it
    name: str
    layer: PlannedAttention
    memory: tuple[Array, ...]  # one array, or none
    segment_ids: Any
    rng: Any
    source: int | None  # the block of the cycle whose plan it reuses

    def forward(self, params, x, reused: Any) -> tuple[Array, KeptOfAttention]:
        """The output, by the plan of `source` if there is one, and what the stack keeps."""
        separately = self.stack._separately
        qkv = separately(self.project, params, x, *self.memory)
        plan, kept = reused, None
        if self.source is None:
            plan = kept = self.layer.plan(params[self.name], qkv, self.segment_ids, self.rng)
        if self.stack.remat_policy != "attention":
            return separately(self.attend, params, qkv, plan), KeptOfAttention(kept)
        stored = separately(functools.partial(self.attend_heads, remat.stored), params, qkv, plan)
        out = separately(self.combine, params, stored[0], qkv.gate)
        return out, KeptOfAttention(kept, stored)

    def recompute(self, params, x, kept: KeptOfAttention) -> tuple[Array, Callable]:
        """The output by what is kept, and the function that `jax.vjp` gives.

        That function also takes the gradient of the input from its other readers, which the norm's
        gradient is added to.
        """
        separately = self.stack._separately
        run = functools.partial(self.project_and_attend, kept)
        (out, _), vjp = jax.vjp(run, params, x, *self.memory)
        if self.stack.exact:
            # What is stored needs no projections but the gate's.
            needed = kept.stored is None or self.layer.gate
            qkv = separately(self.project, params, x, *self.memory) if needed else None
            if kept.stored is None:
                out = separately(self.attend, params, qkv, kept.plan)
            else:
                out = separately(self.combine, params, kept.stored[0], qkv and qkv.gate)
        return out, vjp

    def project_and_attend(self, kept: KeptOfAttention, params, x, *memory) -> tuple[Array, Array]:
        norm = params[f"{self.name}_norm"]
        h, x = self.stack._norm_of(norm).with_residual(norm, x)
        qkv = self._project_normed(params, h, memory)
        if kept.stored is None:
            return self.attend(params, qkv, kept.plan), x
        heads = self.attend_heads(remat.recalled(kept.stored), params, qkv, kept.plan)
        return self.combine(params, heads, qkv.gate), x

    def project(self, params, x, *memory) -> QKV:
        norm = params[f"{self.name}_norm"]
        h, _ = self.stack._norm_of(norm).with_residual(norm, x)
        return self._project_normed(params, h, memory)

    def _project_normed(self, params, h, memory) -> QKV:
        if memory:
            return self.layer.project(params[self.name], h, *memory)
        tokens = tokens_of(self.segment_ids)
        return self.layer.project(params[self.name], h, tokens.positions, tokens.segment_ids)

    def attend(self, params, qkv: QKV, plan) -> Array:
        return self.combine(params, self.attend_heads(remat.direct, params, qkv, plan), qkv.gate)

    def attend_heads(self, run: remat.Run, params, qkv: QKV, plan) -> Any:
        return self.layer.attend_heads(
            params[self.name], qkv, plan, self.segment_ids, self.rng, run
        )

    def combine(self, params, heads: Array, gate: Array | None) -> Array:
        out = self.layer.combine(params[self.name], heads, gate, self.rng)
        return self.stack._residual(out)

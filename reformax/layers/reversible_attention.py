"""An attention sublayer of a reversible stack: its output, and what its backward pass needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from reformax.layers import remat
from reformax.layers.planned_attention import PlannedAttention
from reformax.ops.calls.heads import QKV
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
        qkv, gate = separately(self.project, params, x, *self.memory)
        plan, kept = reused, None
        if self.source is None:
            plan = kept = self.layer.plan(params[self.name], qkv, self.segment_ids, self.rng)
        if self.stack.remat_policy != "attention":
            out = separately(self.attend_and_combine, params, qkv, gate, plan)
            return out, KeptOfAttention(kept)
        stored = separately(functools.partial(self.attend, remat.stored), params, qkv, plan)
        out = separately(self.combine, params, stored[0], gate)
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
            qkv = gate = None
            if needed:
                qkv, gate = separately(self.project, params, x, *self.memory)
            if kept.stored is None:
                out = separately(self.attend_and_combine, params, qkv, gate, kept.plan)
            else:
                out = separately(self.combine, params, kept.stored[0], gate)
        return out, vjp

    def project_and_attend(self, kept: KeptOfAttention, params, x, *memory) -> tuple[Array, Array]:
        qkv, gate, x = self._project(params, x, memory)
        run = remat.direct if kept.stored is None else remat.recalled(kept.stored)
        return self.attend_and_combine(params, qkv, gate, kept.plan, run), x

    def project(self, params, x, *memory) -> tuple[QKV, Array | None]:
        return self._project(params, x, memory)[:2]

    def _project(self, params, x, memory) -> tuple[QKV, Array | None, Array]:
        """`project`, and the input as other branches of the block read it."""
        norm = params[f"{self.name}_norm"]
        h, x = self.stack._norm_of(norm).with_residual(norm, x)
        tokens = tokens_of(self.segment_ids)
        others = memory or (tokens.positions, tokens.segment_ids)
        return *self.layer.project(params[self.name], h, *others), x

    def attend(self, run: remat.Run, params, qkv: QKV, plan) -> Any:
        return self.layer.attend(params[self.name], qkv, plan, self.segment_ids, self.rng, run)

    def attend_and_combine(self, params, qkv: QKV, gate, plan, run=remat.direct) -> Array:
        return self.combine(params, self.attend(run, params, qkv, plan), gate)

    def combine(self, params, heads: Array, gate: Array | None) -> Array:
        out = self.layer.combine(params[self.name], heads, gate, self.rng)
        return self.stack._residual(out)

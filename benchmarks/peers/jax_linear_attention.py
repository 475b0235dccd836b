"""Recurrences of jax-linear-attention: rows of `benchmarks.attention` beside ours.

They run in the same JAX, where the package is installed, and get the same inputs and gates.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from jaxtyping import Array, Float

from reformax.ops import AttentionOp

# By our op's name, the package's kind and its options.
KINDS = {
    "gated_linear": ("gla", {}),
    "gated_delta": ("gated_deltanet", {"use_qk_l2norm": True}),
    "kda": ("kda", {"use_qk_l2norm": True}),
}


def is_installed() -> bool:
    return importlib.util.find_spec("jla") is not None


class Peer:
    """The package's function in the place of one of our ops, whose weights and gates it has."""

    def __init__(self, ours: AttentionOp):
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def plan(self, *_: Any, **__: Any) -> tuple[()]:
        return ()

    def apply(self, params, q, k, v, *, extra_projections, **_) -> Float[Array, "B T N V"]:
        return self(q, k, v, params=params, extra_projections=extra_projections)

    def __call__(self, q, k, v, *, params, extra_projections, **_) -> Float[Array, "B T N V"]:
        from jla.ops import linear_attention

        x = self._ours._inputs(params, q, k, v, extra_projections)
        by_head = x.log_decay.shape[3] == 1
        gates = {"g": x.log_decay[..., 0] if by_head else x.log_decay}
        if x.beta is not None:
            gates["beta"] = x.beta[..., 0]
        kind, options = KINDS[self._ours.name]
        return linear_attention(kind, q, k, v, **gates, **options)[0].astype(v.dtype)

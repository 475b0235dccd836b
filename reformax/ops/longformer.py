"""Longformer: a sliding window for every token, and the whole sequence for global tokens.

Beltagy et al. 2020, sec. 3. Each head has a window, which may be dilated. Global tokens attend to
all tokens and all tokens attend to them (sec. 3.1). Attention of global tokens has separate
projections, `Q_g`, `K_g` and `V_g`. Other tokens attend to their window and to global tokens by one
set of projections. Time is O(T (window + G)) for G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.declared import Called, Count, SettingError, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Dims, Projection
from reformax.ops.calls.dispatch import KERNELS
from reformax.ops.decoding import band as band_cache
from reformax.ops.masking.bands import first_global, rows_at
from reformax.ops.masking.visibility import NOWHERE, Visibility
from reformax.ops.softmax import band

STEPS = "a number of at least 1, or one for each head"
Dilation = Annotated[Size | Sequence[Size], Called(STEPS)]


@options
class longformer(AttentionOp):
    """Attention to a window, and of all tokens from and to global ones.

    `global_tokens` are above 0 at global tokens. In causal attention a global token sees all tokens
    before it, and all tokens after it see it. In decoding tokens of the prompt may be global; later
    tokens are not.

    Further projections of the input with `n_global` and `global_projections`: `global_q`,
    `global_k`, `global_v`.

    Args:
      window: a position sees those less than `window` steps away, before it and, if not causal,
        after it. The paper's w, which counts both sides, is `2 * (window - 1)`.
      dilation: positions of a step, for all heads or for each (sec. 3.1).
      n_global: the most global tokens of a row; of more, the first ones are global. With 0 there
        are none, and `global_tokens` are refused.
      global_projections: whether attention of global tokens has separate projections.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 256 or less, of one dilation where there is dropout. `"auto"` takes the kernel
        where it computes the same function.

    Raises:
      ValueError: a size out of range, an unknown `impl`; at the call, a dilation for another number
        of heads.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    window: Size = 257
    dilation: Dilation = 1
    n_global: Count = 0
    global_projections: bool = True
    impl: str = "auto"

    _takes_lengths = True
    _impls = KERNELS

    @property
    def global_tokens(self) -> bool:
        return self.n_global > 0

    @property
    def local(self) -> bool:
        return self.n_global == 0

    @property
    def endless_from(self) -> int:
        n_heads = len(self.dilation) if isinstance(self.dilation, tuple) else 1
        return band_cache.reach(self._bands(n_heads, True))

    @property
    def shards(self) -> tuple[str, ...]:
        alike = isinstance(self.dilation, int) and self.n_global == 0
        return ("heads",) if alike else ()

    @property
    def _hides_padding(self) -> bool | str:
        return True if self.n_global == 0 else "finite"

    def _check(self) -> None:
        if self.dilation == ():
            raise SettingError(f"dilation is {self.dilation}: expected {STEPS}")

    def _bands(self, n_heads: int, causal: bool) -> tuple[Visibility, ...]:
        """The band of each head, or one for all heads."""
        each = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        if len(each) not in (1, n_heads):
            raise SettingError(
                f"dilation is {self.dilation}: expected one number, or one for each of "
                f"{n_heads} heads"
            )
        return tuple(Visibility(causal, self.window, n) for n in each)

    def extra_projections(self, dims: Dims) -> dict[str, Projection]:
        if not (self.n_global and self.global_projections):
            return {}
        n, h = dims.n_heads, dims.d_qk
        return {
            "global_q": Projection(n, h, "query"),
            "global_k": Projection(n, h, "key"),
            "global_v": Projection(n, dims.d_v),
        }

    def _plan(self, call, params, q, k) -> Int[Array, "B G"] | None:
        """The positions of global tokens, if there are any."""
        return first_global(call.global_tokens, call.segment_ids, self.n_global)

    def _apply(self, call, params, q, k, v, plan) -> Array:
        out = band.attend(call, self._bands(q.shape[2], call.causal), q, k, v, plan, self.impl)
        if plan is None:
            return out
        if call.extra_projections:
            q, k, v = (call.extra_projections[f"global_{name}"] for name in "qkv")
            q = self._scaled_by_length(call, params, q, k)
        rows = band.rows_of_global_tokens(call, rows_at(q, plan), k, v, plan).astype(out.dtype)
        return out.at[jnp.arange(len(q))[:, None], plan].set(rows, mode="drop")

    def _init_cache(self, call, params, q, k, v, plan) -> band_cache.BandCache:
        global_positions = jnp.zeros((len(k), 0), jnp.int32) if plan is None else plan
        exists = global_positions < call.lengths[:, None]
        global_positions = jnp.where(exists, global_positions, NOWHERE)
        return band_cache.fill(call, self._bands(q.shape[2], True), k, v, global_positions)

    def _step(self, call, params, q, k, v, cache: band_cache.BandCache):
        return band_cache.step(call, self._bands(q.shape[2], True), q, k, v, cache, self.impl)

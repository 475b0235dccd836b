"""Self-attention: rotary positions, convolved keys, shifted values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import SettingError, Size, Unsupported
from reformax.layers import context_parallel, remat
from reformax.layers.attention_decoding import AttentionDecoding, value_factors
from reformax.layers.matrices import Unnormed
from reformax.layers.multi_head import ATTENTION_GATE, ConvSize
from reformax.layers.planned_attention import PlannedAttention
from reformax.layers.relative import N_BUCKETS, PositionBias, position_bias
from reformax.ops.calls.arguments import check_mask
from reformax.ops.calls.heads import QKV
from reformax.ops.masking.masks import Ids, Tokens, int32_ids, segment_begins, tokens_of
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.numerics.rotary import RotaryAngles, rotary
from reformax.ops.recurrence import short_convolution


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(AttentionDecoding, PlannedAttention):
    """Self-attention, `[B, T, D] -> [B, T, D]`. Weights and more arguments: see `MultiHead`.

    **Shifted values: `next_value`.** With this option the value of key s is
    `a * v_s + b * v_{s+1}`: the value at s and the value of the next position, with factors a and b
    learnt by channel, `next_value [2, N, V]`. In text the token after an earlier occurrence of a
    word tells what may follow now. A position must see earlier ones alone, s < t, so that s + 1 is
    at most t. A position before padding or another segment has no next value.

    Args:
      causal: whether a position sees only itself and what came before it.
      use_rotary: whether queries and keys are rotated by their position.
      rotary: with `use_rotary`, the angles of positions of a line.
      rotary_grid: with `use_rotary`, the axes' sizes of the grid, row-major, that the positions are
        of, as (32, 32) of an image by its pixels; (): they are of a line.
      position_bias: what is added to the logits by distance: "alibi", minus the distance times a
        slope of the head; "t5", a learnt number of head and distance, `position_bias [32, N]`;
        see `layers.relative`. The algorithm needs `bias`.
      key_conv: W; keys, of `w_k` alone, are `k_t + silu(sum_j w_j k_{t-j})` over the last W
        positions of their segment, by weights `key_conv [G, H, W]` that begin at 0. Algorithms
        that choose keys then also choose by what a key follows (Xiao et al. 2025, arXiv
        2511.11571, for MoBA). The convolution comes before `qk_norm` and rotation. With an
        algorithm that makes keys of queries, the queries are convolved. None: there is none.
      next_value: whether a key's value has that of the next position in it too, as above. It needs
        `causal` and an algorithm with `never_sees_itself`.

    Raises:
      SettingError: `next_value` with an algorithm by which a position sees itself, `position_bias`
        with one that adds no bias, `use_rotary` with one that rotates, a grid without `use_rotary`
        or of more axes than heads have pairs of features, besides what `MultiHead` refuses.
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
        self._check_rotary()
        if self.position_bias and not self.op.bias:
            raise Unsupported(
                f"position_bias is {self.position_bias!r}, but {self.op} adds no bias: use an op "
                "whose bias is True, such as flash.flash()"
            )

    def _check_rotary(self) -> None:
        """Raises `SettingError` for angles or a grid of positions that do not fit the heads."""
        n_axes = len(self.rotary_grid)
        if n_axes and not self.use_rotary:
            raise SettingError(
                f"rotary_grid is {tuple(self.rotary_grid)} and use_rotary is False: set "
                "use_rotary=True or leave the grid out"
            )
        if self.use_rotary and self.op.rotates:
            raise SettingError(
                f"use_rotary is True and {self.op} rotates queries and keys by itself: set "
                "use_rotary=False, in a model rotary_layers or pos_type='rotary_local'"
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
    ) -> tuple[QKV, Array | None]:
        """Queries, keys and values of all heads, rotated if `use_rotary`, and the output's gate.

        Plans are made of rotated vectors, because hashes look for large logits, which are products
        of rotated ones. `key_conv` reads the segments, and "longrope" which positions are padding.
        """
        heads = self._convolved(params, self._project_all(params, x), segment_ids)
        if positions is None and segment_ids is not None:
            positions = self._before_padding(is_token(segment_ids))
        qkv = self._with_next_value(params, self._to_qkv(params, heads, positions), segment_ids)
        qkv = context_parallel.arrange(self.op, qkv, self.position_bias is not None)
        return qkv, heads.get(ATTENTION_GATE)

    def _before_padding(self, tokens: Bool[Array, "B T"]) -> Int[Array, "B T"] | None:
        """The positions, at most a row's last token's, for "longrope"; None: 0 to T - 1."""
        if self.rotary.scaling != "longrope":
            return None
        index = jnp.arange(tokens.shape[1])[None]
        return jnp.minimum(index, jnp.max(jnp.where(tokens, index, 0), axis=1, keepdims=True))

    def _convolved(self, params, heads: dict[str, Array], segment_ids=None) -> dict[str, Array]:
        """The projections with `key_conv`."""
        if not self.key_conv:
            return heads
        keys = short_convolution.of_keys(heads[self._keys], params["key_conv"], segment_ids)
        return heads | {self._keys: keys}

    def _bias(self, params, length):
        """The bias of a whole sequence, `[1, N, T, T]`; None without `position_bias`."""
        position = jnp.arange(length)[None]
        return None if self.position_bias is None else self._bias_at(params, position, position)

    def _bias_at(self, params, query, key) -> Float[Array, "B N T S"]:
        """The bias of queries and keys at these positions."""
        table = params.get("position_bias")
        return position_bias(self.position_bias, table, self.n_heads, query, key, self.causal)

    def _with_next_value(self, params, qkv: QKV, segment_ids: Ids | None) -> QKV:
        """Each position's value with the next one of its segment in it, if it has one."""
        if not self.next_value:
            return qkv
        current, following = value_factors(params, qkv.v.dtype)
        after = jnp.pad(qkv.v[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))
        if segment_ids is not None:
            ends = segment_begins(segment_ids)[:, 1:]
            ends = jnp.pad(ends, ((0, 0), (0, 1)), constant_values=True)
            after = jnp.where(ends[..., None, None], 0, after)  # padding may be NaN
        return qkv._replace(v=current * qkv.v + following * after)

    def _project_all(self, params, x: Float[Array, "B T D"] | Unnormed) -> dict[str, Array]:
        """All projections, by the weights of training or those from `for_decoding`."""
        is_merged = isinstance(params, Mapping) and "w_in" in params
        project = self._project_merged if is_merged else self._project_heads
        return project(params, x, self.projections())

    def _to_qkv(self, params, heads: dict[str, Array], position=None) -> QKV:
        """The projections as the algorithm reads them: normalised, and rotated by their positions.

        Extra projections of low rank are multiplied with their second matrix.
        """
        # In one order in every process, so that programs are found in the compilation cache.
        extra = [name for name in heads if name not in ("q", "k", "v", ATTENTION_GATE)]
        for name in extra:
            if (up := params.get(f"up_{name}")) is not None:
                low = heads[name][:, :, 0]
                heads = heads | {name: jnp.einsum("btr,nrh->btnh", low, up.astype(low.dtype))}
        heads = self._normed(params, heads)
        if self.use_rotary:
            rotated = (name for name, to in self.projections().items() if to.role)
            how = self.rotary_grid, self.rotary
            heads = heads | {name: rotary(heads[name], position, *how) for name in rotated}
        extra_projections = {name: heads[name] for name in extra}
        return QKV(heads["q"], heads.get("k"), heads["v"], extra_projections or None)

    def apply(
        self,
        params,
        x: Float[Array, "B T D"],
        mask: Ids | Tokens | None = None,
        rng: PRNGKeyArray | None = None,
        run: remat.Run = remat.direct,
    ) -> Float[Array, "B T D"]:
        return self.apply_by(params, x, None, mask, rng, run)[0]

    def apply_by(
        self,
        params,
        x: Float[Array, "B T D"],
        plan: Any = None,
        mask: Ids | Tokens | None = None,
        rng: PRNGKeyArray | None = None,
        run: remat.Run = remat.direct,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` by the plan of another layer, or its own where that is None; and the plan."""
        tokens = tokens_of(mask)
        check_floats("x", x, "batch", "length", "features")
        check_mask("mask", mask, "x", x)
        qkv, gate = self.project(params, x, tokens.positions, tokens.segment_ids)
        plan = self.plan(params, qkv, mask, rng) if plan is None else plan
        out = self.attend(params, qkv, plan, mask, rng, run)
        return self.combine(params, out, gate, rng), plan

    # A part of a sequence, from the state of the parts before it.

    def first_state(self, batch: int, dtype: Any) -> Any:
        """The state before the first position of `batch` rows, in layers that compute in `dtype`.

        Raises:
          Unsupported: the layer is not causal, has `key_conv` or angles by the length of a text, or
            its algorithm carries no state.
        """
        if not self.causal:
            raise Unsupported("causal is False: only causal layers carry a state, set causal=True")
        if self.key_conv:
            raise Unsupported(f"key_conv is {self.key_conv}: it carries no state, leave it out")
        if self.rotary.scaling == "longrope":
            raise Unsupported(
                "rotary_scaling is 'longrope', by which angles depend on what follows: take another"
            )
        return self.op.first_state(batch, self._dims, jnp.dtype(dtype))

    def apply_from(
        self,
        params,
        x: Float[Array, "B T D"],
        state: Any,
        mask: Ids | Tokens | None = None,
        rng: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`apply` to a part of a sequence, and the state after it; see `AttentionOp.apply_from`.

        A mask of `Tokens` has the positions for rotations, which begin at 0 otherwise.
        """
        tokens = tokens_of(mask)
        check_floats("x", x, "batch", "length", "features")
        check_mask("mask", mask, "x", x)
        heads = self._project_all(params, x)
        qkv = self._to_qkv(params, heads, tokens.positions)
        out, state = self._heads_from(params, qkv, state, int32_ids(tokens.segment_ids))
        return self.combine(params, out, heads.get(ATTENTION_GATE), rng), state

    def _heads_from(self, params, qkv: QKV, state, segment_ids):
        if (n := devices.n_sequence_shards()) > 1:
            raise SettingError(
                f"mesh has context={n} and a state is carried from one part of a sequence to the "
                "next: use context=1"
            )

        def attend(qkv, state, segment_ids, params):
            options = dict(segment_ids=segment_ids, extra_projections=qkv.extra_projections)
            return self.op.apply_from(params, *qkv.arrays, state, **options)

        return devices.by_rows(attend, (qkv, state, segment_ids), (params["op"],))

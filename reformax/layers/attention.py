"""Self-attention: rotary positions, convolved keys, shifted values, decoding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import SettingError, Size, Unsupported
from reformax.layers import context, remat
from reformax.layers.matrices import Unnormed
from reformax.layers.multi_head import (
    ATTENTION_GATE,
    PLAN,
    QKV,
    ConvSize,
    fold_in,
    gated,
)
from reformax.layers.planned_attention import PlannedAttention
from reformax.layers.relative import N_BUCKETS, PositionBias, position_bias
from reformax.ops.decoding.cache import take_rows
from reformax.ops.masking.masks import int32_ids, tokens_of
from reformax.ops.numerics.rotary import RotaryAngles, rotary
from reformax.ops.recurrence import short_convolution


class AttentionCache(NamedTuple):
    """The cache of a layer."""

    op: Any  # the algorithm's
    last_keys: Float[Array, "B W-1 G H"] | None  # before the convolution, with `key_conv`
    last_value: Float[Array, "B 1 N V"] | None  # without the next one in it, with `next_value`


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(PlannedAttention):
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
      key_conv: W; keys are `k_t + silu(sum_j w_j k_{t-j})` over the last W positions of their
        segment, with weights `key_conv [G, H, W]` that begin at 0. Algorithms that choose keys then
        also choose by what a key follows (Xiao et al. 2025, arXiv 2511.11571, for MoBA). The
        convolution comes before `qk_norm` and rotation. With an algorithm that makes keys of
        queries, the queries are convolved. None: there is none.
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
    ) -> QKV:
        """Queries, keys and values of all heads, rotated by their positions if `use_rotary`.

        Plans are made of rotated vectors, because hashes look for large logits, which are products
        of rotated ones. Only `key_conv` reads the segments.
        """
        heads = self._convolved(params, self._project_all(params, x), segment_ids)
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
        """The bias of a whole sequence, `[1, N, T, T]`; None without `position_bias`."""
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

    def _project_all(self, params, x: Float[Array, "B T D"] | Unnormed) -> dict[str, Array]:
        """All projections, by the weights of training or those from `for_decoding`."""
        is_merged = "w_in" in params
        project = self._project_merged if is_merged else self._project_heads
        return project(params, x, self.projections())

    def _rotate(self, params, heads: dict[str, Array], position=None) -> QKV:
        """The projections as the algorithm reads them: normalised, and rotated by their positions.

        Extra projections of low rank are multiplied with their second matrix.
        """
        extra = heads.keys() - {"q", "k", "v", ATTENTION_GATE}
        for name in extra:
            if (up := params.get(f"up_{name}")) is not None:
                low = heads[name][:, :, 0]
                heads |= {name: jnp.einsum("btr,nrh->btnh", low, up.astype(low.dtype))}
        heads = self._normed(params, heads)
        if self.use_rotary:
            rotated = (name for name, to in self.projections().items() if to.rotated)
            how = self.rotary_grid, self.rotary
            heads = heads | {name: rotary(heads[name], position, *how) for name in rotated}
        extra_projections = {name: heads[name] for name in extra}
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
        qkv = self._rotate(params, self._project_all(params, x), tokens.positions)
        out, state = self._heads_from(params, qkv.of_op, state, int32_ids(tokens.segment_ids))
        return self.combine(params, out, qkv.gate, rng), state

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

    # Decoding: `prefill` reads a prompt, `step` one more position of each row.

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `step`: one product for all heads and projections, in `dtype`.

        `w_in [D, N * H + G * (H + V)]`, or `N * (H + V)` with shared queries and keys, and after
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
        heads = self._project_all(params, x)
        index, positions = jnp.arange(x.shape[1])[None], None
        if self.rotary.scaling == "longrope":  # padding makes no row a long one
            positions = jnp.minimum(index, lengths[:, None] - 1)
        unshifted = self._rotate(params, self._convolved(params, heads), positions)
        qkv = self._with_next_value(params, unshifted)
        # Padding on the right is in the future of every token: only a plan has to know of it.
        tokens = index < lengths[:, None]
        if plan is None:
            plan = self.plan(params, qkv, tokens, rng, length=capacity)

        def fill(qkv, plan, lengths, params, rng):
            return self._init_cache(params, qkv, plan, lengths, capacity, rng)

        weights = params["op"], fold_in(rng, PLAN)
        of_op = context.to_cache(fill, self.op, (qkv.of_op, plan, lengths), weights)
        last_keys = last_value = None
        if self.key_conv:
            last_keys = short_convolution.last_of(heads[self._keys], self.key_conv, lengths)
        if self.next_value:
            last = jnp.take_along_axis(unshifted.v, (lengths - 1)[:, None, None, None], axis=1)
            last_value = _of_channels(params, last.dtype)[0] * last
        cache = AttentionCache(of_op, last_keys, last_value)
        return self.attend(params, qkv, plan, rng=rng), cache, plan

    def _init_cache(self, params, qkv: QKV, plan, lengths, capacity: int, rng) -> Any:
        """The algorithm's cache of prompts, with its weights."""
        options = dict(plan=plan, lengths=lengths, capacity=capacity, rng=rng)
        options |= dict(extra_projections=qkv.extra_projections)
        return self.op.init_cache(params, *qkv.arrays, **options)

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

        `capacity` and `rng` are those of `prefill`. On a mesh with `context` each device has its
        part of the positions.

        Raises:
          ValueError: the layer is not causal, or not built for evaluation, or its cache grows with
            the text and is not divided on such a mesh.
          NotImplementedError: the algorithm has no step.
        """
        self._check_decodes()
        x = jnp.zeros((batch, 1, params["w_o"].shape[-1]), dtype)
        heads = self._project_all(params, x)
        qkv = jax.tree.map(jnp.zeros_like, self._rotate(params, heads).of_op)
        if self.op.divides_cache:  # each device has as many positions
            capacity += -capacity % devices.n_sequence_shards()

        no_tokens, rng, plan = jnp.zeros(batch, jnp.int32), fold_in(rng, PLAN), None
        if not self.op.reuses:
            both = self.op.of_value_heads(*qkv.arrays)
            masks = dict(segment_ids=no_tokens[:, None], causal=True, train=False)
            plan = self.op.plan(params["op"], *both, rng=rng, length=capacity, **masks)
        of_op = self._init_cache(params["op"], qkv, plan, no_tokens, capacity, rng)
        last_keys = None
        if self.key_conv:
            shape = batch, self.key_conv - 1, *heads[self._keys].shape[2:]
            last_keys = jnp.zeros(shape, dtype)
        last_value = qkv.v if self.next_value else None
        return AttentionCache(context.placed_cache(self.op, of_op), last_keys, last_value)

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

        Outputs after `lengths` are arbitrary.

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
        heads, index = self._project_all(params, x), jnp.arange(x.shape[1])[None]
        last_keys = last_value = value = None
        if self.key_conv:
            before = cache.last_keys
            joined = jnp.concatenate([before, heads[self._keys]], axis=1)
            keys = short_convolution.of_keys(joined, params["key_conv"])[:, before.shape[1] :]
            n_last = lengths + before.shape[1]
            last_keys = short_convolution.last_of(joined, self.key_conv, n_last)
            heads = heads | {self._keys: keys}
        at = position[:, None] + jnp.minimum(index, lengths[:, None] - 1)
        unshifted = self._rotate(params, heads, at)
        qkv = self._with_next_value(params, unshifted)
        if self.next_value:
            current, following = _of_channels(params, qkv.v.dtype)
            is_read = (lengths > 0)[:, None, None, None]
            value = cache.last_value + jnp.where(is_read, following * unshifted.v[:, :1], 0)
            last_index = jnp.maximum(lengths - 1, 0)[:, None, None, None]
            newest = current * jnp.take_along_axis(unshifted.v, last_index, axis=1)
            last_value = jnp.where(is_read, newest, cache.last_value)

        def read(qkv, value, lengths, position, chosen, cache, params, shard):
            options = dict(position=position, lengths=lengths, shard=shard)
            options |= dict(extra_projections=qkv.extra_projections)
            options |= dict(chosen=None if isinstance(chosen, tuple) else chosen)
            if self.position_bias is not None:
                options["bias"] = lambda q, k: self._bias_at(params, q, k)
            cache = self._with_value(cache, value, position, shard)
            return self.op.read_on(params["op"], *qkv.arrays, cache, **options)

        rows = qkv.of_op, value, lengths, position, chosen
        weights = {name: params[name] for name in ("op", "position_bias") if name in params}
        out, of_op, choices = context.from_cache(read, self.op, rows, cache.op, weights)
        cache = AttentionCache(of_op, last_keys, last_value)
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
        heads = self._project_all(params, x)
        last_keys = last_value = value = None
        if self.key_conv:
            of_keys = heads[self._keys], cache.last_keys, params["key_conv"]
            key, last_keys = short_convolution.of_next_key(*of_keys)
            heads = heads | {self._keys: key}
        qkv = self._rotate(params, heads, position[:, None])
        if self.next_value:
            # So far the newest key's value was without the next one.
            current, following = _of_channels(params, qkv.v.dtype)
            value, last_value = cache.last_value + following * qkv.v, current * qkv.v
            qkv = qkv._replace(v=last_value)

        def step(qkv, value, position, origins, chosen, cache, params, shard):
            options = dict(position=position, origins=origins, chosen=chosen, shard=shard)
            options |= dict(extra_projections=qkv.extra_projections)
            if self.position_bias is not None:
                now = position[:, None]
                options["bias"] = lambda held: self._bias_at(params, now, held)[:, :, 0]
            cache = self._with_value(cache, value, position, shard)
            return *self.op.step(params["op"], *qkv.arrays, cache, **options), ()

        rows = qkv.of_op, value, position, origins if self._beams_share_caches else None, chosen
        read = {name: params[name] for name in ("op", "position_bias") if name in params}
        out, of_op, _ = context.from_cache(step, self.op, rows, cache.op, read)
        cache = AttentionCache(of_op, last_keys, last_value)
        return self._output(params, gated(out, qkv.gate), added), cache

    def newest_choice(self, cache: AttentionCache) -> Any:
        """The keys that the newest query of each row chose, from a step's cache."""
        return self.op.newest_choice(cache.op)

    @property
    def _beams_share_caches(self) -> bool:
        """Whether a beam's past may be in other beams' caches.

        With `next_value`, the last value of that past has this beam's next one in it. With
        `key_conv`, a beam keeps the last keys of its own past.
        """
        return self.op.decoding == "beams" and not self.next_value and not self.key_conv

    def reorder_cache(self, cache: Any, rows: Int[Array, " R"]) -> Any:
        """The cache of beams that continue `rows`; unchanged where caches are shared."""
        return cache if self._beams_share_caches else take_rows(cache, rows)


def _of_channels(params, dtype) -> Float[Array, "2 1 1 N V"]:
    """The factors of a value and of the next one."""
    return params["next_value"][:, None, None].astype(dtype)

"""The functions of an op that attends to a window and to summaries of blocks in one softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import Count, SettingError
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims, Projection
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.obstacles import MAX_GROUP, KernelObstacles, group_obstacles
from reformax.ops.calls.options import options
from reformax.ops.compressing.attention import Blocks, Summaries, in_kernels, to_window
from reformax.ops.compressing.summaries import (
    Series,
    init_weights,
    newest_summary,
    summarize_shards,
)
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring, seen_in_ring
from reformax.ops.masking.masks import ids_or_ones, tokens_before
from reformax.ops.masking.visibility import Visibility
from reformax.ops.numerics.query_chunks import in_blocks, positions
from reformax.ops.numerics.rotary import RotaryAngles, RotaryBase, rotary
from reformax.ops.sharding import queries as sharding
from reformax.ops.softmax.learned_sinks import LearnedSinks
from reformax.ops.softmax.online import Softmax


@options
class Compressed(LearnedSinks):
    """The functions and options of such an op: a second base class of the op.

    The op has the options `block_size` and `window` too. It defines `_attend_to_summaries` and, in
    decoding, `_choose_newest`. `hca.hca` documents the options.

    Weights: with `learned_sinks` `sinks [N]`; for keys `k` and for values `v`, or for both `kv`,
    `positions [L, S, F]` and `norm [F]`. Further projections: of the same names
    `summary_k`, `gate_k`, ..., `[G S, F]`.
    """

    learned_sinks: bool = True
    share_kv: bool = False
    rotary_features: Count = 0
    rotary_base: RotaryBase = 10_000.0
    impl: str = "auto"

    causality = "only"
    reads_ahead = False  # a piece is read by steps, a whole prompt by kernels
    _grouped = True
    _impls = KERNELS
    n_series = 1  # S: the blocks that a summary is over

    def _check(self) -> None:
        if self.window < self.block_size:
            raise SettingError(
                f"window is {self.window} and block_size {self.block_size}: expected a window of "
                "at least block_size, because a block that is not complete has no summary"
            )
        if self.rotary_features % 2:
            raise SettingError(
                f"rotary_features is {self.rotary_features}: expected an even number, of pairs"
            )
        if not self.rotates and self.rotary_base != RotaryAngles().base:
            raise SettingError(
                f"rotary_base is {self.rotary_base} and rotary_features 0: set the features that "
                "are to be rotated"
            )

    @property
    def rotates(self) -> bool:
        return self.rotary_features > 0

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The names of the summaries: keys and values, or one that is both."""
        return ("kv",) if self.share_kv else ("k", "v")

    def extra_projections(self, dims: Dims) -> dict[str, Projection]:
        sizes = {"k": dims.d_qk, "v": dims.d_v, "kv": dims.d_qk}
        if self.share_kv and dims.d_v != dims.d_qk:
            raise SettingError(
                f"share_kv is True, and keys have {dims.d_qk} features and values {dims.d_v}: "
                "expected as many"
            )
        n, found = dims.key_heads * self.n_series, {}
        for kind in self._kinds:
            role = "key" if kind == "k" else None  # a layer rotates each at its own position
            found[f"summary_{kind}"] = Projection(n, sizes[kind], role)
            found[f"gate_{kind}"] = Projection(n, sizes[kind])
        return found

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> dict[str, Any]:
        sizes = {"k": dims.d_qk, "v": dims.d_v, "kv": dims.d_qk}
        weights = (init_weights(self.block_size, self.n_series, sizes[x]) for x in self._kinds)
        return dict(super()._init(rng, dims)) | dict(zip(self._kinds, weights, strict=True))

    # Rotations

    def _rotated(self, x: Float[Array, "B T N H"], position: Int[Array, "#B T"]) -> Array:
        """The first features of vectors at their positions; at negative ones, the inverse."""
        n = self.rotary_features
        if not n:
            return x
        if n > x.shape[-1]:
            raise SettingError(
                f"rotary_features is {n}: expected at most the size of a head, {x.shape[-1]}"
            )
        rotated = rotary(x[..., :n], position, angles=RotaryAngles(base=self.rotary_base))
        return jnp.concatenate([rotated, x[..., n:]], axis=-1)

    def _rotated_qkv(self, q, k, v, position):
        """The vectors of positions; values too where they are keys."""
        q, k = self._rotated(q, position), self._rotated(k, position)
        return q, k, self._rotated(v, position) if self.share_kv else v

    def _output(self, out: Float[Array, "B T N V"], position) -> Array:
        """The output, of values that are rotated by their distance from the query alone."""
        return self._rotated(out, -position) if self.share_kv else out

    # Attention

    def _summaries(self, call: Call, params, ids: Int[Array, "B T"]) -> Summaries:
        """The summaries of a row, of which `ids` are all segments."""
        sizes = ids, self.block_size, call.shard
        found = [
            summarize_shards(params[kind], self._series(call, kind), *sizes) for kind in self._kinds
        ]
        last = in_blocks(ids, self.block_size)[:, :, -1]
        first = positions(found[0].shape[1]) * self.block_size
        keys = self._rotated(found[0], first)
        return Summaries(keys, keys if self.share_kv else found[1], last)

    def _series(self, call: Call, kind: str) -> Series:
        gates = call.extra_projections
        return Series(gates[f"summary_{kind}"], gates[f"gate_{kind}"])

    def _obstacles(
        self, call: Call, q: Array, k: Array, v: Array | None, plan: Any = None, **above: Any
    ) -> KernelObstacles:
        """The obstacles of the kernels, and others by name; `plan` is None before there is one."""
        group = q.shape[2] // k.shape[2]
        above["heads_of_a_key_head"] = group if group > MAX_GROUP else None
        above["divided_by"] = sharding.axis_of(call.shard)
        return group_obstacles(q, k, v, call.logits, **above)

    def _apply(self, call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        position = sharding.query_positions(call.shard, q.shape[1])
        call = self._with_sinks(call, params, q.shape[2])
        ids = sharding.of_all(call.shard, ids_or_ones(call.segment_ids, q))
        summaries = self._summaries(call, params, ids)
        rotated = self._rotated_qkv(q, k, v, position)

        def by_kernels(interpret: bool) -> Float[Array, "B T N V"]:
            return self._in_kernels(call, params, *rotated, summaries, plan, q, k, interpret)

        def by_arrays() -> Float[Array, "B T N V"]:
            near = to_window(call, *rotated, self.window)
            return self._attend_to_summaries(call, params, rotated[0], summaries, near, plan, q, k)

        obstacles = self._obstacles(call, *rotated, plan)
        out = compute_by(self.impl, by_arrays, pallas=(obstacles, by_kernels))
        out = out.reshape(*q.shape[:3], v.shape[3])
        return self._output(out, position).astype(v.dtype)

    def _in_kernels(
        self, call: Call, params, q, k, v, summaries: Summaries, plan, plain_q, plain_k, interpret
    ) -> Float[Array, "B T N V"]:
        """Attention to window and summaries in kernels. `q`, `k`, `v` are rotated by the op."""
        sizes = self.window, Blocks(self.block_size)
        return in_kernels(call, interpret, q, k, v, summaries, *sizes)[0]

    def _attend_to_summaries(
        self, call: Call, params, q, summaries: Summaries, near: Softmax, plan, plain_q, plain_k
    ) -> Float[Array, "B T G M V"]:
        """The output of the softmax over the window's keys, `near`, and over summaries.

        `q` is rotated by the op, `plain_q` and `plain_k` are the layer's.
        """
        raise NotImplementedError

    # Decoding. C is the number of blocks in the capacity.

    def _init_cache(self, call, params, q, k, v, plan) -> CompressedCache:
        lengths, capacity = call.lengths, call.length
        ids = tokens_before(lengths, k.shape[1]).astype(jnp.int32)
        _, keys, values = self._rotated_qkv(q, k, v, positions(k.shape[1]))
        found = jax.tree.map(self._held(capacity), self._summaries(call, params, ids)[:2])
        n_last = min(self.n_series * self.block_size, capacity)
        return CompressedCache(
            fill_ring(keys, values, lengths, min(self.window, capacity)),
            {x: fill_ring(*self._series(call, x), lengths, n_last) for x in self._kinds},
            KeyValues(*(jnp.swapaxes(x, 1, 2) for x in found)),
            self._index_cache(call, params, k, ids),
        )

    def _held(self, capacity: int):
        """Fits `[B, C, ...]` of a prompt's blocks to the cache's."""
        n = max(capacity // self.block_size, 1)

        def fitted(x):
            x = x[:, :n]
            return jnp.pad(x, [(0, 0), (0, n - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

        return fitted

    def _index_cache(self, call: Call, params, k, ids) -> Any:
        """The part of the cache that `_choose_newest` reads."""
        return ()

    def _step(self, call, params, q, k, v, cache: CompressedCache):
        call, position = self._with_sinks(call, params, q.shape[2]), call.position
        at = position[:, None]
        heads, key, value = self._rotated_qkv(q, k, v, at)
        window = add_to_ring(cache.window, key, value, position)
        newest = {
            x: add_to_ring(ring, *self._series(call, x), position)
            for x, ring in cache.newest.items()
        }
        number = self._completed(position, cache.summaries.keys.shape[2])
        made = [
            newest_summary(params[x], newest[x], position, self.block_size) for x in self._kinds
        ]
        first = (position // self.block_size * self.block_size)[:, None]
        made[0] = self._rotated(made[0][:, None], first)[:, 0]
        row, new = jnp.arange(len(position)), KeyValues(made[0], made[-1])
        summaries = jax.tree.map(
            lambda x, y: x.at[row, :, number].set(y, mode="drop"), cache.summaries, new
        )
        far, seen, index = self._choose_newest(call, params, q, k, summaries, cache.index)
        near = seen_in_ring(Visibility(causal=True, window=self.window), window, position)
        mask = jnp.concatenate([near, seen], axis=1)[:, None]
        out = attend_to(call, heads, *window.joined(far), mask, self.impl)
        return self._output(out, at), CompressedCache(window, newest, summaries, index)

    def _completed(self, position: Int[Array, " B"], n_blocks: int) -> Int[Array, " B"]:
        """The block that ends at a position; `n_blocks`, which is out of bounds, if none does."""
        ends = (position + 1) % self.block_size == 0
        return jnp.where(ends, position // self.block_size, n_blocks)

    def _choose_newest(self, call: Call, params, q, k, summaries: KeyValues, index: Any):
        """The summaries that the newest query may see, which of them it sees, and the new index.

        `q` and `k` are the layer's, not rotated by the op.
        """
        raise NotImplementedError


class CompressedCache(NamedTuple):
    """The past of each row."""

    window: KeyValues  # the last keys and values
    newest: dict[str, KeyValues]  # the last series, of which the next summary is made
    summaries: KeyValues  # of all complete blocks
    index: Any  # what chooses among them

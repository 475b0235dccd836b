"""Long-Short attention: a sliding window, and a low-rank projection of the whole sequence.

Zhu et al. 2021 ("Long-Short Transformer: Efficient Transformers for Language and Vision"). A query
has one softmax over the keys of its window and over r mixtures of all keys, whose weights are
computed from the keys (sec. 3.2, "Dynamic Projections"):

    P = softmax(K W_P) over positions,    K- = P^T K,    V- = P^T V

Window and mixtures have separate layer norms of keys and of values, which bring both to one scale
("DualLN"). In causal attention the sequence is cut into chunks, each chunk has its r mixtures, and
a query sees those of the chunks before its own (sec. 3.3). Time is O(T (w + r)), and in causal
attention with chunks of l O(T (w + r T / l)). Memory is O(T): logits are computed for one
group of queries after the other.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.declared import Bounds, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, choose_impl
from reformax.ops.calls.obstacles import group_obstacles, kernel_obstacles
from reformax.ops.compressing.attention import Blocks, Summaries, in_kernels
from reformax.ops.decoding.cache import (
    KeyValues,
    add_to_ring,
    attend_to,
    fill_ring,
    positions_by_slot,
    seen_in_ring,
)
from reformax.ops.masking.masks import tokens_before
from reformax.ops.masking.visibility import EARLIER_BLOCKS, Side, Visibility, is_token
from reformax.ops.numerics.precision import accum_dtype, product
from reformax.ops.numerics.query_chunks import (
    cut_chunks,
    in_blocks,
    join_chunks,
    with_neighbours,
)
from reformax.ops.sharding.shard import of_heads
from reformax.ops.softmax import band
from reformax.ops.softmax.dropout import far_address
from reformax.ops.softmax.joint import FarKeys, KeysOfKind, attend_to_kinds
from reformax.ops.softmax.online import masked_softmax

Rank = Annotated[int, Bounds(0, 2**16)]
# Queries and keys whose logits are in memory at a time.
LOGITS_AT_A_TIME = 2**28


class Mixtures(NamedTuple):
    """Keys and values that summarise chunks, `rank` for each chunk."""

    keys: Float[Array, "B S N H"]
    values: Float[Array, "B S N V"]
    real: Bool[Array, "B S"]  # whether the chunk has a token


class LongShortCache(NamedTuple):
    """The last positions, and the mixtures of all chunks. An unfinished chunk's still change."""

    ring: KeyValues
    mixtures: KeyValues


@options
class long_short(AttentionOp):
    """Attention to a window and to learned summaries of the sequence.

    A summary mixes all tokens of its chunk, so packed sequences are refused. Without `rank` and
    `dual_norm` it is `local.local` with this window.

    Weights: `projection [N, H, r]`; with `dual_norm` the scale and the bias of four layer norms
    over a head's vector, `near_keys_norm`, `far_keys_norm [2, N, H]` and `near_values_norm`,
    `far_values_norm [2, N, V]`. The paper's code normalises the vectors of all heads as one vector.

    Args:
      window: a position sees those less than `window` positions away, before it and, if not causal,
        after it.
      rank: r, the summaries of the sequence, or in causal attention of each chunk. 0 is none.
      chunk_len: l, the positions of a chunk in causal attention. A position sees its own chunk
        only by its window, which should therefore be at least as long.
      dual_norm: whether keys and values are normalised, in the window and in summaries separately.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 256 or less, 128 if causal with a `rank`. `"auto"` takes it where it can.

    Raises:
      ValueError: a size out of range, an unknown `impl`.
      NotImplementedError: at the call, with several segments in a row, or when `"pallas"` is asked
        for what it cannot do.
    """

    window: Size = 128
    rank: Rank = 8
    chunk_len: Size = 128
    dual_norm: bool = True
    impl: str = "auto"

    packed = False
    shards = ("heads",)
    _takes_lengths = True
    _impls = KERNELS

    @property
    def local(self) -> bool:
        return self.rank == 0

    @property
    def endless_from(self) -> int | None:
        return None if self.rank else self.window

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> dict[str, Array]:
        n, h, v = dims.n_heads, dims.d_qk, dims.d_v
        params = {}
        if self.rank:
            params["projection"] = jax.random.normal(rng, (n, h, self.rank)) / math.sqrt(h)
        if self.dual_norm:
            one = jnp.array([1.0, 0.0])[:, None, None]
            for kind in ("near", "far") if self.rank else ("near",):
                params[f"{kind}_keys_norm"] = jnp.broadcast_to(one, (2, n, h))
                params[f"{kind}_values_norm"] = jnp.broadcast_to(one, (2, n, v))
        return params

    def _apply(self, call, params, q, k, v, plan):
        segment_ids, causal = call.segment_ids, call.causal
        params = {
            name: of_heads(x, call.shard, q.shape[2], axis=1 if name.endswith("_norm") else 0)
            for name, x in params.items()
        }

        obstacles = group_obstacles if call.causal and self.rank else kernel_obstacles
        impl = choose_impl(self.impl, pallas=obstacles(q, k, v, call.logits))
        if impl != "xla":
            return self._in_kernels(call, impl, params, q, k, v)

        @jax.checkpoint  # the gradient computes windows and summaries again instead of keeping them
        def attend(params, q, k, v) -> Float[Array, "B T N V"]:
            length, n_heads = q.shape[1:3]
            real = jnp.ones((1, length), bool) if segment_ids is None else is_token(segment_ids)
            far, chunk_len = None, min(self.chunk_len, length) if causal else length
            if self.rank:
                far = self._mixtures(params, k, v, real, chunk_len)

            @jax.checkpoint  # and the logits
            def attend_group(
                far: Mixtures | None, near: WindowedBlocks
            ) -> Float[Array, "B C L N V"]:
                kinds = [self._near(call, near)]
                if far is not None:
                    kinds.append(self._far(call, near, far, chunk_len if causal else None))
                heads = jnp.arange(n_heads)
                return attend_to_kinds(call, kinds, near.query_position, heads)

            near = self._window(params, q, k, v, real, causal)
            n_far = 0 if far is None else far.keys.shape[1]
            out = _by_groups(functools.partial(attend_group, far), near, n_far)
            return out.reshape(len(q), -1, n_heads, v.shape[3])[:, :length].astype(v.dtype)

        return attend(params, q, k, v)

    def _in_kernels(self, call: Call, impl: str, params, q, k, v) -> Array:
        """The window in kernels, and with it the summaries."""
        rule, near = Visibility(call.causal, self.window), self._normed(params, k, v)
        if not self.rank:
            return band.attend(call, (rule,), q, *near, None, impl)
        length, ids = q.shape[1], call.segment_ids
        chunk_len = min(self.chunk_len, length) if call.causal else length
        real = jnp.ones(q.shape[:2], bool) if ids is None else is_token(ids)
        far = jax.checkpoint(self._mixtures, static_argnums=4)(params, k, v, real, chunk_len)
        if not call.causal:
            return band.attend_and_far(call, rule, impl == INTERPRETED, q, *near, FarKeys(*far))
        call = call.but(segment_ids=None if ids is None else real.astype(jnp.int32))
        far = Summaries(far.keys, far.values, far.real.astype(jnp.int32))
        blocks = Blocks(chunk_len, self.rank, delay=1)  # seen by the chunks after
        return in_kernels(call, impl == INTERPRETED, q, *near, far, self.window, blocks)[0]

    def _normed(self, params, k, v) -> KeyValues:
        """The window's keys and values; with `dual_norm` of its norms, computed again backward."""
        if not self.dual_norm:
            return KeyValues(k, v)
        norm = jax.checkpoint(layer_norm)
        return KeyValues(norm(k, params["near_keys_norm"]), norm(v, params["near_values_norm"]))

    def _window(self, params, q, k, v, real, causal: bool) -> WindowedBlocks:
        length = q.shape[1]
        size = min(self.window, length)
        n_blocks = -(-length // size)

        def windows(x):  # [B, T, ...] -> [B, C, M, ...]
            return with_neighbours(in_blocks(x, size), 1, 0 if causal else 1)

        keys, values = self._normed(params, k, v)
        return WindowedBlocks(
            queries=in_blocks(q, size),
            query_position=jnp.arange(n_blocks * size).reshape(1, n_blocks, size),
            keys=windows(keys),
            values=windows(values),
            key_position=windows(jnp.arange(length)[None]),
            real=windows(jnp.broadcast_to(real, (len(real), length))),
        )

    def _near(self, call: Call, near: WindowedBlocks) -> KeysOfKind:
        """The keys of the window."""
        q = Side(near.query_position[..., None])
        k = Side(near.key_position[:, :, None], exists=near.real[:, :, None])
        mask = Visibility(call.causal, self.window).sees(q, k)
        return KeysOfKind(
            logits=call.logits.of("bclnh,bcmnh->bnclm", near.queries, near.keys),
            values=near.values,
            mask=mask[:, None],
            address=near.key_position,
        )

    def _far(
        self, call: Call, near: WindowedBlocks, far: Mixtures, chunk_len: int | None
    ) -> KeysOfKind:
        """The summaries of all chunks; with `chunk_len`, of those before the query's chunk."""
        number = jnp.arange(far.keys.shape[1])
        mask = far.real[:, None, None]
        if chunk_len is not None:
            query_chunk = near.query_position[..., None] // chunk_len
            chunk = number[None, None, None] // self.rank
            mask = mask & EARLIER_BLOCKS.sees(Side(query_chunk), Side(chunk))
        mask = jnp.broadcast_to(mask, (len(mask), *near.query_position.shape[1:], len(number)))
        return KeysOfKind(
            logits=call.logits.of("bclnh,bsnh->bncls", near.queries, far.keys),
            values=far.values[:, None],
            mask=mask[:, None],
            address=far_address(number[None, None]),
        )

    def _mixtures(self, params, k, v, real: Bool[Array, "#B T"], chunk_len: int) -> Mixtures:
        """The summaries of chunks of `chunk_len` positions, `K-` and `V-`.

        Their weights are computed from the keys, without a bias, which would cancel in the softmax.
        """
        real = jnp.broadcast_to(real, k.shape[:2])

        k, v, real = (in_blocks(x, chunk_len) for x in (k, v, real))
        dtype = accum_dtype(k.dtype, v.dtype)
        scores = product("bclnh,nhr->bcrnl", k, params["projection"], k.dtype)
        weights = masked_softmax(scores, real[:, :, None, None])
        each = []
        for x, name in ((k, "far_keys_norm"), (v, "far_values_norm")):
            y = jnp.einsum("bcrnl,bclnh->bcrnh", weights, x.astype(dtype))
            y = y.reshape(len(k), -1, *x.shape[3:])
            y = layer_norm(y, params[name]) if self.dual_norm else y
            each.append(y.astype(x.dtype))
        repeat = functools.partial(jnp.repeat, repeats=self.rank, axis=1)
        return Mixtures(*each, repeat(real.any(axis=2)))

    # Decoding.

    def _init_cache(self, call, params, q, k, v, plan) -> LongShortCache:
        lengths, capacity = call.lengths, call.length
        rank, chunk_len = self.rank, min(self.chunk_len, capacity)
        ring = fill_ring(k, v, lengths, min(max(self.window, rank and chunk_len), capacity))
        n_mixtures = -(-capacity // chunk_len) * rank
        empty = (
            jnp.zeros((*x.shape[:1], x.shape[2], n_mixtures, x.shape[3]), x.dtype) for x in (k, v)
        )
        far = KeyValues(*empty)
        if rank:
            real = tokens_before(lengths, k.shape[1])
            tokens = (jnp.where(real[..., None, None], x, 0) for x in (k, v))
            found = self._mixtures(params, *tokens, real, chunk_len)
            far = jax.tree.map(
                lambda x, y: x.at[:, :, : y.shape[1]].set(jnp.swapaxes(y, 1, 2)[:, :, :n_mixtures]),
                far,
                KeyValues(found.keys, found.values),
            )
        return LongShortCache(ring, far)

    def _step(self, call, params, q, k, v, cache: LongShortCache) -> tuple[Any, LongShortCache]:
        position = call.position
        ring = add_to_ring(cache.ring, k, v, position)
        mask = seen_in_ring(Visibility(causal=True, window=self.window), ring, position)
        far, of_positions = cache.mixtures, (jnp.swapaxes(x, 1, 2) for x in ring)
        near = self._normed(params, *of_positions)
        near = KeyValues(*(jnp.swapaxes(x, 1, 2) for x in near))
        if self.rank:
            far = self._with_newest(params, cache, ring, position)
            query_chunk = position[:, None] // self.chunk_len
            chunk = jnp.arange(far.keys.shape[2])[None] // self.rank
            seen = EARLIER_BLOCKS.sees(Side(query_chunk), Side(chunk))
            mask = jnp.concatenate([mask, seen], axis=1)
            near = near.joined(far)
        return attend_to(call, q, *near, mask[:, None], self.impl), LongShortCache(ring, far)

    def _with_newest(self, params, cache: LongShortCache, ring, position) -> KeyValues:
        """The mixtures with those of the newest chunk, of its tokens so far."""
        chunk = position // self.chunk_len
        n_slots = ring.keys.shape[2]
        real = positions_by_slot(position, n_slots) >= (chunk * self.chunk_len)[:, None]
        tokens = (jnp.swapaxes(x, 1, 2) for x in ring)
        found = self._mixtures(params, *tokens, real, n_slots)
        row = jnp.arange(position.shape[0])[:, None]
        slot = chunk[:, None] * self.rank + jnp.arange(self.rank)[None]
        # Indices with a slice between them come first in the result: [B, r, N, H].
        options = dict(mode="promise_in_bounds", unique_indices=True)
        new = KeyValues(found.keys, found.values)
        return jax.tree.map(lambda x, y: x.at[row, :, slot].set(y, **options), cache.mixtures, new)


# Queries lie in blocks: letters C blocks of L queries, M keys.


class WindowedBlocks(NamedTuple):
    """Blocks of queries, and the keys of each block and of its neighbours."""

    queries: Float[Array, "B C L N H"]
    query_position: Int[Array, "1 C L"]
    keys: Float[Array, "B C M N H"]
    values: Float[Array, "B C M N V"]
    key_position: Int[Array, "1 C M"]
    real: Bool[Array, "#B C M"]


def _by_groups(attend, near: WindowedBlocks, n_far: int) -> Float[Array, "B C L N V"]:
    """`attend` of one group of blocks after the other, where all logits take too much memory."""
    n_batch, n_blocks, size, n_heads, _ = near.queries.shape
    n_logits = n_batch * n_heads * size * (near.key_position.shape[2] + n_far)
    group = max(LOGITS_AT_A_TIME // n_logits, 1)
    if n_blocks <= group:
        return attend(near)
    groups = jax.tree.map(lambda x: cut_chunks(x, group), near)
    return join_chunks(jax.lax.map(attend, groups), n_blocks)


def layer_norm(x: Float[Array, "*d N H"], weights: Float[Array, "2 N H"]) -> Float[Array, "*d N H"]:
    """Layer norm of a head's vector, with its scale and bias; in float32, to the dtype of `x`."""
    y = x.astype(accum_dtype(x.dtype))
    # Numbers above 1 are divided by the largest, so that no square overflows.
    size = jax.lax.stop_gradient(jnp.maximum(jnp.abs(y).max(axis=-1, keepdims=True), 1))
    y = y / size
    y = y - y.mean(axis=-1, keepdims=True)
    variance = jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5 / size / size
    y = y * jax.lax.rsqrt(jnp.maximum(variance, 1e-20))  # 1e-5 over the largest squares is 0
    scale, bias = weights.astype(y.dtype).reshape(2, *(1,) * (x.ndim - 2), *weights.shape[1:])
    return (y * scale + bias).astype(x.dtype)

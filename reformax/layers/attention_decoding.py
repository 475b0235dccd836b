"""Decoding with self-attention: a prompt, several more positions of each row, or one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.layers import context_parallel
from reformax.layers.matrices import Unnormed
from reformax.layers.multi_head import ATTENTION_GATE, PLAN, gated
from reformax.layers.planned_attention import read_by_op
from reformax.layers.rngs import fold_in
from reformax.ops.calls.heads import QKV
from reformax.ops.decoding.cache import take_rows
from reformax.ops.masking.masks import tokens_before
from reformax.ops.recurrence import short_convolution


class AttentionCache(NamedTuple):
    """The cache of a layer."""

    op: Any  # the algorithm's
    last_keys: Float[Array, "B W-1 G H"] | None  # before the convolution, with `key_conv`
    last_value: Float[Array, "B 1 N V"] | None  # without the next one in it, with `next_value`


class AttentionDecoding:
    """A mixin of `Attention`: what its layer computes from a cache of earlier positions.

    `prefill` reads a prompt and makes the cache, `first_cache` makes one before the first position;
    `read_on` reads several more positions of each row and `step` one.
    """

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
        # Padding on the right is in the future of every token: only a plan has to know of it.
        tokens = tokens_before(lengths, x.shape[1])
        convolved = self._convolved(params, heads)
        unshifted = self._to_qkv(params, convolved, self._before_padding(tokens))
        qkv = self._with_next_value(params, unshifted, tokens)
        if plan is None:
            plan = self.plan(params, qkv, tokens, rng, length=capacity)

        def fill(qkv, plan, lengths, params, rng):
            return self._init_cache(params, qkv, plan, lengths, capacity, rng)

        weights = params["op"], fold_in(rng, PLAN)
        of_op = context_parallel.to_cache(fill, self.op, (qkv, plan, lengths), weights)
        last_keys = last_value = None
        if self.key_conv:
            last_keys = short_convolution.last_of(heads[self._keys], self.key_conv, lengths)
        if self.next_value:
            last = jnp.take_along_axis(unshifted.v, (lengths - 1)[:, None, None, None], axis=1)
            last_value = value_factors(params, last.dtype)[0] * last
        cache = AttentionCache(of_op, last_keys, last_value)
        out = self.attend(params, qkv, plan, rng=rng)
        return self.combine(params, out, heads.get(ATTENTION_GATE), rng), cache, plan

    def _init_cache(self, params, qkv: QKV, plan, lengths, capacity: int, rng) -> Any:
        """The algorithm's cache of prompts, with its weights."""
        options = dict(plan=plan, lengths=lengths, capacity=capacity, rng=rng)
        options |= dict(extra_projections=qkv.extra_projections)
        return self.op.init_cache(params, *qkv.arrays, **options)

    def _check_decodes(self) -> None:
        """Raises `Unsupported` or `ValueError` for a layer that cannot decode."""
        self.op.check_decodes()
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
        qkv = jax.tree.map(jnp.zeros_like, self._to_qkv(params, heads))
        if self.op.divides_cache:  # each device has as many positions
            capacity += -capacity % devices.n_sequence_shards()

        no_tokens, rng, plan = jnp.zeros(batch, jnp.int32), fold_in(rng, PLAN), None
        if not self.op.reuses:
            masks = dict(segment_ids=no_tokens[:, None], causal=True, train=False)
            plan = self.op.plan(params["op"], *qkv.arrays, rng=rng, length=capacity, **masks)
        of_op = self._init_cache(params["op"], qkv, plan, no_tokens, capacity, rng)
        last_keys = None
        if self.key_conv:
            shape = batch, self.key_conv - 1, *heads[self._keys].shape[2:]
            last_keys = jnp.zeros(shape, dtype)
        last_value = qkv.v if self.next_value else None
        return AttentionCache(context_parallel.placed_cache(self.op, of_op), last_keys, last_value)

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
        unshifted = self._to_qkv(params, heads, at)
        qkv = self._with_next_value(params, unshifted, tokens_before(lengths, x.shape[1]))
        if self.next_value:
            current, following = value_factors(params, qkv.v.dtype)
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

        rows = qkv, value, lengths, position, chosen
        given = self.op, rows, cache.op, read_by_op(params)
        out, of_op, choices = context_parallel.from_cache(read, *given)
        cache = AttentionCache(of_op, last_keys, last_value)
        return self.combine(params, out, heads.get(ATTENTION_GATE)), cache, choices

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
        qkv = self._to_qkv(params, heads, position[:, None])
        if self.next_value:
            # So far the newest key's value was without the next one.
            current, following = value_factors(params, qkv.v.dtype)
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

        rows = qkv, value, position, origins if self._beams_share_caches else None, chosen
        out, of_op, _ = context_parallel.from_cache(
            step, self.op, rows, cache.op, read_by_op(params)
        )
        cache = AttentionCache(of_op, last_keys, last_value)
        out = gated(out, heads.get(ATTENTION_GATE))
        return self._output(params, out, added), cache

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


def value_factors(params, dtype) -> Float[Array, "2 1 1 N V"]:
    """The factors of a value and of the next one."""
    return params["next_value"][:, None, None].astype(dtype)

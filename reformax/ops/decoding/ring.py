"""Decoding of ops that see every position from some first one on, by a ring of keys and values."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.ops.calls.call import Call
from reformax.ops.decoding.cache import (
    KeyValues,
    add_and_attend,
    add_to_ring,
    attend_among,
    fill_ring,
    positions_by_slot,
    replace_value,
)
from reformax.ops.decoding.reading import add_all_to_ring, attend_to_ring, put_all
from reformax.ops.masking.visibility import Side, Visibility


class RingDecoding:
    """Decoding of an op that attends to all positions from `_first_key` on: a second base class.

    With `shared_qk` keys are the length-normalised queries, hidden from themselves.

    `step` also takes `origins [B, K, C]` for rows that are K beams of each of B searches: the index
    of the beam that holds the key and the value of each position of a beam. A search that drops
    some beams and continues others twice then copies no cache. These steps run in array operations,
    whatever `impl` is.
    """

    decoding = "beams"
    divides_cache = True

    def _n_slots(self, capacity: int) -> int:
        """The number of positions that the ring holds."""
        return capacity

    def _first_key(self, position: Int[Array, "B 1"]) -> Int[Array, "B 1"] | int:
        """The first position that a query at `position` sees."""
        return 0

    def _init_cache(self, call: Call, params, q, k, v, plan) -> KeyValues:
        return fill_ring(self.keys_of(q, k), v, call.lengths, self._n_slots(call.length))

    def _read_on(self, call: Call, params, q, k, v, cache: KeyValues):
        axis = None if call.shard is None else call.shard.axis
        new = self.keys_of(q, k), v
        cache = add_all_to_ring(cache, *new, call.position, call.lengths, axis)
        alone = v if self.shared_qk and self.attend_self_if_alone else None
        return attend_to_ring(call, q, cache, self.shared_qk, alone, axis), cache, ()

    def _step(self, call: Call, params, q, k, v, cache: KeyValues):
        if call.shard is not None:
            of_step, one = call.bias, jnp.ones_like(call.position)
            bias = of_step and (lambda queries, keys: of_step(keys)[:, :, None])
            call = call.but(lengths=one, bias=bias)
            return self._read_on(call, params, q, k, v, cache)[:2]
        position, origins = call.position, call.origins
        # These have no kernel for one query.
        impl = "auto" if self.impl in ("cudnn", "mosaic") else self.impl
        new = KeyValues(self.keys_of(q, k), v)
        newest = position[:, None]
        in_ring = positions_by_slot(position, cache.keys.shape[2])
        held = in_ring >= jnp.maximum(self._first_key(newest), 0)
        rule = Visibility(exclude_self=self.shared_qk)  # a ring holds no later position
        mask = rule.sees(Side(newest), Side(in_ring, exists=held))
        alone = v if self.shared_qk and self.attend_self_if_alone else None
        added = None if call.bias is None else call.bias(in_ring)
        if origins is None:
            options = dict(alone=alone, bias=added)
            return add_and_attend(call, q, cache, new, mask[:, None], impl, **options)
        cache = add_to_ring(cache, *new, position)
        rows = jnp.maximum(in_ring, 0).reshape(*origins.shape[:2], -1)
        origins = jnp.take_along_axis(origins, rows, axis=2)
        return attend_among(call, q, *cache, mask, origins, alone, added), cache

    def _replace_value(self, cache: KeyValues, v, position, axis=None) -> KeyValues:
        if axis is None:
            return replace_value(cache, v, position)
        one = jnp.ones_like(position)
        return cache._replace(values=put_all(cache.values, v, position, one, axis))

"""Performer: softmax attention by positive random features, in linear time.

Choromanski et al. 2020 ("Rethinking Attention with Performers", FAVOR+). With features phi whose
products are on average `exp(q . k / sqrt(H))` (lemma 1), attention is a quotient of sums over keys
that are the same for all queries (sec. 2.2, eq. 4), or prefix sums if it is causal:

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)

The error falls as one over the square root of the number of features, and grows with the logits
(lemma 2). Causal sums are a linear recurrence, whose state in decoding has a constant size.

Features of keys are relative to the largest exponent so far. The paper's code takes the maximum
over all keys, by which a query would depend on later keys. The recurrence's decay is the maximum's
growth.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax import devices
from reformax.buffers import Buffer, updated
from reformax.declared import Bounds, Seed, SettingError, Size, Unsupported, Width
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, choose_impl
from reformax.ops.calls.obstacles import NARROW_HEAD, kernel_obstacles
from reformax.ops.decoding.cache import SharedByBatch
from reformax.ops.masking.contiguous import contiguous_segments, restore_order, tokens_first
from reformax.ops.masking.masks import segment_begins, tokens_before
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.precision import accum_dtype, product
from reformax.ops.numerics.query_chunks import cut_chunks, join_chunks
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.means import KEPT, mean, quotient, with_ones
from reformax.ops.recurrence.random_features import (
    PositiveFeatures,
    orthogonal_directions,
    positive_features,
)
from reformax.ops.recurrence.recurrence import advance, bidirectional, recurrence_from

# Below it derivatives of quotients overflow float32.
Epsilon = Annotated[float, Bounds(1e-12, 1)]

# Features of a vector that a program of the kernels holds.
MAX_IN_TILE = 512
# Features in memory at a time where all keys are seen: 1 GiB of float32.
FEATURES_AT_A_TIME = 2**28


class PerformerCache(NamedTuple):
    """The sums over all keys so far, `sums e^scale`, and the plan. Sums of zeros are of no key."""

    sums: Float[Array, "B N M V1"]
    scale: Float[Array, "B N 1"]
    plan: SharedByBatch

    @property
    def largest(self) -> Float[Array, "B N 1"]:
        """The scale, minus infinity where no key was seen: a key's own feature is above 0."""
        seen = jnp.any(self.sums[..., -1] > 0, axis=-1, keepdims=True)
        return jnp.where(seen, self.scale, -jnp.inf)


@options
class performer(AttentionOp):
    """Attention whose weights are products of positive orthogonal random features.

    Args:
      n_features: M, the number of random features.
      seed: seed of the features, which are then the same at every call. None draws them from the
        call's rng, so every training step has new ones.
      epsilon: added to the features of a vector, in units of its largest one. Where a query's
        features are orthogonal to its keys', the sum of its weights is about epsilon, and its
        gradient is rounded to 1e-7 / epsilon.
      chunk_len: as in `linear.linear`.
      impl: as in `linear.linear`. In bfloat16 kernels also compute the features.
      redraw: the number of training steps after which new features are drawn, from the seed and
        the number of the draw (sec. 4.3). Evaluation and decoding take the last ones of training. A
        weight `steps`, a `Buffer`, counts the steps. None keeps the first features.

    Raises:
      ValueError: a setting out of range, an unknown `impl`, `redraw` with `seed=None`.
      NotImplementedError: at the call, with dropout, because no attention weights are made; when a
        kernel is asked for what it cannot do; with a state, where features may be drawn anew.
    """

    n_features: Width = 256
    seed: Seed | None = 0
    epsilon: Epsilon = 1e-4
    chunk_len: Size = 64
    impl: str = "auto"
    redraw: Size | None = None

    dropout = False
    shards = ("heads",)
    _hides_padding = True
    _takes_lengths = True
    _impls = KERNELS

    @property
    def plan_needs(self) -> str:
        if self.seed is None:
            return "rng"
        return "nothing" if self.redraw is None else "inputs"

    def _check(self) -> None:
        if self.redraw is not None and self.seed is None:
            raise SettingError(
                f"redraw is {self.redraw} and seed None, which draws at every call: set seed, or "
                "leave redraw out"
            )

    def _init(self, rng, dims) -> Any:
        return () if self.redraw is None else {"steps": Buffer(jnp.zeros(()))}

    def directions(self, plan: Any, size: int) -> Float[Array, "M H"]:
        """The random directions of all heads; a constant array where no call redraws them."""
        if self.seed is None or self.redraw is not None:
            rng = jax.random.wrap_key_data(plan, impl="threefry2x32")
            return orthogonal_directions(rng, self.n_features, size)
        with devices.without_mesh(), jax.ensure_compile_time_eval():
            rng = jax.random.key(self.seed, impl="threefry2x32")
            return np.asarray(orthogonal_directions(rng, self.n_features, size))

    def _features(self, plan: Any, *vectors: Float[Array, "B T N H"]) -> list[PositiveFeatures]:
        """The features of queries or keys in array operations."""
        directions = self.directions(plan, vectors[0].shape[-1])
        return [features_in_arrays(x, directions, self.epsilon) for x in vectors]

    def _plan(self, call, params, q, k) -> Int[Array, 2] | tuple[()]:
        """The key data of the features: two words, from which `directions` draws them."""
        if self.plan_needs == "nothing":
            return ()
        if self.redraw is None:
            return jax.random.bits(call.rng, (2,), jnp.uint32)
        steps = jnp.round(params["steps"].value).astype(jnp.int32)  # completed steps
        last = steps if call.train else jnp.maximum(steps - 1, 0)
        seed = jax.random.key(self.seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(seed, last // self.redraw))

    def _apply(self, call, params, q, k, v, plan):
        epsilon, ids, real = self.epsilon, call.segment_ids, None
        if self.redraw is not None:
            # The output must depend on the weight: adding 0 times it to epsilon does that.
            steps = updated(params["steps"], params["steps"].value + 1)
            epsilon = epsilon + 0 * steps
        if ids is not None and call.lengths is None:
            q, k, v = (tokens_only(x, ids) for x in (q, k, v))
        if ids is not None and call.one_segment:
            # No token of a causal call sees the padding that follows its row.
            hidden = call.causal and call.lengths is not None
            real, ids = None if hidden else is_token(ids), None
        features = self._features_of(plan, epsilon, q, k, v)
        if call.causal or ids is not None:
            out = self._by_recurrence(features, q, k, v, ids, real, call.causal)
        else:
            out = of_all(features, q, k, v, real)
        return out if call.segment_ids is None else tokens_only(out, call.segment_ids)

    def _features_of(self, plan, epsilon, q, k, v) -> FeatureFunctions:
        """The features of a call, by kernels where these compute it."""
        directions, impl = self.directions(plan, q.shape[-1]), "xla"
        if q.dtype == jnp.bfloat16 and self.n_features <= MAX_IN_TILE:
            obstacles = kernel_obstacles(q, k, v, most=NARROW_HEAD)
            impl = choose_impl(self.impl, pallas=obstacles)
        dtype = accum_dtype(q.dtype, k.dtype, v.dtype) if impl == "xla" else q.dtype
        return FeatureFunctions(directions, epsilon, dtype, impl)

    def _by_recurrence(self, features: FeatureFunctions, q, k, v, ids, real, causal) -> Array:
        """Means over earlier keys, or over all keys of packed segments."""
        # The gradient computes the features again instead of keeping them.
        keep = jax.checkpoint_policies.save_only_these_names(KEPT)

        @functools.partial(jax.checkpoint, policy=keep)
        def attend(q, k, v) -> Float[Array, "B T N V"]:
            options = dict(segment_ids=ids, chunk_len=self.chunk_len)
            scale = features.scale(k)
            if real is not None:  # padding raises nothing: it has the least scale of a token
                is_real = real[..., None, None]
                least = jnp.min(scale, axis=1, keepdims=True, where=is_real, initial=jnp.inf)
                least = jnp.where(jnp.isfinite(least), least, 0)
                scale = jnp.where(is_real, scale, least)
            largest, rise = running_max(scale, ids)
            if causal:
                relative_to = largest if real is None else jnp.where(is_real, largest, jnp.inf)
                queries, keys = features(q), features(k, relative_to)
                if features.impl == "xla":
                    # Features of bfloat16 vectors are rounded to bfloat16.
                    dtype = jnp.bfloat16 if v.dtype == jnp.bfloat16 else keys.dtype
                    x = (y.astype(dtype) for y in (queries, keys, v))
                    return mean(*x, -rise, impl=self.impl, **options).astype(v.dtype)
                return mean(queries, keys, v, -rise, impl=self.impl, **options)
            rest, _ = running_max(scale, ids, reverse=True)
            queries, keys = features(q), features(k, jnp.maximum(largest, rest))
            values = with_ones(v.astype(accum_dtype(v.dtype)))
            return quotient(bidirectional(queries, keys, values, **options)).astype(v.dtype)

        return attend(q, k, v)

    # The state before and after a part of a sequence; decoding goes on from it too.

    @property
    def carries_state(self) -> bool:
        return self.plan_needs == "nothing"

    def first_state(self, batch, dims, dtype=jnp.float32) -> PerformerCache:
        if not self.carries_state:
            raise Unsupported(
                f"op is {self}: it carries no state from features that may be drawn anew; set "
                "seed=0 and redraw=None"
            )
        dtype, sizes = accum_dtype(jnp.dtype(dtype)), (batch, dims.n_heads)
        sums = jnp.zeros((*sizes, self.n_features, dims.d_v + 1), dtype)
        return PerformerCache(sums, jnp.zeros((*sizes, 1), dtype), SharedByBatch(()))

    def _apply_from(self, call, params, q, k, v, state: PerformerCache):
        dtype, shape = v.dtype, q.shape[:2]
        order, (q, k, v), ids, lengths = tokens_first((q, k, v), call.segment_ids, shape)
        real = tokens_before(lengths, shape[1])[..., None, None]
        queries, keys = self._features((), q, k)
        scale = jnp.where(real, keys.scale, -jnp.inf)  # padding writes and raises nothing
        largest, rise = running_max_from(lax.stop_gradient(scale), state.largest, ids)
        growth = jnp.where(real, keys.scale - largest, 0)
        x = queries.x, jnp.where(real, keys.x * jnp.exp(growth), 0)
        x = tuple(y.astype(jnp.bfloat16 if dtype == jnp.bfloat16 else y.dtype) for y in x)
        values = jnp.where(real, with_ones(v.astype(x[0].dtype)), 0)
        inputs = RecurrenceInputs(*x, values, -rise, None)
        options = dict(segment_ids=ids, chunk_len=self.chunk_len, impl=self.impl)
        sums, after = recurrence_from(inputs, state.sums, **options)
        out = restore_order(quotient(sums).astype(dtype), order)
        return out, PerformerCache(after, largest[:, -1], state.plan)

    # Decoding.

    def _init_cache(self, call, params, q, k, v, plan) -> PerformerCache:
        real = tokens_before(call.lengths, k.shape[1])[..., None, None]
        (keys,) = self._features(plan, jnp.where(real, k, 0))
        values = with_ones(jnp.where(real, v, 0).astype(accum_dtype(v.dtype)))
        scale = jnp.where(real, keys.scale, -jnp.inf)
        largest = scale.max(axis=1)
        # A row without a token has a maximum of minus infinity.
        weights = keys.x * jnp.exp(scale - jnp.where(jnp.isfinite(largest), largest, 0)[:, None])
        return PerformerCache(
            jnp.einsum("btnm,btnv->bnmv", weights, values), largest, SharedByBatch(plan)
        )

    def _step(self, call, params, q, k, v, cache: PerformerCache) -> tuple[Any, PerformerCache]:
        queries, keys = self._features(cache.plan.value, q, k)
        before = cache.largest
        largest = jnp.maximum(before, keys.scale[:, 0])
        new = keys.x * jnp.exp(keys.scale - largest[:, None])
        decay = (before - largest)[:, None]
        sums, state = advance(
            cache.sums, queries.x, new, with_ones(v.astype(accum_dtype(v.dtype))), decay
        )
        return quotient(sums).astype(v.dtype), PerformerCache(state, largest, cache.plan)


class FeatureFunctions(NamedTuple):
    """The features of queries and keys: their products estimate `exp(q . k / sqrt(H))`.

    Kernels round features to the dtype of the vectors.
    """

    directions: Float[Array, "M H"]
    epsilon: Any
    dtype: Any  # of features
    impl: str  # of `choose_impl`

    def scale(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N 1"]:
        """The largest exponent of each vector, without a gradient."""
        if self.impl == "xla":
            found = features_in_arrays(x, self.directions, self.epsilon)
            return lax.stop_gradient(found.scale)
        from reformax.ops.kernels.triton import random_features as kernel

        return kernel.scales(x, self.directions, self.impl == INTERPRETED)[..., None]

    def __call__(
        self, x: Float[Array, "B T N H"], relative_to: Float[Array, "B T N 1"] | None = None
    ) -> Float[Array, "B T N M"]:
        """`exp(exponent - relative_to)`; None: relative to `scale`, whose factor has no gradient.

        Features relative to infinity are zeros.
        """
        if self.impl == "xla":
            found = features_in_arrays(x, self.directions, self.epsilon)
            return found.x if relative_to is None else found.x * jnp.exp(found.scale - relative_to)
        from reformax.ops.kernels.triton import random_features as kernel

        relative_to = None if relative_to is None else relative_to[..., 0]
        arrays = kernel.FeatureArrays(x, self.directions, self.epsilon, relative_to)
        return kernel.features(self.impl == INTERPRETED, arrays)


def features_in_arrays(x: Float[Array, "B T N H"], directions, epsilon) -> PositiveFeatures:
    """Features in array operations."""
    x = x.astype(accum_dtype(x.dtype)) * x.shape[-1] ** -0.25
    return positive_features(x, directions, epsilon)


def of_all(
    features: FeatureFunctions,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    real: Bool[Array, "B T"] | None,
) -> Float[Array, "B T N V"]:
    """Means over all keys that are `real`, all of them for None.

    The features of some positions at a time are in memory, in both passes.
    """
    n_batch, length, n_heads, _ = q.shape
    most = FEATURES_AT_A_TIME // (n_batch * n_heads * len(features.directions))
    n_chunks = -(-length // max(most, 1))
    size = -(-length // n_chunks)
    if real is None and length % size:
        real = jnp.ones((n_batch, length), bool)
    q, k, v, real = (None if x is None else cut_chunks(x, size) for x in (q, k, v, real))

    def largest(chunk) -> Float[Array, "B 1 N 1"]:
        k, real = chunk
        where = True if real is None else real[..., None, None]
        least = jnp.finfo(features.dtype).min / 2
        return jnp.max(features.scale(k), axis=1, keepdims=True, where=where, initial=least)

    @jax.checkpoint
    def sums(chunk) -> Float[Array, "B N M V1"]:
        k, v, real = chunk
        relative_to = jnp.broadcast_to(scale, (*k.shape[:3], 1))
        if real is not None:
            relative_to = jnp.where(real[..., None, None], relative_to, jnp.inf)
        values = with_ones(v.astype(features.dtype))
        return product("bsnm,bsnv->bnmv", features(k, relative_to), values, features.dtype)

    @jax.checkpoint
    def means(q) -> Float[Array, "B L N V"]:
        out = product("btnm,bnmv->btnv", features(q), total, features.dtype)
        return quotient(out).astype(v.dtype)

    scale = lax.map(largest, (k, real)).max(axis=0)
    first, rest = (jax.tree.map(lambda x, i=i: x[i], (k, v, real)) for i in (0, slice(1, None)))
    total, _ = lax.scan(lambda total, chunk: (total + sums(chunk), None), sums(first), rest)
    return join_chunks(lax.map(means, q), length)


def running_max(
    x: Float[Array, "B T N 1"], segment_ids: Int[Array, "B T"] | None, reverse: bool = False
) -> tuple[Float[Array, "B T N 1"], Float[Array, "B T N 1"]]:
    """The running maximum of each segment, and its growth at each position.

    `reverse` runs from the last position. The growth at a segment's first position is 0.
    """
    if segment_ids is None:  # one scan, which compiles in a sixth of the time
        largest = lax.cummax(x, axis=1, reverse=reverse)
        begin, end = (largest[:, 1:], x[:, -1:]) if reverse else (x[:, :1], largest[:, :-1])
        return largest, largest - jnp.concatenate([begin, end], axis=1)
    order, x, ids = contiguous_segments(x, segment_ids)
    x, ids = (jnp.flip(y, axis=1) if reverse else y for y in (x, ids))
    begins = jnp.broadcast_to(segment_begins(ids)[..., None, None], x.shape)

    def larger(a, b):
        (a_begins, a), (b_begins, b) = a, b
        return a_begins | b_begins, jnp.where(b_begins, b, jnp.maximum(a, b))

    _, largest = lax.associative_scan(larger, (begins, x), axis=1)
    before = jnp.where(begins, x, jnp.pad(largest[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))))
    results = (jnp.flip(y, axis=1) if reverse else y for y in (largest, largest - before))
    largest, rise = (restore_order(y, order) for y in results)
    return largest, rise


def running_max_from(
    x: Float[Array, "B T N 1"],
    initial: Float[Array, "B N 1"],
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T N 1"], Float[Array, "B T N 1"]]:
    """`running_max` whose first segment goes on from `initial`.

    The growth from minus infinity, that of no key, is 0.
    """
    ids = None if segment_ids is None else jnp.pad(segment_ids, ((0, 0), (1, 0)), mode="edge")
    x = jnp.concatenate([lax.stop_gradient(initial)[:, None].astype(x.dtype), x], axis=1)
    largest, _ = running_max(x, ids)
    before, largest = largest[:, :-1], largest[:, 1:]
    if segment_ids is not None:
        begins = segment_begins(ids)[:, 1:, None, None]
        before = jnp.where(begins, -jnp.inf, before)
    grows = jnp.isfinite(before)
    return largest, jnp.where(grows, largest - jnp.where(grows, before, 0), 0)

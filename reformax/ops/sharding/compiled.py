"""A call of an op from outside of layers: planned, applied on each device, compiled once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.declared import Unsupported
from reformax.ops.masking.contiguous import are_contiguous
from reformax.ops.masking.given_masks import with_mask
from reformax.ops.masking.masks import tokens_before
from reformax.ops.sharding.placement import CallArrays, placement_of
from reformax.ops.sharding.shard import Shard


@functools.lru_cache(maxsize=256)
def compiled(op: Any) -> Callable[..., Float[Array, "B T N V"]]:
    """The op's call, compiled once for each choice of settings and shapes.

    Inside another compiled function it becomes a part of that.
    """
    settings = ("causal", "dropout", "train")
    return jax.jit(functools.partial(_attend, op), static_argnames=settings)


@functools.lru_cache(maxsize=256)
def compiled_from(op: Any) -> Callable[..., tuple[Float[Array, "B T N V"], Any]]:
    """`op.apply_from`, compiled once for each choice of shapes.

    Rows whose segments are not contiguous are NaN: ids that are traced cannot be refused.
    """

    def attend(state, q, k, v, segment_ids, extra_projections, params):
        masks = dict(segment_ids=segment_ids, extra_projections=extra_projections)
        found = op.apply_from(params, q, k, v, state, **masks)
        if segment_ids is None:
            return found
        right = are_contiguous(segment_ids)

        def or_nan(x):
            return jnp.where(jnp.expand_dims(right, range(1, x.ndim)), x, jnp.nan)

        return jax.tree.map(or_nan, found)

    return jax.jit(attend)


@contextlib.contextmanager
def explained(arrays: Any, given: str) -> Iterator[None]:
    """Raises `Unsupported` where JAX cannot type a call with a state on a mesh of explicit axes.

    Which calls these are only JAX knows: most whose arrays are split alike pass.
    """
    try:
        yield
    except (ValueError, NotImplementedError):
        raise
    except Exception as error:  # JAX's own type of error is private
        if any(jax.typeof(x).sharding.mesh.explicit_axes for x in jax.tree.leaves(arrays)):
            raise Unsupported(
                f"{given} on a mesh with explicit axes, over which JAX cannot split a state so: "
                "split all arrays by rows alone, with jax.sharding.reshard, or make the axes "
                "jax.sharding.AxisType.Auto"
            ) from error
        raise


def _attend(op: Any, x: CallArrays, **settings: Any) -> Float[Array, "B T N V"]:
    on_devices = placement_of(op, x)
    attend = functools.partial(_plan_and_apply, op, **settings)
    return attend(x) if on_devices is None else on_devices.on_each(attend, x)


def _plan_and_apply(
    op: Any,
    x: CallArrays,
    shard: Shard | None = None,
    *,
    causal: bool,
    dropout: float,
    train: bool,
) -> Float[Array, "B T N V"]:
    params, q, k, v, segment_ids, lengths, mask, bias, extra_projections, global_tokens, rng = x
    if lengths is not None:  # within the row, because kernels read as many positions
        lengths = jnp.clip(lengths.astype(jnp.int32), 0, q.shape[1])
        segment_ids = tokens_before(lengths, q.shape[1])
    segment_ids, bias = with_mask(op, mask, q, q if k is None else k, segment_ids, bias, causal)
    masks = dict(segment_ids=segment_ids, causal=causal, rng=rng, shard=shard)
    planned = op.of_value_heads(q, k, v)
    plan = op.plan(params, *planned, **masks, train=train, global_tokens=global_tokens)
    others = dict(bias=bias, extra_projections=extra_projections, lengths=lengths)
    return op.apply(params, q, k, v, plan=plan, dropout=dropout, **masks, **others)

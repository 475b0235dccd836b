"""An op as a function of arrays: checked, planned, applied on each device, compiled once.

Layers call `plan` and `apply` instead. Letters as in `reformax.ops.base`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.declared import Unsupported
from reformax.ops.calls.arguments import check_arguments, checked_params, checked_state
from reformax.ops.masking.contiguous import are_contiguous
from reformax.ops.masking.given_masks import checked_mask, with_mask
from reformax.ops.masking.masks import SegmentIds, int32_ids, int32_or_bool_ids, tokens_before
from reformax.ops.sharding.placement import CallArrays, placement_of
from reformax.ops.sharding.shard import Shard


class ArrayCalls:
    """The `__call__` of an `ops.base.AttentionOp`: its `plan` and its `apply` in one."""

    @final
    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S G H"] | None,
        v: Float[Array, "B S G V"],
        *,
        causal: bool = False,
        segment_ids: SegmentIds | None = None,
        lengths: Int[Array, " B"] | None = None,
        mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"] | None = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        dropout: float = 0.0,
        dropout_rate: float = 0.0,
        rng: PRNGKeyArray | None = None,
        train: bool = True,
        params: Any = (),
        extra_projections: dict[str, Float[Array, "B T _ _"]] | None = None,
        global_tokens: Int[Array, "B T"] | None = None,
        initial_state: Any = None,
        return_state: bool = False,
    ) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Any]:
        """Plans and applies in one call.

        Outside of `jax.jit` it compiles once for an op, its settings and the shapes.

        Args:
          q: queries; a shared-QK algorithm makes its keys of them.
          k: keys; None for a shared-QK algorithm. Each of G heads serves N / G heads of queries.
          v: values, of as many heads as the keys.
          causal: whether a position sees only itself and what came before it.
          segment_ids: ids of the tokens, or a pair of them for queries and for keys. Booleans say
            that each row is one segment besides its padding, number 1 where the other array of a
            pair has ids.
          lengths: the number of tokens of each row, which padding follows: the cheapest way
            to say so. Arrays must be finite at padding. Queries and keys are of one length. Within
            `jax.jit` a number out of range is clipped.
          mask: True where a key may be seen. `[B, S]` is of keys, for every algorithm: it becomes
            segment ids, by which the hidden keys are padding. An algorithm that takes two
            sequences, by `cross`, hides no query by it; boolean `segment_ids` make rows of padding
            zeros. `[B, N, T, S]` is of pairs, for an algorithm with `bias`; an axis of size 1 is
            broadcast.
          bias: added to the logits after they are scaled; an axis of size 1 is broadcast.
          dropout: the rate at which attention weights are dropped.
          dropout_rate: refused above 0. flax's modules pass it, and an rng by another name;
            `reformax.flax.attention_fn` takes both.
          rng: the source of hashes and of dropout.
          train: False selects the algorithm's settings for evaluation; `dropout` is as given.
          params: the algorithm's own weights, from its `init`.
          extra_projections: the further projections that the algorithm reads, by name.
          global_tokens: above 0 for global tokens, for an algorithm with `global_tokens`.
          initial_state: of the positions before, which it goes on from in the segment of a row's
            first token; None: no positions were before. Cut packed rows inside a segment, or make
            the state of rows that begin anew zeros. With a state, rows whose segments are not
            contiguous are refused, and NaN where ids are traced by `jax.jit`.
          return_state: whether to return the last position's state too.

        Returns:
          The attended values in the dtype of `v`; zeros for a row that sees nothing; and the state.

        Raises:
          ValueError: an argument's shape does not fit, or an rng is needed and missing.
          NotImplementedError: the algorithm cannot do what is asked.
        """
        if dropout_rate > 0.0:
            raise NotImplementedError(
                f"dropout_rate is {dropout_rate}: give dropout={dropout_rate} with an rng; in "
                "modules of flax use reformax.flax.attention_fn"
            )
        call = dict(causal=causal, dropout=dropout)
        checked = dict(
            segment_ids=segment_ids,
            bias=bias,
            rng=rng,
            extra_projections=extra_projections,
            global_tokens=global_tokens,
        )
        flags = dict(train=train, return_state=return_state)
        check_arguments(self, *(q, k, v), **call, **flags, **checked, lengths=lengths, mask=mask)
        params = checked_params(self, params, q, v)
        if initial_state is not None or return_state:
            state = checked_state(self, initial_state, causal, mask, segment_ids, q, v)
            if lengths is not None:
                segment_ids = tokens_before(lengths, q.shape[1])
            arrays = state, q, k, v, int32_ids(segment_ids), extra_projections, params
            with _explained(arrays, "return_state=True" if return_state else "initial_state"):
                found = _compiled_from(self)(*arrays)
            return found if return_state else found[0]
        if mask is not None:
            mask = checked_mask(self, mask, q, q if k is None else k, v)
        segment_ids = int32_or_bool_ids(segment_ids)
        masks = segment_ids, lengths, mask
        x = CallArrays(params, q, k, v, *masks, bias, extra_projections, global_tokens, rng)
        return _compiled(self)(x, **call, train=train)


@functools.lru_cache(maxsize=256)
def _compiled(op: Any) -> Callable[..., Float[Array, "B T N V"]]:
    """The op's call, compiled once for each choice of settings and shapes.

    Inside another compiled function it becomes a part of that.
    """
    settings = ("causal", "dropout", "train")
    return jax.jit(functools.partial(_attend, op), static_argnames=settings)


@functools.lru_cache(maxsize=256)
def _compiled_from(op: Any) -> Callable[..., tuple[Float[Array, "B T N V"], Any]]:
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
def _explained(arrays: Any, given: str) -> Iterator[None]:
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
    op: Any, x: CallArrays, shard: Shard | None = None, *, causal: bool, dropout: float, train: bool
) -> Float[Array, "B T N V"]:
    params, q, k, v, segment_ids, lengths, mask, bias, extra_projections, global_tokens, rng = x
    if lengths is not None:  # within the row, because kernels read as many positions
        lengths = jnp.clip(lengths.astype(jnp.int32), 0, q.shape[1])
        segment_ids = tokens_before(lengths, q.shape[1])
    segment_ids, bias = with_mask(op, mask, q, q if k is None else k, segment_ids, bias, causal)
    masks = dict(segment_ids=segment_ids, causal=causal, rng=rng, shard=shard)
    plan = op.plan(params, q, k, v, **masks, train=train, global_tokens=global_tokens)
    others = dict(bias=bias, extra_projections=extra_projections, lengths=lengths)
    return op.apply(params, q, k, v, plan=plan, dropout=dropout, **masks, **others)

"""What the modules of linen and of nnx share: sizes, rotations, attention, steps of decoding.

A module has `op`, `causal`, `use_rotary`, `rotary_base`, `dropout_rate`, `max_decode_length`, and
`draw(rate)`, the rng of hashes and dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from reformax.buffers import Buffer
from reformax.declared import (
    Called,
    Rate,
    SettingError,
    Size,
    Unsupported,
    check,
    checked,
    shown,
)
from reformax.flax import nan_unless_mask, seen
from reformax.ops.base import AttentionOp, Dims
from reformax.ops.calls.arguments import check_heads
from reformax.ops.calls.dims import Projection
from reformax.ops.calls.heads import QKV
from reformax.ops.masking.masks import SegmentIds, tokens_before
from reformax.ops.numerics.arrays import check_floats, check_lengths
from reformax.ops.numerics.rotary import (
    RotaryAngles,
    RotaryBase,
    checked_positions,
    rotary,
)

# What flax calls the projections.
_NAMES = {"q": "query", "k": "key", "v": "value"}

Op = Annotated[AttentionOp, Called("an AttentionOp, such as lsh.lsh()")]


class DecodingCache(NamedTuple):
    """The cache of a module."""

    op: Any  # the algorithm's
    position: Int[Array, " B"]  # of the next token of each row


def projection_options(use_bias: bool, dtype: Any, param_dtype: Any) -> dict[str, Any]:
    """The options of flax's layers that project, which are a module's own.

    Raises:
      SettingError: a dtype that is none of floats.
    """
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
        if given is not None and not _is_floating(given):
            raise SettingError(f"{name} is {shown(given)}: expected one of floats, as jnp.bfloat16")
    return dict(use_bias=use_bias, dtype=dtype, param_dtype=param_dtype)


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # no dtype at all
        return False


@checked
def sizes_of(
    op: Op,
    *,
    num_heads: Size,
    in_features: Size,
    qkv_features: Size | None,
    out_features: Size | None,
    num_kv_heads: Size | None,
    num_qk_heads: Size | None,
    use_rotary: bool,
    rotary_base: RotaryBase,
    dropout_rate: Rate,
    length: Size = 1,
) -> Dims:
    """The sizes of a module, whose arguments these are.

    Raises:
      SettingError: an argument of another type, out of range, or without an effect.
      ValueError: features that the heads do not divide, heads that fewer ones do not divide.
      NotImplementedError: fewer heads, for an algorithm that makes its keys of the queries.
    """
    features = in_features if qkv_features is None else qkv_features
    if features % num_heads:
        raise ValueError(f"qkv_features is {features}: expected a multiple of {num_heads} heads")
    heads = dict(num_kv_heads=num_kv_heads, num_qk_heads=num_qk_heads)
    check_heads(op, num_heads=num_heads, **heads)
    size = features // num_heads
    if use_rotary and op.rotates:
        raise SettingError(
            f"use_rotary is True and {op} rotates queries and keys by itself: leave one out"
        )
    if use_rotary and size < 2:
        raise SettingError(
            f"use_rotary is True and qkv_features {features}, {size} a head: expected 2 at least, "
            "for a pair of features"
        )
    if not use_rotary and rotary_base != RotaryAngles().base:
        raise SettingError(
            f"rotary_base is {rotary_base} and use_rotary is False: set use_rotary=True"
        )
    return Dims(num_heads, size, size, length, num_kv_heads, num_qk_heads)


def projections_of(op: AttentionOp, sizes: Dims) -> dict[str, Projection]:
    """The projections, by the names of their weights."""
    return {_NAMES.get(name, name): to for name, to in op.projections(sizes).items()}


def shapes_of_weights(op: AttentionOp, sizes: Dims) -> Any:
    """The shapes of the algorithm's own weights.

    Raises:
      NotImplementedError: weights that a step of training updates without a gradient.
    """
    shapes = jax.eval_shape(lambda: op.init(jax.random.key(0), sizes))
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, Buffer))
    if any(isinstance(x, Buffer) for x in leaves):
        raise NotImplementedError(
            f"op is {op}: its buffers are updated by reformax's own step of training, not by an "
            "optimizer; use reformax.layers.Attention"
        )
    return shapes


def _heads_of(
    module: Any,
    projected: dict[str, Array],
    projections: dict[str, Projection],
    positions: Int[Array, "#B T"],
) -> QKV:
    """The projections by what the algorithm calls them, rotated by positions with `use_rotary`."""
    if module.use_rotary:
        angles = RotaryAngles(base=module.rotary_base)
        projected = {
            name: rotary(x, positions, angles=angles) if projections[name].role else x
            for name, x in projected.items()
        }
    names = _NAMES.values()
    extra_projections = {name: x for name, x in projected.items() if name not in names}
    q, k, v = (projected.get(name) for name in names)
    return QKV(q, k, v, extra_projections or None)


def source_of(
    op: AttentionOp,
    inputs_q: Float[Array, "B T D"],
    inputs_kv: Float[Array, "B S E"] | None,
    use_rotary: bool,
    decodes: bool,
    features: Sequence[int | str] = ("features", "features"),
) -> Float[Array, "B S E"]:
    """The array that keys and values are projected from.

    `features` are the sizes of both inputs, where they are known.

    Raises:
      ValueError: what is no array of floats, another batch or another size.
      NotImplementedError: the algorithm cannot attend to it, or positions are rotated.
    """
    check_floats("inputs_q", inputs_q, "batch", "length", features[0])
    if inputs_kv is None:
        if features[0] != features[1]:
            raise ValueError(f"inputs_kv is None: expected [batch, length, {features[1]}]")
        return inputs_q
    check_floats("inputs_kv", inputs_kv, len(inputs_q), "length", features[1])
    if not op.cross:
        raise NotImplementedError(
            f"inputs_kv is given, but {op.name} attends within one sequence: use an op whose "
            "cross is True"
        )
    if use_rotary or decodes:
        name = "use_rotary is True" if use_rotary else "the module decodes"
        raise NotImplementedError(f"inputs_kv is given and {name}: give inputs_q alone")
    return inputs_kv


def attend(
    module: Any,
    params: Any,
    projected: dict[str, Array],
    projections: dict[str, Projection],
    *,
    mask: ArrayLike | None,
    segment_ids: SegmentIds | None,
    positions: Int[Array, "B T"] | None,
    lengths: Any,
    deterministic: bool,
) -> Float[Array, "B T N V"]:
    """Attention of a module that does not decode; arguments are those of its call.

    Raises:
      ValueError: positions of another shape.
      Unsupported: an argument that only decoding or rotations would read, or a rate of dropout
        for an algorithm without weights.
    """
    if positions is not None and not module.use_rotary:
        raise Unsupported("positions is given and use_rotary is False: set use_rotary=True")
    if lengths is not None:
        raise Unsupported("lengths is given, but the module does not decode: give a mask of keys")
    if positions is None:
        positions = jnp.arange(projected["query"].shape[1])[None]
    positions = checked_positions("positions", positions, projected["query"])
    *qkv, extra_projections = _heads_of(module, projected, projections, positions)
    rate = 0.0 if deterministic else module.dropout_rate
    if rate > 0.0 and not module.op.dropout:
        raise Unsupported(
            f"dropout_rate is {rate}, but {module.op.name} makes no attention weights to drop: set "
            "it to 0"
        )
    attended = module.op(
        *qkv,
        causal=module.causal,
        segment_ids=segment_ids,
        mask=seen(mask),
        dropout=rate,
        rng=module.draw(rate),
        train=not deterministic,
        params=params,
        extra_projections=extra_projections,
    )
    return nan_unless_mask(attended, mask)


def decode(
    module: Any,
    params: Any,
    projected: dict[str, Array],
    projections: dict[str, Projection],
    cache: DecodingCache | None,
    lengths: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B T N V"], DecodingCache]:
    """Attention of a prompt, where there is no cache, or of more tokens of each row.

    These are one, or several if the algorithm carries a state.

    Args:
      module: the module, with room for `max_decode_length` positions.
      params: the algorithm's weights.
      projected, projections: of the prompt or the tokens.
      cache: after the last call; None: there is none.
      lengths: the number of tokens of each row that are read; None: all.

    Raises:
      ValueError: a prompt without room for it, several tokens in a step, or wrong lengths. Where
        only a compiled program knows a number that is wrong, the row is NaN.
    """
    op, capacity, n_tokens = module.op, module.max_decode_length, projected["query"].shape[1]
    positions = jnp.arange(n_tokens)[None]
    positions = positions if cache is None else cache.position[:, None] + positions
    heads = _heads_of(module, projected, projections, positions)
    q, k, v, extra_projections = heads
    if cache is not None and op.carries_state and (n_tokens > 1 or lengths is not None):
        return _read_on(op, params, heads, cache, lengths, capacity)
    if cache is not None:
        if n_tokens != 1 or lengths is not None:
            raise ValueError(
                f"inputs_q has {n_tokens} tokens{'' if lengths is None else ' with lengths'}: "
                "expected one, [batch, 1, features], after the prompt"
            )
        options = dict(position=cache.position, extra_projections=extra_projections)
        out, of_op = op.step(params, q, k, v, cache.op, **options)
        position = cache.position + 1
        return _within(out, position, capacity), DecodingCache(of_op, position)
    if n_tokens > capacity:
        raise ValueError(
            f"inputs_q has {n_tokens} tokens: expected at most max_decode_length, {capacity}"
        )
    lengths = _checked_lengths(lengths, len(q), n_tokens)
    # Padding is in the future of every token: only a plan has to know of it.
    is_token = tokens_before(lengths, n_tokens).astype(jnp.int32)
    call, key = dict(extra_projections=extra_projections), module.draw(0.0)
    arrays, masks = (params, q, k, v), dict(causal=True, rng=key)
    plan = op.plan(*arrays, segment_ids=is_token, length=capacity, train=False, **masks)
    out = op.apply(*arrays, plan=plan, segment_ids=None, **masks, **call)
    out = jnp.where(_fits(lengths, n_tokens)[:, None, None, None], out, jnp.nan)
    call |= dict(plan=plan, lengths=lengths, capacity=capacity, rng=key)
    return out, DecodingCache(op.init_cache(*arrays, **call), lengths)


def _read_on(
    op: AttentionOp, params: Any, heads: QKV, cache: DecodingCache, lengths: Any, capacity: int
) -> tuple[Float[Array, "B T N V"], DecodingCache]:
    """Attention of several tokens that follow those of the cache."""
    *arrays, extra_projections = heads
    n_tokens = heads.q.shape[1]
    lengths = _checked_lengths(lengths, len(heads.q), n_tokens)
    is_token = tokens_before(lengths, n_tokens).astype(jnp.int32)
    call = dict(segment_ids=is_token, extra_projections=extra_projections)
    out, of_op = op.apply_from(params, *arrays, cache.op, **call)
    out = jnp.where(_fits(lengths, n_tokens)[:, None, None, None], out, jnp.nan)
    position = cache.position + lengths
    return _within(out, position, capacity), DecodingCache(of_op, position)


def _within(
    out: Float[Array, "B T N V"], n_read: Int[Array, " B"], capacity: int
) -> Float[Array, "B T N V"]:
    """`out` of rows with so many tokens; NaN of those above the capacity, where it is traced."""
    has_room = n_read <= capacity
    if not isinstance(has_room, jax.core.Tracer) and not np.all(has_room):
        raise ValueError(
            f"inputs_q is token {int(np.max(n_read))} of a row: expected at most "
            f"max_decode_length, {capacity}"
        )
    return jnp.where(has_room[:, None, None, None], out, jnp.nan)


def _fits(lengths: Int[Array, " B"], n_tokens: int) -> Bool[Array, " B"]:
    return (lengths >= 1) & (lengths <= n_tokens)


def _checked_lengths(lengths: Any, n_rows: int, n_tokens: int) -> Int[Array, " B"]:
    """The lengths of a prompt's rows, whose numbers are checked where they are known."""
    if lengths is None:
        return jnp.full(n_rows, n_tokens)
    lengths = jnp.asarray(lengths)
    check_lengths("lengths", lengths, n_rows, n_tokens, "the tokens of inputs_q", least=1)
    return lengths


def check_decodes(op: AttentionOp, causal: bool, max_decode_length: int) -> None:
    """Raises an error for a module that cannot decode."""
    check("max_decode_length", max_decode_length, Size)
    op.check_decodes()
    if not causal:
        raise SettingError(
            f"causal is False and max_decode_length {max_decode_length}: decoding needs causal=True"
        )


def refuse_in_decoding(given: dict[str, Any]) -> None:
    """Raises `Unsupported` for an argument that decoding does not read."""
    for name, value in given.items():
        if value is not None:
            raise Unsupported(f"{name} is given, but the module decodes: give lengths of prompts")

"""Checks the arguments of an op's call. An error is the argument, its value and the fix.

`op` is an `ops.base.AttentionOp`, which calls these functions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from reformax.declared import Rate, SettingError, Unsupported, check, shown
from reformax.ops.calls.dims import Dims
from reformax.ops.masking.contiguous import are_contiguous
from reformax.ops.masking.given_masks import shape_of_pairs
from reformax.ops.masking.masks import Ids, Tokens, int32_ids, segment_pair, tokens_of
from reformax.ops.masking.visibility import is_token, same_segment
from reformax.ops.numerics.arrays import (
    check_array,
    check_floats,
    check_ids,
    check_key,
    check_lengths,
)


def check_arguments(
    op,
    q,
    k,
    v,
    *,
    causal,
    segment_ids,
    dropout,
    rng,
    bias=None,
    extra_projections=None,
    global_tokens=None,
    train=True,
    return_state=False,
    lengths=None,
    mask=None,
) -> None:
    """Checks the arguments of a call before any tracing.

    Raises:
      ValueError: a shape or a value does not fit.
      Unsupported: the op cannot compute the call.
    """
    if rng is not None:
        check_key("rng", rng)
    for name, value in dict(causal=causal, train=train, return_state=return_state).items():
        check_flag(name, value)
    check("dropout", dropout, Rate)
    _check_shapes(op, q, k, v)
    keys = q if k is None else k
    if causal and op.causality == "never":
        raise Unsupported(
            f"causal=True: {op.name} cannot hide the future, use an op whose causality is not "
            "'never', such as flash.flash()"
        )
    if not causal and op.causality == "only":
        raise Unsupported(f"causal=False: {op} is causal only, set causal=True")
    _check_segments(op, segment_ids, q, keys, "q" if k is None else "k")
    if lengths is not None:
        _check_lengths(lengths, q, keys, dict(segment_ids=segment_ids, mask=mask))
    if bias is not None:
        _check_bias(op, bias, shape_of_pairs(q, keys, v))
    _check_extra_projections(op, extra_projections, q, v)
    if global_tokens is not None:
        _check_global_tokens(op, global_tokens, q)
    if dropout and not op.dropout:
        raise Unsupported(
            f"dropout is {dropout}: {op.name} makes no attention weights to drop, set dropout=0"
        )
    if rng is None and (dropout > 0.0 or op.plan_needs == "rng"):
        why = "dropout > 0" if dropout > 0.0 else f"{op.name}, which draws its plan at random,"
        raise ValueError(f"rng is None: {why} needs one, such as jax.random.key(0)")


def check_mask(name: str, mask: Ids | Tokens | None, of: str, x: Shaped[Array, "B T *d"]) -> None:
    """Raises `ValueError` unless a mask, if there is one, is of the tokens of `x`, called `of`."""
    if (ids := tokens_of(mask).segment_ids) is not None:
        check_ids(name, ids, of, x.shape[:2])


def check_flag(name: str, value: Any) -> None:
    """Raises `ValueError` for what is not True or False, such as a number that `jax.jit` traces."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {shown(value)}: expected True or False")


def check_read(op, call) -> None:
    """Raises `Unsupported` for an argument of a `Call` that the op would ignore."""
    read = dict(
        bias=op.bias,
        global_tokens=op.global_tokens,
        extra_projections=op.reads_projections,
        origins=op.decoding == "beams",
        chosen=op.reuses,
    )
    for name, reads in read.items():
        if getattr(call, name) is not None and not reads:
            raise Unsupported(f"{name} is given, but {op.name} does not read it: leave it out")


def check_projections(op, given: dict[str, Any] | None) -> None:
    """Raises `ValueError` for extra projections that are not, by name, those that the op reads."""
    given, wanted = sorted(given or {}), sorted(op.extra_projections(Dims(1, 1, 1, 1)))
    if given != wanted:
        raise ValueError(f"extra_projections has {given}: {op.name} reads {wanted}")


def _check_shapes(op, q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None and name == "k":
            continue
        check_floats(name, x, "batch", "length", "heads", "size")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: expected at least one of each axis")
    if op.shared_qk and k is not None:
        raise ValueError(f"k is given, but {op.name} makes its keys of the queries: pass k=None")
    if not op.shared_qk and k is None:
        raise ValueError(f"k is None, but {op.name} does not make its keys of the queries: pass k")
    keys, source = (q, "q") if k is None else (k, "k")
    more = v.shape[2] > keys.shape[2] == q.shape[2] > 0 == v.shape[2] % q.shape[2]
    if more and v.shape[:2] == keys.shape[:2]:
        if not op.more_value_heads:
            raise Unsupported(
                f"v has {v.shape[2]} heads and q has {q.shape[2]}, but {op.name} makes its keys of "
                "the queries: repeat the queries, or use an op whose more_value_heads is True, "
                "such as dense.dense()"
            )
    elif v.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape}: expected [batch, length, heads] as in {source}, "
            f"{keys.shape[:3]}"
        )
    if (q.shape[0], q.shape[3]) != (keys.shape[0], keys.shape[3]) or q.shape[2] % keys.shape[2]:
        raise ValueError(
            f"k has shape {keys.shape}: expected batch, heads and size as in q, {q.shape}, or a "
            "divisor of its heads"
        )
    if q.shape[1] != keys.shape[1] and not op.cross:
        raise Unsupported(
            f"q and k have lengths {q.shape[1]} and {keys.shape[1]}, but {op.name} attends within "
            "one sequence: use an op whose cross is True, such as dense.dense()"
        )


def check_heads(op, **given: int | None) -> None:
    """Raises `SettingError` for fewer heads than a layer of an op can have.

    Args:
      given: the numbers of heads, of those of keys and values, and of those of queries and keys, by
        the names of the layer's arguments. None: there are no fewer.
    """
    (name_of_all, n_heads), *fewer = given.items()
    for name, n in fewer:
        if n is not None and n_heads % n:
            raise SettingError(f"{name} is {n}: expected a divisor of {name_of_all}, {n_heads}")
        if n is not None and op.shared_qk:
            raise Unsupported(
                f"{name} is {n}, but {op} makes its keys of the queries: leave it out"
            )
    (kv_name, n_kv), (qk_name, n_qk) = fewer
    if n_kv is not None and n_qk is not None:
        raise SettingError(f"{qk_name} is {n_qk} and {kv_name} {n_kv}: leave one out")


def _check_segments(op, segment_ids, q, keys, source: str) -> None:
    is_pair = isinstance(segment_ids, tuple)
    if is_pair and not op.cross:
        raise Unsupported(
            f"segment_ids is a pair, but {op.name} attends within one sequence: pass one array"
        )
    if is_pair and (len(segment_ids) != 2 or any(ids is None for ids in segment_ids)):
        raise ValueError(
            "segment_ids is a tuple, but not a pair of ids of queries and ids of keys: pass both, "
            "ones where everything is visible"
        )
    for ids, x, name in zip(segment_pair(segment_ids), (q, keys), ("q", source), strict=True):
        if ids is None:
            continue
        pair = "" if is_pair else ", or a pair of arrays if keys are of another sequence"
        check_ids("segment_ids", ids, name, x.shape[:2], pair)
        if ids.dtype == bool:
            continue
        if not np.can_cast(ids.dtype, np.int32):
            _check_ids_fit(ids)
        if not op.packed:
            _check_one_segment(op, ids)


def _check_lengths(lengths, q, keys, others) -> None:
    for name, given in others.items():
        if given is not None:
            raise ValueError(
                f"lengths and {name} are given: leave out lengths, and let {name} hide the padding"
            )
    if q.shape[1] != keys.shape[1]:
        raise ValueError(
            f"lengths is given, and q and k have lengths {q.shape[1]} and {keys.shape[1]}: pass "
            "booleans of both as segment_ids"
        )
    check_lengths("lengths", lengths, *q.shape[:2], "the length of q")


def _check_ids_fit(ids) -> None:
    """Raises `ValueError` for concrete ids that do not fit in 32 bits."""
    if not isinstance(ids, jax.core.Tracer):
        ids = np.asarray(ids)
        if np.any(ids.astype(np.int32) != ids):
            raise ValueError(f"segment_ids has ids up to {ids.max()}: expected integers of 32 bits")


def _check_one_segment(op, ids) -> None:
    """Raises `Unsupported` unless each row has one segment, besides padding.

    Traced ids have no values yet, and may be of several segments. Booleans are of one.
    """
    if isinstance(ids, jax.core.Tracer):
        found = "integers, which may be several"
    else:
        ids = np.asarray(ids)
        first = np.take_along_axis(ids, is_token(ids).argmax(axis=1)[:, None], axis=1)
        several = is_token(ids) & ~same_segment(ids, first)
        if not np.any(several):
            return
        found = "several"
    raise Unsupported(
        f"segment_ids of a row are {found}, but {op.name} does not tell them apart: leave rows "
        "unpacked, with booleans that are True at tokens"
    )


def _check_global_tokens(op, global_tokens, q) -> None:
    if not op.global_tokens:
        raise Unsupported(
            f"global_tokens is given, but {op.name} has no global tokens: use an op whose "
            "global_tokens is True, such as longformer.longformer()"
        )
    check_ids("global_tokens", global_tokens, "q", q.shape[:2])


def _check_extra_projections(op, extra_projections, q, v) -> None:
    check_projections(op, extra_projections)
    for name, extra in op.extra_projections(op.dims(q, v)).items():
        shape = (*q.shape[:2], extra.n_heads, extra.size)
        if extra_projections[name].shape != shape:
            raise ValueError(
                f"extra_projections[{name!r}] has shape {extra_projections[name].shape}: expected "
                f"{shape}"
            )


def checked_params(op, params, q, v) -> Any:
    """The weights of its own that an op reads; those of `op.init` where that has none.

    Raises:
      ValueError: `params` are others.
    """
    dims = op.dims(q, v)
    given = _shapes(params)
    # A weight may be for longer sequences.
    (wanted, tree), (longer, _) = (
        _of_init(op, dims._replace(length=dims.length + n)) for n in (0, 1)
    )
    if wanted and not given:
        raise ValueError(
            f"params is {params!r}: {op.name} has weights of its own, pass those of "
            "op.init(rng, op.dims(q, v))"
        )
    if given.keys() != wanted.keys():
        raise ValueError(f"params has {sorted(given)}: {op.name} reads {sorted(wanted)}")
    for name, shape in given.items():
        each = zip(shape, wanted[name], longer[name], strict=False)
        if len(shape) != len(wanted[name]) or any(n != m for n, m, more in each if m == more):
            raise ValueError(
                f"params[{name!r}] has shape {shape}: expected {wanted[name]}, as of "
                "op.init(rng, op.dims(q, v))"
            )
    return params if wanted else tree


def checked_state(op, state, causal, mask, segment_ids, q, v) -> Any:
    """The state that a call goes on from; without one, that before the first position.

    Raises:
      ValueError: the state is of other sizes, or a segment is not contiguous.
      Unsupported: the op carries no state, or the call is not a part of a causal one.
    """
    first = op.first_state(q.shape[0], op.dims(q, v), q.dtype)
    if not causal or mask is not None:
        given = "mask is given" if causal else "causal=False"
        raise Unsupported(f"{given}, but a state is of causal calls: use causal=True and no mask")
    state = first if state is None else state
    check_state(op, "initial_state", state, segment_ids, q, v)
    return state


def check_state(op, name: str, state, segment_ids, q, v) -> None:
    """Raises `ValueError` for a state of other sizes, and for known ids of a broken segment.

    `name` is that of the state's argument.
    """
    first = jax.eval_shape(lambda: op.first_state(q.shape[0], op.dims(q, v)))
    if jax.tree.structure(state) != jax.tree.structure(first) or _shapes(state) != _shapes(first):
        raise ValueError(
            f"{name} has shapes {_shapes(state)}: expected {_shapes(first)}, as of a call with "
            "return_state=True, or of op.first_state"
        )
    if segment_ids is None or isinstance(segment_ids, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        broken = ~np.asarray(are_contiguous(int32_ids(segment_ids)))
    if broken.any():
        row = np.asarray(segment_ids)[broken.argmax()].tolist()
        raise ValueError(
            f"segment_ids has a row {shown(row)}: with a state, a segment's positions must be "
            "contiguous"
        )


def _shapes(params) -> dict[str, tuple[int, ...]]:
    """The shapes of weights by their names."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.shape(x) for path, x in leaves
    }


@functools.lru_cache(maxsize=256)
def _of_init(op, dims) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shapes of an op's own weights, by name and as a tree."""
    tree = jax.eval_shape(lambda: op.init(jax.random.key(0), dims))
    return _shapes(tree), tree


def _check_bias(op, bias, full: tuple[int, int, int, int]) -> None:
    if not op.bias:
        raise Unsupported(
            f"bias is given, but {op.name} adds none: use an op whose bias is True, such as "
            "flash.flash()"
        )
    check_array("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"bias has dtype {bias.dtype}: expected floats to add; turn a mask into "
            "jnp.where(mask, 0.0, -jnp.inf)"
        )
    if bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape, full, strict=True)):
        raise ValueError(
            f"bias has shape {bias.shape}: expected [batch, heads, queries, keys], {full}, "
            "each or 1"
        )

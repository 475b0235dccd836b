"""`jax.nn.dot_product_attention` by any algorithm of `reformax.ops`, for models of others.

    from reformax.nn import dot_product_attention
    out = dot_product_attention(query, key, value, is_causal=True, implementation="lsh")

Letters in the shapes are those of `reformax.ops.base`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from reformax import ops
from reformax.declared import SettingError, Unsupported, check, shown
from reformax.ops.base import AttentionOp
from reformax.ops.calls.arguments import check_flag
from reformax.ops.calls.dims import Dims
from reformax.ops.masking.given_masks import is_one_sequence, shape_of_pairs
from reformax.ops.masking.masks import tokens_before
from reformax.ops.numerics.arrays import check_floats, check_lengths
from reformax.ops.numerics.precision import accum_dtype

__all__ = ["dot_product_attention", "op_of"]

# Those of `jax.nn.dot_product_attention`.
_OF_JAX = (None, "xla", "cudnn")


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | AttentionOp | None = None,
    return_residual: bool = False,
    rng: PRNGKeyArray | None = None,
) -> Any:
    """Attention by an algorithm, with the arguments of `jax.nn.dot_product_attention`.

    "dense", "flash" and "memory_efficient" compute the same function as jax's. Every other
    algorithm has its own mask, within the one that the arguments give.

    **"lsh"** is `asymmetric_lsh`: LSH attention that hashes queries and keys apart. The paper's own
    algorithm makes its keys of the queries, `k = q / |q|`, because separate projections may leave a
    bucket with many queries and no keys (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2). A
    model that has a projection of keys would compute it for nothing, and never train it. Algorithms
    that share queries and keys, such as the op `lsh.lsh()`, are therefore refused.
    `asymmetric_lsh` aligns the buckets of queries with those of keys instead.

    Two results differ from jax's. A query that sees no key has zeros; jax's has the mean of all
    values. An algorithm that reads one sequence, or sorts it in a causal call, has zeros from
    `key_value_seq_lengths` on, because there a position is padding.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`.
      key: `[B, S, G, H]` or `[S, G, H]`; each of G heads serves N / G heads of queries.
      value: `[B, S, G, V]` or `[S, G, V]`.
      bias: added to the logits, 4 axes that broadcast to `[B, N, T, S]`.
      mask: True where a key is seen, likewise. One of keys, `[B, 1, 1, S]`, suits each algorithm.
      scale: the factor of the logits; None: `1 / sqrt(H)`. Queries are multiplied by it.
      is_causal: whether position t sees positions up to t only.
      query_seq_lengths: the number of queries of each row before its padding, `[B]`.
      key_value_seq_lengths: that of keys.
      local_window_size: how many positions to the left and to the right a position sees; one number
        is both. "flash" then takes time linear in the length, by `local`, unless there is a mask or
        a bias. "local", "longformer" and "sinks" take it as their own window.
      implementation: an op, such as `asymmetric_lsh.asymmetric_lsh(n_hashes=4)`, or its name, for
        its defaults. None, "xla" and "cudnn" are jax's own.
      return_residual: as jax's; for jax's own implementations.
      rng: the source of hashes, for algorithms that draw them; others ignore it. None:
        `jax.random.key(0)`, so that a call gives the same result each time. In training pass
        another key for each layer and step: a fixed hash misses the same pairs in all.

    Returns:
      The attended values, `[B, T, N, V]` or `[T, N, V]`.

    Raises:
      ValueError: a shape or a value does not fit.
      NotImplementedError: an argument that the algorithm cannot honour.
    """
    if isinstance(implementation, str | None) and implementation in _OF_JAX:
        call = dict(
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            **({"return_residual": True} if return_residual else {}),
        )
        return jax.nn.dot_product_attention(query, key, value, bias, mask, **call)
    op = op_of(implementation)
    if return_residual:
        raise Unsupported(
            f"return_residual is True: {op.name} returns no sums; set implementation='xla'"
        )
    q, k, v = _checked(query, key, value)
    _check_causal(op, is_causal)
    shape = shape_of_pairs(q, k, v)
    mask, bias = (_four_axes(name, x, shape) for name, x in (("mask", mask), ("bias", bias)))
    if key_value_seq_lengths is not None:
        is_key = _is_token(key_value_seq_lengths, "key_value_seq_lengths", k)
        # Of keys alone it hides padding in every algorithm, whatever the mask is.
        mask = is_key if mask is None else mask & is_key[:, None, None]
    op, is_causal, mask = _in_window(op, local_window_size, is_causal, bias, mask, q, k)
    one_sequence = is_one_sequence(op, is_causal, q.shape[1], k.shape[1])
    q = q if scale is None else _scaled(op, q, scale)
    is_query = None
    if query_seq_lengths is not None:
        is_query = _is_token(query_seq_lengths, "query_seq_lengths", q)
        q = jnp.where(is_query[..., None, None], q, 0)  # padding may be NaN
    if op.plan_needs == "rng" and rng is None:
        rng = jax.random.key(0)
    out = op(q, k, v, causal=is_causal, mask=mask, bias=bias, rng=rng)
    if is_query is not None:
        out = jnp.where(is_query[..., None, None], out, 0)
        if key_value_seq_lengths is not None and one_sequence:
            out = _nan_beyond_keys(out, op, query_seq_lengths, key_value_seq_lengths)
    return out.reshape(*jnp.shape(query)[:-1], out.shape[-1])


@functools.cache
def _names() -> dict[str, type[AttentionOp]]:
    """The algorithms by name."""
    found = {name: getattr(getattr(ops, name), name) for name in ops.__all__ if name.islower()}
    return found | {"lsh": ops.asymmetric_lsh.asymmetric_lsh}


def op_of(implementation: str | AttentionOp, name: str = "implementation") -> AttentionOp:
    """An algorithm that needs queries, keys and values alone: an op, or by its name.

    Args:
      implementation: the op, or its name.
      name: what an error calls it.

    Raises:
      SettingError: no op and no name.
      Unsupported: the algorithm shares queries and keys, has weights, or reads further projections.
    """
    op = implementation
    if isinstance(op, str) and op in _names():
        op = _names()[op]()
    if not isinstance(op, AttentionOp):
        hint = "an AttentionOp, such as flash.flash()"
        if not inspect.isclass(op):
            hint += f", or one of {', '.join(map(repr, _usable()))}"
        raise SettingError(f"{name} is {shown(op)}: expected {hint}")
    if obstacle := _obstacle(op):
        raise Unsupported(f"{name} is {shown(implementation)}: {obstacle}")
    return op


@functools.cache
def _usable() -> tuple[str, ...]:
    """The names that `op_of` takes."""
    return tuple(sorted(name for name, op in _names().items() if not _obstacle(op())))


def _obstacle(op: AttentionOp) -> str | None:
    """The property by which an op needs more than separate queries, keys and values."""
    if op.shared_qk:
        return (
            "it makes its keys of the queries and would not read key; use 'lsh', which is "
            "asymmetric_lsh, or Attention of reformax.flax or reformax.layers"
        )
    needs = "Attention of reformax.flax or reformax.layers"
    if op.reads_projections:
        return f"it reads further projections of a layer's input, which {needs} makes"
    if has_weights(op):
        return f"it has weights of its own, which {needs} keeps"
    return None


@functools.lru_cache(maxsize=256)
def has_weights(op: AttentionOp) -> bool:
    """Whether an op has weights of its own."""
    sizes = Dims(2, 2, 2, 2)
    return bool(jax.tree.leaves(jax.eval_shape(lambda: op.init(jax.random.key(0), sizes))))


def _checked(query, key, value) -> tuple[Array, Array, Array]:
    """The arrays with an axis of the batch."""
    arrays = dict(query=query, key=key, value=value)
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    for name, x in arrays.items():
        if x.ndim != arrays["query"].ndim or x.ndim not in (3, 4) or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {x.shape}: expected [batch, length, heads, size] of all three, "
                "or [length, heads, size]"
            )
        check_floats(name, x)
    of_q, of_k, of_v = shapes.values()
    if of_k[:-3] != of_q[:-3] or of_k[-1] != of_q[-1] or of_q[-2] % of_k[-2]:
        raise ValueError(
            f"key has shape {of_k}: expected batch and size of query, {of_q}, and as many heads or "
            "a divisor"
        )
    if of_v[:-1] != of_k[:-1]:
        raise ValueError(f"value has shape {of_v}: expected that of key, {of_k}, but for its size")
    return tuple(x if x.ndim == 4 else x[None] for x in arrays.values())


def _check_causal(op: AttentionOp, is_causal: bool) -> None:
    check_flag("is_causal", is_causal)
    if is_causal and op.causality == "never":
        raise Unsupported(f"is_causal is True: {op.name} cannot hide the future, use 'flash'")
    if not is_causal and op.causality == "only":
        raise Unsupported(f"is_causal is False: {op} is causal only, set is_causal=True")


def _four_axes(name: str, x: ArrayLike | None, full: tuple[int, ...]) -> Array | None:
    """A mask or a bias with the four axes of pairs."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.ndim > 4 or any(n not in (1, m) for n, m in zip(x.shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"{name} has shape {x.shape}: expected axes that broadcast to [batch, heads, queries, "
            f"keys], {full}; a mask of keys is [batch, 1, 1, keys]"
        )
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _is_token(lengths: ArrayLike, name: str, x: Array) -> Bool[Array, "B T"]:
    """Which positions of `x` are before the end of their row."""
    lengths = jnp.asarray(lengths)
    check_lengths(name, lengths, *x.shape[:2], "the length of the sequence")
    return tokens_before(lengths, x.shape[1])


def _scaled(op: AttentionOp, q: Float[Array, "B T N H"], scale) -> Float[Array, "B T N H"]:
    """Queries whose logits are those of another scale."""
    if not isinstance(scale, jax.Array | np.generic):
        check("scale", scale, float)
    factor = scale * math.sqrt(q.shape[-1])
    if not isinstance(factor, jax.core.Tracer) and math.isclose(factor, 1.0, rel_tol=1e-6):
        return q
    if not op.dropout:
        raise Unsupported(f"scale is {scale}: {op.name} has no logits to scale, leave it out")
    if op.scale is not None:
        raise SettingError(f"scale is {scale} and implementation is {op}: leave one scale out")
    dtype = accum_dtype(q.dtype)
    return (q.astype(dtype) * jnp.asarray(factor, dtype)).astype(q.dtype)


def _in_window(
    op: AttentionOp, size, is_causal: bool, bias, mask, q, k
) -> tuple[AttentionOp, bool, Array | None]:
    """The op, causality and mask by which positions see a window only."""
    if size is None:
        return op, is_causal, mask
    left, right = size if isinstance(size, tuple | list) and len(size) == 2 else (size, size)
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in (left, right)):
        raise SettingError(
            f"local_window_size is {shown(size)}: expected a number of at least 0, or a pair"
        )
    causal = is_causal or (right == 0 and op.causality != "never")
    symmetric, one_sequence = causal or left == right, q.shape[1] == k.shape[1]
    # To `local` a hidden key is padding, which has no output.
    alone = one_sequence and mask is None and bias is None
    if symmetric and alone and op == _plain_flash(op):
        kept = dict(soft_cap=op.soft_cap, scale_by_length=op.scale_by_length, impl=op.impl)
        op = ops.local.local(chunk_len=min(max(2 ** (left - 1).bit_length(), 16), 128), **kept)
    if "window" in {field.name for field in dataclasses.fields(op)} and symmetric:
        return _with_window(op, left, causal), causal, mask
    if not op.bias:
        fix = "a number or (left, 0)" if hasattr(op, "window") else "implementation='flash'"
        raise Unsupported(
            f"local_window_size is {shown(size)}: {op.name} has no such window, use {fix}"
        )
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    seen = ((distance <= left) & (distance >= -right))[None, None]
    if mask is not None:
        seen = seen & (mask if mask.ndim == 4 else mask[:, None, None])
    return op, is_causal, seen


def _plain_flash(op: AttentionOp) -> AttentionOp | None:
    """The op without the options of `flash` that `local` lacks, if it is a `flash`."""
    if not isinstance(op, ops.flash.flash):
        return None
    return dataclasses.replace(op, scale=None, query_block_size=None, key_block_size=None)


def _with_window(op: AttentionOp, left: int, causal: bool) -> AttentionOp:
    """An op that has a window, with one of `left` positions to each side."""
    chunks = {}
    if isinstance(op, ops.local.local):
        n_chunks = -(-left // op.chunk_len)
        chunks = dict(n_chunks_before=n_chunks, n_chunks_after=0 if causal else n_chunks)
    return dataclasses.replace(op, window=left + 1, **chunks)


def _nan_beyond_keys(out, op: AttentionOp, of_queries: ArrayLike, of_keys: ArrayLike) -> Array:
    """`out`, with NaN at queries that have no key of their position, where lengths are traced.

    Raises:
      Unsupported: known lengths with such queries.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in (of_queries, of_keys)):
        if np.any(np.asarray(of_queries) > np.asarray(of_keys)):
            raise Unsupported(
                f"query_seq_lengths exceed key_value_seq_lengths: {op.name} reads one sequence, "
                "use 'dense'"
            )
        return out
    position, more = jnp.arange(out.shape[1])[None], jnp.asarray(of_queries)[:, None]
    beyond = (position >= jnp.asarray(of_keys)[:, None]) & (position < more)
    return jnp.where(beyond[..., None, None], jnp.nan, out)

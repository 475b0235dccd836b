"""Attention of `reformax.ops` in flax: a module for linen, one for nnx, and `attention_fn`.

    from reformax.flax.nnx import Attention
    attention = Attention(lsh.lsh(), num_heads=8, in_features=512, causal=True, rngs=nnx.Rngs(0))

A mask is what flax makes, `[batch, heads, queries, keys]` with axes of 1 that are shared, or
`[batch, keys]`. Every op honours one that is the same for all queries and heads. One of pairs is
honoured by ops with `bias` and refused by others, which take `causal` and `segment_ids`.

flax comes with `pip install 'reformax[flax]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from reformax.declared import Called, SettingError, checked
from reformax.nn import op_of
from reformax.ops.base import AttentionOp

__all__ = ["attention_fn"]

Op = Annotated[AttentionOp, Called("an AttentionOp, such as flash.flash(), or the name of one")]


@checked
def attention_fn(
    op: Op | str, *, causal: bool = False, rng: PRNGKeyArray | None = None
) -> Callable[..., Float[Array, "B T N V"]]:
    """An algorithm as the `attention_fn` of flax's own modules.

    Dropout draws another mask for each row and head, also where `broadcast_dropout` is set.

    Args:
      op: the algorithm, or its name, as the `implementation` of
        `reformax.nn.dot_product_attention`. It must not share queries and keys, which flax's
        modules project separately, and have no weights.
      causal: whether a position sees only itself and what came before it.
      rng: the source of hashes where the module gives none, as it does with dropout in training;
        None: `jax.random.key(0)`.

    Raises:
      SettingError: an argument of another type.
      NotImplementedError: the op shares queries and keys, or has weights; at the call, an argument
        that it cannot honour.
    """
    op = op_of(op, "op")

    def attend(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        del broadcast_dropout
        refused = dict(
            precision=precision,
            sow_weights=module,
            qk_attn_weights_einsum_cls=qk_attn_weights_einsum,
            attn_weights_value_einsum_cls=attn_weights_value_einsum,
        )
        for name, given in refused.items():
            if given is not None:
                raise NotImplementedError(f"{name} is set: {op.name} does not read it")
        is_causal = is_causal or causal
        if is_causal and query.shape[1] != key.shape[1]:
            raise NotImplementedError(
                f"causal=True with {query.shape[1]} queries and {key.shape[1]} keys: leave it out "
                "where flax's cache of decoding gives a mask"
            )
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        source = dropout_rng
        if source is None and op.plan_needs == "rng":
            source = jax.random.key(0) if rng is None else rng
        out = op(
            *(query, key, value),
            causal=is_causal,
            mask=seen(mask),
            bias=bias,
            dropout=0.0 if deterministic else dropout_rate,
            rng=source,
        )
        return nan_unless_mask(out, mask)

    return attend


def seen(mask: ArrayLike | None) -> Bool[Array, ...] | None:
    """A mask of flax, which may be 0 and 1 of any dtype, as booleans.

    Raises:
      SettingError: other numbers, or floats that are all 0, as of a mask that is added to logits.
        Within `jax.jit`, where no value is known, `nan_unless_mask` replaces the error for other
        numbers.
    """
    if mask is None:
        return None
    if not isinstance(mask, jax.core.Tracer):
        _check_mask(np.asarray(mask))
    return jnp.asarray(mask) != 0


def _check_mask(mask: np.ndarray) -> None:
    if mask.dtype == bool or not mask.size:
        return
    others = mask[(mask != 0) & (mask != 1)]
    floats = not np.issubdtype(mask.dtype, np.integer)  # bfloat16 is no np.floating
    if others.size:
        held = f"{float(others[0]):g}"
    elif floats and not mask.any():
        held = "0 alone, which hides every key"
    else:
        return
    raise SettingError(
        f"mask holds {held}: expected booleans, or 1 where a key is seen and 0 elsewhere; of a "
        "mask that is added to logits pass mask == 0, and ids of segments as segment_ids"
    )


def nan_unless_mask(out: Float[Array, "*d"], mask: ArrayLike | None) -> Float[Array, "*d"]:
    """`out`, or NaN where a traced mask holds other numbers than 0 and 1."""
    if not isinstance(mask, jax.core.Tracer) or mask.dtype == bool:
        return out
    return jnp.where(jnp.all((mask == 0) | (mask == 1)), out, jnp.nan)

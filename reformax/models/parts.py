"""What the models are assembled of: cycles of blocks, positions, activations, logits' products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers import (
    Attention,
    AxialPositionalEncoding,
    Block,
    CrossAttention,
    FeedForward,
    Layer,
    SinusoidalPositionalEncoding,
)
from reformax.layers.dropout import check_rate
from reformax.ops.base import AttentionOp

AttentionType = AttentionOp | Sequence[AttentionOp]
Activation = Callable[[Array], Array] | str
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def cycle_of_blocks(
    attention_type: AttentionType,
    *,
    cross_attention_type: AttentionOp | None = None,
    causal: bool = True,
    n_heads: int,
    d_attention_key: int,
    d_attention_value: int,
    d_ff: int,
    dropout: float,
    ff_dropout: float | None,
    attention_dropout: float,
    attention_bias: bool,
    use_rotary: bool,
    ff_activation: Activation,
    ff_chunk_size: int,
    mode: str,
    name: str = "attention_type",
) -> list[Block]:
    """A block for each algorithm of the cycle, by the arguments that models have.

    Args:
      attention_type: an algorithm, or a cycle of them over the layers.
      cross_attention_type: of the attention to a memory, which only a decoder's blocks have.
      causal: whether the blocks are a decoder's.
      n_heads: and the next, as in `lm.ReformerLM`.
      use_rotary: whether positions turn queries and keys.
      name: what `attention_type` is called where it is wrong.
    """
    cycle = [attention_type] if isinstance(attention_type, AttentionOp) else attention_type
    if isinstance(cycle, str) or not all(isinstance(op, AttentionOp) for op in cycle):
        raise ValueError(
            f"{name} is {attention_type!r}: expected an AttentionOp, such as lsh.lsh(), or a cycle "
            "of them"
        )
    check_rate("dropout", dropout)
    if isinstance(ff_activation, str) and ff_activation not in ACTIVATIONS:
        raise ValueError(
            f"ff_activation is {ff_activation!r}: expected one of {', '.join(ACTIVATIONS)}, or a "
            "function"
        )
    attention = dict(
        n_heads=n_heads,
        d_qk=d_attention_key,
        d_v=d_attention_value,
        bias=attention_bias,
        output_bias=attention_bias,
        attention_dropout=attention_dropout,
        output_dropout=dropout,
        mode=mode,
    )
    return [
        Block(
            Attention(op, **attention, causal=causal, use_rotary=use_rotary),
            FeedForward(
                d_ff,
                dropout,
                dropout if ff_dropout is None else ff_dropout,
                ACTIVATIONS.get(ff_activation, ff_activation),
                ff_chunk_size,
                mode,
            ),
            cross_attention_type and CrossAttention(cross_attention_type, **attention),
        )
        for op in cycle
    ]


def added_positions(
    pos_type: str, pos_axial_shape: Sequence[int], pos_d_axial_embs: Sequence[int]
) -> Layer | None:
    """What is added to the embeddings; None where positions turn queries and keys, or are none."""
    if pos_type not in ("rotary", "axial", "sinusoidal", "none"):
        raise ValueError(
            f"pos_type is {pos_type!r}: expected 'rotary', 'axial', 'sinusoidal' or 'none'"
        )
    if (pos_type == "axial") != bool(pos_axial_shape or pos_d_axial_embs):
        raise ValueError(
            f"pos_type is {pos_type!r}, pos_axial_shape {tuple(pos_axial_shape)}: "
            "pos_type='axial' and the axial arguments go together"
        )
    if pos_type == "axial":
        return AxialPositionalEncoding(pos_axial_shape, pos_d_axial_embs)
    return SinusoidalPositionalEncoding() if pos_type == "sinusoidal" else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits_product(
    x: Float[Array, "*d D"], table: Float[Array, "V D"], dtype: str
) -> Float[Array, "*d V"]:
    """Products with all rows of the table, of both rounded to `dtype`, in float32.

    Their gradient is rounded to bfloat16: in float32 it would make products of that, at half the
    speed of rounded ones. Float16 would make nothing of the small numbers that a mean over many
    targets has, and no room for sums over as many: what comes in as float32 has its gradient so.
    """
    x, table = x.astype(dtype), table.astype(dtype)
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)


def _logits_product_backward(dtype, inputs, gradient):
    x, table = (z.astype(dtype) for z in inputs)
    if x.dtype != jnp.float16:
        gradient = gradient.astype(dtype)
    d_x = jnp.einsum("...v,vd->...d", gradient, table)
    d_table = jnp.einsum("...v,...d->vd", gradient, x)
    return tuple(d.astype(like.dtype) for d, like in zip((d_x, d_table), inputs, strict=True))


logits_product.defvjp(
    lambda x, table, dtype: (logits_product(x, table, dtype), (x, table)), _logits_product_backward
)

"""Trax layers: attention of every kind, reversible stacks, and the other layers of a model.

Each layer is a Trax layer over two pure functions, `init_params(rng, *shapes)` and
`apply(params, *inputs, rng)`, for a `tl.Serial` or for plain JAX.
"""

from reformax.layers._trax import tl
from reformax.layers.attention import Attention
from reformax.layers.base import Layer
from reformax.layers.cross_attention import CrossAttention
from reformax.layers.dropout import Dropout
from reformax.layers.feed_forward import FeedForward
from reformax.layers.layer_norm import LayerNorm, RMSNorm
from reformax.layers.positions import AxialPositionalEncoding, SinusoidalPositionalEncoding
from reformax.layers.residual import ResidualStack
from reformax.layers.reversible import ReversibleStack
from reformax.layers.stacks import TransformerBlock
from reformax.layers.trax_attention import LSHSelfAttention, SelfAttention
from reformax.ops.numerics.rotary import rotary

__all__ = [
    "Attention",
    "AxialPositionalEncoding",
    "TransformerBlock",
    "CrossAttention",
    "Dropout",
    "FeedForward",
    "LSHSelfAttention",
    "Layer",
    "LayerNorm",
    "ResidualStack",
    "RMSNorm",
    "ReversibleStack",
    "SelfAttention",
    "SinusoidalPositionalEncoding",
    "rotary",
    "tl",
]

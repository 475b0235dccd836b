"""Peers in linear time: flash-linear-attention, and low-rank or kernelized softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.torch_peer import Given, Peer, heads_first


def fla_linear(given: Given) -> Peer:
    from fla.ops.linear_attn import chunk_linear_attn

    features = (functional.elu(given[name].float()) + 1 for name in "qk")
    inputs = *(x.to(given["v"].dtype) for x in features), given["v"]
    return Peer(lambda *qkv: chunk_linear_attn(*qkv)[0], inputs)


def fla_retention(given: Given) -> Peer:
    from fla.ops.retention import chunk_retention

    return Peer(lambda *qkv: chunk_retention(*qkv)[0], tuple(given[name] for name in "qkv"))


def fla_gated_linear(given: Given) -> Peer:
    from fla.ops.gla import chunk_gla

    gate = functional.logsigmoid((given["gate"] + given["bias"]).float()) / 16
    inputs = *(given[name] for name in "qkv"), gate.to(given["v"].dtype)
    return Peer(lambda *qkvg: chunk_gla(*qkvg)[0], inputs)


def fla_gated_delta(given: Given) -> Peer:
    """It refuses the gradient on Hopper GPUs with Triton 3.4 to 3.7: `check` reports its error."""
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True

    keep, beta = (given[name][..., 0].float() for name in ("keep", "beta"))
    gate = given["rate"].float().exp() * functional.logsigmoid(keep - given["bias"])

    def attend(*inputs):
        return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    beta = beta.sigmoid().to(given["v"].dtype)
    return Peer(attend, (*(given[name] for name in "qkv"), gate, beta))


def from_inputs(make: Callable[[Given], Peer]) -> Callable[[Given], Peer]:
    """A peer whose features or gates are computed in the call."""

    def whole(given: Given) -> Peer:
        def attend(*inputs):
            peer = make(dict(zip(given, inputs, strict=True)))
            return peer.attend(*peer.inputs)

        return Peer(attend, tuple(given.values()))

    return whole


def lucidrains_linear(given: Given) -> Peer:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    return Peer(causal_linear_attn, heads_first(given))


def lucidrains_performer(causal: bool, given: Given) -> Peer:
    """Its causal attention without fast_transformers' kernel, which no registry has built."""
    from performer_pytorch import performer_pytorch as code

    prefix_sums = functools.partial(code.causal_linear_attention_noncuda, eps=0.0)
    sums = prefix_sums if causal else code.linear_attention
    options = dict(projection_matrix=given["directions"].detach(), eps=0.0)

    def attend(q, k, v):
        queries = code.softmax_kernel(q, is_query=True, **options)
        return sums(queries, code.softmax_kernel(k, is_query=False, **options), v)

    return Peer(attend, heads_first(given))


class Third(nn.Module):
    """In the place of a projection: queries, keys or values, side by side in the input."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, x):
        return x.chunk(3, dim=-1)[self.index]


def side_by_side(given: Given) -> torch.Tensor:
    """q, k and v as `[1, T, 3 N H]`."""
    return torch.cat([given[name].flatten(2) for name in "qkv"], dim=-1)


def lucidrains_linformer(given: Given) -> Peer:
    from linformer import LinformerSelfAttention

    length, n_heads, d_head = given["q"].shape[1:]
    n_projected = given["e"].shape[1]
    layer = LinformerSelfAttention(n_heads * d_head, 1, k=n_projected, heads=n_heads)
    layer.seq_len, layer.to_out = length, nn.Identity()
    layer.to_q, layer.to_k, layer.to_v = map(Third, range(3))
    del layer.proj_k, layer.proj_v

    def attend(x, e, f):
        layer.proj_k, layer.proj_v = e, f
        return layer(x)

    return Peer(attend, (side_by_side(given), given["e"], given["f"]))


def lucidrains_nystrom(given: Given) -> Peer:
    from nystrom_attention import NystromAttention

    n_heads, d_head = given["q"].shape[2:]
    sizes = dict(dim_head=d_head, heads=n_heads, num_landmarks=64, residual=False)
    layer = NystromAttention(n_heads * d_head, **sizes)
    layer.to_qkv = layer.to_out = nn.Identity()
    return Peer(layer, (side_by_side(given),))

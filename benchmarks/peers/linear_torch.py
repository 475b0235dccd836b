"""Attentions in linear time in PyTorch: the peers of `benchmarks.linear_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness.processes import answers
from benchmarks.peers.attention_torch import Peer, leaves, measure
from benchmarks.peers.torch_calls import DEVICE


def heads_first(length: int, n_heads: int, d_head: int, dtype: str) -> tuple[Any, ...]:
    """q, k and v as `[1, N, T, H]`."""
    return leaves(3, 1, n_heads, length, d_head, dtype=dtype)


def heads_last(length: int, n_heads: int, d_head: int, dtype: str) -> tuple[Any, ...]:
    """q, k and v as `[1, T, N, H]`, as flash-linear-attention reads them."""
    return leaves(3, 1, length, n_heads, d_head, dtype=dtype)


def log_gate(*size: int, dtype: str) -> Any:
    """The logarithms of gates near 1."""
    (x,) = leaves(1, *size, dtype=dtype)
    return (functional.logsigmoid(x.detach()) / 16).requires_grad_()


def fla_linear(**sizes: Any) -> Peer:
    from fla.ops.linear_attn import chunk_linear_attn

    def attend(q, k, v):
        return chunk_linear_attn(functional.elu(q) + 1, functional.elu(k) + 1, v)[0]

    return Peer(attend, heads_last(**sizes))


def fla_retention(**sizes: Any) -> Peer:
    from fla.ops.retention import chunk_retention

    return Peer(lambda *qkv: chunk_retention(*qkv)[0], heads_last(**sizes))


def fla_gated_linear(**sizes: Any) -> Peer:
    from fla.ops.gla import chunk_gla

    gate = log_gate(1, sizes["length"], sizes["n_heads"], sizes["d_head"], dtype=sizes["dtype"])
    return Peer(lambda *qkvg: chunk_gla(*qkvg)[0], (*heads_last(**sizes), gate))


def fla_gated_delta(**sizes: Any) -> Peer:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    size = 1, sizes["length"], sizes["n_heads"]
    (beta,) = leaves(1, *size, dtype=sizes["dtype"])
    beta = beta.detach().sigmoid().requires_grad_()

    def attend(*inputs):
        return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]

    return Peer(attend, (*heads_last(**sizes), log_gate(*size, dtype="float32"), beta))


def lucidrains_linear(**sizes: Any) -> Peer:
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    return Peer(causal_linear_attn, heads_first(**sizes))


def lucidrains_performer(causal: bool, **sizes: Any) -> Peer:
    """Its causal attention without fast_transformers' kernel, which no registry has built."""
    from performer_pytorch.performer_pytorch import (
        FastAttention,
        causal_linear_attention_noncuda,
    )

    layer = FastAttention(sizes["d_head"], nb_features=256, causal=causal)
    layer = layer.to(DEVICE, getattr(torch, sizes["dtype"]))
    if causal:
        layer.causal_linear_fn = causal_linear_attention_noncuda
    return Peer(layer, heads_first(**sizes))


def of_layer(make: Callable[..., Any], length: int, n_heads: int, d_head: int, dtype: str) -> Peer:
    """A layer that projects its input."""
    layer = make(dim=n_heads * d_head, heads=n_heads, dim_head=d_head)
    layer = layer.to(DEVICE, getattr(torch, dtype))
    return Peer(layer, leaves(1, 1, length, n_heads * d_head, dtype=dtype))


def lucidrains_linformer(**sizes: Any) -> Peer:
    from linformer import LinformerSelfAttention

    make = functools.partial(LinformerSelfAttention, seq_len=sizes["length"], k=256)
    return of_layer(make, **sizes)


def lucidrains_nystrom(**sizes: Any) -> Peer:
    from nystrom_attention import NystromAttention

    return of_layer(functools.partial(NystromAttention, num_landmarks=64, residual=False), **sizes)


PEERS = {
    "fla linear": fla_linear,
    "fla retention": fla_retention,
    "fla gated_linear": fla_gated_linear,
    "fla gated_delta": fla_gated_delta,
    "linear-attention-transformer": lucidrains_linear,
    "performer-pytorch": functools.partial(lucidrains_performer, True),
    "performer-pytorch not causal": functools.partial(lucidrains_performer, False),
    "linformer with projections": lucidrains_linformer,
    "nystrom-attention with projections": lucidrains_nystrom,
}


def by_length(lengths: Sequence[int], repeats: int, **sizes: Any) -> Iterator[dict[str, Any]]:
    """The rows of all lengths, named `peer, length`. sizes: n_heads, d_head and dtype."""

    def measured(make: Callable[..., Peer], length: int) -> dict[str, Any]:
        torch.manual_seed(0)
        return measure(make(length=length, **sizes), repeats)

    return answers(
        {
            f"{name}, {length}": functools.partial(measured, make, length)
            for length in lengths
            for name, make in PEERS.items()
        }
    )

"""Peers that choose keys: by hashes, in blocks, and by global tokens."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from benchmarks.peers.torch_calls import DEVICE
from benchmarks.peers.torch_peer import Given, Peer, Sizes

N_HASHES = 4


def hugging_face_lsh(given: Given, sizes: Sizes) -> Peer:
    """LSH attention of transformers, whose layer projects its input itself."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    x = given["q"].flatten(2)
    length, n_heads, d_head = given["q"].shape[1:]
    config = ReformerConfig(
        hidden_size=n_heads * d_head,
        num_attention_heads=n_heads,
        attention_head_size=d_head,
        num_hashes=N_HASHES,
        num_buckets=None,
        lsh_attn_chunk_length=sizes.chunk_len,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config).to(x.device, x.dtype)
    return Peer(lambda x: layer(x).hidden_states, (x,))


def lucidrains_lsh(given: Given, sizes: Sizes) -> Peer:
    """LSH attention of reformer_pytorch."""
    from reformer_pytorch import LSHAttention

    layer = LSHAttention(bucket_size=sizes.chunk_len, n_hashes=N_HASHES, causal=True).to(DEVICE)
    qk, v = (given[name].transpose(1, 2) for name in "qv")

    def attend(qk, v):
        return layer(qk.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, qk.shape[:2])

    return Peer(attend, (qk, v))


class Instead(nn.Module):
    """In the place of a projection: the given vectors, or its input."""

    def __init__(self, x: torch.Tensor | None = None):
        super().__init__()
        self.x = x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.x is None else self.x).clone()  # it is divided in its place


def hugging_face_longformer(given: Given, sizes: Sizes) -> Peer:
    """transformers' layer without its projections, whose input are queries."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    batch, length, n_heads, size = given["q"].shape
    config = LongformerConfig(
        hidden_size=n_heads * size,
        num_attention_heads=n_heads,
        attention_window=[2 * sizes.window],
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0).to(DEVICE).eval()
    mask = torch.zeros(batch, length, device=DEVICE, dtype=given["q"].dtype)
    mask[:, : sizes.n_global] = 10_000.0
    layer.query, layer.query_global = Instead(), Instead()

    def attend(q, k, v):
        for name, x in (("key", k), ("value", v)):
            x = x.flatten(2).transpose(0, 1)
            setattr(layer, name, Instead(x))
            setattr(layer, f"{name}_global", Instead(x))
        return layer(
            q.flatten(2),
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=True,
        )[0]

    return Peer(attend, tuple(given[name] for name in "qkv"))


# flash-linear-attention calls flash-attn, which is not built for every PyTorch. PyTorch has the
# same kernels under other names.
def _forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    dropout_p=0.0,
    **windows,
):
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
        **windows,
    )
    if cu_seqlens_q is not None and found[1].shape != (q.shape[1], q.shape[0]):
        raise NotImplementedError(f"sums have shape {tuple(found[1].shape)}")
    return *found[:2], None, None


def _backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    dropout_p,
    **others,
):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        state,
        torch.zeros((), dtype=torch.uint64, device=q.device),
        scale=softmax_scale,
    )
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x)


def flash_attn_func(q, k, v, causal, window_size):
    left, right = window_size
    length = q.shape[1]
    windows = dict(window_size_left=left, window_size_right=right)
    return _forward(q, k, v, None, None, length, length, None, causal, 0.0, **windows)[0]


def flash_attn_varlen_func(*args, causal=False):
    return _forward(*args, causal=causal)[0]


def fla_with_flash_attn(name: str) -> Any:
    """The module of flash-linear-attention's op, which then calls PyTorch's copy of the kernels."""
    module = importlib.import_module(f"fla.ops.{name}.parallel")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = _forward, _backward
    return module


def fla_moba(given: Given, sizes: Sizes) -> Peer:
    parallel_moba = fla_with_flash_attn("moba").parallel_moba
    length = given["q"].shape[1]
    ends = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)

    def attend(q, k, v):
        return parallel_moba(q, k, v, ends, length, sizes.block, 3)

    return Peer(attend, tuple(given[name] for name in "qkv"))


def fla_nsa(given: Given, sizes: Sizes) -> Peer:
    """It gets its gates; ours computes them of its inputs."""
    parallel_nsa = fla_with_flash_attn("nsa").parallel_nsa
    stride = sizes.stride
    options = dict(block_counts=min(16, stride), block_size=4 * stride, window_size=sizes.block)

    def attend(q, k, v, gate):
        return parallel_nsa(q, k, v, *gate.unbind(-1), **options)

    return Peer(attend, (*(given[name] for name in "qkv"), given["gate"].sigmoid()))

"""Attentions that choose where to look in PyTorch: the peers of `benchmarks.sparse_attention`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.harness.processes import Answer, stage, wait_for
from benchmarks.peers import linear_torch, triton_tuning
from benchmarks.peers.attention_torch import Peer, compiled_flex_attention
from benchmarks.peers.linear_torch import Case, Given, heads_first
from benchmarks.peers.torch_calls import DEVICE

N_SINKS = 4


def with_mask(visible: Callable[..., Any], given: Given) -> Peer:
    """FlexAttention to the pairs that `visible` shows, `[1, N, T, H]`."""
    length = given["q"].shape[1]
    mask = create_block_mask(visible, None, None, length, length, DEVICE, _compile=True)
    return Peer(functools.partial(compiled_flex_attention, block_mask=mask), heads_first(given))


def flex_longformer(given: Given, window: int, n_global: int) -> Peer:
    def visible(batch, head, query, key):
        near = (query - key).abs() <= window
        return near | (query < n_global) | (key < n_global)

    return with_mask(visible, given)


def flex_sinks(given: Given, window: int) -> Peer:
    def visible(batch, head, query, key):
        return (key <= query) & ((query - key < window) | (key < N_SINKS))

    return with_mask(visible, given)


class Instead(nn.Module):
    """In the place of a projection: the given vectors, or its input."""

    def __init__(self, x: torch.Tensor | None = None):
        super().__init__()
        self.x = x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.x is None else self.x).clone()  # it is divided in its place


def hugging_face(given: Given, window: int, n_global: int) -> Peer:
    """transformers' layer without its projections, whose input are queries."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    _, length, n_heads, size = given["q"].shape
    config = LongformerConfig(
        hidden_size=n_heads * size,
        num_attention_heads=n_heads,
        attention_window=[2 * window],
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, 0).to(DEVICE).eval()
    mask = torch.zeros(1, length, device=DEVICE, dtype=given["q"].dtype)
    mask[:, :n_global] = 10_000.0
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


def fla_moba(given: Given, block: int) -> Peer:
    parallel_moba = fla_with_flash_attn("moba").parallel_moba
    length = given["q"].shape[1]
    ends = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)

    def attend(q, k, v):
        return parallel_moba(q, k, v, ends, length, block, 3)

    return Peer(attend, tuple(given[name] for name in "qkv"))


def fla_nsa(given: Given, window: int, block: int, n_selected: int) -> Peer:
    """Its gates are ours that are half open."""
    parallel_nsa = fla_with_flash_attn("nsa").parallel_nsa
    gate = torch.full(given["q"].shape[:3], 0.5, device=DEVICE, dtype=given["q"].dtype)
    sizes = dict(block_counts=n_selected, block_size=block, window_size=window)

    def attend(q, k, v):
        return parallel_nsa(q, k, v, gate, gate, gate, **sizes)

    return Peer(attend, tuple(given[name] for name in "qkv"))


def case_of(name: str, window: int, block: int, n_global: int) -> Case:
    """The peer of this name."""
    stride = max(2, window // 16)
    of = functools.partial
    longformer = dict(window=window, n_global=n_global)
    native = dict(window=block, block=4 * stride, n_selected=min(16, stride))
    return {
        "transformers Longformer": Case("longformer", of(hugging_face, **longformer)),
        "FlexAttention, longformer": Case("longformer", of(flex_longformer, **longformer)),
        "FlexAttention, sinks": Case("sinks", of(flex_sinks, window=window)),
        "fla moba": Case("moba", of(fla_moba, block=block), agree=0.9),
        "fla nsa": Case("nsa, a mean a block", of(fla_nsa, **native), agree=0.9, triton=True),
    }[name]


def compile_and_check(
    name: str,
    index: int,
    n_compilers: int,
    folder: str,
    dtype: str,
    lengths: Sequence[int],
    n_known: int,
    limit: float,
    **sizes: int,
) -> Iterator[Answer]:
    """Compiles a peer, or its share of a peer's kernels, and checks it.

    What is compiled is kept on the disk.
    """
    case = case_of(name, **sizes)
    if case.triton:
        triton_tuning.compile_share(index, n_compilers)
    yield stage(f"{name}: wait for its numbers, {index}", 2 * limit)
    wait_for(Path(folder), case.of)
    yield stage(f"{name}: compile and check, {index}", limit)
    errors = linear_torch.first_check(case, folder, dtype)
    for length in lengths:
        yield stage(f"{name}: compile {length:,}, {index}", limit)
        linear_torch.timed(case, folder, dtype, length, n_known, repeats=1, most=0.0)
    yield {"name": name, "errors": errors}


def by_length(
    lengths: dict[str, Sequence[int]], window: int, block: int, n_global: int, **request: Any
) -> Iterator[Answer]:
    """The figures of peers, as `linear_torch.by_length` has them."""
    cases = {name: case_of(name, window, block, n_global) for name in lengths}
    return linear_torch.by_length(cases=cases, lengths=lengths, **request)

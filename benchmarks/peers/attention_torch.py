"""Attentions in PyTorch: the rows of `benchmarks.attention` and of `benchmarks.block_sparse`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.harness.calls import MIB, time_calls
from benchmarks.harness.processes import answers
from benchmarks.peers.torch_calls import DEVICE, wait

N_HASHES = 4
# Compiled whole or not at all: a graph that breaks would run uncompiled. Anew for each mask.
torch._dynamo.config.recompile_limit = 256
compiled_flex_attention = torch.compile(flex_attention, fullgraph=True, dynamic=False)


class Peer(NamedTuple):
    """An attention, `attend(*inputs)`, and its inputs, of which gradients are taken."""

    attend: Callable[..., Any]
    inputs: tuple[Any, ...]


def leaves(n: int, *size: int, dtype: str) -> tuple[Any, ...]:
    """`n` random arrays of which gradients can be taken."""
    options = dict(device=DEVICE, dtype=getattr(torch, dtype), requires_grad=True)
    return tuple(torch.randn(size, **options) for _ in range(n))


# By length.


def flex(size: Sequence[int], chunk_len: int, dtype: str) -> Peer:
    """FlexAttention over the blocks of local attention."""

    def own_and_previous_chunk(batch, head, query, key):
        return (key <= query) & (query // chunk_len - key // chunk_len <= 1)

    batch, length, n_heads, d_head = size
    mask = create_block_mask(
        own_and_previous_chunk, None, None, length, length, DEVICE, BLOCK_SIZE=chunk_len
    )
    attend = functools.partial(compiled_flex_attention, block_mask=mask)
    return Peer(attend, leaves(3, batch, n_heads, length, d_head, dtype=dtype))


def lucidrains(size: Sequence[int], chunk_len: int, dtype: str) -> Peer:
    """LSH attention of reformer_pytorch."""
    from reformer_pytorch import LSHAttention

    batch, length, n_heads, d_head = size
    layer = LSHAttention(bucket_size=chunk_len, n_hashes=N_HASHES, causal=True).to(DEVICE)
    inputs = leaves(2, batch * n_heads, length, d_head, dtype=dtype)
    return Peer(lambda qk, v: layer(qk, v)[0], inputs)


def hugging_face(size: Sequence[int], chunk_len: int, dtype: str) -> Peer:
    """LSH attention of transformers, whose layer projects its input itself."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    batch, length, n_heads, d_head = size
    (x,) = leaves(1, batch, length, n_heads * d_head, dtype=dtype)
    config = ReformerConfig(
        hidden_size=n_heads * d_head,
        num_attention_heads=n_heads,
        attention_head_size=d_head,
        num_hashes=N_HASHES,
        num_buckets=None,
        lsh_attn_chunk_length=chunk_len,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=length,
        is_decoder=True,
    )
    layer = LSHSelfAttention(config).to(x.device, x.dtype)
    return Peer(lambda x: layer(x).hidden_states, (x,))


def by_length(repeats: int, **request: Any) -> Iterator[dict[str, Any]]:
    """The rows of one length: its size `[B, T, N, H]`, chunk_len and dtype."""
    makers = {
        "torch FlexAttention, local": flex,
        "reformer_pytorch, LSH, 4 hashes": lucidrains,
        "transformers, LSH, 4 hashes, with projections": hugging_face,
    }

    def measured(make: Callable[..., Peer]) -> dict[str, Any]:
        return measure(make(**request), repeats)

    return answers({name: functools.partial(measured, make) for name, make in makers.items()})


# By mask.


def causal_pairs(batch, head, query, key):
    return key <= query


def blocks(mask: np.ndarray, causal: bool, shape: dict[str, Any]) -> Peer:
    """FlexAttention over the nonzero blocks; if causal, the diagonal cuts those that it crosses."""
    cut = mask & np.eye(len(mask), dtype=bool) if causal else np.zeros_like(mask)

    def listed(blocks):
        """The number of nonzero blocks in each row, and all blocks, nonzero ones first."""
        blocks = torch.as_tensor(blocks, device=DEVICE)[None, None]
        order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()

    block_mask = BlockMask.from_kv_blocks(
        *listed(cut),
        *listed(mask & ~cut),
        BLOCK_SIZE=shape["block_size"],
        mask_mod=causal_pairs if causal else None,
    )
    attend = functools.partial(compiled_flex_attention, block_mask=block_mask)
    size = 1, shape["n_heads"], shape["length"], shape["d_head"]
    return Peer(attend, leaves(3, *size, dtype=shape["dtype"]))


def by_mask(masks: str, shape: dict[str, Any], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of the masks in a file; a causal one's name ends so."""

    def measured(name: str, mask: np.ndarray) -> dict[str, Any]:
        return measure(blocks(mask, name.endswith("causal"), shape), repeats)

    return answers({n: functools.partial(measured, n, m) for n, m in np.load(masks).items()})


# Times.


def measure(peer: Peer, repeats: int, most: float = math.inf) -> dict[str, Any]:
    """Times of both passes and, on a GPU, the gradient's peak allocation less the gradient.

    most: seconds of the calls of a pass, as in `time_calls`.
    """

    def forward():
        with torch.no_grad():
            return peer.attend(*peer.inputs)

    d_out = torch.randn_like(forward())

    def gradient():
        return torch.autograd.grad(peer.attend(*peer.inputs), peer.inputs, d_out)

    passes = {"forward": forward, "gradient": gradient}
    result: dict[str, Any] = {
        n: time_calls(call, wait, repeats, most) for n, call in passes.items()
    }
    result["temp_mib"] = None
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = gradient()
        kept = sum(x.numel() * x.element_size() for x in results)
        peak = torch.cuda.max_memory_allocated() - before
        result["temp_mib"] = (peak - kept) / MIB
    return result

"""FlexAttention with the masks of `benchmarks.block_sparse`, in a process that it starts.

A request has all masks; each row is an answer, as soon as it is known.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.failures import attempt, reason
from benchmarks.harness.processes import serve
from benchmarks.peers.torch_calls import Peer, flex_attention, leaves, measure

compiled_once = functools.cache(flex_attention)


def causal_pairs(batch, head, query, key):
    return key <= query


def peer(mask: np.ndarray, causal: bool, shape: dict[str, Any]) -> Peer:
    """FlexAttention over the nonzero blocks; if causal, the diagonal cuts those that it crosses."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    compiled = compiled_once()
    size = 1, shape["n_heads"], shape["length"], shape["d_head"]
    inputs = leaves(3, *size, dtype=shape["dtype"])
    cut = mask & np.eye(len(mask), dtype=bool) if causal else np.zeros_like(mask)

    def listed(blocks):
        """The number of nonzero blocks in each row, and all blocks, nonzero ones first."""
        blocks = torch.as_tensor(blocks, device=inputs[0].device)[None, None]
        order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()

    blocks = BlockMask.from_kv_blocks(
        *listed(cut),
        *listed(mask & ~cut),
        BLOCK_SIZE=shape["block_size"],
        mask_mod=causal_pairs if causal else None,
    )
    return Peer(lambda q, k, v: compiled(q, k, v, block_mask=blocks), inputs)


def answer(
    masks: str, causal: Sequence[str], shape: dict[str, Any], repeats: int
) -> Iterator[dict[str, Any]]:
    """The rows of the masks in a file; one that fails has its error."""
    for name, mask in np.load(masks).items():

        def measured(name=name, mask=mask):
            return measure(peer(mask, name in causal, shape), repeats, profile=True)

        known = attempt(measured)
        yield {"name": name} | ({"error": reason(known)} if isinstance(known, Exception) else known)


if __name__ == "__main__":
    serve(answer)

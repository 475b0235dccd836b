"""FlexAttention with the masks of `benchmarks.block_sparse`, in a process of its own.

    python -m benchmarks.block_sparse --peers

starts it. It reads one request from stdin, as JSON, and writes a line of JSON for each mask. It
needs none of reformax.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attention_torch import Peer, answers_alone, leaves, measure
from benchmarks.measuring import reason

N_PROFILED = 10


def flex_attention() -> Callable[..., Any]:
    """FlexAttention, compiled whole or not at all: a graph that breaks would run uncompiled."""
    import torch
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False)


def causal_pairs(batch, head, query, key):
    return key <= query


def peer(compiled, mask: np.ndarray, causal: bool, shape: dict[str, Any]) -> Peer:
    """FlexAttention over the nonzero blocks; if causal, those on the diagonal are cut by it."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    size = 1, shape["n_heads"], shape["length"], shape["d_head"]
    inputs = leaves(3, *size, dtype=shape["dtype"])
    cut = mask & np.eye(len(mask), dtype=bool) if causal else np.zeros_like(mask)

    def listed(blocks):  # how many there are in each row, and these first
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


def device_ms(call: Callable[[], Any]) -> float | None:
    """Milliseconds of GPU that a call takes, all its kernels together."""
    import torch

    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(N_PROFILED):
            call()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return total / 1e3 / N_PROFILED


def times(one: Peer, repeats: int) -> dict[str, Any]:
    """Of both passes, by the profiler and by the median of calls waited for."""
    import torch

    result = measure(one, repeats)
    out = one.attend(*one.inputs)
    d_out = torch.randn_like(out)

    def forward():
        with torch.no_grad():
            return one.attend(*one.inputs)

    def gradient():
        return torch.autograd.grad(one.attend(*one.inputs), one.inputs, d_out)

    for name, call in (("forward", forward), ("gradient", gradient)):
        result[name] = device_ms(call), result[name].blocked
    return result


def main() -> None:
    request = json.loads(sys.stdin.readline())
    with answers_alone() as answers:
        compiled = attempt_import()
        for name, mask in np.load(request["masks"]).items():
            try:
                if isinstance(compiled, Exception):
                    raise compiled
                one = peer(compiled, mask, name in request["causal"], request["shape"])
                row = {"name": name, **times(one, request["repeats"])}
            except Exception as error:  # of any kind: the table has it, and the other rows
                traceback.print_exc()
                row = {"name": name, "error": reason(error)}
            print(json.dumps(row), file=answers, flush=True)


def attempt_import() -> Callable[..., Any] | Exception:
    try:
        return flex_attention()
    except ImportError as error:
        return error


if __name__ == "__main__":
    main()

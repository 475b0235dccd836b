"""Attentions in PyTorch as rows of a table: their inputs, times and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.harness.timing import Times, time_calls

MIB = 2**20
N_PROFILED = 10


class Peer(NamedTuple):
    """An attention, `attend(*inputs)`, and its inputs, of which gradients are taken."""

    attend: Callable[..., Any]
    inputs: tuple[Any, ...]


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def wait(_: Any = None) -> None:
    """Waits for the GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def leaves(n: int, *size: int, dtype: str) -> tuple[Any, ...]:
    """`n` random arrays of which gradients can be taken."""
    import torch

    options = dict(device=device(), dtype=getattr(torch, dtype), requires_grad=True)
    return tuple(torch.randn(size, **options) for _ in range(n))


def flex_attention() -> Callable[..., Any]:
    """FlexAttention, compiled whole or not at all: a graph that breaks would run uncompiled."""
    import torch
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False)


def measure(peer: Peer, repeats: int, profile: bool = False) -> dict[str, Any]:
    """Times of both passes and, on a GPU, the gradient's peak allocation less the gradient.

    Args:
      peer: the attention.
      repeats: how many calls are waited for one by one.
      profile: whether the first time is the device's, on a GPU, and the second one that of calls
        waited for one by one.
    """
    import torch

    def forward():
        with torch.no_grad():
            return peer.attend(*peer.inputs)

    d_out = torch.randn_like(forward())

    def gradient():
        return torch.autograd.grad(peer.attend(*peer.inputs), peer.inputs, d_out)

    def timed(call: Callable[[], Any]) -> Times:
        times = time_calls(call, wait, repeats)
        return Times(device_ms(call), times.ms) if profile and device() == "cuda" else times

    result: dict[str, Any] = {"forward": timed(forward), "gradient": timed(gradient)}
    result["temp_mib"] = None
    if device() == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = gradient()
        kept = sum(x.numel() * x.element_size() for x in results)
        peak = torch.cuda.max_memory_allocated() - before
        result["temp_mib"] = (peak - kept) / MIB
    return result


def device_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of GPU that a call takes, the sum of its kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(N_PROFILED):
            call()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return total / 1e3 / N_PROFILED

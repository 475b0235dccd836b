"""A peer in PyTorch: an attention, its inputs, and the sizes that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Given = Mapping[str, torch.Tensor]  # the inputs and weights of our row, by name


class Peer(NamedTuple):
    """An attention, `attend(*inputs)`, and its inputs, of which gradients are taken."""

    attend: Callable[..., Any]
    inputs: tuple[Any, ...]


class Sizes(NamedTuple):
    """What `benchmarks.rows.attention.algorithms` makes of a shape's `block` and `n_global`."""

    block: int
    n_global: int

    @property
    def window(self) -> int:
        return self.block // 2

    @property
    def chunk_len(self) -> int:
        return self.block // 4

    @property
    def pattern_block(self) -> int:
        return max(16, self.chunk_len)

    @property
    def stride(self) -> int:
        return max(2, self.window // 16)


def heads_first(given: Given) -> tuple[torch.Tensor, ...]:
    """q, k and v as `[1, N, T, H]`."""
    return tuple(given[name].transpose(1, 2) for name in "qkv")

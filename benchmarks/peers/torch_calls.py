"""Calls of PyTorch: where they run, and how they end."""

from __future__ import annotations

from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait(_: Any = None) -> None:
    """Waits for the GPU, where there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()

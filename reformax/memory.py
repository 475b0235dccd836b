"""The memory of the machine, and an error before something that it cannot hold is computed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

from reformax.declared import SettingError

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def available() -> int:
    """The bytes of a device: those that its allocator may take, or this host's for a CPU."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit") or 2**63
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP.read_text().strip() if _CGROUP.is_file() else "max"  # a container's
    return min(host, int(limit)) if limit.isdigit() else host


def size_of(tree: Any) -> int:
    """The bytes of a tree of arrays, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check(what: str, n_bytes: int, fix: str) -> None:
    """Raises `SettingError` for something that takes more bytes than a device has.

    Args:
      what: the thing in words, in the plural.
      n_bytes: the least that it takes.
      fix: the settings to lower.
    """
    most = available()
    if n_bytes > most:
        raise SettingError(
            f"{what} take {words(n_bytes)} or more and the device has {words(most)}: lower {fix}"
        )


def words(n_bytes: int) -> str:
    """A number of bytes, for people."""
    return f"{n_bytes / 2**30:,.1f} GiB"

"""The memory of the machine, and an error before something that it cannot hold is computed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reformax.declared import SettingError

# Where cgroups are, and those of this process: a line `number:controllers:path` each.
_CGROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available() -> int:
    """The bytes of a device: those that its allocator may take, or `host` for a CPU."""
    import jax  # here, for `host` is asked by what needs no JAX

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit") or 2**63
    return host()


def host() -> int:
    """The bytes that this process may take: the machine's, cgroups' and `ulimit -v`, the least."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ulimits = [resource.getrlimit(x)[0] for x in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [x for x in ulimits if x != resource.RLIM_INFINITY]
    return min([installed, *limits, *_cgroup_limits()])


def give_back() -> None:
    """Returns to the system what this process has freed.

    Objects that refer to each other are freed once Python looks for such, which it does when others
    have been made. glibc keeps freed memory between blocks that are in use.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _cgroup_limits() -> Iterator[int]:
    """The limits of this process's cgroup, of versions 2 and 1, and of those that it is in.

    A container sees its own cgroup as the root, whatever the path says.
    """
    try:
        lines = [line.split(":", 2) for line in _OF_PROCESS.read_text().splitlines()]
    except OSError:
        lines = []
    places = [(_CGROUPS, "memory.max", ""), (_CGROUPS / "memory", "memory.limit_in_bytes", "")]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            places += [(_CGROUPS / x, "memory.max", path) for x in ("", "unified")]
        elif "memory" in controllers.split(","):
            places.append((_CGROUPS / "memory", "memory.limit_in_bytes", path))
    for root, name, path in places:
        steps = Path(path.strip("/"))
        for folder in (root / steps, *(root / parent for parent in steps.parents)):
            try:
                limit = (folder / name).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():
                yield int(limit)


def peak() -> int:
    """The most bytes of memory that this process has had, files that it has mapped among them."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_peak() -> int | None:
    """The most bytes that arrays have taken of a device; None: it is a CPU, whose are `peak`'s."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def peaks_in_words() -> str:
    """Both, for people."""
    of_device = device_peak()
    of_device = "" if of_device is None else f", of a device {of_device / 2**20:,.0f} MiB"
    return f"at most {peak() / 2**20:,.0f} MiB of the process{of_device}"


def size_of(tree: Any) -> int:
    """The bytes of a tree of arrays, or of their shapes."""
    import jax

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
    if n_bytes >= 2**30:
        return f"{n_bytes / 2**30:,.1f} GiB"
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:,.0f} KiB"

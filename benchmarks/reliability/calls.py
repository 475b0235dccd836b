"""The file system calls of a process under one folder, those of C++ libraries too.

`calls.c` is preloaded: it stands before the C library, writes each call to a log, and lets one of
them fail or end in a signal. strace does the same at many times the cost.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

NAMES = ("open", "read", "write", "fsync", "rename", "mkdir", "unlink")
SOURCE = Path(__file__).with_name("calls.c")


class Call(NamedTuple):
    """A call that was made.

    Attributes:
      time: when it began, in seconds of the monotonic clock.
      name: 'open' for writing, 'read' for opening to read, 'write', 'fsync', 'rename', 'mkdir' or
        'unlink'; each also stands for its relatives, as 'write' for pwritev.
      path: in the folder that is watched; of a rename the new one.
    """

    time: float
    name: str
    path: str


class Strike(NamedTuple):
    """What happens at a call.

    Attributes:
      calls: the names of the calls that count, with commas between them.
      pattern: of their paths; `*` also matches slashes.
      at: which of these calls, from 1.
      error: the errno that it fails with; 0 for a signal.
      count: how many calls fail, from that one on.
      signal: sent `delay` seconds after the call began.
      half: whether a write writes the first half before the signal.
    """

    calls: str
    pattern: str
    at: int
    error: int = 0
    count: int = 1
    signal: int = 0
    delay: float = 0.0
    half: bool = False


def build(folder: Path) -> Path:
    """Compiles the library into `folder`.

    Raises:
      OSError: this machine has no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler: install cc, or run this on a machine that has one")
    library = folder / "calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def watch(folder: Path, log: Path | None, strike: Strike | None) -> None:
    """Begins to watch `folder` in this process, which has the library preloaded."""
    library = ctypes.CDLL(None)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log_fd = -1 if log is None else os.open(log, flags, 0o644)
    if strike is not None:
        library.calls_strike(
            strike.calls.encode(),
            strike.pattern.encode(),
            ctypes.c_long(strike.at),
            ctypes.c_long(strike.count),
            strike.error,
            int(strike.signal),
            ctypes.c_long(int(strike.delay * 1e6)),
            int(strike.half),
        )
    library.calls_watch(os.fsencode(folder.resolve()), log_fd)


def read_log(log: Path) -> list[Call]:
    """The calls that a process made, in their order."""
    lines = log.read_text(errors="replace").splitlines()
    return [Call(float(time), *rest) for time, *rest in (line.split("\t") for line in lines)]

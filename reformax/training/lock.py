"""One training at a time in a folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reformax import durable

FILE = ".lock"


class Lost(OSError):
    """The folder is no longer this training's: it or its lock was deleted or replaced."""


def raise_if_lost(check: Callable[[], None]) -> None:
    """Raises `Lost` of `check`, and no other error of it."""
    try:
        check()
    except Lost:
        raise
    except Exception:
        pass


class Lock:
    """A lock that is held."""

    def __init__(self, folder: Path, descriptor: int):
        self._folder, self._descriptor = folder, descriptor

    def check(self) -> None:
        """Returns if the folder still has the file that is locked.

        A lock holds a file, not its name: where the file was deleted another training can begin.

        Raises:
          Lost: the file was deleted or replaced, alone or with the folder.
          OSError: that is unknown, as the folder cannot be read.
        """
        path = self._folder / FILE
        try:
            with durable.explaining("read", path):
                there = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._descriptor)):
            what = "was deleted" if there is None else "is another training's now"
            raise Lost(
                f"{path} {what} while this training ran, so nothing more is saved in "
                f"output_dir={self._folder}: leave a run's folder as it is until the run has "
                "stopped, then run again"
            )


@contextmanager
def alone_in(folder: Path, say: Callable[[str], None] = print) -> Iterator[Lock]:
    """Holds `folder`'s lock while the context is open.

    The operating system frees the lock (`flock`) when its process ends, even if it is killed. The
    file itself stays and names the last holder.

    Args:
      folder: a run's folder.
      say: gets a note if the file system has no locks and nothing keeps others out.

    Raises:
      OSError: another training holds it, in this process or another; or it cannot be opened.
    """
    # NFS locks only files opened for writing.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with durable.explaining("opened", folder / FILE):
        descriptor = os.open(folder / FILE, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{folder / FILE} is no regular file: delete it, then run again")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise OSError(
                f"output_dir={folder} is in use by another training "
                f"({holder or 'another process'}): stop that one first, or give another "
                "--output_dir"
            ) from None
        except OSError as error:
            say(
                f"note: output_dir={folder} has no locks ({error.strerror}): run one training in it"
            )
        else:
            _name_holder(descriptor)
        lock = Lock(folder, descriptor)
        lock.check()
        yield lock
    finally:
        os.close(descriptor)


def _name_holder(descriptor: int) -> None:
    """Writes who holds the lock, for the error of others; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

"""One training at a time in a folder, by a lock that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".lock"


@contextmanager
def alone_in(folder: Path, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds `folder`'s lock while the context is open.

    The operating system holds it (`flock`): it is free as soon as its process has ended, however
    that came about. The file itself stays, and says who had it last.

    Args:
      folder: a run's folder.
      say: gets a note where the file system has no locks, and nothing keeps others out.

    Raises:
      OSError: another training holds it, in this process or any other.
    """
    # Opened for writing, which NFS asks of an exclusive lock; not cut, for it may be another's.
    with open(folder / FILE, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise OSError(
                f"output_dir={folder} is in use by another training ({holder}): stop that one "
                "first, or give another --output_dir"
            ) from None
        except OSError as error:
            say(
                f"note: output_dir={folder} has no locks ({error.strerror}): run one training in it"
            )
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield

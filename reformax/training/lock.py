"""One training at a time in a folder: a lock that ends with the process that holds it."""

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

    The operating system frees the lock (`flock`) when its process ends, even if it is killed. The
    file itself stays and names the last holder.

    Args:
      folder: a run's folder.
      say: gets a note if the file system has no locks and nothing keeps others out.

    Raises:
      OSError: another training holds it, in this process or another.
    """
    # NFS locks only files opened for writing. Not truncated: the holder's name may be in it.
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

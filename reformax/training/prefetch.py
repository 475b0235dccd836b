"""Prepares the next values while the device is busy with this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_END = object()


@contextmanager
def prefetch(values: Iterable[T], ahead: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over `values` in a thread, at most `ahead` values before the reader.

    An exception in the thread is raised where the reader would have got the value. Leaving the
    context ends the thread, even if values are left.
    """
    ready: queue.Queue = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def put(item) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work():
        try:
            for value in values:
                if not put((value, None)):
                    return
            put((_END, None))
        except BaseException as error:  # only the reader can act on it
            put((None, error))

    def read():
        while True:
            value, error = ready.get()
            if error is not None:
                raise error
            if value is _END:
                return
            yield value

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield read()
    finally:
        closed.set()
        thread.join()

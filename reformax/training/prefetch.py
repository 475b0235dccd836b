"""Prepares the next values while the device is busy with this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

T = TypeVar("T")
_END = object()


@contextmanager
def prefetch(values: Iterable[T], ahead: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over `values` in a thread, at most `ahead` values before the reader.

    An exception in the thread is raised where the reader would have got the value. Leaving the
    context ends the thread, even if values are left.
    """
    iterator, room, closed = iter(values), Semaphore(ahead), Event()
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def work() -> None:
        done = False
        while not done and room.acquire() and not closed.is_set():
            try:
                item = next(iterator, _END), None
            except BaseException as error:  # only the reader can act on it
                item = _END, error
            done = item[0] is _END
            ready.put(item)
            del item  # the reader's alone

    def read() -> Iterator[T]:
        while True:
            value, error = ready.get()
            if error is not None:
                raise error
            if value is _END:
                return
            room.release()
            yield value

    # A daemon: where no value ever comes, a second interrupt ends the process.
    thread = Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield read()
    finally:
        closed.set()
        room.release()
        thread.join()

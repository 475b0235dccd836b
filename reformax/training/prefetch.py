"""Prepares the next values while the device is busy with this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    iterator, thread = iter(values), ThreadPoolExecutor(1, "prefetch")
    ready = deque(thread.submit(next, iterator, _END) for _ in range(ahead))

    def read() -> Iterator[T]:
        while (value := ready.popleft().result()) is not _END:
            ready.append(thread.submit(next, iterator, _END))
            yield value

    try:
        yield read()
    finally:
        thread.shutdown(cancel_futures=True)

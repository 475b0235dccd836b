"""Failures as values: a row that fails leaves the other rows to go on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


class PeerError(Exception):
    """A failure in another process, described by that process."""


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function(*args)`, or the exception that it raised.

    The traceback goes to stderr, except a missing package's, and is then dropped: its frames would
    keep arrays alive.
    """
    try:
        return function(*args)
    except Exception as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        return error.with_traceback(None)


def reason(error: Exception) -> str:
    """An exception in one short line that fits a cell of a Markdown table."""
    if isinstance(error, PeerError):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    # Some messages begin with where a layer was made; all end with what happened.
    return text if len(text) < 160 else f"{text[:60]} ... {text[-95:]}"

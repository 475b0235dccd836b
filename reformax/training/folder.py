"""A run's folder: it can be written, and its config.gin is the run's."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reformax import durable
from reformax.declared import user_path
from reformax.training import lock


@contextmanager
def output_folder(path: str | os.PathLike) -> Iterator[Path]:
    """The folder, made if need be. An error leaves no new folder in which no run has begun.

    Raises:
      OSError: nothing can be written there.
    """
    folder = user_path("output_dir", path)
    made = [x for x in (folder, *folder.parents) if not os.path.exists(x)]
    try:
        yield make_output_dir(path)
    except BaseException:
        if made:
            _unmake(folder, made)
        raise


def _unmake(folder: Path, made: list[Path]) -> None:
    """Deletes a folder that has a lock at most, which nobody else holds, and those above it."""
    with suppress(OSError):
        if set(os.listdir(folder)) <= {lock.FILE}:
            with lock.alone_in(folder, lambda _: None):
                (folder / lock.FILE).unlink()
            for path in made:
                path.rmdir()


def make_output_dir(path: str | os.PathLike) -> Path:
    """Makes the folder if need be; raises OSError in one line if nothing can be written there."""
    folder = user_path("output_dir", path)
    try:
        durable.make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir={folder} cannot be written ({error.strerror}): give a folder of your own "
            "with --output_dir"
        ) from None
    return folder


def write_config(folder: Path, text: str, say: Callable[[str], None]) -> None:
    """Writes config.gin and says which settings changed since the last run in this folder."""
    path = folder / "config.gin"
    try:
        before = durable.read(path).decode(errors="replace")
    except FileNotFoundError:
        before = text
    changes = [
        line
        for line in difflib.ndiff(before.splitlines(), text.splitlines())
        if line[:2] in ("- ", "+ ") and line[2:].strip() and not line[2:].startswith("#")
    ]
    if changes:
        say("settings changed since the last run in this folder (- before, + now):")
        say("\n".join(changes))
    durable.write(path, text.encode())

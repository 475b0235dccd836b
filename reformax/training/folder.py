"""A run's folder: it can be written, and its config.gin is the run's."""

from __future__ import annotations

import difflib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reformax import durable
from reformax.declared import SettingError
from reformax.shell import user_path
from reformax.training import array_reader, lock
from reformax.training.processes import Processes

TOGETHER = ".processes"  # there while several processes look whether they see one folder
_seen: set[Path] = set()  # by this process and all others
_SEEN = 10.0  # seconds for a shared disk to show it
# Settings of what a run says: nothing that it computes goes by them.
OF_WORDS = ("loop.train.config_text", "loop.train.progress")


@contextmanager
def output_folder(path: str | os.PathLike) -> Iterator[Path]:
    """The folder, made if need be. An error leaves no new folder in which no run has begun.

    Raises:
      OSError: nothing can be written there.
    """
    folder = user_path("output_dir", path)
    made = [x for x in (folder, *folder.parents) if not os.path.exists(x)]
    try:
        folder = make_output_dir(path)
        _see_together(folder, Processes.of_jax())
        yield folder
    except BaseException:
        if made:
            _unmake(folder, made)
        raise


def _see_together(folder: Path, processes: Processes) -> None:
    """Raises `SettingError` in a process that does not see what process 0 writes into its folder.

    They may know the folder of a shared disk by other paths. A folder is looked at once: a script
    does so before the data is read, and the run in it need not do it again.
    """
    file = folder / TOGETHER
    if processes.count == 1 or file in _seen:
        return
    _seen.add(file)
    token = processes.broadcast(lambda: secrets.token_hex(8))

    def look() -> None:
        end = time.monotonic() + _SEEN
        while not file.is_file() or durable.read(file) != token.encode():
            if time.monotonic() > end:
                raise SettingError(
                    f"output_dir={folder} is not the folder of process 0: give all processes the "
                    "same folder, on a disk that all of them see"
                )
            time.sleep(0.1)

    try:
        processes.by_first(lambda: durable.write(file, token.encode()))
        processes.by_all(look)
    finally:
        if processes.first:
            with suppress(OSError):
                file.unlink()


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
    folder = _named(path)
    try:
        durable.make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error.strerror) from None
    return folder


def check_output_dir(path: str | os.PathLike) -> None:
    """Raises as `make_output_dir`, and makes nothing."""
    folder = _named(path)
    there = next(x for x in (folder, *folder.absolute().parents) if os.path.lexists(x))
    if not there.is_dir():
        raise _unwritable(folder, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"no right to write into {there}")


def _unwritable(folder: Path, why: str | None) -> OSError:
    return OSError(
        f"output_dir={folder} cannot be written ({why}): give a folder of your own with "
        "--output_dir"
    )


def _named(path: str | os.PathLike) -> Path:
    """The folder of this name; raises `SettingError` for one that no checkpoint can be in."""
    folder = user_path("output_dir", path)
    if not array_reader.can_be_plain(folder.absolute()):
        raise SettingError(
            f"output_dir={path} is {folder.absolute()}, and without /proc no checkpoint can be "
            "written there: give one of letters, digits and . , = + @ - _ alone"
        )
    return folder


def tell_changes(folder: Path, text: str, used: bool, say: Callable[[str], None]) -> None:
    """Says which settings changed since the last run in this folder.

    Args:
      folder: the run's.
      text: its config.
      used: whether anything is computed by it.
      say: gets the lines.
    """
    before = _saved_config(folder)
    if before is None:
        return
    changes = [
        line
        for line in difflib.ndiff(before.splitlines(), text.splitlines())
        if line[:2] in ("- ", "+ ")
        and line[2:].strip()
        and not line[2:].startswith(("#", *OF_WORDS))
    ]
    if changes:
        stays = "" if used else ", which no step is left to train with: config.gin stays"
        say(f"settings changed since the last run in this folder (- before, + now){stays}:")
        say("\n".join(changes))


def write_config(folder: Path, text: str, used: bool) -> str:
    """Writes config.gin; returns what it holds.

    Without anything `used`, a config.gin that is there stays: the weights and scores are of that.
    """
    before = _saved_config(folder)
    if not used and before is not None:
        return before
    durable.write(folder / "config.gin", text.encode())
    return text


def _saved_config(folder: Path) -> str | None:
    try:
        return durable.read(folder / "config.gin").decode(errors="replace")
    except FileNotFoundError:
        return None

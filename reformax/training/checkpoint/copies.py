"""Copies of checkpoints in another folder: another disk's, or `s3://BUCKET/RUN` by epath.

An object store has no rename, no lock and no fsync, and orbax 0.12 writes to `gs://` alone. So
training saves on its disk, with all promises, and copies what is whole. There `manifest.json` comes
last and goes first: a folder without it is no checkpoint. They are one run's; see `ownership`.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from reformax import durable
from reformax.declared import SettingError
from reformax.durable import user_path
from reformax.training import description, manifest
from reformax.training.checkpoint import ownership
from reformax.training.processes import Processes

_BLOCK = 2**22
_STORES = ("s3://", "gs://", "az://", "hf://")


class Copies:
    """The copies of a run's checkpoints, which its processes write and read together."""

    def __init__(self, address: str, processes: Processes):
        """Takes the address of a folder.

        Raises:
          SettingError: of a kind of store that epath does not know.
        """
        from etils import epath

        if "://" in address and not address.startswith(_STORES):
            raise SettingError(
                f"checkpoint_copies={address} must be a folder or begin with {', '.join(_STORES)}"
            )
        self.address, self._processes = address, processes
        self._local = None
        if "://" not in address:
            self._local = user_path("checkpoint_copies", address).absolute()
        self._folder = epath.Path(self._local or address)

    def refuse(self, folder: Path) -> None:
        """Raises `SettingError` if the copies would lie among the checkpoints of this folder."""
        if self._local is not None and self._local.resolve() == folder.resolve():
            raise SettingError(
                f"checkpoint_copies={self.address} is the folder of the run's own checkpoints: "
                "give another one"
            )

    def check_owner(self, folder: Path) -> None:
        """Raises `Others` if these are copies of another run than that of a folder of checkpoints.

        A store that cannot be read refuses nothing: training needs none.
        """

        def check() -> None:
            try:
                ownership.check(self._folder, folder, self.address)
            except ownership.Others:
                raise
            except Exception:  # of any store's library
                pass

        self._processes.by_first(check)

    def steps(self) -> list[int]:
        """The steps of those that are whole, ascending."""
        if not self._folder.exists():
            return []
        names = [path.name for path in self._folder.iterdir() if path.name.isdecimal()]
        return sorted(int(x) for x in names if (self._folder / x / manifest.FILE).exists())

    def listed(self) -> list[int]:
        """`steps`; raises `OSError`, in one line, where the folder cannot be read."""
        try:
            return self.steps()
        except Exception as error:  # of any store's library
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> OSError:
        return OSError(
            f"checkpoint_copies={self.address} cannot be read ({in_words(error)}): give a "
            "folder that this machine reaches, and install its package, such as s3fs or gcsfs"
        )

    def send(self, folder: Path, step: int, kept: list[int]) -> None:
        """Copies a checkpoint; then deletes the copies of all steps but those of `kept`.

        On a full disk these go first, all but the newest, and the checkpoint is copied after that.

        Raises:
          Others: these are copies of another run.
          Exception: of the store's library. Nothing is left of the copy, and those of `kept` and
            the newest are as they were.
        """

        def claim() -> None:
            ownership.claim(self._folder, folder.parent, self.address, self._local)

        together = self._processes
        together.by_first(claim)
        try:
            self._send(folder, step)
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            if not together.broadcast(lambda: number in durable.FULL):  # each has an error
                raise
            together.by_first(lambda: self._delete_others({*kept, *self.steps()[-1:]}))
            self._send(folder, step)
        together.by_first(lambda: self._delete_others(kept))

    def _delete_others(self, kept: Collection[int]) -> None:
        """Deletes the copies of other steps than these."""
        for path in list(self._folder.iterdir()):
            gone = path.name.isdecimal() and int(path.name) not in kept
            if gone and any((path / x).exists() for x in (manifest.FILE, description.FILE)):
                self._delete(path)

    def _send(self, folder: Path, step: int) -> None:
        """Copies a checkpoint; raises as `send`."""
        there, together = self._folder / str(step), self._processes
        together.by_first(lambda: self._delete(there))

        def send() -> None:
            for name in self._mine(manifest.names(folder)):
                (there / name).parent.mkdir(parents=True, exist_ok=True)
                with open(folder / name, "rb") as source, (there / name).open("wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK)

        def end() -> None:
            (there / manifest.FILE).write_bytes((folder / manifest.FILE).read_bytes())

        def leave_nothing() -> None:
            with suppress(Exception):  # of a store that nothing can be deleted from either
                self._delete(there)

        try:
            together.by_all(send)
            together.by_first(end)
        except Exception:
            together.by_first(leave_nothing)
            raise

    def _fetch(self, step: int, folder: Path) -> None:
        """Copies a checkpoint back into a new folder.

        Its manifest says later whether it is whole.
        """
        there = self._folder / str(step)

        def names() -> list[str]:
            return sorted(manifest.listed((there / manifest.FILE).read_bytes()))

        def fetch() -> None:
            for name in self._mine(set(found)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with (there / name).open("rb") as source, durable.new_file(folder / name) as target:
                    shutil.copyfileobj(source, target, _BLOCK)
            manifest.flushed(folder, lambda name: False)

        found = self._processes.broadcast(names)
        self._processes.by_all(fetch)
        self._processes.by_first(
            lambda: durable.write(folder / manifest.FILE, (there / manifest.FILE).read_bytes())
        )

    def fetch_all(self, folder: Path) -> list[str]:
        """Copies the whole checkpoints back into a run's folder of checkpoints, which has none.

        Returns:
          A line for each damaged copy, which is left out.

        Raises:
          OSError: the copies cannot be read, or all are damaged.
        """
        together = self._processes

        def make(temporary: Path) -> None:
            durable.make_folder(folder)
            durable.remove(temporary)
            temporary.mkdir()

        def name(step: int) -> None:
            durable.rename(folder / f"tmp.{step}", folder / str(step))

        fetched, notes, damaged = [], [], None
        try:
            for step in together.broadcast(self.steps):
                temporary = folder / f"tmp.{step}"
                together.by_first(partial(make, temporary))
                try:
                    self._fetch(step, temporary)
                    fetched.append(step)
                except manifest.Damaged as error:
                    damaged = error
                    notes.append(f"the copy {step} in {self.address} is left out: {error}")
            if damaged is not None and not fetched:
                raise damaged
            if fetched:
                together.by_first(lambda: ownership.follow(self._folder, folder))
            # A run that is killed here goes on from the newest, or fetches all again.
            for step in reversed(fetched):
                together.by_first(partial(name, step))
        except Exception as error:  # of any store's library
            together.by_first(lambda: self._leave_no_part(folder))
            if isinstance(error, OSError) and error.errno in durable.FULL:
                raise durable.explained(error, "written", folder) from error
            raise self._unreadable(error) from error
        return notes

    def _leave_no_part(self, folder: Path) -> None:
        """Deletes what is fetched in part, or has no name yet."""
        for path in folder.glob("tmp.*"):
            shutil.rmtree(path, ignore_errors=True)

    def _mine(self, names: set[str]) -> list[str]:
        """The files that this process copies."""
        others = sorted(names - {manifest.FILE})
        return others[self._processes.index :: self._processes.count]

    def _delete(self, folder: Any) -> None:
        if (folder / manifest.FILE).exists():
            (folder / manifest.FILE).unlink()
        if folder.exists():
            folder.rmtree()


def in_words(error: Exception) -> str:
    """An error of any library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

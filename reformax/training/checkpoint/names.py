"""The names in a run's folder of checkpoints: steps, and what is written, replaced or kept."""

from __future__ import annotations

import os
from pathlib import Path

from reformax import durable

OLD = "tmp.old."


class Names:
    """The folders of a run's checkpoints by their names.

    Attributes:
      folder: DIR/checkpoints.
    """

    def __init__(self, output_dir: str | os.PathLike):
        """Takes a run's folder, which need not exist."""
        self.folder = Path(output_dir).absolute() / "checkpoints"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending.

        Raises:
          OSError: the folder cannot be read.
        """
        names = [name for name in self._names() if name.isascii() and name.isdecimal()]
        # Others, such as 007, are no name that a checkpoint gets.
        steps = {int(name) for name in names if len(name) < 19 and name == str(int(name))}
        return sorted({*steps, *self._renamed()})

    def _names(self) -> list[str]:
        try:
            with durable.explaining("read", self.folder):
                return os.listdir(self.folder)
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise OSError(
                    f"{self.folder} is a link to a folder that is not there: mount its disk"
                ) from None
            return []

    def _named(self, prefix: str) -> list[Path]:
        return [self.folder / name for name in self._names() if name.startswith(prefix)]

    def _renamed(self) -> dict[int, Path]:
        """Checkpoints that were about to be replaced when a run was killed."""
        return {
            int(step): old
            for old in self._named(OLD)
            if (step := old.name.removeprefix(OLD)).isdecimal()
            and not os.path.lexists(self.folder / step)
            and not old.is_symlink()
        }

    def _folder(self, step: int) -> Path:
        folder = self.folder / str(step)
        return folder if os.path.lexists(folder) else self._renamed().get(step, folder)

    def _unused(self, name: str) -> Path:
        path, n = self.folder / name, 1
        while os.path.lexists(path):
            n += 1
            path = self.folder / f"{name}.{n}"
        return path

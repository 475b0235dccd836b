"""The names in a run's folder of checkpoints: steps, and what is written, replaced or kept."""

from __future__ import annotations

import os
from pathlib import Path

from reformax import durable

OLD = "tmp.old."


class CheckpointNames:
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
        names = [name for name in self._entries() if name.isascii() and name.isdecimal()]
        # Others, such as 007, are no name that a checkpoint gets.
        steps = {int(name) for name in names if len(name) < 19 and name == str(int(name))}
        return sorted({*steps, *self.renamed()})

    def _entries(self) -> list[str]:
        """Every name in the folder; none where there is no folder, or a file in its place."""
        try:
            with durable.explaining("read", self.folder):
                return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            if self.folder.is_symlink():
                raise OSError(
                    f"{self.folder} is a link to a folder that is not there: mount its disk"
                ) from None
            return []

    def starting_with(self, prefix: str) -> list[Path]:
        """The paths of the names that start so."""
        return [self.folder / name for name in self._entries() if name.startswith(prefix)]

    def renamed(self) -> dict[int, Path]:
        """Checkpoints that were about to be replaced when a run was killed."""
        return {
            int(step): old
            for old in self.starting_with(OLD)
            if (step := old.name.removeprefix(OLD)).isdecimal()
            and not os.path.lexists(self.folder / step)
            and not old.is_symlink()
        }

    def of_step(self, step: int) -> Path:
        """The folder of a checkpoint, which need not exist."""
        folder = self.folder / str(step)
        return folder if os.path.lexists(folder) else self.renamed().get(step, folder)

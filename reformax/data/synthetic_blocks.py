"""Examples with labels that are drawn, many at once: a block stays in memory, and in a file.

Letters in the shapes: n examples, L tokens of a row or pixels of an image.
"""

from __future__ import annotations

import functools
import io
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from reformax import durable
from reformax.data.base import SPLITS
from reformax.data.rng import philox
from reformax.declared import SettingError
from reformax.shell import user_path


class Block(NamedTuple):
    """Examples, and their classes."""

    rows: UInt8[np.ndarray, "n L"]
    classes: UInt8[np.ndarray, " n"]


def synthetic_blocks(
    draw: Callable[[np.random.Generator], Block],
    size: int,
    data_seed: int,
    stem: str,
    cache_dir: str | os.PathLike | None,
) -> Callable[[str, Int[np.ndarray, " n"]], Block]:
    """A function from a split and numbers to these examples.

    Block b of a split has the numbers from `size * b` on, and is a function of (data_seed, split,
    b). What was read stays in memory. Several processes may fill one folder, of several machines
    too.

    Args:
      draw: draws a block.
      size: examples of a block.
      data_seed: of all blocks.
      stem: how the names of files begin: all that `draw` goes by.
      cache_dir: a folder to keep blocks in, compressed. None: they are in memory alone.

    Raises:
      ValueError: cache_dir is a file; by the function, for a file that is damaged.
      OSError: by the function, for a folder that cannot be read or written.
    """

    folder = None if cache_dir is None else user_path("cache_dir", cache_dir)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise SettingError(
            f"cache_dir is {folder}, which is no folder: give the name of one to keep examples in"
        )

    @functools.cache
    def block(split: str, number: int) -> Block:
        def drawn() -> Block:
            return draw(philox(2**63 + data_seed, 2**32 * SPLITS.index(split) + number))

        if folder is None:
            return drawn()
        path = folder / f"{stem}_{data_seed}_{split}_{number}.npz"
        if path.exists():
            return _read(path, size)
        _write(path, found := drawn())
        return found

    def examples(split: str, numbers: Int[np.ndarray, " n"]) -> Block:
        found = [(block(split, int(i) // size), int(i) % size) for i in numbers]
        return Block(*(np.stack([part[k][i] for part, i in found]) for k in range(2)))

    return examples


def _write(path: Path, block: Block) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **block._asdict())
    # Others may write the same, those of other machines too: each has a name of its own.
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.npz")
    with durable.explaining("written", path.parent):
        durable.make_folder(path.parent)
        durable.write(temporary, file.getvalue())
        durable.rename(temporary, path)


def _read(path: Path, size: int) -> Block:
    data = io.BytesIO(durable.read(path))
    try:
        with np.load(data, allow_pickle=False) as found:
            block = Block(**{name: found[name] for name in Block._fields})
        whole = all(len(x) == size and x.dtype == np.uint8 for x in block)
    except Exception:  # zipfile and NumPy raise ten types of them
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: delete it, and it is drawn again")
    return block

"""Images as bytes, pixel by pixel: red, green and blue, row after row.

Van den Oord et al. 2016, "Pixel Recurrent Neural Networks", model the 64 x 64 x 3 = 12,288 bytes of
downsampled ImageNet; Kitaev et al. 2020, "Reformer", section 5, its 12,288 positions at once. Bits
per dim are those of a byte.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import UInt8

from reformax.data import files
from reformax.data.base import SPLITS, fingerprint, language_model
from reformax.data.checks import check_fixed_length, check_sizes, check_split
from reformax.data.rng import generator
from reformax.data.splits import IMAGES, By, choose
from reformax.declared import Bounds, Name, PathName, SettingError, checked
from reformax.task import Batch, Task

Side = Annotated[int, Bounds(1, 1024)]
CHANNELS = 3
# Of ten images in the order of their names; the others are trained on.
_HELD_OUT = {"valid": 8, "test": 9}
_MOST_PIXELS = 2**26


@checked
def images(
    data_dir: PathName | None = None,
    side: Side = 64,
    pattern: Name = "*",
    tiles: bool = False,
    splits: By = "by_name",
) -> Task:
    """A language model of square images: a row is one image of `side` x `side` x 3 bytes.

    A folder's own splits are kept, such as train/ and test/ in it: see `reformax.data.splits`.
    Without, of every ten images, in the order of their names, one is in 'valid' and one in 'test';
    where one of these is not the folder's own, it is one of every ten of train. A step of training
    draws images uniformly, with replacement, by (seed, step).

    Args:
      data_dir: a folder with images, .png, .jpg or .jpeg, in it or below. Hidden files and folders
        and folders of runs are left out. None: photographs that come with matplotlib and, where it
        is installed, scikit-learn, in tiles, to try it out.
      side: of an image, in pixels.
      pattern: the names of the folder's files to take.
      tiles: whether a file is cut into as many images of `side` as it holds. Otherwise it is one:
        the largest square in its middle, each pixel the mean of those that it covers.
      splits: 'by_name', a folder's own; or 'cut', all images together.

    Raises:
      FileNotFoundError: data_dir does not exist.
      ValueError: data_dir is no folder or holds no image. Its functions raise it when a split is
        read: a file is damaged or too large, there are fewer than ten images; and for an unknown
        split, and a length or stride other than an image's.
      OSError: a file cannot be read.
    """
    left_out: Sequence[str] = ()
    if data_dir is None:
        paths, tiles = {"train": _bundled()}, True
    else:
        folder = files.existing(data_dir)
        if not folder.is_dir():
            raise SettingError(f"data_dir={data_dir} must be a folder with images")
        found = files.listed(folder, pattern)
        chosen = sorted(path for path in found.paths if path.suffix.lower() in IMAGES)
        if not chosen:
            raise SettingError(f"data_dir={data_dir} holds no {', '.join(IMAGES)} of {pattern!r}")
        others = {**found.left_out, "no image": sorted(set(found.paths) - set(chosen))}
        divided = choose(folder, chosen, splits, "images.images.splits", others)
        paths, left_out = divided.paths, divided.notes

    @functools.cache
    def stored(split: str) -> UInt8[np.ndarray, "n _"]:
        parts = [
            _read(path, side, tiles).reshape(-1, CHANNELS * side * side) for path in paths[split]
        ]
        rows = np.concatenate(parts)
        if split == "train" and len(paths) < len(SPLITS) and len(rows) < 10:
            raise SettingError(
                f"{len(rows)} images of side {side} are too few to split: expected 10 or more"
            )
        return rows

    @functools.cache
    def rows_of(split: str) -> UInt8[np.ndarray, "n _"]:
        check_split("images", split, SPLITS)
        if split != "train" and split in paths:
            return stored(split)
        remainder = np.arange(len(stored("train"))) % 10
        cut = {name: i for name, i in _HELD_OUT.items() if name not in paths}
        held_out = np.isin(remainder, list(cut.values()))
        return stored("train")[remainder == cut[split] if split in cut else ~held_out]

    def summary() -> list[str]:
        sizes = [
            f"{split} {len(rows_of(split)):,} images" + ", cut from train" * (split not in paths)
            for split in SPLITS
        ]
        where = "photographs that come with packages" if data_dir is None else data_dir
        return [f"{where}: {'; '.join(sizes)}", *left_out]

    return _rows_apart("images", CHANNELS * side * side, rows_of).replace(summary=summary)


def _rows_apart(name: str, length: int, rows_of: Callable[[str], UInt8[np.ndarray, "n _"]]) -> Task:
    """The task of predicting the bytes of rows of one length, each by itself.

    Args:
      name: the task's name in logs and errors.
      length: of a row, and so of batches and of an evaluation's stride.
      rows_of: split -> its rows `[n, length]`; checks the split's name.
    """
    in_a_row = language_model(name, 256, lambda split: rows_of(split).ravel())
    check_length = functools.partial(check_fixed_length, length, "the bytes of an image")

    def train_rows(seed: int, step: int, batch_size: int, length: int, rows) -> Batch:
        check_sizes(batch_size=batch_size)
        check_length(length=length)
        data = rows_of("train")
        tokens = data[generator(seed, step).integers(len(data), size=batch_size)[rows]]
        tokens = tokens.astype(np.int32)
        return Batch(tokens, tokens, np.ones(tokens.shape, np.float32))

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_length(length=length, stride=stride)
        return in_a_row.eval_batches(split, batch_size, length, stride)

    return in_a_row.replace(
        train_batch=functools.partial(train_rows, rows=slice(None)),
        train_rows=train_rows,
        eval_batches=eval_batches,
        fingerprint=functools.cache(lambda split: fingerprint(rows_of(split).ravel())),
    )


def _bundled() -> list[Path]:
    """Photographs that installed packages bring along."""
    import matplotlib

    found = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"]
    if (sklearn := importlib.util.find_spec("sklearn")) is not None:
        found += sorted((Path(sklearn.origin).parent / "datasets" / "images").glob("*.jpg"))
    return found


def _read(path: Path, side: int, tiles: bool) -> UInt8[np.ndarray, "n side side 3"]:
    """The images of a file; none if it is smaller than a tile."""
    from PIL import Image

    files.check_ordinary(path)
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise SettingError(
                    f"{path} has {opened.width:,} x {opened.height:,} pixels: expected at most "
                    f"{_MOST_PIXELS:,}"
                )
            picture = opened.convert("RGB")
    except SettingError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no image or damaged ({reason}): copy it again") from None
    if not tiles:
        edge = min(picture.size)
        left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
        box = left, top, left + edge, top + edge
        return np.asarray(picture.resize((side, side), Image.Resampling.BOX, box))[None]
    high, wide = picture.height // side, picture.width // side
    pixels = np.asarray(picture)[: high * side, : wide * side]
    cut = pixels.reshape(high, side, wide, side, CHANNELS).swapaxes(1, 2)
    return cut.reshape(-1, side, side, CHANNELS)

"""What a picture of 32 x 32 grey pixels shows, read as a row of them: Long Range Arena's images.

Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images"; Tay et al. 2020, "Long
Range Arena", section 2.2.4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from reformax.data import files, tfds_builders
from reformax.data.labelled import stored_task, with_valid
from reformax.declared import PathName, checked
from reformax.task import Labels, Task

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
INSTEAD = "unpack cifar-10-binary.tar.gz yourself and pass --data_dir=its folder"
SIDE = 32
_COLOURS = SIDE * SIDE * 3
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
# Of red, green and blue, ITU-R BT.601: what `tf.image.rgb_to_grayscale` and Long Range Arena take.
_GREY = np.array([0.2989, 0.5870, 0.1140])


@checked
def cifar10(data_dir: PathName | None = None) -> Task:
    """Name which of ten things a picture shows: 45,000 to train on, 5,000 valid, 10,000 test.

    A token is a pixel's grey, from 0 to 255, plus 1; rows of pixels follow each other.

    Args:
      data_dir: the folder cifar-10-batches-bin, which has data_batch_1.bin to data_batch_5.bin and
        test_batch.bin. None: tensorflow-datasets downloads cifar10 once, to TFDS_DATA_DIR or
        ~/tensorflow_datasets.

    Raises:
      FileNotFoundError: data_dir or one of these files does not exist.
      ModuleNotFoundError: data_dir is None and tensorflow-datasets is not installed.
      ValueError: a file is damaged; raised when a split is read.
      OSError: the download failed, or a file cannot be read; raised when a split is read.
    """
    folder = None if data_dir is None else files.existing(data_dir)

    def read(part: str) -> tuple[list[bytes], list[int]]:
        if folder is None:
            images, labels = tfds_builders.columns(
                "cifar10", part, ("image", "label"), URL, INSTEAD
            )
            pictures, classes = np.stack(images), list(map(int, labels))
        else:
            pictures, classes = _read(folder, _TRAIN if part == "train" else ("test_batch.bin",))
        return [picture.tobytes() for picture in grey(pictures)], classes

    labels = Labels(10)
    return stored_task(
        "cifar10", vocab_size=257, labels=labels, read=with_valid(read), longest=SIDE * SIDE
    )


def grey(pictures: UInt8[np.ndarray, "n h w 3"]) -> UInt8[np.ndarray, "n h w"]:
    """The greys of colours."""
    return np.rint(pictures @ _GREY).astype(np.uint8)


def _read(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, list[int]]:
    parts = []
    for name in names:
        path = folder / name
        if not path.is_file():
            raise files.Missing(f"{path} does not exist: {INSTEAD}")
        data = files.as_array(files.read_plain(path))
        if len(data) % (1 + _COLOURS) or (data[:: 1 + _COLOURS] > 9).any():
            raise ValueError(
                f"{path} is damaged: expected records of a class below 10 and {_COLOURS} bytes"
            )
        parts.append(data.reshape(-1, 1 + _COLOURS))
    rows = np.concatenate(parts)
    colours = rows[:, 1:].reshape(-1, 3, SIDE, SIDE)  # red, green and blue one after another
    return np.moveaxis(colours, 1, -1), rows[:, 0].tolist()

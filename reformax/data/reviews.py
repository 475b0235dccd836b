"""Whether a film's review praises it, by its bytes: Long Range Arena's byte-level classification.

Maas et al. 2011, "Learning Word Vectors for Sentiment Analysis"; Tay et al. 2020, "Long Range
Arena", section 2.2.2, cut reviews to 4,000 bytes.
"""

from __future__ import annotations

from pathlib import Path

from reformax.data import files, tfds_builders
from reformax.data.labelled import stored_task, with_valid
from reformax.declared import PathName, checked
from reformax.task import Labels, Task

URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
INSTEAD = "unpack aclImdb_v1.tar.gz yourself and pass --data_dir=its folder aclImdb"
CLASSES = "neg", "pos"


@checked
def reviews(data_dir: PathName | None = None) -> Task:
    """Name whether a review is negative, class 0, or positive, class 1; 25,000 are in 'test'.

    Every tenth of the 25,000 to train on is in 'valid'. A token is a byte plus 1; what is longer
    than a batch is cut.

    Args:
      data_dir: the folder aclImdb, which has train/neg, train/pos, test/neg and test/pos, each
        with a file of text for each review. None: tensorflow-datasets downloads imdb_reviews once,
        to TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      FileNotFoundError: data_dir or one of these folders does not exist.
      ModuleNotFoundError: data_dir is None and tensorflow-datasets is not installed.
      OSError: the download failed, or a file cannot be read; raised when a split is read.
    """
    folder = None if data_dir is None else files.existing(data_dir)

    def read(part: str) -> tuple[list[bytes], list[int]]:
        if folder is not None:
            return _read(folder, part)
        texts, labels = tfds_builders.columns("imdb_reviews", part, ("text", "label"), URL, INSTEAD)
        return texts, list(map(int, labels))

    return stored_task("reviews", vocab_size=257, labels=Labels(2), read=with_valid(read))


def _read(folder: Path, part: str) -> tuple[list[bytes], list[int]]:
    texts: list[bytes] = []
    classes: list[int] = []
    for number, name in enumerate(CLASSES):
        inside = folder / part / name
        if not inside.is_dir():
            raise files.Missing(f"{inside} does not exist: {INSTEAD}")
        paths = files.list_files(inside, "*.txt")
        texts += [files.read_plain(path) for path in paths]
        classes += [number] * len(paths)
    return texts, classes

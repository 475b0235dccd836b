"""enwik8 as a tensorflow-datasets builder; importing this module registers it as 'enwik8'.

It is downloaded, checked and written once, as ArrayRecord files, which need no TensorFlow to be
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from reformax.data import files, tfds_builders
from reformax.data.base import SPLITS, split_bytes

URL = "http://mattmahoney.net/dc/enwik8.zip"
INSTEAD = "download enwik8.zip yourself and pass --data_dir=its folder"
tfds = tfds_builders.library("enwik8", INSTEAD)
UrlInfo = tfds.core.download.checksums.UrlInfo
_BLOCK = 1 << 16  # bytes an example


class Enwik8(tfds.core.GeneratorBasedBuilder):
    """Blocks of bytes of the splits 'train', 'valid' and 'test', in the order of the text."""

    VERSION = tfds.core.Version("1.0.0")
    # In place of a file checksums.tsv, which an installed package might lack.
    url_infos = {
        URL: UrlInfo(
            size=tfds.core.utils.Size(36_445_475),
            checksum="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            filename="enwik8.zip",
        )
    }

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="The first 10^8 bytes of the English Wikipedia dump of March 3, 2006.",
            homepage="http://mattmahoney.net/dc/textdata.html",
            license="GFDL",
            features=tfds.features.FeaturesDict({"bytes": tfds.features.Scalar(np.object_)}),
            disable_shuffling=True,  # the blocks' order is the text's
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        # Unpacked here: the manager's own extraction would import TensorFlow.
        data = files.read_file(Path(dl_manager.download(URL)))
        splits = split_bytes(files.as_array(data), URL)
        return {split: self._generate_examples(part) for split, part in splits.items()}

    def _generate_examples(self, data: np.ndarray) -> Iterator[tuple[int, dict[str, bytes]]]:
        for begin in range(0, len(data), _BLOCK):
            yield begin, {"bytes": data[begin : begin + _BLOCK].tobytes()}


def load(data_dir: str | None = None) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The splits of enwik8 in memory, 100 MB; downloaded (36 MB) and prepared the first time.

    Args:
      data_dir: the folder of tensorflow-datasets. None: TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      OSError: enwik8 could not be downloaded, checked, written or read.
    """

    def make() -> Enwik8:
        return Enwik8(data_dir=data_dir, file_format="array_record")

    def read(split: str) -> np.ndarray:
        (blocks,) = tfds_builders.columns("enwik8", split, ["bytes"], URL, INSTEAD, make=make)
        return files.as_array(b"".join(blocks))

    return {split: read(split) for split in SPLITS}

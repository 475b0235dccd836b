"""WMT through tensorflow-datasets: a tiny dataset that its own builder prepared."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from reformax.data import wmt
from tests.data.tables import prepare_dataset

WORDS = {
    "en": ["one", "two", "three", "four", "five", "six"],
    "de": ["eins", "zwei", "drei", "vier", "fünf", "sechs"],
}
SIZES = {"train": 40, "validation": 6, "test": 5}


def sentence(language, split, i):
    rng = np.random.default_rng([len(split), i])
    return " ".join(rng.choice(WORDS[language], 1 + i % 7)) + f" {split} {i}"


def prepare(folder, file_format):
    rows = {
        split: [{x: sentence(x, split, i) for x in WORDS} for i in range(n)]
        for split, n in SIZES.items()
    }
    prepare_dataset("wmt14_translate", folder, file_format, rows, config="de-en")


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_prepared_dataset_is_read(tmp_path, file_format):
    prepare(tmp_path, file_format)
    folder = str(tmp_path)
    task = wmt.wmt(folder, vocab_size=40)
    for split, its in (("train", "train"), ("valid", "validation"), ("test", "test")):
        sources, references = task.translation.sentences(split)
        number = [int(source.split()[-1]) for source in sources]
        assert sorted(number) == list(range(SIZES[its]))
        assert sources == [sentence("en", its, i) for i in number]
        assert references == [sentence("de", its, i) for i in number]
    other_way = wmt.wmt(folder, source="de", target="en", vocab_size=40)
    assert other_way.translation.sentences("test") == (references, sources)
    batch = task.train_batch(0, 0, 2, 64)
    vocabulary = task.translation.vocabulary
    sources, references = task.translation.sentences("train")
    for row in range(2):
        pair = [
            vocabulary.decode(side[row][segment_ids[row] == 2])
            for side, segment_ids in zip(batch.inputs[:2], batch.inputs[2:], strict=True)
        ]
        assert references[sources.index(pair[0])] == pair[1]


def test_a_dataset_that_cannot_be_had_is_told(tmp_path, monkeypatch, fails_in_one_line):
    monkeypatch.setattr(wmt, "URL", "http://127.0.0.1:9/wmt.tgz")
    with fails_in_one_line(FileNotFoundError, "has no prepared wmt14_translate/de-en: give the fo"):
        wmt.wmt(str(tmp_path)).n_targets("test")
    assert not list(tmp_path.iterdir())  # data_dir is read
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with fails_in_one_line(OSError, "wmt14_translate/de-en could not be prepared from http://127"):
        wmt.wmt().n_targets("test")


def test_bad_arguments_are_told(fails_in_one_line):
    with fails_in_one_line(ValueError, "dataset='wmt14_translate/de-en' is not of source='fr'"):
        wmt.wmt(source="fr")
    with fails_in_one_line(FileNotFoundError, "data_dir=nowhere is no folder"):
        wmt.wmt("nowhere")

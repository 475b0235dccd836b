"""Reviews, pairs of documents and pictures: from files, and from tiny prepared datasets."""

import numpy as np
import pytest

from reformax.data import cifar10, document_pairs, labelled, reviews, tfds_builders
from reformax.task import Labels
from tests.data.tables import prepare_dataset


def rows_of(task, split, length):
    """All examples of a split with their classes, without padding, as bytes."""
    batch = next(task.eval_batches(split, task.n_targets(split), length, length))
    sides = batch.inputs if task.labels.pairs else (batch.inputs,)
    texts = [[bytes(row[row > 0].astype(np.uint8) - 1) for row in side] for side in sides]
    return (list(zip(*texts, strict=True)) if task.labels.pairs else texts[0]), batch.targets[:, 0]


def write_reviews(folder):
    for part, n in (("train", 20), ("test", 3)):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for i in range(n):
                (folder / part / name / f"{i:02}_7.txt").write_text(f"{part} {name} {i} ä")


def test_reviews_are_read_from_files(tmp_path, fails_in_one_line):
    write_reviews(tmp_path)
    task = reviews.reviews(str(tmp_path))
    sizes = {"train": 36, "valid": 4, "test": 6}
    seen = []
    for split, n in sizes.items():
        texts, classes = rows_of(task, split, 64)
        assert len(texts) == n == task.n_targets(split)
        assert [int(" pos " in text.decode()) for text in texts] == classes.tolist()
        seen += texts
    assert len(set(seen)) == sum(sizes.values())
    cut, _ = rows_of(task, "test", 4)
    assert cut == [b"test"] * 6
    assert task.fingerprint("test") == reviews.reviews(str(tmp_path)).fingerprint("test")
    with fails_in_one_line(FileNotFoundError, "train/neg does not exist: unpack aclImdb_v1"):
        reviews.reviews(str(tmp_path / "train")).n_targets("train")


def write_pictures(folder):
    rng = np.random.default_rng(0)
    made = {}
    for name, n in [(f"data_batch_{i}.bin", 4) for i in range(1, 6)] + [("test_batch.bin", 3)]:
        made[name] = rng.integers(256, size=(n, 3073), dtype=np.uint8)
        made[name][:, 0] %= 10
        (folder / name).write_bytes(made[name].tobytes())
    return made


def test_pictures_are_grey_pixels_of_files(tmp_path, fails_in_one_line):
    made = write_pictures(tmp_path)
    task = cifar10.cifar10(str(tmp_path))
    assert [task.n_targets(s) for s in ("train", "valid", "test")] == [18, 2, 3]
    batch = next(task.eval_batches("test", 3, 1024, 1024))
    np.testing.assert_array_equal(batch.targets[:, 0], made["test_batch.bin"][:, 0])
    for row, record in zip(batch.inputs, made["test_batch.bin"], strict=True):
        red, green, blue = record[1:].reshape(3, 1024).astype(float)
        grey = 0.2989 * red + 0.587 * green + 0.114 * blue
        assert np.abs(row - 1 - grey).max() <= 0.5 + 1e-9
    with fails_in_one_line(ValueError, "length=1023 must be at least 1024"):
        task.eval_batches("test", 3, 1023, 1023)
    (tmp_path / "test_batch.bin").write_bytes(b"\x0a" * 3073)
    with fails_in_one_line(ValueError, "test_batch.bin is damaged"):
        cifar10.cifar10(str(tmp_path)).n_targets("test")
    (tmp_path / "test_batch.bin").unlink()
    with fails_in_one_line(FileNotFoundError, "does not exist: unpack cifar-10-binary.tar.gz"):
        cifar10.cifar10(str(tmp_path)).n_targets("test")


def test_pairs_are_read_from_tables(tmp_path, fails_in_one_line):
    lines = '0.0\ta\tb\tfirst\tsecond\n1.0\tc\td\t"of a "quotation\tü\n'
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(lines)
    task = document_pairs.document_pairs(str(tmp_path))
    assert task.kind == "pairs"
    for split in ("train", "valid", "test"):
        pairs, classes = rows_of(task, split, 20)
        assert pairs == [(b"first", b"second"), (b'"of a "quotation', "ü".encode())]
        assert classes.tolist() == [0, 1]
    batch = task.train_batch(0, 0, 8, 3)
    assert batch.inputs.first.shape == batch.inputs.second.shape == (8, 3)
    for bad in ("2\ta\tb\tx\ty\n", "1\ta\tb\tx\n", "label\ta\tb\tx\ty\n"):
        (tmp_path / "bad.tsv").write_text(lines + bad)
        with fails_in_one_line(ValueError, "bad.tsv row 3: expected a label, 0 or 1"):
            document_pairs.document_pairs(str(tmp_path), test="bad.tsv").n_targets("test")
    with fails_in_one_line(FileNotFoundError, "none.tsv does not exist: put it there, or set"):
        document_pairs.document_pairs(str(tmp_path), valid="none.tsv").n_targets("valid")


@pytest.mark.slow
def test_prepared_datasets_are_read(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path), raising=False)
    texts = [{"text": f"review {i}", "label": i % 2} for i in range(20)]
    splits = {"train": texts, "test": texts[:3], "unsupervised": texts[:1]}
    prepare_dataset("imdb_reviews", tmp_path, "array_record", splits)
    columns = tfds_builders.columns(
        "imdb_reviews", "train", ("text", "label"), reviews.URL, reviews.INSTEAD
    )
    assert sorted(zip(*columns, strict=True)) == sorted(
        (row["text"].encode(), row["label"]) for row in texts
    )
    pictures = np.random.default_rng(1).integers(256, size=(11, 32, 32, 3), dtype=np.uint8)
    rows = [{"id": str(i), "image": x, "label": i % 10} for i, x in enumerate(pictures)]
    prepare_dataset("cifar10", tmp_path, "array_record", {"train": rows, "test": rows[:2]})
    images, labels = tfds_builders.columns(
        "cifar10", "train", ("image", "label"), cifar10.URL, cifar10.INSTEAD
    )
    found = {bytes(np.asarray(x)): int(label) for x, label in zip(images, labels, strict=True)}
    assert found == {x.tobytes(): i % 10 for i, x in enumerate(pictures)}


def test_a_dataset_that_cannot_be_had_is_told(tmp_path, monkeypatch, fails_in_one_line):
    asked = "imdb_reviews", "test", ("text",)
    with fails_in_one_line(FileNotFoundError, "has no prepared imdb_reviews: give the folder that"):
        tfds_builders.builder_of("imdb_reviews", tmp_path)
    assert not list(tmp_path.iterdir())  # data_dir is read
    monkeypatch.setattr(tfds_builders.library("it", "no").core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with fails_in_one_line(OSError, "imdb_reviews could not be prepared from http://127.0.0.1:9"):
        tfds_builders.columns(*asked, "http://127.0.0.1:9", "no")


def test_stored_classes_are_checked(fails_in_one_line):
    def task(rows, classes):
        return labelled.stored_task(
            "own", vocab_size=257, labels=Labels(2), read=lambda split: (rows, classes)
        )

    with fails_in_one_line(ValueError, "split test has no example"):
        task([], []).n_targets("test")
    with fails_in_one_line(ValueError, "split test has classes from 0 to 2: expected 0 to 1"):
        task([b"a", b"b"], [0, 2]).n_targets("test")
    with fails_in_one_line(ValueError, "must be one of train, valid, test"):
        task([b"a"], [0]).n_targets("dev")

"""Stretches of the standard library and the packages that they are from."""

import sysconfig

import numpy as np
import pytest

from reformax.data.stdlib_packages import stdlib_packages

SMALL = dict(chunk_len=40, n_train=60, n_eval=9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A library of four packages; that of `test` and the module count for nothing."""
    for name, size in (("tiny", 20), ("big", 1000), ("middle", 950), ("large", 1200), ("test", 99)):
        (tmp_path / name).mkdir()
        for number in range(2):  # a line is a letter, its package's, and the file's number
            line = f"{name[0]}{number}\n".encode()
            (tmp_path / name / f"{number}.py").write_bytes(line * (size // 2))
    (tmp_path / "one.py").write_text("#" * 9000)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_a_row_is_from_the_package_of_its_class(folder):
    task = stdlib_packages(n_classes=3, **SMALL)
    assert task.kind == "labels" and task.labels.n_classes == 3
    train = task.train_batch(0, 0, 50, 45)
    assert train.inputs.shape == (50, 45) and not train.inputs[:, 40:].any()
    held_out = list(task.eval_batches("valid", 4, 40, 40))
    for batch, numbers in ((train, b"01"), *((x, b"1") for x in held_out)):
        for row, (which,), (weight,) in zip(*batch, strict=True):
            text = bytes(row[row > 0].astype(np.uint8) - 1)
            letters = set(text) - set(b"\n01")
            assert letters == ({b"blm"[which]} if weight else set())
            assert set(text) <= letters | set(b"\n" + numbers)
    assert sum(batch.weights.sum() for batch in held_out) == task.n_targets("valid") == 9
    classes = np.concatenate([batch.targets for batch in held_out])[:9, 0]
    np.testing.assert_array_equal(classes, np.arange(9) % 3)


def test_an_example_is_a_function_of_its_number(folder):
    makes = (dict(), dict(), dict(data_seed=1))
    tasks = [stdlib_packages(n_classes=2, **SMALL, **options) for options in makes]
    a, b, c = (next(task.eval_batches("test", 9, 40, 40)).inputs for task in tasks)
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    prints = [task.fingerprint("train") for task in tasks]
    assert prints[0] == prints[1] != prints[2]
    (folder / "big" / "0.py").write_text("changed\n" * 500)
    assert stdlib_packages(n_classes=2, **SMALL).fingerprint("train") != prints[0]


def test_what_does_not_fit_is_refused(folder, fails_in_one_line):
    for options, message in (
        (dict(n_classes=5), "n_classes is 5: expected at most 4"),
        (dict(n_classes=4), "chunk_len=40 must be at most 3, the bytes of the package tiny"),
        (dict(n_classes=1), "n_classes is 1: expected at least 2"),
    ):
        with fails_in_one_line(ValueError, message):
            stdlib_packages(**SMALL | options)

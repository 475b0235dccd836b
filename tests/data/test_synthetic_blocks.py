"""Blocks of drawn examples: drawn once, kept in a folder, and read from there."""

import errno
import io
import os

import numpy as np

from reformax.data.synthetic_blocks import Block, synthetic_blocks

NUMBERS = np.array([5, 1, 2])


def draw(rng):
    return Block(rng.integers(256, size=(3, 4)).astype(np.uint8), np.arange(3, dtype="uint8"))


def kept(cache_dir=None, seed=0, calls=None):
    def counted(rng):
        calls.append(0)
        return draw(rng)

    return synthetic_blocks(draw if calls is None else counted, 3, seed, "some", cache_dir)


def test_an_example_is_a_function_of_seed_split_and_number(tmp_path):
    calls = []
    want = kept(calls=calls)("train", NUMBERS)
    assert want.rows.shape == (3, 4) and want.classes.tolist() == [2, 1, 2] and len(calls) == 2
    folder, calls = str(tmp_path / "kept"), []
    for again in (kept(folder, calls=calls), kept(folder, calls=calls), kept()):
        for _ in range(2):
            got = again("train", NUMBERS)
            np.testing.assert_array_equal(got.rows, want.rows)
            np.testing.assert_array_equal(got.classes, want.classes)
        one = again("train", np.array([1]))
        np.testing.assert_array_equal(one.rows[0], want.rows[1])
    assert len(calls) == 2  # the second one reads
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "some_0_train_0.npz",
        "some_0_train_1.npz",
    }
    for unlike in (kept(seed=1)("train", NUMBERS), kept()("valid", NUMBERS)):
        assert (unlike.rows != want.rows).any()


def test_whatever_byte_is_damaged_the_line_says_what_to_do(tmp_path):
    want = kept(str(tmp_path))("train", NUMBERS[1:])
    path = tmp_path / "some_0_train_0.npz"
    whole = path.read_bytes()
    scalar = io.BytesIO()
    np.savez(scalar, rows=1, classes=2)
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    flipped = [
        whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :] for i in range(0, len(whole), 5)
    ]
    for data in (
        *flipped,
        whole[:-50],
        whole[50:],
        scalar.getvalue(),
        array.getvalue(),
        bytes(len(whole)),
    ):
        path.write_bytes(data)
        try:
            got = kept(str(tmp_path))("train", NUMBERS[1:])
        except ValueError as error:
            assert str(error) == f"{path} is damaged: delete it, and it is drawn again"
        else:  # a byte that nothing reads, such as a date
            np.testing.assert_array_equal(got.rows, want.rows)


def test_processes_that_have_one_number_fill_one_folder(tmp_path, monkeypatch):
    """Such as those of two machines, and threads: one writes all while the other is in between."""
    replace = os.replace

    def between(old, new):  # the file is written, and has no name yet
        monkeypatch.setattr(os, "replace", replace)
        kept(str(tmp_path))("train", NUMBERS[1:])
        replace(old, new)

    monkeypatch.setattr(os, "replace", between)
    got = kept(str(tmp_path))("train", NUMBERS[1:])
    np.testing.assert_array_equal(got.rows, kept()("train", NUMBERS[1:]).rows)
    assert [path.name for path in tmp_path.iterdir()] == ["some_0_train_0.npz"]


def test_a_folder_at_home_and_one_that_is_a_file(tmp_path, monkeypatch, fails_in_one_line):
    monkeypatch.setenv("HOME", str(tmp_path))
    kept("~/kept/deeper")("train", NUMBERS[1:])
    assert (tmp_path / "kept/deeper/some_0_train_0.npz").exists()
    (tmp_path / "file").write_text("")
    with fails_in_one_line(ValueError, "cache_dir is .*file, which is no folder: give the name of"):
        kept(str(tmp_path / "file"))("train", NUMBERS)
    monkeypatch.setattr(os, "mkdir", refuse)
    with fails_in_one_line(
        OSError, r"other cannot be written \(Permission denied\): get the right"
    ):
        kept(str(tmp_path / "other"))("train", NUMBERS)


def refuse(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")

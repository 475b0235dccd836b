"""Blocks of drawn examples: drawn once, kept in a folder, and read from there."""

import numpy as np
import pytest

from reformax.data import blocks

NUMBERS = np.array([5, 1, 2])


def draw(rng):
    return blocks.Block(
        rng.integers(256, size=(3, 4)).astype(np.uint8), np.arange(3, dtype="uint8")
    )


def kept(data_dir=None, seed=0, calls=None):
    def counted(rng):
        calls.append(0)
        return draw(rng)

    return blocks.drawn_blocks(draw if calls is None else counted, 3, seed, "some", data_dir)


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


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-50], lambda x: x[50:]])
def test_a_damaged_file_is_refused(damage, tmp_path):
    kept(str(tmp_path))("train", NUMBERS[1:])
    path = tmp_path / "some_0_train_0.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="is damaged: delete it, and it is drawn again"):
        kept(str(tmp_path))("train", NUMBERS[1:])

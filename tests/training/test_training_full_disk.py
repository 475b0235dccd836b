"""A disk that has no room for another checkpoint: an older one makes room, never the newest."""

import errno
import os
import shutil
from collections import namedtuple

import jax
import numpy as np
import pytest

from reformax import durable
from reformax.training import loop
from reformax.training.checkpoint import Checkpoints, NotSaved
from tests.training import worker

Usage = namedtuple("Usage", "total used free")


class Disk:
    """A disk below a folder, which fails the arrays and copies that it has no room for.

    Attributes:
      folder: the folder.
      size: its bytes.
      says_all: whether it says that all of it is free, as one with a quota does.
      error: the number of its error.
    """

    def __init__(self, folder, monkeypatch):
        self.size, self.says_all, self.error = 10**9, False, errno.ENOSPC
        self.folder, self._write_arrays = folder, Checkpoints._write_arrays
        self._copy = shutil.copyfileobj
        disk = self
        monkeypatch.setattr(shutil, "disk_usage", lambda _: self._usage())
        monkeypatch.setattr(
            Checkpoints,
            "_write_arrays",
            lambda self, at, saving: disk._then_check(at, disk._write_arrays, self, at, saving),
        )
        monkeypatch.setattr(
            shutil,
            "copyfileobj",
            lambda *args: disk._then_check(disk.folder, disk._copy, *args),
        )

    def used(self):
        files = (x.lstat() for x in self.folder.rglob("*"))
        return sum(512 * x.st_blocks for x in files)

    def _usage(self):
        size = 10**9 if self.says_all else self.size
        return Usage(size, self.used(), size if self.says_all else max(0, size - self.used()))

    def _then_check(self, path, write, *args):
        write(*args)
        if path.is_relative_to(self.folder) and self.used() > self.size:
            raise OSError(self.error, os.strerror(self.error), str(self.folder))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


def state(step):
    return {"w": np.random.default_rng(step).normal(size=50_000)}


def save(checkpoints, step, score=None, **options):
    checkpoints.save(step, state(step), score, **options)
    checkpoints.wait()


def filled(disk, checkpoints, scores):
    """Saves steps 1 and on; the disk then has room for half of another."""
    for step, score in enumerate(scores, start=1):
        save(checkpoints, step, score)
    disk.size = disk.used() + durable.size_on_disk(checkpoints.folder / str(len(scores))) // 2
    return checkpoints


def assert_whole(checkpoints, step):
    tensors, _ = checkpoints.restore(step, jax.eval_shape(lambda: state(step)))
    np.testing.assert_array_equal(tensors["w"], state(step)["w"])


def test_the_oldest_makes_room_and_every_later_save_succeeds(disk, tmp_path):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=2), [None, None])
    for step in range(3, 7):
        save(checkpoints, step)
        assert checkpoints.steps() == [step - 1, step]
        assert_whole(checkpoints, step)
        (note,) = checkpoints.notes
        assert f"checkpoint {step - 2} is deleted to make room for that of step {step}" in note
        assert "free space there" in note and "\n" not in note
        checkpoints.notes.clear()
    disk.size = 10**9
    save(checkpoints, 7)
    assert checkpoints.steps() == [6, 7] and not checkpoints.notes


@pytest.mark.parametrize("temporary", [False, True])
def test_the_best_stays(disk, tmp_path, temporary):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=2), [0.5, 0.9, 0.7])
    assert checkpoints.steps() == [1, 2, 3]
    save(checkpoints, 4, 0.8, temporary=temporary)
    assert checkpoints.steps() == [1, 3, 4]


@pytest.mark.parametrize("keep, scores", [(1, [None]), (2, [0.5, 0.9]), (1, [0.5, 0.9])])
def test_neither_the_newest_nor_the_best_is_deleted(disk, tmp_path, keep, scores):
    """Not even one that the new one would replace."""
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=keep), scores)
    before = checkpoints.steps()
    for step in (8, 9):
        with pytest.raises(NotSaved, match=f"step {step} is not saved.*No space.*free space") as e:
            save(checkpoints, step, 0.7)
        assert "those before it are as they were" in str(e.value) and "\n" not in str(e.value)
        assert checkpoints.steps() == before and len(list(checkpoints.folder.iterdir())) == len(
            before
        )
    assert_whole(checkpoints, before[-1])


def test_nothing_is_deleted_for_room_if_the_newest_is_damaged(disk, tmp_path):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=2), [None, None])
    (checkpoints.folder / "2/checkpoint.json").write_text("{}")
    with pytest.raises(NotSaved, match="those before it are as they were"):
        save(checkpoints, 3)
    assert_whole(Checkpoints(tmp_path), 1)
    # Nor if it is only its arrays, which no description shows.
    disk.size = 10**9
    checkpoints = filled(disk, Checkpoints(tmp_path / "other", keep=2), [None, None])
    largest = max((checkpoints.folder / "2").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"\0" * largest.stat().st_size)
    with pytest.raises(NotSaved, match="those before it are as they were"):
        save(checkpoints, 3)
    assert_whole(Checkpoints(tmp_path / "other"), 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_the_disk_does_not_say_costs_one_save_alone(disk, tmp_path, error):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=2), [None, None])
    disk.says_all, disk.error = True, error
    with pytest.raises(NotSaved, match="not saved, and checkpoint 1 is deleted to make room") as e:
        save(checkpoints, 3)
    assert "free space there" in str(e.value) and "\n" not in str(e.value)
    assert checkpoints.steps() == [2] and os.listdir(checkpoints.folder) == ["2"]
    save(checkpoints, 4)
    assert checkpoints.steps() == [2, 4] and not checkpoints.notes


def test_another_error_deletes_nothing(disk, tmp_path):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=2), [None, None])
    disk.says_all, disk.error = True, errno.EIO
    with pytest.raises(NotSaved, match="those before it are as they were"):
        save(checkpoints, 3)
    assert checkpoints.steps() == [1, 2]


def test_leftovers_go_before_any_checkpoint(disk, tmp_path):
    checkpoints = filled(disk, Checkpoints(tmp_path, keep=3), [None, None])
    (checkpoints.folder / "tmp.gone.0").mkdir()
    (checkpoints.folder / "tmp.gone.0/x").write_bytes(b"x" * 500_000)
    disk.size += 300_000
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 2, 3] and not checkpoints.notes


def test_a_full_folder_of_copies_gives_up_those_that_the_run_no_longer_has(disk, tmp_path):
    address = tmp_path / "copies"
    for step in range(1, 5):
        checkpoints = Checkpoints(tmp_path / "run", copies=str(address))
        save(checkpoints, step)
        checkpoints.close()
        if step == 2:
            disk.folder, disk.says_all = address, True
            disk.size = disk.used() + disk.used() // 4
    assert sorted(x.name for x in address.glob("[0-9]*")) == ["3", "4"], checkpoints.notes
    # The newest copy stays, whatever the run has.
    checkpoints = Checkpoints(tmp_path / "run", keep=1, copies=str(address))
    disk.size = disk.used() // 2
    save(checkpoints, 5)
    checkpoints.close()
    assert "checkpoint 5 is saved and not copied" in checkpoints.notes[0]
    assert [path.name for path in address.glob("[0-9]*")] == ["4"]


def test_a_copy_that_fails_leaves_no_bytes(disk, tmp_path, monkeypatch):
    address = tmp_path / "copies"

    def fails(*args):
        shutil.copyfile(__file__, address / "1/part")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "copyfileobj", fails)
    checkpoints = Checkpoints(tmp_path / "run", copies=str(address))
    save(checkpoints, 1)
    checkpoints.close()
    assert "checkpoint 1 is saved and not copied" in checkpoints.notes[0]
    assert [path.name for path in address.iterdir()] == ["run.json"]


def test_copies_that_have_no_room_here_are_told_and_leave_no_bytes(disk, tmp_path):
    address = tmp_path / "copies"
    filled(disk, Checkpoints(tmp_path / "run", copies=str(address)), [None, None]).close()
    disk.size = disk.used() + 1
    there = Checkpoints(tmp_path / "there", copies=str(address))
    with pytest.raises(OSError, match="cannot be written .No space.*: free space there"):
        there.newest_whole()
    assert not list(there.folder.glob("*[0-9]"))


@pytest.mark.slow
def test_a_run_on_a_full_disk_goes_on_with_the_same_numbers(disk, tmp_path, capsys):
    options = {"steps": 16, "eval_every": 4}
    loop.train(tmp_path / "undisturbed", **worker.arguments(**options))
    loop.train(tmp_path / "full", **worker.arguments(**options | {"steps": 8}))
    disk.size = disk.used() + durable.size_on_disk(tmp_path / "full/checkpoints/8") // 2
    assert loop.train(tmp_path / "full", **worker.arguments(**options))["step"] == 16
    said = capsys.readouterr().err
    assert "is deleted to make room" in said and "not saved" not in said
    assert worker.record(tmp_path / "full") == worker.record(tmp_path / "undisturbed")

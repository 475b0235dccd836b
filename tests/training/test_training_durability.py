"""What a power cut, a full disk or a failing disk leaves of a save: a whole checkpoint, always."""

import errno
import json
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from reformax import durable
from reformax.training import checkpoint, loop
from reformax.training.checkpoint import Checkpoints, NotSaved
from reformax.training.record_lines import RecordLines
from tests.training import tiny, worker

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class Calls:
    """System calls of Python below a folder: their order, and the failure of one of them."""

    def __init__(self, folder, monkeypatch):
        self.events = []  # (name, path), in order
        self.fail = None  # (name, number from 0, error)
        self._folder, self._counts = str(folder), {}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._traced(name, getattr(os, name)))

    def _traced(self, name, call):
        def traced(target, *args, **kwargs):
            path = self._path(target, kwargs.get("dir_fd"))
            if path.startswith(self._folder):
                self.events.append((name, path))
                self._fail_if_due(name, path)
            return call(target, *args, **kwargs)

        return traced

    def _path(self, target, dir_fd):
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.join(folder, os.fspath(target))

    def _fail_if_due(self, name, path):
        if self.fail is not None and self.fail[0] == name:
            number = self._counts[name] = self._counts.get(name, -1) + 1
            if number == self.fail[1]:
                error, self.fail = self.fail[2], None
                self._counts.clear()
                raise (
                    error
                    if isinstance(error, BaseException)
                    else OSError(error, os.strerror(error), path)
                )

    def first(self, name, path, after=0):
        """The place of a call in the order."""
        return self.events.index((name, str(path)), after)


def state(step):
    return {"w": np.arange(6.0).reshape(2, 3) + step, "empty": np.zeros((0, 2))}


def save(checkpoints, step, score=None, **options):
    checkpoints.save(step, state(step), score, **options)
    checkpoints.wait()


def assert_whole(checkpoints, step):
    tensors, _ = checkpoints.restore(step, jax.eval_shape(lambda: state(step)))
    np.testing.assert_array_equal(tensors["w"], state(step)["w"])


def test_all_is_on_the_disk_before_it_has_a_name_and_older_ones_go_after_that(
    tmp_path, monkeypatch
):
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    calls = Calls(tmp_path, monkeypatch)
    lines = []
    for step in (1, 2):
        save(checkpoints, step, check=lambda: lines.append(len(calls.events)))
    folder = checkpoints.folder
    assert checkpoints.steps() == [2]
    # Names of new folders are in their parents on the disk.
    assert calls.first("mkdir", folder.parent) < calls.first("fsync", tmp_path)
    assert calls.first("mkdir", folder) < calls.first("fsync", folder.parent)
    named = calls.first("rename", folder / "tmp.2")
    inside = [folder / "2", *(folder / "2").rglob("*")]
    assert len(inside) > 8
    for path in inside:
        written = folder / "tmp.2" / path.relative_to(folder / "2")
        if path.name == "manifest.json":
            written = written.with_name("manifest.json.tmp")
        assert calls.first("fsync", written) < named
    # The manifest is the last file, and its folder is flushed once it is in it.
    manifest = calls.first("replace", folder / "tmp.2" / "manifest.json.tmp")
    assert manifest < calls.first("fsync", folder / "tmp.2", after=manifest) < lines[3] <= named
    assert lines[2] < calls.first("mkdir", folder / "tmp.2")
    deleted = calls.first("rename", folder / "1")
    assert named < calls.first("fsync", folder, after=named) < deleted
    early = [path for name, path in calls.events[:deleted] if name in ("unlink", "rmdir")]
    assert not [path for path in early if Path(path).is_relative_to(folder / "1")]


@pytest.mark.slow
def test_lines_are_on_the_disk_before_their_checkpoint_has_its_name(tmp_path, monkeypatch):
    calls = Calls(tmp_path, monkeypatch)
    loop.train(tmp_path, **worker.arguments(steps=8, eval_every=4))
    record, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    written = [i for i, event in enumerate(calls.events) if event == ("write", str(record))]
    assert len(written) == 4  # a train and a valid line at steps 4 and 8
    for step, last in ((4, written[1]), (8, written[3])):
        named = calls.first("rename", folder / f"tmp.{step}")
        assert last < calls.first("fsync", record, after=last) < named
        noted = Checkpoints(tmp_path).extra(step)["record"]
        data = record.read_bytes()[: noted["size"]]
        assert data.count(b"\n") == noted["lines"] == step // 2


@pytest.mark.parametrize(
    "call, number",
    [
        ("open", errno.EMFILE),
        ("fsync", errno.EIO),
        ("mkdir", errno.ENOSPC),
        ("rename", errno.EIO),
        ("replace", errno.ENOSPC),
    ],
)
def test_any_failing_call_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch, call, number):
    checkpoints = Checkpoints(tmp_path, keep=1)
    calls = Calls(tmp_path, monkeypatch)
    save(checkpoints, 1)
    for step in range(2, 99):
        before = checkpoints.steps()[-1]
        calls.fail = (call, step - 2, number)
        error = None
        try:
            save(checkpoints, step)
        except NotSaved as raised:
            error = str(raised)
            assert "\n" not in error and f"checkpoint of step {step} is not saved" in error
            assert os.strerror(number) in error and "MB are free" in error and "needed" in error
            assert "delete" not in error
        failed, calls.fail = calls.fail is None, None
        assert_whole(checkpoints, before if error and before in checkpoints.steps() else step)
        assert not list(checkpoints.folder.glob("tmp.[0-9]*"))
        if not failed:  # there are no more calls of this kind
            break
    assert 2 < step < 98 and error is None
    save(checkpoints, 100)
    assert checkpoints.steps() == [100] and not list(checkpoints.folder.glob("tmp.*"))


class Killed(BaseException):
    """The process ends here: nothing is tidied up."""


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
def test_killed_while_a_step_is_saved_again_one_of_the_two_is_whole(tmp_path, monkeypatch, call):
    calls = Calls(tmp_path, monkeypatch)
    for n in range(99):
        folder = tmp_path / str(n)
        save(Checkpoints(folder), 3)
        calls.fail = (call, n, Killed())
        done = False
        try:
            save(Checkpoints(folder), 3, score=1.5)
            done = True
        except Killed:
            pass
        left = Checkpoints(folder)
        assert left.steps() == [3] and left.score(3) in (None, 1.5)
        assert_whole(left, 3)
        assert left.newest_whole() == 3
        left.tidy(pytest.fail)
        assert os.listdir(left.folder) == ["3"]
        assert_whole(Checkpoints(folder), 3)
        if done:
            break
    assert 1 < n < 98


@pytest.mark.slow
def test_a_full_disk_at_one_checkpoint_costs_that_one_alone(tmp_path, monkeypatch, capsys):
    options = {"steps": 12, "eval_every": 4}
    loop.train(tmp_path / "undisturbed", **worker.arguments(**options))
    write_arrays = Checkpoints._write_arrays

    def full_at(*steps):
        def write(self, folder, arrays):
            write_arrays(self, folder, arrays)
            if folder.name in {f"tmp.{step}" for step in steps}:
                raise ValueError("RESOURCE_EXHAUSTED: x [os_error_code='28']")  # as tensorstore

        return write

    monkeypatch.setattr(Checkpoints, "_write_arrays", full_at(8))
    result = loop.train(tmp_path / "once", **worker.arguments(**options))
    said = capsys.readouterr().err
    assert said.count("checkpoint of step 8 is not saved") == 1
    assert "No space left on device" in said and "training goes on" in said
    assert result["step"] == 12 and Checkpoints(tmp_path / "once").steps() == [4, 12]
    assert worker.record(tmp_path / "once") == worker.record(tmp_path / "undisturbed")
    # At the last one there is nothing to go on to.
    monkeypatch.setattr(Checkpoints, "_write_arrays", full_at(12))
    with pytest.raises(NotSaved, match=r"step 12 is not saved.*free space there .* MB are needed"):
        loop.train(tmp_path / "last", **worker.arguments(**options))
    assert (
        os.listdir(tmp_path / "last" / "checkpoints")
        != []
        == list((tmp_path / "last" / "checkpoints").glob("tmp*"))
    )
    monkeypatch.undo()
    assert loop.train(tmp_path / "last", **worker.arguments(**options))["step"] == 12
    assert worker.record(tmp_path / "last") == worker.record(tmp_path / "undisturbed")


def test_a_line_that_cannot_be_written_is_written_later(tmp_path, monkeypatch):
    calls, said = Calls(tmp_path, monkeypatch), []
    path = tmp_path / "metrics.jsonl"
    lines = RecordLines(path, 0, say=said.append)
    wanted = [{"step": step, "split": "train"} for step in range(6)]
    for step, fail in enumerate([None, ("write", 0), ("replace", 0), None, ("fsync", 0), None]):
        calls.fail = fail and (*fail, errno.ENOSPC)
        lines.append(wanted[step])
        assert list(lines) == wanted[: step + 1]
        if step == 4:  # the system may have dropped the page and say so once alone
            with pytest.raises(OSError):
                lines.sync()
    assert [json.loads(line) for line in path.read_text().splitlines()] == wanted
    assert len(said) == 3 and "No space left" in said[0] and "whole again" in said[1]
    calls.fail = ("write", 0, errno.ENOSPC)
    lines.append({"step": 6, "split": "train"})
    lines.sync()
    assert len(path.read_text().splitlines()) == 7
    mark = lines.mark()
    assert mark["lines"] == 7 and mark["size"] == path.stat().st_size
    lines.close()


def test_a_record_of_many_lines_is_in_its_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    wanted = [{"step": step, "split": "train", "bits": step / 7} for step in range(60_000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in wanted[:30_000]))
    lines = RecordLines(path, 70_000)
    tracemalloc.start()
    try:
        for line in wanted[30_000:]:
            lines.append(line)
        held, peak = tracemalloc.get_traced_memory()
        read = sum(one == two for one, two in zip(lines, wanted, strict=True))
        _, peak_of_reading = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == len(lines) == 60_000
    assert max(held, peak) < 2.5 * 2**20 and peak_of_reading < 4 * 2**20
    assert lines.mark()["size"] == path.stat().st_size > 3 * 2**20
    assert lines.mark()["crc32"] == zlib.crc32(path.read_bytes())
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == wanted


@pytest.mark.slow
def test_an_evaluation_stands_once_after_a_kill_before_its_checkpoint(tmp_path, monkeypatch):
    options = {"steps": 8, "eval_every": 4}
    loop.train(tmp_path / "undisturbed", **worker.arguments(**options))
    task = tiny.counting()
    asked = []

    def stopped(*args):
        """The first evaluation is left to the next run."""
        if not asked:
            asked.append(1)
            os.kill(os.getpid(), 15)
        yield from task.eval_batches(*args)

    arguments = worker.arguments(**options)
    first = arguments | {"task": task.replace(eval_batches=stopped)}
    assert loop.train(tmp_path / "killed", **first)["step"] == 4

    def killed(*_):
        raise Killed

    monkeypatch.setattr(Checkpoints, "_give_name", killed)
    with pytest.raises(Killed):
        loop.train(tmp_path / "killed", **arguments)
    monkeypatch.undo()
    assert [x["split"] for x in worker.record(tmp_path / "killed")][:2] == ["train", "valid"]
    assert Checkpoints(tmp_path / "killed").score(4) is None
    loop.train(tmp_path / "killed", **arguments)
    assert worker.record(tmp_path / "killed") == worker.record(tmp_path / "undisturbed")


def test_a_file_has_its_old_content_or_its_new_one(tmp_path, monkeypatch):
    path, elsewhere = tmp_path / "config.gin", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    calls = Calls(tmp_path, monkeypatch)
    durable.write(path, b"old")
    for call in ("open", "fsync", "replace"):
        (tmp_path / "config.gin.tmp").symlink_to(elsewhere)
        calls.fail = (call, 0, errno.EIO)
        with pytest.raises(OSError, match=r"config\.gin.* cannot be written \(Input/output error"):
            durable.write(path, b"new")
        assert path.read_bytes() == b"old" and elsewhere.read_text() == "kept"
        assert sorted(os.listdir(tmp_path)) == ["config.gin", "elsewhere"]
    calls.events.clear()
    durable.write(path, b"new")
    names = [name for name, _ in calls.events if name != "unlink"]
    assert names == ["open", "fsync", "replace", "open", "fsync"] and path.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["config.gin", "elsewhere"]


def test_a_file_system_that_flushes_names_by_itself_will_do(tmp_path, monkeypatch):
    fsync, error = os.fsync, errno.EINVAL

    def of_files_alone(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    durable.write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    error = errno.EIO
    with pytest.raises(OSError, match=r"file cannot be written \(Input/output error"):
        durable.write(tmp_path / "file", b"newer")


def test_links_by_temporary_names_are_removed_themselves(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("checkpoints/tmp.4", "checkpoints/tmp.old.2", "checkpoints/tmp.gone.1"):
        (run / name).symlink_to(elsewhere)
    for name in ("metrics.jsonl.tmp", "metrics.tmp", "config.gin.tmp", "metrics.jsonl"):
        (run / name).symlink_to(elsewhere / "file")
    loop.train(run, **worker.arguments(steps=4, config_text=lambda: "steps = 4\n"))
    assert Checkpoints(run).steps() == [4]
    assert not list((run / "checkpoints").glob("tmp*"))
    assert os.listdir(elsewhere) == ["file"] and (elsewhere / "file").read_text() == "kept"
    shutil.rmtree(elsewhere)
    assert len(worker.record(run)) == 2


def test_errors_of_tensorstore_are_the_systems():
    text = (
        'RESOURCE_EXHAUSTED: Error writing "p/0.0" in OCDBT database: Failed writing: "/run/d/7": '
        "Failed to write 9 bytes to file 14: No space left on device [os_error_code='28']"
    )
    error = durable.system_error(ValueError(text))
    assert error.errno == errno.ENOSPC and error.filename == "/run/d/7"
    assert durable.system_error(ValueError("shapes differ")) is None
    line = durable.explained(OSError(errno.EMFILE, "Too many open files"), "read", "/run/x")
    assert str(line) == (
        "/run/x cannot be read (Too many open files): have the limit of open files raised "
        "(ulimit -n)"
    )
    assert line.errno == errno.EMFILE and durable.explained(line, "written") is line


def test_a_checkpoint_notes_what_was_not_tidied_up(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    calls = Calls(tmp_path, monkeypatch)
    calls.fail = ("rmdir", 0, errno.EIO)
    save(checkpoints, 2)
    assert len(checkpoints.notes) == 1 and "checkpoint 2 is saved" in checkpoints.notes[0]
    assert checkpoint.Checkpoints(tmp_path).steps() == [2]


def test_files_that_are_no_files_are_told_by_name(tmp_path):
    with pytest.raises(durable.NotRegular, match=f"^{tmp_path} is no regular file"):
        durable.read(tmp_path)
    path = tmp_path / "nowhere" / "a"
    with pytest.raises(FileNotFoundError, match=f"^{path} cannot be written: there is no folder"):
        durable.write(path, b"")
    path.parent.touch()  # no folder either
    with pytest.raises(FileNotFoundError, match=f"^{path} cannot be written: there is no folder"):
        durable.write(path, b"")

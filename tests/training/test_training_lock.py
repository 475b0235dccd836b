"""A folder takes one training at a time, and is free as soon as its process has ended."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from reformax.training import lock, loop
from reformax.training.callbacks import Callback
from reformax.training.checkpoint import Checkpoints
from tests.training import tiny, worker

ROOT = Path(__file__).resolve().parents[2]


def test_a_second_training_is_refused(tmp_path):
    second = {}

    def train_batch(*args):
        """A second run of the same folder begins in the middle of the first."""
        if not second:
            with pytest.raises(OSError) as second["error"]:
                loop.train(tmp_path, **worker.arguments(steps=2))
            # Another folder is no concern of this one's.
            second["elsewhere"] = loop.train(tmp_path / "other", **worker.arguments(steps=1))
        return tiny.counting().train_batch(*args)

    arguments = worker.arguments(steps=2) | {
        "task": tiny.counting().replace(train_batch=train_batch)
    }
    assert loop.train(tmp_path, **arguments)["step"] == second["elsewhere"]["step"] + 1 == 2
    message = str(second["error"].value)
    assert re.fullmatch(
        rf"output_dir={tmp_path} is in use by another training \(process \d+ on .+\): stop that "
        "one first, or give another --output_dir",
        message,
    )


def test_a_run_that_fails_leaves_the_folder_free(tmp_path):
    with pytest.raises(FloatingPointError) as kept:  # and with it the frames of its traceback
        loop.train(tmp_path, **worker.arguments(task={"poison_step": 0}))
    assert loop.train(tmp_path, **worker.arguments(steps=1))["step"] == 1
    assert kept.value is not None


def test_a_killed_process_leaves_the_folder_free(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from reformax.training.lock import alone_in\n"
        "with alone_in(Path(sys.argv[1])):\n    print(flush=True); time.sleep(100)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            process.stdout.readline()
            with (
                pytest.raises(OSError, match=rf"another training \(process {process.pid} on "),
                lock.alone_in(tmp_path),
            ):
                pytest.fail("two at a time")
        finally:
            process.send_signal(signal.SIGKILL)
    for _ in range(2):
        with lock.alone_in(tmp_path):
            pass


def test_the_holder_is_the_last_one_alone(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on " + "a" * 99)
    with lock.alone_in(tmp_path):
        holder = (tmp_path / ".lock").read_text()
    assert holder == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_lock_deleted_while_it_is_taken_is_none(tmp_path, monkeypatch):
    flock = fcntl.flock

    def late(*args):
        (tmp_path / ".lock").unlink()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(lock.Lost, match=r"\.lock was deleted"), lock.alone_in(tmp_path):
        pytest.fail("locked")


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said = []
    with lock.alone_in(tmp_path, said.append):
        (line,) = said
    assert str(tmp_path) in line and "No locks available" in line


def disturbed(folder, disturb):
    """Trains to step 12 and calls `disturb` when step 4 is saved, before the batch of step 6."""

    def train_batch(seed, step, *sizes):
        if step == 6:  # made while the loop is at step 4 or 5
            wait_for(folder / "checkpoints/4")
            disturb()
        return tiny.counting().train_batch(seed, step, *sizes)

    # The record gets no line before the checkpoint of step 8: each looks whose folder it is.
    settings = {"steps": 12, "checkpoint_every": 4, "eval_every": 12, "log_every": 12}
    arguments = worker.arguments(**settings)
    task = arguments["task"].replace(train_batch=train_batch)
    return loop.train(folder, **arguments | {"task": task})


def wait_for(path):
    """Returns once the path is there."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} is not there"
        time.sleep(0.01)


def delete(folder, aside):
    """Deletes a folder in one moment, whatever is written into it meanwhile."""
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def test_a_folder_deleted_under_a_run_ends_it(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(lock.Lost) as error:
        disturbed(folder, lambda: delete(folder, tmp_path / "aside"))
    assert re.fullmatch(
        rf"{folder}/.lock was deleted while this training ran, so nothing more is saved in "
        rf"output_dir={folder}: leave a run's folder as it is until the run has stopped, then run "
        "again",
        str(error.value),
    )
    left = {p.name for p in folder.iterdir()} if folder.exists() else set()
    assert left <= {"tensorboard", "loss.png"}  # what is for people alone


@pytest.mark.parametrize("error", [ValueError("of orbax"), OSError(errno.ENOENT, "gone")])
def test_a_folder_deleted_while_a_checkpoint_is_written_is_told(tmp_path, monkeypatch, error):
    """Not what the writer's library makes of it."""
    folder = tmp_path / "run"

    def write(*_):
        delete(folder, tmp_path / "aside")
        raise error

    monkeypatch.setattr(Checkpoints, "_write_arrays", write)
    with pytest.raises(lock.Lost, match=r"\.lock was deleted"):
        loop.train(folder, **worker.arguments(steps=2))


@pytest.mark.slow
def test_a_second_training_after_the_lock_was_deleted_is_left_alone(tmp_path):
    there = {}

    def second():
        (tmp_path / ".lock").unlink()
        loop.train(tmp_path, **worker.arguments(steps=5))
        there.update({p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()})

    with pytest.raises(lock.Lost, match=r"\.lock is another training's now.*nothing more is saved"):
        disturbed(tmp_path, second)
    now = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    side_channels = {p for p in now if p.name == "loss.png" or p.parent.name == "tensorboard"}
    assert {p: now[p] for p in now if p not in side_channels} == {
        p: there[p] for p in there if p not in side_channels
    }


def test_a_record_gets_no_line_once_the_lock_is_lost(tmp_path):
    """Which another training's would have among its own; it ends the run before the next save."""
    record, steps = tmp_path / "metrics.jsonl", []

    class Disturb(Callback):
        def on_step(self, step, metrics):
            steps.append(step)
            if step == 3:
                (tmp_path / ".lock").unlink()

    settings = dict(steps=12, checkpoint_every=12, eval_every=12, log_every=1)
    with pytest.raises(lock.Lost, match=r"\.lock was deleted"):
        loop.train(tmp_path, **worker.arguments(**settings, callbacks=[Disturb()]))
    assert [json.loads(x)["step"] for x in record.read_text().splitlines()] == [1, 2, 3]
    assert steps == [1, 2, 3]


@pytest.mark.slow
def test_a_lock_lost_while_a_checkpoint_is_written_gives_it_no_name(tmp_path, monkeypatch):
    write_arrays = Checkpoints._write_arrays

    def write(self, folder, arrays):
        write_arrays(self, folder, arrays)
        if folder.name == "tmp.8":
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(Checkpoints, "_write_arrays", write)
    with pytest.raises(lock.Lost, match=r"\.lock was deleted"):
        disturbed(tmp_path, lambda: None)
    assert Checkpoints(tmp_path).steps() == [4]


@pytest.mark.slow
def test_a_lock_that_cannot_be_looked_at_costs_one_checkpoint_alone(tmp_path, monkeypatch, capsys):
    lstat, writing = os.lstat, []

    def fails(path, *args, **kwargs):
        if str(path).endswith(lock.FILE):
            writing.append(threading.current_thread() is not threading.main_thread())
            if sum(writing) <= 1 < len(writing):  # also of lines before the first checkpoint
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return lstat(path, *args, **kwargs)

    monkeypatch.setattr(os, "lstat", fails)
    assert loop.train(tmp_path, **worker.arguments(steps=12, eval_every=4))["step"] == 12
    assert Checkpoints(tmp_path).steps() == [8, 12]
    (said,) = capsys.readouterr().err.splitlines()
    assert "checkpoint of step 4 is not saved" in said and "Stale file handle" in said


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_no_lock(tmp_path, kind):
    path, elsewhere = tmp_path / ".lock", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    refused = pytest.raises(OSError, match=r"\.lock (is no regular|cannot be opened)")
    with refused as error, lock.alone_in(tmp_path):
        pytest.fail("locked")
    assert "\n" not in str(error.value) and elsewhere.read_text() == "kept"

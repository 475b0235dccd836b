"""A folder takes one training at a time, and is free as soon as its process has ended."""

import errno
import fcntl
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reformax.training import lock, loop
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
        "task": tiny.counting()._replace(train_batch=train_batch)
    }
    assert loop.train(tmp_path, **arguments)["step"] == second["elsewhere"]["step"] + 1 == 2
    message = str(second["error"].value)
    assert re.fullmatch(
        rf"output_dir={tmp_path} is in use by another training \(process \d+ on .+\): stop that "
        "one first, or give another --output_dir",
        message,
    )
    alone = tmp_path / "alone"
    loop.train(alone, **worker.arguments(steps=2))
    assert worker.record(tmp_path) == worker.record(alone)


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


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said = []
    with lock.alone_in(tmp_path, said.append):
        (line,) = said
    assert str(tmp_path) in line and "No locks available" in line

"""Standard streams that break under a script: no traceback, and the script's own exit code."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reformax.training import checkpoint
from tests.training import worker

ROOT = Path(__file__).resolve().parents[2]

# Prints more than a pipe or a buffer holds, and exits with 3; 4 if a file got a standard number.
PROGRAM = """
import os, sys
from reformax.cli import errors, streams

def main():
    with open(os.devnull) as file:
        if file.fileno() < 3:
            return 4
    print("naïve \\udce9")
    for i in range(20_000):
        print("a line")
        if i % 1000 == 0:
            print("err", file=sys.stderr)
    sys.stdin.read()
    return 3

sys.exit(errors.exit_code(main, streams.KIND))
"""


def shell(arguments, redirections, **environment):
    """(exit code, stdout, stderr) of Python with these arguments under bash."""
    found = subprocess.run(
        ["bash", "-c", f'"$0" "$@" {redirections}', sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return found.returncode, found.stdout, found.stderr


def run(redirections, kind="Stream"):
    """The same of the program."""
    program = ["-c", PROGRAM.replace("KIND", kind)]
    return shell(program, redirections, PYTHONIOENCODING="ascii")


EXIT = "; exit ${PIPESTATUS[0]}"


@pytest.mark.parametrize(
    "redirections, notes",
    [
        ("", 0),
        ("<&- >&- 2>&-", 0),
        (f"| head -1 {EXIT}", 1),
        (">/dev/full", 1),
        (f"| sleep 2 {EXIT}", 1),  # a reader that does not read
    ],
)
def test_a_broken_stream_is_told_once_and_changes_no_exit_code(redirections, notes):
    code, out, err = run(redirections)
    assert code == 3
    assert [x for x in err.splitlines() if x != "err"] == [
        x for x in err.splitlines() if x.startswith("note: standard output failed")
    ]
    assert err.count("note: ") == notes
    if redirections == "":
        assert out.startswith("na\\xefve \\udce9\n") and out.count("a line\n") == 20_000
    if "head" in redirections:
        assert out.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_both_streams_keep_their_order(unbuffered):
    lines = (
        "import sys; from reformax.cli import errors\n"
        "def main():\n"
        "    for i in range(3): print(i, flush=True); print('err', i, file=sys.stderr)\n"
        "    return 0\n"
        "sys.exit(errors.exit_code(main))"
    )
    code, out, _ = shell(["-c", lines], "2>&1", PYTHONUNBUFFERED=unbuffered)
    assert (code, out) == (0, "0\nerr 0\n1\nerr 1\n2\nerr 2\n")


def test_a_full_stderr_is_told_on_stdout():
    code, out, err = run("2>/dev/full")
    assert (code, err) == (3, "") and out.count("a line\n") == 20_000
    assert out.count("note: standard error failed ([Errno 28] No space left on device)") == 1


def test_output_that_is_the_result_is_written_or_an_error():
    assert run("", "Result")[:1] == (3,)
    code, _, err = run(">/dev/full", "Result")
    assert code == 1
    assert err.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert "Traceback" not in err and "ignored" not in err


CONFIG = """
from __gin__ import dynamic_registration
from reformax.training import loop
from reformax.training import optimizer
from tests.training import tiny
loop.train.steps = 12
loop.train.batch_size = 8
loop.train.length = 16
loop.train.log_every = 4
loop.train.optimizer = @optimizer.adamw()
optimizer.adamw.learning_rate = 1e-2
loop.train.model = @tiny.TinyLM
loop.train.task = @tiny.counting()
"""


@pytest.fixture
def command(tmp_path):
    """The command line of a short training in tmp_path/run."""
    (tmp_path / "run.gin").write_text(CONFIG)
    run = tmp_path / "run"
    return [ROOT / "train.py", f"--config_file={run}.gin", f"--output_dir={run}"]


@pytest.mark.slow
def test_training_ends_well_without_its_output(tmp_path, command):
    code, out, err = shell(command, f"| head -1 {EXIT}")
    assert code == 0 and out.count("\n") == 1 and "from step 1 to 12" in out
    assert err.count("note: ") == 1 and "Traceback" not in err and "ignored" not in err
    record = worker.record(tmp_path / "run")
    assert [line["step"] for line in record] == [4, 8, 12, 12]
    for i, redirections in enumerate(("<&- >&- 2>&-", ">/dev/full 2>&1")):
        (tmp_path / "run").rename(tmp_path / str(i))
        assert shell(command, redirections) == (0, "", "")
        assert worker.record(tmp_path / "run") == record
    evaluate = [ROOT / "evaluate.py", f"--output_dir={tmp_path / 'run'}", "--trust_config"]
    code, _, err = shell(evaluate, ">/dev/full")
    assert code == 0 and err.count("note: ") == 1 and "ignored" not in err
    scores = json.loads((tmp_path / "run" / "evaluation_valid.json").read_text())
    assert scores["bits_per_dim"] == record[-1]["bits_per_dim"]


@pytest.mark.slow
def test_a_terminal_that_goes_away_saves_the_run(tmp_path, command):
    terminal, end = pty.openpty()
    # The first terminal that a session's leader opens is the session's own.
    shell = f'exec "$0" "$@" <>{os.ttyname(end)} >&0 2>&0'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            shell,
            sys.executable,
            *map(str, command),
            "--config=loop.train.steps=1000000",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    record, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not record.exists() or record.stat().st_size == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for descriptor in (end, terminal):
        os.close(descriptor)
    assert process.wait(60) == 129
    (step,) = checkpoint.Checkpoints(tmp_path / "run").steps()
    assert step >= worker.record(tmp_path / "run")[-1]["step"] > 0

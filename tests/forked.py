"""Scripts in processes forked after the imports, which take longer than a small script runs.

`python -m tests.forked` is the server: it imports what scripts need, then reads requests, a line of
JSON each, and answers with the exit code of each. It touches no device of JAX, whose threads would
not survive the fork.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = (
    "reformax.__main__",
    "reformax.cli.train",
    "reformax.cli.evaluate",
    "reformax.cli.generate",
    "reformax.convert.__main__",
    "reformax.models.seq2seq",
    "reformax.training.loop",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "orbax.checkpoint",
)
LIMIT = 300  # seconds; a script that takes longer is killed


class Ending(NamedTuple):
    """How a script ended: its exit code, minus the signal's number if killed; what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """Runs scripts of any checkout, one after the other, in this environment."""

    def __init__(self, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], folder: Path) -> Ending:
        """What `python ARGUMENTS` does in the folder, a checkout whose modules it imports."""
        outputs = [folder / ".stdout", folder / ".stderr"]
        request = {
            "arguments": arguments,
            "folder": str(folder),
            "outputs": list(map(str, outputs)),
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return Ending(code, *(path.read_text(errors="replace") for path in outputs))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever an import prints
    for name in PRELOADED:
        importlib.import_module(name)
    ours = {path.stem for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]  # a checkout has its own
    gc.freeze()
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            os.close(answers)
            return become(**json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, f"{code}\n".encode())


def become(arguments: list[str], folder: str, outputs: list[str]) -> None:
    """Is `python ARGUMENTS` in the folder."""
    signal.alarm(LIMIT)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
    sys.stdin = os.fdopen(0)
    os.environ["PYTHONPATH"] = folder  # of its own children
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(ROOT)))]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve()

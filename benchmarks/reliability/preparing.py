"""`reformax prepare` whose process, or one of its workers, SIGKILL ends at a random moment.

    python -m benchmarks.reliability preparing --cases=50 --seed=0

A case prepares a text in two workers and is killed at any time. What then has its name in the
folder must be whole, by every byte of every file, and what is not must be absent. No worker may
outlive its process. The same command then makes the files of a run that nothing interrupts, and
leaves nothing beside them. All that is right is counted as one.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs

CASES = 50
GONE = 30.0  # seconds that workers have to end in
LOOK = 0.002  # seconds between looks
ROWS = [(kind, victim) for kind in ("bytes", "pieces") for victim in ("process", "worker")]
# Shards so small that two workers make many.
SCRIPT = """
import sys
from reformax.cli import prepare
from reformax.data import piece_files, token_files
token_files.SHARD = piece_files._SPAN = 2**16
sys.exit(prepare.main(sys.argv[1:]))
"""


class Case(NamedTuple):
    """What became of a case: whether a kill struck, what had its name then, and what is wrong."""

    killed: bool
    whole: bool
    wrong: list[str]


class Texts:
    """A text, and what preparing it makes where nothing interrupts."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.kind = folder, kind
        self.data = folder / "text.txt"
        if not self.data.exists():
            words = np.random.default_rng(0).choice(["a ", "few ", "words\n", "of ", "\0"], 400_000)
            self.data.write_text("".join(words))
        begun = time.monotonic()
        ending = self.start(folder / f"{kind}.whole").wait()
        self.seconds = time.monotonic() - begun
        if ending:
            raise RuntimeError(f"prepare ended with {ending} where nothing killed it")
        self.files = files_of(folder / f"{kind}.whole")

    def start(self, to: Path) -> subprocess.Popen:
        """Starts prepare."""
        argv = [f"--data_dir={self.data}", f"--to={to}", "--processes=2", "--quiet"]
        argv += ["--vocab_size=280"] * (self.kind == "pieces")
        with open(f"{to}.err", "ab") as err:
            return subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *argv],
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=os.environ | {"PYTHONPATH": runs.ENVIRONMENT["PYTHONPATH"]},
            )


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, CASES, argv)
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="reliability."))
    texts = {kind: Texts(folder, kind) for kind in ("bytes", "pieces")}
    title = "Preparing a text, killed by SIGKILL and run again"
    table = Table("text", "killed", "kills", "whole then", "right", title=title)
    failed = 0
    for number, (kind, victim) in enumerate(ROWS):
        cases = range(command.share(args.cases, number, len(ROWS)))
        found = []
        for case in runs.in_turn(cases, lambda _, row=(kind, victim): " ".join(row)):
            to = folder / f"{kind}.{victim}.{case}"
            found.append(one(texts[kind], to, victim, rng))
            for wrong in found[-1].wrong:
                print(f"{to.name}: {wrong}")
        kills = [x for x in found if x.killed]
        right = sum(not x.wrong for x in kills)
        failed += sum(bool(x.wrong) for x in found)
        whole = sum(x.whole for x in kills)
        table.row(kind, victim, *map(str, (len(kills), whole, right)))
    if failed:
        print(f"kept for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed > 0)


def one(texts: Texts, to: Path, victim: str, rng: random.Random) -> Case:
    """Kills a run, looks at what it left, and runs it again."""
    wrong, killed = [], False
    while not killed:  # a moment may be after the end
        for path in (to, to.with_name(f"{to.name}.partial")):
            shutil.rmtree(path, ignore_errors=True)
        process = texts.start(to)
        killed, workers = kill(process, victim, rng.uniform(0, texts.seconds))
    code = process.wait(runs.LIMIT)
    if victim == "worker" and code == 0:
        wrong.append("a worker was killed, and the run ended well")
    until = time.monotonic() + GONE
    while (left := [pid for pid in workers if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(LOOK)
    wrong += [f"worker {pid} outlived its process" for pid in left]
    whole = to.exists()
    wrong += [f"{name} is no file of a whole text" for name in differing(to, texts.files)]
    if again := texts.start(to).wait(runs.LIMIT):
        wrong.append(f"the second run ended with {again}")
    if files_of(to) != texts.files:
        wrong.append("the second run made other files")
    beside = [path.name for path in to.parent.glob(f"{to.name}.*") if path.suffix != ".err"]
    wrong += [f"{name} was left" for name in beside]
    if not wrong:
        shutil.rmtree(to)
    return Case(killed, whole, wrong)


def kill(process: subprocess.Popen, victim: str, seconds: float) -> tuple[bool, list[int]]:
    """Kills a process or one of its workers after some time; returns whether, and the workers."""
    until = time.monotonic() + seconds
    while process.poll() is None:
        workers = children(process.pid)
        if time.monotonic() > until and (victim == "process" or workers):
            with suppress(ProcessLookupError):
                os.kill(process.pid if victim == "process" else workers[0], signal.SIGKILL)
                # A worker that had no more to do is not missed.
                struck = victim == "process" or process.wait(runs.LIMIT) != 0
                return struck, workers
        time.sleep(LOOK)
    return False, []


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def files_of(folder: Path) -> dict[str, str]:
    """Every file of a folder, with a digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def differing(folder: Path, want: dict[str, str]) -> list[str]:
    """The files under names of whole things that differ from those of a whole text.

    A folder of a text has its ids later, each split's under its name once they are whole.
    """
    found = files_of(folder)
    named = {name: x for name, x in found.items() if ".partial" not in name and ".tmp" not in name}
    parts = [name.rpartition("/")[0] for name in named]
    missing = [name for name in want if name.rpartition("/")[0] in parts and name not in named]
    missing = [name for name in missing if "/" in name]  # a vocabulary comes after the text
    return [name for name, x in named.items() if want.get(name) != x] + missing


if __name__ == "__main__":
    sys.exit(main())

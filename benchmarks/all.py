"""Every figure of the docs that a GPU measured, in parts that can be interrupted.

    python -m benchmarks.all --out=FILE

runs the commands of the pages one by one, and adds to FILE what each measured: a line of JSON with
its rows, versions, hardware, commit, date and seconds. A part that is in FILE is not run again. A
part that fails or takes longer than --limit leaves nothing, and the others run. What a command
keeps in files of its own begins afresh here, for it may be of an older commit. --only and --list
choose and show parts. `python -m benchmarks.tables FILE` makes tables of them.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import figures, lines
from benchmarks.harness.calls import exit_if
from benchmarks.harness.figures import Figures, Part
from benchmarks.harness.processes import ROOT

ATTENTION = "reformax/ops", "benchmarks/harness", "benchmarks/peers"
MODELS = *ATTENTION, "reformax/layers", "reformax/models"
TRAINED = *MODELS, "reformax/training", "configs", "benchmarks/rows"


def _attention(command: str) -> Part:
    return Part(command, (*ATTENTION, "benchmarks/rows", "benchmarks/attention.py"))


def _arena(flags: str, runs: str) -> Part:
    command = f"long_range_arena {flags} --saved=runs/{runs}.jsonl --runs=runs/{runs}"
    return Part(command, (*TRAINED, "benchmarks/long_range_arena.py"))


PARTS = {
    "step": Part("step --lengths 65536", (*MODELS, "benchmarks/step.py")),
    "lsh_by_length": _attention(
        'attention --only hashed "local, chunks" --tokens=65536 --lengths 1024 4096 16384 65536 '
        "--peers"
    ),
    "exact_attention": _attention(
        "attention --only exact --tokens=65536 --lengths 1024 16384 65536"
    ),
    "block_sparse": _attention("attention --only blocks --lengths 65536 --peers"),
    "generation": Part("generation", (*MODELS, "reformax/generation", "benchmarks/generation.py")),
    "reversible": Part("reversible", (*MODELS, "benchmarks/reversible.py")),
    "published": Part("published --profile", (*TRAINED, "benchmarks/published.py")),
    "float8": Part("float8", (*TRAINED, "benchmarks/float8.py")),
    "linear_attention": _attention(
        "attention --peers --lengths 1024 131072 1048576 --only linear_time "
        "--saved=docs/linear_attention.jsonl"
    ),
    "sparse_attention": _attention(
        "attention --peers --n_heads=16 --lengths 1024 65536 1048576 --only hashed windows chosen "
        "--saved=docs/sparse_attention.jsonl"
    ),
    "scaling": Part(
        "scaling --page --saved=docs/scaling.jsonl --profile=runs/scaling",
        (*TRAINED, "benchmarks/scaling.py"),
    ),
    "associative_recall": Part(
        "associative_recall --length=512 --tokens=32768 --steps=1000 --learning_rate=3e-3 "
        "--out=recall.jsonl",
        (*TRAINED, "benchmarks/associative_recall.py"),
    ),
    "associative_recall_2048": Part(
        "associative_recall --steps=1500 --learning_rate=3e-3 --out=recall.jsonl --length=2048 "
        "--tokens=65536 --d_model=64",
        (*TRAINED, "benchmarks/associative_recall.py"),
    ),
    "global_layers": Part(
        "global_layers --data_dir=wheels --at_once=2 --gpus=2 --saved=runs/global_layers.jsonl "
        "--runs=runs/global_layers",
        (*TRAINED, "benchmarks/global_layers.py"),
    ),
    "listops": _arena("--task=listops --steps=3000 --at_once=2", "listops"),
    "listops_curriculum": _arena(
        "--task=listops --steps=3000 --curriculum --pooling=cls --at_once=3", "listops_curriculum"
    ),
    "pathfinder": _arena("--task=pathfinder --steps=14000", "pathfinder"),
    "attention_table": _attention("attention --table=runs/attention_table"),
}
# Flags of files and folders that hold what an earlier run measured.
KEPT = re.compile(r"--(saved|runs|out|table|profile)=\S+")
# Asked in the part's own interpreter: this one leaves the device to it.
HARDWARE = "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind)"


def run(name: str, limit: float) -> Figures:
    """Runs a part; `CalledProcessError` or `TimeoutExpired` if it does not come to its end."""
    part = PARTS[name]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        afresh = KEPT.sub(lambda flag: f"--{flag[1]}={folder}/{flag[1]}", part.command)
        command = [sys.executable, "-m", *shlex.split(f"benchmarks.{afresh}")]
        rows = Path(folder) / "rows"
        subprocess.run([*command, f"--rows={rows}"], cwd=ROOT, check=True, timeout=limit)
        seconds = time.perf_counter() - start
        found = figures.tables(rows)
    asked = [sys.executable, "-c", HARDWARE]
    hardware = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Figures(
        part=name,
        command=f"python -m benchmarks.{part.command}",
        measures=list(part.measures),
        commit=figures.git("rev-parse", "HEAD"),
        changed=bool(figures.git("status", "--porcelain", "--", *part.measures)),
        date=date,
        seconds=round(seconds, 1),
        hardware=hardware.strip(),
        versions=figures.versions(),
        tables=found,
    )


def main(argv: Sequence[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file of the figures")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--list", action="store_true", help="show the parts and run none")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a part (default: 900)")
    args = parser.parse_args(argv)
    if args.out is None and not args.list:
        parser.error("--out is missing: give the file of the figures, or --list")
    known = {} if args.out is None else figures.read(args.out)
    failed = []
    for name in args.only:
        if args.list or name in known:
            state = f", {known[name].date}" if name in known else ""
            print(f"{name}: python -m benchmarks.{PARTS[name].command}{state}", flush=True)
            continue
        try:
            lines.add(args.out, run(name, args.limit)._asdict())
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    exit_if(failed)


if __name__ == "__main__":
    main()

"""Every figure of the docs that a GPU measured, in parts that can be interrupted.

    python -m benchmarks.all --out=FILE

runs the commands of the pages one by one, and adds to FILE what each measured: a line of JSON with
its rows, versions, hardware, commit, date and seconds. A part that is in FILE is not run again. A
part that fails or takes longer than --limit leaves nothing, and the others run. --only and --list
choose and show parts. `python -m benchmarks.tables FILE` makes tables of them.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import figures
from benchmarks.harness.calls import exit_if
from benchmarks.harness.figures import Figures, Part
from benchmarks.harness.processes import ROOT

ATTENTION = "reformax/ops", "benchmarks/harness", "benchmarks/peers"
MODELS = *ATTENTION, "reformax/layers", "reformax/models"
PARTS = {
    "step": Part("step --lengths 65536", (*MODELS, "benchmarks/step.py")),
    "attention": Part(
        "attention --peers --plot docs/attention.png", (*ATTENTION, "benchmarks/attention.py")
    ),
    "exact_attention": Part("attention --exact", (*ATTENTION, "benchmarks/attention.py")),
    "block_sparse": Part(
        "block_sparse --peers --plot docs/block_sparse.png",
        (*ATTENTION, "benchmarks/block_sparse.py"),
    ),
    "generation": Part("generation", (*MODELS, "reformax/generation", "benchmarks/generation.py")),
    "reversible": Part("reversible --options", (*MODELS, "benchmarks/reversible.py")),
    "translation_step": Part(
        "translation --sources=newstest2014.en --step --repeats=5",
        (*MODELS, "benchmarks/translation.py"),
    ),
    "translation": Part(
        "translation --sources=newstest2014.en --sentences=1200 --repeats=2",
        (*MODELS, "reformax/generation", "benchmarks/translation.py"),
    ),
}
# Asked in the part's own interpreter: this one leaves the device to it.
HARDWARE = "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind)"


def run(name: str, limit: float) -> Figures:
    """Runs a part; `CalledProcessError` or `TimeoutExpired` if it does not come to its end."""
    part = PARTS[name]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    command = [sys.executable, "-m", *f"benchmarks.{part.command}".split()]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        subprocess.run([*command, f"--rows={rows}"], cwd=ROOT, check=True, timeout=limit)
        seconds = time.perf_counter() - start
        found = figures.tables(rows.read_text().splitlines())
    asked = [sys.executable, "-c", HARDWARE]
    hardware = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return Figures(
        part=name,
        command=shlex.join(["python", *command[1:]]),
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
            figures.append(args.out, run(name, args.limit))
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    exit_if(failed)


if __name__ == "__main__":
    main()

"""What a language model learns with one attention or another in every fourth layer.

    python -m benchmarks.global_layers --data_dir=FILE_OR_FOLDER --saved=FILE

trains configs/transformer_text_ten_minutes.gin for 900 steps with each attention in the place of
the layers that see every key, between windows, and prints valid bits per byte and tokens/s. All
have queries and keys of their own and no next value but where the name says so, and are shown some
1,000 of 4,096 keys. --reversible takes configs/reformer_text_ten_minutes.gin, and --only names
rows.

Each row is a process of its own. --at_once=2 trains two side by side, so that a GPU computes while
the next one compiles; tokens/s are then of both together. With --limit no row goes on after so
many seconds. --saved=FILE adds each row to a file as soon as it is known, and a row that is there
for as many steps is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import command_line
from benchmarks.harness.calls import attempt, exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.processes import ROOT

NEXT_VALUE = "lm.{model}.next_value=True"
# The settings of each row. A model's own are of {model}.
ROWS = {
    "flash": ["global_attention=@flash.flash()"],
    "moba": ["global_attention=@moba.moba()", "moba.moba.block_size=64", "moba.moba.top_k=16"],
    "nsa, two heads of keys": [
        "global_attention=@nsa.nsa()",
        "nsa.nsa.n_selected=8",
        "nsa.nsa.window=128",
        "lm.{model}.n_kv_heads=2",
    ],
    "smyrf": [
        "global_attention=@smyrf.smyrf()",
        "smyrf.smyrf.chunk_len=128",
        "smyrf.smyrf.n_hashes=8",
    ],
    "asymmetric_lsh": [
        "global_attention=@asymmetric_lsh.asymmetric_lsh()",
        "asymmetric_lsh.asymmetric_lsh.chunk_len=128",
    ],
    "bigbird": [
        "global_attention=@block_sparse.block_sparse()",
        "block_sparse.block_sparse.block_size=64",
        "block_sparse.block_sparse.pattern=@block_patterns.bigbird()",
        "block_patterns.bigbird.n_random=12",
    ],
    "routing": [
        "global_attention=@routing.routing()",
        "routing.routing.n_clusters=4",
        "routing.routing.decay=0.99",
    ],
    "hash_sparse": [
        "global_attention=@hash_sparse.hash_sparse()",
        "hash_sparse.hash_sparse.n_buckets=4",
    ],
    "longformer, dilation 4": [
        "global_attention=@longformer.longformer()",
        "longformer.longformer.window=1024",
        "longformer.longformer.dilation=4",
    ],
    "dsa": ["global_attention=@dsa.dsa()", "dsa.dsa.top_k=1024", "dsa.dsa.n_index_heads=2"],
    "windows": ["global_attention=@local.local()"],
    "dense, shared keys, next value": [NEXT_VALUE],
    "lsh, next value": ["global_attention=@lsh.lsh()", NEXT_VALUE],
    "hash_sparse, shared keys, next value": [
        "global_attention=@hash_sparse.hash_sparse()",
        "hash_sparse.hash_sparse.n_buckets=4",
        "hash_sparse.hash_sparse.shared_qk=True",
        "hash_sparse.hash_sparse.own=False",
        NEXT_VALUE,
    ],
    "routing, shared keys, next value": [
        "global_attention=@routing.routing()",
        "routing.routing.n_clusters=4",
        "routing.routing.decay=0.99",
        "routing.routing.shared_qk=True",
        "routing.routing.own=False",
        NEXT_VALUE,
    ],
}
TINY = [
    *("length=128", "batch_size=2", "d_model=16", "d_ff=16", "n_layers=4", "n_heads=2"),
    *("d_head=8", "loop.train.eval_stride=128", "loop.train.eval_batch_size=2"),
    *("loop.train.eval_tokens=256", "loop.train.eval_whole=False", "loop.train.log_every=1"),
    *("loop.train.task=@stdlib.stdlib()", "stdlib.stdlib.max_bytes=100_000"),
]


class Trained(NamedTuple):
    """What a row learnt."""

    bits: float
    n_targets: int
    tokens_per_second: float


def config_of(name: str, args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The config file of a row, and its further settings."""
    kind, model = ("reformer", "Reformer") if args.reversible else ("transformer", "Transformer")
    own = [setting.format(model=f"{model}LM") for setting in ROWS[name]]
    given = [] if NEXT_VALUE in ROWS[name] else [f"lm.{model}LM.next_value=False"]
    warmup = 300 if args.steps > 1000 else args.steps * 2 // 9
    given += [f"steps={args.steps}", f"warmup_steps={warmup}", *(TINY if args.tiny else [])]
    return ROOT / "configs" / f"{kind}_text_ten_minutes.gin", given + own


def train(name: str, args: argparse.Namespace, seconds: float | None) -> Trained:
    """Trains a row in a process of its own, for at most so many seconds; None: any.

    Raises:
      RuntimeError: the process failed; its last line is the message.
      TimeoutError: it took longer, or there was no time to begin.
    """
    if seconds is not None and seconds <= 0:
        raise TimeoutError("no time left to begin")
    file, given = config_of(name, args)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--quiet", f"--output_dir={folder}/run"]
        command += [f"--config_file={file}"]
        command += [f"--data_dir={args.data_dir}"] if args.data_dir else []
        command += [f"--config={setting}" for setting in given]
        # Several on one device: none takes its memory beforehand.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        options = dict(capture_output=True, text=True, env=environment, cwd=ROOT)
        try:
            done = subprocess.run(command, timeout=seconds, **options)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"more than {seconds:.0f} s") from None
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    speeds = [x["timing"].get("tokens_per_second") for x in lines if x["split"] == "train"]
    last = [x for x in lines if x["split"] == "valid"][-1]
    speed = statistics.median(x for x in speeds if x)
    return Trained(last["bits_per_dim"], last["n_targets"], speed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--data_dir", help="the text: a file or a folder")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=command_line.positive, default=900, help="default: 900")
    parser.add_argument("--reversible", action="store_true", help="reversible stacks")
    parser.add_argument("--at_once", type=command_line.positive, default=1, help="default: 1")
    parser.add_argument("--limit", type=float, help="seconds of all rows")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="rows that are known, to add to")
    args = parser.parse_args(argv)
    if args.tiny:
        args.steps = 2
    elif not args.data_dir:
        parser.error("--data_dir is missing: give the text to train on")

    run = {"steps": args.steps, "reversible": args.reversible, "tiny": args.tiny}
    begin = time.monotonic()
    known = {}
    if args.saved and args.saved.exists():
        for line in map(json.loads, args.saved.read_text().splitlines()):
            if line["run"] == run:
                known[line["row"]] = Trained(**line["trained"])

    def row(name: str) -> Trained:
        left = None if args.limit is None else begin + args.limit - time.monotonic()
        trained = train(name, args, left)
        if args.saved:
            line = {"row": name, "run": run, "trained": trained._asdict()}
            with args.saved.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return trained

    table = Table("layers 3, 7 and 11", "bits per byte", "targets", "tokens/s")
    with ThreadPoolExecutor(args.at_once) as pool:
        names = args.only or list(ROWS)
        waiting = {name: pool.submit(attempt, row, name) for name in names if name not in known}
        for name in names:
            if name in waiting:
                known[name] = waiting[name].result()
            table.result(name, known=known[name], cells=_cells)
    exit_if(name for name in names if isinstance(known[name], Exception))


def _cells(trained: Trained) -> list[str]:
    return [f"{trained.bits:.3f}", f"{trained.n_targets:,}", f"{trained.tokens_per_second:,.0f}"]


if __name__ == "__main__":
    main()

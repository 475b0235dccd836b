"""Rows that are trained as configs say, each in a process of its own, and kept in a file."""

from __future__ import annotations

import argparse
import functools
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, lines
from benchmarks.harness.calls import PeerError
from benchmarks.harness.processes import Answer, ask, ask_each, sharing

Part = tuple[str, Sequence[str]]  # a config file, and settings that override it


def flags(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> None:
    """Adds --only, of groups or rows, --seed, --at_once, --gpus, --limit, --saved and --runs."""
    rows = [row for rows in groups.values() for row in rows]
    choices = dict(nargs="+", choices=[*groups, *rows], default=list(groups))
    names = "; ".join(f"{group}: {', '.join(map(repr, rows))}" for group, rows in groups.items())
    parser.add_argument("--only", **choices, metavar="GROUP_OR_ROW", help=names)
    text = "of initial values, batches, hashes and dropout (default: 0)"
    parser.add_argument("--seed", type=command_line.natural, default=0, help=text)
    parser.add_argument("--at_once", type=command_line.positive, default=1, help="default: 1")
    parser.add_argument("--gpus", type=command_line.positive, default=1, help="default: 1")
    parser.add_argument("--limit", type=command_line.seconds, help="seconds of all rows")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="rows that are known, to add to")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keeps the runs here")


def chosen(args: argparse.Namespace, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The rows that --only names."""
    return list(dict.fromkeys(row for name in args.only for row in groups.get(name, [name])))


def trained(
    names: Sequence[str],
    parts_of: Callable[[str], Sequence[Part]],
    run: Mapping[str, Any],
    args: argparse.Namespace,
) -> Iterator[tuple[str, Answer | Exception]]:
    """What rows learnt, as `benchmarks.rows.trained` says, in their order.

    Args:
      names: of the rows.
      parts_of: the configs of a row, which are run one after the other.
      run: what else decides what rows learn, for the file of known ones. Runs that differ in it
        are kept in folders of their own.
      args: the values of `flags`; `data_dir` is the path of the data, or None.
    """
    run = {**run, "data": args.data_dir and args.data_dir.name}
    run |= {"seed": f"seed{args.seed}"} if args.seed else {}
    known: dict[str, Answer | Exception] = {
        x["row"]: x["trained"] for x in lines.read(args.saved) if x["run"] == run
    }
    end = None if args.limit is None else time.monotonic() + args.limit
    with ExitStack() as opened:
        folder = args.runs or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        folder /= "_".join(
            key if value is True else str(value) for key, value in run.items() if value
        )
        folder.mkdir(parents=True, exist_ok=True)
        free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for gpu in _gpus(args.gpus) * args.at_once:
            free.put(gpu)
        train = functools.partial(_train, args=args, folder=folder.absolute(), end=end, free=free)
        seed = f"loop.train.seed={args.seed}"
        parts = {x: [(file, [*own, seed]) for file, own in parts_of(x)] for x in names}
        asked = {x: functools.partial(train, x, parts[x]) for x in names if x not in known}
        answers = ask_each(asked, args.at_once * args.gpus)
        for name in names:
            while name not in known:
                row, answer = next(answers)
                if "error" in answer:
                    known[row] = PeerError(answer["error"])
                    continue
                known[row] = answer
                if args.saved:
                    lines.add(args.saved, {"row": row, "run": run, "trained": answer})
            yield name, known[name]


def _train(
    name: str,
    parts: Sequence[Part],
    args: argparse.Namespace,
    folder: Path,
    end: float | None,
    free: queue.SimpleQueue[str | None],
) -> Iterator[Answer]:
    """Trains a row in a process of its own, until the time `end` at most; None: any.

    What is cut off then is saved, so that the next call goes on with it.

    Args:
      free: the GPUs, each as often as it takes another row; None is whatever there is.
    """
    limit = None if end is None else end - time.monotonic()
    if limit is not None and limit <= 0:
        yield {"error": "TimeoutError: no time left to begin"}
        return
    gpu = free.get()
    try:
        yield from ask(
            sys.executable,
            "rows.trained.train",
            patience=limit,
            env=sharing(args.at_once) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            name=name,
            parts=parts,
            data_dir=args.data_dir and os.path.abspath(args.data_dir),
            folder=str(folder / name),
            turn=str(folder / f"turn{gpu or ''}"),
            limit=limit,
        )
    finally:
        free.put(gpu)


def _gpus(n: int) -> list[str | None]:
    """The names of n GPUs; a single one is whatever there is. Exits if fewer are visible."""
    if n == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(n)]
    if len(names) < n:
        sys.exit(f"gpus is {n} and CUDA_VISIBLE_DEVICES is {visible}: give at most {len(names)}")
    return list(names[:n])

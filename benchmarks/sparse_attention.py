"""Attention that chooses where to look, by length, beside dense causal attention and its peers.

    python -m benchmarks.sparse_attention --peers --saved=docs/sparse_attention.jsonl
    python -m benchmarks.sparse_attention --lengths 65536 --only moba nsa "nsa, impl='pallas'"
    python -m benchmarks.sparse_attention --drawn=docs/sparse_attention.jsonl --plot=FILE

prints a line for each figure as soon as it is known, and then a table for each length N of one
sequence:

  * forward, and gradient (forward and backward, with respect to every input), in milliseconds: the
    median of calls waited for one by one and, in parentheses, the mean of 20 queued calls. Of slow
    calls there are fewer;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation;
  * the speed relative to exact attention of as many heads of keys, on a GPU cuDNN's.

What runs out of memory is recorded so. A row whose gradient would take more than a second at a
length, or more memory than there is, as both grew at shorter ones, is left out. Rows are causal but
`longformer`, whose window has both sides, with 16 global tokens. A query sees 256 keys in each
round of `lsh`, `smyrf` and `asymmetric_lsh`; `nsa` has one head of keys, and no weights of its own;
where it says so, 4 of keys and 64 of queries, of 128.

A row gets no time before its output and gradients agree, at a short length, with another
implementation given the same plan, and nearly all of the plan with that implementation's: on a GPU
array operations, on a CPU the interpreted kernels. `--peers` adds PyTorch's FlexAttention with the
same masks, transformers' Longformer without its projections, and flash-linear-attention's MoBA and
NSA. They get the same inputs and are checked against the same numbers: MoBA's means are rounded
there, so some queries choose other blocks. A last table has the peers' times over ours.

Each row is a process. Ours compile side by side, then have the device alone in turn; peers come
after them. What takes more than `--limit` seconds to compile or to time is killed, recorded so, and
the others go on; stderr says what each does, and since when. `--saved` adds each figure to a file,
one JSON line each; what the file has of this machine and these sizes is in the tables and not
measured again. `--plot` draws the figures, or those that `--drawn` names; then nothing is measured.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# Processes share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.harness import command_line, rows
from benchmarks.harness.calls import exit_if
from benchmarks.harness.kept import Checked, Figures, Known, read
from benchmarks.harness.output import Table, plot
from benchmarks.harness.processes import Answer, ask, ask_each
from benchmarks.peers.linear_jax import SLOW
from benchmarks.peers.sparse_jax import MOST, Shape, algorithms

SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32", 64, 16, 2),
    "cpu": Shape((1024, 4096), 4, 32, "float32", 512, 128, 4),
    "gpu": Shape((1024, 65536, 16384, 262144, 1048576), 16, 64, "bfloat16", 2048, 512, 16),
}


class Run:
    """What all processes of a run share, and their answers."""

    def __init__(self, shape: Shape, figures: Figures, repeats: int, limit: float, folder: str):
        self.shape, self.figures, self.repeats = shape, figures, repeats
        self.limit, self.folder = limit, folder

    def ask(self, python: str, function: str, on_cpu: bool = False, **request) -> Iterator[Answer]:
        env = {"JAX_PLATFORMS": "cpu"} if on_cpu else None
        shared = dict(folder=self.folder, limit=self.limit)
        return ask(python, function, patience=max(60, self.limit), env=env, **shared, **request)

    def keep(self, name: str, of: str | None, answer: Answer, lengths: Sequence[int]) -> None:
        """Keeps an answer, of those of `lengths` that are missing if it has none, and prints it."""
        missing = [n for n in self.figures.missing(name) if n in lengths]
        for length in [answer["length"]] if "length" in answer else missing:
            self.figures.add(name, of, length, answer)
            print(f"{name}, {length:,}: {_line(self.figures.known(name, length))}", flush=True)

    def ours(self, names: Sequence[str], with_numbers: Sequence[str]) -> None:
        """Our rows, and what peers have to compute: the first two lengths, then one by one.

        A process holds what memory it has had, so those of a length end before the next begin.
        """

        def row(name: str, lengths: Sequence[int]) -> Iterator[Answer]:
            checked = {n: x for n, x in self.figures.of(name).items() if isinstance(x, Checked)}
            of = {n: (x.result.gradient.queued_ms, x.result.temp_mib) for n, x in checked.items()}
            return self.ask(
                sys.executable,
                "sparse_jax.by_length",
                name=name,
                shape=self.shape,
                lengths=lengths,
                known=of,
                known_errors=next((x.errors for x in checked.values()), None),
                repeats=self.repeats,
            )

        def numbers(name: str) -> Iterator[Answer]:
            request = dict(name=name, shape=self.shape)
            return self.ask(sys.executable, "sparse_jax.numbers", True, **request)

        lengths = self.shape.lengths
        for group in lengths[:2], *([n] for n in lengths[2:]):
            missing = {n: [x for x in group if x in self.figures.missing(n)] for n in names}
            asked = {n: functools.partial(row, n, x) for n, x in missing.items() if x}
            if group == lengths[:2]:
                asked |= {f"{n}: numbers": functools.partial(numbers, n) for n in with_numbers}
            for who, answer in ask_each(asked, os.cpu_count() or 1):
                if who in names:
                    self.keep(who, None, answer, missing[who])

    def peers(self, python: str, of: dict[str, str]) -> None:
        """Peers: side by side they compile and are checked, then each is timed alone."""
        sizes = dict(dtype=self.shape.dtype, n_known=self.shape.check_length)
        sizes |= dict(window=self.shape.block // 2, block=self.shape.block)
        sizes |= dict(n_global=self.shape.n_global)

        def peer(function: str, name: str, **request) -> Iterator[Answer]:
            lengths = self.figures.missing(name)
            of_peer = dict(name=name, lengths=lengths, **sizes, **request)
            return self.ask(python, f"sparse_torch.{function}", **of_peer)

        of = {name: ours for name, ours in of.items() if self.figures.missing(name)}
        times = dict(repeats=self.repeats, most=MOST, slow=SLOW)
        for function, at_once, more in ("tune", os.cpu_count(), {}), ("by_length", 1, times):
            asked = {n: functools.partial(peer, function, n, **more) for n in of}
            for name, answer in ask_each(asked, at_once):
                if "error" in answer or function == "by_length":
                    self.keep(name, of[name], answer, self.shape.lengths)
            of = {name: ours for name, ours in of.items() if self.figures.missing(name)}


def _line(known: Known | None) -> str:
    return " | ".join(rows.cells(known.result if isinstance(known, Checked) else known, None))


def _result(known: Known | None) -> rows.Known | None:
    return known.result if isinstance(known, Checked) else known


PEERS_OF = {
    "fla nsa": "nsa, a mean a block",
    "fla moba": "moba",
    "transformers Longformer": "longformer",
    "FlexAttention, longformer": "longformer",
    "FlexAttention, sinks": "sinks",
}


def print_tables(figures: Figures, shape: Shape, names: Sequence[str]) -> None:
    known = algorithms(shape)
    for length in sorted(shape.lengths):
        table = Table("attention", *rows.COLUMNS, title=f"1 x {length:,} tokens")
        for name in names:
            if one := _result(figures.known(name, length)):
                dense = known[PEERS_OF.get(name, name)].dense
                table.row(name, *rows.cells(one, _result(figures.known(dense, length))))
    results = {
        name: {n: _result(figures.known(name, n)) for n in sorted(shape.lengths)} for name in names
    }
    if peers := {peer: of for peer, of in PEERS_OF.items() if peer in names}:
        rows.speedups(results, peers)


def draw(path: Path, lines: Sequence[dict]) -> None:
    """Forward and gradient of each row by length."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for part in ("forward", "gradient"):
        of_part = panels.setdefault(f"{part}, ms", {})
        for line in lines:
            if "error" not in line and "64 heads" not in line["attention"]:
                of_row = of_part.setdefault(line["attention"], {})
                of_row[line["length"]] = line[f"{part}_ms"]
        panels[f"{part}, ms"] = {name: dict(sorted(x.items())) for name, x in of_part.items()}
    about = {f"{line['machine']}, {line['shape']}" for line in lines}
    plot(path, panels, title="; ".join(sorted(about)), xlabel="tokens of one sequence")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows", plot=True)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", help="these attentions, and exact ones")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, read and added to")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="figures to draw, of --saved")
    parser.add_argument("--limit", type=float, default=100, help="seconds of a stage of a row")
    args = parser.parse_args(argv)
    if args.drawn:
        return draw(args.plot, read(args.drawn))
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(args.lengths or shape.lengths))
    known = algorithms(shape)
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only has {', '.join(unknown)}: expected some of {', '.join(known)}")
    names = [n for n in known if n in (args.only or known)]
    if args.tiny and not args.only:
        names = [n for n in names if not known[n].wide]
    names = [n for n in known if n in names or n in {known[x].dense for x in names}]
    peers = {peer: of for peer, of in PEERS_OF.items() if args.peers and of in names}
    figures = Figures(shape, args.saved)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(shape, figures, args.repeats, args.limit, folder)
        run.ours(names, list(dict.fromkeys(peers.values())))
        if peers:
            run.peers(args.peers, peers)
    names += peers
    print_tables(figures, shape, names)
    if args.plot:
        draw(args.plot, list(figures.lines.values()))
    ours = (n for n in names if n in known)
    exit_if(n for n in ours if not any(isinstance(x, Checked) for x in figures.of(n).values()))


if __name__ == "__main__":
    main()

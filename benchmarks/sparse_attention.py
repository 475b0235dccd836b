"""Attention that chooses where to look, by length, beside dense causal attention and its peers.

    python -m benchmarks.sparse_attention --peers --saved=docs/sparse_attention.jsonl
    python -m benchmarks.sparse_attention --unchecked --at_once=4 --lengths 65536 --only moba nsa
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
where it says so, 4 of keys and 64 of queries, of 128. A query of `dsa` sees 1,024 keys, and the
gradient of its indexer is computed too.

A row gets no time before its output and gradients agree, at a short length, with another
implementation given the same plan, and nearly all of the plan with that implementation's: on a GPU
array operations, on a CPU the interpreted kernels. `--unchecked` leaves that out, for compiling
array operations takes longest; `tests/ops/test_kernels_on_gpu.py` compares too.

`--peers` adds PyTorch's FlexAttention with the same masks, transformers' Longformer without its
projections, and flash-linear-attention's MoBA and NSA. They get the same inputs and are checked
against the same numbers: MoBA's means are rounded there, so some queries choose other blocks. A
last table has the peers' times over ours.

Each row is a process. All compile side by side, at more than 65,536 tokens one after another, and
then have the device alone in turn; peers are one process then, and Triton chooses among versions of
their kernels alone. What takes more than `--limit` seconds to compile or to time is killed,
recorded so, and the others go on; stderr says what each does, and since when. `--saved` adds each
figure to a file, one JSON line each; what the file has of this machine and these sizes is in the
tables and not measured again. `--plot` draws the figures, or those that `--drawn` names; then
nothing is measured.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import command_line, rows
from benchmarks.harness.by_length import SLOW
from benchmarks.harness.calls import exit_if
from benchmarks.harness.kept import Checked, Figures, Known, read
from benchmarks.harness.output import Table, plot
from benchmarks.harness.processes import Answer, ask
from benchmarks.harness.side_by_side import Peers, Rows, measure
from benchmarks.rows.sparse import MOST, Shape, algorithms

SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32", 64, 16, 2),
    "cpu": Shape((1024, 4096), 4, 32, "float32", 512, 128, 4),
    "gpu": Shape((1024, 65536, 1048576, 16384, 262144), 16, 64, "bfloat16", 2048, 512, 16),
}


class Run(NamedTuple):
    """What all processes of a run share."""

    shape: Shape
    figures: Figures
    repeats: int
    limit: float
    folder: Path
    unchecked: bool
    at_once: int | None

    def ask(self, python: str, function: str, env: Any = None, **request: Any) -> Iterator[Answer]:
        shared = dict(folder=str(self.folder), limit=self.limit)
        patience = max(60, self.limit)
        return ask(python, function, patience=patience, env=env, **shared, **request)

    def numbers(self, name: str) -> Iterator[Answer]:
        """A process that computes what peers have to."""
        on_cpu = {"JAX_PLATFORMS": "cpu"}
        request = dict(name=name, shape=self.shape)
        return self.ask(sys.executable, "rows.sparse.numbers", on_cpu, **request)

    def ours(self, lengths: Sequence[int], name: str) -> Iterator[Answer]:
        """A process that measures a row of ours."""
        known = self.figures.of(name)
        checked = {n: x for n, x in known.items() if isinstance(x, Checked)}
        of = {n: (x.result.gradient.queued_ms, x.result.temp_mib) for n, x in checked.items()}
        return self.ask(
            sys.executable,
            "rows.sparse.by_length",
            name=name,
            shape=self.shape,
            lengths=[n for n in self.figures.missing(name) if n in lengths],
            known=of,
            known_errors=next((x.errors for x in checked.values()), [] if self.unchecked else None),
            repeats=self.repeats,
        )

    def compiler(
        self, python: str, lengths: Sequence[int], peer: str, index: int
    ) -> Iterator[Answer]:
        """A process that compiles its share of a peer's kernels, and checks it."""
        # What is chosen where others work is forgotten.
        request = dict(name=peer, index=index, n_compilers=COMPILERS.get(peer, 1))
        request |= dict(lengths=lengths) | self._of_peers()
        env = {"FLA_CACHE_RESULTS": "0"}
        return self.ask(python, "peers.sparse_torch.compile_and_check", env, **request)

    def times(self, python: str, lengths: Mapping[str, Sequence[int]]) -> Iterator[Answer]:
        """A process that times peers, one after another."""
        request = dict(repeats=self.repeats, most=MOST, slow=SLOW) | self._of_peers()
        return self.ask(python, "peers.sparse_torch.by_length", lengths=lengths, **request)

    def _of_peers(self) -> dict[str, Any]:
        shape = self.shape
        sizes = dict(window=shape.block // 2, block=shape.block, n_global=shape.n_global)
        return sizes | dict(dtype=shape.dtype, n_known=shape.check_length)


def measure_all(
    run: Run, names: Sequence[str], python: str | None, peers: Mapping[str, str]
) -> None:
    """Our rows and peers: the first two lengths, then one by one.

    A process holds what memory it has had, so those of a length end before the next begin.
    """
    figures, of = run.figures, functools.partial

    def keep(name: str, of: str | None, length: int, answer: Answer) -> None:
        figures.add(name, of, length, answer)
        print(f"{name}, {length:,}: {_line(figures.known(name, length))}", flush=True)

    lengths, compiled = run.shape.lengths, False
    for group in lengths[:2], *([n] for n in lengths[2:]):
        ours, wanted = (
            [n for n in x if not set(figures.missing(n)).isdisjoint(group)] for x in (names, peers)
        )
        first = [] if compiled else wanted
        compiled = compiled or bool(wanted)
        known = Peers(
            {peer: peers[peer] for peer in wanted},
            {peer: COMPILERS.get(peer, 1) if peer in first else 0 for peer in wanted},
            of(run.compiler, python, [n for n in group if n <= LONGEST_TOGETHER]),
            of(run.times, python),
        )
        with_numbers = dict.fromkeys(peers[peer] for peer in first)
        asked = {n: of(run.numbers, n) for n in with_numbers}
        asked = Rows(asked, {n: of(run.ours, group, n) for n in ours}, known, group)
        at_once = run.at_once if max(group) <= LONGEST_TOGETHER else 1
        measure(asked, figures, run.folder, keep, at_once)


def _line(known: Known | None) -> str:
    return " | ".join(rows.cells(known.result if isinstance(known, Checked) else known, None))


def _result(known: Known | None) -> rows.Known | None:
    return known.result if isinstance(known, Checked) else known


# Processes that compile a peer's versions of kernels, where it has many.
COMPILERS = {"fla nsa": 8}
# Lengths up to this one are compiled side by side: XLA tries kernels out on whole arrays, so that
# several longer ones would not fit.
LONGEST_TOGETHER = 65536

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
    """Forward and gradient of each row by length, the better of calls waited for and queued."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for i, part in enumerate(("forward", "gradient")):
        of_part = panels.setdefault(f"{part}, ms", {})
        for line in lines:
            if "error" not in line and "64 heads" not in line["attention"]:
                of_row = of_part.setdefault(line["attention"], {})
                # Calls that are queued wait where memory is short.
                of_row[line["length"]] = min(line[f"{part}_ms"], line["waited_ms"][i])
        panels[f"{part}, ms"] = {name: dict(sorted(x.items())) for name, x in of_part.items()}
    about = {f"{line['machine']}, {line['shape']}" for line in lines}
    plot(path, panels, title="; ".join(sorted(about)), xlabel="tokens of one sequence")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows", plot=True)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", help="these attentions, and exact ones")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, read and added to")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="figures to draw, of --saved")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a stage of a row")
    parser.add_argument("--at_once", type=command_line.positive, help="processes side by side")
    parser.add_argument("--unchecked", action="store_true", help="time our rows without a check")
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
        options = args.repeats, args.limit, Path(folder), args.unchecked, args.at_once
        run = Run(shape, figures, *options)
        measure_all(run, names, args.peers, peers)
    names += peers
    print_tables(figures, shape, names)
    if args.plot:
        draw(args.plot, list(figures.lines.values()))
    ours = (n for n in names if n in known)
    exit_if(n for n in ours if not any(isinstance(x, Checked) for x in figures.of(n).values()))


if __name__ == "__main__":
    main()

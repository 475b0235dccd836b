"""Attention in linear time by length: linear recurrences and projections of low rank.

    python -m benchmarks.linear_attention --peers --saved=docs/linear_attention.jsonl
    python -m benchmarks.linear_attention --lengths 1024 1048576 --only linear gated_linear
    python -m benchmarks.linear_attention --drawn=docs/linear_attention.jsonl --plot=FILE

prints a line for each figure as soon as it is known, and then a table for each length N of one
sequence:

  * forward, and gradient (forward and backward, with respect to every input, gates and weights
    too), in milliseconds: the median of calls waited for one by one and, in parentheses, the mean
    of 20 queued calls. Of slow calls there are fewer;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation,

and the exponent e of time ~ N^e, fitted to the queued gradients of lengths from a 16th of the
longest on. What runs out of memory is recorded so. A row whose gradient would take more than a
second at a length, or more memory than there is, as both grew at shorter ones, is left out. Rows
are causal but linformer, nystromformer, which cannot be, and those named `all`.

A row gets no time before its output and gradients agree with those of array operations in float32
on the CPU, at a short length. `--peers` adds flash-linear-attention's kernels, performer-pytorch,
linformer, linear-attention-transformer and nystrom-attention, which get the same inputs and
weights, and are checked against the same numbers. linear-attention-transformer's alone computes
something else, without the nearest keys: it is checked to be finite. Projections are taken out of
peers that have them. flash-linear-attention is given features and gates, which ours compute
themselves; in rows named `from inputs` it computes them too. A last table has the peers' times over
ours.

Each row is a process. All compile side by side, and then have the device alone in turn; peers are
one process then, and choose among versions of their kernels alone. What takes more than `--limit`
seconds to compile, to tune or to time is killed, recorded so, and the others go on; stderr says
what each does, and since when.

`--saved` adds each figure to a file, one JSON line each; what the file has of this machine and
these sizes is in the tables and not measured again. `--plot` draws the figures, or those that
`--drawn` names; then nothing is measured.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import command_line, rows
from benchmarks.harness.by_length import SLOW
from benchmarks.harness.calls import exit_if
from benchmarks.harness.kept import Checked, Figures, read
from benchmarks.harness.output import Table, plot
from benchmarks.harness.processes import Answer, ask
from benchmarks.harness.side_by_side import Peers, Rows, measure
from benchmarks.peers.linear_names import PEERS
from benchmarks.rows.linear import MOST, NAMES, Shape

COLUMNS = ("forward ms", "gradient ms", "temp MiB", "error", "of gradient")

SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32", 64),
    "cpu": Shape((1024, 4096, 16384), 4, 32, "float32", 1024),
    "gpu": Shape((1024, 16384, 131072, 1048576), 8, 64, "bfloat16", 1024),
}


# Measurements.


class Run(NamedTuple):
    """What all processes of a run share."""

    figures: Figures
    shape: Shape
    repeats: int
    limit: float
    folder: Path

    @property
    def patience(self) -> float:
        """Seconds of imports, which take their time where many processes begin."""
        return max(60, self.limit)

    def ask(self, python: str, function: str, env: Any = None, **request: Any) -> Iterator[Answer]:
        shared = dict(folder=str(self.folder), limit=self.limit)
        return ask(python, function, patience=self.patience, env=env, **shared, **request)

    def numbers(self, name: str) -> Iterator[Answer]:
        """A process that computes what a row has to."""
        on_cpu = {"JAX_PLATFORMS": "cpu"}
        request = dict(name=name, shape=self.shape)
        return self.ask(sys.executable, "rows.linear.numbers", on_cpu, **request)

    def compiler(self, python: str, peer: str, index: int) -> Iterator[Answer]:
        """A process that compiles its share of a peer's kernels, and checks it."""
        # What is chosen where others work is forgotten.
        request = dict(name=peer, index=index, dtype=self.shape.dtype)
        function = "peers.linear_torch.compile_and_check"
        return self.ask(python, function, {"FLA_CACHE_RESULTS": "0"}, **request)

    def times(self, python: str, lengths: Mapping[str, Sequence[int]]) -> Iterator[Answer]:
        """A process that times peers, one after another."""
        request = dict(dtype=self.shape.dtype, n_known=self.shape.check_length)
        request |= dict(repeats=self.repeats, most=MOST, slow=SLOW)
        return self.ask(python, "peers.linear_torch.by_length", lengths=lengths, **request)

    def ours(self, name: str) -> Iterator[Answer]:
        """A process that measures a row of ours."""
        checked = [x for x in self.figures.of(name).items() if isinstance(x[1], Checked)]
        known = {n: (x.result.gradient.queued_ms, x.result.temp_mib or 0.0) for n, x in checked}
        return self.ask(
            sys.executable,
            "rows.linear.by_length",
            name=name,
            shape=self.shape,
            lengths=self.figures.missing(name),
            known=known,
            known_errors=checked[0][1].errors if checked else None,
            repeats=self.repeats,
        )


def rows_of(run: Run, names: Sequence[str], python: str | None, peers: Sequence[str]) -> Rows:
    """What is measured: these rows of ours, and peers by their interpreter."""
    figures = run.figures
    new = [n for n in names if not any(isinstance(x, Checked) for x in figures.of(n).values())]
    with_numbers = dict.fromkeys([*new, *(PEERS[peer].of for peer in peers)])
    return Rows(
        {name: functools.partial(run.numbers, name) for name in with_numbers},
        {name: functools.partial(run.ours, name) for name in names},
        Peers(
            {peer: PEERS[peer].of for peer in peers},
            {peer: PEERS[peer].compilers for peer in peers},
            functools.partial(run.compiler, python),
            functools.partial(run.times, python),
        ),
        run.shape.lengths,
    )


# Tables.


def exponent(times: Mapping[int, float]) -> float:
    """e of time ~ N^e over the lengths from a 16th of the longest on; NaN of fewer than two."""
    long = {n: ms for n, ms in times.items() if 16 * n >= max(times)}
    if len(long) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(long)), np.log(list(long.values())), 1)[0])


def cells(known: Checked) -> list[str]:
    """The columns of a row."""
    forward, gradient, temp_mib = known.result
    temp = "-" if temp_mib is None else f"{temp_mib:,.0f}"
    return [str(forward), str(gradient), temp, *(f"{x:.1e}" for x in known.errors)]


def print_tables(figures: Figures, shape: Shape, names: Sequence[str]) -> None:
    """By length, the growth of the gradient's time, and peers over ours."""
    peers = {
        line["attention"]: line["of"]
        for line in figures.lines.values()
        if line["of"] in names and line["length"] in shape.lengths
    }
    known = {name: figures.of(name) for name in [*names, *peers]}
    for length in shape.lengths:
        table = Table("attention", *COLUMNS, title=f"1 x {length:,} tokens")
        for name, by in known.items():
            if length in by:
                table.result(name, known=by[length], cells=cells)
    table = Table("attention", "time ~ N^e, e =", title="Growth of the gradient's time")
    for name, by in known.items():
        times = {n: x.result.gradient.queued_ms for n, x in by.items() if isinstance(x, Checked)}
        table.row(name, f"{exponent(times):.2f}" if times else "-")
    if peers:
        results = {
            name: {n: getattr(by.get(n), "result", None) for n in shape.lengths}
            for name, by in known.items()
        }
        rows.speedups(results, peers)


def draw(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Time and memory of the gradient by length; the last record of a row counts.

    A peer has the colour of our row that computes the same, and a broken line.
    """
    records = [x for x in records if "error" not in x]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for label, key in (
        ("forward and backward, ms, mean of queued calls", "gradient_ms"),
        ("temporary memory of the gradient, MiB", "temp_mib"),
    ):
        lines = panels.setdefault(label, {})
        for x in sorted(records, key=lambda x: x["length"]):
            if x[key]:
                lines.setdefault(x["attention"], {})[x["length"]] = x[key]
    titles = dict.fromkeys(f"{x['machine']}, one sequence, {x['shape']}" for x in records)
    of = {x["attention"]: x["of"] or x["attention"] for x in records}
    ours = list(dict.fromkeys(of.values()))
    styles = {
        name: dict(
            color=f"C{ours.index(own)}",
            marker="oDv^Xps*hP<>d"[i % 13],
            ls="-" if name == own else ":" if "from inputs" in name else "--",
        )
        for i, (name, own) in enumerate(of.items())
    }
    plot(path, panels, "; ".join(titles), styles=styles, xlabel="length")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows", plot=True)
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these attentions")
    parser.add_argument("--peers_alone", action="store_true", help="measure none of ours")
    parser.add_argument("--limit", type=float, default=45, help="seconds of a stage (default: 45)")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, to go on from")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="draw these figures, and end")
    args = parser.parse_args(argv)
    if args.drawn:
        if not args.plot:
            parser.error("--drawn needs --plot, which says where")
        draw(args.plot, read(args.drawn))
        return
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    figures = Figures(shape, args.saved)
    table = Table("attention", "length", *COLUMNS, title="As they come")

    def keep(name: str, of: str | None, length: int, answer: Answer) -> None:
        figures.add(name, of, length, answer)
        table.result(name, f"{length:,}", known=figures.known(name, length), cells=cells)

    with tempfile.TemporaryDirectory() as folder:
        run = Run(figures, shape, args.repeats, args.limit, Path(folder))
        wanted = [name for name in PEERS if PEERS[name].of in args.only and figures.missing(name)]
        ours = [] if args.peers_alone else [n for n in args.only if figures.missing(n)]
        wanted = rows_of(run, ours, args.peers, wanted if args.peers else [])
        measure(wanted, figures, run.folder, keep)
    print_tables(figures, shape, args.only)
    if args.plot:
        draw(args.plot, list(figures.lines.values()))
    if not args.peers_alone:
        exit_if(
            n for n in args.only if not any(isinstance(x, Checked) for x in figures.of(n).values())
        )


if __name__ == "__main__":
    main()

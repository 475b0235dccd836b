"""Time and memory of attention by length, beside exact attention and peers in PyTorch.

    python -m benchmarks.attention --only hashed --tokens=65536 --lengths 1024 65536 --peers
    python -m benchmarks.attention --only linear_time --saved=docs/linear_attention.jsonl --peers
    python -m benchmarks.attention --table=runs/attention_table

prints a line for each figure as soon as it is known, and then a table for each length N:

  * forward, and gradient (forward and backward, with respect to every input, gates and weights
    too), in milliseconds: the median of calls waited for one by one and, in parentheses, the mean
    of 20 queued calls. The latter is the device's time where that exceeds the host's. Of slow calls
    there are fewer;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation;
  * the speed relative to exact attention of as many heads of keys, on a GPU cuDNN's.

What runs out of memory is recorded so. A row whose gradient would take more than a second at a
length, or more memory than there is, as both grew at shorter ones, is left out. Calls have one
sequence or, with `--tokens`, tokens / N. Rows are causal but longformer, linformer, nystromformer
and those named `all`; those named `packed` have seven documents and padding. A query sees 256 keys
in each round of `lsh`, `smyrf` and `asymmetric_lsh`; `nsa` has one head of keys, and no weights of
its own. What an indexer chooses, the group `indexed`, has 32 heads of 128 on one head of keys, or
the run's on two or with a key head each: on a GPU 2,048 keys of a query, singly or in blocks of 64,
or 512 keys or summaries. Candidates are twice as many hashed keys, or four times as many pooled
ones, whose index vectors are bfloat16. The gradient of the indexer is computed too.

A row gets no time before its output and gradients agree, at a short length, with another
implementation given the same plan, and nearly all of the plan with that implementation's: on a GPU
array operations, on a CPU the interpreted kernels. `--unchecked` leaves that out, for compiling
array operations takes longest; `tests/ops/test_kernels_on_gpu.py` compares too. `--alone` leaves
out exact attention, which takes a minute a call of a million tokens.

`--peers` adds FlexAttention with the same masks, LSH attention and Longformer of transformers,
flash-linear-attention, reformer_pytorch, performer-pytorch, linformer, nystrom-attention and
linear-attention-transformer. They get the same inputs and weights, without projections of theirs,
and are checked against the same numbers. The LSH attentions and linear-attention-transformer
compute something else: they are checked to be finite. flash-linear-attention is given features and
gates, which ours compute themselves; in rows named `from inputs` it computes them too. A last table
has the peers' times over ours. Where
jax-linear-attention is installed its recurrences are rows too, in our JAX, without `--peers`.

Each row is a process. All compile side by side, at more than 65,536 tokens one after another, and
then have the device alone in turn; peers are one process then, and Triton chooses among versions of
their kernels alone. What takes more than `--limit` seconds to compile or to time is killed,
recorded so, and the others go on; stderr says what each does, and since when. `--saved` adds each
figure to a file, one JSON line each; what the file has of this machine and these sizes is in the
tables and not measured again, unless a longer `--limit` has time for it.

`--table` measures every attention of the package instead, as FlashAttention's tables 9 to 21 do:
the forward pass, the backward pass and both, with and without dropout and a mask of padding, and
memory. Rows are not causal but where an attention must be. The folder gets table.jsonl, a line for
each case, and table.csv, of which `python docs/attention_table.py --all FILE` makes tables. The
same command goes on where it was interrupted; what runs out of memory, or is not compiled in
`--limit` seconds, is recorded so, and where both passes took seconds, longer rows that come later
are left out. Times are means of queued calls. `--only`, `--lengths` and `--settings` choose, and
are measured in their order; commands with the same folder share a device, and time in turn.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import attention_table, command_line, rows
from benchmarks.harness.by_length import SLOW
from benchmarks.harness.calls import exit_if
from benchmarks.harness.kept import Checked, Figures, Known
from benchmarks.harness.output import Table
from benchmarks.harness.processes import Answer, alone, ask
from benchmarks.harness.side_by_side import Peers, Rows, measure
from benchmarks.peers.names import PEERS
from benchmarks.rows.attention import MOST, Made, Shape, algorithms

# Lengths up to this one are compiled side by side: XLA tries kernels out on whole arrays, so that
# several longer ones would not fit.
LONGEST_TOGETHER = 65536

SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32", 60, 16, 2),
    "cpu": Shape((1024, 4096), 4, 32, "float32", 512, 128, 4),
    "gpu": Shape((1024, 65536, 1048576, 16384), 8, 64, "bfloat16", 2048, 512, 16),
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
        shared = dict(folder=str(self.folder), limit=self.limit, shape=self.shape._asdict())
        patience = max(60, self.limit)
        return ask(python, function, patience=patience, env=env, **shared, **request)

    def numbers(self, name: str) -> Iterator[Answer]:
        """A process that computes what peers have to."""
        on_cpu = {"JAX_PLATFORMS": "cpu"}
        return self.ask(sys.executable, "rows.attention.numbers", on_cpu, name=name)

    def ours(self, lengths: Sequence[int], name: str) -> Iterator[Answer]:
        """A process that measures a row of ours."""
        known = self.figures.of(name)
        checked = {n: x for n, x in known.items() if isinstance(x, Checked)}
        return self.ask(
            sys.executable,
            "rows.attention.by_length",
            name=name,
            lengths=[n for n in self.figures.missing(name) if n in lengths],
            known={n: (x.result.gradient.queued_ms, x.result.temp_mib) for n, x in checked.items()},
            known_errors=next((x.errors for x in checked.values()), [] if self.unchecked else None),
            repeats=self.repeats,
        )

    def compiler(
        self, python: str, lengths: Sequence[int], peer: str, index: int
    ) -> Iterator[Answer]:
        """A process that compiles its share of a peer's kernels, and checks it."""
        # What is chosen where others work is forgotten.
        env, request = {"FLA_CACHE_RESULTS": "0"}, dict(name=peer, index=index, lengths=lengths)
        return self.ask(python, "peers.attention_torch.compile_and_check", env, **request)

    def times(self, python: str, lengths: Mapping[str, Sequence[int]]) -> Iterator[Answer]:
        """A process that times peers, one after another."""
        request = dict(repeats=self.repeats, most=MOST, slow=SLOW, lengths=lengths)
        return self.ask(python, "peers.attention_torch.by_length", **request)


def measure_all(run: Run, names: Sequence[str], python: str | None, peers: Sequence[str]) -> None:
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
            {peer: PEERS[peer].of for peer in wanted},
            {peer: PEERS[peer].compilers if peer in first else 0 for peer in wanted},
            of(run.compiler, python, [n for n in group if n <= LONGEST_TOGETHER]),
            of(run.times, python),
        )
        asked = {n: of(run.numbers, n) for n in dict.fromkeys(PEERS[peer].of for peer in first)}
        asked = Rows(asked, {n: of(run.ours, group, n) for n in ours}, known, group)
        at_once = run.at_once if max(group) <= LONGEST_TOGETHER else 1
        measure(asked, figures, run.folder, keep, at_once)


def _line(known: Known | None) -> str:
    return " | ".join(rows.cells(_result(known), None))


def _result(known: Known | None) -> rows.Known | None:
    return known.result if isinstance(known, Checked) else known


def print_tables(run: Run, ours: Mapping[str, Made], peers: Sequence[str]) -> None:
    """By length, and peers over ours."""
    figures, lengths = run.figures, sorted(run.shape.lengths)
    results = {
        name: {n: _result(figures.known(name, n)) for n in lengths} for name in (*ours, *peers)
    }
    for length in lengths:
        title = f"{run.shape.batch(length)} x {length:,} tokens"
        table = Table("attention", *rows.COLUMNS, title=title)
        for name, of_length in results.items():
            if one := of_length[length]:
                dense = results.get(ours[PEERS[name].of if name in peers else name].dense)
                table.row(name, *rows.cells(one, dense and dense[length]))
    if peers:
        rows.speedups(results, {peer: PEERS[peer].of for peer in peers})


def chosen(
    only: Sequence[str], groups: Mapping[str, Mapping[str, Made]], alone: bool = False
) -> dict[str, Made]:
    """The rows of these groups and names and, not `alone`, those that they are compared with."""
    names = {name for x in only for name in groups.get(x, [x])}
    known = {name: made for group in groups.values() for name, made in group.items()}
    if unknown := names - known.keys():
        wanted = ", ".join([*groups, *known])
        raise ValueError(f"--only has {', '.join(sorted(unknown))}: expected some of {wanted}")
    names |= set() if alone else {known[name].dense for name in names}
    return {name: made for name, made in known.items() if name in names}


def fill_table(args: argparse.Namespace) -> None:
    """Measures what the table's file does not have, and writes the tables as they grow."""
    shape = command_line.of_size(attention_table.SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(args.lengths or shape.lengths))
    path = args.table / "table.jsonl"
    file = attention_table.File(path)
    only = args.only or list(attention_table.attentions())
    for group in attention_table.fill(file, shape, only, args.settings, args.limit):
        for length in dict.fromkeys(case.length for case in group):
            title = f"{length:,}, {attention_table.words(group[0].dropout, group[0].masked)}"
            table = Table("attention", *attention_table.FIGURES, title=title)
            for case in (x for x in group if x.length == length):
                known, fields = file.known[case], attention_table.FIGURES.values()
                table.row(case.attention, *(attention_table.cell(known, x) for x in fields))
        with alone(file.lock):  # other commands have added to the file, and write its tables too
            attention_table.write(args.table, attention_table.File(path).known, group[0].machine)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows")
    positive = command_line.positive
    parser.add_argument("--lengths", type=positive, nargs="+", help="of a sequence")
    parser.add_argument("--only", nargs="+", help="these groups of attentions, or attentions")
    parser.add_argument("--n_heads", type=positive, help="of an attention")
    parser.add_argument("--d_head", type=positive, help="the size of a head")
    parser.add_argument("--tokens", type=positive, default=1, help="of a call (default: a length)")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, read and added to")
    parser.add_argument(
        "--limit", type=command_line.seconds, default=150, help="seconds of a stage of a row"
    )
    parser.add_argument("--at_once", type=positive, help="processes side by side")
    parser.add_argument("--unchecked", action="store_true", help="time our rows without a check")
    text = "leave out the rows of exact attention that others are compared with"
    parser.add_argument("--alone", action="store_true", help=text)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="measure all, into the folder")
    every = list(attention_table.SETTINGS)
    text = "of --table, with dropout and a mask"
    parser.add_argument("--settings", nargs="+", choices=every, default=every, help=text)
    args = parser.parse_args(argv)
    if args.table:
        for name in (
            "peers",
            "n_heads",
            "d_head",
            "tokens",
            "saved",
            "repeats",
            "at_once",
            "unchecked",
            "alone",
        ):
            if (value := getattr(args, name)) != parser.get_default(name):
                parser.error(f"--{name} is {value}: it goes without --table, leave one out")
        if unknown := set(args.only or ()) - attention_table.attentions().keys():
            known = ", ".join(attention_table.attentions())
            parser.error(f"--only has {', '.join(unknown)} with --table: expected some of {known}")
        fill_table(args)
        return
    if args.settings != every:
        parser.error(f"--settings is {' '.join(args.settings)}: it goes with --table")
    shape = command_line.of_size(SHAPES, args.tiny)
    sizes = dict(lengths=tuple(args.lengths or shape.lengths), tokens=args.tokens)
    heads = dict(n_heads=args.n_heads or shape.n_heads, d_head=args.d_head or shape.d_head)
    shape = shape._replace(**sizes, **heads)
    groups = algorithms(shape)
    try:
        ours = chosen(args.only or list(groups), groups, args.alone)
    except ValueError as error:
        parser.error(str(error))
    peers = [peer for peer, known in PEERS.items() if args.peers and known.of in ours]
    figures = Figures(shape, args.saved, args.limit)
    with tempfile.TemporaryDirectory() as folder:
        options = args.repeats, args.limit, Path(folder), args.unchecked, args.at_once
        run = Run(shape, figures, *options)
        measure_all(run, list(ours), args.peers, peers)
        print_tables(run, ours, peers)
    exit_if(n for n in ours if not any(isinstance(x, Checked) for x in figures.of(n).values()))


if __name__ == "__main__":
    main()

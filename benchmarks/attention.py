"""Attention by length against dense causal attention: LSH and local, or exact ones.

    python -m benchmarks.attention --peers --plot runs/attention.png
    python -m benchmarks.attention --exact
    python -m benchmarks.attention --table=runs/attention_table

prints a table of errors, and one of times for each length N, where batch = tokens / N:

  * forward, and gradient (forward and backward, with respect to every input), in milliseconds: the
    median of calls waited for one by one and, in parentheses, the mean of 20 queued calls. The
    latter is the device's time where that exceeds the host's;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation;
  * the speed relative to dense attention, on a GPU cuDNN's and on a CPU XLA's.

A row gets no time before its output and gradients agree, at a short length, with another
implementation given the same plan: on a GPU array operations, on a CPU the interpreted kernels, and
for exact attention dense attention. Only a peer may fail.

Packed rows are of seven documents and padding, told apart by segments.

`--peers` adds PyTorch's FlexAttention and the LSH attention of reformer_pytorch and transformers.
`--exact` has FlashAttention and memory-efficient attention instead, and as peers attention with the
whole matrix of logits, where it fits, and the code that Rabe and Staats printed.

`--table` measures every attention here instead, as FlashAttention's tables 9 to 21 do: the forward
pass, the backward pass and both, with and without dropout and a mask of padding, and memory. Rows
are not causal but where an attention must be. The folder gets table.jsonl, a line for each case,
table.csv, table.md and, as figure 3, table.png. The same command goes on where it was interrupted;
what runs out of memory is recorded so, and where both passes took seconds, longer rows are left
out. The backward pass is both passes less the forward pass; times are means of queued calls.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.harness import attention_table, command_line, rows
from benchmarks.harness.calls import exit_if
from benchmarks.harness.output import Table, plot
from benchmarks.harness.rows import Known, Result, Row
from benchmarks.peers import rabe_staats
from reformax.ops import dense, local, lsh

DENSE = "dense"
MAX_PLAIN_LOGITS = 2**32  # plain attention holds several matrices of them


class Shape(NamedTuple):
    """The sizes of a run."""

    tokens: int
    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    chunk_len: int
    dtype: str
    check_length: int
    n_hashes: tuple[int, ...] = (1, 2, 4, 8)


SHAPES = {
    "tiny": Shape(128, (64, 128), 2, 8, 16, "float32", 60, (1,)),
    "cpu": Shape(4096, (1024, 2048, 4096), 4, 32, 64, "float32", 512),
    "gpu": Shape(65536, (1024, 4096, 16384, 65536), 8, 64, 128, "bfloat16", 2048),
}


def algorithms(shape: Shape) -> dict[str, Row]:
    """LSH and local attention, by name."""
    chunks = dict(chunk_len=shape.chunk_len, n_chunks_before=1, n_chunks_after=0)
    makers = {
        f"LSH, {n} hash{'es' * (n > 1)}": functools.partial(lsh.lsh, **chunks, n_hashes=n)
        for n in shape.n_hashes
    }
    if 4 in shape.n_hashes:
        weighted = functools.partial(lsh.lsh, **chunks, n_hashes=4, count_once=False)
        makers["LSH, 4 hashes, count_once=False"] = weighted
    makers["local"] = functools.partial(local.local, **chunks)
    other = rows.other_impl()
    found = {name: rows.row(make(), make(impl=other)) for name, make in makers.items()}
    if 4 in shape.n_hashes:
        for name in ("LSH, 4 hashes", "local"):
            make = makers[name]
            found[f"{name}, packed"] = rows.row(make(), make(impl=other), packed=True)
    return found


def exact_algorithms() -> dict[str, Row]:
    """The attentions of `--exact`, by name."""
    plain = dense.dense(impl="xla")
    return {name: rows.row(op, plain) for name, op in rows.exact_ops().items()}


def exact_peers(shape: Shape, length: int) -> dict[str, Row | Exception]:
    """The peers of `--exact` at a length, by name."""
    peers: dict[str, Row | Exception] = {"Rabe and Staats, as printed": Row(rabe_staats.printed)}
    if jax.default_backend() == "gpu":  # elsewhere dense attention is plain
        peers["plain"] = Row(functools.partial(rows.plain, causal=True))
        if shape.tokens * length * shape.n_heads > MAX_PLAIN_LOGITS:
            peers["plain"] = MemoryError("more logits than memory")
    return peers


def fill_table(args: argparse.Namespace) -> None:
    """Measures what the table's file does not have, and writes the tables as they grow."""
    shape = command_line.of_size(attention_table.SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    file = attention_table.File(args.table / "table.jsonl")
    for group in attention_table.fill(file, shape, args.only, args.repeats):
        case = group[0]
        title = f"{case.length:,}, {attention_table.words(case.dropout, case.masked)}"
        table = Table("attention", *attention_table.FIGURES, title=title)
        for case in group:
            fields = attention_table.FIGURES.values()
            table.row(case.attention, *(attention_table.cell(file.known[case], x) for x in fields))
        attention_table.write(args.table, file.known, case.machine)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=10, peers="add PyTorch's rows", plot=True)
    parser.add_argument("--exact", action="store_true", help="time exact attention instead")
    table = parser.add_argument_group("every attention")
    table.add_argument(
        "--table", type=Path, metavar="FOLDER", help="measure them, into this folder"
    )
    table.add_argument("--lengths", type=command_line.positive, nargs="+", help="of its rows")
    known = attention_table.attentions()
    table.add_argument("--only", nargs="+", choices=known, default=list(known), help="these alone")
    args = parser.parse_args(argv)
    if args.exact and args.peers:
        parser.error("--exact has its own peers: leave --peers")
    if args.table:
        fill_table(args)
        return
    shape = command_line.of_size(SHAPES, args.tiny)
    heads = shape.n_heads, shape.d_head
    ours = exact_algorithms() if args.exact else algorithms(shape)
    ours = rows.check_rows(ours, (1, shape.check_length, *heads), shape.dtype)
    results: dict[int, dict[str, Known]] = {}
    for length in shape.lengths:
        size = shape.tokens // length, length, *heads
        table = Table("attention", *rows.COLUMNS, title=f"{size[0]} x {length:,} tokens")
        all_rows = {DENSE: rows.dense()} | ours
        if args.exact:
            all_rows |= exact_peers(shape, length)
        arrays = rows.inputs(*size, dtype=shape.dtype)
        measured = rows.measure_rows(all_rows, arrays, args.repeats)
        if args.peers:
            request = dict(size=size, chunk_len=shape.chunk_len, dtype=shape.dtype)
            peers = rows.measure_peers(
                args.peers, "peers.attention_torch.by_length", **request, repeats=args.repeats
            )
            measured = itertools.chain(measured, peers)
        known = results[length] = {}
        for name, one in measured:
            known[name] = one
            table.row(name, *rows.cells(one, known[DENSE]))
    if args.plot:
        lines = defaultdict(dict)
        for length, known in results.items():
            for name, one in known.items():
                if isinstance(one, Result):
                    lines[name][length] = one.gradient.queued_ms
        title = (
            f"{command_line.machine()}, {shape.tokens:,} tokens a call, {shape.n_heads} heads of "
            f"{shape.d_head}, chunks of {shape.chunk_len}, {shape.dtype}, causal"
        )
        label = "forward and backward, ms, mean of queued calls"
        plot(args.plot, {label: lines}, title, xlabel="length")
    exit_if(n for n in ours if any(isinstance(x[n], Exception) for x in results.values()))


if __name__ == "__main__":
    main()

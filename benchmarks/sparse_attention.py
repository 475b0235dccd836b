"""Attention that chooses where to look, by length, beside dense causal attention and its peers.

    python -m benchmarks.sparse_attention --peers --saved=docs/sparse_attention.jsonl
    python -m benchmarks.sparse_attention --lengths 65536 --only moba nsa

prints a table for each length N of one sequence:

  * forward, and gradient (forward and backward, with respect to every input), in milliseconds: the
    median of calls waited for one by one and, in parentheses, the mean of 20 queued calls. Of slow
    calls there are fewer;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation;
  * the speed relative to exact attention of as many heads of keys, on a GPU cuDNN's.

What runs out of memory is recorded so; where a gradient took more than `SLOW` seconds, longer
sequences are left out. Rows are causal but `longformer`, whose window has both sides, with 16
global tokens. A query sees 256 keys in each round of `lsh`, `smyrf` and `asymmetric_lsh`; `nsa` has
one head of keys, and no weights of its own.

A row gets no time before its output and gradients agree, at a short length, with another
implementation given the same plan, and nearly all of the plan with that implementation's: on a GPU
array operations, on a CPU the interpreted kernels. `--peers` adds PyTorch's FlexAttention with the
same masks, transformers' Longformer without its projections, and flash-linear-attention's MoBA and
NSA. They get the same inputs and are checked against the same numbers: MoBA's means are rounded
there, so some queries choose other blocks. A last table has the peers' times over ours.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's process shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import command_line, rows
from benchmarks.harness.calls import COMPILERS, attempt_each, exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.processes import alone, ask
from benchmarks.harness.rows import Known, Result
from reformax.ops import (
    AttentionOp,
    asymmetric_lsh,
    flash,
    local,
    longformer,
    lsh,
    moba,
    nsa,
    sinks,
    smyrf,
)

MOST = 1.5  # seconds of the calls of a pass
SLOW = 0.5
LIMIT = 120  # seconds in which a peer compiles, or is timed at a length


class Shape(NamedTuple):
    """The sizes of a run."""

    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str
    check_length: int
    block: int  # of MoBA; chunks and windows are half of it
    n_global: int


SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32", 60, 16, 2),
    "cpu": Shape((1024, 4096), 4, 32, "float32", 512, 128, 4),
    "gpu": Shape((1024, 16384, 65536, 1048576), 16, 64, "bfloat16", 2048, 512, 16),
}


class Made(NamedTuple):
    """An op of a table."""

    make: Callable[..., AttentionOp]  # of `impl`, where it has one
    causal: bool = True
    marked: int = 0
    n_kv_heads: int | None = None
    dense: str = "flash"  # what it is compared with

    def op(self, impl: str = "auto") -> AttentionOp:
        """The op by an implementation."""
        return self.make(impl=impl)

    def row(self) -> rows.Row:
        """Its row, checked against the implementation that it does not take here."""
        options = dict(causal=self.causal, marked=self.marked)
        return rows.row(self.op(), self.op(rows.other_impl()), **options)


def algorithms(shape: Shape) -> dict[str, Made]:
    """The ops by name."""
    half, of = shape.block // 2, functools.partial
    chunks = dict(chunk_len=half // 2, n_chunks_before=1, n_chunks_after=0)
    stride = max(2, half // 16)
    sizes = dict(compression="mean", own_projections=False, window=shape.block)
    sizes |= dict(block_size=4 * stride, n_selected=min(16, stride))
    native = of(nsa.nsa, **sizes, compress_len=2 * stride, compress_stride=stride)
    whole = of(nsa.nsa, **sizes, compress_len=4 * stride, compress_stride=4 * stride)
    marked = dict(n_global=shape.n_global, own_projections=False)
    one = dict(n_kv_heads=1, dense="flash, 1 head of keys")
    return {
        "flash": Made(flash.flash),
        "local": Made(of(local.local, chunk_len=half, window=half)),
        "sinks": Made(of(sinks.sinks, window=half, n_sinks=4)),
        "longformer": Made(
            of(longformer.longformer, window=half + 1, **marked), False, shape.n_global
        ),
        "lsh": Made(of(lsh.lsh, **chunks, n_hashes=4)),
        "asymmetric_lsh": Made(of(asymmetric_lsh.asymmetric_lsh, **chunks, n_hashes=4)),
        "smyrf": Made(of(smyrf.smyrf, chunk_len=half, n_hashes=4)),
        "moba": Made(of(moba.moba, block_size=shape.block, top_k=3)),
        "flash, 1 head of keys": Made(flash.flash, **one),
        "nsa": Made(native, **one),
        "nsa, a mean a block": Made(whole, **one),
    }


def inputs(made: Made, shape: Shape, length: int, dtype: str) -> tuple[jax.Array, ...]:
    """q, k, v and d_out of a row."""
    size = 1, length, shape.n_heads, shape.d_head
    return rows.inputs(*size, dtype=dtype, n_kv_heads=made.n_kv_heads)


def numbers(shape: Shape, made: Made) -> dict[str, np.ndarray]:
    """The inputs of a row, rounded to its dtype, and its output and gradients in float32."""
    arrays = inputs(made, shape, shape.check_length, shape.dtype)
    *qkv, d_out = (x.astype(jnp.float32) for x in arrays)
    attend = rows.row(made.op("xla"), made.op("xla"), made.causal, marked=made.marked).attend
    run = rows.output_and_gradient(lambda q, k, v: attend(q, k, v, rows.KEY))
    with jax.default_matmul_precision("highest"):
        out, gradients = jax.jit(run)(d_out, *qkv)
    found = dict(zip("qkv", qkv, strict=True)) | {"d_out": d_out, "out": out}
    found |= {f"d {name}": x for name, x in zip("qkv", gradients, strict=True)}
    return {name: np.asarray(x) for name, x in found.items()}


PEERS_OF = ("longformer", "sinks", "moba", "nsa, a mean a block")


def ask_peers(
    python: str, shape: Shape, repeats: int, names: Sequence[str], lock: Path
) -> Iterator[dict[str, Any]]:
    """Starts the peers of rows, which wait for the lock before they time anything."""
    known = algorithms(shape)
    wanted = {name: known[name] for name in PEERS_OF if name in names}
    found = attempt_each(functools.partial(numbers, shape), wanted, COMPILERS)
    right = {name: arrays for name, arrays in found.items() if not isinstance(arrays, Exception)}
    for name, arrays in right.items():
        np.savez(lock.with_name(f"{name}.npz"), **arrays)
    request = dict(
        lengths=shape.lengths, dtype=shape.dtype, repeats=repeats, n_known=shape.check_length
    )
    request |= dict(most=MOST, slow=SLOW, window=shape.block // 2, n_global=shape.n_global)
    request |= dict(block=shape.block, folder=str(lock.parent), limit=LIMIT)
    return ask(python, "sparse_torch.by_length", **request)


def measured(
    shape: Shape, length: int, ready: Mapping[str, rows.Row | Exception], repeats: int
) -> Iterator[tuple[str, Known]]:
    """The figures of our rows at a length, those of one number of heads of keys together."""
    known = algorithms(shape)
    for n_kv_heads in dict.fromkeys(known[name].n_kv_heads for name in ready):
        of = {n: row for n, row in ready.items() if known[n].n_kv_heads == n_kv_heads}
        made = next(known[n] for n in of)
        yield from rows.measure_rows(of, inputs(made, shape, length, shape.dtype), repeats, MOST)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows")
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", help="these attentions, and exact ones")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, to add to")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    known = algorithms(shape)
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only has {', '.join(unknown)}: expected some of {', '.join(known)}")
    names = [n for n in known if n in (args.only or known)]
    names = [n for n in known if n in names or n in {known[x].dense for x in names}]
    results: dict[str, dict[int, Known]] = {name: {} for name in names}

    def keep(name: str, length: int, one: Known) -> None:
        results.setdefault(name, {})[length] = one
        if args.saved and isinstance(one, Result):
            line = rows.record(name, peer_of.get(name), length, shape, one)
            with args.saved.open("a") as file:
                file.write(json.dumps(line) + "\n")

    peer_of: dict[str, str] = {}
    ready: dict[str, rows.Row | Exception] = {}
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        answers = iter(())
        with alone(lock):  # peers check themselves meanwhile
            if args.peers:
                answers = ask_peers(args.peers, shape, args.repeats, names, lock)
            for n_kv_heads in dict.fromkeys(known[name].n_kv_heads for name in names):
                of = {n: known[n].row() for n in names if known[n].n_kv_heads == n_kv_heads}
                size = 1, shape.check_length, shape.n_heads, shape.d_head
                ready |= rows.check_rows(of, size, shape.dtype, n_kv_heads)
        for answer in answers:
            name = answer.get("name", "peers in PyTorch")
            peer_of |= {name: answer["of"]} if "of" in answer else {}
            keep(name, answer.get("length", shape.lengths[0]), rows.figures(answer))
    for length in shape.lengths:
        table = Table("attention", *rows.COLUMNS, title=f"1 x {length:,} tokens")
        for name, one in measured(shape, length, ready, args.repeats):
            keep(name, length, one)
            table.row(name, *rows.cells(one, results[known[name].dense].get(length)))
            if isinstance(one, Result) and one.gradient.ms > SLOW * 1e3:
                ready[name] = TimeoutError("left out")
        for name, by in results.items():
            if name not in known and length in by:
                dense = known[peer_of[name]].dense if name in peer_of else "flash"
                table.row(name, *rows.cells(by[length], results[dense].get(length)))
    if peer_of:
        rows.speedups(results, peer_of)
    exit_if(n for n in names if not any(isinstance(x, Result) for x in results[n].values()))


if __name__ == "__main__":
    main()

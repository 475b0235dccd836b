"""Block-sparse attention by its nonzero blocks, against dense attention and FlexAttention.

    python -m benchmarks.block_sparse
    python -m benchmarks.block_sparse --peers --plot docs/block_sparse.png

prints errors and then times: of causal attention over the patterns of
`reformax.ops.block_patterns`, and of bidirectional attention over random masks with the same number
of blocks in each row, from two blocks a row to all of them. Forward and gradient (forward and
backward, with respect to every input), in milliseconds: the sum of the kernels on the device, by
the profiler, and in parentheses the median of calls waited for one by one. On a CPU the latter, and
in parentheses the mean of queued calls.

The speed is relative to dense attention that is causal where the row is: on a GPU cuDNN's, on a CPU
XLA's.
`--peers` adds PyTorch's FlexAttention, compiled, with the same block masks. The last lines fit the
times of random masks by a line in the number of blocks.

A row gets no time before its output and gradients agree with the oracle's over its mask, at a short
length. A row that fails prints the reason, and the program exits with an error. A peer that fails
prints its reason too, but is no error.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's process shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.harness import command_line, plot, rows
from benchmarks.harness.processes import Peers
from benchmarks.harness.rows import Errors, Known, Result, Row
from benchmarks.harness.table import Table
from benchmarks.harness.timing import Times, time_calls
from reformax.ops import block_patterns, block_sparse
from reformax.ops.parts.reference import reference_attention

N_PROFILED = 10
PEER_SECONDS = 240  # for all masks
FLEX = "FlexAttention, "

Line = dict[int, float]  # milliseconds by the number of nonzero blocks


class Shape(NamedTuple):
    """The sizes of a run."""

    length: int
    n_heads: int
    d_head: int
    block_size: int
    dtype: str
    check_length: int
    check_dtypes: tuple[str, ...]

    def inputs(self, dtype: str) -> tuple[Array, ...]:
        return rows.inputs(1, self.length, self.n_heads, self.d_head, dtype=dtype)


SHAPES = {
    "tiny": Shape(64, 1, 4, 16, "float32", 40, ("float32",)),
    "cpu": Shape(2048, 2, 32, 64, "float32", 256, ("float32",)),
    "gpu": Shape(65536, 8, 64, 128, "bfloat16", 2048, ("bfloat16", "float32")),
}


class Masked(NamedTuple):
    """A pattern, a function of the numbers of blocks, and whether attention is causal."""

    pattern: block_patterns.Pattern
    causal: bool

    def attend(self, shape: Shape) -> Callable[..., Array]:
        op = block_sparse.block_sparse(pattern=self.pattern, block_size=shape.block_size)
        return functools.partial(op, causal=self.causal)

    def row(self, shape: Shape) -> Row:
        return Row(self.attend(shape), functools.partial(check, self, shape))

    def mask(self, shape: Shape) -> np.ndarray:
        """The nonzero blocks; if causal, without those above the diagonal."""
        n_blocks = -(-shape.length // shape.block_size)
        mask = self.pattern(n_blocks, n_blocks)
        return np.tril(mask) if self.causal else mask


def random_blocks(share: float) -> block_patterns.Pattern:
    """A pattern with `share` of the blocks in each row, at random."""

    def pattern(n_blocks_q: int, n_blocks_k: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        blocks = np.tile(np.arange(n_blocks_k) < round(share * n_blocks_k), (n_blocks_q, 1))
        return rng.permuted(blocks, axis=1)

    return pattern


def candidates(shape: Shape) -> dict[str, Masked]:
    """The masks, by name."""
    patterns = {
        "butterfly": block_patterns.butterfly(),
        "strided, 16": block_patterns.strided(stride=16),
        "fixed, 16": block_patterns.fixed(stride=16),
        "local + global": block_patterns.local_global(n_before=3, n_after=0),
    }
    found = {f"{name}, causal": Masked(pattern, True) for name, pattern in patterns.items()}
    n_halvings = int(np.log2(shape.length // shape.block_size)) - 1
    for i in range(n_halvings, -1, -1):
        name = f"random, 1/{2**i}" if i else "all"
        found[name] = Masked(random_blocks(2**-i), False)
    return found


def check(masked: Masked, shape: Shape, dtype: str) -> Errors:
    """Compares output and gradients with the oracle's over the mask.

    Raises:
      ArithmeticError: they differ by more than `rows.TOLERANCE`.
    """
    shape = shape._replace(length=shape.check_length)
    block = np.ones((shape.block_size, shape.block_size))
    mask = np.kron(masked.mask(shape), block).astype(bool)[: shape.length, : shape.length]
    mask = jnp.asarray(np.tril(mask) if masked.causal else mask)[None, None]

    def reference(*inputs):
        return reference_attention(*(x.astype(jnp.float32) for x in inputs), mask)

    return rows.compare(masked.attend(shape), reference, shape.inputs(dtype))


def device_ms(call: Callable[[], Any]) -> float | None:
    """Milliseconds of GPU that a call takes, the sum of its kernels; None without a GPU."""
    if jax.default_backend() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(N_PROFILED):
                result = call()
            jax.block_until_ready(result)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        total = kernel_ms(json.loads(gzip.decompress(path.read_bytes())))
    return total / N_PROFILED if total else None


def kernel_ms(trace: dict[str, Any]) -> float:
    """The milliseconds of all kernels in a trace of the profiler."""
    events = trace["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    kernels = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]
    return sum(e["dur"] for e in kernels) / 1e3


def measure_peers(
    python: str, found: Mapping[str, Masked], shape: Shape, repeats: int
) -> Iterator[tuple[str, Known]]:
    """The names and figures of FlexAttention's rows, as they are known."""
    peers = Peers("benchmarks.peers.block_sparse_torch", python, PEER_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "masks.npz"
        np.savez(path, **{name: masked.mask(shape) for name, masked in found.items()})
        causal = [name for name, masked in found.items() if masked.causal]
        request = dict(masks=str(path), causal=causal, shape=shape._asdict(), repeats=repeats)
        for answer in peers.ask(**request):
            yield FLEX + answer.get("name", "the other masks"), rows.peer_result(answer)
    peers.close()


def off_the_line(n_blocks: Sequence[int], ms: Sequence[float]) -> tuple[float, float, float]:
    """`a`, `b` of `ms = a + b * n_blocks`, least relative squares, and the largest deviation."""
    x, y = np.asarray(n_blocks, float), np.asarray(ms)
    a, b = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(x)), rcond=None)[0]
    return a, b, np.abs((a + b * x) / y - 1).max()


def random_times(known: Mapping[Any, Known], n_blocks: Mapping[str, int]) -> dict[str, Line]:
    """The times of random masks, in both passes; none where they are too few for a line."""
    lines: dict[str, Line] = {}
    for label, prefix in (("ours", ""), ("FlexAttention", FLEX)):
        found = {n: known.get(prefix + name) for name, n in n_blocks.items()}
        found = {n: result for n, result in found.items() if isinstance(result, Result)}
        if len(found) > 2:
            lines[f"{label}, forward"] = {n: result.forward.ms for n, result in found.items()}
            lines[f"{label}, gradient"] = {n: result.gradient.ms for n, result in found.items()}
    return lines


def draw(lines: Mapping[str, Line], dense: Known, title: str, path: Path) -> None:
    """Draws time by the number of nonzero blocks; dense attention is a level."""
    with plot.figure(path, title, figsize=(7.5, 4.5)) as (_, axes):
        for name, times in lines.items():
            axes.loglog(list(times), list(times.values()), "o-", ms=4, label=name)
        for one_pass, style in (("forward", ":"), ("gradient", "--")):
            if isinstance(dense, Result):
                ms = getattr(dense, one_pass).ms
                axes.axhline(ms, color="k", ls=style, lw=1, label=f"dense, {one_pass}")
        axes.set(xlabel="nonzero blocks", ylabel="ms")
        axes.legend(fontsize=8)


def print_times(
    found: Mapping[str, Masked], shape: Shape, measured: Iterable[tuple[Any, Known]]
) -> tuple[dict[Any, Known], dict[str, Line]]:
    """Prints the figures as they become known, and the lines through those of random masks."""
    masks = {name: masked.mask(shape) for name, masked in found.items()}
    table = Table("attention", "blocks", "of all", *rows.COLUMNS)
    known: dict[Any, Known] = {}
    for name, one in measured:
        known[name] = one
        if isinstance(name, bool):
            label = f"dense, {'causal' if name else 'bidirectional'}"
            table.row(label, "-", "-", *rows.cells(one, one))
            continue
        masked, mask = (of.get(name.removeprefix(FLEX)) for of in (found, masks))
        counts = ["-", "-"] if mask is None else [f"{mask.sum():,}", f"{mask.mean():.2%}"]
        table.row(name, *counts, *rows.cells(one, known[masked is None or masked.causal]))
    n_blocks = {name: int(masks[name].sum()) for name in found if not found[name].causal}
    lines = random_times(known, n_blocks)
    print()
    for label, times in lines.items():
        a, b, off = off_the_line(list(times), list(times.values()))
        print(f"{label}: {a:.3f} ms + {b * 1e3:.4f} ms for 1,000 random blocks, within {off:.0%}")
    return known, lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(
        __doc__, repeats=10, threads=True, plot="where to draw time against nonzero blocks"
    )
    command_line.add_peers(parser, "add FlexAttention")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    title = (
        f"{command_line.machine()}, 1 x {shape.length:,} tokens, {shape.n_heads} heads of "
        f"{shape.d_head}, blocks of {shape.block_size}, {shape.dtype}"
    )
    print(title)
    found = candidates(shape)

    def time(call):
        times, device = time_calls(call, jax.block_until_ready, args.repeats), device_ms(call)
        return times if device is None else Times(device, times.ms)

    with ThreadPoolExecutor(args.threads) as pool:
        ours = {name: masked.row(shape) for name, masked in found.items()}
        ours = rows.check_rows(ours, shape.check_length, shape.check_dtypes, pool)
        all_rows = {causal: rows.dense(causal) for causal in (True, False)} | ours
        measured = [rows.measure_rows(all_rows, shape.inputs(shape.dtype), time, pool)]
        if args.peers:
            measured.append(measure_peers(args.peers, found, shape, args.repeats))
        known, lines = print_times(found, shape, itertools.chain(*measured))
    if args.plot:
        draw(lines, known[False], title, args.plot)
    failed = [name for name in found if isinstance(known[name], Exception)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Block-sparse attention by its nonzero blocks, against dense attention and FlexAttention.

    python -m benchmarks.block_sparse --peers --plot runs/block_sparse.png

prints errors and then times: of causal attention over the patterns of
`reformax.ops.block_patterns`, and of bidirectional attention over random masks with the same number
of blocks in each row, from two blocks a row to all of them. The columns are those of
`benchmarks.attention`. Dense attention is causal where the row is. `--peers` adds PyTorch's
FlexAttention, compiled, with the same block masks. The last lines fit the times of random masks,
means of queued calls, by a line in the number of blocks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import command_line, rows
from benchmarks.harness.calls import exit_if
from benchmarks.harness.output import Table, plot
from benchmarks.harness.rows import Known, Result, Row
from reformax.ops import block_patterns, block_sparse

CAUSAL, ALL = "dense, causal", "dense, all"
FLEX = "FlexAttention, "
# A line's style says whose it is and its colour which pass; ours shows within FlexAttention's.
STYLES = {
    f"{whose}, {one_pass}": style | dict(color=color)
    for one_pass, color in (("forward", "C0"), ("gradient", "C1"))
    for whose, style in {
        "ours": dict(ls="-", marker="o", ms=4),
        "FlexAttention": dict(ls="--", marker="s", ms=8, mfc="none"),
        ALL: dict(ls=":"),
    }.items()
}


class Shape(NamedTuple):
    """The sizes of a run."""

    length: int
    n_heads: int
    d_head: int
    block_size: int
    dtype: str
    check_length: int


SHAPES = {
    "tiny": Shape(64, 1, 4, 16, "float32", 40),
    "cpu": Shape(2048, 2, 32, 64, "float32", 256),
    "gpu": Shape(65536, 8, 64, 128, "bfloat16", 2048),
}


def random_blocks(share: float) -> block_patterns.Pattern:
    """A pattern with `share` of the blocks in each row, at random."""

    def pattern(n_blocks_q: int, n_blocks_k: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        blocks = np.tile(np.arange(n_blocks_k) < round(share * n_blocks_k), (n_blocks_q, 1))
        return rng.permuted(blocks, axis=1)

    return pattern


def patterns(shape: Shape) -> dict[str, block_patterns.Pattern]:
    """Functions of the numbers of blocks, by name. The name says which attention is causal."""
    found = {
        "butterfly, causal": block_patterns.butterfly(),
        "strided, 16, causal": block_patterns.strided(stride=16),
        "fixed, 16, causal": block_patterns.fixed(stride=16),
        "local + global, causal": block_patterns.local_global(n_before=3, n_after=0),
    }
    n_halvings = int(np.log2(shape.length // shape.block_size)) - 1
    for i in range(n_halvings, -1, -1):
        found[f"random, 1/{2**i}" if i else "all"] = random_blocks(2**-i)
    return found


def is_causal(name: str) -> bool:
    return name.endswith("causal")


def row(shape: Shape, name: str, pattern: block_patterns.Pattern) -> Row:
    options = dict(pattern=pattern, block_size=shape.block_size)
    ops = (block_sparse.block_sparse(**options, impl=impl) for impl in ("auto", rows.other_impl()))
    return rows.row(*ops, is_causal(name))


def nonzero(shape: Shape, name: str, pattern: block_patterns.Pattern) -> np.ndarray:
    """The nonzero blocks; if causal, without those above the diagonal."""
    n_blocks = -(-shape.length // shape.block_size)
    mask = pattern(n_blocks, n_blocks)
    return np.tril(mask) if is_causal(name) else mask


def measure_peers(
    python: str, masks: Mapping[str, np.ndarray], shape: Shape, repeats: int
) -> Iterator[tuple[str, Known]]:
    """The names and figures of FlexAttention's rows, as they are known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "masks.npz"
        np.savez(path, **masks)
        request = dict(masks=str(path), shape=shape._asdict(), repeats=repeats)
        peers = rows.measure_peers(python, "peers.attention_torch.by_mask", **request)
        yield from ((FLEX + name, known) for name, known in peers)


def off_the_line(n_blocks: Sequence[int], ms: Sequence[float]) -> tuple[float, float, float]:
    """`a`, `b` of `ms = a + b * n_blocks`, least relative squares, and the largest deviation."""
    x, y = np.asarray(n_blocks, float), np.asarray(ms)
    a, b = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(x)), rcond=None)[0]
    return a, b, np.abs((a + b * x) / y - 1).max()


def random_times(
    known: Mapping[str, Known], n_blocks: Mapping[str, int]
) -> dict[str, dict[int, float]]:
    """Times by the number of nonzero blocks, in both passes; dense attention is a level."""
    lines: dict[str, dict[int, float]] = {}
    for one_pass in ("forward", "gradient"):
        for label, prefix in (("ours", ""), ("FlexAttention", FLEX)):
            found = {n: known.get(prefix + name) for name, n in n_blocks.items()}
            lines[f"{label}, {one_pass}"] = {
                n: getattr(result, one_pass).queued_ms
                for n, result in found.items()
                if isinstance(result, Result)
            }
        if isinstance(known[ALL], Result):
            ms = getattr(known[ALL], one_pass).queued_ms
            lines[f"{ALL}, {one_pass}"] = dict.fromkeys(n_blocks.values(), ms)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=10, peers="add FlexAttention", plot=True)
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    found, heads = patterns(shape), (shape.n_heads, shape.d_head)
    masks = {name: nonzero(shape, name, pattern) for name, pattern in found.items()}
    ours = {name: row(shape, name, pattern) for name, pattern in found.items()}
    ours = rows.check_rows(ours, (1, shape.check_length, *heads), shape.dtype)
    dense = {CAUSAL: rows.dense(causal=True), ALL: rows.dense(causal=False)}
    arrays = rows.inputs(1, shape.length, *heads, dtype=shape.dtype)
    measured = [rows.measure_rows(dense | ours, arrays, args.repeats)]
    if args.peers:
        measured.append(measure_peers(args.peers, masks, shape, args.repeats))
    table = Table("attention", "blocks", "of all", *rows.COLUMNS)
    known: dict[str, Known] = {}
    for name, one in itertools.chain(*measured):
        known[name] = one
        mask = masks.get(name.removeprefix(FLEX))
        counts = ["-", "-"] if mask is None else [f"{mask.sum():,}", f"{mask.mean():.2%}"]
        table.row(name, *counts, *rows.cells(one, known[CAUSAL if is_causal(name) else ALL]))
    n_blocks = {name: int(mask.sum()) for name, mask in masks.items() if not is_causal(name)}
    lines = random_times(known, n_blocks)
    print()
    for label, times in lines.items():
        if len(times) > 2 and not label.startswith(ALL):
            a, b, off = off_the_line(list(times), list(times.values()))
            print(f"{label}: {a:.3f} ms + {b * 1e3:.4f} ms for 1,000 blocks, within {off:.0%}")
    if args.plot:
        title = (
            f"{command_line.machine()}, 1 x {shape.length:,} tokens, {shape.n_heads} heads of "
            f"{shape.d_head}, blocks of {shape.block_size}, {shape.dtype}"
        )
        plot(args.plot, {"ms": lines}, title, styles=STYLES, xlabel="nonzero blocks")
    exit_if(name for name in ours if isinstance(known[name], Exception))


if __name__ == "__main__":
    main()

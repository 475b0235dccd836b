"""The chunked kernels in Pallas and in Triton's own language, side by side.

    python -m tools.triton_source

prints, for each pass of LSH attention in four rounds, the largest difference between the results of
the two, relative to the largest number, and the milliseconds of a call of each, means of 20 queued
calls, in turns. The second rows are of seven documents and padding, with dropout.

Triton's kernels need jax-triton, and a Triton that it takes; docs/performance.md names some that go
together. With Triton alone, `TRITON_INTERPRET=1 python -m tools.triton_source --tiny` compares
them on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import command_line, rows
from benchmarks.harness.calls import N_QUEUED, attempt
from benchmarks.harness.output import Table
from benchmarks.harness.rows import KEY
from reformax.ops.kernels.triton import chunked
from reformax.ops.softmax.orders import ChunkSizes, Order

PALLAS, TRITON = "Pallas", "Triton"
REPEATS = 5


class Shape(NamedTuple):
    """The sizes of a run."""

    length: int
    n_heads: int
    d_head: int
    chunk_len: int
    n_hashes: int
    dtype: str


SHAPES = {
    "tiny": Shape(60, 1, 16, 16, 2, "float32"),
    "cpu": Shape(256, 2, 32, 32, 2, "float32"),
    "gpu": Shape(65536, 8, 64, 128, 4, "bfloat16"),
}


def chunks_and_order(shape: Shape, dropout: float) -> tuple[Any, Order]:
    """As LSH attention has them, of buckets drawn at random; padding stands last."""
    sizes = ChunkSizes(shape.chunk_len, n_chunks_before=1, n_chunks_after=0)
    chunks = sizes.cut(shape.length, causal=True, shared_qk=True, dropout=dropout)
    n_buckets = 2 * -(-shape.length // shape.chunk_len)
    drawn = 1, shape.n_heads, shape.n_hashes, shape.length + chunks.padding
    buckets = jax.random.randint(KEY, drawn, 0, n_buckets)
    buckets = jnp.where(jnp.arange(drawn[-1]) < shape.length, buckets, n_buckets)
    return chunks, Order(jnp.argsort(buckets, axis=-1, stable=True).astype(jnp.int32))


def passes(kernels: Any, shape: Shape, packed: bool) -> dict[str, Callable]:
    """Calls of the two passes of some kernels, by name, which return tuples of arrays."""
    chunks, order = chunks_and_order(shape, dropout=0.1 if packed else 0.0)
    size = 1, shape.length, shape.n_heads, shape.d_head
    q, _, v, d_out = rows.inputs(*size, dtype=shape.dtype)
    segment_ids = None
    if packed:
        segment_ids = jnp.pad(rows.documents(q), ((0, 0), (0, chunks.padding)))
    options = dict(interpret=jax.default_backend() == "cpu")

    def forward(q, v, order, segment_ids):
        return kernels.forward(chunks, q, None, v, order, segment_ids, KEY, **options)

    def backward(q, v, order, segment_ids, *results):
        args = q, None, v, order, segment_ids, KEY
        dq, _, dv = kernels.backward(chunks, *args, *results, **options)
        return dq, dv

    inputs = q, v, order, segment_ids
    forward, backward = jax.jit(forward), jax.jit(backward)
    more = *inputs, *forward(*inputs), d_out
    return {"forward": lambda: forward(*inputs), "backward": lambda: backward(*more)}


def queued(calls: Mapping[str, Callable], repeats: int, n: int) -> dict[str, float]:
    """The mean milliseconds of each call. They take turns, `n` calls after another."""
    taken = dict.fromkeys(calls, 0.0)
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(n)][-1])
            taken[name] += (time.perf_counter() - start) / n / repeats * 1e3
    return taken


def difference(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> float:
    """The largest difference of two tuples of arrays, relative to the largest number of each."""
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in zip(a, b, strict=True)]
    return max(float(np.max(np.abs(x - y)) / np.max(np.abs(x))) for x, y in pairs)


def triton_kernels() -> Any:
    """Triton's, or the exception that says why there are none."""

    def imported() -> Any:
        from tools import chunked_triton

        return chunked_triton

    return attempt(imported)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    on_cpu = jax.default_backend() == "cpu"
    known = triton_kernels()
    table = Table("pass", "difference", f"{PALLAS}, ms", f"{TRITON}, ms", title=str(shape))
    for packed in (False, True):
        ours = passes(chunked, shape, packed)
        theirs = known
        if not isinstance(known, Exception):
            theirs = attempt(passes, known, shape, packed)
        for name, call in ours.items():

            def cells(theirs, name=name, call=call):
                calls = {PALLAS: call, TRITON: theirs[name]}
                error = difference(*(x() for x in calls.values()))
                times = queued(calls, *((1, 1) if on_cpu else (REPEATS, N_QUEUED)))
                return f"{error:.1e}", *(f"{times[x]:.3f}" for x in calls)

            table.result(name + ", packed" * packed, known=theirs, cells=cells)


if __name__ == "__main__":
    main()

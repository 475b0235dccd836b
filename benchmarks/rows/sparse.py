"""Our attentions that choose where to look: the rows of `benchmarks.sparse_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import rows
from benchmarks.harness.by_length import left_out, save, timed
from benchmarks.harness.calls import attempt, attempt_each, reason
from benchmarks.harness.processes import Answer, alone, stage, together
from reformax import memory
from reformax.ops import (
    AttentionOp,
    asymmetric_lsh,
    dsa,
    flash,
    hash_sparse,
    local,
    longformer,
    lsh,
    moba,
    nsa,
    sinks,
    smyrf,
)

MOST = 1.0  # seconds of the calls of a pass


class Shape(NamedTuple):
    """The sizes of a run; rows are checked at `check_length`."""

    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str
    check_length: int
    block: int  # of MoBA; chunks and windows are half of it
    n_global: int


class Made(NamedTuple):
    """An op of a table.

    Attributes:
      make: makes it of `impl`.
      dense: the row that it is compared with.
      wide: whether its heads are those of NSA's paper, 64 of 128 and 4 of keys.
    """

    make: Callable[..., AttentionOp]
    causal: bool = True
    marked: int = 0
    n_kv_heads: int | None = None
    dense: str = "flash"
    wide: bool = False

    def row(self, impl: str | None = None, other: str | None = None) -> rows.Row:
        """Its row, checked against another implementation."""
        options = dict(causal=self.causal, marked=self.marked)
        other = other or rows.other_impl()
        return rows.row(self.make(impl=impl or "auto"), self.make(impl=other), **options)

    def inputs(self, shape: Shape, length: int, dtype: str | None = None) -> tuple[jax.Array, ...]:
        """q, k, v and d_out, random."""
        heads = (64, 128) if self.wide else (shape.n_heads, shape.d_head)
        options = dict(dtype=dtype or shape.dtype, n_kv_heads=self.n_kv_heads)
        return rows.inputs(1, length, *heads, **options)


def algorithms(shape: Shape) -> dict[str, Made]:
    """The ops by name, the most important first."""
    half, of = shape.block // 2, functools.partial
    chunks = dict(chunk_len=half // 2, n_chunks_before=1, n_chunks_after=0)
    stride = max(2, half // 16)
    sizes = dict(compression="mean", own_projections=False, window=shape.block)
    sizes |= dict(block_size=4 * stride, n_selected=min(16, stride))
    native = of(nsa.nsa, **sizes, compress_len=2 * stride, compress_stride=stride)
    whole = of(nsa.nsa, **sizes, compress_len=4 * stride, compress_stride=4 * stride)
    marked = dict(n_global=shape.n_global, own_projections=False)
    one, four = dict(n_kv_heads=1), dict(n_kv_heads=4, wide=True)
    return {
        "nsa": Made(native, dense="flash, 1 head of keys", **one),
        "moba": Made(of(moba.moba, block_size=shape.block, top_k=3)),
        "dsa": Made(of(dsa.dsa, top_k=half, d_index=shape.d_head)),
        "nsa, a mean a block": Made(whole, dense="flash, 1 head of keys", **one),
        "longformer": Made(
            of(longformer.longformer, window=half + 1, **marked), False, shape.n_global
        ),
        "flash": Made(flash.flash),
        "flash, 1 head of keys": Made(flash.flash, **one),
        "lsh": Made(of(lsh.lsh, **chunks, n_hashes=4)),
        "asymmetric_lsh": Made(of(asymmetric_lsh.asymmetric_lsh, **chunks, n_hashes=4)),
        "smyrf": Made(of(smyrf.smyrf, chunk_len=half, n_hashes=4)),
        "sinks": Made(of(sinks.sinks, window=half, n_sinks=4)),
        "nsa, 64 heads of 128": Made(native, dense="flash, 64 heads of 128", **four),
        "flash, 64 heads of 128": Made(flash.flash, **four),
        "hash_sparse": Made(of(hash_sparse.hash_sparse, n_buckets=16)),
        "local": Made(of(local.local, chunk_len=half, window=half)),
    }


def numbers(name: str, shape: Sequence[Any], folder: str, limit: float) -> Iterator[Answer]:
    """Writes a row's inputs, rounded to its dtype, and its output and gradients in float32.

    It is meant for a CPU.
    """
    sizes = Shape(*shape)
    made = algorithms(sizes)[name]
    yield stage(f"{name}: array operations in float32", limit)
    *qkv, d_out = (x.astype(jnp.float32) for x in made.inputs(sizes, sizes.check_length))
    attend = made.row("xla", "xla").attend
    run = rows.output_and_gradient(lambda q, k, v: attend(q, k, v, rows.KEY))
    with jax.default_matmul_precision("highest"):
        out, gradients = jax.jit(run)(d_out, *qkv)
    found = dict(zip("qkv", qkv, strict=True)) | {"d_out": d_out, "out": out}
    found |= {f"d {x}": of_x for x, of_x in zip("qkv", gradients, strict=True)}
    save(Path(folder) / f"{name}.npz", {x: np.asarray(array) for x, array in found.items()})


class Programs(NamedTuple):
    """The compiled passes at a length: of q, k, v and a key; the gradient's of d_out too."""

    forward: Any
    gradient: Any
    temp_mib: float


def compile_row(made: Made, row: rows.Row, shape: Shape, length: int) -> Programs:
    """Both passes, without inputs, which would fill the memory of whoever is timed."""
    arrays = jax.eval_shape(functools.partial(made.inputs, shape, length))
    forward, gradient, temp_mib = rows.compile_row(arrays, row)
    return Programs(forward.func, gradient.func, temp_mib)


def measure(programs: Programs, made: Made, row: rows.Row, shape: Shape, length: int, repeats):
    """The figures of a row."""
    q, k, v, d_out = made.inputs(shape, length)
    args = q, None if row.shared_qk else k, v, rows.KEY
    forward = functools.partial(programs.forward, *args)
    gradient = functools.partial(programs.gradient, d_out, *args)
    return rows.measure(forward, gradient, programs.temp_mib, repeats, MOST)


def by_length(
    name: str,
    shape: Sequence[Any],
    lengths: Sequence[int],
    known: Mapping[str, Sequence[float]],
    known_errors: Sequence[float] | None,
    repeats: int,
    folder: str,
    limit: float,
) -> Iterator[Answer]:
    """The figures of a row at lengths that are compiled together, and checked with them.

    Arguments are those of `rows.linear.by_length`; `lengths` are in the order of the measuring, and
    the check reads no file of `numbers`.
    """
    sizes, lock = Shape(*shape), Path(folder) / "lock"
    made, most = algorithms(sizes)[name], memory.available() / 2**20
    row, measured = made.row(), {int(n): tuple(x) for n, x in known.items()}
    why = {n: left_out(measured, n, most) for n in lengths}
    yield from ({"name": name, "length": n, "error": reason(x)} for n, x in why.items() if x)
    work = {n: functools.partial(compile_row, made, row, sizes, n) for n in lengths if not why[n]}
    if not work:
        return
    errors = known_errors
    with together(lock):
        yield stage(f"{name}: compile {', '.join(map(str, work))}", limit)
        found = attempt_each(lambda one: one(), work, len(work))
        if errors is None:  # not beside them: no program may run while one with cuDNN's is loaded
            yield stage(f"{name}: check", limit)
            errors = attempt(lambda: row.check(*made.inputs(sizes, sizes.check_length)))
    if isinstance(errors, Exception):
        found = dict.fromkeys(found, errors)
    yield stage(f"{name}: wait for the device")
    with alone(lock):
        yield from timed(
            name, found, lambda one, n: measure(one, made, row, sizes, n, repeats), errors, limit
        )

"""Time and memory of every attention by length, with and without dropout and a mask.

The tables 9 to 21 of Dao et al. 2022, "FlashAttention", for the attentions here:
forward pass, backward pass, both, and memory. Figures are kept in a file, a line as soon as a case
is done: the same command goes on after any interruption.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.harness import command_line, lines, rows
from benchmarks.harness.calls import COMPILERS, MIB, attempt, attempt_each, reason, time_calls
from reformax import durable, memory
from reformax.ops import (
    AttentionOp,
    asymmetric_lsh,
    block_patterns,
    block_sparse,
    csa,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    hca,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    moba,
    nsa,
    nystromformer,
    performer,
    retention,
    routing,
    shared_qk,
    sinks,
    smyrf,
)

DROPOUT = 0.1
N_PADDING = 20  # a masked row ends with fewer tokens of padding than this
MOST = 2.0  # seconds of the calls of a pass
HIDDEN = 1.5  # times the host's time for a program: up to this the device's is not seen
SLOW = 2.0  # seconds of a forward and backward pass after which longer rows are left out
OUT_OF_MEMORY, LEFT_OUT = "out of memory", "left out, slow"
DIED = 2  # beginnings without a figure after which a case is given up


class Shape(NamedTuple):
    """The sizes of a run."""

    batch: int
    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str


SHAPES = {
    "tiny": Shape(2, (64, 128), 2, 8, "float32"),
    "cpu": Shape(1, tuple(2**i for i in range(7, 13)), 4, 32, "float32"),
    "gpu": Shape(16, tuple(2**i for i in range(7, 17)), 8, 64, "bfloat16"),
}


def attentions() -> dict[str, AttentionOp]:
    """Every attention here, by name. Where the number of keys is free a query sees about 256."""
    ops = [
        flash.flash(),
        memory_efficient.memory_efficient(),
        dense.dense(),
        shared_qk.shared_qk(),
        local.local(n_chunks_after=1),
        longformer.longformer(window=129),
        sinks.sinks(window=129),
        block_sparse.block_sparse(),
        lsh.lsh(),
        asymmetric_lsh.asymmetric_lsh(),
        smyrf.smyrf(),
        routing.routing(),
        moba.moba(block_size=128),
        nsa.nsa(),
        dsa.dsa(top_k=256),
        csa.csa(top_k=128),
        hca.hca(),
        hash_sparse.hash_sparse(),
        linear.linear(),
        performer.performer(),
        linformer.linformer(),
        nystromformer.nystromformer(),
        long_short.long_short(),
        retention.retention(),
        gated_linear.gated_linear(),
        gated_delta.gated_delta(),
        kda.kda(),
    ]
    named = {op.name: op for op in ops}
    return named | {
        "dense, impl='xla'": dense.dense(impl="xla"),
        "bigbird": block_sparse.block_sparse(block_size=64, pattern=block_patterns.bigbird()),
    }


class Case(NamedTuple):
    """A row of the tables at a length; what it is, and on what machine, is its key in the file."""

    attention: str
    length: int
    dropout: float
    masked: bool
    batch: int
    n_heads: int
    d_head: int
    dtype: str
    machine: str


class Figures(NamedTuple):
    """What is known of a case: milliseconds a call and MiB, or why there are none."""

    forward_ms: float | None = None
    backward_ms: float | None = None  # from what a forward pass has kept
    combined_ms: float | None = None
    memory_mib: float | None = None  # of both: arguments, results and what lies between
    error: str = ""
    host_ms: float = 0.0  # what the host takes to start a program: no figure is below it


# The columns of figures, by their titles.
FIGURES = {
    "forward pass, ms": "forward_ms",
    "backward pass, ms": "backward_ms",
    "both passes, ms": "combined_ms",
    "memory of both passes, MiB": "memory_mib",
}


def cases(shape: Shape, names: Sequence[str]) -> Iterator[list[Case]]:
    """The cases in the order of their measuring, those of one length and setting together."""
    sizes = shape.batch, shape.n_heads, shape.d_head, shape.dtype, command_line.machine()
    settings = [(0.0, False), (DROPOUT, True), (0.0, True), (DROPOUT, False)]
    for (dropout, masked), length in itertools.product(settings, shape.lengths):
        yield [Case(name, length, dropout, masked, *sizes) for name in names]


class File:
    """Figures by case, in lines of JSON. A line that a crash cut is left out."""

    def __init__(self, path: Path):
        self._path, self.known, self._begun = path, {}, {}
        for case, figures in lines.read(path):
            # Lines of an older table, whose backward pass was a difference, are measured again.
            if figures is None or len(figures) == len(Figures._fields):
                self._take(Case(*case), figures and Figures(*figures))

    def _take(self, case: Case, figures: Figures | None) -> None:
        if figures is None:
            self._begun[case] = self._begun.get(case, 0) + 1
        else:
            self.known[case] = figures

    def write(self, case: Case, figures: Figures | None) -> None:
        """Adds what is known of a case; None says that it begins."""
        lines.add(self._path, [case, figures])
        self._take(case, figures)

    def died(self, case: Case) -> bool:
        """Whether the process has ended in the case again and again."""
        return case not in self.known and self._begun.get(case, 0) >= DIED


# A case's arrays and programs.


def inputs_of(op: AttentionOp, case: Case) -> dict[str, Any]:
    """Random arrays: `d_out`, `lengths` or None, and of the function `inputs` and `rng`."""
    size = case.batch, case.length, case.n_heads, case.d_head
    q, k, v, d_out = rows.inputs(*size, dtype=case.dtype)
    dims = op.dims(q, v)
    extra_projections = {
        name: jax.random.normal(jax.random.fold_in(rows.KEY, i), (*size[:2], x.n_heads, x.size))
        for i, (name, x) in enumerate(op.extra_projections(dims).items())
    }
    extra_projections = jax.tree.map(lambda x: x.astype(case.dtype), extra_projections)
    inputs = (
        q,
        None if op.shared_qk else k,
        v,
        op.init(rows.KEY, dims),
        extra_projections or None,
    )
    lengths = case.length - jax.random.randint(rows.KEY, (case.batch,), 0, N_PADDING)
    lengths = lengths if case.masked else None
    return dict(d_out=d_out, lengths=lengths, inputs=inputs, rng=rows.KEY)


def forward(op: AttentionOp, dropout: float, causal: bool, inputs, lengths, rng) -> Any:
    """The output, of the arrays that `inputs_of` names."""
    q, k, v, params, extra_projections = inputs
    given = dict(lengths=lengths, rng=rng, params=params, extra_projections=extra_projections)
    causal = causal or op.causality == "only"
    return op(q, k, v, causal=causal, dropout=dropout, **given)


def forward_and_kept(
    op: AttentionOp, dropout: float, causal: bool, inputs, lengths, rng, d_out
) -> tuple[Any, Any]:
    """The output, and what `gradients` needs: what the pass has kept, and the output's gradient."""
    attend = functools.partial(forward, op, dropout, causal)
    out, vjp = jax.vjp(lambda inputs: attend(inputs, lengths, rng), inputs)
    return out, (vjp, d_out.astype(out.dtype))


def gradients(kept: Any) -> Any:
    """The gradients of the inputs."""
    vjp, d_out = kept
    return vjp(d_out)


def both(op: AttentionOp, dropout: float, causal: bool, *arrays, **named) -> tuple[Any, Any]:
    """The output, and the gradients of the inputs."""
    out, kept = forward_and_kept(op, dropout, causal, *arrays, **named)
    return out, gradients(kept)


class Programs(NamedTuple):
    """The compiled programs of a case; each but `backward` takes its arrays by name."""

    forward: Callable[..., Any]
    keeping: Callable[..., Any]
    backward: Callable[[Any], Any]
    combined: Callable[..., Any]
    memory_mib: float


def programs(op: AttentionOp, case: Case) -> Programs:
    """The programs of a case.

    Raises:
      MemoryError: the passes need more memory than the device has.
      NotImplementedError: the attention has no such call.
    """
    of_forward, of_keeping, of_both = (
        jax.jit(functools.partial(run, op, case.dropout, False))
        for run in (forward, forward_and_kept, both)
    )
    like = jax.eval_shape(functools.partial(inputs_of, op, case))
    combined = of_both.lower(**like).compile()
    asked = combined.memory_analysis()
    parts = ("argument_size", "output_size", "temp_size")
    n_bytes = sum(getattr(asked, f"{part}_in_bytes") for part in parts)
    if n_bytes > memory.available():
        raise MemoryError(f"{n_bytes / MIB:,.0f} MiB")
    lowered = of_keeping.lower(**like)
    keeping, (_, kept) = lowered.compile(), lowered.out_info
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kept)
    backward = jax.jit(gradients).lower(kept).compile()
    like.pop("d_out")
    alone = of_forward.lower(**like).compile()
    return Programs(alone, keeping, backward, combined, n_bytes / MIB)


def measure(op: AttentionOp, case: Case, repeats: int, of: Programs) -> Figures:
    """The figures of a case: means of queued calls."""
    given = inputs_of(op, case)
    of_forward = {name: x for name, x in given.items() if name != "d_out"}
    nothing = jax.jit(lambda x: x[0])

    def ms(call: Callable[..., Any], *args: Any, **named: Any) -> float:
        calls = functools.partial(call, *args, **named)
        return time_calls(calls, jax.block_until_ready, repeats, MOST).queued_ms

    alone, combined = ms(of.forward, **of_forward), ms(of.combined, **given)
    backward = ms(of.backward, of.keeping(**given)[1])
    host = ms(nothing, jnp.zeros(1))
    return Figures(alone, backward, combined, of.memory_mib, host_ms=host)


def failed(error: Exception) -> Figures:
    """What stands for the figures of a case that has none."""
    text = f"{type(error).__name__}: {error}"
    out = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
    return Figures(error=OUT_OF_MEMORY if out else reason(error))


def is_slow(figures: Figures) -> bool:
    """Whether longer rows are left out."""
    return (figures.combined_ms or 0) > SLOW * 1e3


def fill(file: File, shape: Shape, names: Sequence[str], repeats: int) -> Iterator[list[Case]]:
    """Measures what the file does not have; yields the cases of a length and setting when done."""
    ops, slow = attentions(), set()
    for group in cases(shape, names):
        waiting = {}
        for case in group:
            setting = case.attention, case.dropout, case.masked
            op = ops[case.attention]
            if case in file.known:
                slow |= {setting} if is_slow(file.known[case]) else set()
            elif setting in slow:
                file.write(case, Figures(error=LEFT_OUT))
            elif file.died(case):
                file.write(case, Figures(error=f"the process ended {DIED} times"))
            elif case.dropout and not op.dropout:
                file.write(case, Figures(error="no weights to drop"))
            else:
                waiting[case] = op, case
        ready = attempt_each(lambda one: programs(*one), waiting, COMPILERS)
        for case in waiting:
            compiled = ready.pop(case)
            if not isinstance(compiled, Exception):
                file.write(case, None)
                compiled = attempt(measure, *waiting[case], repeats, compiled)
            known = failed(compiled) if isinstance(compiled, Exception) else compiled
            file.write(case, known)
            if is_slow(known):
                slow.add((case.attention, case.dropout, case.masked))
        yield group


# What is written.


def words(dropout: float, masked: bool) -> str:
    """A setting in words."""
    return f"{'with' if dropout else 'without'} dropout, {'with' if masked else 'without'} a mask"


def cell(figures: Figures, name: str) -> str:
    """A figure of a case for a table, or in short why there is none.

    A time that is no longer than the host's is said to be below it.
    """
    number = getattr(figures, name)
    if number is None:
        return figures.error.partition(":")[0]
    hidden = name.endswith("_ms") and number <= HIDDEN * figures.host_ms
    return f"< {number:,.2f}" if hidden else f"{number:,.2f}"


def write(folder: Path, known: Mapping[Case, Figures], machine: str) -> None:
    """Writes table.csv of all that is known of this machine."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow([*Case._fields, *Figures._fields])
    table.writerows([*case, *x] for case, x in known.items() if case.machine == machine)
    durable.write(folder / "table.csv", text.getvalue().encode())

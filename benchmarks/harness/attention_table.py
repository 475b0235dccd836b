"""Time and memory of every attention by length, with and without dropout and a mask.

The tables 9 to 21 of Dao et al. 2022, "FlashAttention", for the attentions here:
forward pass, backward pass, both, and memory. Figures are kept in a file, a line as soon as a case
is done: the same command goes on after any interruption. Commands that share a folder share its
device: they compile side by side, and time in turn.
"""

from __future__ import annotations

import csv
import functools
import gc
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.harness import command_line, lines, rows
from benchmarks.harness.calls import (
    COMPILERS,
    MIB,
    N_QUEUED,
    attempt,
    attempt_within,
    is_hidden,
    is_late_at_work,
    reason,
    seconds_of,
    was_late,
)
from benchmarks.harness.processes import alone, together
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
MOST = 0.5  # seconds of the calls of a pass, where one takes less
TOGETHER = 2**15  # tokens of a row in all lengths whose programs are compiled side by side
HELD = 2**26  # bytes that a device may hold between cases
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
    # The longest first: what an interrupted run has is then what pages show.
    "gpu": Shape(16, (65536, 16384, 4096, 1024, 256), 8, 64, "bfloat16"),
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


# Dropout, and whether a mask: what is most asked for comes first.
SETTINGS = {
    "plain": (0.0, False),
    "dropout": (DROPOUT, False),
    "mask": (0.0, True),
    "both": (DROPOUT, True),
}

# The columns of figures, by their titles.
FIGURES = {
    "forward pass, ms": "forward_ms",
    "backward pass, ms": "backward_ms",
    "both passes, ms": "combined_ms",
    "memory of both passes, MiB": "memory_mib",
}


def groups(
    shape: Shape, names: Sequence[str], settings: Sequence[str] = tuple(SETTINGS)
) -> Iterator[list[Case]]:
    """The cases in the order of their measuring, those that are compiled side by side together.

    These are of one setting, and of lengths that follow each other and are no more than `TOGETHER`.
    """
    sizes = shape.batch, shape.n_heads, shape.d_head, shape.dtype, command_line.machine()
    for setting in settings:
        dropout, masked = SETTINGS[setting]
        group, tokens = [], 0
        for length in dict.fromkeys(shape.lengths):
            if group and tokens + length > TOGETHER:
                yield group
                group, tokens = [], 0
            group += [Case(name, length, dropout, masked, *sizes) for name in dict.fromkeys(names)]
            tokens += length
        yield group


class File:
    """Figures by case, in lines of JSON. A line that a crash cut is left out."""

    def __init__(self, path: Path):
        self._path, self.known, self._begun = path, {}, {}
        self.lock = path.with_name("lock")
        for case, figures in lines.read(path):
            # Lines of an older table, whose backward pass was a difference, are measured again.
            if figures is None or len(figures) == len(Figures._fields):
                self._take(Case(*case), figures and Figures(*figures))

    def _take(self, case: Case, figures: Figures | None) -> None:
        if figures is None:
            self._begun[case] = self._begun.get(case, 0) + 1
        else:
            self.known[case] = figures
            self._begun.pop(case, None)

    def write(self, case: Case, figures: Figures | None) -> None:
        """Adds what is known of a case; None says that it begins."""
        lines.add(self._path, [case, figures])
        self._take(case, figures)

    def died(self, case: Case) -> bool:
        """Whether the process has ended in the case again and again."""
        return self._begun.get(case, 0) >= DIED


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
    """The programs of a case, lowered or compiled; each but `backward` takes its arrays by name."""

    combined: Any
    keeping: Any
    backward: Any
    forward: Any


def lowered(op: AttentionOp, case: Case) -> Programs:
    """The programs of a case.

    Raises:
      NotImplementedError: the attention has no such call.
    """
    of_forward, of_keeping, of_both = (
        jax.jit(functools.partial(run, op, case.dropout, False))
        for run in (forward, forward_and_kept, both)
    )
    like = jax.eval_shape(functools.partial(inputs_of, op, case))
    combined, keeping = of_both.lower(**like), of_keeping.lower(**like)
    _, kept = keeping.out_info
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kept)
    like.pop("d_out")
    return Programs(combined, keeping, jax.jit(gradients).lower(kept), of_forward.lower(**like))


def n_bytes(program: Any) -> int:
    """The bytes of a compiled program: its arguments, its results and what lies between."""
    asked, parts = program.memory_analysis(), ("argument_size", "output_size", "temp_size")
    return sum(getattr(asked, f"{part}_in_bytes") for part in parts)


def n_bytes_apart(of: Programs) -> int:
    """The bytes of both passes as programs of their own: the second begins with what is kept."""
    inputs = of.keeping.memory_analysis().argument_size_in_bytes
    return max(n_bytes(of.keeping), inputs + n_bytes(of.backward))


@jax.jit
def first(x: Any) -> Any:
    """A program that does nothing, for the time of its start."""
    return x[0]


def queued_ms(call: Callable[..., Any], *args: Any, **named: Any) -> float:
    """The mean milliseconds of queued calls, after four.

    Of slow calls the second alone is the figure, and of those that take seconds the first.
    """

    call = functools.partial(call, *args, **named)
    seconds = functools.partial(seconds_of, call, jax.block_until_ready)
    taken = seconds()
    if taken < SLOW:
        taken = seconds()
    if taken < MOST / 2:
        seconds(2)  # what two results take is allocated first
        taken = seconds(min(N_QUEUED, int(MOST / taken)))
    return taken * 1e3


def measure(op: AttentionOp, case: Case, of: Programs) -> Figures:
    """The figures of a case: means of queued calls. No time of a pass that memory is too small for.

    Raises:
      MemoryError: it is too small for both passes as one program.
    """
    size = n_bytes(of.combined)
    if size > memory.available():
        raise MemoryError(f"{size / MIB:,.0f} MiB")
    given = inputs_of(op, case)
    of_forward = {name: x for name, x in given.items() if name != "d_out"}
    combined, ahead = queued_ms(of.combined, **given), queued_ms(of.forward, **of_forward)
    backward = None
    if n_bytes_apart(of) <= memory.available():
        backward = attempt(lambda: queued_ms(of.backward, of.keeping(**given)[1]))
    if isinstance(backward, Exception):
        if not is_of_memory(backward):
            raise backward
        backward = None
    return Figures(ahead, backward, combined, size / MIB, host_ms=queued_ms(first, jnp.zeros(1)))


def is_of_memory(error: Exception) -> bool:
    """Whether memory was too small."""
    text = f"{type(error).__name__}: {error}"
    out = "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
    return isinstance(error, MemoryError) or out


def failed(error: Exception) -> Figures:
    """What stands for the figures of a case that has none."""
    return Figures(error=OUT_OF_MEMORY if is_of_memory(error) else reason(error))


def is_slow(figures: Figures) -> bool:
    """Whether longer rows are left out."""
    return (figures.combined_ms or 0) > SLOW * 1e3


def why_left_out(file: File, op: AttentionOp, case: Case) -> str | None:
    """Why a case is not measured; None if it is."""
    for other, figures in file.known.items():
        no_longer = other.length <= case.length and other._replace(length=case.length) == case
        if no_longer and is_slow(figures):
            return LEFT_OUT
    if file.died(case):
        return f"the process ended {DIED} times"
    return "no weights to drop" if case.dropout and not op.dropout else None


def leave_out(
    file: File, ops: Mapping[str, AttentionOp], group: Sequence[Case], limit: float
) -> list[Case]:
    """The cases to measure; writes of others why they are left out, where nothing is known.

    One that was not compiled within fewer seconds than `limit` is measured.
    """
    found = []
    for case in group:
        if case in file.known and not was_late(file.known[case].error, limit):
            continue
        if why := why_left_out(file, ops[case.attention], case):
            file.write(case, Figures(error=why))
        else:
            found.append(case)
    return found


def compiled(
    ops: Mapping[str, AttentionOp], waiting: Sequence[Case], limit: float
) -> dict[Case, Programs | Exception]:
    """The programs of cases. Those of a case are compiled at the same time, and so are cases.

    A program that takes more than `limit` seconds goes on in its thread, and is an error here.
    """

    def parts() -> Iterator[tuple[tuple[Case, int], Any]]:
        for case in waiting:
            made = attempt(lowered, ops[case.attention], case)
            for i, _ in enumerate(Programs._fields):
                yield (case, i), made if isinstance(made, Exception) else made[i]

    done = attempt_within(limit, lambda program: program.compile(), parts(), 2 * COMPILERS)
    late = TimeoutError(f"not compiled in {limit:g} s")
    found = {}
    for case in waiting:
        made = [done.get((case, i), late) for i, _ in enumerate(Programs._fields)]
        error = next((x for x in made if isinstance(x, Exception)), None)
        found[case] = error or Programs(*made)
    return found


def fill(
    file: File,
    shape: Shape,
    names: Sequence[str],
    settings: Sequence[str] = tuple(SETTINGS),
    limit: float = 150,
) -> Iterator[list[Case]]:
    """Measures what the file does not have; yields the cases of a group when they are done.

    Raises:
      RuntimeError: a case has left the device in a state that no program runs in, or arrays in its
        memory; what is known is kept.
    """
    ops = attentions()
    file.lock.parent.mkdir(parents=True, exist_ok=True)
    for group in groups(shape, names, settings):
        waiting = leave_out(file, ops, group, limit)
        with together(file.lock):
            ready = compiled(ops, waiting, limit)
        with alone(file.lock):
            for case in waiting:
                made = ready.pop(case)
                if not leave_out(file, ops, [case], limit):  # a shorter one was slow
                    continue
                if not isinstance(made, Exception):
                    file.write(case, None)
                    made = attempt(measure, ops[case.attention], case, made)
                error = isinstance(made, Exception)
                file.write(case, failed(made) if error else made)
                if error:
                    jax.block_until_ready(first(jnp.zeros(1)))
                check_emptied(case, limit)
        yield group


def check_emptied(case: Case, patience: float) -> None:
    """Raises `RuntimeError` where a case's arrays are still in memory.

    A program that runs out of memory can leave its arguments there until the process ends. The
    cases after it would then be said to run out of memory too. What a late program holds while it
    compiles is waited for, as many seconds as `patience`.
    """
    gc.collect()
    end = time.monotonic() + patience
    while (held := n_bytes_held()) > HELD:
        late = is_late_at_work()
        if late and time.monotonic() < end:
            time.sleep(0.1)
            continue
        what = f"{case.attention} of {case.length:,} tokens has left"
        if late:
            what = f"a program still compiling after {patience:g} more seconds holds"
        raise RuntimeError(
            f"{what} {memory.words(held)} in the device's memory: run the same command again, "
            "which resumes after it"
        )


def n_bytes_held() -> int:
    """The bytes in use of all devices; 0 where a backend does not say."""
    return sum((x.memory_stats() or {}).get("bytes_in_use", 0) for x in jax.local_devices())


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
        return figures.error.partition(":")[0] or OUT_OF_MEMORY
    hidden = name.endswith("_ms") and is_hidden(number, figures.host_ms)
    return f"< {number:,.2f}" if hidden else f"{number:,.2f}"


def write(folder: Path, known: Mapping[Case, Figures], machine: str) -> None:
    """Writes table.csv of all that is known of this machine."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow([*Case._fields, *Figures._fields])
    table.writerows([*case, *x] for case, x in known.items() if case.machine == machine)
    durable.write(folder / "table.csv", text.getvalue().encode())

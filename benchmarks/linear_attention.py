"""Attention in linear time by length: linear recurrences and projections of low rank.

    python -m benchmarks.linear_attention --peers --saved=docs/linear_attention.jsonl
    python -m benchmarks.linear_attention --lengths 1024 65536 1048576 --only gated_linear
    python -m benchmarks.linear_attention --drawn=docs/linear_attention.jsonl --plot=FILE

prints a table for each length N of one sequence:

  * forward, and gradient (forward and backward, with respect to every input, gates and weights
    too), in milliseconds: the median of calls waited for one by one and, in parentheses, the mean
    of 20 queued calls. Of slow calls there are fewer;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation,

and then the exponent e of time ~ N^e, fitted to the queued gradients of lengths from a 16th of the
longest on. What runs out of memory is recorded so. A row whose gradient would take more than `SLOW`
seconds at a length, or more memory than there is, as both grew at shorter ones, is left out. Rows
are causal but linformer, nystromformer, which cannot be, and those named `all`.

A row gets no time before its output and gradients agree with those of array operations in float32
on the CPU, at the shortest length. `--peers` adds flash-linear-attention's kernels,
performer-pytorch, linformer, linear-attention-transformer and nystrom-attention, which get the same
inputs and weights, and are checked against the same numbers. linear-attention-transformer's alone
computes something else, without the nearest keys: it is checked to be finite. Projections are taken
out of peers that have them. flash-linear-attention is given features and gates, which ours compute
themselves; in rows named `from inputs` it computes them too. A last table has the peers' times over
ours.

`--saved` adds each figure to a file as soon as it is known, one JSON line each. `--plot` draws the
figures of the run, or those that such a file has, which `--drawn` names; then nothing is measured.
"""

from __future__ import annotations

import functools
import json
import math
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
from benchmarks.harness.calls import (
    COMPILERS,
    attempt,
    attempt_each,
    compiled,
    exit_if,
    time_calls,
)
from benchmarks.harness.output import Table, plot
from benchmarks.harness.processes import alone, ask
from benchmarks.harness.rows import Result
from reformax import memory
from reformax.ops import (
    AttentionOp,
    flash,
    gated_delta,
    gated_linear,
    linear,
    linformer,
    long_short,
    nystromformer,
    performer,
    retention,
)
from reformax.ops.parts.random_features import orthogonal_directions

COLUMNS = ("forward ms", "gradient ms", "temp MiB", "error", "of gradient")
# Of the largest number of each array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-3}
MOST = 2.0  # seconds of the calls of a pass
SLOW = 1.0
N_FEATURES = 256


class Shape(NamedTuple):
    """The sizes of a run."""

    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str


SHAPES = {
    "tiny": Shape((64, 128), 2, 8, "float32"),
    "cpu": Shape((1024, 4096, 16384), 4, 32, "float32"),
    "gpu": Shape((1024, 16384, 131072, 1048576), 8, 64, "bfloat16"),
}


class Row(NamedTuple):
    """An attention in the tables."""

    op: AttentionOp
    causal: bool = True


def algorithms(impl: str, epsilon: float = 1e-4) -> dict[str, Row]:
    """The ops by name, and exact attention beside them. epsilon: Performer's."""
    features = performer.performer(n_features=N_FEATURES, epsilon=epsilon, impl=impl)
    low_rank = linformer.linformer(n_projected=256, impl=impl)
    landmarks = nystromformer.nystromformer(n_landmarks=64, impl=impl)
    return {
        "flash": Row(flash.flash(impl=impl)),
        "linear": Row(linear.linear(impl=impl)),
        "retention": Row(retention.retention(gated=False, impl=impl)),
        "gated_linear": Row(gated_linear.gated_linear(gated=False, impl=impl)),
        "gated_delta": Row(gated_delta.gated_delta(gated=False, impl=impl)),
        "performer": Row(features),
        "performer, all": Row(features, causal=False),
        "linformer": Row(low_rank, causal=False),
        "nystromformer": Row(landmarks, causal=False),
        "long_short": Row(long_short.long_short()),
    }


def inputs_of(op: AttentionOp, shape: Shape, length: int) -> dict[str, Any]:
    """Random inputs and the op's own weights by name, and the cotangent `d_out`."""
    q, k, v, d_out = rows.inputs(1, length, shape.n_heads, shape.d_head, dtype=shape.dtype)
    dims = op.dims(q, v)
    extras = op.extras_of(dims)
    drawn = {
        name: jax.random.normal(jax.random.fold_in(rows.KEY, i), (1, length, x.n_heads, x.size))
        for i, (name, x) in enumerate(extras.items())
    }
    own = dict(op.init(rows.KEY, dims) or {})
    return (
        {"q": q, "k": k, "v": v, "d_out": d_out}
        | jax.tree.map(lambda x: x.astype(shape.dtype), drawn)
        | own
    )


def functions(row: Row, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """`attend(inputs)`, and `gradient(d_out, inputs)` with respect to each of the inputs."""
    op, causal = row
    extras_of = op.extras_of(op.dims(inputs["q"], inputs["v"]))

    def attend(inputs):
        extras = {name: inputs[name] for name in extras_of}
        params = {n: x for n, x in inputs.items() if n not in (*"qkv", *extras)}
        qkv = (inputs[name] for name in "qkv")
        return op(*qkv, causal=causal, params=params or (), extras=extras or None)

    def gradient(d_out, inputs):
        return jax.grad(lambda x: jnp.sum(attend(x) * d_out))(inputs)

    return attend, gradient


class Programs(NamedTuple):
    """The compiled passes of a row at a length."""

    forward: Any
    gradient: Any
    temp_mib: float


def compile_row(shape: Shape, row_and_length: tuple[Row, int]) -> Programs:
    row, length = row_and_length
    inputs = jax.eval_shape(functools.partial(inputs_of, row.op, shape, length))
    d_out = inputs.pop("d_out")
    attend, gradient = functions(row, inputs)
    program = compiled(jax.jit(gradient).lower(d_out, inputs))
    return Programs(jax.jit(attend).lower(inputs).compile(), program.call, program.temp_mib)


# What is right.


def expected(shape: Shape, length: int, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """The inputs of each row, its output `out` and its gradients, such as `d q`.

    They are computed by array operations in float32 on the CPU, of inputs rounded to the dtype.
    """

    cpu = jax.local_devices(backend="cpu")[0]

    def one(row: Row) -> dict[str, np.ndarray]:
        with jax.default_device(cpu):
            given = inputs_of(row.op, shape, length)
            inputs = jax.tree.map(lambda x: x.astype(jnp.float32), given)
            d_out = inputs.pop("d_out")
            attend, gradient = functions(row, inputs)
            found = {"d_out": d_out} | inputs | {"out": jax.jit(attend)(inputs)}
            gradients = jax.jit(gradient)(d_out, inputs)
            found |= {f"d {name}": x for name, x in gradients.items()}
        return jax.tree.map(np.asarray, found)

    wanted = {name: algorithms("xla")[name] for name in names}
    # Peers add their epsilon to other features than ours: they agree without it.
    plain = algorithms("xla", epsilon=1e-12)
    wanted |= {f"{n}, no epsilon": plain[n] for n in names if n.startswith("performer")}
    found = attempt_each(one, wanted, COMPILERS)
    with jax.default_device(cpu):
        key = jax.random.key(0, impl="threefry2x32")  # Performer's own seed
        directions = np.asarray(orthogonal_directions(key, N_FEATURES, shape.d_head))
    for name, arrays in found.items():
        if name.endswith("no epsilon") and not isinstance(arrays, Exception):
            arrays["directions"] = directions
    return found


def errors(got: Mapping[str, Any], want: Mapping[str, Any], dtype: str) -> list[float]:
    """The errors of a row's output and of its gradients.

    Raises:
      ArithmeticError: one is more than `TOLERANCE`.
    """
    found = [rows.relative_error(got["out"], want["out"])]
    gradients = (n for n in want if n.startswith("d "))
    found.append(max(rows.relative_error(got[name], want[name]) for name in gradients))
    for what, error in zip(("output", "gradient"), found, strict=True):
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"the {what} in {dtype} is {error:.2g} off, more than {TOLERANCE[dtype]:g}"
            )
    return found


def check(
    programs: Programs, row: Row, shape: Shape, length: int, want: Mapping[str, Any]
) -> list[float]:
    """The errors of a row as compiled for the shortest length."""
    like = jax.eval_shape(functools.partial(inputs_of, row.op, shape, length))
    inputs = {name: jnp.asarray(want[name], x.dtype) for name, x in like.items()}
    d_out = inputs.pop("d_out")
    gradients = programs.gradient(d_out, inputs)
    got = {"out": programs.forward(inputs)} | {f"d {name}": x for name, x in gradients.items()}
    return errors(got, want, shape.dtype)


# Times.


class Checked(NamedTuple):
    """The figures of a row, and its errors where they are known: of output and gradient."""

    result: Result
    errors: Sequence[float]


def measure(programs: Programs, row: Row, shape: Shape, length: int, repeats: int) -> Result:
    """The figures of a row."""
    inputs = inputs_of(row.op, shape, length)
    d_out = inputs.pop("d_out")
    calls = (
        functools.partial(programs.forward, inputs),
        functools.partial(programs.gradient, d_out, inputs),
    )
    times = [time_calls(call, jax.block_until_ready, repeats, MOST) for call in calls]
    return Result(*times, programs.temp_mib)


def exponent(times: Mapping[int, float]) -> float:
    """e of time ~ N^e over the lengths from a 16th of the longest on; NaN of fewer than two."""
    long = {n: ms for n, ms in times.items() if 16 * n >= max(times)}
    if len(long) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(long)), np.log(list(long.values())), 1)[0])


def left_out(known: Mapping[int, Any], length: int, memory_mib: float) -> Exception | None:
    """Why a row is not run at a length, if so, by its figures at shorter ones.

    Time and memory are taken to grow from the last two lengths on as between them, and from one
    length on linearly. A row that is too much may take minutes to compile.
    """
    if failed := next((x for x in known.values() if isinstance(x, Exception)), None):
        return failed
    seconds = grown({n: x.result.gradient.queued_ms / 1e3 for n, x in known.items()}, length)
    mib = grown({n: x.result.temp_mib or 0.0 for n, x in known.items()}, length)
    if seconds > SLOW or mib > memory_mib:
        return TimeoutError(f"left out: about {seconds:.2g} s and {mib / 1024:.2g} GiB")
    return None


def grown(values: Mapping[int, float], length: int) -> float:
    """What values by length come to at a longer one."""
    known = sorted((n, x) for n, x in values.items() if x > 0)[-2:]
    if not known:
        return 0.0
    (first, low), (last, high) = known[0], known[-1]
    growth = math.log(high / low) / math.log(last / first) if last > first else 1.0
    return high * (length / last) ** max(1.0, growth)


def cells(known: Checked) -> list[str]:
    """The columns of a row."""
    forward, gradient, temp_mib = known.result
    temp = "-" if temp_mib is None else f"{temp_mib:,.0f}"
    return [str(forward), str(gradient), temp, *(f"{x:.1e}" for x in known.errors)]


# Records.


def draw(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Time and memory of the gradient by length; the last record of a row counts."""
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
    plot(path, panels, "; ".join(titles), xlabel="length")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows", plot=True)
    known = algorithms("auto")
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="figures, to add to")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="draw these figures, and end")
    args = parser.parse_args(argv)
    if args.drawn:
        if not args.plot:
            parser.error("--drawn needs --plot, which says where")
        draw(args.plot, [json.loads(line) for line in args.drawn.read_text().splitlines()])
        return
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    records: list[dict[str, Any]] = []

    def keep(name: str, of: str | None, length: int, one: Any) -> None:
        if not isinstance(one, Checked):
            return
        line = rows.record(name, of, length, shape, one.result)
        records.append(line | dict(errors=list(one.errors)))
        if args.saved:
            with args.saved.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")

    lines = measure_all(args, known, shape, keep)
    if args.plot:
        draw(args.plot, records)
    exit_if(n for n in args.only if not lines[n])


def measure_all(
    args: Any, known: Mapping[str, Row], shape: Shape, keep: Callable[..., None]
) -> dict[str, dict[int, float]]:
    """Prints the tables, and hands each figure to `keep(name, of, length, figure)`.

    Returns the gradients' queued milliseconds by row and length.
    """
    results: dict[str, dict[int, Any]] = {name: {} for name in args.only}
    peer_of: dict[str, str] = {}
    shortest = min(shape.lengths)
    want = expected(shape, shortest, args.only)

    def compile_rows(length: int) -> dict[str, Any]:
        wanted: dict[str, Any] = {}
        for name in args.only:
            error = want[name] if isinstance(want[name], Exception) else None
            error = error or left_out(results[name], length, memory.available() / 2**20)
            wanted[name] = error or (known[name], length)
        return attempt_each(functools.partial(compile_row, shape), wanted, COMPILERS)

    with tempfile.TemporaryDirectory() as folder:
        answers, lock = iter(()), Path(folder) / "lock"
        with alone(lock):  # peers check themselves and tune their kernels meanwhile
            if args.peers:
                answers = ask_peers(args.peers, shape, args.repeats, want, lock)
            ready = compile_rows(shortest)
        for answer in answers:
            name, length = answer.get("name", "peers in PyTorch"), answer.get("length", shortest)
            one = rows.figures(answer)
            if isinstance(one, Result):
                one = Checked(one, answer["errors"])
                peer_of[name] = answer["of"]
            results.setdefault(name, {})[length] = one
            keep(name, answer.get("of"), length, one)
    found: dict[str, Any] = {}
    for length in shape.lengths:
        table = Table("attention", *COLUMNS, title=f"1 x {length:,} tokens")
        ready = ready if length == shortest else compile_rows(length)
        for name in results:
            if name in args.only:
                one = ready.pop(name)
                if length == shortest and not isinstance(one, Exception):
                    found[name] = attempt(check, one, known[name], shape, length, want[name])
                if isinstance(error := found.get(name), Exception):
                    one = error
                if not isinstance(one, Exception):
                    one = attempt(measure, one, known[name], shape, length, args.repeats)
                if isinstance(one, Result):
                    one = Checked(one, found[name])
                results[name][length] = one
                keep(name, None, length, one)
            if length in results[name]:
                table.result(name, known=results[name][length], cells=cells)
    lines = {
        name: {n: x.result.gradient.queued_ms for n, x in by.items() if isinstance(x, Checked)}
        for name, by in results.items()
    }
    table = Table("attention", "time ~ N^e, e =", title="Growth of the gradient's time")
    for name, times in lines.items():
        table.row(name, f"{exponent(times):.2f}" if times else "-")
    if peer_of:
        rows.speedups(
            {n: {x: getattr(y, "result", y) for x, y in by.items()} for n, by in results.items()},
            peer_of,
        )
    return lines


def ask_peers(
    python: str, shape: Shape, repeats: int, want: Mapping[str, Any], lock: Path
) -> Iterator[dict[str, Any]]:
    """Starts the peers of rows, which wait for the lock before they time anything."""
    right = {name: arrays for name, arrays in want.items() if not isinstance(arrays, Exception)}
    file = lock.with_name("rows.npz")
    np.savez(
        file, **{f"{n}/{part}": x for n, arrays in right.items() for part, x in arrays.items()}
    )
    request = dict(lengths=shape.lengths, dtype=shape.dtype, repeats=repeats)
    request |= dict(most=MOST, slow=SLOW)
    return ask(python, "linear_torch.by_length", file=str(file), lock=str(lock), **request)


if __name__ == "__main__":
    main()

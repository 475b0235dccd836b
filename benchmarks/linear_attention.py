"""Attention in linear time by length: linear recurrences and projections of low rank.

    python -m benchmarks.linear_attention --peers --plot docs/linear_attention.png
    python -m benchmarks.linear_attention --lengths 1024 65536 1048576 --only gated_linear

prints a table for each length N of one sequence:

  * forward, and gradient (forward and backward, with respect to every input, gates too), in
    milliseconds: the median of calls waited for one by one and, in parentheses, the mean of 20
    queued calls;
  * temporary memory of the gradient as compiled; of a peer in PyTorch its peak allocation,

and then the exponent e of time ~ N^e, fitted to the queued gradients of lengths from a 16th of the
longest on. What runs out of memory is recorded so. All are causal, but those that cannot be.

`--peers` adds flash-linear-attention's kernels, performer-pytorch, linformer,
linear-attention-transformer and nystrom-attention. Peers that are layers project their input too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
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
    reason,
    time_calls,
)
from benchmarks.harness.output import Table, plot
from benchmarks.harness.rows import Known, Result
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

COLUMNS = ("forward ms", "gradient ms", "temp MiB")


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


def algorithms() -> dict[str, AttentionOp]:
    """The ops by name, and exact attention beside them."""
    return {
        "flash": flash.flash(),
        "linear": linear.linear(),
        "retention": retention.retention(gated=False),
        "gated_linear": gated_linear.gated_linear(gated=False),
        "gated_delta": gated_delta.gated_delta(gated=False),
        "performer": performer.performer(n_features=256),
        "linformer": linformer.linformer(n_projected=256),
        "nystromformer": nystromformer.nystromformer(n_landmarks=64),
        "long_short": long_short.long_short(),
    }


def compile_op(shape: Shape, row: tuple[AttentionOp, int]) -> tuple[Any, Any, float]:
    """Calls of an op's forward pass and gradient at a length, and the gradient's `temp_mib`."""
    op, length = row
    q, k, v, d_out = rows.inputs(1, length, shape.n_heads, shape.d_head, dtype=shape.dtype)
    dims = op.dims(q, v)
    params = jax.jit(op.init, static_argnums=1)(rows.KEY, dims)
    extras = {
        name: jax.random.normal(rows.KEY, (1, length, extra.n_heads, extra.size), shape.dtype)
        for name, extra in op.extras_of(dims).items()
    }

    def attend(params, q, k, v, extras):
        return op(q, k, v, causal=op.traits.causal, params=params, extras=extras or None)

    def gradient(d_out, *args):
        return jax.grad(lambda args: jnp.sum(attend(*args) * d_out))(args)

    args = params, q, k, v, extras
    forward = functools.partial(jax.jit(attend).lower(*args).compile(), *args)
    program = compiled(jax.jit(gradient).lower(d_out, *args))
    return forward, functools.partial(program.call, d_out, *args), program.temp_mib


def measure(forward, gradient, temp_mib: float, repeats: int) -> Result:
    """The figures of a row."""
    times = [time_calls(call, jax.block_until_ready, repeats) for call in (forward, gradient)]
    return Result(*times, temp_mib)


def exponent(times: Mapping[int, float]) -> float:
    """e of time ~ N^e over the lengths from a 16th of the longest on; NaN of fewer than two."""
    long = {n: ms for n, ms in times.items() if 16 * n >= max(times)}
    if len(long) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(long)), np.log(list(long.values())), 1)[0])


def cells(known: Known) -> list[str]:
    """The columns of a row."""
    if isinstance(known, Exception):
        return [reason(known)]
    temp = "-" if known.temp_mib is None else f"{known.temp_mib:,.0f}"
    return [str(known.forward), str(known.gradient), temp]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, peers="add PyTorch's rows", plot=True)
    known = algorithms()
    parser.add_argument("--lengths", type=command_line.positive, nargs="+", help="of the sequence")
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(args.lengths or shape.lengths))
    results: dict[str, dict[int, Known]] = {}
    for length in shape.lengths:
        table = Table("attention", *COLUMNS, title=f"1 x {length:,} tokens")
        calls = {name: (known[name], length) for name in args.only}
        ready = attempt_each(functools.partial(compile_op, shape), calls, COMPILERS)
        for name in calls:
            one = ready.pop(name)
            if not isinstance(one, Exception):
                one = attempt(measure, *one, args.repeats)
            results.setdefault(name, {})[length] = one
            table.result(name, known=one, cells=cells)
    if args.peers:
        table = Table("peer, length", *COLUMNS, title="Peers in PyTorch")
        request = dict(shape._asdict(), repeats=args.repeats)
        for name, one in rows.measure_peers(args.peers, "linear_torch.by_length", **request):
            table.result(name, known=one, cells=cells)
            name, _, length = name.rpartition(", ")
            if name:
                results.setdefault(name, {})[int(length)] = one
    lines = {
        name: {n: one.gradient.queued_ms for n, one in by.items() if isinstance(one, Result)}
        for name, by in results.items()
    }
    table = Table("attention", "time ~ N^e, e =", title="Growth of the gradient's time")
    for name, times in lines.items():
        table.row(name, f"{exponent(times):.2f}" if times else "-")
    if args.plot:
        title = (
            f"{command_line.machine()}, one sequence, {shape.n_heads} heads of {shape.d_head}, "
            f"{shape.dtype}"
        )
        label = "forward and backward, ms, mean of queued calls"
        plot(args.plot, {label: {n: x for n, x in lines.items() if x}}, title, xlabel="length")
    exit_if(n for n in args.only if not lines[n])


if __name__ == "__main__":
    main()

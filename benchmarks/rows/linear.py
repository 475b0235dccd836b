"""Our attentions in linear time: the rows of `benchmarks.linear_attention`, a process each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import rows
from benchmarks.harness.by_length import left_out, save, timed
from benchmarks.harness.calls import attempt_each, compiled, reason
from benchmarks.harness.processes import (
    Answer,
    alone,
    alone_until_the_end,
    stage,
    together,
    wait_for,
)
from reformax import memory
from reformax.ops import (
    AttentionOp,
    flash,
    gated_delta,
    gated_linear,
    kda,
    linear,
    linformer,
    long_short,
    nystromformer,
    performer,
    retention,
)
from reformax.ops.recurrence.random_features import orthogonal_directions

# Of the largest number of each array or 1.
TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-3}
MOST = 2.0  # seconds of the calls of a pass
N_FEATURES = 256


class Shape(NamedTuple):
    """The sizes of a run; rows are checked at `check_length`."""

    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    dtype: str
    check_length: int


class Row(NamedTuple):
    """An attention in the tables. `quadratic`: whether its time may grow so."""

    op: AttentionOp
    causal: bool = True
    n_kv_heads: int | None = None
    quadratic: bool = False


# The most important first.
NAMES = (
    "linear",
    "gated_linear",
    "gated_delta",
    "kda",
    "performer",
    "retention",
    "performer, all",
    "linformer",
    "nystromformer",
    "flash",
    "flash, a fourth of the heads of keys",
    "long_short",
    "long_short, all",
)


def algorithm(name: str, shape: Shape, impl: str = "auto", epsilon: float = 1e-4) -> Row:
    """The row of this name. epsilon: Performer's."""
    plain = dict(normalized=False, gated=False, impl=impl)  # what other recurrences compute
    made: dict[str, Callable[[], Row]] = {
        "linear": lambda: Row(linear.linear(impl=impl)),
        "gated_linear": lambda: Row(gated_linear.gated_linear(**plain)),
        "gated_delta": lambda: Row(gated_delta.gated_delta(**plain)),
        "kda": lambda: Row(kda.kda(**plain)),
        "performer": lambda: Row(features()),
        "retention": lambda: Row(retention.retention(**plain)),
        "performer, all": lambda: Row(features(), causal=False),
        "linformer": lambda: Row(linformer.linformer(n_projected=256, impl=impl), causal=False),
        "nystromformer": lambda: Row(
            nystromformer.nystromformer(n_landmarks=64, impl=impl), causal=False
        ),
        "flash": lambda: Row(flash.flash(impl=impl), quadratic=True),
        "flash, a fourth of the heads of keys": lambda: Row(
            flash.flash(impl=impl), n_kv_heads=max(1, shape.n_heads // 4), quadratic=True
        ),
        "long_short": lambda: Row(long_short.long_short(), quadratic=True),
        "long_short, all": lambda: Row(long_short.long_short(), causal=False),
    }

    def features() -> AttentionOp:
        return performer.performer(n_features=N_FEATURES, epsilon=epsilon, impl=impl)

    return made[name]()


def inputs_of(row: Row, shape: Shape, length: int) -> dict[str, Any]:
    """Random inputs and the op's own weights by name, and the cotangent `d_out`."""
    q, k, v, d_out = rows.inputs(
        1, length, shape.n_heads, shape.d_head, dtype=shape.dtype, n_kv_heads=row.n_kv_heads
    )
    dims = row.op.dims(q, v)
    extra_projections = row.op.extra_projections(dims)
    drawn = {
        name: jax.random.normal(jax.random.fold_in(rows.KEY, i), (1, length, x.n_heads, x.size))
        for i, (name, x) in enumerate(extra_projections.items())
    }
    own = dict(row.op.init(rows.KEY, dims) or {})
    return (
        {"q": q, "k": k, "v": v, "d_out": d_out}
        | jax.tree.map(lambda x: x.astype(shape.dtype), drawn)
        | own
    )


def functions(row: Row, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """`attend(inputs)`, and `gradient(d_out, inputs)` with respect to each of the inputs."""
    extra_projections_of = row.op.extra_projections(row.op.dims(inputs["q"], inputs["v"]))

    def attend(inputs):
        extra_projections = {name: inputs[name] for name in extra_projections_of}
        params = {n: x for n, x in inputs.items() if n not in (*"qkv", *extra_projections)}
        qkv = (inputs[name] for name in "qkv")
        return row.op(
            *qkv,
            causal=row.causal,
            params=params or (),
            extra_projections=extra_projections or None,
        )

    def gradient(d_out, inputs):
        return jax.grad(lambda x: jnp.sum(attend(x) * d_out))(inputs)

    return attend, gradient


class Programs(NamedTuple):
    """The compiled programs of a row at a length: its inputs and both passes."""

    inputs: Any
    forward: Any
    gradient: Any
    temp_mib: float


def compile_row(row: Row, shape: Shape, length: int) -> Programs:
    """All programs, side by side."""
    make = functools.partial(inputs_of, row, shape, length)
    inputs = jax.eval_shape(make)
    d_out = inputs.pop("d_out")
    attend, gradient = functions(row, inputs)
    programs = (
        lambda: compiled(jax.jit(gradient).lower(d_out, inputs)),
        lambda: compiled(jax.jit(attend).lower(inputs)),
        lambda: compiled(jax.jit(make).lower()),
    )
    with ThreadPoolExecutor(len(programs)) as pool:
        gradient, forward, made = (x.result() for x in [pool.submit(p) for p in programs])
    return Programs(made.call, forward.call, gradient.call, gradient.temp_mib)


# What is right.


def expected(row: Row, shape: Shape) -> dict[str, np.ndarray]:
    """The inputs of a row of array operations, its output `out` and its gradients, such as `d q`.

    They are computed in float32, of inputs rounded to the dtype.
    """
    given = inputs_of(row, shape, shape.check_length)
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    d_out = inputs.pop("d_out")
    attend, gradient = functions(row, inputs)
    found = {"d_out": d_out} | inputs | {"out": jax.jit(attend)(inputs)}
    found |= {f"d {name}": x for name, x in jax.jit(gradient)(d_out, inputs).items()}
    return jax.tree.map(np.asarray, found)


def numbers(name: str, shape: Sequence[Any], folder: str, limit: float) -> Iterator[Answer]:
    """Writes what a row has to compute to `{name}.npz`. It is meant for a CPU."""
    sizes = Shape(*shape)
    yield stage(f"{name}: array operations in float32", limit)
    save(Path(folder) / f"{name}.npz", expected(algorithm(name, sizes, "xla"), sizes))
    if name.startswith("performer"):
        # Peers add their epsilon to other features than ours: they agree without it.
        yield stage(f"{name}: the same without its epsilon", limit)
        found = expected(algorithm(name, sizes, "xla", epsilon=1e-12), sizes)
        key = jax.random.key(0, impl="threefry2x32")  # Performer's own seed
        found["directions"] = np.asarray(orthogonal_directions(key, N_FEATURES, sizes.d_head))
        save(Path(folder) / f"{name}, no epsilon.npz", found)


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


def check(programs: Programs, row: Row, shape: Shape, want: Mapping[str, Any]) -> list[float]:
    """The errors of a row as compiled for `check_length`."""
    like = jax.eval_shape(functools.partial(inputs_of, row, shape, shape.check_length))
    inputs = {name: jnp.asarray(want[name], x.dtype) for name, x in like.items()}
    d_out = inputs.pop("d_out")
    gradients = programs.gradient(d_out, inputs)
    got = {"out": programs.forward(inputs)} | {f"d {name}": x for name, x in gradients.items()}
    return errors(got, want, shape.dtype)


# Times.


def measure(programs: Programs, repeats: int) -> rows.Result:
    """The figures of a row."""
    inputs = programs.inputs()
    d_out = inputs.pop("d_out")
    forward = functools.partial(programs.forward, inputs)
    gradient = functools.partial(programs.gradient, d_out, inputs)
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
    """The figures of a row. All lengths are compiled together, unless its time may be quadratic.

    Args:
      name: of the row.
      shape: a `Shape`.
      lengths: ascending.
      known: milliseconds of the gradient and MiB at other lengths.
      known_errors: of the row's check, if it was made.
      repeats: timed calls.
      folder: of the files of `numbers`, and of the file `lock`, held by who times alone, and by
        those who compile together.
      limit: seconds of a stage.
    """
    sizes, lock = Shape(*shape), Path(folder) / "lock"
    row, errors = algorithm(name, sizes), known_errors
    measured = {int(n): tuple(x) for n, x in known.items()}
    to_compile = sorted({*lengths, sizes.check_length} if errors is None else lengths)
    groups = [[n] for n in to_compile] if row.quadratic else [to_compile]
    for i, group in enumerate(groups):
        most = memory.available() / 2**20
        why = {n: left_out(measured, n, most) for n in group}
        yield from ({"name": name, "length": n, "error": reason(x)} for n, x in why.items() if x)
        group = [n for n in group if not why[n]]
        if not group:
            continue
        with together(lock):
            yield stage(f"{name}: compile {', '.join(f'{n:,}' for n in group)}", limit)
            make = functools.partial(compile_row, row, sizes)
            programs = attempt_each(make, {n: n for n in group}, len(group))
            if errors is None:
                yield stage(f"{name}: wait for its numbers", 2 * limit)
                with np.load(wait_for(Path(folder), name)) as arrays:
                    want = dict(arrays)
                yield stage(f"{name}: check", limit)
                errors = first_check(programs[sizes.check_length], row, sizes, want)
        yield stage(f"{name}: wait for the device")
        if i == len(groups) - 1:
            alone_until_the_end(lock)
        with alone(lock) if i < len(groups) - 1 else nullcontext():
            programs = {n: programs[n] for n in group if n in lengths}
            measured |= yield from timed(
                name, programs, lambda one, _: measure(one, repeats), errors, limit
            )


def first_check(
    programs: Programs | Exception, row: Row, shape: Shape, want: Mapping[str, Any]
) -> list[float]:
    """As `check`, which raises what kept the programs from being compiled, too."""
    if isinstance(programs, Exception):
        raise programs
    return check(programs, row, shape, want)

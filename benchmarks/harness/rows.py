"""Attentions as rows of a table: checked first, then compiled together and timed one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.harness.failures import PeerError, attempt, reason
from benchmarks.harness.table import Table
from benchmarks.harness.timing import Times

MIB = 2**20
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}
SEED = 0


class Errors(NamedTuple):
    """The largest differences of a check in one dtype, by `relative_error`."""

    output: float
    gradient: float
    sorted_share: float | None = None  # of neighbours in the plan; None where nothing is sorted


class Row(NamedTuple):
    """An attention in a table.

    Attributes:
      attend: `(q, k, v) -> out`, or `(q, k, v, rng) -> out` with `takes_rng`.
      check: `dtype -> Errors`, which raises where the attention is wrong; None for a peer.
      shared_qk: whether k is None.
      takes_rng: whether it draws random numbers.
    """

    attend: Callable[..., Array]
    check: Callable[[str], Errors] | None = None
    shared_qk: bool = False
    takes_rng: bool = False


class Result(NamedTuple):
    """The figures of a row. `temp_mib` is the gradient's temporary memory as compiled."""

    forward: Times
    gradient: Times
    temp_mib: float | None


Known = Result | Exception  # of a row: its figures, or why there are none


def peer_result(answer: Mapping[str, Any]) -> Known:
    """The result in a peer's answer."""
    if "error" in answer:
        return PeerError(answer["error"])
    return Result(Times(*answer["forward"]), Times(*answer["gradient"]), answer["temp_mib"])


def dense(causal: bool = True) -> Row:
    """Dense attention: on a GPU cuDNN's, on a CPU XLA's."""
    attend = functools.partial(jax.nn.dot_product_attention, implementation=dense_impl())
    return Row(functools.partial(attend, is_causal=causal))


def dense_impl() -> str:
    return "xla" if jax.default_backend() == "cpu" else "cudnn"


def key() -> Array:
    return jax.random.PRNGKey(SEED)


def inputs(*size: int, dtype: str) -> tuple[Array, ...]:
    """Random q, k, v `[B, T, N, H]` and the cotangent of the output."""
    return tuple(jax.random.normal(rng, size, dtype) for rng in jax.random.split(key(), 4))


def output_and_gradient(attend: Callable[..., Array]) -> Callable[..., tuple[Array, Any]]:
    """`(d_out, *args) -> (out, gradients)`; an argument that is None has none."""

    def run(d_out, *args):
        out, vjp = jax.vjp(attend, *args)
        return out, vjp(d_out.astype(out.dtype))

    return run


def relative_error(got: Array, want: Array) -> float:
    """The largest difference, over the largest number wanted or 1; NaN if anything is NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.abs(got - want).max() / jnp.maximum(1.0, jnp.abs(want).max()))


def compare(
    attend: Callable[..., Array], reference: Callable[..., Array], arrays: Sequence[Array | None]
) -> Errors:
    """Compares outputs and gradients, given q, k, v and the cotangent, in q's dtype.

    Raises:
      ArithmeticError: they differ by more than `TOLERANCE`.
    """
    *qkv, d_out = arrays
    dtype = str(d_out.dtype)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(output_and_gradient(attend))(d_out, *qkv)
        want = jax.jit(output_and_gradient(reference))(d_out, *qkv)
    errors = Errors(
        *(
            max(map(relative_error, jax.tree.leaves(x), jax.tree.leaves(y)))
            for x, y in zip(got, want, strict=True)
        )
    )
    for name, error in zip(("output", "gradient"), errors, strict=False):
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"the {name} in {dtype} is {error:.2g} off, more than {TOLERANCE[dtype]:g}"
            )
    return errors


def check_rows(
    rows: Mapping[str, Row], length: int, dtypes: Sequence[str], pool: Executor
) -> dict[str, Row | Exception]:
    """Checks rows by name and prints their errors; a row that fails becomes its exception."""
    futures = {
        name: [pool.submit(attempt, row.check, dtype) for dtype in dtypes]
        for name, row in rows.items()
    }
    columns = [f"{dtype} {part}" for dtype in dtypes for part in ("output", "gradient")]
    title = f"Largest errors at 1 x {length:,} tokens, relative to the largest number or 1"
    table = Table("attention", *columns, "sorted by bucket", title=title)
    checked: dict[str, Row | Exception] = {}
    for name, row in rows.items():
        outcomes = [future.result() for future in futures[name]]
        wrong = next((x for x in outcomes if isinstance(x, Exception)), None)
        checked[name] = wrong or row
        if wrong:
            table.row(name, reason(wrong))
            continue
        shares = [x.sorted_share for x in outcomes if x.sorted_share is not None]
        cells = [f"{x:.1e}" for errors in outcomes for x in errors[:2]]
        table.row(name, *cells, *(f"{min(shares):.1%}" for _ in shares[:1]))
    return checked


class Compiled(NamedTuple):
    """Both passes of a row, and their arguments."""

    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    args: tuple[Any, ...]
    d_out: Array

    def measure(self, time: Callable[[Callable[[], Any]], Times]) -> Result:
        return Result(
            time(lambda: self.forward(*self.args)),
            time(lambda: self.gradient(self.d_out, *self.args)),
            self.gradient.memory_analysis().temp_size_in_bytes / MIB,
        )


def compile_row(row: Row, arrays: tuple[Array, ...]) -> Compiled:
    """Compiles a row for these q, k, v and cotangent."""
    q, k, v, d_out = arrays
    args = (q, None if row.shared_qk else k, v, *([key()] if row.takes_rng else []))

    def gradient(d_out, *args):
        inputs, extra = args[:3], args[3:]

        def loss(inputs):
            return jnp.sum(row.attend(*inputs, *extra) * d_out)

        return jax.grad(loss)(inputs)

    return Compiled(
        jax.jit(row.attend).lower(*args).compile(),
        jax.jit(gradient).lower(d_out, *args).compile(),
        args,
        d_out,
    )


def measure_rows(
    rows: Mapping[str, Row | Exception],
    arrays: tuple[Array, ...],
    time: Callable[[Callable[[], Any]], Times],
    pool: Executor,
) -> Iterator[tuple[str, Known]]:
    """Compiles all rows at once for q, k, v and the cotangent, then times one after the other.

    Yields:
      The name of each row and its figures. A row that failed, or fails, is its exception.
    """
    futures = {
        name: row if isinstance(row, Exception) else pool.submit(attempt, compile_row, row, arrays)
        for name, row in rows.items()
    }
    compiled = {n: f.result() if isinstance(f, Future) else f for n, f in futures.items()}
    del futures
    for name in rows:
        known = compiled.pop(name)
        if isinstance(known, Compiled):
            known = attempt(known.measure, time)
        yield name, known


COLUMNS = ("forward ms", "gradient ms", "temp MiB", "dense / it, forward", "gradient")


def cells(known: Known, dense: Known) -> list[str]:
    """The columns of a row: its figures, and how many times longer dense attention takes."""
    if isinstance(known, Exception):
        return [reason(known)]
    temp = "-" if known.temp_mib is None else f"{known.temp_mib:,.0f}"
    found = [str(known.forward), str(known.gradient), temp]
    if isinstance(dense, Result):
        for one, other in zip(known[:2], dense[:2], strict=True):
            found.append(f"{other.ms / one.ms:.2f} ({other.other_ms / one.other_ms:.2f})")
    return found

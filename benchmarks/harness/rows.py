"""Attentions as rows of a table: checked first, then compiled together and timed one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks.harness import command_line
from benchmarks.harness.calls import (
    COMPILERS,
    PeerError,
    Times,
    attempt,
    attempt_each,
    compiled,
    reason,
    time_calls,
)
from benchmarks.harness.output import Table
from benchmarks.harness.processes import ask
from reformax.ops import AttentionOp, dense, flash, memory_efficient, shared_qk
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.softmax.orders import Order

# Ops that attend to every visible key.
EXACT = dense.dense, flash.flash, memory_efficient.memory_efficient, shared_qk.shared_qk

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}
# A vector between two buckets may fall in either, and moves what lies between them by one place.
NEAR, NEAR_SHARE = 16, 0.9
# Scores of blocks may be as near.
SAME_SHARE = 0.99
KEY = np.zeros(2, np.uint32)  # jax.random.PRNGKey(0), which would take a device on import


class Row(NamedTuple):
    """An attention in a table, `attend(q, k, v, rng)`.

    `check(q, k, v, d_out)` returns its errors, or raises where they are large; None for a peer.
    """

    attend: Callable[..., Array]
    check: Callable[..., list[float]] | None = None
    shared_qk: bool = False  # k is None


class Result(NamedTuple):
    """The figures of a row. `temp_mib` is the gradient's temporary memory as compiled."""

    forward: Times
    gradient: Times
    temp_mib: float | None


Known = Result | Exception  # of a row: its figures, or why there are none


def row(
    op: AttentionOp,
    reference: AttentionOp,
    causal: bool = True,
    packed: bool = False,
    marked: int = 0,
) -> Row:
    """An op as its user calls it, plan and arithmetic, checked against another.

    Args:
      op, reference: both, of one function.
      causal: whether later keys are hidden.
      packed: whether rows are of several `documents`.
      marked: the first tokens that are marked, for an op that reads global_tokens.
    """

    def attend(q, k, v, rng):
        segment_ids = documents(q) if packed else None
        more = (
            global_tokens(q, marked) | extra_projections(op, q, v) | {"params": weights(op, q, v)}
        )
        return op(q, k, v, causal=causal, segment_ids=segment_ids, rng=rng, **more)

    checked = functools.partial(check, op, reference, causal, packed, marked)
    return Row(attend, checked, op.shared_qk)


def global_tokens(q: Array, n: int) -> dict[str, Array]:
    """The argument `global_tokens` of which the first `n` tokens have one; none of 0."""
    first = (jnp.arange(q.shape[1]) < n + _unknown_zero(q)).astype(jnp.int32)
    return {"global_tokens": jnp.broadcast_to(first, q.shape[:2])} if n else {}


def extra_projections(op: AttentionOp, q: Array, v: Array) -> dict[str, dict[str, Array]]:
    """The argument `extra_projections` of zeros, such as gates that are half open, where an op has
    one.
    """
    of_op, zero = op.extra_projections(op.dims(q, v)), _unknown_zero(q)
    shapes = {name: (*q.shape[:2], x.n_heads, x.size) for name, x in of_op.items()}
    zeros = {name: jnp.broadcast_to(zero, shape) for name, shape in shapes.items()}
    return {"extra_projections": zeros} if zeros else {}


def weights(op: AttentionOp, q: Array, v: Array) -> Any:
    """The op's own weights, as they begin.

    0 times their gradient is a part of that of q, so that a call computes it, as training does.
    """
    own = op.init(KEY, op.dims(q, v))
    return jax.tree.map(lambda x: x + (0 * q[0, 0, 0, 0]).astype(x.dtype), own)


def _unknown_zero(x: Array) -> Array:
    """0 that a compiler does not know: it would compute for minutes with arrays of zeros."""
    return 0 * lax.stop_gradient(x[0, 0, 0, 0])


def documents(q: Array) -> Array:
    """The segments of rows of seven documents, each longer than the one before, and padding."""
    batch, length = q.shape[:2]
    ends = length * jnp.cumsum(jnp.arange(1, 8)) // 30
    ids = 1 + jnp.searchsorted(ends, jnp.arange(length), side="right")
    return jnp.broadcast_to(jnp.where(ids > len(ends), 0, ids).astype(jnp.int32), (batch, length))


def other_impl() -> str:
    """The implementation that "auto" does not take here: the one to check it against."""
    return INTERPRETED if jax.default_backend() == "cpu" else "xla"


def dense(causal: bool = True) -> Row:
    """Dense attention: on a GPU cuDNN's, on a CPU XLA's."""
    impl = "xla" if jax.default_backend() == "cpu" else "cudnn"
    return Row(functools.partial(plain, causal=causal, impl=impl))


def plain(q: Array, k: Array, v: Array, rng: Any = None, causal: bool = False, impl: str = "xla"):
    """Attention by JAX; XLA's has the whole matrix of logits."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=impl)


def exact_ops() -> dict[str, AttentionOp]:
    """FlashAttention, on a GPU also in either implementation, and memory-efficient attention."""
    ops = {"flash": flash.flash()}
    if jax.default_backend() == "gpu":  # elsewhere "auto" is "xla"
        ops |= {f"flash, impl={impl!r}": flash.flash(impl=impl) for impl in ("xla", "pallas")}
    return ops | {"memory_efficient": memory_efficient.memory_efficient()}


def inputs(*size: int, dtype: str, n_kv_heads: int | None = None) -> tuple[Array, ...]:
    """Random q, k, v `[B, T, N, H]`, keys of fewer heads if asked, and the output's cotangent."""
    keys = *size[:2], n_kv_heads or size[2], size[3]
    sizes = zip(jax.random.split(KEY, 4), (size, keys, keys, size), strict=True)
    return tuple(jax.random.normal(rng, size, dtype) for rng, size in sizes)


# Correctness.


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


def check(
    op: AttentionOp,
    reference: AttentionOp,
    causal: bool,
    packed: bool,
    marked: int,
    *arrays: Array,
) -> list[float]:
    """The errors of an op's output and gradients against another op's, both given the op's plan.

    The reference of an exact attention computes in float32.

    Raises:
      ArithmeticError: an error is more than `TOLERANCE`, or the other op plans otherwise.
    """
    q, k, v, d_out = arrays
    dtype, k = str(q.dtype), None if op.shared_qk else k
    options = dict(segment_ids=documents(q) if packed else None, causal=causal, rng=KEY)
    # XLA would time many versions of each product of the array operations.
    untuned = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None

    def given_plan(op: AttentionOp, *inputs: Array | None) -> tuple[Array, Any]:
        def attend(q, k, v):
            more = options | extra_projections(op, q, v)
            own = weights(op, q, v)
            return op.apply(own, q, k, v, plan=plan, dropout=0.0, **more)

        return jax.jit(output_and_gradient(attend), compiler_options=untuned)(d_out, *inputs)

    def planned(op: AttentionOp, q: Array, k: Array | None) -> Any:
        more = options | global_tokens(q, marked)
        return op.plan(weights(op, q, v), q, k, train=True, **more)

    with jax.default_matmul_precision("highest"):
        plan, other_plan = (jax.jit(functools.partial(planned, x))(q, k) for x in (op, reference))
        if isinstance(plan, Order):
            check_order(plan, other_plan)
        elif isinstance(plan, jax.Array):
            check_chosen(plan, other_plan)
        got = given_plan(op, q, k, v)
        if isinstance(op, EXACT):
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        want = given_plan(reference, q, k, v)
    errors = [
        max(map(relative_error, *map(jax.tree.leaves, x))) for x in zip(got, want, strict=True)
    ]
    for name, error in zip(("output", "gradient"), errors, strict=True):
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"the {name} in {dtype} is {error:.2g} off, more than {TOLERANCE[dtype]:g}"
            )
    return errors


def check_order(order: Order, reference: Order) -> None:
    """Raises `ArithmeticError` unless nearly all positions have about the same place in both."""
    if not jnp.all(jnp.sort(order.query_positions) == jnp.arange(order.query_positions.shape[-1])):
        raise ArithmeticError("the plan is no permutation")
    places = (jnp.argsort(x.query_positions, axis=-1) for x in (order, reference))
    share = float(jnp.mean(jnp.abs(jnp.subtract(*places)) <= NEAR))
    if share < NEAR_SHARE:
        raise ArithmeticError(f"the plan has {share:.1%} of positions near their places")


def check_chosen(chosen: Array, reference: Array) -> None:
    """Raises `ArithmeticError` unless nearly all queries choose the same, in any order."""
    same = (jnp.sort(x, axis=-1) for x in (chosen, reference))
    share = float(jnp.mean(jnp.all(jnp.equal(*same), axis=-1)))
    if share < SAME_SHARE:
        raise ArithmeticError(f"the plan has {share:.1%} of the queries choose the same")


def check_rows(
    rows: Mapping[str, Row], size: Sequence[int], dtype: str
) -> dict[str, Row | Exception]:
    """Checks rows in this dtype and in float32, and prints their errors.

    A row that fails becomes its exception.
    """
    dtypes = dict.fromkeys((dtype, "float32"))

    def errors(row: Row) -> list[float]:
        return [error for x in dtypes for error in row.check(*inputs(*size, dtype=x))]

    columns = [f"{dtype} {part}" for dtype in dtypes for part in ("output", "gradient")]
    title = f"Largest errors at 1 x {size[1]:,} tokens, relative to the largest number or 1"
    table = Table("attention", *columns, title=title)
    # One after the other: a program with cuDNN's attention must be loaded while no other runs.
    found = attempt_each(errors, rows)
    for name, known in found.items():
        table.result(name, known=known, cells=lambda errors: [f"{x:.1e}" for x in errors])
    failed = {name: known for name, known in found.items() if isinstance(known, Exception)}
    return dict(rows) | failed


# Times.


def compile_row(arrays: tuple[Array, ...], row: Row) -> tuple[Any, Any, float]:
    """Calls of a row's forward pass and gradient for q, k, v and d_out, and `temp_mib`."""
    q, k, v, d_out = arrays
    args = q, None if row.shared_qk else k, v, KEY

    def gradient(d_out, q, k, v, rng):
        def loss(inputs):
            return jnp.sum(row.attend(*inputs, rng) * d_out)

        return jax.grad(loss)((q, k, v))

    forward = functools.partial(jax.jit(row.attend).lower(*args).compile(), *args)
    program = compiled(jax.jit(gradient).lower(d_out, *args))
    return forward, functools.partial(program.call, d_out, *args), program.temp_mib


def measure_rows(
    rows: Mapping[Any, Row | Exception],
    arrays: tuple[Array, ...],
    repeats: int,
) -> Iterator[tuple[Any, Known]]:
    """The name and the figures of each row: all are compiled together, then timed one by one."""
    ready = attempt_each(functools.partial(compile_row, arrays), rows, COMPILERS)
    for name in rows:
        known = ready.pop(name)
        yield name, known if isinstance(known, Exception) else attempt(measure, *known, repeats)


def measure(
    forward: Callable[[], Any],
    gradient: Callable[[], Any],
    temp_mib: float,
    repeats: int,
    most: float = math.inf,
) -> Result:
    """The figures of both passes, whose calls take `most` seconds each, as in `time_calls`."""
    times = [time_calls(x, jax.block_until_ready, repeats, most) for x in (forward, gradient)]
    return Result(*times, temp_mib)


def measure_peers(python: str, peer: str, **request: Any) -> Iterator[tuple[str, Known]]:
    """The name and the figures of each row of a peer, as they come."""
    for answer in ask(python, peer, **request):
        yield answer.get("name", "peers in PyTorch"), figures(answer)


def figures(answer: Mapping[str, Any]) -> Known:
    """The figures of a peer's answer."""
    if "error" in answer:
        return PeerError(answer["error"])
    times = Times(*answer["forward"]), Times(*answer["gradient"])
    return Result(*times, answer["temp_mib"])


COLUMNS = ("forward ms", "gradient ms", "temp MiB", "dense / it, forward", "gradient")


def cells(known: Known, dense: Known) -> list[str]:
    """The columns of a row: its figures, and how many times longer dense attention takes."""
    if isinstance(known, Exception):
        return [reason(known)]
    temp = "-" if known.temp_mib is None else f"{known.temp_mib:,.0f}"
    found = [str(known.forward), str(known.gradient), temp]
    if isinstance(dense, Result):
        for one, other in zip(known[:2], dense[:2], strict=True):
            found.append(f"{other.ms / one.ms:.2f} ({other.queued_ms / one.queued_ms:.2f})")
    return found


def speedups(results: Mapping[str, Mapping[int, Known]], of: Mapping[str, str]) -> None:
    """Prints the peers' times over ours by length, means of queued calls: forward, gradient."""
    lengths = next(iter(results.values())).keys()
    columns = (f"{length:,}" for length in lengths)
    table = Table("peer", "ours", *columns, title="Times of peers over ours: forward, gradient")
    for peer, ours in of.items():
        both = [(results[peer].get(n), results[ours].get(n)) for n in lengths]
        shares = (
            ", ".join(
                f"{theirs.queued_ms / own.queued_ms:.2f}"
                for theirs, own in zip(one[:2], other[:2], strict=True)
            )
            if isinstance(one, Result) and isinstance(other, Result)
            else "-"
            for one, other in both
        )
        table.row(peer, ours, *shares)


def about(shape: Any) -> dict[str, str]:
    """What a figure is of: this machine, and a shape that has n_heads, d_head and dtype."""
    sizes = f"{shape.n_heads} heads of {shape.d_head}, {shape.dtype}"
    return dict(machine=command_line.machine(), shape=sizes)


def record(name: str, of: str | None, length: int, shape: Any, known: Result) -> dict[str, Any]:
    """A figure as a line of a file: means of queued calls, and medians of those waited for.

    Args:
      name: of the row.
      of: the row that a peer computes too.
      length: of the sequence.
      shape: as in `about`.
      known: the figures.
    """
    forward, gradient, temp_mib = known
    return about(shape) | dict(
        attention=name,
        of=of,
        length=length,
        forward_ms=round(forward.queued_ms, 4),
        gradient_ms=round(gradient.queued_ms, 4),
        waited_ms=[round(forward.ms, 4), round(gradient.ms, 4)],
        temp_mib=None if temp_mib is None else round(temp_mib, 1),
    )


def recorded(line: Mapping[str, Any]) -> Result:
    """The figures of a line of `record`."""
    queued = line["forward_ms"], line["gradient_ms"]
    forward, gradient = map(Times, line["waited_ms"], queued)
    return Result(forward, gradient, line["temp_mib"])

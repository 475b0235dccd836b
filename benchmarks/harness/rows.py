"""Rows of attention benchmarks: their inputs, figures and cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.harness import command_line
from benchmarks.harness.calls import PeerError, Times, reason, time_calls
from benchmarks.harness.output import Table
from reformax.ops import dense, flash, memory_efficient, shared_qk

# Ops that attend to every visible key.
EXACT = dense.dense, flash.flash, memory_efficient.memory_efficient, shared_qk.shared_qk

KEY = np.zeros(2, np.uint32)  # jax.random.PRNGKey(0), which would take a device on import


class Result(NamedTuple):
    """The figures of a row. `temp_mib` is the gradient's temporary memory as compiled."""

    forward: Times
    gradient: Times
    temp_mib: float | None


Known = Result | Exception  # of a row: its figures, or why there are none


def inputs(*size: int, dtype: str, n_kv_heads: int | None = None) -> tuple[Array, ...]:
    """Random q, k, v `[B, T, N, H]`, keys of fewer heads if asked, and the output's cotangent."""
    keys = *size[:2], n_kv_heads or size[2], size[3]
    sizes = zip(jax.random.split(KEY, 4), (size, keys, keys, size), strict=True)
    return tuple(jax.random.normal(rng, size, dtype) for rng, size in sizes)


def relative_error(got: Array, want: Array) -> float:
    """The largest difference, over the largest number wanted or 1; NaN if anything is NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.abs(got - want).max() / jnp.maximum(1.0, jnp.abs(want).max()))


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
    """What a figure is of: this machine, and a shape that has n_heads, d_head, dtype and tokens."""
    sizes = f"{shape.n_heads} heads of {shape.d_head}, {shape.dtype}"
    sizes += f", {shape.tokens:,} tokens a call" if shape.tokens > 1 else ""
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

"""Block-sparse attention by its nonzero blocks, beside dense attention and FlexAttention.

    python -m benchmarks.block_sparse
    python -m benchmarks.block_sparse --peers --plot docs/block_sparse.png

prints, in Markdown, errors and then times: of causal attention over the patterns of
`reformax.ops.block_patterns`, and of attention both ways over random masks of as many blocks in
each row, of every density from two blocks a row to all of them. Forward and gradient (forward and
backward, of every input along a fixed direction), in milliseconds: what the kernels took on the
device, by the profiler, and in parentheses the median of calls waited for one by one. On a CPU only
the latter.

Dense attention, on a GPU cuDNN's and on a CPU XLA's, is causal or not as the row beside it.
`--peers` adds PyTorch's FlexAttention, compiled, with the same block masks, in the interpreter that
it names, by default this one. Last is how far the times of random masks are from a line in the
number of blocks.

No row gets a time before its output and gradients agree with the oracle's over its mask, at a short
length. A row that fails has the reason in place of numbers, and the program then exits with an
error; a peer that fails has its reason too, but is no error. On a CPU the shapes are small and
float32.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's process shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array

from benchmarks.attention import MIB, RNG, head, line, output_and_gradient, relative_error
from benchmarks.measuring import reason, time_calls
from reformax.ops import block_patterns, block_sparse
from reformax.ops.parts.reference import reference_attention

matplotlib.use("Agg")
from matplotlib import pyplot as plt

N_PROFILED = 10
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}
PEER_SECONDS = 240  # that the process of peers has for all masks


class Shape(NamedTuple):
    """What every call of a run has in common."""

    length: int
    n_heads: int
    d_head: int
    block_size: int
    dtype: str
    check_length: int
    check_dtypes: tuple[str, ...]


SHAPES = {
    "cpu": Shape(2048, 2, 32, 64, "float32", 256, ("float32",)),
    "gpu": Shape(65536, 8, 64, 128, "bfloat16", 2048, ("bfloat16", "float32")),
}


class Row(NamedTuple):
    """A pattern, a function of the numbers of blocks, and whether attention is causal."""

    pattern: block_patterns.Pattern
    causal: bool

    def op(self, shape: Shape):
        return block_sparse.block_sparse(pattern=self.pattern, block_size=shape.block_size)

    def mask(self, shape: Shape) -> np.ndarray:
        """The nonzero blocks, those above the diagonal left out where they are hidden."""
        n_blocks = -(-shape.length // shape.block_size)
        mask = self.pattern(n_blocks, n_blocks)
        return np.tril(mask) if self.causal else mask


class Time(NamedTuple):
    """Milliseconds a call."""

    device: float | None  # of all kernels, by the profiler; None where there is no GPU
    waited: float  # the median of calls waited for one by one

    @property
    def best_known(self) -> float:
        return self.waited if self.device is None else self.device

    def __str__(self) -> str:
        return f"{self.waited:.3f}" if self.device is None else f"{self.device:.3f} ({self[1]:.3f})"


class Result(NamedTuple):
    """What a table says of a row."""

    forward: Time
    gradient: Time
    temp_mib: float | None


def random_blocks(share: float) -> block_patterns.Pattern:
    """In each row as many blocks, at random, as `share` of them all."""

    def pattern(n_blocks_q: int, n_blocks_k: int) -> np.ndarray:
        rng = np.random.default_rng(0)
        rows = np.tile(np.arange(n_blocks_k) < round(share * n_blocks_k), (n_blocks_q, 1))
        return rng.permuted(rows, axis=1)

    return pattern


def rows(shape: Shape) -> dict[str, Row]:
    """The rows, by name."""
    patterns = {
        "butterfly": block_patterns.butterfly(),
        "strided, 16": block_patterns.strided(stride=16),
        "fixed, 16": block_patterns.fixed(stride=16),
        "local + global": block_patterns.local_global(n_before=3, n_after=0),
    }
    found = {f"{name}, causal": Row(pattern, True) for name, pattern in patterns.items()}
    n_halvings = int(np.log2(shape.length // shape.block_size)) - 1
    for i in range(n_halvings, -1, -1):
        name = f"random, 1/{2**i}" if i else "all"
        found[name] = Row(random_blocks(2**-i), False)
    return found


def inputs(shape: Shape, length: int, dtype: str) -> tuple[Array, ...]:
    """Fresh q, k, v and the cotangent of the output."""
    size = 1, length, shape.n_heads, shape.d_head
    return tuple(jax.random.normal(rng, size, dtype) for rng in jax.random.split(RNG, 4))


def check(row: Row, shape: Shape, dtype: str) -> tuple[float, float]:
    """The largest errors of output and gradients, beside the oracle over the row's mask.

    Raises `ArithmeticError` where they exceed `TOLERANCE`.
    """
    shape = shape._replace(length=shape.check_length)
    q, k, v, d_out = inputs(shape, shape.length, dtype)
    block = np.ones((shape.block_size, shape.block_size))
    mask = np.kron(row.mask(shape), block).astype(bool)[: shape.length, : shape.length]
    mask = jnp.asarray(np.tril(mask) if row.causal else mask)[None, None]

    def reference(*inputs):
        return reference_attention(*(x.astype(jnp.float32) for x in inputs), mask)

    with jax.default_matmul_precision("highest"):
        attend = functools.partial(row.op(shape), causal=row.causal)
        got = jax.jit(output_and_gradient(attend))(d_out, q, k, v)
        want = jax.jit(output_and_gradient(reference))(d_out, q, k, v)
    errors = tuple(
        max(map(relative_error, jax.tree.leaves(x), jax.tree.leaves(y)))
        for x, y in zip(got, want, strict=True)
    )
    if not max(errors) <= TOLERANCE[dtype]:
        raise ArithmeticError(
            f"output and gradient in {dtype} are {errors[0]:.2g} and {errors[1]:.2g} off, "
            f"more than {TOLERANCE[dtype]:g}"
        )
    return errors


def dense(causal: bool) -> Callable[..., Array]:
    impl = "xla" if jax.default_backend() == "cpu" else "cudnn"
    return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=impl)


def compile_both(attend: Callable[..., Array], arrays: tuple[Array, ...]) -> tuple[Any, Any]:
    """The compiled forward pass, of q, k, v, and gradient, of these and the cotangent."""

    def gradient(q, k, v, d_out):
        return jax.grad(lambda inputs: jnp.sum(attend(*inputs) * d_out))((q, k, v))

    forward = jax.jit(attend).lower(*arrays[:3]).compile()
    return forward, jax.jit(gradient).lower(*arrays).compile()


def measure(compiled: tuple[Any, Any], arrays: tuple[Array, ...], repeats: int) -> Result:
    forward, gradient = compiled

    def time(call):
        waited = time_calls(call, jax.block_until_ready, repeats).blocked
        return Time(device_ms(call), waited)

    temp = gradient.memory_analysis().temp_size_in_bytes / MIB
    return Result(time(lambda: forward(*arrays[:3])), time(lambda: gradient(*arrays)), temp)


def device_ms(call: Callable[[], Any]) -> float | None:
    """Milliseconds of GPU that a call takes, all its kernels together."""
    if jax.default_backend() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(N_PROFILED):
                result = call()
            jax.block_until_ready(result)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        total = kernel_ms(json.loads(gzip.decompress(path.read_bytes())))
    return total / N_PROFILED if total else None


def kernel_ms(trace: dict[str, Any]) -> float:
    """The milliseconds of all kernels in a trace of the profiler."""
    events = trace["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"].startswith("Stream")
    }
    kernels = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]
    return sum(e["dur"] for e in kernels) / 1e3


def attempt(function: Callable, *args: Any) -> Any:
    """What `function` returns, or the exception that it raises."""
    try:
        return function(*args)
    except Exception as error:  # of any kind: the table has it, and the other rows
        return error


def peers(
    python: str, found: dict[str, Row], shape: Shape, repeats: int
) -> dict[str, Result | str]:
    """FlexAttention's results, by the name of the mask; its reasons, where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "masks.npz"
        np.savez(path, **{name: row.mask(shape) for name, row in found.items()})
        request = dict(
            masks=str(path),
            causal=[name for name, row in found.items() if row.causal],
            repeats=repeats,
            shape=shape._asdict(),
        )
        try:
            run = subprocess.run(
                [python, "-m", "benchmarks.block_sparse_torch"],
                input=json.dumps(request),
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).resolve().parent.parent,
                timeout=PEER_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return dict.fromkeys(found, reason(error))
    return {
        row["name"]: row["error"]
        if "error" in row
        else Result(Time(*row["forward"]), Time(*row["gradient"]), row["temp_mib"])
        for row in map(json.loads, run.stdout.splitlines())
    }


# Tables.

HEAD = (
    "mask",
    "blocks",
    "of all",
    "forward ms",
    "gradient ms",
    "temp MiB",
    "dense / it, forward",
    "gradient",
)
FLEX_HEAD = ("FlexAttention forward ms", "gradient ms", "it / ours, forward", "gradient")


def ratios(one: Any, other: Any) -> list[str]:
    """How many times longer one takes than the other, in both passes."""
    if not (isinstance(one, Result) and isinstance(other, Result)):
        return ["-", "-"]
    return [f"{x.best_known / y.best_known:.2f}" for x, y in zip(one[:2], other[:2], strict=True)]


def row_line(
    name: str,
    mask: np.ndarray,
    ours: Result | Exception,
    dense: Result | Exception,
    flex: Result | str | None,
) -> str:
    """A row of the table."""
    cells = [name, f"{mask.sum():,}", f"{mask.mean():.2%}"]
    if isinstance(ours, Exception):
        cells += [reason(ours), "-", "-"]
    else:
        cells += [str(ours.forward), str(ours.gradient), f"{ours.temp_mib:,.0f}"]
    cells += ratios(dense, ours)
    if isinstance(flex, str):
        cells += [flex, "-", "-", "-"]
    elif flex is not None:
        cells += [str(flex.forward), str(flex.gradient), *ratios(flex, ours)]
    return line(cells)


def off_the_line(n_blocks: Sequence[int], ms: Sequence[float]) -> tuple[float, float, float]:
    """`a`, `b` of `ms = a + b * n_blocks`, least relative squares, and the largest deviation."""
    x, y = np.asarray(n_blocks, float), np.asarray(ms)
    a, b = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(x)), rcond=None)[0]
    return a, b, np.abs((a + b * x) / y - 1).max()


def plot(points: dict[str, dict[int, float]], levels: dict[str, float], title: str, path: Path):
    """Time by the number of nonzero blocks; dense attention is a level."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for (name, times), colour in zip(points.items(), plt.colormaps["tab10"].colors, strict=False):
        axes.loglog(list(times), list(times.values()), "o-", ms=4, color=colour, label=name)
    for (name, ms), style in zip(levels.items(), ("k:", "k--"), strict=False):
        axes.axhline(ms, color=style[0], ls=style[1:], lw=1, label=name)
    axes.set(xlabel="nonzero blocks", ylabel="ms")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, help="instead of the usual one")
    parser.add_argument("--repeats", type=int, default=10, help="calls waited for one by one")
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="add FlexAttention, run by this interpreter",
    )
    parser.add_argument("--plot", type=Path, help="where to draw time against nonzero blocks")
    parser.add_argument("--threads", type=int, default=8, help="that compile at the same time")
    args = parser.parse_args(argv)
    shape = SHAPES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    shape = shape._replace(length=args.length or shape.length)
    if shape.length % shape.block_size:
        parser.error(f"--length is {shape.length}: expected a multiple of {shape.block_size}")
    for name in ("repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least 1")
    title = (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, 1 x {shape.length:,} tokens, "
        f"{shape.n_heads} heads of {shape.d_head}, blocks of {shape.block_size}, {shape.dtype}"
    )
    print(title)
    found = rows(shape)
    with ThreadPoolExecutor(args.threads) as pool:
        wrong = print_errors(found, shape, pool)
        results = print_times(found, wrong, shape, args, pool, title)
    failed = [name for name in found if isinstance(results[name], Exception)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def print_errors(
    found: dict[str, Row], shape: Shape, pool: ThreadPoolExecutor
) -> dict[str, Exception]:
    """Checks all rows; returns those that failed."""
    columns = [f"{d} {what}" for d in shape.check_dtypes for what in ("output", "gradient")]
    print(
        f"\nLargest errors at 1 x {shape.check_length:,} tokens, beside the largest number or 1\n\n"
        + head(["mask", *columns])
    )
    futures = {
        name: [pool.submit(attempt, check, row, shape, dtype) for dtype in shape.check_dtypes]
        for name, row in found.items()
    }
    wrong = {}
    for name in found:
        errors = [future.result() for future in futures[name]]
        failure = next((e for e in errors if isinstance(e, Exception)), None)
        if failure:
            wrong[name] = failure
            print(line([name, reason(failure), *["-"] * (len(columns) - 1)]), flush=True)
        else:
            print(line([name, *(f"{e:.1e}" for pair in errors for e in pair)]), flush=True)
    return wrong


def print_times(found, wrong, shape, args, pool, title) -> dict[str, Result | Exception]:
    """Times all rows, one after the other; returns what is known of each."""
    arrays = inputs(shape, shape.length, shape.dtype)
    calls = {causal: dense(causal) for causal in (True, False)}
    calls |= {
        name: functools.partial(row.op(shape), causal=row.causal)
        for name, row in found.items()
        if name not in wrong
    }
    futures = {key: pool.submit(attempt, compile_both, f, arrays) for key, f in calls.items()}
    results: dict[Any, Result | Exception] = dict(wrong)
    for key, future in futures.items():
        both = future.result()
        if not isinstance(both, Exception):
            both = attempt(measure, both, arrays, args.repeats)
        results[key] = both
    flex = peers(args.peers, found, shape, args.repeats) if args.peers else {}
    for causal in (True, False):
        known = results[causal]
        times = reason(known) if isinstance(known, Exception) else f"{known[0]} / {known[1]} ms"
        print(f"\nDense, {'causal' if causal else 'both ways'}: {times}")
    print("\n" + head([*HEAD, *(FLEX_HEAD if args.peers else ())]))
    masks = {name: row.mask(shape) for name, row in found.items()}
    for name, row in found.items():
        other = flex.get(name, "no answer") if args.peers else None
        print(row_line(name, masks[name], results[name], results[row.causal], other), flush=True)
    points = {}
    for label, known in (("ours", results), ("FlexAttention", flex)):
        for what in ("forward", "gradient"):
            points[f"{label}, {what}"] = {
                int(masks[name].sum()): getattr(known[name], what).best_known
                for name, row in found.items()
                if not row.causal and isinstance(known.get(name), Result)
            }
    points = {label: times for label, times in points.items() if len(times) > 2}
    print()
    for label, times in points.items():
        a, b, off = off_the_line(list(times), list(times.values()))
        print(f"{label}: {a:.3f} ms + {b * 1e3:.4f} ms for 1,000 random blocks, within {off:.0%}")
    if args.plot:
        levels = {
            f"dense, {what}": getattr(results[False], what).best_known
            for what in ("forward", "gradient")
            if isinstance(results[False], Result)
        }
        plot(points, levels, title, args.plot)
    return results


if __name__ == "__main__":
    main()

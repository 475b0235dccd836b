"""Attention by itself beside dense causal attention, by length: LSH and local, or exact ones.

    python -m benchmarks.attention
    python -m benchmarks.attention --peers --plot docs/attention.png
    python -m benchmarks.attention --exact

prints, in Markdown, one table of errors and then one of times for each length N, whose calls have
the same number of tokens, batch = tokens / N:

  * forward, and gradient (forward and backward, of every input along a fixed direction), in
    milliseconds: the median of calls waited for one by one and, in parentheses, the mean of 20
    calls queued without waiting in between, which is the device's time where that exceeds the
    host's. LSH attention hashes and sorts in both;
  * temporary memory of the gradient as compiled;
  * how many times longer dense attention takes, by the median and by the mean. On a GPU dense
    attention is cuDNN's, on a CPU XLA's.

Last, for every row of reformax, the shortest N from which on it beats dense attention.

No row of reformax gets a time before its output and gradients agree, at a short length, with
another way to compute them: kernels with XLA's array operations given the same plan, array
operations with the oracle over the mask of what they see. The plan must be a permutation that sorts
by the buckets that XLA computes. A row that fails has the reason in place of numbers, and the
program then exits with an error; a peer that fails has its reason too, but is no error.

`--xla` adds rows that use array operations alone. `--peers` adds PyTorch's FlexAttention and the
LSH attention of reformer_pytorch and of transformers, in the interpreter that it names, by default
this one. Their memory is what the gradient allocates at its peak, less the gradient itself.

`--exact` has FlashAttention and memory-efficient attention instead, and as peers attention with the
whole matrix of scores, where it fits, and the code that Rabe and Staats printed; last comes how
many times as fast as the latter each row is.

On a CPU the shapes are small and float32.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's process shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import matplotlib
from jaxtyping import Array, Bool

from benchmarks import rabe_staats
from benchmarks.measuring import N_QUEUED, Times, reason, time_calls
from reformax.ops import (
    AttentionOp,
    flash,
    local,
    lsh,
    memory_efficient,
)
from reformax.ops.parts import chunked, dispatch, hashing
from reformax.ops.parts.masks import visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIB = 2**20
RNG = jax.random.PRNGKey(0)
DENSE = "dense"
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-5}
# Hashes of rounded products may differ where a vector lies between two buckets.
SORTED_SHARE = 0.9
PLAIN, PRINTED = "plain", "Rabe and Staats, as printed"
PLAIN_SCORES = 2**32  # that plain attention may have in its matrix: it holds several of them
PEER_SECONDS = 150  # that a process of peers has for all rows of one length


class Shape(NamedTuple):
    """What every call of a run has in common."""

    tokens: int
    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    chunk_len: int
    dtype: str
    check_length: int
    check_dtypes: tuple[str, ...]


SHAPES = {
    "cpu": Shape(4096, (1024, 4096), 4, 32, 64, "float32", 512, ("float32",)),
    "gpu": Shape(
        65536, (1024, 4096, 16384, 65536), 8, 64, 128, "bfloat16", 2048, ("bfloat16", "float32")
    ),
}


class Row(NamedTuple):
    """An attention of reformax: a factory of `reformax.ops` and its arguments."""

    make: Callable[..., AttentionOp]
    options: dict[str, Any]
    impl: str | None = "auto"  # None: the op has one implementation

    def op(self, impl: str | None = None) -> AttentionOp:
        which = {} if self.impl is None else {"impl": impl or self.impl}
        return self.make(**self.options, **which)


class Result(NamedTuple):
    """What a table says of a row."""

    forward: Times
    gradient: Times
    temp_mib: float | None


class Errors(NamedTuple):
    """The largest differences of a check, beside the largest number or 1, in one dtype."""

    dtype: str
    output: float
    gradient: float
    sorted_share: float | None  # of neighbours in the plan; None where nothing is sorted


Peer = Callable[[Array, Array, Array], Array]  # another's causal attention, of q, k, v
Known = Result | Exception  # of a row: what it took, or what went wrong
Attend = Callable[..., Array]  # (q, k, v, rng) -> out, with k None for shared-QK attention


def rows(chunk_len: int, xla: bool = False) -> dict[str, Row]:
    """The rows of reformax, by name."""
    own_and_previous = dict(chunk_len=chunk_len, n_chunks_before=1, n_chunks_after=0)
    found = {}
    for n in (1, 2, 4, 8):
        name = f"LSH, {n} hash{'es' * (n > 1)}"
        found[name] = Row(lsh.lsh, own_and_previous | dict(n_hashes=n))
    weighted = own_and_previous | dict(n_hashes=4, count_once=False)
    found["LSH, 4 hashes, count_once=False"] = Row(lsh.lsh, weighted)
    found["local"] = Row(local.local, own_and_previous)
    if xla:
        found |= {f"{name}, impl='xla'": row._replace(impl="xla") for name, row in found.items()}
    return found


def exact_rows() -> dict[str, Row]:
    """The rows of `--exact`, by name."""
    found = {"flash": Row(flash.flash, {})}
    if jax.default_backend() == "gpu":  # elsewhere "auto" is "xla"
        for impl in ("xla", "pallas"):
            found[f"flash, impl={impl!r}"] = Row(flash.flash, {}, impl)
    found["memory_efficient"] = Row(memory_efficient.memory_efficient, {}, None)
    return found


def exact_peers(shape: Shape, length: int) -> dict[str, Peer | Exception]:
    """The peers of `--exact` at a length, by name."""
    peers: dict[str, Peer | Exception] = {PRINTED: rabe_staats.printed}
    if jax.default_backend() != "cpu":  # where dense attention is plain
        fits = shape.tokens * length * shape.n_heads <= PLAIN_SCORES
        peers[PLAIN] = rabe_staats.plain if fits else MemoryError("more scores than memory")
    return peers


def inputs(shape: Shape, batch: int, length: int, dtype: str) -> tuple[Array, ...]:
    """Fresh q, k, v and the cotangent of the output."""
    size = batch, length, shape.n_heads, shape.d_head
    return tuple(jax.random.normal(rng, size, dtype) for rng in jax.random.split(RNG, 4))


def whole_call(row: Row) -> Attend:
    """The row as its user calls it: plan and arithmetic."""
    return functools.partial(row.op(), causal=True)


def dense_call(q: Array, k: Array, v: Array) -> Array:
    impl = "xla" if jax.default_backend() == "cpu" else "cudnn"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=impl)


def output_and_gradient(attend: Callable[..., Array]) -> Callable[..., tuple[Array, Any]]:
    """`(d_out, *args) -> (out, gradients)`; an argument that is None has none."""

    def run(d_out, *args):
        out, vjp = jax.vjp(attend, *args)
        return out, vjp(d_out.astype(out.dtype))

    return run


# Correctness.


def oracle(row: Row, plan: chunked.Order | None, q: Array, k: Array | None, v: Array) -> Array:
    """The row's function of a plan in O(T^2), by the oracle over the mask of what is seen."""
    length = q.shape[1]
    if row.op().traits.exact:
        mask = visibility(length, length, causal=True)
        return reference_attention(q, k, v, mask)
    options = dict(row.options)
    options.pop("n_hashes", None)
    options["chunk_len"] = min(options["chunk_len"], length)
    shared = row.op().traits.shared_qk
    chunks = chunked.Chunks(length, **options, causal=True, shared_qk=shared)
    rounds = [plan]
    if plan is not None and not chunks.count_once:
        n_rounds = plan.order.shape[2]
        rounds = [jax.tree.map(lambda x, r=r: x[:, :, r : r + 1], plan) for r in range(n_rounds)]
    masks = [chunked.visible_union(chunks, one, None) for one in rounds]
    if shared:
        k, masks = length_normalize(q), _except_self(masks)
    # A key that counts in several rounds stands in the sequence several times.
    k, v = (jnp.concatenate([x] * len(masks), axis=1) for x in (k, v))
    return reference_attention(q, k, v, jnp.concatenate(masks, axis=-1))


def _except_self(masks: list[Bool[Array, "B N T T"]]) -> list[Bool[Array, "B N T T"]]:
    """Hides positions from themselves; one that sees nothing else sees itself, once."""
    itself = jnp.eye(masks[0].shape[-1], dtype=bool)
    others = [mask & ~itself for mask in masks]
    alone = ~functools.reduce(jnp.logical_or, others).any(axis=-1, keepdims=True)
    return [others[0] | (itself & alone), *others[1:]]


def check(row: Row, shape: Shape, dtype: str) -> Errors:
    """Compares a row's output and gradients with another way to compute them.

    Raises `ArithmeticError` where they differ by more than `TOLERANCE`, or the plan is no order by
    bucket.
    """
    op, exact = row.op(), row.op("xla")
    q, k, v, d_out = inputs(shape, 1, shape.check_length, dtype)
    k = None if op.traits.shared_qk else k
    options = dict(segments=None, causal=True, rng=RNG)
    with jax.default_matmul_precision("highest"):
        plan = jax.jit(lambda q, k: op.plan((), q, k, train=True, **options))(q, k)
        share = None
        if isinstance(plan, chunked.Order):
            # A plan for kernels may leave the inverse out.
            plan = plan._replace(slot=jnp.argsort(plan.order, axis=-1).astype(jnp.int32))
            share = sorted_share(row, plan, q)
        arguments = dict(plan=plan, dropout=0.0, **options)

        def reference(q, k, v):
            hashed = not op.traits.exact  # those have no exact implementation to be compared with
            if hashed and dispatch.choose(row.impl, **dispatch.kernel_obstacles(q, k, v)) != "xla":
                return exact.apply((), q, k, v, **arguments)
            q, k, v = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v))
            return oracle(row, plan if share is not None else None, q, k, v)

        def attend(q, k, v):
            return op.apply((), q, k, v, **arguments)

        got = jax.jit(output_and_gradient(attend))(d_out, q, k, v)
        want = jax.jit(output_and_gradient(reference))(d_out, q, k, v)
        output, gradient = (
            max(map(relative_error, jax.tree.leaves(x), jax.tree.leaves(y)))
            for x, y in zip(got, want, strict=True)
        )
    for what, error in (("output", output), ("gradient", gradient)):
        if not error <= TOLERANCE[dtype]:
            raise ArithmeticError(
                f"the {what} in {dtype} is {error:.2g} off, more than {TOLERANCE[dtype]:g}"
            )
    return Errors(dtype, output, gradient, share)


def relative_error(got: Array, want: Array) -> float:
    """The largest difference, over the largest number wanted or 1; NaN if anything is NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.abs(got - want).max() / jnp.maximum(1.0, jnp.abs(want).max()))


def sorted_share(row: Row, plan: chunked.Order, q: Array) -> float:
    """The share of neighbours in a plan that are in the order of XLA's buckets.

    Raises `ArithmeticError` if it is below `SORTED_SHARE`, or if positions are lost or repeated.
    """
    found = jnp.take_along_axis(plan.order, plan.slot, axis=-1)
    if not jnp.array_equal(found, jnp.broadcast_to(jnp.arange(found.shape[-1]), found.shape)):
        raise ArithmeticError("the plan is no permutation")
    sizes = hashing.auto_buckets(q.shape[1], row.options["chunk_len"])
    buckets = jax.jit(hashing.hash_vectors, static_argnums=(1, 2))(q, sizes, found.shape[2], RNG)
    n_pad = found.shape[-1] - q.shape[1]
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=2**31 - 1)
    buckets = jnp.take_along_axis(buckets, plan.order, axis=-1)
    share = float(jnp.mean(buckets[..., :-1] <= buckets[..., 1:]))
    if share < SORTED_SHARE:
        raise ArithmeticError(f"the plan sorts {share:.1%} of neighbours by their buckets")
    return share


# Times.


class Compiled(NamedTuple):
    """Both passes of a row at one length, and what they are called with."""

    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    args: tuple[Any, ...]
    d_out: Array

    def measure(self, repeats: int) -> Result:
        wait = jax.block_until_ready
        return Result(
            time_calls(lambda: self.forward(*self.args), wait, repeats),
            time_calls(lambda: self.gradient(self.d_out, *self.args), wait, repeats),
            self.gradient.memory_analysis().temp_size_in_bytes / MIB,
        )


def compile_call(row: Row | Peer, arrays: tuple[Array, ...]) -> Compiled:
    """Compiles a row, or a peer, for these q, k, v, cotangent."""
    q, k, v, d_out = arrays
    if not isinstance(row, Row):
        attend, args, extra = row, (q, k, v), ()
    else:
        call = whole_call(row)
        args = (q, None if row.op().traits.shared_qk else k, v)
        extra = (RNG,)

        def attend(q, k, v, rng):
            return call(q, k, v, rng=rng)

    def gradient(d_out, *args):
        inputs, extra = args[:3], args[3:]

        def loss(inputs):
            return jnp.sum(attend(*inputs, *extra) * d_out)

        return jax.grad(loss)(inputs)

    args = (*args, *extra)
    return Compiled(
        jax.jit(attend).lower(*args).compile(),
        jax.jit(gradient).lower(d_out, *args).compile(),
        args,
        d_out,
    )


def outcome(future: Future) -> Any:
    """What a future came to: its result or its exception."""
    error = future.exception()
    if error is None:
        return future.result()
    traceback.print_exception(error)  # to stderr: the table has one line of it
    return error


def measure(
    candidates: dict[str, Row | Peer | Exception],
    shape: Shape,
    length: int,
    repeats: int,
    pool: ThreadPoolExecutor,
) -> Iterator[tuple[str, Known]]:
    """Compiles all rows at once, then times one after the other; what failed is its exception."""
    arrays = inputs(shape, shape.tokens // length, length, shape.dtype)
    futures = {
        name: row if isinstance(row, Exception) else pool.submit(compile_call, row, arrays)
        for name, row in candidates.items()
    }
    compiled = {n: outcome(f) if isinstance(f, Future) else f for n, f in futures.items()}
    del futures
    for name in candidates:
        known = compiled.pop(name)
        if isinstance(known, Compiled):
            try:
                known = known.measure(repeats)
            except Exception as error:  # of any kind: the table has it, and the other rows
                known = error
        yield name, known


class Peers:
    """The process of `benchmarks.attention_torch`, started anew where the last one died."""

    def __init__(self, python: str):
        self._command = [python, "-m", "benchmarks.attention_torch"]
        self._process: subprocess.Popen | None = None

    def measure(self, shape: Shape, length: int, repeats: int) -> Iterator[tuple[str, Known]]:
        """The rows of one length, as they are known."""
        request = dict(
            batch=shape.tokens // length,
            length=length,
            n_heads=shape.n_heads,
            d_head=shape.d_head,
            chunk_len=shape.chunk_len,
            dtype=shape.dtype,
        )
        try:
            process = self._running()
            watch = threading.Timer(PEER_SECONDS, process.kill)
            watch.start()
            try:
                print(json.dumps(dict(shape=request, repeats=repeats)), file=process.stdin)
                process.stdin.flush()
                while row := json.loads(process.stdout.readline() or "null"):
                    yield row["name"], _peer_result(row)
                if row is None:
                    raise RuntimeError(f"ended with status {process.wait()}")
            finally:
                watch.cancel()
        except Exception as error:
            if self._process is not None:
                self._process.kill()  # or it would answer the next request with the rest of this
            yield "peers in PyTorch", error

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            root = Path(__file__).resolve().parent.parent
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = subprocess.Popen(self._command, text=True, cwd=root, **pipes)
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _peer_result(row: dict[str, Any]) -> Known:
    if "error" in row:
        return PeerError(row["error"])
    return Result(Times(*row["forward"]), Times(*row["gradient"]), row["temp_mib"])


class PeerError(Exception):
    """What went wrong in another process, told there."""


# Tables.

HEAD = ("attention", "forward ms", "gradient ms", "temp MiB", "dense / it, forward", "gradient")


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> str:
    return f"{line(cells)}\n{line(['---', *['---:'] * (len(cells) - 1)])}"


def told(error: Exception) -> str:
    return str(error) if isinstance(error, PeerError) else reason(error)


def time_line(name: str, known: Known, dense: Known | None) -> str:
    """A row of a table of times."""
    if isinstance(known, Exception):
        return line([name, told(known), *["-"] * (len(HEAD) - 2)])

    return line(
        [
            name,
            *(f"{t.blocked:.3f} ({t.queued:.3f})" for t in (known.forward, known.gradient)),
            "-" if known.temp_mib is None else f"{known.temp_mib:,.0f}",
            speed_up(known, dense, "forward"),
            speed_up(known, dense, "gradient"),
        ]
    )


def speed_up(known: Known | None, other: Known | None, what: str) -> str:
    """How many times longer another row takes, by both of its times."""
    if not (isinstance(known, Result) and isinstance(other, Result)):
        return "-"
    blocked, queued = (
        d / t for d, t in zip(getattr(other, what), getattr(known, what), strict=True)
    )
    return f"{blocked:.2f} ({queued:.2f})"


def crossover(results: dict[int, dict[str, Known]], name: str, what: str) -> int | None:
    """The shortest length from which on a row beats dense attention, by the median; or None."""
    found = None
    for length in sorted(results, reverse=True):
        row, dense = results[length].get(name), results[length].get(DENSE)
        if not (isinstance(row, Result) and isinstance(dense, Result)):
            break
        if not getattr(row, what).blocked < getattr(dense, what).blocked:
            break
        found = length
    return found


def plot(results: dict[int, dict[str, Known]], title: str, path: Path) -> None:
    """Time of the gradient by length, one line a row."""
    names = dict.fromkeys(name for known in results.values() for name in known)
    figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    colours = plt.colormaps["tab20"].colors
    for name, colour in zip(names, colours, strict=False):
        points = {
            length: known[name].gradient.blocked
            for length, known in sorted(results.items())
            if isinstance(known.get(name), Result)
        }
        if points:
            style = "ks-" if name == DENSE else "o-"
            colour = {} if name == DENSE else dict(color=colour)
            axes.plot(list(points), list(points.values()), style, ms=4, label=name, **colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(results), [f"{n:,}" for n in sorted(results)])
    axes.set(xlabel="length", ylabel="forward and backward, ms")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    if axes.lines:
        figure.legend(loc="outside right center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def checked(
    found: dict[str, Row], shape: Shape, pool: ThreadPoolExecutor
) -> dict[str, Row | Exception]:
    """Checks all rows and prints their errors; a row that fails becomes its exception."""
    futures = {
        name: [pool.submit(check, row, shape, dtype) for dtype in shape.check_dtypes]
        for name, row in found.items()
    }
    columns = [f"{d} {what}" for d in shape.check_dtypes for what in ("output", "gradient")]
    print(
        f"\nLargest errors at 1 x {shape.check_length:,} tokens, beside the largest number or 1\n\n"
        + head(["attention", *columns, "in order of XLA's buckets"])
    )
    results = {}
    for name, row in found.items():
        outcomes = [outcome(future) for future in futures[name]]
        wrong = next((o for o in outcomes if isinstance(o, Exception)), None)
        results[name] = wrong or row
        if wrong:
            cells = [told(wrong), *["-"] * len(columns)]
        else:
            cells = [f"{x:.1e}" for o in outcomes for x in (o.output, o.gradient)]
            shares = [o.sorted_share for o in outcomes if o.sorted_share is not None]
            cells.append(f"{min(shares):.1%}" if shares else "-")
        print(line([name, *cells]), flush=True)
    return results


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Shape]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", help="instead of the usual ones")
    parser.add_argument("--repeats", type=int, default=10, help="calls timed of each row")
    parser.add_argument("--exact", action="store_true", help="time exact attention instead")
    parser.add_argument("--xla", action="store_true", help="add the rows of impl='xla'")
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="add PyTorch's rows, run by this interpreter",
    )
    parser.add_argument("--plot", type=Path, help="where to draw time against length")
    parser.add_argument("--threads", type=int, default=8, help="that compile at the same time")
    args = parser.parse_args(argv)
    shape = SHAPES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    if args.exact and (args.xla or args.peers):
        parser.error("--exact has its own rows: leave --xla and --peers")
    wrong = [n for n in shape.lengths if n < 1 or shape.tokens % n]
    if wrong:
        parser.error(f"--lengths has {wrong}: expected divisors of {shape.tokens}")
    for name in ("repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least 1")
    return args, shape


def main(argv: Sequence[str] | None = None) -> None:
    args, shape = arguments(argv)
    title = (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {shape.tokens:,} tokens a call, "
        f"{shape.n_heads} heads of {shape.d_head}, chunks of {shape.chunk_len}, {shape.dtype}, "
        "causal"
    )
    print(
        f"{title}; {DENSE} is {'XLA' if jax.default_backend() == 'cpu' else 'cuDNN'}'s; medians of "
        f"{args.repeats} calls, in parentheses the mean of {N_QUEUED} queued ones"
    )
    results: dict[int, dict[str, Known]] = {}
    peers = Peers(args.peers) if args.peers else None
    with ThreadPoolExecutor(args.threads) as pool:
        ours = exact_rows() if args.exact else rows(shape.chunk_len, args.xla)
        found = checked(ours, shape, pool)
        for length in shape.lengths:
            known = results[length] = {}
            print(f"\n{shape.tokens // length} x {length:,} tokens\n\n{head(HEAD)}", flush=True)
            rows_and_peers = {DENSE: dense_call} | found
            if args.exact:
                rows_and_peers |= exact_peers(shape, length)
            measured = [measure(rows_and_peers, shape, length, args.repeats, pool)]
            if peers:
                measured.append(peers.measure(shape, length, args.repeats))
            for some in measured:
                for name, one in some:
                    known[name] = one
                    print(time_line(name, one, known[DENSE]), flush=True)
            if args.plot:
                plot(results, title, args.plot)
    if peers:
        peers.close()

    columns = ("forward", "gradient")
    print(f"\nFaster than {DENSE} from this length on\n\n{head(['attention', *columns])}")
    for name in found:
        lengths = [crossover(results, name, what) for what in columns]
        print(line([name, *("-" if n is None else f"{n:,}" for n in lengths)]))
    if args.exact:
        print(f"\nTimes as fast as {PRINTED}\n\n{head(['attention, N', *columns])}")
        for name, length in itertools.product(found, results):
            known, printed = (results[length][row] for row in (name, PRINTED))
            print(line([f"{name}, {length:,}", *(speed_up(known, printed, x) for x in columns)]))
    failed = [
        name
        for name in found
        if any(isinstance(known[name], Exception) for known in results.values())
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Attention by length against dense causal attention: LSH and local, or exact ones.

    python -m benchmarks.attention
    python -m benchmarks.attention --peers --plot docs/attention.png
    python -m benchmarks.attention --exact

prints a table of errors, and one of times for each length N. All calls have the same number of
tokens, batch = tokens / N. The columns:

  * forward, and gradient (forward and backward, with respect to every input), in milliseconds: the
    median of calls waited for one by one and, in parentheses, the mean of 20 queued calls. The
    latter is the device's time where that exceeds the host's. LSH attention hashes and sorts in
    both passes;
  * temporary memory of the gradient as compiled;
  * the speed relative to dense attention, by the median and by the mean. On a GPU dense attention
    is cuDNN's, on a CPU XLA's.

A row of reformax gets no time before its output and gradients agree, at a short length, with
another computation: kernels with array operations given the same plan, array operations with the
oracle over the mask of visible pairs. The plan must be a permutation that sorts by the buckets
that XLA computes. A row that fails prints the reason, and the program exits with an error. A peer
that fails prints its reason too, but is no error.

`--xla` adds rows that use array operations alone. `--peers` adds PyTorch's FlexAttention and the
LSH attention of reformer_pytorch and of transformers. Their memory is the gradient's peak
allocation, less the gradient itself.

`--exact` has FlashAttention and memory-efficient attention instead. Its peers are attention with
the whole matrix of logits, where it fits, and the code that Rabe and Staats printed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's process shares the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from benchmarks.harness import command_line, plot, rows
from benchmarks.harness.processes import Peers
from benchmarks.harness.rows import Errors, Known, Result, Row
from benchmarks.harness.table import Table
from benchmarks.harness.timing import N_QUEUED, time_calls
from benchmarks.peers import rabe_staats
from reformax.ops import AttentionOp, flash, local, lsh, memory_efficient
from reformax.ops.parts import dispatch, hashing
from reformax.ops.parts.masks import visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.orders import Order
from reformax.ops.parts.reference import reference_attention

DENSE = "dense"
PLAIN, PRINTED = "plain", "Rabe and Staats, as printed"
# Hashes of rounded products may differ where a vector lies between two buckets.
SORTED_SHARE = 0.9
MAX_PLAIN_LOGITS = 2**32  # plain attention holds several matrices of them
PEER_SECONDS = 150  # for all rows of one length


class Shape(NamedTuple):
    """The sizes of a run."""

    tokens: int
    lengths: tuple[int, ...]
    n_heads: int
    d_head: int
    chunk_len: int
    dtype: str
    check_length: int
    check_dtypes: tuple[str, ...]
    n_hashes: tuple[int, ...] = (1, 2, 4, 8)

    def inputs(self, batch: int, length: int, dtype: str) -> tuple[Array, ...]:
        return rows.inputs(batch, length, self.n_heads, self.d_head, dtype=dtype)


SHAPES = {
    "tiny": Shape(128, (64, 128), 2, 8, 16, "float32", 60, ("float32",), (1,)),
    "cpu": Shape(4096, (1024, 4096), 4, 32, 64, "float32", 512, ("float32",)),
    "gpu": Shape(
        65536, (1024, 4096, 16384, 65536), 8, 64, 128, "bfloat16", 2048, ("bfloat16", "float32")
    ),
}


class Algorithm(NamedTuple):
    """An attention of reformax: a factory of `reformax.ops` and its arguments."""

    make: Callable[..., AttentionOp]
    options: dict[str, Any]
    impl: str | None = "auto"  # None: the op has one implementation

    def op(self, impl: str | None = None) -> AttentionOp:
        which = {} if self.impl is None else {"impl": impl or self.impl}
        return self.make(**self.options, **which)

    def row(self, shape: Shape) -> Row:
        """The attention as its user calls it: plan and arithmetic."""

        def attend(q, k, v, rng):
            return self.op()(q, k, v, causal=True, rng=rng)

        shared_qk = self.op().traits.shared_qk
        return Row(attend, functools.partial(check, self, shape), shared_qk, takes_rng=True)


def algorithms(shape: Shape, xla: bool = False) -> dict[str, Algorithm]:
    """LSH and local attention, by name."""
    own_and_previous = dict(chunk_len=shape.chunk_len, n_chunks_before=1, n_chunks_after=0)
    found = {}
    for n in shape.n_hashes:
        name = f"LSH, {n} hash{'es' * (n > 1)}"
        found[name] = Algorithm(lsh.lsh, own_and_previous | dict(n_hashes=n))
    if 4 in shape.n_hashes:
        weighted = own_and_previous | dict(n_hashes=4, count_once=False)
        found["LSH, 4 hashes, count_once=False"] = Algorithm(lsh.lsh, weighted)
    found["local"] = Algorithm(local.local, own_and_previous)
    if xla:
        found |= {f"{name}, impl='xla'": one._replace(impl="xla") for name, one in found.items()}
    return found


def exact_algorithms() -> dict[str, Algorithm]:
    """The attentions of `--exact`, by name."""
    found = {"flash": Algorithm(flash.flash, {})}
    if jax.default_backend() == "gpu":  # elsewhere "auto" is "xla"
        for impl in ("xla", "pallas"):
            found[f"flash, impl={impl!r}"] = Algorithm(flash.flash, {}, impl)
    found["memory_efficient"] = Algorithm(memory_efficient.memory_efficient, {}, None)
    return found


def exact_peers(shape: Shape, length: int) -> dict[str, Row | Exception]:
    """The peers of `--exact` at a length, by name."""
    peers: dict[str, Row | Exception] = {PRINTED: Row(rabe_staats.printed)}
    if jax.default_backend() != "cpu":  # where dense attention is plain
        fits = shape.tokens * length * shape.n_heads <= MAX_PLAIN_LOGITS
        error = MemoryError("more logits than memory")
        peers[PLAIN] = Row(rabe_staats.plain) if fits else error
    return peers


# Correctness.


def visible_pairs(
    place: Array, chunk_len: int, n_chunks_before: int, n_chunks_after: int
) -> Bool[Array, "B N R T T"]:
    """The causal pairs (query, key) whose chunks are close enough, given `[B, N, R, T]` places."""
    chunk = place // chunk_len
    distance = chunk[..., None, :] - chunk[..., :, None]
    near = (distance >= -n_chunks_before) & (distance <= n_chunks_after)
    return near & jnp.tri(place.shape[-1], dtype=bool)


def oracle(algorithm: Algorithm, place: Array, q: Array, k: Array | None, v: Array) -> Array:
    """The function that an algorithm computes given the places of positions, in O(T^2)."""
    traits, options = algorithm.op().traits, dict(algorithm.options)
    length = q.shape[1]
    if traits.exact:
        mask = visibility(length, length, causal=True)
        return reference_attention(q, k, v, mask)
    options.pop("n_hashes", None)
    count_once = options.pop("count_once", True)
    seen = visible_pairs(place, **options | dict(chunk_len=min(options["chunk_len"], length)))
    masks = [seen.any(axis=2)] if count_once else list(jnp.moveaxis(seen, 2, 0))
    if traits.shared_qk:
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


def check(algorithm: Algorithm, shape: Shape, dtype: str) -> Errors:
    """Compares an algorithm's output and gradients with another way to compute them.

    Raises:
      ArithmeticError: they differ by more than `rows.TOLERANCE`, or the plan is no order by bucket.
    """
    op, exact = algorithm.op(), algorithm.op("xla")
    q, k, v, d_out = shape.inputs(1, shape.check_length, dtype)
    k = None if op.traits.shared_qk else k
    options = dict(segments=None, causal=True, rng=rows.key())
    with jax.default_matmul_precision("highest"):
        plan = jax.jit(lambda q, k: op.plan((), q, k, train=True, **options))(q, k)
        place, share = jnp.arange(q.shape[1])[None, None, None], None
        if isinstance(plan, Order):
            place = jnp.argsort(plan.queries, axis=-1).astype(jnp.int32)
            plan = plan._replace(places=place)
            share = sorted_share(algorithm, plan.queries, q)
            place = place[..., : q.shape[1]]
    # Exact attentions are held to the oracle: not all have array operations of their own.
    kernels = dispatch.kernel_obstacles(q, k, v)
    array_operations = op.traits.exact or dispatch.choose(algorithm.impl, **kernels) == "xla"

    def attend(q, k, v):
        return op.apply((), q, k, v, plan=plan, dropout=0.0, **options)

    def reference(q, k, v):
        if not array_operations:
            return exact.apply((), q, k, v, plan=plan, dropout=0.0, **options)
        q, k, v = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v))
        return oracle(algorithm, place, q, k, v)

    return rows.compare(attend, reference, (q, k, v, d_out))._replace(sorted_share=share)


def sorted_share(algorithm: Algorithm, order: Array, q: Array) -> float:
    """The share of neighbours in an order that are sorted by XLA's buckets.

    Raises:
      ArithmeticError: it is below `SORTED_SHARE`, or positions are lost or repeated.
    """
    if not jnp.all(jnp.sort(order) == jnp.arange(order.shape[-1])):
        raise ArithmeticError("the plan is no permutation")
    sizes = hashing.auto_buckets(q.shape[1], algorithm.options["chunk_len"])
    hash_vectors = jax.jit(hashing.hash_vectors, static_argnums=(1, 2))
    buckets = hash_vectors(q, sizes, order.shape[2], rows.key())
    n_pad = order.shape[-1] - q.shape[1]
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=2**31 - 1)
    buckets = jnp.take_along_axis(buckets, order, axis=-1)
    share = float(jnp.mean(buckets[..., :-1] <= buckets[..., 1:]))
    if share < SORTED_SHARE:
        raise ArithmeticError(f"the plan sorts {share:.1%} of neighbours by their buckets")
    return share


# Tables.

Results = Mapping[int, Mapping[str, Known]]  # of the rows, by length


def draw(results: Results, title: str, path: Path) -> None:
    """Draws the time of the gradient by length, one line a row."""
    names = dict.fromkeys(name for known in results.values() for name in known)
    with plot.figure(path, title, figsize=(8.5, 4.8)) as (figure, axes):
        for name, colour in zip(names, plot.colours("tab20"), strict=False):
            points = {
                length: known[name].gradient.ms
                for length, known in sorted(results.items())
                if isinstance(known.get(name), Result)
            }
            style = dict(c="k", marker="s") if name == DENSE else dict(c=colour, marker="o")
            if points:
                axes.plot(list(points), list(points.values()), ms=4, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted(results), [f"{n:,}" for n in sorted(results)])
        axes.set(xlabel="length", ylabel="forward and backward, ms")
        if axes.lines:
            figure.legend(loc="outside right center", fontsize=8)


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Shape]:
    parser = command_line.parser(
        __doc__, repeats=10, threads=True, plot="where to draw time against length"
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="instead of the usual ones")
    parser.add_argument("--exact", action="store_true", help="time exact attention instead")
    parser.add_argument("--xla", action="store_true", help="add the rows of impl='xla'")
    command_line.add_peers(parser, "add PyTorch's rows")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(lengths=tuple(sorted(args.lengths or shape.lengths)))
    if args.exact and (args.xla or args.peers):
        parser.error("--exact has its own rows: leave --xla and --peers")
    wrong = [n for n in shape.lengths if n < 1 or shape.tokens % n]
    if wrong:
        parser.error(f"--lengths has {wrong}: expected divisors of {shape.tokens}")
    return args, shape


def measure_peers(peers: Peers, shape: Shape, length: int, repeats: int) -> Iterator:
    """The names and figures of PyTorch's rows at one length, as they are known."""
    request = dict(
        batch=shape.tokens // length,
        length=length,
        n_heads=shape.n_heads,
        d_head=shape.d_head,
        chunk_len=shape.chunk_len,
        dtype=shape.dtype,
    )
    for answer in peers.ask(shape=request, repeats=repeats):
        yield answer.get("name", "peers in PyTorch"), rows.peer_result(answer)


def main(argv: Sequence[str] | None = None) -> None:
    args, shape = arguments(argv)
    title = (
        f"{command_line.machine()}, {shape.tokens:,} tokens a call, {shape.n_heads} heads of "
        f"{shape.d_head}, chunks of {shape.chunk_len}, {shape.dtype}, causal"
    )
    print(
        f"{title}; {DENSE} is {'XLA' if rows.dense_impl() == 'xla' else 'cuDNN'}'s; medians of "
        f"{args.repeats} calls, in parentheses the mean of {N_QUEUED} queued ones"
    )
    found = exact_algorithms() if args.exact else algorithms(shape, args.xla)
    results: dict[int, dict[str, Known]] = {}
    peers = None
    if args.peers:
        peers = Peers("benchmarks.peers.attention_torch", args.peers, PEER_SECONDS)

    def time(call):
        return time_calls(call, jax.block_until_ready, args.repeats)

    with ThreadPoolExecutor(args.threads) as pool:
        ours = {name: one.row(shape) for name, one in found.items()}
        ours = rows.check_rows(ours, shape.check_length, shape.check_dtypes, pool)
        for length in shape.lengths:
            known = results[length] = {}
            batch = shape.tokens // length
            table = Table("attention", *rows.COLUMNS, title=f"{batch} x {length:,} tokens")
            all_rows = {DENSE: rows.dense()} | ours
            if args.exact:
                all_rows |= exact_peers(shape, length)
            arrays = shape.inputs(batch, length, shape.dtype)
            measured = [rows.measure_rows(all_rows, arrays, time, pool)]
            if peers:
                measured.append(measure_peers(peers, shape, length, args.repeats))
            for some in measured:
                for name, one in some:
                    known[name] = one
                    table.row(name, *rows.cells(one, known[DENSE]))
            if args.plot:
                draw(results, title, args.plot)
    if peers:
        peers.close()
    failed = [n for n in found if any(isinstance(x[n], Exception) for x in results.values())]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

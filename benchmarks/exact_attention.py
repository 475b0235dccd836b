"""Exact attention without the N x N matrix: its memory by length, its training, its reach.

    python -m benchmarks.exact_attention --memory
    python -m benchmarks.exact_attention --curves
    python -m benchmarks.exact_attention --longest

print tables in Markdown, of

  * memory: what the compiled program needs beside inputs and outputs, at 2^8 to 2^20 tokens of one
    head of 64, forward and for the gradient, not causal; beside it what Rabe and Staats report for
    a TPU (tables 2 and 3) and Dao et al. for their benchmark's batch (table 21). Nothing is run;
  * curves: TransformerLM on the source text of Python's standard library, in float32, with each
    attention in turn: how far its loss is from dense attention's, at most, over the steps;
  * longest: one gradient through 2^20 tokens of one head, on a CPU 2^14, causal: its time, and its
    error where 32 of the positions alone have a cotangent, which plain attention can check.

How fast they are, `python -m benchmarks.attention --exact` says.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from benchmarks import rabe_staats
from benchmarks.attention import head, line, output_and_gradient, relative_error
from benchmarks.measuring import reason
from reformax.data import stdlib
from reformax.models import TransformerLM
from reformax.ops import AttentionOp, block_sparse, dense, flash, memory_efficient

MIB = 2**20
KEY = jax.random.key(0)
SIZE = 64
LENGTHS = tuple(2**n for n in range(8, 21, 2))
# Beyond this a GPU that tunes its products would allocate plain attention's scores.
PLAIN_ON_GPU = 2**14

# What the papers report, in their units.
RABE_STAATS = {
    "forward": dict(
        zip(
            LENGTHS, ("270 KB", "4.0 MB", "16 MB", "17 MB", "21 MB", "64 MB", "256 MB"), strict=True
        )
    ),
    "gradient": dict(
        zip(
            LENGTHS,
            ("532 KB", "8.0 MB", "41 MB", "64 MB", "257 MB", "1.0 GB", "4.0 GB"),
            strict=True,
        )
    ),
}
DAO = {2**8: "44 MB", 2**10: "209 MB", 2**12: "836 MB", 2**14: "3,344 MB", 2**16: "13,376 MB"}


def attentions() -> dict[str, AttentionOp]:
    """The ops that `--memory` and `--longest` compare, by name."""
    found = {"memory_efficient": memory_efficient.memory_efficient(), "flash": flash.flash()}
    if jax.default_backend() == "gpu":
        found["flash, impl='pallas'"] = flash.flash(impl="pallas")
        found["flash, impl='xla'"] = flash.flash(impl="xla")
    return found


def dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def temp_bytes(attend: Callable[..., Array], length: int, gradient: bool) -> int | Exception:
    """What the compiled program needs beside its inputs and outputs."""
    x = jax.ShapeDtypeStruct((1, length, 1, SIZE), dtype())
    try:
        if gradient:
            program = jax.jit(output_and_gradient(attend)).lower(x, x, x, x)
        else:
            program = jax.jit(attend).lower(x, x, x)
        return program.compile().memory_analysis().temp_size_in_bytes
    except Exception as error:  # of any kind: the table has it, and the other rows
        return error


def told(size: int | Exception | None) -> str:
    if isinstance(size, Exception):
        return reason(size)
    return "-" if size is None else f"{size / MIB:,.1f}"


def memory(lengths: Sequence[int], threads: int) -> None:
    """Prints the two tables of memory by length."""
    candidates = {"plain": functools.partial(rabe_staats.plain, causal=False)}
    # The least memory, by the paper: constant chunks of queries, the square root of keys.
    least = memory_efficient.memory_efficient(query_chunk_size=64, key_chunk_size="sqrt")
    ops = attentions() | {"memory_efficient, 64 x sqrt": least}
    candidates |= {name: lambda *x, op=op: op(*x) for name, op in ops.items()}
    bytes_of_inputs = 3 * SIZE * np.dtype(jnp.dtype(dtype())).itemsize
    with ThreadPoolExecutor(threads) as pool:
        for what in ("forward", "gradient"):
            names = [*candidates, "Rabe and Staats, table " + ("2" if what == "forward" else "3")]
            names += ["Dao et al., table 21"] * (what == "gradient")
            print(f"\nMiB, {what}\n\n{head(['N', 'q, k, v', *names])}", flush=True)
            futures = {
                (length, name): pool.submit(temp_bytes, attend, length, what == "gradient")
                for length in lengths
                for name, attend in candidates.items()
                if not (name == "plain" and length > PLAIN_ON_GPU and dtype() == "bfloat16")
            }
            for length in lengths:
                cells = [f"{length:,}", told(length * bytes_of_inputs)]
                for name in candidates:
                    future = futures.get((length, name))
                    cells.append(told(None if future is None else future.result()))
                cells.append(RABE_STAATS[what].get(length, "-"))
                if what == "gradient":
                    cells.append(DAO.get(length, "-"))
                print(line(cells), flush=True)


def everything(n_query_blocks: int, n_key_blocks: int) -> np.ndarray:
    """A block mask with no zero."""
    return np.ones((n_query_blocks, n_key_blocks), bool)


def loss_curve(
    op: AttentionOp,
    steps: int,
    length: int,
    d_model: int = 64,
    n_layers: int = 2,
    model_fn: Callable = TransformerLM,
    jit: Callable = jax.jit,
) -> np.ndarray:
    """The losses of a small model in training; everything but the attention is the same."""
    task = stdlib.stdlib(max_bytes=2_000_000)
    model = model_fn(
        vocab_size=task.vocab_size,
        d_model=d_model,
        d_ff=4 * d_model,
        d_attention_key=d_model // 2,
        d_attention_value=d_model // 2,
        n_layers=n_layers,
        n_heads=2,
        dropout=0.0,
        attention_type=op,
    )
    optimizer = optax.adam(3e-3)

    def loss(params, tokens):
        logits = model.apply(params, tokens, KEY)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    @jit
    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    @jit
    def start():
        params = model.init_params(KEY, (4, length))
        return params, optimizer.init(params)

    (params, state), losses = start(), []
    for n in range(steps):
        batch = task.train_batch(0, n, 4, length)
        params, state, value = step(params, state, np.asarray(batch.inputs))
        losses.append(value)
    return np.asarray(losses)


def in_parts(length: int) -> dict[str, AttentionOp]:
    """Exact attentions that cut a sequence of this length into several parts, by name."""
    return {
        "memory_efficient": memory_efficient.memory_efficient(
            query_chunk_size=length // 4, key_chunk_size=length // 2
        ),
        "flash": flash.flash(query_block_size=length // 4, key_block_size=length // 4),
        "block_sparse, all blocks": block_sparse.block_sparse(
            pattern=everything, block_size=length // 4
        ),
    }


def curves(steps: int, length: int) -> None:
    """Prints how far each attention's losses are from dense attention's."""
    ops = {"dense": dense.dense(impl="xla")} | in_parts(length)
    print(f"\n{steps} steps of 4 x {length} bytes\n")
    print(head(["attention", "first loss", "last loss", "largest difference to dense"]))
    want = None
    for name, op in ops.items():
        losses = loss_curve(op, steps, length)
        want = losses if want is None else want
        difference = np.abs(losses - want).max()
        print(line([name, *(f"{losses[i]:.4f}" for i in (0, -1)), f"{difference:.1e}"]), flush=True)


def longest(length: int) -> None:
    """Prints the time and the error of one gradient through a sequence of this length."""
    q, k, v, d = (
        jax.random.normal(rng, (1, length, 1, SIZE), dtype()) for rng in jax.random.split(KEY, 4)
    )
    some = np.sort(np.random.default_rng(0).choice(length, 32, replace=False))
    d = jnp.zeros_like(d).at[:, some].set(d[:, some])

    def plain(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q[:, some], k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / SIZE**0.5
        scores = jnp.where(some[:, None] >= np.arange(length), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

    want, gradients = jax.jit(output_and_gradient(plain))(d[:, some], q, k, v)
    print(f"\nGradient through {length:,} tokens of one head, {dtype()}\n")
    print(head(["attention", "seconds", "temp MiB", "error of the output", "of the gradient"]))
    for name, op in attentions().items():
        try:
            run = output_and_gradient(lambda *x, op=op: op(*x, causal=True))
            program = jax.jit(run).lower(d, q, k, v).compile()
            start = time.perf_counter()
            out, found = jax.block_until_ready(program(d, q, k, v))
            seconds = time.perf_counter() - start
            temp = program.memory_analysis().temp_size_in_bytes
            errors = relative_error(out[:, some], want), max(map(relative_error, found, gradients))
            cells: list[Any] = [f"{seconds:.2f}", told(temp), *(f"{x:.1e}" for x in errors)]
        except Exception as error:  # of any kind: the table has it, and the other rows
            cells = [reason(error), "-", "-", "-"]
        print(line([name, *cells]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", action="store_true", help="memory by length")
    parser.add_argument("--curves", action="store_true", help="losses in training")
    parser.add_argument("--longest", action="store_true", help="the gradient of a long sequence")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of --memory")
    parser.add_argument("--steps", type=int, default=100, help="of --curves")
    parser.add_argument("--length", type=int, help="of --longest")
    parser.add_argument("--threads", type=int, default=8, help="that compile at the same time")
    args = parser.parse_args(argv)
    if not (args.memory or args.curves or args.longest):
        parser.error("nothing to do: give --memory, --curves or --longest")
    for name, size in (("steps", args.steps), ("length", args.length), ("threads", args.threads)):
        if size is not None and size < 1:
            parser.error(f"--{name} is {size}: expected at least 1")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {dtype()}")
    if args.memory:
        memory(args.lengths, args.threads)
    if args.curves:
        curves(args.steps, 128)
    if args.longest:
        longest(args.length or (2**14 if jax.default_backend() == "cpu" else 2**20))


if __name__ == "__main__":
    main()

"""Exact attention without the N x N matrix: its memory by length, its training, its reach.

    python -m benchmarks.exact_attention --memory
    python -m benchmarks.exact_attention --curves
    python -m benchmarks.exact_attention --longest

print tables of

  * memory: what the compiled gradient needs besides its inputs and outputs, at 2^8 to 2^20 tokens
    of one head of 64, not causal; next to it the figures of Rabe and Staats for a TPU (table 3) and
    of Dao et al. for their benchmark's batch (table 21). Nothing is run;
  * curves: TransformerLM on the source text of Python's standard library, in float32, with each
    attention in turn: the largest difference of its loss to dense attention's over the steps;
  * longest: one gradient through 2^20 tokens of one head, on a CPU 2^14, causal: its time, and its
    error where only 32 of the positions have a cotangent, which plain attention can check.

`python -m benchmarks.attention --exact` measures their speed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from benchmarks.harness import command_line, rows
from benchmarks.harness.failures import attempt, reason
from benchmarks.harness.rows import MIB, output_and_gradient, relative_error
from benchmarks.harness.table import Table
from benchmarks.peers import rabe_staats
from reformax.data import stdlib
from reformax.models import TransformerLM
from reformax.ops import AttentionOp, block_sparse, dense, flash, memory_efficient

KEY = jax.random.key(0)
SIZE = 64
LONGEST = {"tiny": 100, "cpu": 2**14, "gpu": 2**20}
LENGTHS = tuple(2**n for n in range(8, 21, 2))
# Beyond this a GPU that tunes its products would allocate plain attention's scores.
PLAIN_ON_GPU = 2**14

# As the papers print them, for the gradient.
RABE_STAATS = ("532 KB", "8.0 MB", "41 MB", "64 MB", "257 MB", "1.0 GB", "4.0 GB")
DAO = ("44 MB", "209 MB", "836 MB", "3,344 MB", "13,376 MB")
PAPERS = {
    "Rabe and Staats, table 3": dict(zip(LENGTHS, RABE_STAATS, strict=True)),
    "Dao et al., table 21": dict(zip(LENGTHS, DAO, strict=False)),
}


def attentions() -> dict[str, AttentionOp]:
    """The ops that `--memory` and `--longest` compare, by name."""
    found = {"memory_efficient": memory_efficient.memory_efficient(), "flash": flash.flash()}
    if jax.default_backend() == "gpu":
        found["flash, impl='pallas'"] = flash.flash(impl="pallas")
        found["flash, impl='xla'"] = flash.flash(impl="xla")
    return found


def dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def temp_mib(attend: Callable[..., Array], length: int) -> str:
    """The memory that the compiled gradient needs besides its inputs and outputs."""
    x = jax.ShapeDtypeStruct((1, length, 1, SIZE), dtype())

    def compiled() -> float:
        program = jax.jit(output_and_gradient(attend)).lower(x, x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes / MIB

    mib = attempt(compiled)
    return reason(mib) if isinstance(mib, Exception) else f"{mib:,.1f}"


def memory(lengths: Sequence[int], threads: int) -> None:
    """Prints the table of memory by length."""
    candidates: dict[str, Callable] = {"plain": functools.partial(rabe_staats.plain, causal=False)}
    candidates |= {name: lambda *x, op=op: op(*x) for name, op in attentions().items()}
    table = Table("N", "q, k, v", *candidates, *PAPERS, title="MiB, gradient")
    with ThreadPoolExecutor(threads) as pool:
        futures = {
            (length, name): pool.submit(temp_mib, attend, length)
            for length in lengths
            for name, attend in candidates.items()
            if not (name == "plain" and length > PLAIN_ON_GPU and dtype() == "bfloat16")
        }
        for length in lengths:
            own = 3 * SIZE * length * jnp.dtype(dtype()).itemsize / MIB
            found = [futures.get((length, name)) for name in candidates]
            cells = ["-" if future is None else future.result() for future in found]
            papers = [paper.get(length, "-") for paper in PAPERS.values()]
            table.row(f"{length:,}", f"{own:,.1f}", *cells, *papers)


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

    @jax.jit
    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
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
    columns = "attention", "first loss", "last loss", "largest difference to dense"
    table = Table(*columns, title=f"{steps} steps of 4 x {length} bytes")
    want = None
    for name, op in ops.items():
        losses = loss_curve(op, steps, length)
        want = losses if want is None else want
        difference = np.abs(losses - want).max()
        table.row(name, *(f"{losses[i]:.4f}" for i in (0, -1)), f"{difference:.1e}")


def longest(length: int) -> None:
    """Prints the time and the error of one gradient through a sequence of this length."""
    q, k, v, d = rows.inputs(1, length, 1, SIZE, dtype=dtype())
    some = np.sort(np.random.default_rng(0).choice(length, 32, replace=False))
    d = jnp.zeros_like(d).at[:, some].set(d[:, some])

    def plain(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q[:, some], k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / SIZE**0.5
        logits = jnp.where(some[:, None] >= np.arange(length), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

    want, gradients = jax.jit(output_and_gradient(plain))(d[:, some], q, k, v)

    def measure(op: AttentionOp) -> list[str]:
        run = output_and_gradient(lambda *x: op(*x, causal=True))
        program = jax.jit(run).lower(d, q, k, v).compile()
        start = time.perf_counter()
        out, found = jax.block_until_ready(program(d, q, k, v))
        seconds = time.perf_counter() - start
        temp = program.memory_analysis().temp_size_in_bytes / MIB
        errors = relative_error(out[:, some], want), max(map(relative_error, found, gradients))
        return [f"{seconds:.2f}", f"{temp:,.1f}", *(f"{x:.1e}" for x in errors)]

    columns = "attention", "seconds", "temp MiB", "error of the output", "of the gradient"
    table = Table(*columns, title=f"Gradient through {length:,} tokens of one head, {dtype()}")
    for name, op in attentions().items():
        cells = attempt(measure, op)
        table.row(name, *([reason(cells)] if isinstance(cells, Exception) else cells))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, threads=True)
    parser.add_argument("--memory", action="store_true", help="memory by length")
    parser.add_argument("--curves", action="store_true", help="losses in training")
    parser.add_argument("--longest", action="store_true", help="the gradient of a long sequence")
    args = parser.parse_args(argv)
    if not (args.memory or args.curves or args.longest):
        parser.error("nothing to do: give --memory, --curves or --longest")
    print(f"{command_line.machine()}, {dtype()}")
    if args.memory:
        memory(LENGTHS[:2] if args.tiny else LENGTHS, args.threads)
    if args.curves:
        curves(*((2, 32) if args.tiny else (100, 128)))
    if args.longest:
        longest(command_line.of_size(LONGEST, args.tiny))


if __name__ == "__main__":
    main()

"""Exact attention without the N x N matrix: its memory by length, its training, its reach.

    python -m benchmarks.exact_attention --memory
    python -m benchmarks.exact_attention --curves --longest

print tables of

  * memory: what the compiled gradient needs besides its inputs and outputs, by length, of one head
    of 64, not causal; next to it what Rabe and Staats print for a TPU, and Dao et al. for their
    benchmark's batch. Nothing is run;
  * curves: TransformerLM on the source text of Python's standard library, in float32: the largest
    difference of its loss to dense attention's over the steps;
  * longest: one causal gradient through one head: its time, and its error where only 32 of the
    positions have a cotangent, which plain attention can check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import command_line, rows
from benchmarks.harness.calls import MIB, attempt, compiled
from benchmarks.harness.language_models import Sizes
from benchmarks.harness.output import Table
from benchmarks.harness.rows import KEY, output_and_gradient, relative_error
from reformax.data import stdlib
from reformax.models import TransformerLM
from reformax.ops import AttentionOp, block_sparse, dense, flash, memory_efficient
from reformax.ops.softmax.reference import reference_attention
from reformax.training import mesh, step

SIZE = 64
SMALL = Sizes(d_model=64, d_ff=256, n_heads=2, d_head=32, n_layers=2)
LONGEST = {"tiny": 100, "cpu": 2**14, "gpu": 2**20}
# Beyond this a GPU that tunes its products would allocate plain attention's scores.
PLAIN_ON_GPU = 2**14

# What the papers print for the gradient, by length.
PAPERS = {
    2**8: ("532 KB", "44 MB"),
    2**12: ("41 MB", "836 MB"),
    2**16: ("257 MB", "13,376 MB"),
    2**20: ("4.0 GB", "-"),
}


def dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def memory(lengths: Sequence[int]) -> None:
    """Prints the table of memory by length."""
    candidates = {"plain": rows.plain} | rows.exact_ops()
    papers = "Rabe and Staats, table 3", "Dao et al., table 21"
    table = Table("N", "q, k, v", *candidates, *papers, title="MiB, gradient")
    for length in lengths:
        cells = [f"{length:,}", f"{3 * SIZE * length * jnp.dtype(dtype()).itemsize / MIB:,.1f}"]
        for name, attend in candidates.items():
            if name == "plain" and length > PLAIN_ON_GPU and dtype() == "bfloat16":
                cells.append("-")
                continue
            x = jax.ShapeDtypeStruct((1, length, 1, SIZE), dtype())
            program = compiled(jax.jit(output_and_gradient(attend)).lower(x, x, x, x))
            cells.append(f"{program.temp_mib:,.1f}")
        table.row(*cells, *PAPERS[length])


def loss_curve(
    op: AttentionOp,
    steps: int,
    length: int,
    sizes: Sizes = SMALL,
    model_fn: Callable = TransformerLM,
) -> np.ndarray:
    """The losses of a small model in training; everything but the attention is the same."""
    task = stdlib.stdlib(max_bytes=2_000_000)
    model = model_fn(**sizes.arguments(), dropout=0.0, attention_type=op)
    optimizer = optax.adam(3e-3)
    run = step.step_fn(model, optimizer, mesh.make())
    params = jax.jit(lambda: model.init_params(KEY, (4, length)))()
    state, losses = step.TrainState(jnp.int32(0), params, optimizer.init(params), None), []
    for n in range(steps):
        state, metrics = run(state, tuple(task.train_batch(0, n, 4, length)), KEY)
        losses.append(metrics["nats"].mean)
    return np.asarray(losses)


def in_parts(length: int) -> dict[str, AttentionOp]:
    """Exact attentions that cut a sequence of this length into several parts, by name."""
    part = length // 4
    return {
        "memory_efficient": memory_efficient.memory_efficient(
            query_chunk_size=part, key_chunk_size=2 * part
        ),
        "flash": flash.flash(query_block_size=part, key_block_size=part),
        "block_sparse, all blocks": block_sparse.block_sparse(
            pattern=lambda n_queries, n_keys: np.ones((n_queries, n_keys), bool), block_size=part
        ),
    }


def curves(steps: int, length: int) -> None:
    """Prints how far each attention's losses are from dense attention's."""
    ops = {"dense": dense.dense(impl="xla")} | in_parts(length)
    columns = "attention", "first loss", "last loss", "largest difference to dense"
    table = Table(*columns, title=f"{steps} steps of 4 x {length} bytes")
    losses = {name: loss_curve(op, steps, length) for name, op in ops.items()}
    for name, found in losses.items():
        difference = np.abs(found - losses["dense"]).max()
        table.row(name, f"{found[0]:.4f}", f"{found[-1]:.4f}", f"{difference:.1e}")


def longest(length: int) -> None:
    """Prints the time and the error of one gradient through a sequence of this length."""
    q, k, v, d = rows.inputs(1, length, 1, SIZE, dtype=dtype())
    some = np.sort(np.random.default_rng(0).choice(length, 32, replace=False))
    d = jnp.zeros_like(d).at[:, some].set(d[:, some])

    def plain(q, k, v):
        mask = jnp.asarray(some[:, None] >= np.arange(length))[None, None]
        q, k, v = (x.astype(jnp.float32) for x in (q[:, some], k, v))
        return reference_attention(q, k, v, mask)

    with jax.default_matmul_precision("highest"):
        want, gradients = jax.jit(output_and_gradient(plain))(d[:, some], q, k, v)

    def measure(op: AttentionOp) -> list[str]:
        run = output_and_gradient(lambda *x: op(*x, causal=True))
        program = compiled(jax.jit(run).lower(d, q, k, v))
        start = time.perf_counter()
        out, found = jax.block_until_ready(program.call(d, q, k, v))
        seconds = time.perf_counter() - start
        errors = relative_error(out[:, some], want), max(map(relative_error, found, gradients))
        return [f"{seconds:.2f}", f"{program.temp_mib:,.1f}", *(f"{x:.1e}" for x in errors)]

    columns = "attention", "seconds", "temp MiB", "error of the output", "of the gradient"
    table = Table(*columns, title=f"Gradient through {length:,} tokens of one head, {dtype()}")
    for name, op in rows.exact_ops().items():
        table.result(name, known=attempt(measure, op), cells=list)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--memory", action="store_true", help="memory by length")
    parser.add_argument("--curves", action="store_true", help="losses in training")
    parser.add_argument("--longest", action="store_true", help="the gradient of a long sequence")
    args = parser.parse_args(argv)
    if not (args.memory or args.curves or args.longest):
        parser.error("nothing to do: give --memory, --curves or --longest")
    length = command_line.of_size(LONGEST, args.tiny)
    if args.memory:
        memory(list(PAPERS)[:2] if args.tiny else list(PAPERS))
    if args.curves:
        curves(*((2, 32) if args.tiny else (100, 128)))
    if args.longest:
        longest(length)


if __name__ == "__main__":
    main()

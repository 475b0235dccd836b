"""The drift of a reversible stack's backward pass, and its cost, by depth.

    python -m benchmarks.reversible

prints two tables and draws docs/reversible.png. The first has the error of the inputs that the
backward pass rebuilds, and of the parameters' gradient relative to that of the same forward pass
with every activation kept, in layers of local and LSH attention with dropout. Two programs may
round their products differently, as a GPU's do, and then gradients differ even without drift.

The second has temporary memory and compile time of the gradient of a ReformerLM and of a
TransformerLM with the same layers. Nothing is run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import command_line, plot
from benchmarks.harness.language_models import VOCAB_SIZE
from benchmarks.harness.rows import MIB, key
from benchmarks.harness.table import Table
from reformax.layers import Attention, Block, FeedForward, ReversibleStack
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import local, lsh

DTYPES = ("float32", "bfloat16")


class Shape(NamedTuple):
    """The sizes of a run."""

    batch: int
    length: int
    d_model: int
    depths: tuple[int, ...] = (2, 4, 8, 12, 24)
    dtypes: tuple[str, ...] = DTYPES
    cost_length: int = 4096
    cost_d_model: int = 128


SHAPES = {
    "tiny": Shape(1, 32, 16, (2,), DTYPES[:1], 128, 16),
    "cpu": Shape(1, 128, 64),
    "gpu": Shape(2, 1024, 512),
}


class Drift(NamedTuple):
    """The errors of one backward pass."""

    n_layers: int
    dtype: str
    stack: str  # plain or exact
    error: float  # the largest difference of a rebuilt input
    n_differing: int  # of the inputs' numbers
    n_numbers: int
    gradient_error: float  # norm of the difference over the norm, of all parameters together


def attention_ops(chunk_len: int) -> tuple:
    return local.local(chunk_len=chunk_len), lsh.lsh(chunk_len=chunk_len, n_hashes=2)


def blocks(shape: Shape, dropout: float = 0.1) -> list[Block]:
    """A cycle of local and LSH attention."""
    d_head = min(64, shape.d_model)
    options = dict(n_heads=max(1, shape.d_model // 64), d_qk=d_head, d_v=d_head, causal=True)
    options |= dict(attention_dropout=dropout, output_dropout=dropout, use_rotary=True)
    ops = attention_ops(min(64, shape.length // 8))
    d_ff = 4 * shape.d_model
    return [Block(Attention(op, **options), FeedForward(d_ff, dropout, dropout)) for op in ops]


def drift(shape: Shape, n_layers: int, dtype: str, exact: bool) -> Drift:
    """Runs a stack forward and back, on inputs of unit variance."""
    stack = ReversibleStack(blocks(shape), n_layers, dtype=dtype, exact=exact)
    rng, size = key(), shape[:3]
    params = jax.jit(lambda: stack.init_params(rng, size, size))()
    # As large as training makes them: fresh ones are scaled down by the depth.
    for block in params.values():
        block["attention"]["w_o"] *= math.sqrt(2 * n_layers)
        block["feed_forward"]["w2"] *= math.sqrt(2 * n_layers)
    x1, x2 = jax.random.normal(jax.random.fold_in(rng, 1), (2, *size))
    direction = jax.random.normal(jax.random.fold_in(rng, 2), (2, *size))

    def gradient(run: Callable):
        def loss(params):
            return sum(map(jnp.vdot, direction, run(params, x1, x2, rng=rng)))

        return jax.jit(jax.grad(loss))(params)

    streams = jax.jit(functools.partial(stack.rebuild, rng=rng))(params, x1, x2)
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(*streams, strict=True)]
    got, want = gradient(stack.apply), gradient(stack.apply_keeping)
    return Drift(
        n_layers,
        dtype,
        "exact" if exact else "plain",
        error=max(float(np.abs(x - y).max()) for x, y in pairs),
        n_differing=sum(int(np.count_nonzero(x != y)) for x, y in pairs),
        n_numbers=sum(x.size for x, _ in pairs),
        gradient_error=norm(jax.tree.map(jnp.subtract, got, want)) / norm(want),
    )


def norm(tree) -> float:
    """The Euclidean norm of all arrays together, in float64."""
    squares = (np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))
    return float(np.sqrt(sum(squares)))


def cost(model, length: int) -> str:
    """Temporary memory and compile time of a gradient."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(key(), tokens.shape))

    def loss(params, tokens):
        log_probabilities = jax.nn.log_softmax(model.apply(params, tokens, key()))
        return -jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1).mean()

    lowered = jax.jit(jax.grad(loss)).lower(params, tokens)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return f"{compiled.memory_analysis().temp_size_in_bytes / MIB:.1f} MiB ({seconds:.1f} s)"


def print_drifts(shape: Shape) -> list[Drift]:
    columns = "largest error", "numbers that differ", "gradient error"
    table = Table("layers", "sublayers", "stack", *columns, n_names=3)
    drifts = []
    for dtype in shape.dtypes:
        for exact in (False, True):
            for n_layers in shape.depths:
                d = drift(shape, n_layers, dtype, exact)
                drifts.append(d)
                differing = f"{d.n_differing:,} of {d.n_numbers:,}"
                errors = f"{d.error:.2g}", differing, f"{d.gradient_error:.2g}"
                table.row(str(n_layers), dtype, d.stack, *errors)
    return drifts


def print_costs(shape: Shape) -> None:
    length, d_model = shape.cost_length, shape.cost_d_model
    title = f"Gradient at batch 1, length {length:,}, width {d_model}: temporary memory"
    columns = "ReformerLM", "ReformerLM, exact", "TransformerLM"
    table = Table("layers", *columns, title=f"{title} (compile time)")
    for n_layers in shape.depths:
        options = dict(vocab_size=VOCAB_SIZE, d_model=d_model, d_ff=4 * d_model, n_heads=2)
        options |= dict(n_layers=n_layers, attention_type=attention_ops(length // 64))
        built = ReformerLM(**options), ReformerLM(**options, exact=True), TransformerLM(**options)
        table.row(str(n_layers), *(cost(model, length) for model in built))


def draw(drifts: Sequence[Drift], title: str, path: Path) -> None:
    """Drift and error of the gradient by depth, one line for each precision and kind of stack."""
    labels = "largest error of a rebuilt input", "relative error of the gradient"
    with plot.figure(path, title, n_panels=2, figsize=(9, 3.8)) as (figure, *panels):
        for axes, label, field in zip(panels, labels, ("error", "gradient_error"), strict=True):
            # Lines at 0 lie on each other: the larger marks are seen around the smaller.
            for dtype, colour, size in zip(DTYPES, ("tab:blue", "tab:orange"), (9, 5), strict=True):
                for stack, style in (("plain", "o--"), ("exact", "o-")):
                    line = [d for d in drifts if (d.dtype, d.stack) == (dtype, stack)]
                    x, y = [d.n_layers for d in line], [getattr(d, field) for d in line]
                    axes.plot(x, y, style, ms=size, color=colour, label=f"{dtype}, {stack}")
            # Logarithmic, with room at the bottom for an error of 0.
            axes.set_yscale("symlog", linthresh=1e-9)
            axes.set_ylim(bottom=-2e-10)
            axes.set_xticks(sorted({d.n_layers for d in drifts}))
            axes.set_xlabel("layers")
            axes.set_title(label, fontsize=10)
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=4, fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot="where to draw errors by depth")
    parser.set_defaults(plot=Path("docs/reversible.png"))
    parser.add_argument("--layers", type=int, nargs="+", help="increasing even numbers")
    parser.add_argument("--no_cost", action="store_true", help="only the first table")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(depths=tuple(args.layers or shape.depths))
    size = f"batch {shape.batch}, length {shape.length:,}, width {shape.d_model}"
    title = f"{command_line.machine()}, {size}"
    print(title)
    draw(print_drifts(shape), title, args.plot)
    if not args.no_cost:
        print_costs(shape)


if __name__ == "__main__":
    main()

"""The drift of a reversible stack's backward pass, and its cost, by depth.

    python -m benchmarks.reversible
    python -m benchmarks.reversible --options

The first prints two tables and draws runs/reversible.png. One has the error of the inputs that the
backward pass rebuilds, and of the gradient relative to that of the same forward pass with every
activation kept. Two programs may round their products differently, as a GPU's do, and then
gradients differ even without drift. The other has temporary memory and compile time of the gradient
of a ReformerLM and of a TransformerLM with the same layers. Nothing is run for it.

The second counts, for every combination of an exact stack's options, the numbers that its backward
pass does not rebuild bit for bit, and fails if there are any.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import command_line
from benchmarks.harness.calls import COMPILERS, attempt_each, compiled, exit_if, reason
from benchmarks.harness.language_models import VOCAB_SIZE
from benchmarks.harness.output import Lines, Table, plot
from benchmarks.harness.rows import KEY
from reformax.layers import (
    Attention,
    CrossAttention,
    FeedForward,
    ReversibleStack,
    TransformerBlock,
)
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dense, local, lsh

DROPOUT = 0.1
N_SLOTS = 7  # LSH attention is every second layer: with six, those of twelve layers would share
ERRORS = "largest error of a rebuilt input", "relative error of the gradient"
# Both exact stacks may lie on the same line: one shows within the other.
STYLES = {
    f"{dtype}, {kind}": style | dict(ls=ls)
    for kind, ls in (("plain", "-"), ("exact", "--"))
    for dtype, style in {
        "float32": dict(color="C0", marker="s", ms=8, mfc="none"),
        "bfloat16": dict(color="C1", marker="o", ms=4),
    }.items()
}


class Shape(NamedTuple):
    """The sizes of a run."""

    batch: int
    length: int
    d_model: int
    depths: tuple[int, ...] = (2, 4, 8, 12, 24)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    cost_length: int = 4096
    cost_d_model: int = 128


SHAPES = {
    "tiny": Shape(1, 32, 16, (2,), ("float32",), 128, 16),
    "cpu": Shape(1, 128, 64),
    "gpu": Shape(2, 1024, 512),
}


def attention_ops(chunk_len: int) -> tuple:
    return local.local(chunk_len=chunk_len), lsh.lsh(chunk_len=chunk_len, n_hashes=2)


def blocks(shape: Shape) -> list[TransformerBlock]:
    """A cycle of local and LSH attention."""
    d_head = min(64, shape.d_model)
    options = dict(n_heads=max(1, shape.d_model // 64), d_qk=d_head, d_v=d_head, causal=True)
    options |= dict(attention_dropout=DROPOUT, output_dropout=DROPOUT, use_rotary=True)
    feed_forward = FeedForward(4 * shape.d_model, DROPOUT, DROPOUT)
    ops = attention_ops(min(64, shape.length // 8))
    return [TransformerBlock(Attention(op, **options), feed_forward) for op in ops]


def drift(shape: Shape, n_layers: int, dtype: str, exact: bool) -> tuple[float, float]:
    """The errors of one backward pass, on inputs of unit variance.

    They are the largest difference of a rebuilt input, and the norm of the difference of gradients
    over the norm of the gradient, of all parameters together.
    """
    stack = ReversibleStack(blocks(shape), n_layers, dtype=dtype, exact=exact)
    size = shape.batch, shape.length, shape.d_model
    params = jax.jit(lambda: stack.init_params(KEY, size, size))()
    # As large as training makes them: fresh ones are scaled down by the depth.
    for block in params.values():
        block["attention"]["w_o"] *= math.sqrt(2 * n_layers)
        block["feed_forward"]["w2"] *= math.sqrt(2 * n_layers)
    x1, x2 = jax.random.normal(jax.random.fold_in(KEY, 1), (2, *size))
    direction = jax.random.normal(jax.random.fold_in(KEY, 2), (2, *size))

    def gradient(run: Callable):
        def loss(params):
            return sum(map(jnp.vdot, direction, run(params, x1, x2, rng=KEY)))

        return jax.jit(jax.grad(loss))(params)

    streams = jax.jit(functools.partial(stack.rebuild, rng=KEY))(params, x1, x2)
    rebuilt = max(float(jnp.abs(x - y).max()) for x, y in zip(*streams, strict=True))
    got, want = gradient(stack.apply), gradient(stack.apply_keeping)
    difference = jax.tree.map(jnp.subtract, got, want)
    return rebuilt, float(optax.tree.norm(difference) / optax.tree.norm(want))


class Options(NamedTuple):
    """An exact stack: its dtype, options and sublayers."""

    dtype: str
    cross: bool
    scan_layers: bool
    keep_ff_outputs: bool
    chunked: bool  # feed-forward layers, in chunks of which the last is shorter
    dropout: float


def exact_stack(options: Options, shape: Shape) -> ReversibleStack:
    """Four layers, in cycles of two."""
    chunk_size = shape.length * 3 // 8 if options.chunked else 0
    crossing = CrossAttention(dense.dense(), n_heads=1, d_qk=shape.d_model, d_v=shape.d_model)
    cycle = [
        block._replace(
            attention=dataclasses.replace(
                block.attention,
                attention_dropout=options.dropout,
                output_dropout=options.dropout,
            ),
            feed_forward=FeedForward(
                4 * shape.d_model, options.dropout, options.dropout, chunk_size=chunk_size
            ),
            cross_attention=crossing if options.cross else None,
        )
        for block in blocks(shape)
    ]
    named = options._asdict()
    kept = {name: named[name] for name in ("dtype", "scan_layers", "keep_ff_outputs")}
    return ReversibleStack(cycle, 4, exact=True, masked=options.cross, **kept)


def compile_differences(shape: Shape, options: Options) -> tuple[Any, Any]:
    """The parameters of a stack, and how many numbers of inputs are not rebuilt bit for bit."""
    stack, size = exact_stack(options, shape), (shape.batch, shape.length, shape.d_model)

    def init(rng):
        return stack.init_params(rng, size, size)

    def count(params, inputs, rng):
        x1, x2, memory = inputs
        ones = jnp.ones(size[:2], jnp.int32)
        others = (ones, memory, ones) if options.cross else ()
        pairs = zip(*stack.rebuild(params, x1, x2, *others, rng=rng), strict=True)
        return sum(jnp.sum(x.view(jnp.int32) != y.view(jnp.int32)) for x, y in pairs)

    inputs = jax.ShapeDtypeStruct((3, *size), jnp.float32)
    lowered = jax.jit(count).lower(jax.eval_shape(init, KEY), inputs, KEY)
    return jax.jit(init).lower(KEY).compile(), lowered.compile()


def differences(shape: Shape, n_seeds: int, programs: tuple[Any, Any]) -> int:
    """How many numbers are not rebuilt, over some seeds."""
    init, count = programs
    params, size = init(KEY), (3, shape.batch, shape.length, shape.d_model)
    rngs = [jax.random.fold_in(KEY, seed) for seed in range(n_seeds)]
    return sum(int(count(params, jax.random.normal(rng, size), rng)) for rng in rngs)


def print_differences(shape: Shape, n_seeds: int = 8) -> None:
    """Prints, by dtype and sublayers, how many numbers differ in all combinations of the others.

    Exits with an error if any does.
    """
    values = shape.dtypes, *[(False, True)] * 4, (0.0, DROPOUT)
    combinations = map(Options._make, itertools.product(*values))
    every = {x: x for x in combinations if shape.depths != SHAPES["tiny"].depths or all(x)}
    # None runs while others compile: loading cuDNN's attention disturbs what other threads run.
    programs = attempt_each(functools.partial(compile_differences, shape), every, COMPILERS)
    found = attempt_each(functools.partial(differences, shape, n_seeds), programs)
    columns = "dtype", "cross-attention", "combinations", "of seeds", "numbers that differ"
    table = Table(*columns, title="Exact stacks of 4 layers")
    for dtype, cross in itertools.product(shape.dtypes, (False, True)):
        counts = [n for x, n in found.items() if (x.dtype, x.cross) == (dtype, cross)]
        wrong = next((n for n in counts if isinstance(n, Exception)), None)
        total = reason(wrong) if wrong else f"{sum(counts):,}"
        table.row(dtype, str(cross), str(len(counts)), str(n_seeds), total)
    exit_if(str(options) for options, n in found.items() if n != 0)


def cost(model, length: int) -> str:
    """Temporary memory and compile time of a gradient."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(KEY, tokens.shape))

    def loss(params, tokens):
        log_probabilities = jax.nn.log_softmax(model.apply(params, tokens, KEY))
        return -jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1).mean()

    program = compiled(jax.jit(jax.grad(loss)).lower(params, tokens))
    return f"{program.temp_mib:.1f} MiB ({program.seconds:.1f} s)"


def print_drifts(shape: Shape) -> dict[str, Lines]:
    """Prints the errors by stack and depth, and returns them by kind, stack and depth."""
    table = Table("stack", "layers", *ERRORS)
    lines: dict[str, Lines] = {error: {} for error in ERRORS}
    for dtype in shape.dtypes:
        for exact in (False, True):
            stack = f"{dtype}, {'exact' if exact else 'plain'}"
            for n_layers in shape.depths:
                errors = drift(shape, n_layers, dtype, exact)
                table.row(stack, str(n_layers), *(f"{error:.2g}" for error in errors))
                for kind, error in zip(ERRORS, errors, strict=True):
                    # A logarithmic axis has no 0.
                    lines[kind].setdefault(stack, {})[n_layers] = max(error, 1e-10)
    return lines


def print_costs(shape: Shape) -> None:
    length, d_model = shape.cost_length, shape.cost_d_model
    columns = "ReformerLM", "ReformerLM, exact", f"ReformerLM, {N_SLOTS} slots", "TransformerLM"
    table = Table("layers", *columns, title="Temporary memory of the gradient (compile time)")
    for n_layers in shape.depths:
        options = dict(vocab_size=VOCAB_SIZE, d_model=d_model, d_ff=4 * d_model, n_heads=2)
        options |= dict(n_layers=n_layers, attention_type=attention_ops(length // 64))
        of_reformers = {}, dict(exact=True), dict(n_slots=N_SLOTS)
        built = [ReformerLM(**options, **own) for own in of_reformers] + [TransformerLM(**options)]
        table.row(str(n_layers), *(cost(model, length) for model in built))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot=Path("runs/reversible.png"))
    parser.add_argument(
        "--layers", type=command_line.positive, nargs="+", help="increasing even numbers"
    )
    parser.add_argument("--no_cost", action="store_true", help="only the first table")
    parser.add_argument(
        "--options", action="store_true", help="every combination of an exact stack's options"
    )
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    if args.options:
        print_differences(shape, *([1] if args.tiny else []))
        return
    shape = shape._replace(depths=tuple(args.layers or shape.depths))
    title = (
        f"{command_line.machine()}, {shape.batch} x {shape.length:,} tokens, d_model "
        f"{shape.d_model}; 1e-10 stands for 0"
    )
    plot(args.plot, print_drifts(shape), title, styles=STYLES, xlabel="layers")
    if not args.no_cost:
        print_costs(shape)


if __name__ == "__main__":
    main()

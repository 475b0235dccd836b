"""What a reversible stack's backward pass rebuilds, and what it costs, by depth.

    python -m benchmarks.reversible

prints two tables in Markdown and draws docs/reversible.png.

The first: how far the inputs rebuilt lie from the forward pass's, and the gradient of the
parameters from the one that keeps every activation (the same forward pass, differentiated by JAX),
with `exact=False` and `exact=True`, in layers of local and of LSH attention with dropout. Two
programs may round their products differently, as a GPU's do, and then gradients differ even where
nothing drifts. On a CPU the shapes are small; on a GPU, batch 2, length 1,024, width 512.

The second: temporary memory and compile time of the gradient of a ReformerLM and, for comparison,
of a TransformerLM with the same layers, which never run.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from reformax.layers import Attention, Block, FeedForward, ReversibleStack
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import local, lsh

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DEPTHS = (2, 4, 8, 12, 24)
DTYPES = ("float32", "bfloat16")
RNG = jax.random.PRNGKey(0)
MIB = 2**20


class Shape(NamedTuple):
    batch: int
    length: int
    d_model: int


SHAPES = {"cpu": Shape(1, 128, 64), "gpu": Shape(2, 1024, 512)}


class Drift(NamedTuple):
    """What one backward pass rebuilt of a stack's inputs."""

    n_layers: int
    dtype: str
    exact: bool
    error: float  # the largest difference of an input rebuilt
    n_differing: int  # how many of the inputs differ at all
    n_numbers: int
    gradient_error: float  # norm of the difference over the norm, of all parameters together


def cycle(ops: Sequence, d_model: int, dropout: float) -> list[Block]:
    return [
        Block(
            Attention(
                op,
                n_heads=max(1, d_model // 64),
                d_qk=min(64, d_model),
                d_v=min(64, d_model),
                causal=True,
                attention_dropout=dropout,
                output_dropout=dropout,
                use_rotary=True,
            ),
            FeedForward(4 * d_model, dropout, dropout),
        )
        for op in ops
    ]


def attention_ops(chunk_len: int) -> tuple:
    return local.local(chunk_len=chunk_len), lsh.lsh(chunk_len=chunk_len, n_hashes=2)


def drift(shape: Shape, n_layers: int, dtype: str, exact: bool) -> Drift:
    """Runs a stack forward and back, on inputs of unit variance."""
    blocks = cycle(attention_ops(min(64, shape.length // 8)), shape.d_model, dropout=0.1)
    stack = ReversibleStack(blocks, n_layers, dtype=dtype, exact=exact)
    params = jax.jit(lambda: stack.init_params(RNG, shape, shape))()
    # As large as training makes them: fresh ones are scaled down by the depth.
    for block in params.values():
        block["attention"]["w_o"] *= math.sqrt(2 * n_layers)
        block["feed_forward"]["w2"] *= math.sqrt(2 * n_layers)
    x1, x2 = jax.random.normal(jax.random.fold_in(RNG, 1), (2, *shape))
    direction = jax.random.normal(jax.random.fold_in(RNG, 2), (2, *shape))

    def gradient(run):
        def loss(params):
            return sum(map(jnp.vdot, direction, run(params, x1, x2)))

        return jax.jit(jax.grad(loss))(params)

    inputs, rebuilt = jax.jit(functools.partial(stack.rebuild, rng=RNG))(params, x1, x2)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(inputs, rebuilt, strict=True)]
    got, want = (
        gradient(functools.partial(run, rng=RNG)) for run in (stack.apply, stack.apply_keeping)
    )
    difference = jax.tree.map(jnp.subtract, got, want)
    return Drift(
        n_layers,
        dtype,
        exact,
        error=max(float(np.abs(x - y).max()) for x, y in pairs),
        n_differing=sum(int(np.count_nonzero(x != y)) for x, y in pairs),
        n_numbers=sum(x.size for x, _ in pairs),
        gradient_error=norm(difference) / norm(want),
    )


def norm(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
    )


def cost(model) -> tuple[float, float]:
    """Temporary memory in MiB and compile time in seconds of a gradient at length 4,096."""
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(RNG, tokens.shape))

    def loss(params, tokens):
        log_probabilities = jax.nn.log_softmax(model.apply(params, tokens, RNG))
        return -jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1).mean()

    lowered = jax.jit(jax.grad(loss)).lower(params, tokens)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return compiled.memory_analysis().temp_size_in_bytes / MIB, seconds


def costs(n_layers: int) -> dict[str, tuple[float, float]]:
    options = dict(
        vocab_size=256,
        d_model=128,
        d_ff=512,
        n_heads=2,
        n_layers=n_layers,
        attention_type=attention_ops(64),
    )
    return {
        "ReformerLM": cost(ReformerLM(**options)),
        "ReformerLM, exact": cost(ReformerLM(**options, exact=True)),
        "TransformerLM": cost(TransformerLM(**options)),
    }


def plot(drifts: Sequence[Drift], title: str, path: Path) -> None:
    """Drift and error of the gradient by depth, one line for each precision and kind of stack."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = {
        "largest error of a rebuilt input": lambda d: d.error,
        "relative error of the gradient": lambda d: d.gradient_error,
    }
    for axis, (label, value) in zip(axes, panels.items(), strict=True):
        # Lines at 0 lie on each other: the larger marks are seen around the smaller.
        for dtype, colour, size in zip(DTYPES, ("tab:blue", "tab:orange"), (9, 5), strict=True):
            for exact, style in ((False, "o--"), (True, "o-")):
                line = [d for d in drifts if (d.dtype, d.exact) == (dtype, exact)]
                name = f"{dtype}, {'exact' if exact else 'plain'}"
                x = [d.n_layers for d in line]
                axis.plot(x, [value(d) for d in line], style, ms=size, color=colour, label=name)
        # Logarithmic, with room at the bottom for an error of 0.
        axis.set_yscale("symlog", linthresh=1e-9)
        axis.set_ylim(bottom=-2e-10)
        axis.set_xticks([d.n_layers for d in drifts if d.dtype == DTYPES[0] and d.exact])
        axis.set_xlabel("layers")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, nargs="+", default=DEPTHS, help="increasing even numbers"
    )
    parser.add_argument("--no_cost", action="store_true", help="only the first table")
    parser.add_argument("--plot", type=Path, default=Path("docs/reversible.png"))
    args = parser.parse_args(argv)
    shape = SHAPES["cpu" if jax.default_backend() == "cpu" else "gpu"]

    title = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, batch {shape.batch}, "
    title += f"length {shape.length:,}, width {shape.d_model}"
    print(f"{title}\n")
    print("| layers | sublayers | stack | largest error | numbers that differ | gradient error |")
    print("| ---: | --- | --- | ---: | ---: | ---: |")
    drifts = []
    for dtype in DTYPES:
        for exact in (False, True):
            for n_layers in args.layers:
                d = drift(shape, n_layers, dtype, exact)
                drifts.append(d)
                print(
                    f"| {n_layers} | {dtype} | {'exact' if exact else 'plain'} | {d.error:.2g} | "
                    f"{d.n_differing:,} of {d.n_numbers:,} | {d.gradient_error:.2g} |",
                    flush=True,
                )
    plot(drifts, title, args.plot)
    if args.no_cost:
        return

    print("\nGradient at batch 1, length 4,096, width 128: temporary memory (compile time)\n")
    for i, n_layers in enumerate(args.layers):
        measured = costs(n_layers)
        if i == 0:
            print(f"| layers | {' | '.join(measured)} |")
            print(f"| ---: |{' ---: |' * len(measured)}")
        cells = " | ".join(f"{mib:.1f} MiB ({seconds:.1f} s)" for mib, seconds in measured.values())
        print(f"| {n_layers} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""A training step of a Transformer of 1.3 billion parameters in bfloat16 and with FP8 products.

    python -m benchmarks.float8

prints a table for each number of tokens a step. The model is a TransformerLM of 24 layers of 2,048
with flash attention and a vocabulary of 50,304, on rows of 4,096 random tokens, without dropout. A
step is forward, backward and AdamW, with layers unrolled and all activations kept. Steps of 65,536
tokens have four micro-batches. They take 48 GiB.

Rows are dtype="bfloat16", and dtype="float8" with scales found at once and delayed ones
(layers/float8.py). They take turns of ten steps in a row, each alone on the device, in one order
and then in the other. Times are medians of turns. A model whose first loss is not that of a guess
prints the reason.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from benchmarks.harness import command_line
from benchmarks.harness.calls import COMPILERS, attempt_each, exit_if
from benchmarks.harness.output import Table
from benchmarks.harness.training_step import Shape, TrainingStep
from reformax.models import TransformerLM
from reformax.ops import flash
from reformax.training import optimizer

BASELINE = "bfloat16"
ROWS = {
    BASELINE: dict(dtype="bfloat16"),
    "float8": dict(dtype="float8"),
    "float8, amax_history=16": dict(dtype="float8", amax_history=16),
}
LARGE = Shape(2048, 24, 16, batch=4, length=4096, vocab_size=50_304, masked=False)
TINY = Shape(32, 2, 2, batch=2, length=16, vocab_size=50, masked=False)
# Of a step, and its micro-batches.
STEPS = {
    "tiny": [(TINY, 1), (TINY._replace(batch=8), 4)],
    "gpu": [(LARGE, 1), (LARGE._replace(batch=16), 4)],
}
STEPS["cpu"] = STEPS["tiny"]


def model(shape: Shape, options: dict[str, Any]) -> TransformerLM:
    d_head = shape.d_model // shape.n_heads
    return TransformerLM(
        shape.vocab_size,
        d_model=shape.d_model,
        d_ff=4 * shape.d_model,
        d_attention_key=d_head,
        d_attention_value=d_head,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        attention_type=flash.flash(),
        dropout=0.0,
        remat_policy="all",
        scan_layers=False,
        **options,
    )


def training_step(shape: Shape, accumulate: int, options: dict[str, Any]) -> TrainingStep:
    """A step of a model with these options, in so many micro-batches."""
    adamw = optimizer.adamw(learning_rate=1e-4)
    return TrainingStep(model(shape, options), adamw, shape, accumulate)


Results = dict[str, TrainingStep | Exception]  # what failed is its exception


def measure(shape: Shape, accumulate: int, repeats: int) -> Results:
    """The rows' steps: traced one by one, compiled together, and run in turns."""
    results = attempt_each(functools.partial(training_step, shape, accumulate), ROWS)
    results = attempt_each(methodcaller("compile"), results, COMPILERS)
    results = attempt_each(lambda step: step.warm_up().release(), results)
    for turn in range(repeats):
        order = reversed(list(results)) if turn % 2 else list(results)
        turns = {name: results[name] for name in order}
        results |= attempt_each(lambda step: step.turn().release(), turns)
    return results


def print_table(results: Results, title: str) -> None:
    """Prints the results, with every row's speed relative to bfloat16's."""
    columns = "ms a step", "tokens/s", "TFLOP/s", "temp MiB", "speed / bfloat16's"
    table = Table("dtype", *columns, title=title)
    baseline = results[BASELINE]
    reference = math.nan if isinstance(baseline, Exception) else statistics.median(baseline.seconds)

    def cells(step: TrainingStep) -> list[str]:
        median = statistics.median(step.seconds)
        return [
            f"{median * 1e3:.1f}",
            *(f"{rate:,.0f}" for rate in step.shape.rates(median)),
            f"{step.program.temp_mib:,.0f}",
            f"{reference / median:.3f}",
        ]

    for name, known in results.items():
        table.result(name, known=known, cells=cells)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=4)
    text = "only the tables of so many tokens a step"
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help=text)
    args = parser.parse_args(argv)
    steps = {shape.tokens: (shape, n) for shape, n in command_line.of_size(STEPS, args.tiny)}
    if wrong := set(args.tokens or ()) - steps.keys():
        parser.error(f"--tokens has {wrong}: expected some of {set(steps)}")
    failed = []
    for tokens in args.tokens or steps:
        shape, accumulate = steps[tokens]
        results = measure(shape, accumulate, args.repeats)
        print_table(results, f"{shape}, micro-batches: {accumulate}")
        failed += [name for name, known in results.items() if isinstance(known, Exception)]
        del results  # the states of this table's rows, before those of the next
    exit_if(failed)


if __name__ == "__main__":
    main()

"""A training step of GPT-2 small and medium and of BERT large against PyTorch's of the same model.

    python -m benchmarks.published

A step is forward, backward and AdamW, on random tokens, in bfloat16. The models and AdamW's
settings are those of gpt2.gin, gpt2_medium.gin and bert_large.gin, at one rate and without
clipping; PyTorch's has SDPA, torch.compile, autocast and fused AdamW. BERT fills in 15% of its
tokens. `bert_large_padded` has dropout of 0.1, of attention weights too, and rows of 256 to 512
tokens, then padding; the others have neither, and PyTorch's no mask of it. The two run in turns,
ten steps in a row, each alone on the device, for a GPU's clock falls with heat. Times are medians.
A model whose first loss is not that of a guess prints the reason. --profile prints the kernels of
three more steps of ours and their times.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optax

from benchmarks.harness import command_line, kernels
from benchmarks.harness.calls import attempt
from benchmarks.harness.output import Table
from benchmarks.harness.processes import alone, answers_of, ask
from benchmarks.harness.training_step import IN_A_ROW, MASKED, Shape, TrainingStep
from reformax.cli import config, parsed
from reformax.training import loop
from reformax.training import optimizer as optimizers
from reformax.training.settings import build

TRACED = 3  # steps


class Row(NamedTuple):
    """What is measured."""

    config: str
    tiny: tuple[str, ...]  # settings that make a tiny model of it
    padded: bool = False  # with dropout


OF_GPT2 = "lm.TransformerLM.pos_axial_shape=(16,)", "lm.TransformerLM.first_token=0"
OF_BERT = ("encoder.TransformerMaskedLM.pos_axial_shape=(16,)",)
ROWS = {
    "gpt2": Row("gpt2", OF_GPT2),
    "gpt2_medium": Row("gpt2_medium", OF_GPT2),
    "bert_large": Row("bert_large", OF_BERT),
    "bert_large_padded": Row("bert_large", OF_BERT, padded=True),
}
# PyTorch's step has neither schedule nor clipping.
ALWAYS = "optimizer.adamw.learning_rate = %learning_rate", "optimizer.adamw.clip = None"
WHOLE = "dropout = 0.0", "attention_dropout = 0.0"
TINY = (
    *("vocab_size=50", "d_model=32", "d_ff=128", "d_head=16", "n_heads=2", "n_layers=2"),
    *("batch_size=4", "length=16"),
)
OVERRIDES = {"tiny": TINY, "cpu": TINY, "gpu": ()}


class Job(NamedTuple):
    """What is trained, from its config."""

    model: Any
    optimizer: optax.GradientTransformation
    shape: Shape
    adamw: dict[str, float]  # the optimizer's settings, for PyTorch


def from_config(name: str, overrides: Sequence[str]) -> Job:
    """The model and the optimizer of the row `name`."""
    row = ROWS[name]
    overrides = [*overrides, *(row.tiny if overrides else ()), *ALWAYS]
    config.parse([f"{row.config}.gin"], overrides if row.padded else [*overrides, *WHOLE])
    names = ("model", "optimizer", "batch_size", "length")
    found = parsed.bindings(loop.train, names)
    model = build(found["model"], "train")
    sizes = {x: getattr(model, x) for x in ("d_model", "n_layers", "n_heads", "vocab_size")}
    adamw = parsed.bindings(optimizers.adamw, ("learning_rate", "b2", "weight_decay"))
    sizes |= dict(masked=model.task_kind == "masked", padded=row.padded, dropout=model.dropout)
    shape = Shape(batch=found["batch_size"], length=found["length"], **sizes)
    return Job(model, found["optimizer"], shape, adamw)


def ours(job: Job, lock: Path, repeats: int, profile: bool) -> Iterator[float]:
    """Compiles a step, and gives its first loss; then seconds of a step, `repeats` times."""
    step = TrainingStep(job.model, job.optimizer, job.shape).compile()
    yield step.warm_up().first_loss
    for _ in range(repeats):
        with alone(lock):
            step.turn()
        yield step.seconds[-1]
        time.sleep(0.2)  # for the other to take its turn
    if profile:
        with alone(lock):
            found = kernels.of(lambda: step.take(TRACED))
        table = Table("kernel", "ms a step", "calls a step", title="ours, by kernel")
        for name, (ms, calls) in found.items():
            table.row(name, f"{ms / TRACED:.3f}", f"{calls / TRACED:.0f}")


def theirs(answers: Iterator[dict[str, Any]], shape: Shape) -> Iterator[float]:
    """The same of PyTorch."""
    for answer in answers_of(answers):
        first = answer.get("first_loss")
        yield answer["seconds"] if first is None else shape.checked(first)


def measure(job: Job, repeats: int, python: str, profile: bool) -> dict[str, Any]:
    """First loss and seconds of a step, or why there are none, by the model's name."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        sizes = job.shape._asdict() | dict(repeats=repeats, in_a_row=IN_A_ROW, lock=str(lock))
        sizes["masked"] = MASKED if job.shape.masked else None
        # Its process compiles while ours does.
        answers = ask(python, "peers.published_torch.train", **sizes, optimizer=job.adamw)
        runs = {
            "reformax": ours(job, lock, repeats, profile),
            "PyTorch, compiled": theirs(answers, job.shape),
        }
        # No turn is taken before both are compiled.
        with alone(lock):
            results = {name: attempt(next, run) for name, run in runs.items()}
        for name, first in results.items():
            if not isinstance(first, Exception):
                seconds = attempt(list, runs[name])
                results[name] = seconds if isinstance(seconds, Exception) else (first, *seconds)
        return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=3, peers="PyTorch's rows")
    parser.set_defaults(peers=sys.executable)
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these models")
    parser.add_argument("--profile", action="store_true", help="our kernels and their times")
    args = parser.parse_args(argv)
    columns = "first loss", "ms a step", "tokens/s", "TFLOP/s"
    overrides = command_line.of_size(OVERRIDES, args.tiny)
    for name in args.only or ROWS:
        job = from_config(name, overrides)
        found, shape = measure(job, args.repeats, args.peers, args.profile), job.shape
        table = Table("model", *columns, title=f"{name}, {shape}")

        def cells(known: tuple[float, ...], shape: Shape = shape) -> list[str]:
            first, *seconds = known
            median = statistics.median(seconds)
            rates = (f"{rate:,.0f}" for rate in shape.rates(median))
            return [f"{first:.3f}", f"{median * 1e3:.2f}", *rates]

        for model, known in found.items():
            table.result(model, known=known, cells=cells)


if __name__ == "__main__":
    main()

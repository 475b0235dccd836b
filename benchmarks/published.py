"""A training step of GPT-2 small and medium against PyTorch's of the same model.

    python -m benchmarks.published

A step is forward, backward and AdamW, on random tokens, in bfloat16 and without dropout. The models
are those of configs/gpt2.gin and configs/gpt2_medium.gin; PyTorch's has SDPA, torch.compile,
autocast and fused AdamW. The two run in turns, ten steps in a row, each alone on the device, for a
GPU's clock falls with heat. Times are medians. A model whose first loss is not that of a guess
prints the reason. --profile prints the kernels of three more steps of ours and their times.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import command_line, kernels
from benchmarks.harness.calls import PeerError, attempt
from benchmarks.harness.output import Table
from benchmarks.harness.processes import alone, ask
from reformax import devices
from reformax.models import TransformerLM
from reformax.ops import flash
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib

IN_A_ROW, TRACED = 10, 3  # steps
# AdamW's of both, as in configs/gpt2.gin.
OPTIMIZER = dict(learning_rate=6e-4, b2=0.95, weight_decay=0.1)


class Shape(NamedTuple):
    """A model, and the tokens of a step."""

    d_model: int
    n_layers: int
    n_heads: int
    batch: int
    length: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flop(self) -> int:
        """Operations of a step's products; causal attention counts half."""
        matrices = 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model
        attention = 6 * self.n_layers * self.d_model * self.length
        return self.tokens * (6 * matrices + attention)


GPT2 = {
    "gpt2": Shape(768, 12, 12, 32, 1024, 50_304),
    "gpt2_medium": Shape(1024, 24, 16, 16, 1024, 50_304),
}
TINY = {"gpt2": Shape(32, 2, 2, 2, 16, 50)}
SHAPES = {"tiny": TINY, "cpu": TINY, "gpu": GPT2}


def checked(loss: float, shape: Shape) -> float:
    """The first loss, in nats; `ArithmeticError` if it is not that of a guess."""
    guess = math.log(shape.vocab_size)
    if not abs(loss - guess) < 1:
        raise ArithmeticError(f"first loss {loss:.3f}, expected about {guess:.3f}")
    return loss


def ours(shape: Shape, lock: Path, repeats: int, profile: bool) -> Iterator[float]:
    """Compiles a step, and gives its first loss; then seconds of a step, `repeats` times."""
    d_head = shape.d_model // shape.n_heads
    model = TransformerLM(
        shape.vocab_size,
        d_model=shape.d_model,
        d_ff=4 * shape.d_model,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        d_attention_key=d_head,
        d_attention_value=d_head,
        attention_type=flash.flash(),
        attention_bias=True,
        pos_type="axial",
        pos_axial_shape=(shape.length,),
        pos_d_axial_embs=(shape.d_model,),
        ff_activation="gelu_tanh",
        norm_epsilon=1e-5,
        init_std=0.02,
        tie_embeddings=True,
        dropout=0.0,
        dtype="bfloat16",
        scan_layers=False,
    )
    mesh, size = mesh_lib.make({}, jax.devices()[:1]), (shape.batch, shape.length)
    optimizer, key = optax.adamw(**OPTIMIZER), jax.random.PRNGKey(0)
    init = step_lib.init_fn(model, optimizer, size, ema=False)
    state = jax.jit(init, out_shardings=devices.replicated(mesh))(key)
    tokens, targets = (
        jax.random.randint(k, size, 0, shape.vocab_size) for k in jax.random.split(key)
    )
    batch = jax.device_put((tokens, targets, jnp.ones(size)), devices.over_tokens(mesh))
    step = step_lib.step_fn(model, optimizer, mesh).lower(state, batch, key).compile()

    def take(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, metrics = step(state, batch, key)
        return float(jax.block_until_ready((metrics, state))[0]["nats"])

    yield checked(take(1), shape)
    for _ in range(repeats):
        with alone(lock):
            take(2)
            start = time.perf_counter()
            take(IN_A_ROW)
            seconds = (time.perf_counter() - start) / IN_A_ROW
        yield seconds
        time.sleep(0.2)  # for the other to take its turn
    if profile:
        with alone(lock), tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                take(TRACED)
            found = kernels.times(Path(folder))
        table = Table("kernel", "ms a step", "calls a step", title="ours, by kernel")
        for name, (ms, calls) in found.items():
            table.row(name, f"{ms / TRACED:.3f}", f"{calls / TRACED:.0f}")


def theirs(answers: Iterator[dict[str, Any]], shape: Shape) -> Iterator[float]:
    """The same of PyTorch."""
    for answer in answers:
        if "error" in answer:
            raise PeerError(answer["error"])
        first = answer.get("first_loss")
        yield answer["seconds"] if first is None else checked(first, shape)


def measure(shape: Shape, repeats: int, python: str, profile: bool) -> dict[str, Any]:
    """First loss and seconds of a step, or why there are none, by the model's name."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        sizes = shape._asdict() | dict(repeats=repeats, in_a_row=IN_A_ROW, lock=str(lock))
        # Its process compiles while ours does.
        answers = ask(python, "published_torch.train", **sizes, optimizer=OPTIMIZER)
        runs = {
            "reformax": ours(shape, lock, repeats, profile),
            "PyTorch, compiled": theirs(answers, shape),
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
    parser.add_argument("--only", nargs="+", choices=GPT2, help="these models")
    parser.add_argument("--profile", action="store_true", help="our kernels and their times")
    args = parser.parse_args(argv)
    columns = "first loss", "ms a step", "tokens/s", "TFLOP/s"
    for name, shape in command_line.of_size(SHAPES, args.tiny).items():
        if args.only and name not in args.only:
            continue
        found = measure(shape, args.repeats, args.peers, args.profile)
        table = Table("model", *columns, title=f"{name}, {shape}")

        def cells(known: tuple[float, ...], shape: Shape = shape) -> list[str]:
            first, *seconds = known
            median = statistics.median(seconds)
            rates = shape.tokens / median, shape.flop / median / 1e12
            return [f"{first:.3f}", f"{median * 1e3:.2f}", *(f"{rate:,.0f}" for rate in rates)]

        for model, known in found.items():
            table.result(model, known=known, cells=cells)


if __name__ == "__main__":
    main()

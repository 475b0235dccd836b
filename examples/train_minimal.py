"""Trains a language model on Python's standard library, from its data to a sample, in one page.

python examples/train_minimal.py --steps=300

`loop.train` does the same with checkpoints, a record and resuming: docs/training.md.
"""

import argparse
import math

import jax

from reformax.data import stdlib
from reformax.generation import generate
from reformax.models import TransformerLM
from reformax.ops import lsh
from reformax.training import evaluation, mesh, optimizer, step


def main(steps: int = 300, batch_size: int = 8, length: int = 256, d_model: int = 128) -> float:
    """Trains, evaluates and samples; returns the bits per byte of held-out text."""
    # Data: the batch of a step is a function of (seed, step).
    task = stdlib.stdlib(max_bytes=2_000_000)

    # Model: one set of weights; dropout in training, more hashes in evaluation.
    sizes = dict(d_model=d_model, d_ff=4 * d_model, n_heads=4, n_layers=2, dropout=0.1)
    model = TransformerLM(vocab_size=task.vocab_size, attention_type=lsh.lsh(n_hashes=2), **sizes)
    scorer = TransformerLM(
        vocab_size=task.vocab_size, attention_type=lsh.lsh(n_hashes=4), mode="eval", **sizes
    )
    params, bits = fit(model, scorer, task, steps, batch_size, length)

    # Sample.
    prompt = list(b"def ")
    found = generate(scorer, params, [prompt], 100, temperature=0.8)
    print(bytes([*prompt, *map(int, found[0])]).decode(errors="replace"))
    return bits


def fit(model, scorer, task, steps: int, batch_size: int, length: int) -> tuple[dict, float]:
    """Trains a model and evaluates it as `scorer`; returns its weights and bits per byte."""
    # Step: the loss, its gradient and the update as one compiled function of (state, batch, key).
    key = jax.random.PRNGKey(0)
    schedule = optimizer.cosine(max_value=3e-3, warmup_steps=steps // 10)
    adamw = optimizer.build(optimizer.adamw(schedule), steps)
    state = jax.jit(step.init_fn(model, adamw, (batch_size, length), ema=False))(key)
    train_step = step.step_fn(model, adamw, mesh.make())

    # Loop.
    for number in range(steps):
        batch = tuple(task.train_batch(0, number, batch_size, length))
        state, metrics = train_step(state, batch, key)
        if number % 20 == 0 or number == steps - 1:
            bits = float(metrics["nats"].mean) / math.log(2)
            print(f"step {number + 1}: {bits:.3f} bits per byte", flush=True)

    # Evaluation: each byte that is scored is predicted once.
    sizes = dict(batch_size=batch_size, length=length, max_tokens=16_384)
    score = evaluation.evaluate(scorer, state.params, task, "valid", **sizes)
    print(f"valid: {score['bits_per_byte']:.3f} bits per byte, accuracy {score['accuracy']:.3f}")
    return state.params, score["bits_per_byte"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)

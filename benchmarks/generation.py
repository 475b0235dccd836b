"""Tokens a second of cached generation, and of the alternatives.

    python -m benchmarks.generation

On a CPU: the quickstart's model at 4,096 tokens of context, a step of decoding against the forward
pass over all tokens that would give the same token without a cache. On a GPU: the Reformer paper's
12-layer enwik8 model at 16,384 tokens of context against Hugging Face's ReformerModelWithLMHead of
the same sizes, in the same process, where `transformers` and PyTorch are installed.

Weights are random, which changes no time. A rate is of all new tokens but the first, which reading
the prompt gives: the time of many new tokens less the time of few, after both have run once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import command_line, language_models
from benchmarks.harness.failures import attempt, reason
from benchmarks.harness.language_models import PAPER, QUICKSTART, TINY, VOCAB_SIZE
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.peers import generation_torch
from reformax import generation, models
from reformax.ops.parts import hashing

# The two kinds of LSH attention, the last of which is compared with peers.
LSH = {"strictly causal": dict(strictly_causal=True), "ordinary": {}}
PEER_NEW = 34  # new tokens of a peer
PEER_SECONDS = 240  # after which no peer starts


class Shape(NamedTuple):
    """A model, and the length of its texts."""

    context: int  # prompt and new tokens together
    n_new: int
    sizes: language_models.Sizes
    batches: tuple[int, ...] = (1,)
    dtype: str = "float32"
    axial: bool = False  # otherwise positions are rotary


SHAPES = {
    "tiny": Shape(64, 9, TINY),
    "cpu": Shape(4096, 256, QUICKSTART),
    "gpu": Shape(16_384, 256, PAPER, (1, 8), "bfloat16", axial=True),
}


def reformer(shape: Shape, **lsh_options: Any) -> tuple[models.LanguageModel, Any]:
    """The model for evaluation and its weights."""
    sizes = shape.sizes
    model = models.ReformerLM(
        **sizes.arguments(),
        **(sizes.axial(shape.context) if shape.axial else {}),
        attention_type=sizes.attention(**lsh_options),
        dtype=shape.dtype,
        mode="eval",
    )
    params = jax.jit(lambda key: model.init_params(key, (1, shape.context)))(jax.random.PRNGKey(0))
    return model, params


def prompts(shape: Shape, batch: int) -> np.ndarray:
    """Random bytes that the new tokens follow up to the end of the context."""
    size = (batch, shape.context - shape.n_new)
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, size, np.int32)


def calls(generate: Callable[[int], Any], counts: Sequence[int]) -> dict[int, Callable[[], Any]]:
    """`generate` for several numbers of new tokens."""
    return {n: functools.partial(generate, n) for n in counts}


def ours(shape: Shape, model, params, batch: int, repeats: int) -> tuple[float, float]:
    """Seconds of a step for all rows, and of the prompt and the first token."""
    text = prompts(shape, batch)
    generate = functools.partial(generation.generate, model, params, text, max_length=shape.context)
    few, many = in_turn(calls(generate, (1, shape.n_new)), repeats).values()
    return (many - few) / (shape.n_new - 1), few


def theirs(shape: Shape, dtype: str, batch: int, by_hand: bool) -> tuple[float, float]:
    """Hugging Face's times: of its `generate`, or of its cache in a loop of our own."""
    buckets = hashing.auto_buckets(shape.context, shape.sizes.lsh_chunk_len)
    positions = shape.sizes.axial(shape.context)
    config = generation_torch.config(shape.sizes, positions, buckets, VOCAB_SIZE)
    generate = generation_torch.generator(config, dtype, prompts(shape, batch), by_hand)
    few, many = in_turn(calls(generate, (2, PEER_NEW)), 1).values()
    return (many - few) / (PEER_NEW - 2), few


def forward(shape: Shape, model, params) -> Callable[[], Any]:
    """A forward pass over the whole context, padded, and the logits of one position."""

    @jax.jit
    def next_token(params, tokens, position):
        features = model.features(params, tokens, jax.random.PRNGKey(0))
        features = jax.lax.dynamic_slice_in_dim(features, position, 1, axis=1)
        return jnp.argmax(model.logits(params, features), axis=-1)

    text = np.pad(prompts(shape, 1), ((0, 0), (0, shape.n_new)))
    return lambda: np.asarray(next_token(params, text, shape.context - shape.n_new))


def against_the_forward(shape: Shape, repeats: int) -> None:
    """Prints the time of a step and of the forward pass over all tokens."""
    table = Table("LSH", "forward of all, ms", "step, ms", "ratio", "tokens/s")
    for name, options in LSH.items():
        model, params = reformer(shape, **options)
        generate = functools.partial(
            generation.generate, model, params, prompts(shape, 1), max_length=shape.context
        )
        functions = calls(generate, (1, shape.n_new)) | {"all": forward(shape, model, params)}
        few, many, whole = in_turn(functions, repeats).values()
        step = (many - few) / (shape.n_new - 1)
        row = f"{whole * 1e3:.1f}", f"{step * 1e3:.3f}", f"{whole / step:.0f}", f"{1 / step:.0f}"
        table.row(name, *row)


def against_peers(shape: Shape, repeats: int, peers: bool) -> None:
    """Prints the rates of reformax and of Hugging Face."""
    table = Table("model", "batch", "step, ms", "tokens/s", "prompt, s")
    steps: dict[int, float] = {}
    peer_steps: dict[int, list[float]] = {}

    def report(name: str, batch: int, measure: Callable[..., Any], *arguments: Any) -> float:
        known = attempt(measure, *arguments)
        if isinstance(known, Exception):
            table.row(name, str(batch), reason(known))
            return float("inf")
        step, prompt = known
        row = f"{step * 1e3:.3f}", f"{batch / step:,.0f}", f"{prompt:.2f}"
        table.row(name, str(batch), *row)
        return step

    for name, options in LSH.items():
        model, params = reformer(shape, **options)
        for batch in shape.batches:
            arguments = shape, model, params, batch, repeats
            steps[batch] = report(f"reformax, {name}", batch, ours, *arguments)
        del model, params
    deadline = time.monotonic() + PEER_SECONDS
    for dtype in dict.fromkeys((shape.dtype, "float32")) if peers else ():
        for by_hand in (False, True):
            for batch in shape.batches:
                name = f"Hugging Face, {dtype}, {'its cache by hand' if by_hand else 'generate'}"
                if time.monotonic() > deadline:
                    table.row(name, str(batch), "no time left")
                    continue
                step = report(name, batch, theirs, shape, dtype, batch, by_hand)
                peer_steps.setdefault(batch, []).append(step)
    for batch, found in peer_steps.items():
        print(f"\nbatch {batch}: {min(found) / steps[batch]:.1f} times their fastest")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5)
    parser.add_argument("--no_peers", action="store_true", help="leave Hugging Face's out")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    sizes = shape.sizes
    print(f"{command_line.machine()}, medians of {args.repeats}")
    print(f"context {shape.context:,} tokens, {sizes.n_layers} layers, d_model {sizes.d_model}")
    if shape.axial:
        against_peers(shape, args.repeats, not args.no_peers)
    else:
        against_the_forward(shape, args.repeats)


if __name__ == "__main__":
    main()

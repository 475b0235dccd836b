"""Tokens a second of cached generation, and of the ways around it.

    python -m benchmarks.generation

On a CPU: the quickstart's model at 4,096 tokens of context, a step of decoding beside the forward
over all tokens that would give the same token without a cache; then the time of 1 to 2,048 new
tokens. On a GPU: the Reformer paper's 12-layer enwik8 model at 16,384 tokens of context beside
Hugging Face's ReformerModelWithLMHead of the same sizes, in the same process, where `transformers`
and PyTorch are installed.

Weights are random, which changes no time. A rate is of the new tokens but the first, which reading
the prompt makes: the time of many new tokens less the time of few, after both have run once.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reformax import generation, models
from reformax.ops import local, lsh
from reformax.ops.parts import hashing

VOCAB_SIZE = 256
# The two kinds of LSH, the last of which is compared with peers.
LSH = {"strictly causal": dict(strictly_causal=True), "ordinary": {}}


class Shape(NamedTuple):
    """A model and how much text it is given and makes."""

    context: int  # prompt and new tokens together
    n_new: int
    batches: tuple[int, ...] = (1,)
    d_model: int = 128
    d_ff: int = 512
    n_heads: int = 4
    d_head: int = 32
    n_layers: int = 4
    cycle: tuple[str, ...] = ("local", "lsh")
    local_chunk_len: int = 64
    lsh_chunk_len: int = 64
    n_hashes: int = 2
    dtype: str = "float32"
    axial_shape: tuple[int, int] | None = None  # None: rotary positions


SHAPES = {
    "cpu": Shape(context=4096, n_new=256),
    "gpu": Shape(
        context=16_384,
        n_new=256,
        batches=(1, 8),
        d_model=1024,
        d_ff=4096,
        n_heads=8,
        d_head=128,
        n_layers=12,
        cycle=("local", "local", "lsh", "local"),
        local_chunk_len=128,
        dtype="bfloat16",
        axial_shape=(512, 128),
    ),
}


def reformer(shape: Shape, **lsh_options) -> tuple[models.LanguageModel, Any]:
    """The model for evaluation and its weights."""
    ops = {
        "local": local.local(chunk_len=shape.local_chunk_len),
        "lsh": lsh.lsh(chunk_len=shape.lsh_chunk_len, n_hashes=shape.n_hashes, **lsh_options),
    }
    quarter = shape.d_model // 4
    axial = dict(
        pos_type="axial",
        pos_axial_shape=shape.axial_shape,
        pos_d_axial_embs=(quarter, shape.d_model - quarter),
    )
    model = models.ReformerLM(
        vocab_size=VOCAB_SIZE,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        d_attention_key=shape.d_head,
        d_attention_value=shape.d_head,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        attention_type=tuple(ops[name] for name in shape.cycle),
        dtype=shape.dtype,
        mode="eval",
        **(axial if shape.axial_shape else {}),
    )
    params = jax.jit(lambda key: model.init_params(key, (1, shape.context)))(jax.random.PRNGKey(0))
    return model, params


def prompts(shape: Shape, batch: int, n_new: int | None = None) -> np.ndarray:
    """Random bytes that the new tokens follow up to the end of the context."""
    size = (batch, shape.context - (n_new or shape.n_new))
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, size, np.int32)


def in_turn(functions: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The median time of each, called in turn after a call that may compile.

    Whatever else the machine does then falls on all of them.
    """
    times = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def calls(generate: Callable[[int], Any], counts: Sequence[int]) -> dict[int, Callable[[], Any]]:
    """`generate` for several numbers of new tokens."""
    return {n: functools.partial(generate, n) for n in counts}


def generator(shape: Shape, model, params, text: np.ndarray) -> Callable[[int], Any]:
    """Generation by reformax, from a number of new tokens."""
    return functools.partial(generation.generate, model, params, text, max_length=shape.context)


def ours(shape: Shape, model, params, batch: int, repeats: int) -> tuple[float, float]:
    """The time of a step for all rows, and the time of the prompt and the first token."""
    generate = generator(shape, model, params, prompts(shape, batch))
    few, many = in_turn(calls(generate, (1, shape.n_new)), repeats).values()
    return (many - few) / (shape.n_new - 1), few


def forward(shape: Shape, model, params) -> Callable[[], Any]:
    """One forward over the whole context, padded, and the logits of one position."""

    @jax.jit
    def next_token(params, tokens, position):
        features = model.features(params, tokens, jax.random.PRNGKey(0))
        features = jax.lax.dynamic_slice_in_dim(features, position, 1, axis=1)
        return jnp.argmax(model.logits(params, features), axis=-1)

    text = np.pad(prompts(shape, 1), ((0, 0), (0, shape.n_new)))
    return lambda: np.asarray(next_token(params, text, shape.context - shape.n_new))


def on_cpu(shape: Shape, repeats: int) -> None:
    print(f"context {shape.context:,} tokens, {shape.n_layers} layers, d_model {shape.d_model}\n")
    print("| LSH | forward of all, ms | step, ms | ratio | tokens/s |\n| --- |" + " ---: |" * 4)
    for name, options in LSH.items():
        model, params = reformer(shape, **options)
        generate = generator(shape, model, params, prompts(shape, 1))
        functions = calls(generate, (1, shape.n_new)) | {"all": forward(shape, model, params)}
        few, many, whole = in_turn(functions, repeats).values()
        step = (many - few) / (shape.n_new - 1)
        row = f"{whole * 1e3:.1f} | {step * 1e3:.3f} | {whole / step:.0f} | {1 / step:.0f}"
        print(f"| {name} | {row} |", flush=True)
    counts = [n for n in (128, 256, 512, 1024, 2048) if n <= shape.context // 2]
    generate = generator(shape, model, params, prompts(shape, 1, shape.context // 2 + 1))
    prompt, *times = in_turn(calls(generate, (1, *(n + 1 for n in counts))), repeats).values()
    print("\n| new tokens | ms | us a token |\n| ---: | ---: | ---: |")
    for n, taken in zip(counts, times, strict=True):
        taken -= prompt
        print(f"| {n:,} | {taken * 1e3:.1f} | {taken / n * 1e6:.0f} |", flush=True)


def hugging_face(shape: Shape, dtype: str):
    """`ReformerModelWithLMHead` of the same sizes, on the device that PyTorch has."""
    import torch
    import transformers

    rows, columns = shape.axial_shape
    quarter = shape.d_model // 4
    config = transformers.ReformerConfig(
        attn_layers=list(shape.cycle) * (shape.n_layers // len(shape.cycle)),
        attention_head_size=shape.d_head,
        num_attention_heads=shape.n_heads,
        hidden_size=shape.d_model,
        feed_forward_size=shape.d_ff,
        axial_pos_embds_dim=(quarter, shape.d_model - quarter),
        axial_pos_shape=(rows, columns),
        max_position_embeddings=rows * columns,
        local_attn_chunk_length=shape.local_chunk_len,
        lsh_attn_chunk_length=shape.lsh_chunk_len,
        num_hashes=shape.n_hashes,
        num_buckets=list(hashing.auto_buckets(shape.context, shape.lsh_chunk_len)),
        vocab_size=VOCAB_SIZE,
        is_decoder=True,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.ReformerModelWithLMHead(config)
    return model.to(device, getattr(torch, dtype)).eval()


def theirs(shape: Shape, dtype: str, batch: int, by_hand: bool, n_many: int) -> tuple[float, float]:
    """What `ours` measures, of Hugging Face: its `generate`, or its cache and a loop of our own."""
    import torch

    model = hugging_face(shape, dtype)
    device = next(model.parameters()).device
    text = torch.as_tensor(prompts(shape, batch), dtype=torch.long, device=device)

    @torch.inference_mode()
    def generate(n):
        if not by_hand:
            out = model.generate(
                text, max_new_tokens=n, min_new_tokens=n, use_cache=True, do_sample=True, top_k=0
            )
            assert out.shape[1] == text.shape[1] + n
            return out.cpu()
        out = model(text, use_cache=True)
        for _ in range(n - 1):
            drawn = torch.multinomial(torch.softmax(out.logits[:, -1].float(), dim=-1), 1)
            cache = out.past_buckets_states
            out = model(drawn, past_buckets_states=cache, use_cache=True)
        return out.logits.cpu()

    few, many = in_turn(calls(generate, (2, n_many)), 1).values()
    return (many - few) / (n_many - 2), few


def on_gpu(shape: Shape, repeats: int, peers: bool, peer_new: int, peer_seconds: float) -> None:
    print(f"context {shape.context:,} tokens, {shape.n_layers} layers, d_model {shape.d_model}\n")
    print(
        "| model | batch | step, ms | tokens/s | prompt, s |\n| --- | ---: | ---: | ---: | ---: |"
    )

    def report(name, batch, measure, *arguments):
        try:
            step, prompt = measure(*arguments)
        except Exception as error:  # of any kind: the table has it, and the other rows
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].replace("|", "/")
            print(f"| {name} | {batch} | {reason} | - | - |", flush=True)
            return float("inf")
        row = f"{batch} | {step * 1e3:.3f} | {batch / step:,.0f} | {prompt:.2f}"
        print(f"| {name} | {row} |", flush=True)
        return step

    steps, peer_steps = {}, {}
    for name, options in LSH.items():
        model, params = reformer(shape, **options)
        for batch in shape.batches:
            steps[batch] = report(
                f"reformax, {name}", batch, ours, shape, model, params, batch, repeats
            )
        del model, params
    deadline = time.monotonic() + peer_seconds
    for dtype in dict.fromkeys((shape.dtype, "float32")) if peers else ():
        for by_hand in (False, True):
            for batch in shape.batches:
                name = f"Hugging Face, {dtype}, {'its cache by hand' if by_hand else 'generate'}"
                if time.monotonic() > deadline:
                    print(f"| {name} | {batch} | no time left | - | - |")
                    continue
                step = report(name, batch, theirs, shape, dtype, batch, by_hand, peer_new)
                peer_steps.setdefault(batch, []).append(step)
    for batch, theirs_here in peer_steps.items():
        print(f"\nbatch {batch}: {min(theirs_here) / steps[batch]:.1f} times their fastest")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no_peers", action="store_true", help="leave Hugging Face's out")
    parser.add_argument("--shape", choices=["cpu", "gpu"], help="default: the backend's")
    parser.add_argument("--context", type=int, help="another length of prompt and continuation")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer_new", type=int, default=34, help="new tokens of Hugging Face's")
    parser.add_argument(
        "--peer_seconds", type=float, default=240, help="no row of theirs starts after so long"
    )
    args = parser.parse_args(argv)
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    device = f"{os.cpu_count()} cores" if backend == "cpu" else jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, medians of {args.repeats}", flush=True)
    shape = SHAPES[args.shape or backend]
    shape = shape._replace(context=args.context or shape.context)
    if (args.shape or backend) == "cpu":
        on_cpu(shape, args.repeats)
    else:
        on_gpu(shape, args.repeats, not args.no_peers, args.peer_new, args.peer_seconds)


if __name__ == "__main__":
    main()

"""Which attentions look keys up: multi-query associative recall, against the size of their state.

    python -m benchmarks.associative_recall

trains two-layer language models on `reformax.data.associative_recall` with each attention and
prints, for each number of pairs, the share of values that it names (Arora et al. 2023, "Zoology",
section 4). The state is what decoding keeps of a row in a layer, once it has read the row. Of
several learning rates a model's best counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import command_line
from benchmarks.harness.output import Table, plot
from benchmarks.harness.training import train
from reformax.data.associative_recall import associative_recall
from reformax.models import TransformerLM
from reformax.ops import (
    flash,
    gated_delta,
    gated_linear,
    linear,
    local,
    long_short,
    lsh,
    performer,
    retention,
    shared_qk,
)
from reformax.training.evaluation import evaluate

N_LAYERS, N_HEADS, VOCAB_SIZE = 2, 2, 8192
N_PAIRS = (4, 8, 16, 32, 64)
WINDOW = 64


def attentions() -> dict[str, dict[str, Any]]:
    """The arguments of a model by the name of its attention.

    Linformer and Nystromformer are left out: they mix the future in, and cannot decode.
    """
    window = local.local(window=WINDOW, chunk_len=WINDOW, n_chunks_before=1)
    return {
        "flash": dict(attention_type=flash.flash()),
        "shared-QK": dict(attention_type=shared_qk.shared_qk()),
        f"local, window {WINDOW}": dict(attention_type=window),
        "LSH, 4 hashes": dict(attention_type=lsh.lsh(chunk_len=32, n_hashes=4)),
        "LSH, 1 hash": dict(attention_type=lsh.lsh(chunk_len=32, n_hashes=1)),
        "local and LSH": dict(attention_type=(window, lsh.lsh(chunk_len=32, n_hashes=4))),
        "linear": dict(attention_type=linear.linear()),
        "performer": dict(attention_type=performer.performer(n_features=128)),
        "retention": dict(attention_type=retention.retention()),
        "gated_linear": dict(attention_type=gated_linear.gated_linear()),
        "gated_delta": dict(attention_type=gated_delta.gated_delta()),
        "local and gated_delta": dict(attention_type=(window, gated_delta.gated_delta())),
        "long_short": dict(
            attention_type=long_short.long_short(window=WINDOW, chunk_len=WINDOW, rank=4)
        ),
    }


def build(options: Mapping[str, Any], d_model: int, length: int, mode: str) -> TransformerLM:
    """A language model with a learned embedding of each position."""
    return TransformerLM(
        vocab_size=VOCAB_SIZE,
        d_model=d_model,
        d_ff=2 * d_model,
        n_heads=N_HEADS,
        d_attention_key=d_model // N_HEADS,
        d_attention_value=d_model // N_HEADS,
        n_layers=N_LAYERS,
        dropout=0.0,
        pos_type="axial",
        pos_axial_shape=(length,),
        pos_d_axial_embs=(d_model,),
        mode=mode,
        **options,
    )


def state_bytes(model: TransformerLM, length: int) -> float:
    """The bytes that decoding keeps of a row in a layer, after `length - 1` tokens."""

    def read(tokens):
        rng = jax.random.key(0)
        params = model.init_params(rng, tokens.shape)
        _, decoding = model.prefill(params, tokens, jnp.full(1, length - 1), length, rng)
        return decoding.caches

    caches = jax.eval_shape(read, jnp.zeros((1, length - 1), jnp.int32))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) / N_LAYERS


def accuracies(
    builder: Any, steps: int, rates: Sequence[float], tasks: Mapping[int, Any], **sizes: int
) -> tuple[dict[int, float], float]:
    """The best model's accuracy by the number of pairs, and the seconds of a training."""
    found, start = [], time.perf_counter()
    mixed = associative_recall(sizes["length"], tuple(tasks), VOCAB_SIZE)
    model = builder(mode="eval")
    for rate in rates:
        params = train(builder, mixed, steps, rate, **sizes)
        found.append(
            {n: evaluate(model, params, task, **sizes)["accuracy"] for n, task in tasks.items()}
        )
    seconds = (time.perf_counter() - start) / len(rates)
    return max(found, key=lambda one: sum(one.values())), seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot=Path("docs/associative_recall.png"))
    for name, default in dict(length=512, batch_size=64, steps=2000).items():
        text = f"default: {default}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    rates, d_models = [1e-3, 3e-3], [64, 128]
    parser.add_argument("--learning_rate", type=float, nargs="+", default=rates)
    parser.add_argument("--d_model", type=command_line.positive, nargs="+", default=d_models)
    known = attentions()
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    args = parser.parse_args(argv)
    rows = {name: known[name] for name in args.only}
    n_pairs = N_PAIRS
    if args.tiny:
        args.length, args.batch_size, args.steps, args.d_model = 128, 2, 2, [8]
        args.learning_rate, n_pairs = [1e-3], (4, 8)
    n_eval = 4 if args.tiny else 256
    tasks = {
        n: associative_recall(args.length, (n,), VOCAB_SIZE, n_eval=n_eval)
        for n in n_pairs
        if 4 * n <= args.length
    }
    table = Table("attention", "d_model", "state, KiB", *(f"{n} pairs" for n in tasks), "seconds")
    most = max(tasks)
    lines: dict[str, dict[int, float]] = {}
    for name, options in rows.items():
        for d_model in args.d_model:
            builder = functools.partial(build, options, d_model, args.length)
            kib = state_bytes(builder(mode="eval"), args.length) / 1024
            sizes = dict(batch_size=args.batch_size, length=args.length)
            found, seconds = accuracies(builder, args.steps, args.learning_rate, tasks, **sizes)
            shares = (f"{100 * share:.1f}%" for share in found.values())
            table.row(name, str(d_model), f"{kib:.1f}", *shares, f"{seconds:.0f}")
            lines.setdefault(name, {})[round(kib)] = found[most]
    label = f"accuracy with {most} pairs in {args.length} tokens"
    axes = dict(yscale="linear", xlabel="state of a layer, KiB", ylim=(0, 1.02))
    plot(args.plot, {label: lines}, **axes)


if __name__ == "__main__":
    main()

"""Translation against its peers: sentences decoded a second, and tokens trained a second.

    python -m benchmarks.translation --sources=newstest2014.en

Decoding: the base Transformer against Hugging Face's MarianMTModel of the same sizes, both with
random weights. Of the sources only the lengths of the lines are read, as 4/3 tokens a word and an
end. Both get the same batches, of similar lengths, and write as many tokens for each sentence of a
batch as its longest source has and one. No time includes compilation.

Training (--step): a step of the same model, forward, backward and Adam, on rows packed with pairs
of those lengths, against the same model in PyTorch with SDPA and torch.compile: with the masks that
packing needs and, which is another function and less work, without. A time is the mean of ten steps
in a row. All times are medians.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import command_line
from benchmarks.harness.calls import PeerError, attempt, in_turn
from benchmarks.harness.output import Table
from benchmarks.harness.processes import ask
from reformax import generation, models
from reformax.data import files
from reformax.data.sentence_pairs import pack
from reformax.generation import translation
from reformax.models import packing
from reformax.ops import dense, flash
from reformax.training import mesh, step

IN_A_ROW = 10  # training steps


class Shape(NamedTuple):
    """The sizes of a run."""

    sizes: dict[str, int]
    sentences: int
    batch_tokens: int
    batch: int  # rows of a training step
    length: int  # of a row
    dtype: str


BASE = dict(vocab_size=32_000, d_model=512, d_ff=2048, n_heads=8, n_layers=6)
TINY = dict(vocab_size=50, d_model=8, d_ff=32, n_heads=2, n_layers=1)
SHAPES = {
    "tiny": Shape(TINY, 12, 64, 2, 32, "float32"),
    "cpu": Shape(BASE, 96, 512, 1, 256, "float32"),
    "gpu": Shape(BASE, 2737, 8192, 96, 256, "bfloat16"),
}


def ask_peer(python: str, function: str, **request: Any) -> dict[str, Any]:
    """The peer's answer; raises `PeerError` if it has none."""
    (answer,) = ask(python, f"peers.translation_torch.{function}", **request)
    if "error" in answer:
        raise PeerError(answer["error"])
    return answer


def lengths_of(path: str, n: int) -> list[int]:
    """Tokens of the file's first lines that are not blank."""
    lines = files.read_file(Path(path)).decode().split("\n")
    return [-(-4 * len(words) // 3) + 1 for line in lines if (words := line.split())][:n]


def model_and_params(sizes: dict[str, Any], attention, mode: str, **options):
    model = models.Transformer(
        input_vocab_size=sizes["vocab_size"],
        d_model=sizes["d_model"],
        d_ff=sizes["d_ff"],
        n_heads=sizes["n_heads"],
        n_encoder_layers=sizes["n_layers"],
        n_decoder_layers=sizes["n_layers"],
        post_norm=True,
        encoder_attention_type=attention,
        decoder_attention_type=attention,
        cross_attention_type=attention,
        mode=mode,
        **options,
    )
    return model, jax.jit(lambda key: model.init_params(key, (1, 8)))(jax.random.PRNGKey(0))


def decoding(shape: Shape, lengths: list[int], repeats: int, python: str) -> None:
    """Prints the rates of decoding, by the number of beams."""
    options = dict(attention_bias=True, dtype=shape.dtype)
    model, params = model_and_params(shape.sizes, dense.dense(), "eval", **options)
    params = generation.prepare(model, params)
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, shape.sizes["vocab_size"], n).tolist() for n in lengths]
    batches = []
    for sentences, _, _ in translation._batches(lengths, shape.batch_tokens):
        inside = [lengths[i] for i in sentences]
        batches.append((inside, max(inside) + 1))

    def ours(n_beams: int) -> float:
        def decode() -> None:
            options = dict(beam_size=n_beams, max_extra=1, batch_tokens=shape.batch_tokens)
            # No token ends a sentence: all go on to their limits.
            found = generation.translate(model, params, sources, **options, end=-1)
            assert [len(h.tokens) for h in found] == [n + 1 for n in lengths]

        (seconds,) = in_turn({"decode": decode}, repeats).values()
        return seconds

    def theirs(n_beams: int) -> float:
        request = dict(sizes=shape.sizes, dtype=shape.dtype, batches=batches, repeats=repeats)
        return ask_peer(python, "decode", **request, n_beams=n_beams)["seconds"]

    def cells(seconds: float) -> list[str]:
        return [f"{seconds:.2f}", f"{len(lengths) / seconds:.1f}"]

    title = f"{len(lengths):,} sentences of {np.mean(lengths):.1f} tokens, {len(batches)} batches"
    table = Table("model", "beam", "seconds", "sentences/s", title=title)
    for n_beams in (1, 4):
        for name, measure in (("reformax", ours), ("Hugging Face", theirs)):
            table.result(name, str(n_beams), known=attempt(measure, n_beams), cells=cells)


def packed_batch(sizes, lengths: list[int], batch: int, length: int) -> dict[str, np.ndarray]:
    """Rows packed with pairs; the lengths of each side are the file's, in another order."""
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.permutation(lengths) for _ in range(2)], axis=1)
    pairs = np.tile(pairs[(pairs < length).all(axis=1)], (1 + batch * length // sum(lengths), 1))
    rows = pack(pairs, np.arange(len(pairs)), length)
    parts = {}
    for side, name in enumerate(("source", "target")):
        segment_ids = np.zeros((batch, length), np.int32)
        for b in range(batch):
            inside = pairs[rows.items[rows.starts[b] : rows.starts[b + 1]], side]
            ids = np.repeat(1 + np.arange(len(inside)), inside)
            segment_ids[b, : len(ids)] = ids
        tokens = rng.integers(3, sizes["vocab_size"], segment_ids.shape, np.int32)
        parts[name] = np.where(segment_ids > 0, tokens, 0)
        parts[f"{name}_segment_ids"] = segment_ids
        parts[f"{name}_positions"] = np.asarray(packing.segment_positions(segment_ids))
    parts["shifted"] = np.asarray(packing.shift_right(parts["target"], parts["target_segment_ids"]))
    return parts


def stepper(sizes, parts: dict[str, np.ndarray], scan_layers: bool) -> Callable[[int], float]:
    """A function that takes some steps in a row and gives the loss before the last."""
    names = ("source", "target", "source_segment_ids", "target_segment_ids")
    inputs = tuple(jnp.asarray(parts[name]) for name in names)
    batch = (inputs, inputs[1], (inputs[3] > 0).astype(jnp.float32))
    options = dict(dtype=sizes["dtype"], dropout=sizes["dropout"], ff_dropout=0.0)
    model, params = model_and_params(
        sizes, flash.flash(), "train", scan_layers=scan_layers, **options
    )
    optimizer, smoothing = optax.adam(1e-4), sizes["label_smoothing"]
    run = step.step_fn(model, optimizer, mesh.make(), label_smoothing=smoothing)
    state = step.TrainState(jnp.int32(0), params, optimizer.init(params), None)

    def take(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, metrics = run(state, batch, jax.random.PRNGKey(0))
        return float(jax.block_until_ready(metrics)["nats"].mean)

    return take


def training(shape: Shape, lengths: list[int], repeats: int, python: str) -> None:
    """Prints the times of a training step."""
    sizes = shape.sizes | dict(dropout=0.1, label_smoothing=0.1, dtype=shape.dtype)
    parts = packed_batch(sizes, lengths, shape.batch, shape.length)
    n_tokens = int((parts["target_segment_ids"] > 0).sum())
    size = f"{shape.batch} x {shape.length} positions on either side"
    title = f"{size}, {n_tokens:,} target tokens, {shape.dtype}"
    table = Table("model", "first loss", "ms a step", "target tokens/s", title=title)

    def cells(known: dict[str, float]) -> list[str]:
        first, seconds = known["first_loss"], known["seconds"]
        return [f"{first:.3f}", f"{seconds * 1e3:.1f}", f"{n_tokens / seconds:,.0f}"]

    def row(name: str, measure: Callable[..., dict[str, float]], **options: bool) -> None:
        known = attempt(functools.partial(measure, **options))
        table.result(name, known=known, cells=cells)

    def ours(scan_layers: bool) -> dict[str, float]:
        take = stepper(sizes, parts, scan_layers)
        first = take(1)
        (seconds,) = in_turn({"take": lambda: take(IN_A_ROW)}, repeats).values()
        return dict(first_loss=first, seconds=seconds / IN_A_ROW)

    row("reformax, layers written out", ours, scan_layers=False)
    row("reformax, layers in a loop", ours, scan_layers=True)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "batch.npz")
        np.savez(path, **parts)
        request = dict(sizes=sizes, path=path, repeats=repeats, in_a_row=IN_A_ROW)
        theirs = functools.partial(ask_peer, python, "train", **request)
        row("PyTorch, masks", theirs, masked=True)
        row("PyTorch, no masks, another function", theirs, masked=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=3, peers="PyTorch's rows")
    parser.set_defaults(peers=sys.executable)
    positive = command_line.positive
    parser.add_argument("--sources", required=True, help="a text file whose lengths are taken")
    parser.add_argument(
        "--sentences", type=positive, help="of the file; instead of the usual number"
    )
    parser.add_argument("--batch_tokens", type=positive, help="source tokens in a batch")
    parser.add_argument("--step", action="store_true", help="a training step instead of decoding")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(batch_tokens=args.batch_tokens or shape.batch_tokens)
    lengths = lengths_of(args.sources, args.sentences or shape.sentences)
    run = training if args.step else decoding
    run(shape, lengths, args.repeats, args.peers)


if __name__ == "__main__":
    main()

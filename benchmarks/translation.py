"""Translation against its peers: sentences decoded a second, and tokens trained a second.

    python -m benchmarks.translation --sources=newstest2014.en

Decoding: the base Transformer, 6 + 6 layers and 32,000 tokens, against Hugging Face's MarianMTModel
of the same sizes, both with random weights. Of the sources only the lengths of the lines are read,
as 4/3 tokens a word and an end. Both get the same batches, of similar lengths, and write as many
tokens for each sentence of a batch as its longest source has and one. No time includes compilation.

Training (--step): a step of the same model, forward, backward and Adam, with label smoothing,
dropout 0.1 and rows packed with pairs of those lengths, against the same model in PyTorch with SDPA
and torch.compile: with the masks that packing needs and, which is another function and less work,
without. A time is the mean of ten steps in a row.

Peers run in a process of their own. In decoding they and reformax take turns. Times are medians.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import command_line
from benchmarks.harness.failures import PeerError, attempt, reason
from benchmarks.harness.processes import Peers
from benchmarks.harness.table import Table
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
SHAPES = {
    "tiny": Shape(
        dict(vocab_size=50, d_model=8, d_ff=32, n_heads=2, n_layers=1), 12, 64, 2, 32, "float32"
    ),
    "cpu": Shape(BASE, 96, 512, 1, 256, "float32"),
    "gpu": Shape(BASE, 2737, 8192, 96, 256, "bfloat16"),
}


def ask(peers: Peers | None, what: str, **request: Any) -> dict[str, Any]:
    """The peers' answer to a request; `error` in it says what went wrong."""
    if peers is None:
        return {"error": "left out"}
    (answer,) = peers.ask(what=what, **request)
    return answer


def lengths_of(path: str, n: int) -> list[int]:
    """Tokens of the file's first lines that are not blank."""
    lines = files.read_file(Path(path)).decode().split("\n")
    return [-(-4 * len(words) // 3) + 1 for line in lines if (words := line.split())][:n]


def model_and_params(sizes: dict[str, Any], mode: str, attention=None, **options):
    attention = attention or dense.dense()
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


def decoding(shape: Shape, lengths: list[int], repeats: int, peers: Peers | None) -> None:
    """Prints the rates of decoding for one beam and for four."""
    model, params = model_and_params(shape.sizes, "eval", attention_bias=True, dtype=shape.dtype)
    params = generation.prepare(model, params)
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, shape.sizes["vocab_size"], n).tolist() for n in lengths]
    batches = []
    for sentences, _, _ in translation._batches(lengths, shape.batch_tokens):
        inside = [lengths[i] for i in sentences]
        batches.append((inside, max(inside) + 1))
    request = dict(sizes=shape.sizes, dtype=shape.dtype)
    n = len(lengths)
    columns = "beam", "reformax, s", "sentences/s", "Hugging Face, s", "sentences/s", "ratio"
    title = (
        f"{n:,} sentences of {sum(lengths) / n:.1f} tokens in {len(batches)} batches of up to "
        f"{shape.batch_tokens} tokens, {shape.dtype}"
    )
    table = Table(*columns, title=title)

    def ours(n_beams: int) -> float:
        start = time.perf_counter()
        found = generation.translate(
            model,
            params,
            sources,
            beam_size=n_beams,
            max_extra=1,
            batch_tokens=shape.batch_tokens,
            end=-1,  # no token: all go on to their limits
        )
        seconds = time.perf_counter() - start
        assert [len(h.tokens) for h in found] == [n + 1 for n in lengths]
        return seconds

    for n_beams in (1, 4):
        ours(n_beams)
        answer = ask(peers, "decode", **request, n_beams=n_beams, batches=batches[:1])
        times, peer_times = [], []
        for _ in range(repeats):
            times.append(ours(n_beams))
            if "error" not in answer:
                answer = ask(peers, "decode", **request, n_beams=n_beams, batches=batches)
            peer_times.append(answer.get("seconds", math.nan))
        one, other = (statistics.median(x) for x in (times, peer_times))
        peer = [f"{other:.2f}", f"{n / other:.1f}", f"{other / one:.2f}"]
        if "error" in answer:
            peer = [answer["error"]]
        table.row(str(n_beams), f"{one:.2f}", f"{n / one:.1f}", *peer)


def packed_batch(sizes, lengths: list[int], batch: int, length: int) -> dict[str, np.ndarray]:
    """Rows packed with pairs; the lengths of each side are the file's, in another order."""
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.permutation(lengths) for _ in range(2)], axis=1)
    pairs = np.tile(pairs[(pairs < length).all(axis=1)], (1 + batch * length // sum(lengths), 1))
    rows = pack(pairs, np.arange(len(pairs)), length)
    parts = {}
    for side, name in enumerate(("source", "target")):
        segments = np.zeros((batch, length), np.int32)
        for b in range(batch):
            inside = pairs[rows.pairs[rows.starts[b] : rows.starts[b + 1]], side]
            ids = np.repeat(1 + np.arange(len(inside)), inside)
            segments[b, : len(ids)] = ids
        tokens = rng.integers(3, sizes["vocab_size"], segments.shape, np.int32)
        parts[name] = np.where(segments > 0, tokens, 0)
        parts[f"{name}_segments"] = segments
        parts[f"{name}_positions"] = np.asarray(packing.segment_positions(segments))
    parts["shifted"] = np.asarray(packing.shift_right(parts["target"], parts["target_segments"]))
    return parts


def our_steps(sizes, parts, dtype: str) -> dict[str, Callable[[int], float]]:
    """By name, a function that takes some steps in a row and gives the loss before the last."""
    names = ("source", "target", "source_segments", "target_segments")
    inputs = tuple(jnp.asarray(parts[name]) for name in names)
    batch = (inputs, inputs[1], (inputs[3] > 0).astype(jnp.float32))
    steps = {}
    for name, scan_layers in (("layers written out", False), ("layers in a loop", True)):
        model, params = model_and_params(
            sizes,
            "train",
            flash.flash(),
            dtype=dtype,
            dropout=sizes["dropout"],
            ff_dropout=0.0,
            scan_layers=scan_layers,
        )
        optimizer = optax.adam(1e-4)
        run = step.step_fn(
            model, optimizer, mesh.data_mesh(), label_smoothing=sizes["label_smoothing"]
        )
        state = step.State(jnp.int32(0), params, optimizer.init(params), None)

        def take(n, run=run, box=[state]) -> float:  # noqa: B006
            for _ in range(n):
                box[0], metrics = run(box[0], batch, jax.random.PRNGKey(0))
            return float(jax.block_until_ready(metrics)["nats"])

        steps[name] = take
    return steps


def training(shape: Shape, lengths: list[int], repeats: int, peers: Peers | None) -> None:
    """Prints the times of a training step."""
    sizes = shape.sizes | dict(dropout=0.1, label_smoothing=0.1, dtype=shape.dtype)
    parts = packed_batch(sizes, lengths, shape.batch, shape.length)
    n_tokens = int((parts["target_segments"] > 0).sum())
    size = f"{shape.batch} x {shape.length} positions on either side"
    title = f"{size}, {n_tokens:,} target tokens, {shape.dtype}"
    table = Table("model", "first loss", "ms a step", "target tokens/s", title=title)

    def row(name: str, known: tuple[float, float] | Exception) -> None:
        if isinstance(known, Exception):
            table.row(name, reason(known))
            return
        first, seconds = known
        table.row(name, f"{first:.3f}", f"{seconds * 1e3:.1f}", f"{n_tokens / seconds:,.0f}")

    def timed(take: Callable[[int], float]) -> float:
        start = time.perf_counter()
        take(IN_A_ROW)
        return (time.perf_counter() - start) / IN_A_ROW

    def measure(take: Callable[[int], float]) -> tuple[float, float]:
        first = [take(1) for _ in range(3)][0]
        return first, statistics.median(timed(take) for _ in range(repeats))

    ours, theirs = [], []
    for name, take in our_steps(sizes, parts, shape.dtype).items():
        ours.append(attempt(measure, take))
        row(f"reformax, {name}", ours[-1])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "batch.npz")
        np.savez(path, **parts)
        request = dict(sizes=sizes, path=path, repeats=repeats, in_a_row=IN_A_ROW)
        for name, masked in (("masks", True), ("no masks, another function", False)):
            if peers is not None:
                answer = ask(peers, "train", **request, masked=masked)
                failed = "error" in answer
                theirs.append(
                    PeerError(answer["error"])
                    if failed
                    else (answer["first_loss"], answer["seconds"])
                )
                row(f"PyTorch, {name}", theirs[-1])
    times = [known[1] for known in ours if not isinstance(known, Exception)]
    if times and theirs and not isinstance(theirs[0], Exception):
        print(f"\n{theirs[0][1] / min(times):.2f} times PyTorch's speed, with masks")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=3)
    positive = command_line.positive
    parser.add_argument("--sources", required=True, help="a text file whose lengths are taken")
    parser.add_argument(
        "--sentences", type=positive, help="of the file; instead of the usual number"
    )
    parser.add_argument("--batch_tokens", type=positive, help="source tokens in a batch")
    parser.add_argument("--step", action="store_true", help="a training step instead of decoding")
    parser.add_argument("--peer_python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument("--no_peers", action="store_true", help="leave PyTorch's out")
    args = parser.parse_args(argv)
    shape = command_line.of_size(SHAPES, args.tiny)
    shape = shape._replace(batch_tokens=args.batch_tokens or shape.batch_tokens)
    lengths = lengths_of(args.sources, args.sentences or shape.sentences)
    peers = None
    if not args.no_peers:
        peers = Peers("benchmarks.peers.translation_torch", args.peer_python)
    versions = ask(peers, "versions")
    print(f"{command_line.machine()}, {versions}, medians of {args.repeats}", flush=True)
    run = training if args.step else decoding
    try:
        run(shape, lengths, args.repeats, peers)
    finally:
        if peers is not None:
            peers.close()


if __name__ == "__main__":
    main()

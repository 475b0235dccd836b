"""Translation beside its peers: sentences decoded a second, and tokens trained a second.

    python -m benchmarks.translation --sources=newstest2014.en

Decoding: the base Transformer, 6 + 6 layers and 32,000 tokens, beside Hugging Face's MarianMTModel
of the same sizes, both with random weights. Only the lines' lengths are read, 4/3 tokens a word and
an end. Both get the same batches, of like lengths, and write in each as many tokens as its longest
source has and one, whatever they come up with; no time is that of compilation. A last row has
Hugging Face's batches in the order of the file instead, as `generate` is called where nobody sorts.

Training (--step): a step of the same model, forward, backward and Adam, with label smoothing,
dropout 0.1 and rows packed with pairs of those lengths, beside the same model in PyTorch with SDPA
and torch.compile, with the masks that packing needs and, which computes something else and less,
without any. A time is that of ten steps in a row, as training has them, by ten.

Peers run in a process of their own, by this Python or that of --peer_python. They and reformax take
turns; times are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.measuring import reason
from reformax import generation, models
from reformax.data import files
from reformax.data.sentence_pairs import pack
from reformax.generation import translation
from reformax.models import packing
from reformax.ops import dense, flash
from reformax.training import mesh, step

IN_A_ROW = 10  # training steps
SIZES = dict(vocab_size=32_000, d_model=512, d_ff=2048, n_heads=8, n_layers=6)


class Peers:
    """The process of `benchmarks.translation_torch`."""

    def __init__(self, python: str):
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.translation_torch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )

    def ask(self, what: str, **request) -> dict[str, Any]:
        """The answer to a request; `error` in it says what went wrong."""
        try:
            print(json.dumps({"what": what, **request}), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            return {"error": f"the process ended: {reason(error)}"}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


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


def decoding(sizes, lengths: list[int], dtype: str, batch_tokens: int, repeats: int, peers) -> None:
    model, params = model_and_params(sizes, "eval", attention_bias=True, dtype=dtype)
    params = generation.prepare(model, params)
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, sizes["vocab_size"], n).tolist() for n in lengths]
    batches = []
    for rows, _, _ in translation._batches(lengths, batch_tokens):
        inside = [lengths[i] for i in rows]
        batches.append((inside, max(inside) + 1))
    n_rows = -(-len(lengths) // len(batches))
    unsorted = [lengths[i : i + n_rows] for i in range(0, len(lengths), n_rows)]
    unsorted = [(inside, max(inside) + 1) for inside in unsorted]
    request = dict(sizes=sizes, dtype=dtype)
    print(
        f"\n{len(lengths):,} sentences of {sum(lengths) / len(lengths):.1f} tokens in "
        f"{len(batches)} batches of up to {batch_tokens} tokens, {dtype}\n\n"
        "| beam | reformax, s | sentences/s | Hugging Face, s | sentences/s | ratio |\n"
        "| ---: |" + " ---: |" * 5
    )

    def ours(n_beams):
        start = time.perf_counter()
        found = generation.translate(
            model,
            params,
            sources,
            beam_size=n_beams,
            max_extra=1,
            batch_tokens=batch_tokens,
            end=-1,  # no token: all go on to their limits
        )
        taken = time.perf_counter() - start
        assert [len(h.tokens) for h in found] == [n + 1 for n in lengths]
        return taken

    def theirs(n_beams, batches):
        if peers is None:
            return {"error": "left out"}
        return peers.ask("decode", **request, n_beams=n_beams, batches=batches)

    for n_beams, name, given in (
        (1, "1", batches),
        (4, "4", batches),
        (4, "4, in the file's order", unsorted),
    ):
        ours(n_beams)
        error = theirs(n_beams, given[:1]).get("error")
        times, peer_times = [], []
        for _ in range(repeats):
            times.append(ours(n_beams))
            answer = theirs(n_beams, given) if error is None else {}
            error = error or answer.get("error")
            peer_times.append(answer.get("seconds", math.nan))
        one, other = (statistics.median(x) for x in (times, peer_times))
        n = len(lengths)
        peer = f"{other:.2f} | {n / other:.1f} | {other / one:.2f}" if not error else f"{error} | |"
        print(f"| {name} | {one:.2f} | {n / one:.1f} | {peer} |", flush=True)


def packed_batch(sizes, lengths: list[int], batch: int, length: int) -> dict[str, np.ndarray]:
    """Rows of pairs whose sides have lengths of the file's, one of them each."""
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


def training(sizes, lengths, dtype: str, batch: int, length: int, repeats: int, peers) -> None:
    sizes = sizes | dict(dropout=0.1, label_smoothing=0.1, dtype=dtype)
    parts = packed_batch(sizes, lengths, batch, length)
    n_tokens = int((parts["target_segments"] > 0).sum())
    print(
        f"\n{batch} x {length} positions on either side, {n_tokens:,} target tokens, {dtype}\n\n"
        "| model | first loss | ms a step | target tokens/s |\n| --- |" + " ---: |" * 3
    )

    def row(name, first, seconds):
        cells = f"{first:.3f} | {seconds * 1e3:.1f} | {n_tokens / seconds:,.0f}"
        print(f"| {name} | {cells} |", flush=True)
        return seconds

    def timed(take):
        start = time.perf_counter()
        take(IN_A_ROW)
        return (time.perf_counter() - start) / IN_A_ROW

    ours, theirs, steps = [], [], our_steps(sizes, parts, dtype)

    def rows_of_ours(turn: str = "") -> None:
        for name, take in steps.items():
            try:
                first = [take(1) for _ in range(3)][0]
                times = [timed(take) for _ in range(repeats)]
                ours.append(row(f"reformax, {name}{turn}", first, statistics.median(times)))
            except Exception as error:  # of any kind: the table has it, and the other rows
                print(f"| reformax, {name} | {reason(error)} | | |", flush=True)

    def row_of_theirs(name: str, masked: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "batch.npz")
            np.savez(path, **parts)
            options = dict(sizes=sizes, masked=masked, path=path)
            answer = peers.ask("train", **options, repeats=repeats, in_a_row=IN_A_ROW)
        if "error" in answer:
            print(f"| PyTorch, {name} | {answer['error']} | | |", flush=True)
            return
        taken = row(f"PyTorch, {name}", answer["first_loss"], answer["seconds"])
        theirs.extend([taken] if masked else [])

    rows_of_ours()
    if peers is not None:
        row_of_theirs("masks", masked=True)
        rows_of_ours(", again")
        row_of_theirs("no masks, another function", masked=False)
    if ours and theirs:
        print(f"\n{min(theirs) / min(ours):.2f} times PyTorch's speed, with masks")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    parser.add_argument("--sources", required=True, help="a text file whose lengths are taken")
    parser.add_argument("--sentences", type=int, default=96 if backend == "cpu" else 2737)
    parser.add_argument("--batch_tokens", type=int, default=512 if backend == "cpu" else 8192)
    parser.add_argument("--step", action="store_true", help="a training step instead of decoding")
    parser.add_argument("--batch", type=int, default=1 if backend == "cpu" else 96)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", default="float32" if backend == "cpu" else "bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--d_model", type=int, default=512, help="with d_ff 4 times it")
    parser.add_argument("--n_layers", type=int, default=6)
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--no_peers", action="store_true", help="leave PyTorch's out")
    args = parser.parse_args(argv)
    sizes = SIZES | dict(d_model=args.d_model, d_ff=4 * args.d_model, n_layers=args.n_layers)
    lengths = lengths_of(args.sources, args.sentences)
    device = f"{os.cpu_count()} cores" if backend == "cpu" else jax.devices()[0].device_kind
    peers = None if args.no_peers else Peers(args.peer_python)
    versions = {} if peers is None else peers.ask("versions")
    print(f"{device}, jax {jax.__version__}, {versions}, medians of {args.repeats}", flush=True)
    try:
        if args.step:
            size = args.batch, args.length
            training(sizes, lengths, args.dtype, *size, args.repeats, peers)
        else:
            options = args.dtype, args.batch_tokens, args.repeats
            decoding(sizes, lengths, *options, peers)
    finally:
        if peers is not None:
            peers.close()


if __name__ == "__main__":
    main()

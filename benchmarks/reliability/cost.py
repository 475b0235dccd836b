"""What being safe costs: the time of a step, and of a save by its parts.

    python -m benchmarks.reliability cost

A save of parameters and two moments, 200 MB in all, by the seconds in flushing to the disk (fsync)
and in all else; and the time of a step of `run.gin`'s model in a loop that writes a line each step.
The file runs in an older checkout too, to compare with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from benchmarks.harness.output import Table
from reformax.data import text
from reformax.models import lm
from reformax.ops import local, lsh
from reformax.training import loop
from reformax.training.checkpoint import Checkpoints

MB, N_TENSORS = 200, 60
STEPS, LENGTH, BATCH_SIZE = 400, 64, 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=5, help="saves, and runs of steps")
    parser.add_argument("--seed", type=int, default=0, help="of the tensors")
    args = parser.parse_args(argv)
    saves = [save_seconds(args.seed) for _ in range(args.cases)]
    steps = [step_ms() for _ in range(args.cases)]
    table = Table("", "median", "least", "most", title="Cost")
    for name, values in {
        f"save of {MB} MB, without our fsync, s": [total - synced for total, synced in saves],
        "our fsync, s": [synced for _, synced in saves],
        "step, ms": steps,
    }.items():
        cells = statistics.median(values), min(values), max(values)
        table.row(name, *(f"{value:.2f}" for value in cells))
    return 0


def save_seconds(seed: int) -> tuple[float, float]:
    """The seconds of a save, and of those that Python spent in fsync."""
    rng = np.random.default_rng(seed)
    size = MB * 1_000_000 // 4 // N_TENSORS
    state = {f"tensor{i}": rng.normal(size=size).astype(np.float32) for i in range(N_TENSORS)}
    synced, fsync = 0.0, os.fsync

    def timed(fd: int) -> None:
        nonlocal synced
        begin = time.perf_counter()
        fsync(fd)
        synced += time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as folder:
        os.sync()  # what was written before is not ours
        os.fsync = timed
        try:
            checkpoints, begin = Checkpoints(folder), time.perf_counter()
            checkpoints.save(1, {"params": state})
            checkpoints.wait()
            return time.perf_counter() - begin, synced
        finally:
            os.fsync = fsync


def step_ms() -> float:
    """The time of a step in the loop, without compilation: the median of the record's lines."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text"
        data.write_text("a few words of text\n" * 2000)

        def model(mode: str) -> lm.ReformerLM:
            kinds = local.local(chunk_len=16), lsh.lsh(chunk_len=16, n_hashes=2)
            sizes = dict(d_model=32, d_ff=64, n_heads=2, d_attention_key=16, n_layers=2)
            sizes |= dict(d_attention_value=16, vocab_size=256)
            return lm.ReformerLM(mode=mode, attention_type=kinds, **sizes)

        run = Path(folder) / "run"
        loop.train(
            run,
            model=model,
            task=text.text(str(data)),
            optimizer=optax.adam(1e-3),
            steps=STEPS,
            batch_size=BATCH_SIZE,
            length=LENGTH,
            log_every=1,
            eval_tokens=1,
            eval_whole=False,
            progress=False,
        )
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        speeds = [x["timing"].get("tokens_per_second") for x in lines if x["split"] == "train"]
    jax.clear_caches()
    return 1e3 * BATCH_SIZE * LENGTH / statistics.median(filter(None, speeds))


if __name__ == "__main__":
    main()

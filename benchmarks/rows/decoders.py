"""A decoder of Hugging Face's format, imported: what it computes beside transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.calls import MIB, decoder_seconds, host_mib
from benchmarks.harness.processes import Answer
from reformax import generation, memory
from reformax.convert import check, hugging_face


def measure(folder: str, n_prompt: int, n_new: int) -> Iterator[Answer]:
    """Reads a folder of `peers.decoders_torch.measure` and compares.

    Memory is this process's on a CPU, beyond what it had before it read, and else the device's.

    Args:
      folder: the model and `theirs.npz`.
      n_prompt, n_new: as they were for the folder.
    """
    theirs = np.load(Path(folder) / "theirs.npz")
    jax.block_until_ready(jnp.zeros(8) + 1)  # what every process of JAX has
    before, start = host_mib(), time.perf_counter()
    read = hugging_face.read(folder)
    jax.block_until_ready(read.params)
    answer: dict[str, Any] = {"imported": time.perf_counter() - start, "host": host_mib() - before}
    model = check.in_full_float32(read.spec).build()
    tokens, prompt = theirs["tokens"], theirs["tokens"][:, 1:n_prompt]
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda params, x: model.logits(params, model.encode(params, x))[0])

        def forward() -> Any:
            return jax.block_until_ready(run(read.params, tokens))

        def generate(n: int) -> Any:
            options = dict(temperature=0, max_length=n_prompt + n_new)
            return generation.generate(model, read.params, list(prompt), n, **options)

        logits, made = forward(), generate(n_new)
        answer |= decoder_seconds(forward, generate, n_new)
    of_device = memory.device_peak()
    answer["peak"] = host_mib() - before if of_device is None else of_device / MIB
    far = float(np.abs(np.asarray(logits) - theirs["logits"]).max())
    answer |= {"far": far, "largest": float(np.abs(theirs["logits"]).max())}
    alike = np.asarray(made).reshape(-1)[-n_new:] == theirs["made"]
    yield answer | {"alike": int(alike.sum())}

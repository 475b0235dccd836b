"""Decoders of transformers with drawn weights: a folder, and what it computes of some tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.calls import MIB, decoder_seconds, host_mib
from benchmarks.peers.torch_calls import DEVICE, wait


def make(folder: str, kind: str, changes: dict[str, Any], length: int) -> Iterator[dict[str, Any]]:
    """Writes a decoder to a folder, in shards of bfloat16, and a row of tokens.

    Its weights are about as large as trained ones.

    Args:
      folder: what to write to.
      kind: the class's name before "Config".
      changes: what differs from its defaults.
      length: of the row.
    """
    transformers = _silent()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1:  # norms begin as zeros or ones, by the family
                x.add_(0.1 * torch.randn_like(x))
            else:
                x.normal_(0.0, 1.5 * x.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (1, length))
    tokens[:, 0] = 1
    np.save(Path(folder) / "tokens.npy", tokens)
    yield {"n_weights": sum(x.numel() for x in model.parameters())}


def measure(folder: str, n_prompt: int, n_new: int) -> Iterator[dict[str, Any]]:
    """Reads what `make` wrote, and adds the logits of its tokens and greedy ones.

    The figures are of float32, with plain attention operations, which have all that the families do
    to logits. Memory is this process's on a CPU, beyond what it had before it read, and else the
    device's.

    Args:
      folder: the decoder and its tokens.
      n_prompt: tokens that generation begins with.
      n_new: tokens to generate.
    """
    transformers = _silent()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = np.load(Path(folder) / "tokens.npy")
    before, start = host_mib(), time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(DEVICE)
    wait()
    imported = time.perf_counter() - start
    rows = torch.tensor(tokens, device=DEVICE)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        logits = model(rows, use_cache=False).logits
        wait()
        return logits

    @torch.inference_mode()
    def generate(n: int) -> torch.Tensor:
        prompt = rows[:, :n_prompt]
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wait()
        return made

    seconds = decoder_seconds(forward, generate, n_new)
    logits, made = forward()[0].cpu().numpy(), generate(n_new)[0, n_prompt:].cpu().numpy()
    np.savez(Path(folder) / "theirs.npz", tokens=tokens, logits=logits, made=made)
    on_gpu = DEVICE == "cuda"
    peak = torch.cuda.max_memory_allocated() / MIB if on_gpu else host_mib() - before
    yield {"imported": imported, "peak": peak, **seconds}


def _silent() -> Any:
    """transformers, that says nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers

"""Decoders of transformers with drawn weights: a folder, and what it computes of some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.calls import MIB, decoder_seconds
from benchmarks.peers.torch_calls import DEVICE, wait


def make(
    folder: str, kind: str, changes: dict[str, Any], length: int, n_prompt: int, n_new: int
) -> Iterator[dict[str, Any]]:
    """Writes a decoder to a folder, in shards of bfloat16, and its logits and greedy tokens.

    Its weights are about as large as trained ones. The figures are of float32, with plain attention
    operations, which have all that the families do to logits.

    Args:
      folder: what to write to.
      kind: the class's name before "Config".
      changes: what differs from its defaults.
      length: of the row that logits are of.
      n_prompt: tokens of it that generation begins with.
      n_new: tokens to generate.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
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
    n_weights = sum(x.numel() for x in model.parameters())
    del model
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(DEVICE)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (1, length))
    tokens[:, 0] = 1
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
    peak = torch.cuda.max_memory_allocated() / MIB if DEVICE == "cuda" else None
    yield {"n_weights": n_weights, "peak": peak, **seconds}

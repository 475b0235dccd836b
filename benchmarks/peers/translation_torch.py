"""The rows of `benchmarks.translation` that are PyTorch's, in a process that it starts.

Each request has one answer.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.harness.processes import serve
from benchmarks.peers.torch_calls import device, wait


def hugging_face(sizes: dict[str, int], dtype: str) -> Callable[..., float]:
    """Hugging Face's MarianMTModel with random weights: `decode(batches, n_beams) -> seconds`."""
    import torch
    import transformers

    config = transformers.MarianConfig(
        vocab_size=sizes["vocab_size"],
        d_model=sizes["d_model"],
        encoder_layers=sizes["n_layers"],
        decoder_layers=sizes["n_layers"],
        encoder_ffn_dim=sizes["d_ff"],
        decoder_ffn_dim=sizes["d_ff"],
        encoder_attention_heads=sizes["n_heads"],
        decoder_attention_heads=sizes["n_heads"],
        max_position_embeddings=1024,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config).to(device(), getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def decode(batches, n_beams: int) -> float:
        wait()
        start = time.perf_counter()
        for lengths, n_new in batches:
            longest = max(lengths)
            tokens = torch.randint(3, config.vocab_size, (len(lengths), longest))
            mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
            out = model.generate(
                torch.where(mask, tokens, 0).to(device()),
                attention_mask=mask.to(device()),
                num_beams=n_beams,
                do_sample=False,
                min_new_tokens=n_new,
                max_new_tokens=n_new,
                length_penalty=0.6,
                use_cache=True,
            ).cpu()
            assert out.shape == (len(lengths), n_new + 1), out.shape
        return time.perf_counter() - start

    return decode


def train(
    sizes: dict[str, int], masked: bool, path: str, repeats: int, in_a_row: int
) -> dict[str, float]:
    """Seconds of a compiled training step on a batch of sentence pairs, and the loss at first."""
    import torch

    from benchmarks.peers.transformer_torch import Transformer

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Transformer(sizes, masked).to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=device() == "cuda")
    names = ("source", "target", "source_segments", "target_segments")
    with np.load(path) as file:
        arrays = [torch.as_tensor(file[name], device=device()).long() for name in names]
        positions = [torch.as_tensor(file[f"{n}_positions"], device=device()) for n in names[:2]]
        shifted = torch.as_tensor(file["shifted"], device=device()).long()
    compiled = torch.compile(model, dynamic=False)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device(), torch.bfloat16, enabled=sizes["dtype"] == "bfloat16"):
            loss = compiled(*arrays, positions, shifted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def timed() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(in_a_row):
            step()
        wait()
        return (time.perf_counter() - start) / in_a_row

    first = step().item()
    for _ in range(2):
        step()
    times = sorted(timed() for _ in range(repeats))
    return {"first_loss": first, "seconds": times[repeats // 2]}


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


@functools.cache
def decoder(sizes: str, dtype: str) -> Callable[..., float]:
    """`hugging_face`, made once for each sizes, in JSON, and dtype."""
    return hugging_face(json.loads(sizes), dtype)


def decode(sizes: dict[str, int], dtype: str, n_beams: int, batches) -> dict[str, float]:
    return {"seconds": decoder(json.dumps(sizes), dtype)(batches, n_beams)}


def answer(what: str, **request: Any) -> Iterator[dict[str, Any]]:
    yield {"train": train, "versions": versions, "decode": decode}[what](**request)


if __name__ == "__main__":
    serve(answer)

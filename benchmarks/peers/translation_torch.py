"""The rows of `benchmarks.translation` that are PyTorch's, in a process that it starts.

Each request has one answer.
"""

from __future__ import annotations

import functools
import json
import math
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


def transformer(sizes: dict[str, int], masked: bool) -> Any:
    """The encoder-decoder of `models.Transformer(post_norm=True)` around SDPA."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    d_model, n_heads, rate = sizes["d_model"], sizes["n_heads"], sizes["dropout"]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (
                nn.Linear(d_model, d_model, bias=False) for _ in range(4)
            )

        def forward(self, x, memory, mask, causal=False):
            def heads(y):
                return y.unflatten(-1, (n_heads, -1)).transpose(1, 2)

            q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
            causal = causal and mask is None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            return self.o(out.transpose(1, 2).flatten(2))

    class Layer(nn.Module):
        def __init__(self, decoder):
            super().__init__()
            self.attentions = nn.ModuleList(Attention() for _ in range(1 + decoder))
            self.feed_forward = nn.Sequential(
                nn.Linear(d_model, sizes["d_ff"]), nn.ReLU(), nn.Linear(sizes["d_ff"], d_model)
            )
            self.norms = nn.ModuleList(nn.LayerNorm(d_model, eps=1e-6) for _ in range(2 + decoder))

        def forward(self, x, mask, causal=False, memory=None, cross_mask=None):
            def add(x, y, norm):
                return norm(x + F.dropout(y, rate))

            x = add(x, self.attentions[0](x, x, mask, causal), self.norms[0])
            if memory is not None:
                x = add(x, self.attentions[1](x, memory, cross_mask), self.norms[1])
            return add(x, self.feed_forward(x), self.norms[-1])

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(sizes["vocab_size"], d_model)
            nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
            self.encoder, self.decoder = (
                nn.ModuleList(Layer(side) for _ in range(sizes["n_layers"])) for side in (0, 1)
            )

        def embedded(self, tokens, positions):
            frequency = 10_000 ** (
                -torch.arange(d_model // 2, device=tokens.device) / (d_model // 2)
            )
            angle = positions[..., None] * frequency
            x = self.embedding(tokens) * math.sqrt(d_model)
            return F.dropout(x + torch.cat([angle.sin(), angle.cos()], -1), rate)

        def forward(self, source, target, source_segments, target_segments, positions, shifted):
            def mask(queries, keys):
                if not masked:
                    return None
                same = queries[:, :, None] == keys[:, None, :]
                # A row of padding that saw nothing would be NaN.
                return (same | (queries == 0)[:, :, None])[:, None]

            own = mask(target_segments, target_segments)
            if masked:
                length = target.shape[1]
                causal = torch.ones(length, length, dtype=torch.bool, device=own.device).tril()
                own = own & causal
            x = self.embedded(source, positions[0])
            for layer in self.encoder:
                x = layer(x, mask(source_segments, source_segments))
            memory, x = x, self.embedded(shifted, positions[1])
            cross = mask(target_segments, source_segments)
            for layer in self.decoder:
                x = layer(x, own, causal=True, memory=memory, cross_mask=cross)
            logits = x @ self.embedding.weight.T.to(x.dtype)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(),
                target.flatten(),
                label_smoothing=sizes["label_smoothing"],
                reduction="none",
            )
            weights = (target_segments > 0).flatten()
            return (loss * weights).sum() / weights.sum()

    return Transformer()


def train(
    sizes: dict[str, int], masked: bool, path: str, repeats: int, in_a_row: int
) -> dict[str, float]:
    """Seconds of a compiled training step on a batch of sentence pairs, and the loss at first."""
    import torch

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = transformer(sizes, masked).to(device())
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

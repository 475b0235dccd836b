"""Translation in PyTorch: a Transformer around SDPA in training, and Marian in decoding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.torch_calls import DEVICE, wait

# Decoding.


def decode(
    sizes: dict[str, int], dtype: str, n_beams: int, batches: Sequence, repeats: int
) -> Iterator[dict[str, Any]]:
    """Seconds in which Hugging Face's MarianMTModel with random weights decodes all batches.

    A batch has the lengths of its sources, and how many tokens are written for each.
    """
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
    model = transformers.MarianMTModel(config).to(DEVICE, getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def seconds(batches: Sequence) -> float:
        wait()
        start = time.perf_counter()
        for lengths, n_new in batches:
            longest = max(lengths)
            tokens = torch.randint(3, config.vocab_size, (len(lengths), longest))
            mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
            out = model.generate(
                torch.where(mask, tokens, 0).to(DEVICE),
                attention_mask=mask.to(DEVICE),
                num_beams=n_beams,
                do_sample=False,
                min_new_tokens=n_new,
                max_new_tokens=n_new,
                length_penalty=0.6,
                use_cache=True,
            ).cpu()
            assert out.shape == (len(lengths), n_new + 1), out.shape
        return time.perf_counter() - start

    seconds(batches[:1])
    yield {"seconds": statistics.median(seconds(batches) for _ in range(repeats))}


# Training.


class Attention(nn.Module):
    """Multi-head attention of `x [B, T, D]` to `memory [B, S, D]`."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        d_model, self.n_heads = sizes["d_model"], sizes["n_heads"]
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x, memory, mask, causal=False):
        def heads(y):
            return y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        causal = causal and mask is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of the encoder or of the decoder."""

    def __init__(self, sizes: dict[str, Any], decoder: bool):
        super().__init__()
        d_model, d_ff, self.rate = sizes["d_model"], sizes["d_ff"], sizes["dropout"]
        self.attentions = nn.ModuleList(Attention(sizes) for _ in range(1 + decoder))
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d_model, eps=1e-6) for _ in range(2 + decoder))

    def forward(self, x, mask, causal=False, memory=None, cross_mask=None):
        def add(x, y, norm):
            return norm(x + F.dropout(y, self.rate))

        x = add(x, self.attentions[0](x, x, mask, causal), self.norms[0])
        if memory is not None:
            x = add(x, self.attentions[1](x, memory, cross_mask), self.norms[1])
        return add(x, self.feed_forward(x), self.norms[-1])


class Transformer(nn.Module):
    """The mean loss of the target's tokens. `masked` hides other pairs of a packed row."""

    def __init__(self, sizes: dict[str, Any], masked: bool):
        super().__init__()
        self.sizes, self.masked = sizes, masked
        self.embedding = nn.Embedding(sizes["vocab_size"], sizes["d_model"])
        nn.init.normal_(self.embedding.weight, std=sizes["d_model"] ** -0.5)
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(sizes, decoder) for _ in range(sizes["n_layers"]))
            for decoder in (False, True)
        )

    def embedded(self, tokens, positions):
        half = self.sizes["d_model"] // 2
        frequency = 10_000 ** (-torch.arange(half, device=tokens.device) / half)
        angle = positions[..., None] * frequency
        x = self.embedding(tokens) * math.sqrt(self.sizes["d_model"])
        return F.dropout(x + torch.cat([angle.sin(), angle.cos()], -1), self.sizes["dropout"])

    def mask(self, queries, keys):
        if not self.masked:
            return None
        same = queries[:, :, None] == keys[:, None, :]
        # A row of padding that saw nothing would be NaN.
        return (same | (queries == 0)[:, :, None])[:, None]

    def forward(self, source, target, source_segment_ids, target_segment_ids, positions, shifted):
        own = self.mask(target_segment_ids, target_segment_ids)
        if self.masked:
            length = target.shape[1]
            own = own & torch.ones(length, length, dtype=torch.bool, device=own.device).tril()
        x = self.embedded(source, positions[0])
        for layer in self.encoder:
            x = layer(x, self.mask(source_segment_ids, source_segment_ids))
        memory, x = x, self.embedded(shifted, positions[1])
        cross = self.mask(target_segment_ids, source_segment_ids)
        for layer in self.decoder:
            x = layer(x, own, causal=True, memory=memory, cross_mask=cross)
        logits = (x @ self.embedding.weight.T.to(x.dtype)).flatten(0, 1).float()
        smoothing = dict(label_smoothing=self.sizes["label_smoothing"], reduction="none")
        loss = F.cross_entropy(logits, target.flatten(), **smoothing)
        weights = (target_segment_ids > 0).flatten()
        return (loss * weights).sum() / weights.sum()


def train(
    sizes: dict[str, Any], masked: bool, path: str, repeats: int, in_a_row: int
) -> Iterator[dict[str, float]]:
    """Seconds of a compiled training step on a batch of sentence pairs, and the loss at first."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Transformer(sizes, masked).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    names = ("source", "target", "source_segment_ids", "target_segment_ids")
    with np.load(path) as file:
        arrays = [torch.as_tensor(file[name], device=DEVICE).long() for name in names]
        positions = [torch.as_tensor(file[f"{n}_positions"], device=DEVICE) for n in names[:2]]
        shifted = torch.as_tensor(file["shifted"], device=DEVICE).long()
    compiled = torch.compile(model, dynamic=False)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=sizes["dtype"] == "bfloat16"):
            loss = compiled(*arrays, positions, shifted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def seconds() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(in_a_row):
            step()
        wait()
        return (time.perf_counter() - start) / in_a_row

    first, *_ = (step().item() for _ in range(3))
    yield {"first_loss": first, "seconds": statistics.median(seconds() for _ in range(repeats))}

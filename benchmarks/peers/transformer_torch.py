"""The encoder-decoder of `models.Transformer(post_norm=True)` in PyTorch, around SDPA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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

    def forward(self, source, target, source_segments, target_segments, positions, shifted):
        own = self.mask(target_segments, target_segments)
        if self.masked:
            length = target.shape[1]
            own = own & torch.ones(length, length, dtype=torch.bool, device=own.device).tril()
        x = self.embedded(source, positions[0])
        for layer in self.encoder:
            x = layer(x, self.mask(source_segments, source_segments))
        memory, x = x, self.embedded(shifted, positions[1])
        cross = self.mask(target_segments, source_segments)
        for layer in self.decoder:
            x = layer(x, own, causal=True, memory=memory, cross_mask=cross)
        logits = (x @ self.embedding.weight.T.to(x.dtype)).flatten(0, 1).float()
        smoothing = dict(label_smoothing=self.sizes["label_smoothing"], reduction="none")
        loss = F.cross_entropy(logits, target.flatten(), **smoothing)
        weights = (target_segments > 0).flatten()
        return (loss * weights).sum() / weights.sum()

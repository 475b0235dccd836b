"""GPT-2 in PyTorch: SDPA, torch.compile, autocast to bfloat16, fused AdamW."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.processes import alone
from benchmarks.peers.torch_calls import DEVICE, wait


class Layer(nn.Module):
    """Attention and a feed-forward layer, pre-norm."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.hidden_norm = (nn.LayerNorm(d_model) for _ in range(2))
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(*x.shape[:2], 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.hidden_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The mean cross-entropy of targets, in nats."""

    def __init__(self, vocab_size: int, length: int, d_model: int, n_layers: int, n_heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(length, d_model)
        self.layers = nn.ModuleList(Layer(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def train(
    batch: int,
    length: int,
    vocab_size: int,
    repeats: int,
    in_a_row: int,
    lock: str,
    optimizer: dict[str, Any],
    **sizes: int,
) -> Iterator[dict[str, float]]:
    """Compiles a step, and gives its first loss; then seconds of a step, `repeats` times."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = GPT2(vocab_size, length, **sizes).to(DEVICE)
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer["learning_rate"],
        betas=(0.9, optimizer["b2"]),
        weight_decay=optimizer["weight_decay"],
        fused=DEVICE == "cuda",
    )
    tokens, targets = torch.randint(0, vocab_size, (2, batch, length), device=DEVICE)
    compiled = torch.compile(model, dynamic=False) if DEVICE == "cuda" else model

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    first, *_ = (step().item() for _ in range(3))
    yield {"first_loss": first}
    for _ in range(repeats):
        with alone(Path(lock)):
            for _ in range(2):
                step()
            wait()
            start = time.perf_counter()
            for _ in range(in_a_row):
                step()
            wait()
            seconds = (time.perf_counter() - start) / in_a_row
        yield {"seconds": seconds}
        time.sleep(0.2)  # for the other to take its turn

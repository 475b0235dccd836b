"""GPT-2 and BERT in PyTorch: SDPA, torch.compile, autocast to bfloat16, fused AdamW."""

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
    """Attention and a feed-forward layer: GPT-2's, pre-norm and causal, or BERT's, post-norm."""

    def __init__(self, d_model: int, n_heads: int, is_bert: bool, dropout: float):
        super().__init__()
        self.n_heads, self.is_bert, self.rate = n_heads, is_bert, dropout
        self.dropout = nn.Dropout(dropout)
        self.attention_norm, self.hidden_norm = (nn.LayerNorm(d_model) for _ in range(2))
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def attention(self, x, mask):
        qkv = self.qkv(x)
        q, k, v = qkv.view(*x.shape[:2], 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        options = dict(is_causal=not self.is_bert, dropout_p=self.rate)
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return self.dropout(self.out(y.transpose(1, 2).reshape(x.shape)))

    def hidden(self, x):
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))

    def forward(self, x, mask):
        if self.is_bert:
            x = self.attention_norm(x + self.attention(x, mask))
            return self.hidden_norm(x + self.hidden(x))
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.hidden(self.hidden_norm(x))


class Model(nn.Module):
    """The mean cross-entropy of targets, in nats; those of -100 do not count."""

    def __init__(
        self,
        vocab_size: int,
        length: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        is_bert: bool,
        dropout: float,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(length, d_model)
        layers = (Layer(d_model, n_heads, is_bert, dropout) for _ in range(n_layers))
        self.layers, self.dropout = nn.ModuleList(layers), nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model)  # BERT's of the embedding
        self.is_bert = is_bert
        if is_bert:
            self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model))
            self.bias = nn.Parameter(torch.zeros(vocab_size))
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens, targets, mask):
        x = self.tokens(tokens) + self.positions.weight
        x = self.dropout(self.norm(x) if self.is_bert else x)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.dropout(x if self.is_bert else self.norm(x))
        x = self.head(x) if self.is_bert else x
        logits = F.linear(x, self.tokens.weight, self.bias if self.is_bert else None)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def train(
    batch: int,
    length: int,
    vocab_size: int,
    repeats: int,
    in_a_row: int,
    lock: str,
    optimizer: dict[str, Any],
    masked: float | None,
    padded: bool,
    dropout: float,
    **sizes: int,
) -> Iterator[dict[str, float]]:
    """Compiles a step, and gives its first loss; then seconds of a step, `repeats` times.

    The model is BERT if `masked`, the share of tokens that count, is not None. Rows that are
    `padded` have lengths between half a row and a row.
    """
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    is_bert = masked is not None
    model = Model(vocab_size, length, is_bert=is_bert, dropout=dropout, **sizes).to(DEVICE)
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer["learning_rate"],
        betas=(0.9, optimizer["b2"]),
        weight_decay=optimizer["weight_decay"],
        fused=DEVICE == "cuda",
    )
    tokens, targets = torch.randint(0, vocab_size, (2, batch, length), device=DEVICE)
    if masked is not None:
        targets[torch.rand(batch, length, device=DEVICE) >= masked] = -100
    mask = None
    if padded:
        lengths = torch.randint(length // 2, length + 1, (batch, 1), device=DEVICE)
        exists = torch.arange(length, device=DEVICE) < lengths
        targets[~exists] = -100
        mask = exists[:, None, None]
    compiled = torch.compile(model, dynamic=False) if DEVICE == "cuda" else model

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = compiled(tokens, targets, mask)
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

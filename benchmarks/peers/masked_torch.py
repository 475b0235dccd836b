"""Peers that are a mask of FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.peers.torch_calls import DEVICE
from benchmarks.peers.torch_peer import Given, Peer, Sizes, heads_first

N_SINKS = 4
# Compiled whole or not at all: a graph that breaks would run uncompiled. Anew for each mask.
torch._dynamo.config.recompile_limit = 256
compiled_flex_attention = torch.compile(flex_attention, fullgraph=True, dynamic=False)


def with_mask(visible: Callable[..., Any], given: Given, **options: int) -> Peer:
    """FlexAttention to the pairs that `visible` shows."""
    length = given["q"].shape[1]
    mask = create_block_mask(visible, None, None, length, length, DEVICE, _compile=True, **options)
    return Peer(functools.partial(compiled_flex_attention, block_mask=mask), heads_first(given))


def flex_local(given: Given, sizes: Sizes) -> Peer:
    """A query's own chunk and the one before."""

    def visible(batch, head, query, key):
        chunks = query // sizes.chunk_len - key // sizes.chunk_len
        return (key <= query) & (chunks <= 1)

    return with_mask(visible, given, BLOCK_SIZE=sizes.pattern_block)


def flex_longformer(given: Given, sizes: Sizes) -> Peer:
    def visible(batch, head, query, key):
        near = (query - key).abs() <= sizes.window
        return near | (query < sizes.n_global) | (key < sizes.n_global)

    return with_mask(visible, given)


def flex_sinks(given: Given, sizes: Sizes) -> Peer:
    def visible(batch, head, query, key):
        return (key <= query) & ((query - key < sizes.window) | (key < N_SINKS))

    return with_mask(visible, given)


def butterfly(query, key):
    bits = query ^ key
    return (bits & (bits - 1)) == 0


def strided(query, key):
    distance = (query - key).abs()
    return (distance <= 16) | (distance % 16 == 0)


def fixed(query, key):
    return (query // 16 == key // 16) | (key % 16 == 15)


def local_global(query, key):
    return (query - key <= 3) | (key == 0)


def flex_blocks(rule: Callable[..., Any], given: Given, sizes: Sizes) -> Peer:
    """The causal pairs of the blocks that a rule of `benchmarks.rows.attention.PATTERNS` shows."""
    size = sizes.pattern_block

    def visible(batch, head, query, key):
        return (key <= query) & rule(query // size, key // size)

    return with_mask(visible, given, BLOCK_SIZE=size)

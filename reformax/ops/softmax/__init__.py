"""Softmax attention in array operations: tiles, chunks, bands, lists of blocks, gathered keys."""

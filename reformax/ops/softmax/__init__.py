"""Softmax attention in array operations: tiles, chunks, bands, gathered keys; its dropout."""

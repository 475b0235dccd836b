"""Divides a call over devices: shards of heads, of the batch and of the sequence."""

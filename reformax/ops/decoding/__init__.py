"""Caches of decoding, and attention of one more position."""

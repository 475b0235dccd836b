"""Hashes of vectors, and orders of a sequence by hash."""

"""Arithmetic: precision of sums, normalization, blocks of rows."""

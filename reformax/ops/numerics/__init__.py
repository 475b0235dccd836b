"""Arithmetic: precision of sums, numbers that are not finite, normalization."""

"""Checks a call of an op, and chooses the implementation that computes it."""

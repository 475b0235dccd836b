"""A call of an op: its arguments, its sizes, and the implementation that computes it."""

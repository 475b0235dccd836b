"""Precision of sums, normalization, and loops over blocks of rows and chunks of queries."""

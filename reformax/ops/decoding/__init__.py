"""Caches, and one more position at a time."""

"""Summaries of blocks, and attention to a window and to summaries in one softmax."""

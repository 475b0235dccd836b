"""Checkpoints of Trax and of Hugging Face's Reformer, read and written.

    python -m reformax.convert --from=model.safetensors --to=runs/enwik8

A file of names, shapes and transposes for each format, and none of them runs code of a checkpoint.
"""

"""Reads and writes the checkpoints of Trax and of Hugging Face.

    python -m reformax.convert --from=model.safetensors --to=runs/enwik8

Each format has a file of names, shapes and transposes. No code of a checkpoint runs.
"""

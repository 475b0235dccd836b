"""Checkpoints: each is a folder, either whole or refused.

    DIR/checkpoints/1200/arrays/        every tensor of the state, by name, as orbax writes them
                         checkpoint.json  format, step, the step of the checkpoint before, score,
                                          names and shapes, operative config, package versions
                         manifest.json    size and CRC-32 of every other file
                    tmp.1200/           being written
                    tmp.old.1200/       1200 while a new one takes its name
                    tmp.gone.1200/      being deleted
                    damaged.1200/       found damaged, and kept
                    copies.json         whose the copies are; see `ownership`

A folder has a temporary name until its manifest is complete and all of it is on the disk, so a
killed run or a power cut leaves the checkpoints before it as they were. Older ones are deleted only
after that. Where the disk has no room the oldest is deleted before, but not the newest or the best.
A file that is cut or changed afterwards does not match the manifest, and restoring refuses it. An
error of the system while reading says nothing about a checkpoint: nothing that could not be read is
deleted or renamed.
"""

from __future__ import annotations

from reformax.training.checkpoint.checkpoints import Checkpoints, NotSaved
from reformax.training.checkpoint.reading import CheckpointReader

__all__ = ["CheckpointReader", "Checkpoints", "NotSaved"]

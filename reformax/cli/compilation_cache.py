"""JAX's compilation cache, by default in a folder of the user's: a program is compiled once."""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from reformax import durable

MOST = 4 * 2**30  # bytes that stay from one process to the next
SHORTEST = 0.2  # seconds of a compilation whose result is kept


def use() -> None:
    """Turns the cache on, in $XDG_CACHE_HOME/reformax/jax or ~/.cache/reformax/jax.

    JAX's own settings come first: JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. Without a folder that can be written
    there is none, and no error.
    """
    import jax

    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = durable.cache_folder("jax")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds programs that will run
        with tempfile.TemporaryFile(dir=folder):
            pass
        _prune(folder, MOST)
    except (OSError, RuntimeError):  # the latter of a user without a home
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Where the disk is full or another process is writing the entry, the program is compiled.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)


def _prune(folder: Path, most: int) -> None:
    """Deletes the oldest files until the rest has at most `most` bytes."""
    found = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    total = sum(stat.st_size for stat, _ in found)
    for stat, path in sorted(found, key=lambda x: x[0].st_mtime):
        if total <= most:
            return
        with suppress(FileNotFoundError):  # another process deletes too
            path.unlink()
        total -= stat.st_size

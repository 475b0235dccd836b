"""Checks of one array that a user passes. An error names it as its function does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reformax.declared import shown


def check_array(name: str, x: Any, expected: str = "an array") -> None:
    """Raises `ValueError` for what is no array, such as a list."""
    if not hasattr(x, "dtype"):
        raise ValueError(f"{name} is {shown(x)}: expected {expected}")


def check_floats(name: str, x: Any, *axes: str | int) -> None:
    """Raises `ValueError` unless `x` is an array of floats.

    Args:
      axes: the names of its axes, or their sizes where these are known; none: any.
    """
    check_array(name, x)
    wrong = [n for n, found in zip(axes, x.shape, strict=False) if n not in (found, str(n))]
    if axes and (x.ndim != len(axes) or wrong):
        raise ValueError(f"{name} has shape {x.shape}: expected [{', '.join(map(str, axes))}]")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {x.dtype}: expected floats, as x.astype(float)")


def check_ids(name: str, ids: Any, of: str, shape: tuple[int, ...], or_else: str = "") -> None:
    """Raises `ValueError` unless `ids` are integers or booleans of the tokens of an array.

    Args:
      name: what the error calls them.
      ids: segment ids, or a mask that is True at tokens.
      of: the name of the array.
      shape: its batch and length.
      or_else: another way to pass them, in words.
    """
    check_array(name, ids)
    if ids.shape != shape:
        raise ValueError(
            f"{name} has shape {ids.shape}: expected [batch, length] of {of}, {shape}{or_else}"
        )
    if ids.dtype != bool and not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {ids.dtype}: expected integers or booleans")


def check_key(name: str, rng: Any) -> None:
    """Raises `ValueError` unless `rng` is one PRNG key, typed or of uint32."""
    check_array(name, rng, "a key, such as jax.random.key(0)")
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if rng.ndim != (0 if typed else 1) or not (typed or rng.dtype == jnp.uint32):
        raise ValueError(
            f"{name} has shape {rng.shape} and dtype {rng.dtype}: expected one key, such as "
            "jax.random.key(0)"
        )


def check_lengths(name: str, lengths: Any, n_rows: int, most: int, of: str, least: int = 0) -> None:
    """Raises `ValueError` unless `lengths` are integers, `[batch]`, from `least` to `most`.

    `of` says whose length that is.

    Their range is checked where the numbers are known, which they are not within `jax.jit`.
    """
    check_array(name, lengths)
    if lengths.shape != (n_rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {lengths.shape} and dtype {lengths.dtype}: expected integers "
            f"[batch], {(n_rows,)}"
        )
    if isinstance(lengths, jax.core.Tracer) or not lengths.size:
        return
    if getattr(lengths, "is_fully_addressable", True):  # not on devices of another process
        known = np.asarray(lengths)  # within jit, operations on arrays of JAX are traced
        if known.min() < least or known.max() > most:
            raise ValueError(
                f"{name} has {known.min()} to {known.max()}: expected {least} to {most}, {of}"
            )

"""Checks of splits and of sizes, which every task makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from reformax.declared import SettingError

T = TypeVar("T")

# Tokens of a held-out split that is drawn, not read.
MOST_HELD_OUT = 2**27


def check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    """Raises ValueError if the task `name` has no such split."""
    if split not in splits:
        raise SettingError(f"split={split!r} must be one of {', '.join(splits)} (task {name})")


def of_split(name: str, splits: Mapping[str, T], split: str) -> T:
    """The value of a split; raises ValueError if the task `name` has no such split."""
    check_split(name, split, tuple(splits))
    return splits[split]


def check_held_out(n_examples: int, length: int) -> None:
    """Raises `SettingError` for held-out examples, drawn together, of too many tokens."""
    if n_examples * length > MOST_HELD_OUT:
        raise SettingError(
            f"n_eval is {n_examples}: expected at most {MOST_HELD_OUT // length:,} examples of "
            f"{length:,} tokens, which are drawn together"
        )


def check_windows(batch_size: int, length: int, stride: int) -> None:
    """Raises ValueError for a size below 1, or windows that would leave tokens out."""
    check_sizes(batch_size=batch_size, length=length, stride=stride)
    if stride > length:
        raise SettingError(f"stride={stride} must be at most length={length}")


def check_fixed_length(fixed: int, whose: str, **given: int) -> None:
    """Raises `SettingError` for a length or stride of rows that have their own."""
    for argument, value in given.items():
        if value != fixed:
            raise SettingError(f"{argument}={value} must be {fixed}, {whose}")


def check_stride(stride: int, length: int, why: str) -> None:
    """Raises `SettingError` for an evaluation of rows that do not overlap."""
    if stride != length:
        raise SettingError(f"stride={stride} must be length={length}: {why}")


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for argument, value in sizes.items():
        if value < 1:
            raise SettingError(f"{argument}={value} must be at least 1")

"""Options: what an op, or settings that are one option of it, are made of.

They are fields of frozen dataclasses, checked by their annotations. Instances are equal where their
class and all options are: numbers of one type and value, arrays of NumPy with one content, and
other arrays or functions that are the same object. They can therefore be static arguments of
`jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from reformax.declared import check_fields

Settings = TypeVar("Settings", bound="type[Options]")


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def options(settings: Settings) -> Settings:
    """Makes a dataclass of a subclass of `Options`: its fields are given by keyword."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)(settings)


@options
class Options:
    """Fields that are checked, and never change: sequences become tuples, arrays are copied."""

    def __post_init__(self):
        check_fields(self)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _constant(getattr(self, field.name)))

    @functools.cached_property
    def _compared(self) -> tuple[Any, ...]:
        """The values by which instances are compared and hashed."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return type(self), *map(_identity, values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def __repr__(self) -> str:
        """The call that makes it, such as `lsh(n_hashes=2)`."""
        values = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        changed = (f"{name}={_shown(x)}" for name, x, default in values if not _same(x, default))
        return f"{type(self).__name__}({', '.join(changed)})"

    def with_n_hashes(self, n: int) -> Options:
        """Returns the options with `n` hashes, also at evaluation; unchanged without hashes."""
        changes = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("n_hashes", "n_hashes_eval"):
                changes[field.name] = n
            elif isinstance(value, Options) and (new := value.with_n_hashes(n)) != value:
                changes[field.name] = new
        return dataclasses.replace(self, **changes) if changes else self


def _constant(value: Any) -> Any:
    """The value as nobody changes it."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(_constant, value))
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def _identity(value: Any) -> Any:
    """A key that is equal for values of an option that make one compiled program."""
    if isinstance(value, tuple):
        return tuple(map(_identity, value))
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return type(value), repr(value)  # True is not 1, 2 is not 2.0, 0.0 is not -0.0
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    return value if isinstance(value, Options) else _Same(value)


class _Same:
    """An array of JAX or a function, equal to itself alone."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _same(value: Any, default: Any) -> bool:
    plain = isinstance(value, bool | int | float | str | tuple | Options)
    return value is default or (plain and value == default)


def _shown(value: Any) -> str:
    """An option's value as text: arrays by shape, functions by name."""
    if getattr(value, "shape", ()):
        return f"{value.dtype}{list(value.shape)}"
    return getattr(value, "__name__", None) or repr(value)

"""Settings that are declared by their types, and the one check that holds them to it.

A setting is an argument of a function, a field of a dataclass, or a flag. Its annotation says what
it may be: `Size` is a whole number of at least 1, `Size | None` also None, `Literal["a", "b"]` one
of two names, `Sequence[Size]` a list of sizes. `checked` and `check_fields` compare the values with
the annotations before anything is built, and an error is one line: name, value, what is expected.

Numbers are finite in float32, and a bool is no number. This module imports nothing of the package,
so every part may declare its settings by it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

T = TypeVar("T")
# The longest value that an error quotes.
_SHOWN = 60
# More than any array has elements along an axis: positions are numbered in int32.
LARGEST = 2**31 - 1
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127


class SettingError(ValueError):
    """A setting, a flag or an argument of a config is not what it is declared to be."""


class Unsupported(SettingError, NotImplementedError):
    """Two settings, each right by itself, do not go together."""


class Bounds(NamedTuple):
    """The range of a number, and what an error calls it instead of its limits."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    name: str | None = None

    def hold(self, value: Any) -> bool:
        """Whether the number is in the range."""
        return self.least <= value <= self.most and self.above < value < self.below

    def words(self, value: Any) -> str:
        """The range in words; without the largest size of all where `value` is not above it."""
        if self.name is not None:
            return self.name
        limits = {"at least": self.least, "above": self.above, "below": self.below}
        if self.most != LARGEST or (isinstance(value, int) and value > LARGEST):
            limits["at most"] = self.most
        return " and ".join(f"{word} {x:,}" for word, x in limits.items() if math.isfinite(x))


class NonEmpty(NamedTuple):
    """A text or path that is not empty."""

    name: str

    def hold(self, value: Any) -> bool:
        """Whether there is something in it."""
        return os.fspath(value) not in ("", b"")

    def words(self, value: Any) -> str:
        """What is expected, in words."""
        return self.name


class Compiles(NamedTuple):
    """A regular expression."""

    def hold(self, value: Any) -> bool:
        """Whether `re` compiles it."""
        try:
            return bool(re.compile(value))
        except re.error:
            return False

    def words(self, value: Any) -> str:
        """What is expected, in words."""
        return "a regular expression"


class Called(NamedTuple):
    """Any value of the type, by another name in errors."""

    name: str

    def hold(self, value: Any) -> bool:
        """The type alone decides."""
        return True

    def words(self, value: Any) -> str:
        """What is expected, in words."""
        return self.name


Size = Annotated[int, Bounds(1, LARGEST)]
Count = Annotated[int, Bounds(0, LARGEST)]
# Of weights that ops have: more take all memory before any error.
Width = Annotated[int, Bounds(1, 2**16)]
VocabSize = Annotated[int, Bounds(2, LARGEST)]
# The weights of a model are drawn layer by layer.
Depth = Annotated[int, Bounds(1, 10_000)]
Seed = Annotated[int, Bounds(0, 2**63 - 1, name="a whole number from 0 to 2^63 - 1")]
# The probability of leaving something out, or the decay of a mean.
Rate = Annotated[float, Bounds(0, below=1, name="a rate in [0, 1)")]
Fraction = Annotated[float, Bounds(0, 1, name="a number in [0, 1]")]
Positive = Annotated[float, Bounds(above=0, name="a number above 0")]
NonNegative = Annotated[float, Bounds(0, name="a number of at least 0")]
# A factor by which float32 loses nothing: a mask's lowest logit, scaled, is still a number.
Scale = Annotated[float, Bounds(1e-6, 1e6, name="a number from 1e-6 to 1e6")]
# Of drawing tokens and of searching for translations.
TopP = Annotated[float, Bounds(above=0, most=1, name="a number above 0 and at most 1")]
Beams = Annotated[int, Bounds(1, 1024)]
Samples = Annotated[int, Bounds(1, 2**16)]
Extra = Annotated[int, Bounds(1, 2**20)]
AnySeed = Annotated[int, Bounds(-(2**63), 2**63 - 1, name="a whole number of 64 bits")]
PathName = Annotated[str | os.PathLike, NonEmpty("a path")]
Name = Annotated[str, NonEmpty("a name")]
Pattern = Annotated[str, Compiles()]


def shown(value: Any) -> str:
    """A value in one short line."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested without end; digits without end
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check(name: str, value: T, hint: Any) -> T:
    """Returns `value`; raises `SettingError` if it is not what the annotation `hint` says."""
    if not fits(value, hint):
        raise SettingError(f"{name} is {shown(value)}: expected {expected(hint, value)}")
    return value


def check_all(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """`check` of each value that has a hint."""
    for name, value in values.items():
        if name in hints:
            check(name, value, hints[name])


def checked(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, whose arguments are checked by their annotations at every call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:  # a missing or an unknown argument: the call says so itself
            return function(*args, **kwargs)
        check_all(hints_of(function), given.arguments)
        return function(*args, **kwargs)

    call.__signature__ = signature  # inspect.getfullargspec reads it, and gin by it
    return call


def check_fields(instance: Any) -> None:
    """Checks the fields of a dataclass's instance by their annotations."""
    hints = hints_of(type(instance))
    check_all(hints, {name: getattr(instance, name) for name in hints})


@functools.cache
def hints_of(owner: Callable) -> dict[str, Any]:
    """The annotations of a function's arguments or of a dataclass's fields, by name."""
    owner = inspect.unwrap(owner)
    hints = typing.get_type_hints(owner, include_extras=True)
    if hasattr(owner, "_fields"):  # a NamedTuple
        return hints
    if dataclasses.is_dataclass(owner):
        return {field.name: hints[field.name] for field in dataclasses.fields(owner)}
    if inspect.isclass(owner):
        hints = typing.get_type_hints(owner.__init__, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def some_of(names: Sequence[str], most: int = 3) -> str:
    """'a, b, c and 5 more': the first names of many, for a line."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says. What this does not know fits."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(test.hold(value) for test in arguments[1:])
    if origin in (Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float):
        return _is_number(value, hint)
    if hint is Callable or origin is Callable:
        return callable(value)
    if origin is Sequence:
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return several and all(fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            fits(key, arguments[0]) and fits(x, arguments[1]) for key, x in value.items()
        )
    if origin is tuple and ... not in arguments:
        several = isinstance(value, tuple | list) and len(value) == len(arguments)
        return several and all(map(fits, value, arguments))
    if _is_array(hint):
        return hasattr(value, "shape")
    if inspect.isclass(hint):  # a class is no object of a protocol, though it has its methods
        return isinstance(value, hint) and not inspect.isclass(value)
    return True


def expected(hint: Any, value: Any = None) -> str:
    """What an annotation expects, in words.

    Args:
      hint: the annotation.
      value: what was given instead. The words leave out what it already is: a whole number.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        words = arguments[1].words(value)
        whole = arguments[0] is int and not _is_number(value, int)
        return f"a whole number of {words}" if whole and words.startswith("at ") else words
    if origin in (Union, types.UnionType):
        return ", or ".join(dict.fromkeys(expected(argument, value) for argument in arguments))
    if origin is Literal:
        *first, last = map(repr, arguments)
        return f"{', '.join(first)} or {last}" if first else last
    if hint is None or hint is type(None):
        return "None"
    if origin is Sequence or origin is tuple:
        return f"a list, each {', '.join(dict.fromkeys(map(expected, arguments)))}"
    if origin is Mapping:
        return f"a table by {expected(arguments[0])}, each {expected(arguments[1])}"
    if hint is Callable or origin is Callable:
        return "a function"
    if _is_array(hint):
        return "an array"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    return names.get(hint) or _class_name(hint)


def _class_name(hint: Any) -> str:
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or type(value).__name__ == "bool":  # NumPy's
        return False
    if kind is int:
        return isinstance(value, numbers.Integral)
    # In float32; a whole number becomes an int32 first.
    most = LARGEST if isinstance(value, numbers.Integral) else _LARGEST_FLOAT
    return isinstance(value, numbers.Real) and abs(value) <= most


def _is_array(hint: Any) -> bool:
    """Whether an annotation is one of jaxtyping's."""
    return inspect.isclass(hint) and "jaxtyping" in type(hint).__module__

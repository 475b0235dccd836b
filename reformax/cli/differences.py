"""The first difference of two values of a config, as `parsed.described` gives them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

_UNSET = "not set"


class Difference(NamedTuple):
    """The name of a setting that differs in two values, and both settings as text."""

    name: str
    one: str
    other: str


def first(one: Any, other: Any, name: str = "model") -> Difference | None:
    """The first difference; None if there is none.

    Args:
      one: a value of a config, or a `parsed.Reference`.
      other: another.
      name: of the value.
    """
    if _is_reference(one) and _is_reference(other) and one.function is other.function:
        parameters = inspect.signature(one.function).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()}
        first, second = (defaults | dict(x.arguments) for x in (one, other))
        return _first_of(first, second, f"{one.function.__name__}.")
    if isinstance(one, dict) and isinstance(other, dict):
        return _first_of(one, other, f"{name}.")
    both = isinstance(one, list | tuple) and isinstance(other, list | tuple)
    if both and not _is_reference(one) and not _is_reference(other) and len(one) == len(other):
        parts = (
            first(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True))
        )
        return next(filter(None, parts), None)
    return None if one == other else Difference(name, _text(one), _text(other))


def _first_of(one: dict[str, Any], other: dict[str, Any], prefix: str) -> Difference | None:
    for key in dict.fromkeys([*one, *other]):
        name = f"{prefix}{key}"
        if key not in one or key not in other:
            texts = (_text(x[key]) if key in x else _UNSET for x in (one, other))
            return Difference(name, *texts)
        if (found := first(one[key], other[key], name)) is not None:
            return found
    return None


def _is_reference(value: Any) -> bool:
    return hasattr(value, "function") and hasattr(value, "arguments")


def _text(value: Any) -> str:
    if _is_reference(value):
        return f"@{value.function.__name__}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)

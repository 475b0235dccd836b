"""Settings are held to what their types declare, in one line: name, value, what is expected."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from reformax import declared, shell
from reformax.declared import (
    Count,
    Depth,
    PathName,
    Pattern,
    Positive,
    Rate,
    Seed,
    SettingError,
    Size,
    VocabSize,
)

REFUSED = [
    (Size, 0, "expected at least 1"),
    (Size, -(10**18), "expected at least 1"),
    (Size, 10**18, "expected at least 1 and at most 2,147,483,647"),
    (Size, 1.0, "expected a whole number of at least 1"),
    (Size, "7", "expected a whole number of at least 1"),
    (Size, True, "expected a whole number of at least 1"),
    (Size, np.True_, "expected a whole number of at least 1"),
    (Size, None, "expected a whole number of at least 1"),
    (Size | None, [], "expected a whole number of at least 1, or None"),
    (Size | Literal["sqrt"], "root", "expected a whole number of at least 1, or 'sqrt'"),
    (Depth, 10**8, "expected at least 1 and at most 10,000"),
    (Count, -1, "expected at least 0"),
    (VocabSize, 1, "expected at least 2"),
    (Seed, 2**63, "expected a whole number from 0 to 2^63 - 1"),
    (Rate, 1.0, "expected a rate in [0, 1)"),
    (Rate, math.nan, "expected a rate in [0, 1)"),
    (Rate, False, "expected a rate in [0, 1)"),
    (Positive | None, 0, "expected a number above 0, or None"),
    (Positive, math.inf, "expected a number above 0"),
    (Positive, 10**400, "expected a number above 0"),
    (Literal["a", "b", "c"], ["a"], "expected 'a', 'b' or 'c'"),
    (bool, 1, "expected True or False"),
    (str, 1, "expected a text"),
    (PathName, "", "expected a path"),
    (Pattern, "(", "expected a regular expression"),
    (Sequence[Size], (4, 0), "expected a list, each a whole number of at least 1"),
    (Sequence[Size], "44", "expected a list, each a whole number of at least 1"),
    (tuple[Size, Size], (4,), "expected a list, each a whole number of at least 1"),
    (Callable, 3, "expected a function"),
    (Path, Path, "expected a Path"),
]


@pytest.mark.parametrize("hint, value, message", REFUSED)
def test_what_is_refused(hint, value, message):
    with pytest.raises(SettingError) as error:
        declared.check("x", value, hint)
    assert str(error.value).startswith("x is ") and str(error.value).endswith(message)
    assert "\n" not in str(error.value) and len(str(error.value)) < 160


@pytest.mark.parametrize(
    "hint, value",
    [
        (Size, np.int64(3)),
        (Size | None, None),
        (Rate, 0),
        (Rate, np.float32(0.5)),
        (Positive, 3),
        (Seed, 2**63 - 1),
        (Sequence[Size], [4, 4]),
        (tuple[Size, Size], [4, 4]),
        (Callable, len),
        (PathName, Path("x")),
    ],
)
def test_what_is_taken(hint, value):
    assert declared.check("x", value, hint) is value


def test_a_value_is_shown_in_one_short_line():
    endless = []
    endless.append(endless)
    for value in (endless, "a\nb" * 1000, 10**5000, {"k": endless}):
        text = declared.shown(value)
        assert "\n" not in text and len(text) <= 60


@declared.checked
def function(size: Size, other: int = 1.5, *, rate: Rate = 0.5) -> str:
    """A function."""
    return f"{size} {other} {rate}"


def test_a_function_is_checked_in_what_it_is_given():
    assert function(3) == "3 1.5 0.5"  # a default is the function's own business
    assert function.__name__ == "function" and function.__doc__ == "A function."
    assert list(inspect.getfullargspec(function).kwonlyargs) == ["rate"]
    with pytest.raises(SettingError, match=re.escape("size is 'x': expected a whole number")):
        function("x")
    with pytest.raises(SettingError, match="rate is 2: expected a rate"):
        function(3, rate=2)
    with pytest.raises(TypeError, match=r"function\(\) missing 1 required positional"):
        function()


@dataclasses.dataclass
class Parent:
    size: Size = 1

    def __post_init__(self):
        declared.check_fields(self)


@dataclasses.dataclass
class Child(Parent):
    rate: Rate = 0.0
    unknown: "list[dict]" = None


def test_a_dataclass_is_checked_with_the_fields_of_its_parents():
    assert Child(size=2, rate=0.1).size == 2
    for fields, name in ((dict(size=0), "size"), (dict(rate=1), "rate")):
        with pytest.raises(SettingError, match=f"^{name} is "):
            Child(**fields)


def test_a_path_of_a_user_that_is_not_there():
    assert shell.user_path("data_dir", "~/x") == Path.home() / "x"
    with pytest.raises(SettingError, match="^data_dir is '~no-such-user/x': there is no home of"):
        shell.user_path("data_dir", "~no-such-user/x")
    with pytest.raises(SettingError, match="^data_dir is '': expected a path"):
        shell.user_path("data_dir", "")

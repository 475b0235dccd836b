"""One table from the error messages of gin, JAX and Python to ours.

A message of gin takes several lines and speaks of gin's own parts. A row of `TABLE` recognises it
and gives one line instead: the wrong name and, if possible, the fix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """One row of the table.

    Attributes:
      pattern: a regular expression that the error's text matches somewhere.
      line: our line. Braces hold groups of the pattern, `first`, the error's own first line, or
        `owner`, 'module.function' of what gin called.
      kind: the errors that the row is for.
      code: the exit code: 2 where the command or its config is wrong.
    """

    pattern: str
    line: str
    kind: type[Exception] = Exception
    code: int = 2


TABLE = (
    # Parsing a config.
    Message(
        r"malformed node or string.*\n?.*Failed to parse token '(?P<name>\w+)'",
        "{name} is no value: write a text in quotes, a function with an @, as in @lsh.lsh()",
        kind=SyntaxError,
    ),
    Message(
        "Unable to parse value|Expected newline",
        "expected one value: a number, a text in quotes, a list, or a function with an @, as in "
        "@lsh.lsh()",
        kind=SyntaxError,
    ),
    Message(
        "Couldn't parse statement, expected|Unexpected token",
        "expected NAME=VALUE",
        kind=SyntaxError,
    ),
    Message(
        r"Expected '\)'",
        "expected ')' after '(': arguments of @lsh.lsh() are settings of their own, as in "
        "lsh.lsh.n_hashes = 4",
        kind=SyntaxError,
    ),
    # Running what it describes.
    Message(
        "RESOURCE_EXHAUSTED",
        "out of memory: lower batch_size, length or loss_chunk_len ({first})",
        kind=RuntimeError,  # of JAX; tensorstore's ValueError is of a full disk or of open files
        code=1,
    ),
    Message(
        r"Gloo|[Cc]oordination service|CoordinationService",
        "another process of this run ended, or cannot be reached: see what it said, then run all "
        "of them again to go on ({first})",
        kind=RuntimeError,
        code=1,
    ),
    Message(
        "",
        "out of memory: lower batch_size, length or what the task draws ({first})",
        kind=MemoryError,
        code=1,
    ),
    Message(
        r"call to configurable 'macro' .* in scope '(?P<name>[^']+)'",
        "the config uses %{name}, which no file and no --config sets: set {name}",
    ),
    Message(
        "required positional argument: 'data_dir'",
        "the task reads files: give --data_dir",
        kind=TypeError,
    ),
    Message(
        r"^train\(\) missing \d+ required keyword-only arguments?: (?P<names>.*)",
        "the config sets no {names} of loop.train: add lines such as "
        "loop.train.optimizer = @optimizer.adamw(), or give --config='loop.train.steps=100'; "
        "behind the config of a converted model --config_file=lora.gin sets them",
        kind=TypeError,
    ),
    Message(
        r"missing \d+ required [\w-]+ arguments?: '(?P<name>\w+)'[\s\S]*In call to configurable",
        "the config sets no {name} of {owner}: give --config='{owner}.{name}=VALUE'",
        kind=TypeError,
    ),
    Message(
        "No values supplied by Gin|required keyword-only argument",
        "the config leaves out an argument: {first}",
        kind=TypeError,
    ),
)


def find(error: Exception, named: Callable[[str], str] = str) -> Message | None:
    """The first row of the table that fits, its line filled in; None if no row fits.

    Args:
      error: an exception.
      named: 'module.function' of `owner_of` the error.
    """
    for row in TABLE:
        match = re.search(row.pattern, str(error).strip())
        if match and isinstance(error, row.kind):
            owner = named(owner_of(error)) if "{owner}" in row.line else ""
            fields = {"first": first_line(error), "owner": owner, **match.groupdict()}
            return row._replace(line=row.line.format(**fields))
    return None


def raised(error: Exception) -> Exception:
    """The error itself, of which gin raises copies with a longer text and without its fields."""
    while (inner := error.__context__) and str(error).startswith(f"{inner}\n  In call to "):
        error = inner
    return error


def text_of(error: Exception) -> str:
    """The error's text, and of gin's appendix the scope in which the function was called."""
    text, *calls = str(error).split("\n  In call to configurable ")
    scope = re.match(r"'(?P<name>\w+)' .* in scope '(?P<scope>[^']+)'", calls[0]) if calls else None
    return text.strip() + (f" (of {scope['scope']}/{scope['name']})" if scope else "")


def owner_of(error: Exception) -> str:
    """The innermost function that gin called, 'scope/function', from its appendix, or ''."""
    pattern = r"In call to configurable '(\w+)'[^\n]*?(?: in scope '([^']+)')?$"
    call = re.search(pattern, str(error), re.MULTILINE)
    return f"{call[2]}/{call[1]}".removeprefix("None/") if call else ""


def first_line(error: Exception) -> str:
    """The first line of `text_of` without a full stop; the error's type where there is none."""
    return (text_of(error) or type(error).__name__).splitlines()[0].rstrip(".")


def nearest(name: str, names: Sequence[str], most: int = 1000) -> str:
    """'; did you mean A or B?', or all names where none is near and they are at most so many."""
    if found := near(name, names):
        return f"; did you mean {' or '.join(found)}?"
    return f"; there is {', '.join(names)}" if 0 < len(names) <= most else ""


def near(name: str, names: Sequence[str]) -> list[str]:
    """Up to three names that are nearly `name`, the nearest first."""
    return difflib.get_close_matches(name, names, n=3, cutoff=0.6)

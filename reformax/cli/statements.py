"""Configs of gin as data: their statements, of which none is imported, included or called.

gin's parser finds them. Every mistake is one line.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gin.config_parser import (
    BindingStatement,
    ConfigParser,
    ImportStatement,
    IncludeStatement,
    ParserDelegate,
)

from reformax.cli import messages
from reformax.declared import SettingError

_LONGEST = 300  # letters of a line in an error


class ConfigError(SettingError):
    """The config is wrong. One line gives the wrong name and the nearest right ones."""


class Statements(NamedTuple):
    """The statements of a config. In values, references and macros are their text."""

    includes: list[str]
    imports: list[str]
    values: dict[str, Any]  # by 'scope/module.function.argument', or by a macro's name
    aliases: dict[str, str]  # the modules that imports call otherwise


class WrittenName(str):
    """A reference or a macro: `repr` of a value that holds it is what a config has."""

    __repr__ = str.__str__


class _Texts(ParserDelegate):
    """Makes references and macros their text."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> WrittenName:
        return WrittenName(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name: str) -> WrittenName:
        return WrittenName(f"%{macro_name}")


class Override(NamedTuple):
    """An argument, or without a function a macro, and its value."""

    function: str | None  # 'scope/module.function'
    name: str
    value: str

    @property
    def whole(self) -> str:
        return f"{self.function}.{self.name}" if self.function else self.name

    @property
    def is_bare_word(self) -> bool:
        """Whether the value is a word such as bfloat16, which gin cannot read."""
        is_word = re.fullmatch(r"[A-Za-z_][\w.-]*", self.value)
        return is_word is not None and self.value not in ("True", "False", "None")


def override_of(text: str) -> Override | None:
    """What an override sets; None if it sets nothing."""
    match = re.match(r"\s*(?:([\w./]+)\.)?([\w/]+)\s*=\s*(.*?)\s*$", text, re.DOTALL)
    return match and Override(*match.groups())


def read(text: str, source: str) -> Statements:
    """Reads a config as data: nothing is imported, included or called.

    Args:
      text: the config.
      source: the file that it is from, for errors.

    Raises:
      ConfigError: a line cannot be read.
    """
    found = Statements([], [], {}, {})
    for statement in statements_in(text, source):
        match statement:
            case IncludeStatement(filename=filename):
                found.includes.append(filename)
            case ImportStatement(module=module, alias=alias):
                found.imports.append(module)
                found.aliases.update({alias: module} if alias else {})
            case BindingStatement(scope, selector, argument, value):
                name = f"{scope}/{selector}" if scope else selector
                found.values[f"{name}.{argument}" if argument else name] = value
    return found


def read_file(path: str | Path) -> Statements:
    """`read` of a file."""
    return read(Path(path).read_text("utf-8-sig", "replace"), str(path))


def statements_in(text: str, source: str | None) -> Iterator[Any]:
    """The statements of a text, as gin's parser has them; any error is a `ConfigError`."""
    last = printable(text.rstrip().rpartition("\n")[2])
    file = io.StringIO(text)
    file.name = source  # for gin's errors
    try:
        yield from ConfigParser(file, _Texts())
    except (RecursionError, MemoryError):
        raise ConfigError(f"{last[-60:]}: a value is nested too deeply") from None
    except tokenize.TokenError as error:
        raise ConfigError(f"a bracket or a quote is open ({error.args[0]}): {last}") from None
    except SyntaxError as error:
        raise of_syntax(error, last) from None
    except (ValueError, TypeError) as error:  # such as a list as a key
        raise ConfigError(f"{messages.first_line(error)}: {last}") from None


def printable(line: str) -> str:
    """A line for an error: the config of a stranger's run may hold what a terminal obeys."""
    line = "".join(c if c.isprintable() else "?" for c in line.strip())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def of_syntax(error: SyntaxError, line: str) -> ConfigError:
    """The error of a line that is no gin, or of a module that it imports and that is no Python."""
    line = printable(error.text or line)
    of_python = str(error.filename).endswith(".py")  # a module that the config imports
    found = None if of_python else messages.find(error)
    what = found.line if found else str(error.msg).splitlines()[0].rstrip(".")
    if line.startswith(("from ", "import ")) and not of_python:
        what = "expected one module in an import line"
    file = f" ({error.filename}, line {error.lineno})" if error.filename else ""
    return ConfigError(f"{what}{file}: {line}".strip(": "))

"""Reads the text of gin configs: imports, macros, bindings, sections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


def imports(text: str) -> list[str]:
    """The import lines."""
    return [line for line in text.splitlines() if line.startswith(("from ", "import "))]


def bound_name(import_line: str) -> str:
    """`c` of 'from a.b import c', 'import a as c' and 'import c'; `a` of 'import a.b'."""
    last = import_line.split()[-1]
    return last if " as " in import_line else last.partition(".")[0]


def macros(text: str) -> list[str]:
    """The names of the macros that the text defines."""
    return re.findall(r"^([\w/]+) = ", text, re.MULTILINE)


class Override(NamedTuple):
    """What --config=OVERRIDE sets: an argument, or without a function a macro."""

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


def sets(text: str, selector: str, argument: str) -> bool:
    """Whether the text binds this argument, in any scope and under any longer selector."""
    pattern = rf"^(\S+/)?(\S+\.)?{re.escape(selector)}\.{argument} = "
    return re.search(pattern, text, re.MULTILINE) is not None


def without(text: str, import_lines: Iterable[str]) -> str:
    """The text without these imports and the sections of what they import."""
    for line in import_lines:
        text = text.replace(line + "\n", "")
        section = rf"# Parameters for (\S+/)?{bound_name(line)}\..*:\n(.+\n)*\n?"
        text = re.sub(section, "", text)
    return text

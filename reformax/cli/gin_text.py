"""Reads the text of gin configs: imports, macros, bindings, sections."""

from __future__ import annotations

import re
from collections.abc import Iterable


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


def macro_of(override: str) -> str | None:
    """The name that an override such as 'steps=10' sets; None if it sets an argument."""
    match = re.match(r"\s*([\w/]+)\s*=", override)
    return match and match[1]


def bare_word(override: str) -> tuple[str, str] | None:
    """('dtype', 'bfloat16') of 'dtype=bfloat16', which gin cannot read; None for other values."""
    match = re.fullmatch(r"\s*([\w./]+)\s*=\s*([A-Za-z_][\w.-]*)\s*", override)
    return match.groups() if match and match[2] not in ("True", "False", "None") else None


def argument_of(override: str) -> tuple[str, str] | None:
    """('scope/module.function', 'argument') that an override sets; None if it sets a macro."""
    match = re.match(r"\s*([\w./]+)\.(\w+)\s*=", override)
    return match and match.groups()


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

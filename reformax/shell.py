"""Settings as a shell takes them, for errors that say what to type."""

from __future__ import annotations

import json
from collections.abc import Mapping


def config_flag(setting: str, value: str | int | Mapping[str, int]) -> str:
    """`--config='SETTING="text"'`, for a shell."""
    return f"--config={in_quotes(f'{setting}={json.dumps(value, ensure_ascii=False)}')}"


def in_quotes(text: str) -> str:
    """A text in single quotes, for a shell, which takes it as it is whatever quotes it has.

    What is not printable is escaped as bash does, for an error is one line.
    """
    if text.isprintable():
        return "'" + text.replace("'", r"'\''") + "'"

    def escaped(c: str) -> str:
        return f"\\{c}" if c in "'\\" else c if c.isprintable() else f"\\U{ord(c):08x}"

    return f"$'{''.join(map(escaped, text))}'"

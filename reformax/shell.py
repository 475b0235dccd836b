"""What a shell reads and its users write: flags, quotes, and paths with '~'."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from reformax.declared import PathName, SettingError, check, shown


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


def user_path(name: str, path: str | os.PathLike) -> Path:
    """A path with '~' expanded.

    Raises:
      SettingError: the path is empty, or begins with the '~' of a user that this machine lacks.
    """
    check(name, path, PathName)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise SettingError(
            f"{name} is {shown(str(path))}: there is no home of {user}: write the folder out"
        ) from None

"""What --config=OVERRIDE sets, read from its text."""

from __future__ import annotations

import re
from typing import NamedTuple


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

"""Settings that have another name now, so that runs saved under the old one go on."""

from __future__ import annotations

import re

# (function, its option before) -> the option's name now.
RENAMED = {
    (op, "own"): "attend_self_if_alone"
    for op in ("asymmetric_lsh", "hash_sparse", "lsh", "routing", "shared_qk", "smyrf")
}


def translated(text: str) -> tuple[str, list[str]]:
    """The text of a saved config with the settings' names of today.

    Returns:
      The text, and a line for each setting that it names otherwise, "own is attend_self_if_alone".
    """
    found = set()

    def rename(match: re.Match) -> str:
        head, function, option, end = match.groups()
        now = RENAMED.get((function, option))
        if now is None:
            return match[0]
        found.add(f"{function}.{option} is {function}.{now}")
        return f"{head}{function}.{now}{end}"

    line = re.compile(r"^((?:[\w/.-]*[./])?)(\w+)\.(\w+)(\s*=)", re.MULTILINE)
    return line.sub(rename, text), sorted(found)

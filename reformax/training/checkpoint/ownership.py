"""Whose copies of checkpoints are: those of one run's folder at a time.

The copies have `run.json` with a token, and so has the folder of checkpoints whose copies they are,
in `copies.json`. A folder without checkpoints, as of a run that lost its disk, takes the copies
over with its first own one, and the run before copies nothing more. A run claims copies under a
lock, which a store does not have: of two runs that claim them there at the same moment, one is
refused when it copies again.
"""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from reformax import durable
from reformax.declared import SettingError

OF_COPIES, OF_RUN = "run.json", "copies.json"


class Others(SettingError):
    """Copies are another run's."""


def check(copies: Any, folder: Path, address: str) -> None:
    """Raises `Others` if copies are of another run.

    Args:
      copies: their folder, a path of epath.
      folder: the run's folder of checkpoints.
      address: of the copies, as the user gave it.
    """
    owner = _owner(copies)
    if owner is not None and owner["token"] not in _tokens(folder):
        raise Others(
            f"checkpoint_copies={address} has the copies of the run in {owner.get('folder')} on "
            f"{owner.get('host')}: give each run its own"
        )


def claim(copies: Any, folder: Path, address: str, local: Path | None) -> None:
    """Makes copies the run's.

    Args:
      copies, folder, address: as in `check`.
      local: the folder of the copies, where it is one of this machine.

    Raises:
      Others: they are of another run.
    """
    alone: AbstractContextManager[None] = nullcontext()
    if local is not None:
        durable.make_folder(local)
        alone = durable.locked(local / OF_COPIES)
    with alone:
        check(copies, folder, address)
        _take(copies, folder)


def _take(copies: Any, folder: Path) -> None:
    """Writes whose copies they are."""
    if not (tokens := _tokens(folder)):
        tokens = _begin(folder, [])
    owner = _owner(copies)
    if owner is None or owner["token"] != tokens[0]:
        text = {"token": tokens[0], "folder": str(folder), "host": socket.gethostname()}
        copies.mkdir(parents=True, exist_ok=True)
        (copies / OF_COPIES).write_text(json.dumps(text))


def follow(copies: Any, folder: Path) -> None:
    """Notes that a folder goes on from copies, which it may take later."""
    owner = _owner(copies)
    _begin(folder, [] if owner is None else [owner["token"]])


def _begin(folder: Path, before: list[str]) -> list[str]:
    tokens = [secrets.token_hex(8), *before]
    durable.write(folder / OF_RUN, json.dumps(tokens).encode())
    return tokens


def _tokens(folder: Path) -> list[str]:
    """The token of the run's folder, and that of the run whose copies it began with."""
    try:
        found = json.loads(durable.read(folder / OF_RUN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _owner(copies: Any) -> dict[str, Any] | None:
    """What the copies say of their run; None where they say nothing that can be read."""
    if not (copies / OF_COPIES).exists():
        return None
    try:
        found = json.loads((copies / OF_COPIES).read_text())
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("token"), str) else None

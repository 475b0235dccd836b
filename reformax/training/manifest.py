"""A folder's manifest: size and CRC-32 of every file, so that damage is noticed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

FILE = "manifest.json"


def write(folder: Path) -> None:
    """Writes the manifest of the files that are in `folder` now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(folder)): fingerprint(path) for path in files}
    (folder / FILE).write_text(json.dumps(manifest, indent=1))


def damage(folder: Path) -> str | None:
    """The first file that does not match the manifest, in words; None if all do."""
    try:
        manifest = json.loads((folder / FILE).read_text())
    except OSError:
        return f"{FILE} is missing"
    except ValueError:
        return f"{FILE} is cut short"
    for name, noted in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != noted["size"]:
            return f"{name} has {path.stat().st_size} bytes of {noted['size']}"
        if fingerprint(path) != noted:
            return f"{name} has changed"
    return None


def fingerprint(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"size": size, "crc32": crc}

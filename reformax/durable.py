"""Files that survive a power cut, and errors of the operating system in one line.

A file has its old content or its new one, never a part: the new content is written under another
name, flushed to the disk, renamed, and then the folder is flushed (Pillai et al. 2014, "All file
systems are not created equal", section 4). No name is followed if it is a symbolic link.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reformax.declared import PathName, SettingError, check, shown

_ADVICE = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "have the limit of a file's size raised (ulimit -f)",
    errno.EMFILE: "have the limit of open files raised (ulimit -n)",
    errno.ENFILE: "close other programs: the system has too many open files",
    errno.EACCES: "get the right to it (chmod, chown)",
    errno.EPERM: "get the right to it (chmod, chown)",
    errno.EROFS: "mount that file system for writing",
    errno.ELOOP: "it is a symbolic link, which is not followed: put the file there instead",
    errno.ESTALE: "mount that network share again",
    errno.ENOMEM: "free memory of the system",
    errno.ENOENT: "put it there, or give another path",
    errno.ENOTDIR: "a file lies where a folder should be: give another path",
    errno.EISDIR: "give a file",
    errno.EEXIST: "give another path",
    errno.ENAMETOOLONG: "give a shorter name",
}
_WITHOUT_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS
FULL = errno.ENOSPC, errno.EDQUOT  # the numbers of errors of a disk without room
_OTHERWISE = "look after that disk or network share (dmesg)"

# What tensorstore says at the end of an error of the system, whatever its Python type.
_TENSORSTORE = re.compile(
    r"""(?:Failed [a-z ]+: "(?P<path>[^"]+)".*)?os_error_code='(?P<number>\d+)'""", re.S
)


def explained(error: OSError, doing: str, path: str | os.PathLike = "") -> OSError:
    """The error in one line: the file, the system's words, and what to do.

    Args:
      error: of a system call, or one line already, which is returned.
      doing: what failed, such as 'read'.
      path: of the file, where the error does not name it.
    """
    if error.strerror is None:
        return error
    advice = _ADVICE.get(error.errno, _OTHERWISE)
    path = _closed_folder(error) or error.filename or path
    line = OSError(f"{path} cannot be {doing} ({error.strerror}): {advice}")
    line.errno = error.errno
    return line


@contextmanager
def explaining(doing: str, path: str | os.PathLike) -> Iterator[None]:
    """Errors of the system inside become one line; that a file is not there stays as it is."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise explained(error, doing, path) from None


def _closed_folder(error: OSError) -> str | None:
    """The folder that keeps a file from being looked at, which need not be there; None: none."""
    if error.errno != errno.EACCES or not isinstance(error.filename, str):
        return None
    folder = os.path.dirname(error.filename)
    return folder if os.path.isdir(folder) and not os.access(folder, os.X_OK) else None


def system_error(error: Exception) -> OSError | None:
    """The error of the system behind an error of orbax or tensorstore; None if it is another."""
    if isinstance(error, OSError):
        return error
    found = _TENSORSTORE.search(str(error))
    if found is None:
        return None
    number = int(found["number"])
    return OSError(number, os.strerror(number), found["path"])


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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, for which other processes wait; makes the file if it is missing.

    Some network disks have no locks. There nobody waits.
    """
    with explaining("written", path), open(path, "ab") as file:  # NFS locks files that are written
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        yield


class NotRegular(OSError):
    """A folder, a pipe or a device where a file should be."""


def open_file(path: Path) -> io.FileIO:
    """Opens a regular file for reading.

    Raises:
      FileNotFoundError: it is not there.
      NotRegular: it is something else.
      OSError: it cannot be read, in one line.
    """
    # Opening a pipe would wait for its other end.
    with explaining("read", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", 0)
    os.close(descriptor)
    raise NotRegular(f"{path} is no regular file: put the file itself there")


class TooLong(OSError):
    """A file has more bytes than such a file ever has."""


def read(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file; raises as `open_file`, and `TooLong` beyond `most` bytes."""
    with open_file(path) as file, explaining("read", path):
        if most is not None and (size := os.fstat(file.fileno()).st_size) > most:
            raise TooLong(f"{path.name} has {size:,} bytes: expected at most {most:,}")
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Replaces a file; when this returns, the disk has the new content.

    Raises:
      OSError: in one line; the file is as it was.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with explaining("written", path):
        remove(temporary)
        try:
            with _create(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            if path.parent.is_dir():  # the other one's file is whole, or will be
                raise OSError(f"another process writes {path}: run one after the other") from None
            missing = f"{path} cannot be written: there is no folder {path.parent}"
            raise FileNotFoundError(missing) from None
        except OSError:
            if os.path.lexists(temporary):
                os.unlink(temporary)
            raise
        sync_folder(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[io.BufferedWriter]:
    """A file for writing in the place of what has its name; at the end the disk has its content.

    A link is not followed.
    """
    with explaining("written", path):
        remove(path)
        created = _create(path)
    with created as file:
        yield file
        with explaining("written", path):
            file.flush()
            os.fsync(file.fileno())


def _create(path: Path) -> io.BufferedWriter:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb")


def rename(old: Path, new: Path) -> None:
    """Renames within a folder; when this returns, the disk has the new name."""
    os.rename(old, new)
    sync_folder(new.parent)


def unused(path: Path) -> Path:
    """The path, with a number after it where the name is taken."""
    found, n = path, 1
    while os.path.lexists(found):
        n += 1
        found = path.with_name(f"{path.name}.{n}")
    return found


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems flush names by themselves and refuse to be asked.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def size_on_disk(folder: Path) -> int:
    """The bytes that the files below a folder take."""
    found = (path.lstat() for path in folder.rglob("*"))
    return sum(max(x.st_size, 512 * x.st_blocks) for x in found)


def cache_folder(name: str) -> Path:
    """The user's own folder of what can be made again: in $XDG_CACHE_HOME, or in ~/.cache.

    Raises:
      RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "reformax" / name


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents; when this returns, the disk has their names."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Deletes a file, a folder with all in it, or a link itself; it need not be there."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (IsADirectoryError, PermissionError):  # of a folder, on Linux and on macOS
        if path.is_symlink() or not path.is_dir():
            raise
        shutil.rmtree(path)

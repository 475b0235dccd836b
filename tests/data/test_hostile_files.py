"""Data that is no text: refused in one line, in bounded time and memory."""

import bz2
import gzip
import io
import lzma
import os
import random
import socket
import tracemalloc
import zipfile
import zlib

import pytest

from reformax.data import files
from reformax.data.enwik8 import enwik8
from reformax.data.text import text
from reformax.data.text_pairs import text_pairs
from tests.data.tables import zst

LINES = b"".join(b"line %d\n" % i for i in range(100))
MIB = 2**20


def zipped(data, method=zipfile.ZIP_DEFLATED, **changed):
    """A .zip of one file; `changed` are fields of its entry, which then says what is not so."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("text", data)
        for field, value in changed.items():
            setattr(archive.infolist()[0], field, value)
    return file.getvalue()


def big_dictionary(data):
    """An .xz file that asks for 1.5 GiB to be unpacked."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 3 * 2**29, "mode": lzma.MODE_FAST}]
    small = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**16}]
    header, wanted = (lzma._encode_filter_properties(f[0]) for f in (small, filters))
    packed = lzma.compress(data, filters=small)
    block = bytearray(packed[12 : 12 + 4 * (packed[12] + 1)])
    block[block.index(header, 4)] = wanted[0]
    block[-4:] = zlib.crc32(block[:-4]).to_bytes(4, "little")
    return packed[:12] + bytes(block) + packed[12 + len(block) :]


def folder(path):
    path.mkdir()


def fifo(path):
    os.mkfifo(path)


def fifo_in_a_folder(path):
    path.mkdir()
    (path / "a.txt").write_bytes(LINES)
    os.mkfifo(path / "pipe")


def bound_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def link_to(target):
    return lambda path: path.symlink_to(target)


def holding(data):
    return lambda path: path.write_bytes(data() if callable(data) else data)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(2**43)  # more than the disk has


def sparse_in_a_folder(path):
    path.mkdir()
    for name in "abc":
        with open(path / name, "wb") as file:
            file.truncate(2**43)


BOMB = bytes(32 * MIB)
ROWS = {
    "fifo": ("a.txt", fifo, "is a FIFO: give an ordinary file"),
    "packed fifo": ("a.xz", fifo, "is a FIFO: give an ordinary file"),
    "fifo in a folder": ("a", fifo_in_a_folder, "pipe is a FIFO"),
    "socket": ("a.txt", bound_socket, "is a socket"),
    "zeros without end": ("a.txt", link_to("/dev/zero"), "is a device"),
    "nothing": ("a.txt", link_to("/dev/null"), "is a device"),
    "files of a folder": ("a", sparse_in_a_folder, "bytes and its disk has room for"),
    "link to itself": ("a.txt", link_to("a.txt"), "does not exist: set data_dir"),
    "more than memory": ("a.txt", sparse, "bytes and its disk has room for"),
    "gz bomb": ("a.gz", holding(lambda: gzip.compress(BOMB)), "decompression bomb"),
    "xz bomb": ("a.xz", holding(lambda: lzma.compress(BOMB, preset=0)), "decompression bomb"),
    "zip bomb": ("a.zip", holding(lambda: zipped(BOMB)), "decompression bomb"),
    "zip bomb of bz2": (
        "a.zip",
        holding(lambda: zipped(BOMB, zipfile.ZIP_BZIP2)),
        "is packed by another method than deflate",
    ),
    "zip that states less": (
        "a.zip",
        holding(lambda: zipped(BOMB, file_size=10)),
        "is damaged .*copy or download it again",
    ),
    "xz bomb of streams": (
        "a.xz",
        holding(lambda: lzma.compress(bytes(MIB)) * 64),
        "decompression bomb",
    ),
    "xz with a dictionary of 1.5 GiB": (
        "a.xz",
        holding(lambda: big_dictionary(LINES)),
        "asks for more than 268,435,456 bytes to be unpacked: unpack it",
    ),
    "20,000 empty xz streams": ("a.xz", holding(lambda: lzma.compress(b"") * 20_000), "is empty"),
    "gz in name alone": ("a.gz", holding(LINES), "is not packed by gzip, by its first"),
    "xz in name alone": ("a.xz", holding(LINES), "is not packed by xz, by its first"),
    "zst bomb": ("a.zst", holding(lambda: zst(BOMB)), "decompression bomb"),
    "zst bomb of frames": ("a.zst", holding(lambda: zst(bytes(MIB)) * 64), "decompression bomb"),
    "zst in name alone": ("a.zst", holding(LINES), "is not packed by zstd, by its first"),
    "zst cut": ("a.zst", holding(lambda: zst(LINES)[:-9]), "is damaged .*copy or download it"),
    "empty zst": ("a.zst", holding(b""), "is empty"),
    "rubbish behind zst": ("a.zst", holding(lambda: zst(LINES) + b"rubbish"), "is damaged"),
    "zip in name alone": ("a.zip", holding(LINES), "is not packed by zip, by its first"),
    "zip of a later version": (
        "a.zip",
        holding(
            lambda: zipped(LINES).replace(b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03\x64")
        ),
        "is packed in a way that is not read .zip file version",
    ),
    "xz of another format": (
        "a.xz",
        holding(lzma.compress(LINES)[:-1] + b"\xff"),
        "is damaged",
    ),
    "rubbish behind xz": ("a.xz", holding(lzma.compress(LINES) + b"rubbish"), "is damaged"),
    "zip of a file without a name": (
        "a.zip",
        holding(lambda: zipped(LINES, filename="") + b"more"),
        "is damaged",
    ),
    "zip of nothing": ("a.zip", holding(b"PK\x05\x06" + bytes(18)), "holds 0 files"),
    "folder by a packed name": ("a.gz", folder, "has no file that matches"),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused_in_one_line_and_little_memory(row, tmp_path, monkeypatch, fails_in_one_line):
    name, make, message = ROWS[row]
    make(tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    monkeypatch.setattr(files, "MAX_UNPACKED", 4 * MIB)
    tracemalloc.start()
    try:
        with fails_in_one_line((ValueError, FileNotFoundError), message):
            text(str(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * MIB, f"{peak:,} bytes"


def test_files_of_a_folder_count_together(tmp_path, monkeypatch, fails_in_one_line):
    for name in "abc":
        (tmp_path / name).write_bytes(LINES)
    monkeypatch.setattr(files, "MAX_BYTES", 2 * len(LINES))
    with fails_in_one_line(ValueError, f"has {3 * len(LINES):,} bytes of text and half of"):
        text(str(tmp_path))


def test_what_is_within_the_limit_is_read(tmp_path, monkeypatch):
    n = 2**16
    monkeypatch.setattr(files, "MAX_UNPACKED", n)
    packed = {"gz": gzip.compress, "xz": lzma.compress, "zip": zipped}
    for ending, pack in packed.items():
        path = tmp_path / f"a.{ending}"
        path.write_bytes(pack(bytes(n)))
        assert files.read_file(path) == bytes(n)
        noise = random.Random(0).randbytes(2 * n)  # its size allows more
        path.write_bytes(pack(noise))
        assert files.read_file(path) == noise
    path = tmp_path / "a.xz"
    path.write_bytes((lzma.compress(LINES) + bytes(2**17)) * 3 + lzma.compress(b""))
    assert files.read_file(path) == 3 * LINES
    path.write_bytes(bz2.compress(LINES))
    with pytest.raises(ValueError, match="is not packed by xz"):
        files.read_file(path)


def test_a_gzip_file_of_any_name_and_its_limit(tmp_path, monkeypatch, fails_in_one_line):
    path = tmp_path / "model.pkl"
    content = bytes(range(256)) * 50
    path.write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:], 0))
    monkeypatch.setattr(files, "MAX_BYTES", len(content))
    assert files.read_gz(path) == content
    monkeypatch.setattr(files, "MAX_BYTES", len(content) - 1)
    with fails_in_one_line(ValueError, "unpacks to more than 12,799 bytes from .*decompression"):
        files.read_gz(path)
    monkeypatch.undo()
    whole = path.read_bytes()
    for data in (whole[:-5], whole[:40], b"plain text", whole[:200] + b"\0" * 9 + whole[209:]):
        path.write_bytes(data)
        said = "not packed by gzip" if data == b"plain text" else "damaged"
        with fails_in_one_line(ValueError, f"model.pkl is {said}"):
            files.read_gz(path)


def unreadable(monkeypatch, name):
    """Makes folders and files of this name fail, as their permissions would for most users."""
    scandir, opened = os.scandir, io.open

    def refuse(function):
        def maybe(path, *args, **kwargs):
            if os.path.basename(str(path)) == name:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return maybe

    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr(io, "open", refuse(opened))


@pytest.mark.parametrize("name", ["locked", "inner", "z.txt"])
def test_what_cannot_be_read_is_no_smaller_text(name, tmp_path, monkeypatch, fails_in_one_line):
    (tmp_path / "locked/inner").mkdir(parents=True)
    for path in ("a.txt", "locked/b.txt", "locked/inner/z.txt"):
        (tmp_path / path).write_bytes(LINES)
    unreadable(monkeypatch, name)
    with fails_in_one_line(PermissionError, f"Permission denied: .*{name}"):
        text(str(tmp_path))


@pytest.mark.parametrize(
    "data_dir, error, message",
    [
        (5, ValueError, "data_dir is 5: expected a path"),
        (None, ValueError, "data_dir is None: expected a path"),
        (b"a", ValueError, "data_dir is b'a': expected a path"),
        ("", ValueError, "data_dir is '': expected a path"),
        ("~nobodys-name/text", ValueError, "there is no home of ~nobodys-name: write"),
        ("a\0b", FileNotFoundError, "does not exist"),
        ("x" * 5000, OSError, "File name too long"),
    ],
)
def test_what_is_no_path(data_dir, error, message, tmp_path, monkeypatch, fails_in_one_line):
    monkeypatch.chdir(tmp_path)
    with fails_in_one_line(error, message):
        text(data_dir)


def test_other_tasks_refuse_alike(tmp_path, fails_in_one_line):
    os.mkfifo(tmp_path / "enwik8.gz")
    with fails_in_one_line(ValueError, "enwik8.gz is a FIFO"):
        enwik8(str(tmp_path / "enwik8.gz"))
    for name in ("train.en", "train.de"):
        os.mkfifo(tmp_path / name)
    with fails_in_one_line(ValueError, "train.en is a FIFO"):
        text_pairs(str(tmp_path)).n_targets("train")
    with fails_in_one_line(ValueError, "is a folder: give an ordinary file"):
        files.read_file(tmp_path)


def test_flipped_bytes_are_told_or_harmless(tmp_path):
    """Packed files with a few bytes changed: an error of one line, or the same text."""
    rng = random.Random(0)
    for ending, pack in {"gz": gzip.compress, "xz": lzma.compress, "zip": zipped}.items():
        whole, path = pack(LINES), tmp_path / f"a.{ending}"
        for _ in range(100):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data[: rng.choice((None, None, rng.randrange(len(data))))])
            try:
                found = files.read_file(path)
            except (ValueError, OSError) as error:
                assert "\n" not in str(error)
            else:
                assert found == LINES

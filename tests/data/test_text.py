"""Text from files and folders, plain and compressed."""

import gzip
import lzma
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from reformax.data import files
from reformax.data.text import text

LINES = b"".join(b"line %d\n" % i for i in range(100))


def write(path, data=LINES):
    """Writes `data`, packed by the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.mkdir("folder")
            archive.writestr("folder/text", data)
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(data))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "a.xz", "a.zip", "A.ZIP.xz"])
def test_file_is_read_whole_and_in_order(name, tmp_path, content):
    assert content(text(str(write(tmp_path / name)))) == LINES


def test_folder_is_joined_by_relative_path_with_newlines(tmp_path, content):
    write(tmp_path / "b.txt", b"second, without a newline")
    write(tmp_path / "b" / "z.txt.gz", b"third" * 9)
    write(tmp_path / "a" / "deep" / "er.md", b"first" * 9 + b"\n")
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / ".git" / "config", b"hidden")
    write(tmp_path / "a" / ".DS_Store", b"hidden")
    joined = b"first" * 9 + b"\n" + b"second, without a newline\n" + b"third" * 9 + b"\n"
    assert content(text(str(tmp_path))) == joined
    assert content(text(str(tmp_path), pattern="*.md")) == b"first" * 9 + b"\n"


def test_runs_are_left_out(tmp_path, content, fails_in_one_line):
    write(tmp_path / "a.txt", LINES)
    write(tmp_path / "config.gin", LINES)  # alone, it makes no run
    write(tmp_path / "runs/notes.txt", LINES)
    for name in (".lock", "metrics.jsonl"):
        write(tmp_path / "runs/trained" / name, b"{}")
    for name in ("config.gin", "checkpoints/0/arrays"):
        write(tmp_path / "runs/converted" / name, b"\xff")
    assert content(text(str(tmp_path))) == 3 * LINES
    for name in ("trained", "converted"):
        with fails_in_one_line(ValueError, f"{name} is the folder of a run: give a folder of text"):
            text(str(tmp_path / "runs" / name))
    write(tmp_path / "runs/trained/a.txt", LINES)
    assert content(text(str(tmp_path / "runs/trained/a.txt"))) == LINES


def test_files_of_a_folder_are_documents(tmp_path, fails_in_one_line):
    files_of = [LINES, b"alone", b"zero\0inside" * 9, LINES]
    for i, data in enumerate(files_of):
        write(tmp_path / f"{i}.txt", data)
    rows = b'{"text": "one"}\n{"text": "other"}\n'
    write(tmp_path / "2a.jsonl.gz", rows)
    task = text(tmp_path, max_held_out=10, windows="documents")
    zeros = len(LINES) + 6 + 5 + 11 * np.arange(9)
    table = len(LINES) + 6 + 11 * 9 + 1
    begins = [0, len(LINES), len(LINES) + 6, *zeros, table, table + 4, table + 10]
    assert list(task.borders("train")) == begins
    assert not len(task.borders("valid")) and not len(task.borders("test"))
    begins = np.cumsum([0, len(LINES), 6])
    raw = text(tmp_path, "[013].txt", max_held_out=10, raw=True)
    assert list(raw.borders("train")) == list(begins)
    assert text(tmp_path / "2.txt", raw=True).borders is None
    assert text(tmp_path / "0.txt").borders is None
    match = "windows is 'documents': the text to train on is one document, give a table or a fol"
    with fails_in_one_line(ValueError, match):
        text(tmp_path / "0.txt", windows="documents")
    with fails_in_one_line(
        ValueError, "windows is 'rows': expected 'anywhere', 'documents' or 'each_once'"
    ):
        text(tmp_path, windows="rows")
    with fails_in_one_line(ValueError, match):
        text(tmp_path / "0.txt", vocab_size=300, windows="documents")
    with fails_in_one_line(ValueError, "document_mask is True: the text to train on is one docum"):
        text(tmp_path / "0.txt", vocab_size=300, document_mask=True)
    masked = text(tmp_path, max_held_out=10, document_mask=True)
    assert masked.train_batch(0, 0, 99, 40).inputs.segment_ids.max() > 2


def test_order_is_that_of_the_paths_written_with_slashes(tmp_path):
    names = ["B.txt", "a-b/c.txt", "a.txt", "a/b.txt", "a0/c.txt", "b.txt"]
    for name in reversed(names):
        write(tmp_path / name)
    found = [path.relative_to(tmp_path).as_posix() for path in files.list_files(tmp_path)]
    assert found == names


def test_home_is_expanded(tmp_path, monkeypatch, content):
    write(tmp_path / "notes.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert content(text("~/notes.txt")) == LINES


def test_dangling_link_is_no_file(tmp_path, content):
    write(tmp_path / "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    assert content(text(str(tmp_path))) == LINES


def test_missing(tmp_path, fails_in_one_line):
    with fails_in_one_line(FileNotFoundError, "nowhere does not exist: set data_dir"):
        text(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "a.xz", "a.zip"])
def test_empty(name, tmp_path, fails_in_one_line):
    with fails_in_one_line(ValueError, f"{name} is empty: give a file with text"):
        text(str(write(tmp_path / name, b"")))


def test_too_short(tmp_path, fails_in_one_line):
    with fails_in_one_line(ValueError, "a.txt: 3 bytes are too few to split 90/5/5"):
        text(str(write(tmp_path / "a.txt", b"abc")))


def test_folder_without_a_match(tmp_path, fails_in_one_line):
    write(tmp_path / "a.md")
    with fails_in_one_line(ValueError, r"has no file that matches '\*\.txt': put text files there"):
        text(str(tmp_path), pattern="*.txt")


def test_a_pattern_of_what_is_read_whole(tmp_path, content, fails_in_one_line):
    path = write(tmp_path / "a.md")
    assert content(text(str(path), pattern="*.md")) == LINES
    match = r"pattern is '\*\.txt', and .*a.md is a file that does not match it: set text.text.pat"
    with fails_in_one_line(ValueError, match):
        text(str(path), pattern="*.txt")
    match = "state is a folder that `datasets` saved: set text.text.pattern='\\*', or give a folder"
    write(tmp_path / "state" / "state.json", b"{}")
    with fails_in_one_line(ValueError, match):
        text(str(tmp_path / "state"), pattern="*.txt")
    write(tmp_path / "state" / "a.txt")
    assert content(text(str(tmp_path / "state"), pattern="*.txt", raw=True)) == LINES


def test_zip_with_a_password(tmp_path, fails_in_one_line):
    path = write(tmp_path / "a.zip")
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.rindex(signature) + flags] |= 1  # marks the text as encrypted
    path.write_bytes(data)
    with fails_in_one_line(ValueError, "a.zip cannot be read .*password.*: unpack it yourself"):
        text(str(path))


def test_local_data_need_neither_tensorflow_nor_jax(tmp_path):
    shutil.copy(write(tmp_path / "notes.txt"), tmp_path / "enwik8")
    script = f"""
import sys
from reformax.data import duplication, enwik8, stdlib, text
for task in text.text({str(tmp_path)!r}), enwik8.enwik8({str(tmp_path)!r}):
    task.train_batch(0, 0, 2, 8), list(task.eval_batches("test", 2, 8, 4))
loaded = {{"jax", "tensorflow", "tensorflow_datasets", "trax"}} & set(sys.modules)
assert not loaded, loaded
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)

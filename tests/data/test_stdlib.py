"""The standard library's source text."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from reformax.data.base import SPLITS
from reformax.data.stdlib import stdlib


@pytest.fixture(scope="module")
def whole():
    return stdlib()


def use_folder(monkeypatch, folder):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})


def test_begins_and_ends_with_the_first_and_last_module(whole, content):
    folder = Path(sysconfig.get_paths()["stdlib"])
    first = (folder / "__future__.py").read_bytes()
    last = (folder / "zoneinfo" / "_zoneinfo.py").read_bytes()
    assert content(whole, "train").startswith(first)
    assert content(whole, "test").endswith(last)


def test_split_is_ninety_five_five(whole):
    train, valid, test = map(whole.n_targets, ("train", "valid", "test"))
    assert valid == test == (train + valid + test) * 5 // 100
    assert valid > 400_000


def test_held_out_text_is_as_hard_as_the_documentation_says(whole, content):
    train, *held_out = (np.frombuffer(content(whole, s), np.uint8) for s in SPLITS)
    pairs = np.uint16(256) * train[:-1] + train[1:]
    counts = np.bincount(pairs, minlength=1 << 16).reshape(256, 256) + 0.1
    bits = -np.log2(counts / counts.sum(1, keepdims=True))
    for text in held_out:
        assert 3.4 < bits[text[:-1], text[1:]].mean() < 3.7


def test_holds_the_library_alone_in_the_order_of_paths(tmp_path, monkeypatch, content):
    for name, source in {
        "b.py": b"b = 1",
        "a/z.py": b"z = 1\n",
        "a/__init__.py": b"",
        "Cap.py": b"Cap = 1\n",
        "lib.so": b"binary",
        "site-packages/other.py": b"other",
        "a/__pycache__/z.py": b"cached",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(source)
    use_folder(monkeypatch, tmp_path)
    assert content(stdlib()) == b"Cap = 1\nz = 1\nb = 1\n"


def test_max_bytes_keeps_the_beginning_of_each_split(whole, content):
    assert stdlib(max_bytes=10**9).n_targets("valid") == whole.n_targets("valid")
    assert stdlib(max_bytes=100).n_targets("test") >= 1
    part = stdlib(max_bytes=1_000_000)
    for split, share in (("train", 900_000), ("valid", 50_000), ("test", 50_000)):
        assert abs(part.n_targets(split) - share) <= 1
        assert content(whole, split).startswith(content(part, split))


def test_files_are_documents():
    tokens, segment_ids = stdlib(document_mask=True).train_batch(0, 0, 64, 4096).inputs
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    assert begins.any() and set(tokens[:, :-1][begins]) == {ord("\n")}


@pytest.mark.parametrize(
    "max_bytes, message",
    [(0, "max_bytes is 0: expected at least 1"), (7, "leaves a split empty: use 100")],
)
def test_max_bytes_too_small(max_bytes, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        stdlib(max_bytes)


def test_python_without_its_source(tmp_path, monkeypatch, fails_in_one_line):
    use_folder(monkeypatch, tmp_path / "python311.zip")
    with fails_in_one_line(FileNotFoundError, r"python311.zip has no .py files .*text.text"):
        stdlib()

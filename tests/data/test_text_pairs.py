"""Pairs of aligned text files, and their errors."""

import gzip

import pytest

from reformax.data.text_pairs import read_lines, text_pairs

EN = ["a man walks", "two dogs run", "the man is old", "a dog sees the man", "one\u2028line"]
DE = ["ein Mann geht", "zwei Hunde laufen", "der Mann ist alt", "ein Hund sieht ihn", "eine Zeile"]


def write(folder, name, lines, end="\n"):
    data = end.join(lines).encode() + end.encode()
    path = folder / name
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def folder(tmp_path):
    for language, lines in (("en", EN), ("de", DE)):
        write(tmp_path, f"train.{language}.gz", lines)
        write(tmp_path, f"val.{language}", lines[:2])
        write(tmp_path, f"test_2016.{language}", lines[1:3], end="\r\n")
    return tmp_path


def test_files_are_read_plain_and_packed(folder):
    task = text_pairs(str(folder), vocab_size=40)
    assert task.vocab_size == 40
    assert task.translation.sentences("train") == (EN, DE)
    assert task.translation.sentences("valid") == (EN[:2], DE[:2])
    assert task.translation.sentences("test") == (EN[1:3], DE[1:3])
    back = text_pairs(str(folder), source="de", target="en", vocab_size=40)
    assert back.translation.sentences("test") == (DE[1:3], EN[1:3])
    marked = (folder / "val.en").read_bytes()
    (folder / "val.en").write_bytes(b"\xef\xbb\xbf" + marked)  # as some editors begin a file
    assert text_pairs(str(folder)).translation.sentences("valid")[0] == EN[:2]
    assert back.translation.vocabulary.encode(EN[0]) != [2, 1]
    (batch,) = task.eval_batches("test", 1, 64, 64)
    assert batch.weights.sum() == task.n_targets("test")


def test_a_split_is_read_when_it_is_needed(folder):
    for path in folder.glob("train*"):
        path.unlink()
    task = text_pairs(str(folder))
    assert task.translation.sentences("test") == (EN[1:3], DE[1:3])


@pytest.mark.parametrize(
    "names",
    [
        ("train.{}", "dev.{}", "test.{}"),
        ("corpus.train.{}", "corpus.dev.{}", "corpus.test.{}.gz"),
        ("train/news.{}", "valid/news.{}", "test/news.{}"),
        ("a/train-clean.{}", "a/validation.{}", "a/test.{}"),
    ],
)
def test_splits_are_known_by_all_their_names(names, tmp_path):
    for name, lines in zip(names, (slice(None), slice(2), slice(1, 3)), strict=True):
        for language, text in (("en", EN), ("de", DE)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            write(tmp_path, name.format(language), text[lines])
    task = text_pairs(str(tmp_path))
    assert task.translation.sentences("train") == (EN, DE)
    assert task.translation.sentences("valid") == (EN[:2], DE[:2])
    assert task.translation.sentences("test") == (EN[1:3], DE[1:3])
    en, de = (names[1].format(language) for language in ("en", "de"))
    assert f"valid 2 pairs ({en}, {de})" in task.summary()[0]


def test_names_are_arguments(folder, fails_in_one_line):
    write(folder, "test_2017.en", EN[:1])
    write(folder, "test_2017.de", DE[:1])
    with fails_in_one_line(ValueError, "test_2017.en: set text_pairs.text_pairs.test to one"):
        text_pairs(str(folder)).n_targets("test")
    write(folder, "._test_2017.en", EN)  # as macOS puts one beside each file
    task = text_pairs(str(folder), test="*_2017.{language}")
    assert task.translation.sentences("test") == (EN[:1], DE[:1])
    with fails_in_one_line(FileNotFoundError, "has no file dev.en, .gz, .xz or .zip: put one"):
        text_pairs(str(folder), valid="dev.{language}").n_targets("valid")
    with fails_in_one_line(ValueError, "test='test.en' must have {language} in it"):
        text_pairs(str(folder), test="test.en")


def test_bad_files_are_told(folder, fails_in_one_line):
    def sentences():
        return text_pairs(str(folder)).translation.sentences("valid")

    write(folder, "val.de", DE)
    with fails_in_one_line(ValueError, "val.en has 2 lines and .*val.de 5: line n of one must"):
        sentences()
    (folder / "val.de").write_bytes(b"")
    with fails_in_one_line(ValueError, "val.de is empty: give a file with text"):
        sentences()
    (folder / "val.de").write_bytes("ein Mann\nzwei größere\n".encode("latin-1"))
    with fails_in_one_line(ValueError, "val.de is not UTF-8: byte 0xf6 in line 2: convert it"):
        sentences()
    (folder / "val.de").unlink()
    (folder / "val.de.gz").write_bytes(b"damaged")
    with fails_in_one_line(ValueError, "val.de.gz is not packed by gzip"):
        sentences()
    with fails_in_one_line(FileNotFoundError, "nowhere does not exist: set data_dir"):
        text_pairs(str(folder / "nowhere"))
    with fails_in_one_line(ValueError, "must be a folder with the files of both languages"):
        text_pairs(str(folder / "val.en"))


@pytest.mark.parametrize(
    "data, lines",
    [
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"\n", [""]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        ("a\x0bb\x85c\n".encode(), ["a\x0bb\x85c"]),
    ],
)
def test_only_newlines_end_lines(tmp_path, data, lines):
    (tmp_path / "text").write_bytes(data)
    assert read_lines(tmp_path / "text") == lines

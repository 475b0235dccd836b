"""Language models of pieces: every text comes back, documents end, the run keeps the vocabulary."""

import logging

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from reformax.data import piece_blocks, pieces, vocabulary
from reformax.data.text import text
from tests.data import tables

LINES = [f"Line {i} of the text,  with spaces\t and größe: {i * i}." for i in range(400)]
TEXT = "\n".join(LINES) + "\n\n    indented\n"
STRANGE = ["", " ", "\n\n", "  a ", "漢字 kana\r\n", "\x07 <s> </s> <0x41>", "é" * 99, "x" * 40_000]


def tokenizer_json(path, *, end="<|endoftext|>", **options):
    return tables.tokenizer_json(path, LINES, end, **options)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    return path


def task_of(kind, data, **options):
    """A task of learnt pieces or of a tokenizer.json, with its vocabulary ready."""
    folder = data.parent
    if kind == "tokenizers":
        file = tokenizer_json(folder / "tokenizer.json", end=options.pop("end", "<|endoftext|>"))
        options |= {"vocabulary": str(file)}
    else:
        options |= {"vocab_size": 400, "model_type": kind}
    (folder / "run").mkdir(exist_ok=True)
    task = text(str(data), **options)
    task.vocabulary.keep_in(folder / "run", begun=False)
    return task


def ids_of(task, split):
    batches = task.eval_batches(split, 4, 64, 64)
    return np.concatenate([batch.targets[batch.weights == 1] for batch in batches])


KINDS = ["bpe", "unigram", "tokenizers"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_comes_back(kind, data):
    task = task_of(kind, data)
    for one in (*STRANGE, TEXT):
        assert task.vocabulary.decode(task.vocabulary.encode(one)) == one
    whole = "".join(task.vocabulary.decode(ids_of(task, s)) for s in ("train", "valid", "test"))
    assert whole == TEXT
    assert task.vocab_size == 400 and task.n_bytes("valid") == text(str(data)).n_targets("valid")
    assert task.n_targets("train") < 0.9 * task.n_bytes("train")
    assert task.fingerprint("valid") == text(str(data)).fingerprint("valid")


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_ends_in_one_id(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    tables.write_texts(path, LINES)
    task = task_of(kind, path)
    ids = ids_of(task, "train")
    end = {"tokenizers": 0}.get(kind, 1)
    decoded = task.vocabulary.decode(ids)
    n_documents = sum(line + "\n" in decoded for line in LINES)
    assert 350 < (ids == end).sum() == n_documents < 400
    assert decoded.startswith(f"{LINES[0]}\n{LINES[1]}\n")


def test_blocks_cut_documents_where_a_line_or_a_word_ends(monkeypatch):
    monkeypatch.setattr(piece_blocks, "BLOCK", 8)
    for data in (b"ab\ncd\nef gh ij\0\0k", b"x" * 20, "éééééééé".encode(), b"        \n" * 3):
        found = [data[first:last] for first, last in piece_blocks.blocks(data)]
        assert b"".join(found) == data and all(0 < len(part) <= 8 for part in found)
        for part in found:
            part.decode()
    found = [b"ab\ncd\n", b"ef gh", b" ij\0", b"\0", b"k"]
    data = b"".join(found)
    assert [data[first:last] for first, last in piece_blocks.blocks(data)] == found


@pytest.mark.parametrize("kind", ["bpe", "tokenizers"])
def test_the_run_keeps_it(kind, data, fails_in_one_line):
    task, run = task_of(kind, data), data.parent / "run"
    fingerprint = task.vocabulary.keep_in(run, begun=True)
    assert pieces.load(run).encode(TEXT) == task.vocabulary.encode(TEXT)
    # The file may be gone, and nothing is learnt again.
    (data.parent / "tokenizer.json").unlink(missing_ok=True)
    options = {"vocab_size": 400}
    if kind == "tokenizers":
        options["vocabulary"] = str(data.parent / "tokenizer.json")
        with fails_in_one_line(FileNotFoundError, "tokenizer.json, which does not exist: give a"):
            text(str(data), **options).vocabulary.keep_in(data.parent, begun=False)
    again = text(str(data), **options)
    assert again.vocabulary.keep_in(run, begun=True) == fingerprint
    assert (ids_of(again, "valid") == ids_of(task, "valid")).all()
    (run / vocabulary.FILE).write_bytes(b"damaged")
    with fails_in_one_line(ValueError, "vocabulary.model is no vocabulary"):
        pieces.load(run)
    (run / vocabulary.FILE).unlink()
    with fails_in_one_line(ValueError, "vocabulary.model is missing: the model's ids mean nothing"):
        pieces.load(run)


def test_another_vocabulary_is_not_taken(data, fails_in_one_line):
    task_of("tokenizers", data)
    run, other = data.parent / "run", tokenizer_json(data.parent / "other.json", size=300)
    with fails_in_one_line(ValueError, "other.json, which is not .*vocabulary.model: give the run"):
        text(str(data), vocabulary=str(other)).vocabulary.keep_in(run, begun=True)
    with fails_in_one_line(ValueError, "is not the vocabulary of this text and these settings"):
        text(str(data), vocabulary=str(other)).vocabulary.keep_in(run, begun=False)
    with fails_in_one_line(ValueError, "has 400 pieces and the config vocab_size=500: set vocab"):
        text(str(data), vocab_size=500).vocabulary.keep_in(run, begun=True)


def test_another_kind_of_pieces_is_not_taken(data, fails_in_one_line):
    task_of("bpe", data)
    with fails_in_one_line(ValueError, "has model_type='bpe' and the config 'unigram'"):
        text(str(data), vocab_size=400, model_type="unigram").vocabulary.keep_in(
            data.parent / "run", begun=True
        )


def test_a_sentencepiece_model_is_a_vocabulary_too(data):
    learnt = task_of("bpe", data)
    model = data.parent / "own.model"
    (data.parent / "run" / vocabulary.FILE).rename(model)
    task = text(str(data), vocabulary=str(model))
    assert task.vocab_size == 400
    assert (ids_of(task, "valid") == ids_of(learnt, "valid")).all()


@pytest.mark.parametrize("kind", ["unigram", "tokenizers"])
def test_what_is_said_beside_a_file_is_what_it_has(kind, data, fails_in_one_line):
    task_of(kind, data)
    has = {"vocab_size": 400, "model_type": "bpe" if kind == "tokenizers" else kind}
    file, folder = data.parent / "file", data.parent / "other"
    folder.mkdir()
    (data.parent / "run" / vocabulary.FILE).rename(file)
    for same in ({}, {"vocab_size": 256}, has):
        text(str(data), vocabulary=str(file), **same).vocabulary.keep_in(folder, begun=False)
    (folder / vocabulary.FILE).unlink()
    for name, value, shown in (("vocab_size", 401, 401), ("model_type", "word", "'word'")):
        other = text(str(data), vocabulary=str(file), **has | {name: value}).vocabulary
        match = f"text.text.{name} is {shown}, and .*file has {has[name]!r}: set it to that, or le"
        with fails_in_one_line(ValueError, match):
            other.keep_in(folder, begun=False)
        assert not list(folder.iterdir())
        # A run that began goes on with what it keeps, whatever its config said.
        (folder / vocabulary.FILE).write_bytes(file.read_bytes())
        other.keep_in(folder, begun=True)
        (folder / vocabulary.FILE).unlink()


def test_bytes_have_no_kind_of_pieces(data, fails_in_one_line):
    with fails_in_one_line(ValueError, "model_type is 'bpe': bytes are no pieces, leave it out"):
        text(str(data), model_type="bpe")


def test_what_gives_no_text_back_is_told(data, caplog):
    path = tokenizer_json(data.parent / "lower.json", lower=True)
    with caplog.at_level(logging.WARNING):
        text(str(data), vocabulary=str(path)).vocabulary.keep_in(data.parent, begun=False)
    assert "does not give the text back as it was" in caplog.text


@pytest.mark.parametrize("place", [0.3, 0.6, 0.97])
def test_a_loss_anywhere_in_the_text_is_told(place, tmp_path, caplog):
    """Such as of a tokenizer that knows one language, in a text whose later part is of another."""
    model = models.WordLevel({"[UNK]": 0, "known": 1, "words": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    n = 40_000
    parts = [b"known words "] * n
    begin = int(place * n)
    parts[begin : begin + n // 50] = ["三國演義 ".encode()] * (n // 50)
    (tmp_path / "a.txt").write_bytes(b"".join(parts))
    task = text(tmp_path / "a.txt", vocabulary=str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        task.vocabulary.keep_in(tmp_path, begun=False)
        task.n_targets("test")
    split = "train" if place < 0.9 else "test"
    told = [x for x in caplog.messages if "does not give the text back as it was" in x]
    assert len(told) == 1 and f"samples of {split}: " in told[0] and "三國演義" in told[0]
    assert "[UNK]" in told[0]


def test_what_gives_all_text_back_is_not_told(data, caplog):
    with caplog.at_level(logging.WARNING):
        task = task_of("tokenizers", data)
        list(map(task.n_targets, ("train", "valid", "test")))
    assert not caplog.messages


def test_a_vocabulary_without_an_end_of_documents_has_a_newline(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    tables.write_texts(path, LINES)
    model = tokenizer_json(tmp_path / "tokenizer.json", end="[PAD]")
    task = text(str(path), vocabulary=str(model))
    assert task.vocabulary.decode(ids_of(task, "valid")).count("\n") > 10
    with caplog.at_level(logging.WARNING):
        task.vocabulary.keep_in(tmp_path, begun=False)
        (tmp_path / "b").mkdir()
        ended = tokenizer_json(tmp_path / "ended.json")
        text(str(path), vocabulary=str(ended)).vocabulary.keep_in(tmp_path / "b", begun=False)
    (told,) = caplog.messages
    assert "tokenizer.json has no id for the end of a document (none of <|endoftext|>, " in told


def begins_of(task, split):
    """The texts that begin at a task's borders, each up to the next one."""
    ids = ids_of(task, split)
    parts = np.split(ids, task.borders(split))
    return [task.vocabulary.decode(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["<|endoftext|>", "[PAD]"])
def test_borders_are_the_pieces_that_documents_begin_with(kind, end, tmp_path):
    path = tmp_path / "a.jsonl"
    tables.write_texts(path, LINES)
    task = task_of(kind, path, **({"end": end} if kind == "tokenizers" else {}))
    held_out = len(task.borders("valid"))
    assert held_out > 10 and len(task.borders("train")) == 400 - held_out * 2
    before, *documents = begins_of(task, "valid")
    assert documents[:-1] == [f"{line}\n" for line in LINES[400 - 2 * held_out :][: held_out - 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_documents_of_pieces_too(kind, tmp_path):
    """Many in a block, one of several blocks; ids are those of the text as one file."""
    sizes = [3, 40, 1, 2, 150, 4, 900, 1, 30, 2, 700]
    folder, texts = tmp_path / "folder", []
    folder.mkdir()
    for i, size in enumerate(sizes):
        texts.append("".join(f"{line}\n" for line in (LINES * 3)[i : i + size]))
        (folder / f"{i:02}.txt").write_text(texts[-1])
    (tmp_path / "one.txt").write_text("".join(texts))
    task = task_of(kind, folder, max_held_out=5_000, windows="documents")
    one = task_of(kind, tmp_path / "one.txt", max_held_out=5_000)
    np.testing.assert_array_equal(ids_of(task, "train"), ids_of(one, "train"))
    before, *documents = begins_of(task, "train")
    assert before == "" and documents[:-1] == texts[:-1]
    assert one.borders is None and not len(task.borders("valid"))
    batch = task.train_batch(0, 0, 64, 32)
    assert (batch.inputs != one.train_batch(0, 0, 64, 32).inputs).any()
    masked = task_of(kind, folder, max_held_out=5_000, windows="documents", document_mask=True)
    assert masked.fingerprint("train") == task.fingerprint("train") + ", document_mask=True"
    tokens, segment_ids = masked.train_batch(0, 0, 64, 256).inputs
    np.testing.assert_array_equal(tokens, task.train_batch(0, 0, 64, 256).inputs)
    ends = segment_ids[:, 1:] != segment_ids[:, :-1]
    assert ends.any() and set(map(one.vocabulary.decode, tokens[:, :-1][ends][:, None])) == {"\n"}


def test_a_piece_across_two_documents_is_the_first_ones(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "\n": 1, "\nb": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n?."), "isolated")
    tokenizer.save(str(tmp_path / "joins.json"))
    codec = pieces.PieceVocabulary(0, path=tmp_path / "joins.json")
    data = b"aa\nbaa\n" * 3
    encoded = codec.encode_documents(data)
    assert list(encoded.ids[:6]) == [0, 0, 2, 0, 0, 0]
    assert list(codec.positions(data, encoded, np.array([0, 3, 7]))) == [0, 3, 6]


def test_errors_name_the_argument(data, tmp_path, monkeypatch, fails_in_one_line):
    with fails_in_one_line(ValueError, "vocab_size is 8000: expected at most"):
        text(str(data), vocab_size=8000).vocabulary.keep_in(tmp_path, begun=False)
    with fails_in_one_line(ValueError, "offset is 2: pieces have no reserved ids"):
        text(str(data), vocab_size=400, offset=2)
    with fails_in_one_line(ValueError, "mine.txt is no vocabulary .*: give a tokenizer.json"):
        text(str(data), vocabulary=str(data))
    (tmp_path / "bad.json").write_text("{}")
    with fails_in_one_line(ValueError, "bad.json is no vocabulary"):
        text(str(data), vocabulary=str(tmp_path / "bad.json"))
    (tmp_path / "latin.txt").write_bytes(("größe " * 99).encode("latin-1"))
    with fails_in_one_line(ValueError, "the text is not UTF-8: byte 0xf6 at 2 of a split"):
        task_of("tokenizers", tmp_path / "latin.txt").n_targets("train")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with fails_in_one_line(ImportError, r"pip install 'reformax\[tokenizers\]'"):
        text(str(data), vocabulary=str(tmp_path / "bad.json"))


def test_a_tokenizer_that_cuts_and_fills_does_neither_here(data):
    path = tokenizer_json(data.parent / "cuts.json")
    whole = pieces.PieceVocabulary(256, path=path).encode("one line, and one more")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(path))
    assert pieces.PieceVocabulary(256, path=path).encode("one line, and one more") == whole

"""Windows by length of document, and joined documents: in memory, in files, of any processes."""

import json
import math
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from reformax.cli import prepare
from reformax.data import base, documents, joined, stored, windows
from reformax.data.lengths import Lengths, ranges
from reformax.data.mixture import mixture
from reformax.data.rng import generator
from reformax.data.text import text
from reformax.data.token_ids import token_ids
from reformax.data.windows import document_starts
from tests.data.tables import arrays, assert_alike, write

BORDERS, WEIGHTS = (50, 400), (1.0, 1.0, 2.0)
LENGTH = 150
LETTERS = {20: "a", 100: "b", 900: "c"}  # of a document of so many bytes, by its range
BY_LENGTH = {"length_borders": BORDERS, "length_weights": WEIGHTS}


@pytest.fixture
def by_length(tmp_path):
    """Documents whose letter says their length."""
    sizes = np.random.default_rng(0).choice(list(LETTERS), size=600, p=[0.6, 0.3, 0.1])
    rows = [json.dumps({"text": LETTERS[int(n)] * int(n)}) + "\n" for n in sizes]
    (tmp_path / "by_length").mkdir()
    for split in ("train", "valid", "test"):  # no document is cut
        (tmp_path / "by_length" / f"{split}.jsonl").write_text("".join(rows))
    return tmp_path / "by_length"


AUTHORS = 12


@pytest.fixture
def by_author(tmp_path):
    """Chapters of authors in any order: a chapter has its author's letter and its number."""
    rng, rows = np.random.default_rng(1), []
    for number, author in enumerate(rng.integers(AUTHORS, size=500)):
        chapter = " ".join([chr(97 + author) * 3, str(number)] * int(rng.integers(1, 12)))
        rows.append({"text": chapter, "author": f"author {author}"})
    (tmp_path / "by_author.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "by_author.jsonl", rows


@pytest.fixture
def from_files(in_files):
    """Calls a function with texts in files."""

    def call(function):
        with in_files(shard=8000):
            return function()

    return call


def letters(tokens):
    return ["".join(sorted({chr(c) for c in row if c})) for row in tokens]


def kept(task, folder):
    """The task with its pieces, kept in a folder."""
    if task.vocabulary is not None:
        folder.mkdir(exist_ok=True)
        task.vocabulary.keep_in(folder, begun=(folder / "vocabulary.model").exists())
    return task


@pytest.mark.parametrize("where", ["anywhere", "documents"])
def test_rows_are_of_documents_of_each_length_by_weight(where, by_length):
    task = text(by_length, windows=where, **BY_LENGTH)
    found = [x for step in range(60) for x in letters(task.train_batch(0, step, 16, LENGTH)[1])]
    counts = [found.count(letter) for letter in "abc"]
    assert sum(counts) == len(found) == 960  # no window has documents of two ranges
    assert np.allclose(np.array(counts) / 960, [0.25, 0.25, 0.5], atol=0.05)
    assert "50.0% of rows: documents of 400 tokens and more" in task.summary()
    without = text(by_length, windows=where).train_batch(0, 0, 64, LENGTH)[1]
    assert any(len(x) > 1 for x in letters(without))


def test_a_range_without_weight_is_not_seen(by_length):
    task = text(by_length, length_borders=BORDERS, length_weights=(0.0, 0.0, 1.0))
    assert set(letters(task.train_batch(0, 0, 64, LENGTH)[1])) == {"c"}


def test_ranges_are_the_documents_one_behind_the_other():
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 90, 300)
    begins, n = np.cumsum([0, *sizes[:-1]]), int(sizes.sum())
    data, borders = np.arange(n), (10, 40)
    found = ranges(begins, n, borders)
    for k, (low, high) in enumerate([(0, 10), (10, 40), (40, 90)]):
        own = [data[b : b + s] for b, s in zip(begins, sizes, strict=True) if low <= s < high]
        expected = np.concatenate(own)
        assert len(found[k]) == len(expected)
        assert np.array_equal(found[k].positions(np.arange(len(expected))), expected)
        for first in (0, 7, len(expected) - 90):
            spans = [data[a : a + m] for a, m in found[k].spans(first, 90)]
            assert np.array_equal(np.concatenate(spans), expected[first : first + 90])


def test_windows_by_documents_lie_as_in_a_text_of_the_range_alone():
    """`document_starts` of the range's own text, for the same positions."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 300, 200)
    begins, n = np.cumsum([0, *sizes[:-1]]), int(sizes.sum())
    lengths = Lengths((100,), (0.0, 1.0))
    found = ranges(begins, n, lengths.borders)
    own = sizes[sizes >= 100]
    expected_borders = np.cumsum([0, *own[:-1]])
    step = generator(0, 0)
    places = step.integers(np.full(64, own.sum()))
    back = step.integers(120, size=64)
    expected = document_starts(expected_borders, int(own.sum()), 120, places, back)
    draw = windows.WindowDraw(begins, n, 0, 0, 64, 120, slice(None))
    drawn = windows.range_starts(found, lengths, draw)
    assert np.array_equal(drawn[1], expected)


def test_documents_of_a_range_are_hidden_from_each_other(by_length):
    task = text(by_length, document_mask=True, **BY_LENGTH)
    for step in range(5):
        batch = task.train_batch(0, step, 16, LENGTH)
        for tokens, ids in zip(*batch.inputs, strict=True):
            ends = np.flatnonzero(tokens == 0)  # a document's last byte
            expected = 1 + np.searchsorted(ends, np.arange(LENGTH), "left")
            assert np.array_equal(ids, expected)


@pytest.mark.parametrize("how", ["lengths", "joined"])
def test_processes_read_their_rows_alone(how, by_length, by_author, from_files, monkeypatch):
    if how == "lengths":
        task = from_files(
            lambda: text(by_length, document_mask=True, windows="documents", **BY_LENGTH)
        )
    else:
        options = {"join_by": "author", "windows": "documents", "document_mask": True}
        task = from_files(lambda: text(by_author[0], **options))
    whole, read = task.train_batch(5, 9, 8, LENGTH), []
    original = stored.windows_of

    def counted(data, starts, length):
        read.append(len(starts) * length)
        return original(data, starts, length)

    for module in (base, windows):
        monkeypatch.setattr(module, "windows_of", counted)
    for rows in np.array_split(np.arange(8), 3):
        read.clear()
        part = task.train_rows(5, 9, 8, LENGTH, rows)
        assert sum(read) == len(rows) * LENGTH
        for x, y in zip(arrays(part), arrays(whole), strict=True):
            assert np.array_equal(x, y[rows])


@pytest.mark.parametrize("windows, vocab_size", [("anywhere", 256), ("documents", 290)])
def test_lengths_from_files_are_those_of_memory(
    windows, vocab_size, by_author, from_files, tmp_path
):
    def made():
        task = text(
            by_author[0],
            vocab_size=vocab_size,
            windows=windows,
            document_mask=True,
            length_borders=(20, 60),
            length_weights=(1.0, 2.0, 1.0),
        )
        return kept(task, tmp_path / "run")

    assert_alike(made(), from_files(made), LENGTH)


def test_a_mixture_of_texts_draws_lengths_by_itself(by_length):
    """The text of a row says nothing of the range of its document."""
    one, other = (text(by_length, length_borders=(50,), length_weights=(1.0, 1.0)) for _ in "ab")
    only = text(by_length, length_borders=(50,), length_weights=(1.0, 1.0))
    task = mixture((one, other.replace(train_rows=without_rows)), (1.0, 1.0))
    first = [
        letter
        for step in range(40)
        for letter in letters(task.train_batch(0, step, 16, LENGTH)[1])
        if letter != "z"
    ]
    assert 0.4 < first.count("a") / len(first) < 0.6
    assert only.train_rows is not None


def without_rows(seed, step, batch_size, length, rows):
    tokens = np.full((len(np.arange(batch_size)[rows]), length), ord("z"), np.int32)
    return base.Batch(tokens, tokens, np.ones(tokens.shape, np.float32))


def test_ids_of_other_programs_have_lengths_too(by_length, tmp_path):
    (tmp_path / "v").mkdir()
    folder = tmp_path / "made"
    flags = ["--quiet", "--vocab_size=270", "--model_type=char", "--write=megatron"]
    prepare.main([f"--data_dir={by_length}", f"--to={folder}", *flags])
    size = 1 + int(np.fromfile(folder / "megatron" / "train.bin", np.uint16).max())
    options = {"length_borders": BORDERS, "length_weights": (0.0, 0.0, 1.0)}
    task = token_ids(folder / "megatron", size, **options)
    ids = task.train_batch(0, 0, 32, LENGTH)[1]
    assert all(len(set(row.tolist())) <= 2 for row in ids)  # 'c', and a document's end
    assert task.summary()[-1] == "100.0% of rows: documents of 400 tokens and more"


LENGTHS_REFUSED = [
    ({"length_borders": (50,)}, "length_weights has 0 numbers"),
    ({"length_weights": (1.0,)}, "length_borders 0"),
    ({"length_borders": (50, 50), "length_weights": (1.0, 1.0, 1.0)}, "lengths from 2 on"),
    ({"length_borders": (50,), "length_weights": (0.0, 0.0)}, "one above 0"),
    (BY_LENGTH | {"windows": "each_once"}, "'each_once', and a mixture"),
]


@pytest.mark.parametrize("options, words", LENGTHS_REFUSED)
def test_lengths_that_do_not_fit_are_refused(options, words, by_length, fails_in_one_line):
    with fails_in_one_line(ValueError, words):
        text(by_length, **options)


def test_a_range_without_documents_is_refused(by_length, tmp_path, fails_in_one_line):
    task = text(by_length, length_borders=(5000,), length_weights=(0.7, 0.3))
    with fails_in_one_line(ValueError, "0.3 for documents of 5,000 tokens and more.*0 tokens"):
        task.train_batch(0, 0, 4, LENGTH)
    (tmp_path / "one.txt").write_text("one document " * 99)
    with fails_in_one_line(ValueError, "length_weights is set: the text .* is one document"):
        text(tmp_path / "one.txt", length_borders=(50,), length_weights=(1.0, 1.0))


def joined_text(rows):
    """The chapters of each author together, authors in the order of their first chapter."""
    of = {}
    for row in rows:
        of.setdefault(row["author"], []).append(row["text"] + "\0")
    return ["".join(chapters) for chapters in of.values()]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_with_one_value_stand_together(kind, by_author, from_files, content):
    path, rows = by_author
    path = write(path.with_suffix(f".{kind}"), rows)
    expected = "".join(joined_text(rows)).encode()
    for call in (lambda function: function(), from_files):
        task = call(lambda: text(path, join_by="author", windows="documents"))
        assert content(task) == expected
        places = np.cumsum([0, *map(len, joined_text(rows))])
        n = task.n_targets("train")
        assert np.array_equal(task.borders("train"), places[places < n])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_without_a_value_are_alone(kind, tmp_path, from_files):
    """An empty cell and what is no number say nothing of each other."""
    path, texts_of = tmp_path / f"a.{kind}", ["one", "two", "three", "four"] * 20
    values = [(1.0, none)[i % 2] for i in range(40) for none in (math.nan, None)]
    if kind == "csv":
        lines = [f"{x},{'' if v != 1.0 else v}" for x, v in zip(texts_of, values, strict=True)]
        path.write_text("\n".join(["text,author", *lines]))
    elif kind == "jsonl":
        rows = [{"text": x, "author": v} for x, v in zip(texts_of, values, strict=True)]
        rows[3]["author"] = ""
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        columns = {"text": texts_of, "author": pa.array(values, pa.float64(), from_pandas=False)}
        pa.parquet.write_table(pa.table(columns), path)
    for call in (lambda function: function(), from_files):
        task = call(lambda: text(path, join_by="author", windows="documents"))
        assert "(80 documents joined into 41, " in task.summary()[0]


@pytest.mark.parametrize("at", ["remove", "check_joined"])
def test_joining_that_was_stopped_goes_on(at, by_author, from_files, content, monkeypatch):
    """Between two files of a shard that are deleted, and before the manifest."""
    path, rows = by_author
    owner = {"remove": joined.durable, "check_joined": documents}[at]
    original = getattr(owner, at)

    def stopped(path):
        if path.suffix == ".begins" and path.exists():
            raise KeyboardInterrupt
        original(path)

    def check(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, at, stopped if at == "remove" else check)
        with pytest.raises(KeyboardInterrupt):
            from_files(lambda: text(path, join_by="author"))
    task = from_files(lambda: text(path, join_by="author"))
    assert content(task) == "".join(joined_text(rows)).encode()


def test_splits_that_are_written_anew_stay_apart(by_author, from_files, content, tmp_path):
    parts = {"test": by_author[1][:200], "train": by_author[1][100:], "valid": by_author[1][300:]}
    for split, rows in parts.items():
        write(tmp_path / "tables" / f"{split}.parquet", rows)
    task = from_files(lambda: text(tmp_path / "tables", join_by="author"))
    for split, rows in parts.items():
        assert content(task, split) == "".join(joined_text(rows)).encode()


@pytest.mark.parametrize("hide_joined, vocab_size", [(True, 256), (False, 290), (True, 290)])
def test_joined_from_files_are_those_of_memory(
    hide_joined, vocab_size, by_author, from_files, tmp_path
):
    def made():
        task = text(
            by_author[0],
            vocab_size=vocab_size,
            windows="documents",
            join_by="author",
            document_mask=True,
            hide_joined=hide_joined,
        )
        return kept(task, tmp_path / "run")

    memory, files = made(), from_files(made)
    assert_alike(memory, files, LENGTH)


def test_joined_documents_see_each_other_as_asked(by_author):
    path, rows = by_author
    options = {"join_by": "author", "windows": "documents", "document_mask": True}
    for hide in (False, True):
        batch = text(path, hide_joined=hide, **options).train_batch(0, 0, 8, 4000)
        for tokens, ids in zip(*batch.inputs, strict=True):
            authors = [  # of each document: the letter of its words
                {chr(c) for c in part if chr(c).isalpha()}
                for part in np.split(tokens, np.flatnonzero(tokens[:-1] == 0) + 1)
            ]
            of_ids = [
                len({ids[i] for i in np.flatnonzero(tokens == ord(letter))})
                for letter in set().union(*authors)
            ]
            assert max(of_ids) > 1 if hide else max(of_ids) == 1
            expected = 1 + (tokens[:-1] == 0).sum() if hide else len(set().union(*authors))
            assert ids[-1] == expected


def test_a_window_is_filled_by_the_files_of_one_folder(tmp_path, from_files):
    rng = np.random.default_rng(0)
    for repository in range(4):
        for number in range(30):
            path = tmp_path / "code" / f"r{repository}" / f"d{number % 3}" / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(chr(97 + repository) * int(rng.integers(190, 210)) + "\n")
    options = {"windows": "documents", "document_mask": True}
    made = lambda **more: text(tmp_path / "code", max_held_out=100, **options, **more)  # noqa: E731
    alone, together = made(), made(join_by="folder")
    batch = together.train_batch(0, 0, 8, 2**12)
    assert batch.inputs.segment_ids.max() == 2 and alone.train_batch(0, 0, 1, 2**12)[0][1].max() > 9
    starts = [len(letters([row])[0].replace("\n", "")) for row in batch.targets]
    assert starts.count(1) >= 4  # windows of one repository alone
    assert len(together.borders("train")) == 4
    assert_alike(together, from_files(lambda: made(join_by="folder")), LENGTH)
    # Folders of splits are none of repositories.
    os.rename(tmp_path / "code" / "r3", tmp_path / "r3")
    os.makedirs(tmp_path / "split" / "test")
    os.rename(tmp_path / "code", tmp_path / "split" / "train")
    os.rename(tmp_path / "r3", tmp_path / "split" / "test" / "r3")
    task = text(tmp_path / "split", join_by="folder", **options)
    assert len(task.borders("train")) == 3


JOINED_REFUSED = [
    ({"join_by": "folder"}, "nothing goes by documents"),
    ({"join_by": "folder", "document_mask": True}, "no folder in it with two documents"),
    ({"join_by": "text", "document_mask": True}, None),
    ({"join_by": "none", "document_mask": True}, "'none'"),
    ({"hide_joined": True, "document_mask": True}, "set join_by"),
    ({"join_by": "author", "hide_joined": True}, "document_mask=True as well"),
    ({"join_by": "author", "raw": True}, "raw is True"),
]


@pytest.mark.parametrize("options, words", JOINED_REFUSED)
def test_joining_that_changes_nothing_is_refused(options, words, by_author, fails_in_one_line):
    if words is None:  # a field of which each row has its own value
        words = "no value of this field with two documents"
    with fails_in_one_line(ValueError, words):
        text(by_author[0], **options)


def test_lengths_are_of_joined_documents(by_author):
    path, rows = by_author
    least = min(map(len, joined_text(rows)))
    options = {"length_borders": (least,), "length_weights": (0.0, 1.0)}
    text(path, join_by="author", max_held_out=20, **options).train_batch(0, 0, 4, LENGTH)
    with pytest.raises(ValueError, match="and more"):
        text(path, max_held_out=20, **options).train_batch(0, 0, 4, LENGTH)


def test_prepare_joins_and_training_reads_it(by_author, tmp_path, content, capsys):
    path, rows = by_author
    folder = tmp_path / "made"
    flags = ["--quiet", "--vocab_size=290", "--join_by=author"]
    prepare.main([f"--data_dir={path}", f"--to={folder}", *flags])
    options = {"windows": "documents", "document_mask": True, "hide_joined": True}
    ids = sorted((folder / "pieces").iterdir())
    task = kept(text(folder, vocab_size=290, **options), tmp_path / "run")
    task.train_batch(0, 0, 4, 50)
    assert sorted((folder / "pieces").iterdir()) == ids  # encoded by the command
    assert content(text(folder, **options)) == "".join(joined_text(rows)).encode()
    assert prepare.main([f"--data_dir={path}", f"--to={folder}", *flags]) == 0
    assert "nothing of it was made anew" in capsys.readouterr().out
    with pytest.raises(ValueError, match="join_by is 'folder'.*'author'"):
        text(folder, join_by="folder", **options)

"""A folder's own splits: which layouts are splits, which are not, and what a run says of them."""

import pytest

from reformax.data import splits
from reformax.data.text import text
from tests.data import tables

# Names of files, and the split that each is in; None: in none, and so left out.
LAYOUTS = {
    "names": {"train.jsonl": "train", "val.jsonl": "valid", "test.jsonl": "test"},
    "other words": {"Training.txt": "train", "dev.txt": "valid", "testing.txt": "test"},
    "evaluation": {"train.csv": "train", "eval.csv": "valid", "test.csv": "test"},
    "shards": {
        "train-00000-of-00002.parquet": "train",
        "train-00001-of-00002.parquet": "train",
        "validation-00000-of-00001.parquet": "valid",
        "test-00000-of-00001.parquet": "test",
    },
    "shards below": {
        "data/train-00000.arrow": "train",
        "data/validation-00000.arrow": "valid",
        "data/test-00000.arrow": "test",
        "README.md": None,
    },
    "folders": {"train/a.txt": "train", "valid/a.txt": "valid", "test/b/a.txt": "test"},
    "folders of one data set": {
        "train/data-0.arrow": "train",
        "train/state.json": None,
        "test/data-0.arrow": "test",
        "test/state.json": None,
    },
    "a word behind a name": {
        "wiki.train.tokens": "train",
        "wiki.valid.tokens": "valid",
        "wiki.test.tokens": "test",
    },
    "an ending that is the word": {"ptb.train": "train", "ptb.valid": "valid", "ptb.test": "test"},
    "a word at the end": {"basic_train.txt": "train", "basic_val.txt": "valid"},
    "packed": {"train.txt.gz": "train", "test.txt.xz": "test"},
    "several tests": {
        "train.en": "train",
        "val.en": "valid",
        "test_2016_flickr.en": "test",
        "test_2017.en": "test",
    },
    "of each language": {
        "de/train.txt": "train",
        "de/test.txt": "test",
        "fr/train.txt": "train",
        "fr/test.txt": "test",
    },
    "others beside": {"train.txt": "train", "test.txt": "test", "vocab.txt": None, "a.md": None},
    "sources in folders": {"train/a.py": "train", "test/a.py": "test"},
    "of another kind each": {"train.jsonl": "train", "test.parquet": "test"},
    "a test within train": {"train/test.txt": "train", "dev/a.txt": "valid"},
    "neither": {"train.txt": "train", "test.txt": "test", "val_test.txt": None},
}
# Folders that are one text, and words of the line that a run says of it.
ONE_TEXT = {
    "sources": (["train.py", "test.py", "model.py"], None),
    "two sources": (["train.py", "test.py"], None),
    "a package": (["src/a.py", "tests/test_a.py", "test/test_b.py", "train/loop.py"], None),
    "fixtures of a package": (
        ["src/a.py", "src/b.py", "src/c.py", "tests/data/train.txt", "tests/data/test.txt"],
        "tests/data/test.txt, tests/data/train.txt are read as all else",
    ),
    "a book": (["emma.txt", "test.txt"], "test.txt: trained on, for there is no train next to it"),
    "training alone": (["train-0.txt", "train-1.txt"], None),
    "words within words": (["contest.txt", "trainspotting.txt", "device.txt"], None),
    "titles": (["how_to_train_your_dragon.txt", "the_test.txt"], "the_test.txt: trained on"),
}
REFUSED = {
    "a test alone": (["test.txt"], "has test.txt and no train next to it: put the data to train"),
    "no train": (["dev.jsonl", "test.jsonl"], "has dev.jsonl, test.jsonl and no train"),
    "a table of tests": (["corpus.jsonl", "test.jsonl"], "has test.jsonl and no train next to it"),
    "folders without train": (["test/a.txt", "val/a.txt"], "has test/a.txt, val/a.txt and no tr"),
    "books": (
        ["train.txt", "test.txt", "a.txt", "b.txt", "c.txt"],
        r"splits by name \(test.txt, train.txt\), and a.txt, b.txt, c.txt, in none of them, are",
    ),
}


def write(path, name):
    """A file whose text names it."""
    path, rows = path / name, [f"{name} {i} " + 20 * "words " for i in range(9)]
    kinds = set(path.suffixes)
    if kinds & {".jsonl", ".csv", ".parquet", ".arrow"}:
        tables.write_texts(path, rows)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "{}" if path.suffix == ".json" else "\n".join(rows)
    path.write_bytes(tables.PACK.get(path.suffix, bytes)(data.encode()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_s_own_splits_are_kept(layout, tmp_path, content):
    for name in LAYOUTS[layout]:
        write(tmp_path, name)
    task = text(tmp_path)
    own = {split for split in LAYOUTS[layout].values() if split}
    for split in ("train", "valid", "test"):
        data = content(task, split).decode()
        for name, of in LAYOUTS[layout].items():
            where = of if split in own else None  # cut from the end of train
            if where is not None:
                assert (f"{name} 3 " in data) == (where == split), (name, split)
            elif of is None or of != "train":
                assert f"{name} 3 " not in data, (name, split)
    assert task.fingerprint("train") != text(tmp_path, splits="cut").fingerprint("train")


@pytest.mark.parametrize("case", ONE_TEXT)
def test_what_is_no_layout_is_one_text_as_before(case, tmp_path, content):
    names, line = ONE_TEXT[case]
    for name in names:
        write(tmp_path, name)
    task = text(tmp_path)
    paths = sorted(names)
    assert content(task) == b"".join((tmp_path / name).read_bytes() + b"\n" for name in paths)
    assert task.fingerprint("train") == text(tmp_path, splits="cut").fingerprint("train")
    said = task.summary()
    assert len(said) == (1 if line is None else 2) and (line or "cut into") in said[-1]


@pytest.mark.parametrize("case", REFUSED)
def test_splits_that_cannot_be_used_are_refused(case, tmp_path, fails_in_one_line):
    names, line = REFUSED[case]
    for name in names:
        write(tmp_path, name)
    flag = "--config='text.text.splits=\"cut\"'"
    match = f"{line}.*choose files by pattern, or take all as one by {flag}"
    with fails_in_one_line(ValueError, match):
        text(tmp_path)
    assert text(tmp_path, splits="cut").n_targets("train")


def test_a_split_that_is_not_there_is_cut_from_train(tmp_path, content):
    for name in ("train.txt", "test.txt"):
        write(tmp_path, name)
    task = text(tmp_path)
    assert content(task, "test") == (tmp_path / "test.txt").read_bytes() + b"\n"
    assert content(task, "train", "valid") == (tmp_path / "train.txt").read_bytes() + b"\n"
    (line,) = task.summary()
    n = task.n_targets
    assert line == (
        f"{tmp_path}: train {n('train'):,} bytes (1 document, train.txt); valid {n('valid')} bytes "
        f"cut from the end of train; test {n('test'):,} bytes (1 document, test.txt)"
    )
    (tmp_path / "test.txt").write_text("")
    with pytest.raises(ValueError, match="its own split test is empty: put text there"):
        text(tmp_path)


def test_what_is_left_out_is_said(tmp_path, content):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "notes.txt", "README.md"):
        write(tmp_path, name)
    names = ("._a.jsonl", ".git/config", "run/.lock", "info.json", "numbers.csv")
    for name in (*names, "finished.json", "runs.png"):  # drawn when the run has begun
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "gone").symlink_to("nowhere")
    task = text(tmp_path)
    data = content(task).decode()
    assert "README" not in data and all(f"{x}.jsonl 3" in data for x in "abcd")
    first, *rest = task.summary()
    assert first.startswith(f"{tmp_path}: {len(data.encode()):,} bytes (38 documents, 6 files: 4 ")
    assert rest == [
        "left out: gone (a link to nothing)",
        "left out: run/ (a run)",
        "left out: ._a.jsonl, .git/ (hidden)",
        "left out: README.md, info.json (next to tables; text.text.pattern='**' takes them)",
        "left out: finished.json, runs.png (of runs)",
        "numbers.csv: read as text, with the marks between values; where a column or key other "
        "than 'text' has the text, name it by text.text.field",
    ]
    everything = text(tmp_path, pattern="**")
    assert "README" in content(everything).decode()
    chosen = text(tmp_path, pattern="*.jsonl")
    assert "README" not in content(chosen).decode()
    assert any("and 2 more (not *.jsonl)" in line for line in chosen.summary())


def test_splits_beside_a_file_are_told(tmp_path):
    for name in ("train.jsonl", "val.jsonl", "other-test.jsonl", "test.txt"):
        write(tmp_path, name)
    said = text(tmp_path / "train.jsonl").summary()[1:]
    assert said == ["not read: val.jsonl, next to it: give the folder to use these splits"]
    assert len(text(tmp_path / "val.jsonl").summary()) == 1


def test_of_several_words_a_name_says_none():
    assert splits.named("val_test.txt") is None and splits.named("latest.txt") is None
    assert splits.named("Wiki.Train-0.txt") == ("train", "wiki.")
    assert splits.named("test2017") == ("test", "")

"""Texts with labels of any kind: folders of classes and tables, in splits of their own or cut."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import evaluate
import train
from reformax import load_run
from reformax.data.labelled_text import labelled_text
from tests.data import tables

CLASSES = ["arts", "sport", "tech"]


def rows_of(task, split):
    """The texts of a split and their classes."""
    batch = next(task.eval_batches(split, task.n_targets(split), 64, 64))
    texts = [bytes(row[row > 0].astype(np.uint8) - 1).decode() for row in batch.inputs]
    return list(zip(texts, batch.targets[:, 0].tolist(), strict=True))


def write(path, rows):
    """Rows of a text and a label."""
    return tables.write(path, [{"label": label, "text": text} for text, label in rows])


def example(split, i, labels):
    return f"{split}, {i}: ünï", labels[i % len(labels)]


LABELS = {
    "text": (CLASSES, ["arts", "sport", "tech"]),
    "numbers": ([10, 9, -2], ["-2", "9", "10"]),
    "booleans": ([True, False], ["False", "True"]),
    "stars": ([4.5, 4.0, 0.5], ["0.5", "4", "4.5"]),
    "whole floats": ([1.0, 0.0, 2.0], ["0", "1", "2"]),
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
@pytest.mark.parametrize("kind", LABELS)
def test_tables_have_labels_of_any_kind(kind, ending, tmp_path):
    labels, names = LABELS[kind]
    rows = [example("all", i, labels) for i in range(40)]
    write(tmp_path / f"a.{ending}", rows)
    task = labelled_text(tmp_path / f"a.{ending}")
    assert task.kind == "labels" and task.labels.n_classes == len(names)
    found = {split: rows_of(task, split) for split in ("train", "valid", "test")}
    assert [len(part) for part in found.values()] == [32, 4, 4]
    known = {text: str(x).removesuffix(".0") for text, x in rows}
    everything = sum(found.values(), [])
    assert {text for text, _ in everything} == set(known)
    assert all(names[number] == known[text] for text, number in everything)
    (line,) = task.summary()
    shown = ", ".join(f"{i} {name}" for i, name in enumerate(names))
    assert f": {len(names)} classes ({shown}): train 32 (a.{ending}); valid 4 (every" in line
    folder = labelled_text(tmp_path)
    assert [folder.fingerprint(x) for x in found] == [task.fingerprint(x) for x in found]


LAYOUTS = {
    "split/class": "{split}/{label}/{i}.txt",
    "class/split": "{label}/{split}/{i}.txt",
    "data/split/class/more": "data/{split}/{label}/more/{i}",
    "one folder": "{label}/{i}.txt",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_are_classes(layout, tmp_path):
    name, own = LAYOUTS[layout], "split" in layout
    for split, n in (("train", 30), ("test", 9)) if own else (("train", 30),):
        for i in range(n):
            label = CLASSES[i % 3]
            path = tmp_path / name.format(split=split, label=label, i=i)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{split} {i} of {label}")
    (tmp_path / "README.md").write_text("a page")
    task = labelled_text(tmp_path)
    found = {split: rows_of(task, split) for split in ("train", "valid", "test")}
    assert [len(part) for part in found.values()] == ([27, 3, 9] if own else [24, 3, 3])
    assert all(text.endswith(CLASSES[number]) for part in found.values() for text, number in part)
    if own:
        assert all(text.startswith("test") for text, _ in found["test"])
        assert all(text.startswith("train") for x in ("train", "valid") for text, _ in found[x])
    assert any("README.md" in line for line in task.summary()[1:])


def test_a_table_s_own_splits_and_fields(tmp_path):
    for split, n in (("train", 50), ("validation", 6), ("test", 7)):
        rows = [example(split, i, CLASSES) for i in range(n)]
        table = pa.table({"sentence": [x for x, _ in rows], "topic": [x for _, x in rows]})
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    task = labelled_text(tmp_path, field="sentence", label="topic")
    assert [task.n_targets(x) for x in ("train", "valid", "test")] == [50, 6, 7]
    assert all(text.startswith("test") for text, _ in rows_of(task, "test"))
    cut = labelled_text(tmp_path, field="sentence", label="topic", splits="cut")
    assert [cut.n_targets(x) for x in ("train", "valid", "test")] == [50, 7, 6]


@pytest.mark.parametrize("unlabelled", ["-1", "no column"])
def test_a_split_without_labels_is_left_out(unlabelled, tmp_path):
    write(tmp_path / "train.csv", [example("train", i, ["0", "1"]) for i in range(20)])
    write(tmp_path / "test.csv", [example("test", i, ["-1"]) for i in range(5)])
    if unlabelled == "no column":
        (tmp_path / "test.csv").write_text("id,text\n1,one\n")
    task = labelled_text(tmp_path)
    assert task.labels.n_classes == 2
    assert [task.n_targets(x) for x in ("train", "valid", "test")] == [16, 2, 2]
    assert all(text.startswith("train") for text, _ in rows_of(task, "test"))
    assert task.summary()[1:] == ["left out: test.csv (no labels)"]


def test_rows_without_text_or_label_are_counted(tmp_path):
    rows = [example("all", i, CLASSES) for i in range(30)]
    write(tmp_path / "a.jsonl", [*rows, ("", "arts"), (None, "arts"), ("text", None)])
    task = labelled_text(tmp_path)
    assert sum(task.n_targets(x) for x in ("train", "valid", "test")) == 30
    assert task.summary()[1:] == ["left out: 3 rows of train (no text or no label)"]


def test_more_classes_than_a_byte_has(tmp_path):
    write(tmp_path / "a.csv", [(f"text {i}", i % 300) for i in range(900)])
    task = labelled_text(tmp_path)
    assert task.labels.n_classes == 300
    assert {int(text.split()[1]) % 300 - number for text, number in rows_of(task, "test")} == {0}
    write(tmp_path / "a.csv", [(f"text {i}", (i + 256) % 300) for i in range(900)])
    assert labelled_text(tmp_path).fingerprint("train") != task.fingerprint("train")


BAD = {
    "one class": ([("a", "x")] * 20, "has one class, 'x': give a folder for each of several, or"),
    "no labels": ([("a", None)] * 20, "has no text with a label"),
    "values": (
        [("a", i / 7) for i in range(50)],
        "has 50 labels in 50 rows, which are no classes: name the field of labels by labelled_text",
    ),
    "a list": ([("a", [1])] * 20, "line 1 has no value 'label': it has text$"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_class_is_told(case, tmp_path, fails_in_one_line):
    rows, message = BAD[case]
    write(tmp_path / "a.jsonl", rows)
    with fails_in_one_line(ValueError, message):
        labelled_text(tmp_path)


def test_other_fields_and_files_are_told(tmp_path, fails_in_one_line):
    write(tmp_path / "a.parquet", [example("all", i, CLASSES) for i in range(20)])
    with fails_in_one_line(
        ValueError, "has no value 'class': it has label, text, set --config='.*label=\"label\"'"
    ):
        labelled_text(tmp_path, label="class")
    (tmp_path / "b.txt").write_text("no table")
    with fails_in_one_line(ValueError, "b.txt is no table with a field 'text': give one, such as"):
        labelled_text(tmp_path / "b.txt")
    (tmp_path / "c/d").mkdir(parents=True)
    (tmp_path / "c/d/e.png").write_bytes(bytes(range(256)) * 9)
    with fails_in_one_line(
        ValueError, "e.png is no text: .*leave it out by labelled_text.labelled"
    ):
        labelled_text(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "folders"])
def test_the_config_takes_the_number_of_classes_from_the_data(kind, tmp_path, no_search, call):
    for split, n in (("train", 40), ("test", 9)):
        rows = [example(split, i, CLASSES) for i in range(n)]
        if kind != "folders":
            write(tmp_path / f"data/{split}.{kind}", rows)
            continue
        for i, row in enumerate(rows):
            folder = tmp_path / "data" / split / row[1]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.txt").write_text(row[0])
    flags = ["--config_file=configs/classify.gin", f"--data_dir={tmp_path}/data"]
    flags.append(f"--output_dir={tmp_path}/run")
    small = ("d_model=8", "d_ff=8", "d_head=4", "n_heads=2", "length=32", "steps=2")
    small += ("warmup_steps=1", "batch_size=4")
    flags += [f"--config={setting}" for setting in small]
    code, out, err = call(train.main, *flags)
    assert code == 0, err
    assert "3 classes (0 arts, 1 sport, 2 tech): train 36 (" in out
    assert load_run(tmp_path / "run")[0].n_classes == 3
    code, out, err = call(train.main, *flags, "--dry_run")
    assert code == 0, err
    code, _, err = call(train.main, *flags, "--config=n_classes=2")
    assert code == 2 and "has 3 classes and the model n_classes=2: set --config=" in err
    assert "n_classes=3'" in err
    code, out, err = call(evaluate.main, f"--output_dir={tmp_path}/run", "--split=test")
    assert code == 0 and "accuracy" in out, err
    assert "\nrows: " in out and "\nwindows: " not in out

"""Tables of documents, folders of `datasets`, and what is no text."""

import gzip
import io
import json
import random
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reformax.data import documents, files, tables, text_files
from reformax.data.text import text
from tests.data.tables import write, write_texts

TEXTS = [f"Document {i}:\nsome words of it, ünïcode.\n" for i in range(40)]
JOINED = b"".join(text.encode() + b"\0" for text in TEXTS)


def table(texts=TEXTS, name="text"):
    return pa.table({"id": list(range(len(texts))), name: texts})


def write_arrow(path, of=None, options=None, writer=pa.ipc.new_stream, rows=7):
    of = table() if of is None else of
    with writer(str(path), of.schema, options=options) as sink:
        sink.write_table(of, max_chunksize=rows)


def write_dataset(folder, texts=TEXTS, name="text"):
    """A folder as `Dataset.save_to_disk` writes it, of two files."""
    folder.mkdir(parents=True)
    half, names = len(texts) // 2, ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for part, file in zip((texts[:half], texts[half:]), names, strict=True):
        write_arrow(folder / file, table(part, name))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")


def write_kind(path, texts):
    of = table(texts)
    pq.write_table(of, path) if path.suffix == ".parquet" else write_arrow(path, of)


KINDS = {
    **{
        f"a.{ending}": lambda path: write_texts(path, TEXTS)
        for ending in ("jsonl", "ndjson", "jsonl.gz", "jsonl.xz", "jsonl.zst", "json", "csv", "tsv")
    },
    "a.parquet": lambda path: pq.write_table(table(), path),
    "dictionaries.parquet": lambda path: pq.write_table(
        table(pa.array(TEXTS).dictionary_encode()), path, row_group_size=9
    ),
    "large.parquet": lambda path: pq.write_table(table(pa.array(TEXTS, pa.large_string())), path),
    **{
        f"{encoding}.parquet": lambda path, encoding=encoding: pq.write_table(
            table(), path, use_dictionary=False, column_encoding={"text": encoding}
        )
        for encoding in ("DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")
    },
    **{
        f"{kind}.{ending}": lambda path, kind=kind: write_kind(path, pa.array(TEXTS).cast(kind))
        for kind in (pa.string_view(), pa.binary_view(), pa.binary(), pa.large_binary())
        for ending in ("parquet", "arrow")
    },
    "indented.json": lambda path: path.write_text(
        json.dumps([{"text": t} for t in TEXTS], indent=1)
    ),
    "strings.json": lambda path: path.write_text(json.dumps(TEXTS)),
    "lines.json": lambda path: path.write_text(
        "".join(f"{json.dumps({'text': t})}\n" for t in TEXTS)
    ),
    "packed.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(TEXTS).encode())),
    "a.arrow": write_arrow,
    "packed.arrow": lambda path: write_arrow(
        path, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ),
    "file.arrow": lambda path: write_arrow(path, writer=pa.ipc.new_file),
    "views.arrow": lambda path: write_arrow(
        path,
        table(
            pa.DictionaryArray.from_arrays(
                pa.array(range(len(TEXTS)), pa.int32()), pa.array(TEXTS, pa.string_view())
            )
        ),
    ),
    "dictionary.arrow": lambda path: write_arrow(path, table(pa.array(TEXTS).dictionary_encode())),
    "dataset": write_dataset,
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_documents(name, tmp_path, content):
    KINDS[name](tmp_path / name)
    assert content(text(str(tmp_path / name))) == JOINED


def test_files_of_a_folder_of_several_kinds(tmp_path, content):
    write_texts(tmp_path / "b.jsonl", TEXTS)
    pq.write_table(table(), tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text("plain")
    assert content(text(str(tmp_path))) == b"plain\n" + JOINED + JOINED


def test_another_field_and_rows_without_text(tmp_path, content, fails_in_one_line):
    rows = [{"text": 3, "body": "one"}, {"body": None}, {"body": ""}, {"body": "two " * 9}]
    write(tmp_path / "a.jsonl", rows)
    pq.write_table(table([row["body"] for row in rows], "body"), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        data = content(text(str(tmp_path / name), field="body"))
        assert data == b"one\0" + b"two " * 9 + b"\0"
        with fails_in_one_line(
            ValueError, "no text 'text': it has body, set --config='text.text.f"
        ):
            text(str(tmp_path / name))


@pytest.mark.parametrize("raw", [False, True])
def test_a_field_of_no_table_is_refused(raw, tmp_path, fails_in_one_line):
    write(tmp_path / "a.jsonl" if raw else tmp_path / "a.txt", [{"body": "one " * 9}])
    with fails_in_one_line(ValueError, "^text.text.field is 'body', and nothing of .* is read as"):
        text(str(tmp_path), field="body", raw=raw)


def test_the_splits_of_a_dataset_are_kept(tmp_path, content):
    parts = {"train": TEXTS[:20], "validation": TEXTS[20:30], "test": TEXTS[30:]}
    for name, texts in parts.items():
        write_dataset(tmp_path / name, texts)
    path = tmp_path / "dataset_dict.json"
    path.write_text(json.dumps({"splits": list(parts)}))
    task = text(str(tmp_path))
    for split, name in zip(("train", "valid", "test"), parts, strict=True):
        assert content(task, split) == b"".join(t.encode() + b"\0" for t in parts[name])
    # A split that is missing comes from the end of train.
    path.write_text(json.dumps({"splits": ["train", "test"]}))
    short = text(str(tmp_path))
    assert content(short, "test") == content(task, "test")
    assert content(short, "train", "valid") == content(task, "train")
    assert 0 < short.n_targets("valid") <= task.n_targets("train") // 20 + 3
    # The fingerprint is that of the documents.
    assert short.fingerprint("test") == task.fingerprint("test") != task.fingerprint("valid")


def test_held_out_text_is_whole_characters_and_bounded(tmp_path, content):
    (tmp_path / "a.txt").write_text("€äx" * 300)
    task = text(str(tmp_path / "a.txt"))
    parts = [content(task, split).decode() for split in ("train", "valid", "test")]
    assert "".join(parts) == "€äx" * 300
    assert all(90 <= task.n_targets(split) <= 96 for split in ("valid", "test"))
    small = text(str(tmp_path / "a.txt"), max_held_out=24)
    assert [small.n_targets(split) for split in ("train", "valid", "test")] == [1752, 24, 24]


def tar(path):
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(JOINED)
        archive.addfile(member, io.BytesIO(JOINED))


def zip_of_two(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one", JOINED)
        archive.writestr("two", JOINED)


NO_TEXT = {
    "tar": ("a.tar", tar, "is a tar archive: unpack it and give the folder"),
    "zip of two": ("a.zip", zip_of_two, "holds 2 files and must hold one: unpack it"),
    "zip by another name": ("a.docx", zip_of_two, "is a zip archive: unpack it"),
    "noise": (
        "a.bin",
        random.Random(0).randbytes(9999),
        r"is no text: 5\d% of a sample",
    ),
    "numbers": ("train.bin", bytes(range(9)) * 999, "is no text: 89% of a sample"),
    "UTF-16": ("a.txt", ("one two" * 9).encode("utf-16"), "is UTF-16: convert it, as with iconv"),
    "PDF": ("a.pdf", b"%PDF-1.7\n" + JOINED, "is a PDF: convert it, as with pdftotext"),
    "gzip by no name": ("a", gzip.compress(JOINED), "is packed by gzip: name it .gz"),
    "Parquet by no name": ("a", b"PAR1" + JOINED, "is a Parquet file: name it .parquet"),
}


@pytest.mark.parametrize("row", NO_TEXT)
def test_what_is_no_text_names_the_option_to_train_on_it(row, tmp_path, content, fails_in_one_line):
    name, made, message = NO_TEXT[row]
    path = tmp_path / name
    path.write_bytes(made) if isinstance(made, bytes) else made(path)
    for data_dir in (path, tmp_path):  # alone, and in a folder
        with fails_in_one_line(ValueError, f"{message}.*--config='text.text.raw=True'"):
            text(str(data_dir))
    assert content(text(str(path), raw=True)) == path.read_bytes()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_text_in_any_encoding_near_to_ascii_is_text(encoding, tmp_path, content):
    data = ("Größe, naïveté, à la carte: " * 99).encode(encoding)
    (tmp_path / "a.txt").write_bytes(data)
    assert content(text(str(tmp_path / "a.txt"))) == data


LONG = "a" * 2**20
DAMAGE = {
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl line 2 is no JSON"),
    "no object": ("a.jsonl", b'["a"]\n', "line 1 is no object: expected lines such as"),
    "deep JSON": ("a.jsonl", b"[" * 10**5, "line 1 is no JSON"),
    "long number": ("a.jsonl", b"1" * 10**5, "line 1 is no JSON"),
    "no text at all": ("a.jsonl", b'{"text": ""}\n', "a.jsonl has no row with text in 'text'"),
    "text as .parquet": ("a.parquet", b"plain text", "a.parquet is no Parquet file by its fi"),
    "text as .arrow": ("a.arrow", b"plain text", "a.arrow is no Arrow file by its first"),
    "cut .arrow": ("a.arrow", lambda path: path.write_bytes(arrow_bytes()[:900]), "is damaged"),
    "numbers": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": [1, 2]}), path),
        "column 'text' is int64, which is no text: save it as strings",
    ),
    "many times one text": (
        "a.parquet",
        lambda path: pq.write_table(table([LONG] * 64), path),
        "unpacks to more than 4,194,304 bytes of text from .*: refused as a decompression bomb",
    ),
    "packed pages": (
        "a.parquet",
        lambda path: pq.write_table(
            table([LONG + str(i) for i in range(64)]),
            path,
            use_dictionary=False,
            compression="zstd",
        ),
        "unpacks to more than 4,194,304 bytes of text",
    ),
    "rows without end": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": pa.nulls(5 * 2**20, pa.string())}), path),
        "unpacks to more than 4,194,304 bytes of text",
    ),
    "a dictionary in Arrow": (
        "a.arrow",
        lambda path: write_arrow(path, table(pa.array([LONG] * 64).dictionary_encode())),
        "unpacks to more than 21,034,240 bytes of text",
    ),
    "views of one text": (
        "a.arrow",
        lambda path: write_arrow(path, pa.table({"text": views(LONG, 64)}), rows=64),
        "unpacks to more than .* bytes of text",
    ),
    "a prefix many times": (
        "a.parquet",
        lambda path: pq.write_table(
            table([LONG] * 64),
            path,
            use_dictionary=False,
            column_encoding={"text": "DELTA_BYTE_ARRAY"},
        ),
        "unpacks to more than 4,194,304 bytes of text",
    ),
    "lists": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": [["a"]], "body": ["b"]}), path),
        "column 'text' is list<element: string>, which is no text: set --config='text.text.field",
    ),
    "bytes that are no text": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"text": [b"\xff\xfe"]}), path),
        "column 'text' is binary and no UTF-8: convert it to text",
    ),
    "an encrypted file": ("a.parquet", b"PARE" + b"x" * 99, "a.parquet is encrypted"),
    "a pointer of Git LFS": (
        "a.parquet",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "is a pointer of Git LFS, not the file: run git lfs pull",
    ),
    "a cut array": ("a.json", b'[{"text": "a"}, {"text": ', "a.json element 2 is no JSON"),
    "an array without its end": (
        "a.json",
        b'[{"text": "a"} {"text": "b"}]',
        "element 1 is no JSON",
    ),
    "an array of objects of others": (
        "a.json",
        b'[{"body": "a"}]',
        "has no text 'text': it has body",
    ),
    "numbers as text": (
        "a.jsonl",
        b'{"text": 3, "id": [1]}\n',
        r"a.jsonl line 1 has no text 'text': it has text \(3\), id \(a list\)$",
    ),
    "chats": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}]}\n',
        r"no text 'text': it has messages \(a list\); for chats add --config_file=chats.gin after",
    ),
    "chats in a table": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"conversations": [[{"from": "human"}]]}), path),
        r"it has conversations \(list<.*; for chats add --config_file=chats.gin after the config",
    ),
    "prompts with answers": (
        "a.jsonl",
        b'{"prompt": "a", "answer": "b"}\n',
        'it has prompt, answer, set .*field="prompt"\'; for chats add --config_file=chats.gin',
    ),
    "more fields than names": (
        "a.csv",
        b"id,text\n1,one, two\n",
        "row 2 has 3 fields and the first 2",
    ),
    "files elsewhere": (
        "a",
        lambda path: dataset_of(path, [{"filename": "../b.arrow"}]),
        "state.json names no files of its folder",
    ),
}


def views(text, n):
    """An array in which `n` rows show one text: 16 bytes each."""
    first = np.array([len(text), int.from_bytes(text[:4].encode(), "little"), 0, 0], np.int32)
    buffers = [None, pa.py_buffer(np.tile(first, n)), pa.py_buffer(text.encode())]
    return pa.Array.from_buffers(pa.string_view(), n, buffers)


def arrow_bytes():
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table())
    return sink.getvalue()


def dataset_of(folder, files_of_it):
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": files_of_it}))


@pytest.mark.parametrize("row", DAMAGE)
def test_damaged_and_hostile_tables_are_one_line(row, tmp_path, monkeypatch, fails_in_one_line):
    name, made, message = DAMAGE[row]
    path = tmp_path / name
    path.write_bytes(made) if isinstance(made, bytes) else made(path)
    monkeypatch.setattr(files, "MAX_UNPACKED", 2**22)
    with fails_in_one_line(ValueError, message):
        text(str(path))


def test_a_text_of_a_dictionary_is_counted_before_it_is_copied(tmp_path, monkeypatch):
    write_arrow(tmp_path / "a.arrow", table(pa.array([LONG] * 64).dictionary_encode()))
    monkeypatch.setattr(files, "MAX_UNPACKED", 2**22)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ValueError, match="decompression bomb"):
        text(str(tmp_path / "a.arrow"))
    assert pa.default_memory_pool().max_memory() < before + 2**24


def test_a_long_line_is_refused(tmp_path, monkeypatch, fails_in_one_line):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(tables, "MAX_LINE", 20)
    with fails_in_one_line(ValueError, "line 1 has more than 20 bytes: split it"):
        text(str(tmp_path / "a.jsonl"))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch, fails_in_one_line):
    pq.write_table(table(), tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with fails_in_one_line(ImportError, r"pip install 'reformax\[parquet\]'"):
        text(str(tmp_path / "a.parquet"))


def test_flipped_bytes_of_tables_are_told_or_harmless(tmp_path):
    """No crash and no error of several lines, whatever a few bytes say."""
    rng, path = random.Random(0), tmp_path / "a.parquet"
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        KINDS[name](path)
        whole = path.read_bytes()
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data)
            try:
                text(str(path))
            except (ValueError, OSError) as error:
                assert "\n" not in str(error)


def test_a_row_is_one_document_whatever_it_holds(tmp_path):
    path = tmp_path / "a.jsonl"
    write_texts(path, ["one\0two", "three"])
    source = text_files.find(path, "*", "text", False, "by_name", "text.text.splits")
    found = documents.read(path, source, "text").texts["train"]
    assert bytes(found.data) == "one\ufffdtwo\0three\0".encode()
    assert list(found.begins) == [0, 10]

"""Token files: the batches of a text in memory, made in parts, whole or absent."""

import errno
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reformax import durable
from reformax.cli import prepare
from reformax.data import (
    arrow_tables,
    files,
    piece_blocks,
    piece_files,
    shard_folders,
    stored,
    tables,
    text,
    token_files,
    workers,
)
from reformax.declared import SettingError
from tests.data.tables import assert_alike, write_texts
from tests.data.test_documents import write_dataset
from tests.data.test_pieces import tokenizer_json

ROOT = Path(__file__).resolve().parents[2]
RNG = random.Random(0)
WORDS = [f"word{i}" for i in range(99)] + ["größe", "漢字", "x" * 99, "\n", "\n\n"]


def words(n):
    return " ".join(RNG.choices(WORDS, k=n))


TEXTS = [words(RNG.choice((1, 9, 200))) for _ in range(300)]


def zipped(path, data):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", data)


def folder_of_kinds(folder):
    """Files of every kind, some without a newline at the end, and one that is empty."""
    folder.mkdir()
    texts = TEXTS[:60]
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        write_texts(folder / name, texts)
    pq.write_table(pa.table({"text": texts}), folder / "d.parquet", row_group_size=10)
    (folder / "e.txt").write_text("\n".join(texts))
    (folder / "f.txt").write_bytes(b"zero\0inside" * 999)
    (folder / "g.txt").write_bytes(b"")
    (folder / "h.txt.xz").write_bytes(lzma.compress("\n".join(texts).encode()))
    zipped(folder / "i.zip", "\n".join(texts))
    (folder / "j.csv").write_text("id,text\n" + "".join(f'1,"{i} of it"\n' for i in range(99)))


SOURCES = {
    "a.jsonl": lambda path: write_texts(path, TEXTS),
    "a.jsonl.zst": lambda path: write_texts(path, TEXTS),
    "a.txt": lambda path: path.write_text("\n".join(TEXTS)),
    "zeros.txt": lambda path: path.write_text("\0".join(TEXTS)),
    "a.parquet": lambda path: pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=50),
    "dataset": lambda path: write_dataset(path, TEXTS),
    "kinds": folder_of_kinds,
}


@pytest.mark.parametrize("name", SOURCES)
def test_bytes_are_those_of_memory(name, tmp_path, in_files, monkeypatch):
    SOURCES[name](tmp_path / name)
    many = name not in ("a.txt",)
    options = [{"windows": "each_once", "max_held_out": 999}, {}]
    options += [{"windows": "documents", "document_mask": True, "offset": 1}] * many
    for given in options:
        whole = text.text(tmp_path / name, **given)
        with in_files() as cache:
            stored_task = text.text(tmp_path / name, **given)
        assert_alike(whole, stored_task)
        assert whole.summary() == stored_task.summary()
        assert not isinstance(stored_task.train_batch(0, 0, 1, 8).targets, stored.StoredArray)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    shards = sum(map(len, shard_folders.manifest(folder)["splits"].values()))
    divided = ("a.jsonl", "a.txt", "zeros.txt", "a.parquet", "kinds")
    assert shards > (1 if name in divided else 0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "zeros.txt", "kinds"])
@pytest.mark.parametrize("kind", ["bpe", "tokenizers"])
def test_pieces_are_those_of_memory(kind, name, tmp_path, in_files, monkeypatch):
    SOURCES[name](tmp_path / name)
    monkeypatch.setattr(piece_blocks, "BLOCK", 2**9)
    options = {"vocab_size": 400, "model_type": "bpe"}
    if kind == "tokenizers":
        options = {"vocabulary": str(tokenizer_json(tmp_path / "tokenizer.json"))}
    whole = text.text(tmp_path / name, **options)
    whole.vocabulary.keep_in(tmp_path, begun=False)
    with in_files() as cache:
        task = text.text(tmp_path / name, **options)
        task.vocabulary.keep_in(tmp_path, begun=False)
        assert_alike(whole, task)
        assert whole.n_bytes("train") == task.n_bytes("train")
    made = list(cache.glob("*/pieces/*/reformax_text.json"))
    assert len(made) == 3 and max(len(json.loads(x.read_bytes())["spans"]) for x in made) > 3


def test_spans_end_where_blocks_do(monkeypatch):
    monkeypatch.setattr(piece_blocks, "BLOCK", 16)
    data = "\0".join(TEXTS[:40]).encode()
    ends = {end for _, end in piece_blocks.blocks(data)}
    found = list(piece_blocks.spans(files.as_array(data), 100))
    assert len(found) > 9 and [last for _, last in found] == [b for b, _ in found[1:]] + [len(data)]
    assert {last for _, last in found} <= ends


def test_a_second_start_reads_no_source(tmp_path, in_files, monkeypatch):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    with in_files(shard=2**20) as cache:
        first = text.text(tmp_path / "a.jsonl")
        monkeypatch.setattr(token_files.documents, "pieces_of", None)
        assert_alike(first, text.text(tmp_path / "a.jsonl"))
        (folder,) = (path for path in cache.iterdir() if path.is_dir())
    # The manifest knows the checksum of whole shards; what is cut is read.
    parts = first.train_batch and token_files.load(folder).texts["train"].data.parts
    assert all(part.crc is not None for part in parts)


@pytest.mark.parametrize("change", ["size", "time", "inside"])
def test_a_changed_source_is_prepared_anew(change, tmp_path, in_files):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(TEXTS))
    with in_files(shard=2**20):
        before = text.text(path).fingerprint("train")
        state, data = path.stat(), bytearray(path.read_bytes())
        if change == "size":
            data += b"more"
        data[: 4 if change != "time" else 0] = b"####" if change != "time" else b""
        path.write_bytes(data)
        times = (state.st_atime_ns, state.st_mtime_ns + (change == "time"))
        if change != "size":
            os.utime(path, ns=times)
        after = text.text(path)
    assert_alike(after, text.text(path))
    assert (after.fingerprint("train") == before) == (change == "time")


def test_held_out_text_of_another_size_prepares_nothing(tmp_path, in_files, monkeypatch):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) * 9)
    with in_files(shard=2**17) as cache:
        sizes = [
            text.text(tmp_path / "a.txt", max_held_out=n).n_targets("test") for n in (99, 9000)
        ]
    assert sizes[0] < 103 < 8990 < sizes[1] and len([x for x in cache.iterdir() if x.is_dir()]) == 1


def test_a_damaged_shard_is_told(tmp_path, in_files, fails_in_one_line):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    prepare.main([f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={tmp_path / 'made'}", "--quiet"])
    shard = next(tmp_path.glob("made/text-*/*.bytes"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with fails_in_one_line(ValueError, "bytes has .* bytes, expected .*: delete .*made and prepar"):
        text.text(tmp_path / "made")
    shard.unlink()
    with fails_in_one_line(ValueError, "00000.bytes is missing, expected"):
        text.text(tmp_path / "made")
    (tmp_path / "made/reformax_text.json").write_text("{")
    with fails_in_one_line(ValueError, "reformax_text.json is damaged: delete"):
        text.text(tmp_path / "made")


def test_prepare_and_train_from_its_folder(tmp_path, capsys, fails_in_one_line, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD", 5000)
    source, made = tmp_path / "a.jsonl", tmp_path / "made"
    write_texts(source, TEXTS)
    command = [f"--data_dir={source}", f"--to={made}", "--quiet", "--processes=1"]
    assert prepare.main([*command, "--vocab_size=400", "--max_held_out=2000"]) == 0
    said = capsys.readouterr().out
    assert "ids of 400 pieces, train" in said and "300 documents, a.jsonl" in said
    assert prepare.main([*command, "--vocab_size=400", "--max_held_out=2000"]) == 0
    assert "nothing of it was made anew" in capsys.readouterr().out
    whole = text.text(source, vocab_size=400, max_held_out=2000)
    whole.vocabulary.keep_in(tmp_path, begun=False)
    source.unlink()  # the folder is all that training needs
    assert_alike(
        text.text(made, max_held_out=2000), text.text(made, pattern="*", max_held_out=2000)
    )
    monkeypatch.setattr(shard_folders, "all_made", None)  # ids are there
    task = text.text(made, vocab_size=400, max_held_out=2000)
    task.vocabulary.keep_in(tmp_path, begun=False)
    assert_alike(whole, task)
    with fails_in_one_line(
        ValueError, "text.text.field is 'body', and .*made was prepared with 't"
    ):
        text.text(made, field="body")
    with fails_in_one_line(ValueError, "made is prepared already: give the text itself"):
        prepare.main([f"--data_dir={made}", f"--to={tmp_path / 'again'}"])


def test_other_files_are_not_replaced(tmp_path, fails_in_one_line):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("kept")
    with fails_in_one_line(ValueError, "mine holds other files, such as notes: give a new folder"):
        prepare.main([f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={tmp_path / 'mine'}"])
    assert (tmp_path / "mine/notes").read_text() == "kept"


def test_a_prepared_folder_of_another_text_is_not_replaced(tmp_path, monkeypatch, capsys):
    """It may have taken hours, and runs may read it: a wrong --to must not cost it."""
    made = _prepared(tmp_path)
    before = text.text(made).fingerprint("train")
    write_texts(tmp_path / "b.jsonl", TEXTS[:50])
    command = [f"--data_dir={tmp_path / 'b.jsonl'}", "--to=made", "--quiet"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"^to=made has the text of .*a\.jsonl: give another "):
        prepare.main(command)
    assert text.text(made).fingerprint("train") == before
    # The same source by another name is the same; a changed one is prepared anew.
    write_texts(tmp_path / "a.jsonl", TEXTS[:50])
    assert prepare.main(["--data_dir=a.jsonl", "--to=made", "--quiet"]) == 0
    assert text.text(made).fingerprint("train") != before


WRONG = {
    "too few pieces": (["--vocab_size=100"], "vocab_size is 100: expected 256 for bytes"),
    "no vocabulary": (["--vocabulary=a.jsonl"], "a.jsonl is no vocabulary"),
    "missing": (["--vocabulary=b.json"], "vocabulary is b.json, which does not exist"),
    "another size": (["--vocabulary=pieces", "--vocab_size=300"], "vocab_size is 300, and .* 400"),
    "ids of bytes": (["--write=nanogpt"], "write=nanogpt: bytes are no ids, give --vocabulary"),
    "kind of bytes": (["--model_type=bpe"], "model_type=bpe: bytes are no ids, give --vocab"),
    "nanoGPT's ids": (["--write=nanogpt", "--vocab_size=70000"], "nanoGPT's ids are below 65,536"),
    "a file": (["--to=a.jsonl"], "^to=a.jsonl is a file: give a folder to make"),
}


@pytest.mark.parametrize("case", WRONG)
def test_prepare_refuses_wrong_flags_before_it_reads_the_text(case, tmp_path, monkeypatch):
    """A large text takes hours."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "a.jsonl", TEXTS)
    flags, told = WRONG[case]
    command = ["--data_dir=a.jsonl", "--quiet", *["--to=made"] * (case != "a file")]
    if case == "another size":
        prepare.main([*command, "--vocab_size=400"])
        (tmp_path / "made").rename("pieces")
    monkeypatch.setattr(token_files, "prepare", None)
    with pytest.raises((ValueError, OSError), match=told):
        prepare.main([*command, *flags])
    assert not (tmp_path / "made").exists()


def test_training_by_bytes_says_that_a_folder_has_ids(tmp_path):
    """Who leaves vocab_size out would train on bytes for hours."""
    write_texts(tmp_path / "a.jsonl", TEXTS)
    made = tmp_path / "made"
    prepare.main([f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={made}", "--vocab_size=400"])
    line = f"note: {made} has ids of 400 pieces, and this run reads bytes: set vocab_size=400 to "
    assert any(x.startswith(line) for x in text.text(made).summary())
    assert not any("note:" in x for x in text.text(made, vocab_size=400).summary())


@pytest.mark.parametrize("name, line", [("a.jsonl", 250), ("b.jsonl", 1)])
def test_errors_of_other_processes_name_the_line(
    name, line, tmp_path, fails_in_one_line, monkeypatch
):
    monkeypatch.setattr(token_files, "SHARD", 5000)
    lines = [json.dumps({"text": t}) for t in TEXTS]
    lines[line - 1] = '{"text": '
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with fails_in_one_line(ValueError, f"{name} line {line} is no JSON"):
        prepare.main(
            [f"--data_dir={tmp_path / name}", f"--to={tmp_path / 'to'}", "--processes=2", "--quiet"]
        )
    assert not (tmp_path / "to").exists()


def test_a_disk_without_room_is_told_before(tmp_path, in_files, fails_in_one_line, monkeypatch):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    room = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with in_files() as cache:
        with fails_in_one_line(
            ValueError, "has room for 10; or give another folder by text.text.cac"
        ):
            text.text(tmp_path / "a.jsonl")
        assert not list(cache.glob("*/text/*"))


def test_a_cache_that_cannot_be_written_names_the_setting(
    tmp_path, in_files, fails_in_one_line, monkeypatch
):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    make, denied = token_files.durable.make_folder, []

    def deny(folder):
        if denied:
            raise PermissionError(13, "Permission denied", str(folder))
        make(folder)

    monkeypatch.setattr(token_files.durable, "make_folder", deny)
    denied.append(True)
    with (
        in_files(),
        fails_in_one_line(ValueError, "texts cannot be written .*by text.text.cache_d"),
    ):
        text.text(tmp_path / "a.jsonl")
    denied.clear()
    with in_files():
        assert text.text(tmp_path / "a.jsonl", cache_dir=tmp_path / "own").n_targets("train")
    assert list((tmp_path / "own").glob("*/reformax_text.json"))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with fails_in_one_line(ValueError, "there is no home to keep token files in: set text.text.ca"):
        token_files.cache_folder(None)


def test_a_killed_worker_is_told(fails_in_one_line):
    with fails_in_one_line(OSError, "a process that prepares text ended .it was killed"):
        list(workers.in_processes(signal.raise_signal, [signal.SIGKILL] * 2, 2))


@pytest.mark.slow
def test_kills_leave_it_whole_or_absent(tmp_path):
    """A process that is killed anywhere leaves no folder, and the next goes on with its shards."""
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) * 8)
    script = (
        "import sys; from reformax.data import token_files; token_files.SHARD = 2**16\n"
        "from reformax.cli import prepare; prepare.main(sys.argv[1:])"
    )
    made = tmp_path / "made"
    command = [sys.executable, "-c", script, f"--data_dir={tmp_path / 'a.txt'}", f"--to={made}"]
    command += ["--quiet", "--processes=1"]
    begun, partial = made.with_name("made.partial"), 0
    whole = text.text(tmp_path / "a.txt").fingerprint("train")
    for seconds in (0, 0.01, 0.1):
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(begun, ignore_errors=True)
        process = subprocess.Popen(command, cwd=ROOT)
        while not begun.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        partial += begun.exists()
        assert not made.exists() or text.text(made).fingerprint("train") == whole
    subprocess.run(command, check=True, cwd=ROOT)
    assert_alike(text.text(made), text.text(tmp_path / "a.txt"))
    assert partial and not begun.exists()


@pytest.mark.slow
def test_two_processes_at_once_make_one_text(tmp_path):
    write_texts(tmp_path / "a.jsonl", TEXTS * 20)
    command = [sys.executable, "-m", "reformax", "prepare", f"--data_dir={tmp_path / 'a.jsonl'}"]
    command += [f"--to={tmp_path / 'made'}", "--quiet"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("nothing of it was made anew" in one for one in said) == 1
    assert_alike(text.text(tmp_path / "made"), text.text(tmp_path / "a.jsonl"))


def test_stored_arrays_are_arrays(tmp_path):
    rng = np.random.default_rng(0)
    whole = np.sort(rng.integers(0, 9999, 5000))
    parts = []
    for i, part in enumerate(np.split(whole, [0, 100, 2000, 2001])):
        (part - 7).tofile(tmp_path / str(i))
        parts.append(stored.FilePart(str(tmp_path / str(i)), 0, len(part), 7))
    found = stored.StoredArray(parts, whole.dtype)
    assert len(found) == 5000 and np.array_equal(found, whole)
    values = rng.integers(-5, 10_009, (50, 3))
    for side in ("left", "right"):
        for part in (slice(None), slice(90, 2500), slice(99, 100), slice(7, 7)):
            expected = whole[part].searchsorted(values, side)
            assert np.array_equal(found[part].searchsorted(values, side), expected)
    assert np.array_equal(found[90:2500] - 5, whole[90:2500] - 5)
    assert np.array_equal(found[np.array([[5, -1]])], whole[[[5, -1]]]) and found[3] == whole[3]
    starts = rng.integers(0, 4000, 20)
    assert np.array_equal(found.windows(starts, 900), stored.windows_of(whole, starts, 900))
    with pytest.raises(IndexError):
        found.windows([4500], 501)


def test_checksums_combine():
    for n in (0, 1, 777):
        one, other = RNG.randbytes(1000), RNG.randbytes(n)
        combined = stored.combined_crc32(zlib.crc32(one), zlib.crc32(other), n)
        assert combined == zlib.crc32(one + other)


def _prepared(tmp_path, texts=TEXTS, name="made"):
    if not (tmp_path / "a.jsonl").exists() or texts is not TEXTS:
        write_texts(tmp_path / "a.jsonl", texts)
    prepare.main([f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={tmp_path / name}", "--quiet"])
    return tmp_path / name


def test_a_link_in_a_strangers_folder_is_not_followed(tmp_path, in_files, fails_in_one_line):
    made, mine = _prepared(tmp_path), tmp_path / "mine"
    mine.write_text("kept")
    shards = tmp_path / "shards"
    shards.mkdir()
    for ending in ("bytes", "begins"):
        (shards / f"00000.{ending}").symlink_to(mine)
    found = text.find(tmp_path / "a.jsonl", token_files.settings_of(made))
    (shard,) = token_files.shards_of(found, "text")
    token_files.make_shard(shard, shards)
    assert mine.read_text() == "kept" and (shards / "00000.bytes").stat().st_size > 1000
    (tmp_path / "elsewhere").mkdir()
    (made / "pieces").symlink_to(tmp_path / "elsewhere")
    with in_files(), fails_in_one_line(ValueError, "pieces is a symbolic link"):
        text.text(made, vocab_size=300).train_batch(0, 0, 1, 64)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["../../mine", "/etc/passwd", "text-1/../../x", 3])
def test_a_strangers_manifest_names_no_other_file(tmp_path, name, fails_in_one_line):
    path = _prepared(tmp_path) / shard_folders.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"][0]["file"] = name
    path.write_text(json.dumps(manifest))
    with fails_in_one_line(ValueError, "which is no shard of the folder"):
        text.text(tmp_path / "made")


WHOLE_FIELDS = [("settings", {}), ("notes", []), ("of", []), ("crc", 5)]


@pytest.mark.parametrize("value", [None, "DEL", 5, "x", [], {}, 10**30, [[1, 2]]])
def test_a_manifest_with_other_fields_is_told(value, tmp_path, fails_in_one_line):
    made = _prepared(tmp_path)
    path, whole = made / shard_folders.MANIFEST, (made / shard_folders.MANIFEST).read_text()
    for *fields, last in (
        *([name] for name in ("settings", "files", "notes", "of", "splits")),
        *(["splits", "train", 0, name] for name in ("n", "begins", "crc")),
    ):
        manifest = json.loads(whole)
        owner = manifest
        for field in fields:
            owner = owner[field]
        if (last, value) in WHOLE_FIELDS:
            continue
        owner[last] = value
        if value == "DEL":
            del owner[last]
        path.write_text(json.dumps(manifest))
        with fails_in_one_line(ValueError, "is damaged: delete|bytes, expected"):
            text.text(made)


def test_workers_share_the_cores_and_import_nothing_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    found = [x for _, x in workers.in_processes(os.getenv, [workers.THREADS, "TERM"], 2)]
    assert "4" in found


def test_a_folder_with_its_source_or_anothers_files_stays(tmp_path, fails_in_one_line):
    made = _prepared(tmp_path)
    write_texts(made / "new.jsonl", TEXTS)
    run = [f"--to={made}", "--quiet"]
    with fails_in_one_line(ValueError, "made holds the source .*new.jsonl: give another folder"):
        prepare.main([f"--data_dir={made / 'new.jsonl'}", *run])
    write_texts(tmp_path / "a.jsonl", TEXTS[:50])
    with fails_in_one_line(ValueError, "holds other files, such as new.jsonl: give a new folder"):
        prepare.main([f"--data_dir={tmp_path / 'a.jsonl'}", *run])
    with fails_in_one_line(ValueError, "lies in data_dir=.*: give a folder outside of it"):
        prepare.main([f"--data_dir={tmp_path}", *run])
    assert (made / "new.jsonl").is_file() and text.text(made).n_targets("train") > 0


def test_a_text_that_is_replaced_is_not_read_on_as_the_new_one(tmp_path):
    made = _prepared(tmp_path)
    before = token_files.load(made).texts
    before = before.get("train") or next(iter(before.values()))
    _prepared(tmp_path, TEXTS[::-1])
    with pytest.raises(FileNotFoundError):
        bytes(before.data[:100])


def test_a_process_that_is_killed_before_the_name_goes_on_from_there(tmp_path, monkeypatch):
    made = _prepared(tmp_path)
    whole = text.text(made).fingerprint("train")
    made.rename(tmp_path / "made.partial")
    monkeypatch.setattr(token_files, "make_shard", None)  # nothing is made
    assert _prepared(tmp_path) == made and text.text(made).fingerprint("train") == whole
    made.rename(tmp_path / "made.partial")
    (tmp_path / "made").mkdir()  # of the text before, renamed aside or not
    assert text.text(_prepared(tmp_path)).fingerprint("train") == whole


def test_errors_of_workers_keep_their_number():
    with pytest.raises(OSError, match="cannot be read .File name too long") as error:
        list(workers.in_processes(durable.read, [Path("x" * 300)] * 2, 2))
    assert error.value.errno == errno.ENAMETOOLONG
    with pytest.raises(RuntimeError, match="Odd: told"):
        list(workers.in_processes(_odd, [1, 2], 2))


class Odd(Exception):
    def __reduce__(self):
        raise TypeError


def _odd(_):
    raise Odd("told")


def test_lines_of_a_text_that_is_read_raw_are_no_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD", 1000)
    write_texts(tmp_path / "a.jsonl", TEXTS[:30])
    raw = dict(text.DEFAULTS, raw=True)
    found = text.find(tmp_path / "a.jsonl", raw)
    token_files.prepare(found, raw, tmp_path / "made", processes=1, quiet=True)
    (made,) = token_files.load(tmp_path / "made").texts.values()
    assert len(made.data) > 3000 and list(made.begins[:]) == [0]


def test_a_parquet_is_divided_by_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SHARD", 5000)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=20)
    found = text.find(tmp_path / "a.parquet", text.DEFAULTS)
    shards = list(token_files.shards_of(found, "text"))
    groups = [(span.first, span.last) for shard in shards for span in shard.spans]
    assert len(shards) > 3 and groups[0][0] == 0 and groups[-1][1] == 15
    assert [first for first, _ in groups[1:]] == [last for _, last in groups[:-1]]
    assert sum(s.size() for s in shards) < (tmp_path / "a.parquet").stat().st_size
    command = [f"--data_dir={tmp_path / 'a.parquet'}", f"--to={tmp_path / 'made'}", "--quiet"]
    prepare.main([*command, "--processes=1"])
    assert_alike(text.text(tmp_path / "made"), text.text(tmp_path / "a.parquet"))


def test_files_of_a_folder_go_to_several_processes(tmp_path):
    """Also small ones: as many shards as a large machine has cores, of some size."""
    for name in ("a", "b", "c"):
        write_texts(tmp_path / f"{name}.jsonl.xz", TEXTS)
        with open(tmp_path / f"{name}.txt", "w") as file:
            file.truncate(token_files._LEAST_SHARD)
    found = text.find(tmp_path, text.DEFAULTS)
    assert len(list(token_files.shards_of(found, "text"))) > 3


@pytest.mark.parametrize("groups", [1, 9])
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_parquet_is_read_in_memory_that_its_size_does_not_change(
    dictionary, groups, tmp_path, monkeypatch
):
    """By what pyarrow holds, at a tenth of the sizes."""
    monkeypatch.setattr(arrow_tables, "_TOGETHER", 2**20)
    texts = [f"{i} {'x' * 2_000}" for i in range(20_000)]
    path, options = tmp_path / "a.parquet", {"use_dictionary": dictionary}
    pq.write_table(pa.table({"text": texts}), path, -(-20_000 // groups), **options)
    taken, before = [], pa.total_allocated_bytes()
    for _ in tables.texts(path, arrow_tables.parquet, "text", 2**30):
        taken.append(pa.total_allocated_bytes() - before)
    assert len(taken) == 20_000 and max(taken) < 12e6


def test_processes_are_as_many_as_memory_has_room_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(workers.memory, "host", lambda: 2**32)
    assert workers.workers_for(99, 2**28).n == 8
    assert workers.workers_for(5, 2**28).n == 5
    assert workers.workers_for(99, 2**33).n == 1
    assert workers.workers_for(99, 2**28, processes=20).n == 20  # as a user says


@pytest.mark.parametrize("n_parts", [1, 2])
def test_work_in_parts_has_one_line_of_text_and_one_of_ids(n_parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(workers.memory, "host", lambda: 2**32)
    (tmp_path / "mine").mkdir()
    write_texts(tmp_path / "mine/a.jsonl", TEXTS)
    size = (tmp_path / "mine/a.jsonl").stat().st_size
    monkeypatch.setattr(token_files, "SHARD", size // n_parts + 1)
    monkeypatch.setattr(piece_files, "_SPAN", size if n_parts == 1 else size // 2)
    prepare.main(
        [f"--data_dir={tmp_path / 'mine'}", f"--to={tmp_path / 'made'}", "--vocab_size=300"]
    )
    told = [line for line in capsys.readouterr().err.splitlines() if "parts: " in line]
    assert [line.partition(":")[0] for line in told] == ["prepare text", "prepare ids"] * (
        n_parts > 1
    )
    assert all("parts: 2, processes: 2 (cores: 64; 4.0 GiB of" in line for line in told)


def test_shards_of_another_division_are_not_gone_on_with(tmp_path, monkeypatch):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    made, kept = tmp_path / "made", token_files.durable.rename
    command = [f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={made}", "--quiet", "--processes=1"]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(token_files, "SHARD", 5000)
    monkeypatch.setattr(token_files.durable, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(command)
    (tmp_path / "made.partial" / shard_folders.MANIFEST).unlink()
    monkeypatch.setattr(token_files.durable, "rename", kept)
    monkeypatch.setattr(token_files, "SHARD", 9000)
    prepare.main(command)
    assert_alike(text.text(made), text.text(tmp_path / "a.jsonl"))
    assert len(list(made.glob("text-*"))) == 1


@pytest.mark.parametrize(
    "name, data, told",
    [
        ("a.jsonl", b'{"body": "x"}\n', "it has body, set --field=body"),
        ("a.bin", bytes(range(128, 256)) * 99, "or train on its bytes as they are with --raw"),
        ("b.zip", b"PK\x03\x04" + b"x" * 99, None),
    ],
)
def test_errors_of_prepare_name_its_flags(name, data, told, tmp_path, capsys):
    (tmp_path / name).write_bytes(data)
    with pytest.raises((ValueError, OSError)) as error:
        prepare.main([f"--data_dir={tmp_path / name}", f"--to={tmp_path / 'to'}", "--quiet"])
    assert "text.text" not in str(error.value) and (told or "") in str(error.value)


def test_lines_of_prepare_name_its_flags_and_those_of_training_settings(tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    write_texts(folder / "a.jsonl", TEXTS)
    (folder / "README.md").write_text("of it")
    prepare.main([f"--data_dir={folder}", f"--to={tmp_path / 'made'}", "--quiet"])
    assert "next to tables; --pattern='**' takes them" in capsys.readouterr().out
    assert "text.text.pattern='**' takes them" in str(text.text(tmp_path / "made").summary())

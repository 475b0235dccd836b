"""Token files of other programs, read where they lie and written."""

import struct

import numpy as np
import pytest

from reformax.cli import prepare
from reformax.data import text
from reformax.data.base import SPLITS
from reformax.data.token_ids import token_ids
from tests.data.tables import assert_alike, write_texts
from tests.data.test_token_files import TEXTS

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 500, 9000)


def megatron(path, ids=IDS, dtype="int32", code=4, begins=(0, 10, 10, 700, 8900)):
    """As Megatron-LM writes: documents of one sequence each, of two for the last."""
    begins = [*begins[:-1], begins[-1]]
    sequences = np.array([*begins, 8950])
    ends = np.append(sequences[1:], len(ids))
    item = np.dtype(dtype).itemsize
    with open(path.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QB", 1, code))
        file.write(struct.pack("<QQ", len(sequences), len(begins) + 1))
        file.write((ends - sequences).astype(np.int32).tobytes())
        file.write((sequences * item).astype(np.int64).tobytes())
        file.write(np.array([*range(len(begins)), len(sequences)], np.int64).tobytes())
    ids.astype(dtype).tofile(path)


def headed(path, ids=IDS):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype(np.uint16).tobytes())


def content(task, *splits):
    """The ids of splits, read through their evaluation batches."""
    batches = (b for s in splits or SPLITS for b in task.eval_batches(s, 8, 512, 512))
    return np.concatenate([batch.targets[batch.weights == 1] for batch in batches])


WRITERS = {
    "megatron of int32": lambda path: megatron(path),
    "megatron of uint16": lambda path: megatron(path, dtype="uint16", code=8),
    "nanogpt": lambda path: IDS.astype(np.uint16).tofile(path),
    "llm.c": headed,
}


@pytest.mark.parametrize("name", WRITERS)
def test_ids_are_read_where_they_lie(name, tmp_path):
    WRITERS[name](tmp_path / "a.bin")
    for where in (tmp_path / "a.bin", tmp_path):
        task = token_ids(where, 500)
        assert np.array_equal(content(task), IDS)
        assert [task.n_targets(s) for s in ("train", "valid", "test")] == [8100, 450, 450]
    batch = task.train_batch(0, 3, 4, 64)
    for row in batch.targets:
        assert any(np.array_equal(row, IDS[i : i + 64]) for i in range(8100 - 63))
    if "megatron" in name:
        assert list(task.borders("train")) == [0, 10, 700]
        assert list(task.borders("test")) == [8900 - 8550]
        masked = token_ids(where, 500, document_mask=True, windows="documents")
        assert masked.train_batch(0, 0, 300, 1000).inputs.segment_ids.max() == 2
    else:
        assert task.borders is None


def test_own_splits_and_shards(tmp_path):
    for i, name in enumerate(["x_train_000002", "x_train_000001", "x_val_000000"]):
        headed(tmp_path / f"{name}.bin", IDS + i)
    task = token_ids(tmp_path, 503)
    assert np.array_equal(content(task, "valid"), IDS + 2)
    assert np.array_equal(content(task, "train", "test"), np.concatenate([IDS + 1, IDS]))
    assert "valid 9,000 ids (1 documents, x_val_000000.bin)" in task.summary()[0]


def cut(path):
    megatron(path)
    path.write_bytes(path.read_bytes()[:-4])


def cut_index(path):
    megatron(path)
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-1])


def cut_header(path):
    headed(path)
    path.write_bytes(path.read_bytes()[:-2])


DAMAGE = {
    "cut": (cut, "a.bin has 35,996 bytes and its index says 36,000: copy it again"),
    "cut index": (cut_index, "a.idx has .* bytes and says .*: copy it again"),
    "cut behind a header": (cut_header, "a.bin has 19,022 bytes and says 19,024"),
    "odd": (lambda path: path.write_bytes(b"abc"), "a.bin has 3 bytes, which are no ids of uint16"),
    "empty": (lambda path: path.write_bytes(b""), "a.bin has 0 bytes, which are no ids"),
    "few": (lambda path: path.write_bytes(b"abcd"), "2 ids are too few"),
    "floats": (lambda path: megatron(path, code=6), "a.idx is of version 1 and type 6"),
    "no index": (
        lambda path: (megatron(path), path.with_suffix(".idx").write_bytes(b"x" * 99)),
        "a.idx is no index of Megatron-LM",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(name, tmp_path, fails_in_one_line):
    make, message = DAMAGE[name]
    make(tmp_path / "a.bin")
    with fails_in_one_line(ValueError, message):
        token_ids(tmp_path / "a.bin", 500)


def test_ids_beyond_the_vocabulary_are_told(tmp_path, fails_in_one_line):
    headed(tmp_path / "a.bin")
    task = token_ids(tmp_path / "a.bin", 400)
    for call in (lambda: task.train_batch(0, 0, 9, 500), lambda: task.fingerprint("train")):
        with fails_in_one_line(
            ValueError, "a.bin has the ids . to 4..: expected ids from 0 to 399"
        ):
            call()
    with fails_in_one_line(ValueError, "windows is 'documents': the text to train on is one doc"):
        token_ids(tmp_path / "a.bin", 500, windows="documents")


def test_changed_ids_change_the_fingerprint(tmp_path):
    headed(tmp_path / "a.bin")
    before = token_ids(tmp_path / "a.bin", 500).fingerprint("train")
    headed(tmp_path / "a.bin", np.where(np.arange(9000) == 40, 7, IDS))
    assert token_ids(tmp_path / "a.bin", 500).fingerprint("train") != before
    assert token_ids(tmp_path / "a.bin", 500).fingerprint("test") == token_ids(
        tmp_path / "a.bin", 500, document_mask=False
    ).fingerprint("test")


@pytest.mark.parametrize("form", ["megatron", "nanogpt"])
def test_what_is_written_is_read(form, tmp_path):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    made = tmp_path / "made"
    command = [f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={made}", "--quiet", "--processes=1"]
    prepare.main([*command, "--vocab_size=400", "--max_held_out=3000", f"--write={form}"])
    whole = text.text(made, vocab_size=400, max_held_out=3000)
    whole.vocabulary.keep_in(tmp_path, begun=False)
    task = token_ids(made / form, 400)
    for split in ("train", "valid", "test"):
        assert np.array_equal(content(task, split), content(whole, split))
    if form == "megatron":
        assert np.array_equal(task.borders("train"), whole.borders("train"))
        assert len(task.borders("train")) > len(TEXTS) // 2
    ours = whole.replace(fingerprint=task.fingerprint, borders=None)
    assert_alike(ours, task.replace(borders=None))


def test_bytes_are_no_ids(tmp_path, fails_in_one_line):
    write_texts(tmp_path / "a.jsonl", TEXTS)
    with fails_in_one_line(ValueError, "write=nanogpt: bytes are no ids, give --vocabulary or"):
        prepare.main(
            [f"--data_dir={tmp_path / 'a.jsonl'}", f"--to={tmp_path / 'to'}", "--write=nanogpt"]
        )

"""Data that is no longer what a checkpoint was trained on: an error, or a note in the record."""

import json
import re
import shutil

import numpy as np
import pytest

import evaluate
import train
from reformax.data.duplication import duplication
from reformax.data.reverse import reverse
from reformax.data.text import text
from reformax.data.text_pairs import text_pairs
from reformax.training import checkpoint, fingerprints
from tests.training import worker

RUN = """
from __gin__ import dynamic_registration
from reformax.data import text
from reformax.training import loop
from reformax.training import optimizer
from tests.training import tiny

steps = 3
loop.train.steps = %steps
loop.train.batch_size = 8
loop.train.length = 16
loop.train.log_every = 1
loop.train.optimizer = @optimizer.adam()
optimizer.adam.learning_rate = 1e-2
loop.train.model = @tiny.TinyLM
tiny.TinyLM.vocab_size = 256
loop.train.task = @text.text()
"""
TEXT = bytes(np.random.default_rng(0).integers(97, 123, 1999, np.uint8)) + b"\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the text, its copy elsewhere, the config and a run of 3 steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.gin").write_text(RUN)
    (folder / "data").mkdir()
    (folder / "data/a.txt").write_bytes(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *flags(folder)])
        assert train.main() == 0
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "moved")


def flags(folder, data="data"):
    named = {"config_file": "run.gin", "output_dir": "run", "data_dir": data}
    return [f"--{flag}={folder / path}" for flag, path in named.items()]


def scored(folder, data="data"):
    own = [flag for flag in flags(folder, data) if "config_file" not in flag]
    return [*own, "--trust_config"]  # the model is that of the tests


CHANGES = {
    "replaced": lambda data: data[:700] + b"?" * 9 + data[709:],
    "one bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "appended to": lambda data: data + b"more text" * 9,
    "cut": lambda data: data[:-200],
    "other order": lambda data: data[1000:] + data[:1000],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_text_stops_a_run_and_its_evaluation(folder, change, call):
    (folder / "data/a.txt").write_bytes(CHANGES[change](TEXT))
    before = (folder / "run/metrics.jsonl").read_bytes()
    code, _, err = call(train.main, *flags(folder), "--config=steps=5")
    assert (code, err.count("\n")) == (1, 1)
    assert "the data is not that of checkpoint 3: " in err and "--allow_changed_data" in err
    assert "train was 1,800 bytes of CRC-32 " in err
    assert (folder / "run/metrics.jsonl").read_bytes() == before
    split = "train" if change in ("replaced", "one bit") else "test"
    code, out, err = call(evaluate.main, *scored(folder), f"--split={split}")
    assert (code, err.count("\n")) == (1, 1) and f"of checkpoint 3: {split} was " in err
    assert err.endswith("as it was, or score what is there with --allow_changed_data\n")
    assert not (folder / f"run/evaluation_{split}.json").exists()


@pytest.mark.slow
def test_runs_in_the_folder_of_their_text_are_no_text(folder, call):
    own = [f"--data_dir={folder}", f"--output_dir={folder}/other"]
    config = f"--config_file={folder}/run.gin"
    code, _, err = call(train.main, *own, config)  # beside another run
    assert code == 0, err
    code, out, err = call(train.main, *own, config, "--config=steps=5")
    assert code == 0 and "going on from step 3 to 5" in out, err
    code, _, err = call(evaluate.main, *own, "--trust_config")
    assert code == 0, err


def test_a_run_and_a_dry_run_begin_with_what_is_read(folder, no_search, call):
    for split, n in (("train", 90), ("val", 9), ("test", 9)):
        rows = [{"text": f"{split} {i} " + 9 * "words "} for i in range(n)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"own/{split}.jsonl").parent.mkdir(exist_ok=True)
        (folder / f"own/{split}.jsonl").write_text(text)
    (folder / "own/README.md").write_text("a page")
    begin = f"{folder}/own: train 5,"
    lines = [
        r"90 documents, train.jsonl\); valid 5\d\d bytes \(9 documents, val.jsonl\); test ",
        r"\nleft out: README.md \(next to tables",
    ]
    own = [*flags(folder, "own"), f"--output_dir={folder}/new"]
    for more in (["--dry_run"], []):
        code, out, err = call(train.main, *own, *more)
        assert code == 0 and out.startswith(begin), err
        assert all(re.search(line, out) for line in lines)
    assert out.index("left out") < out.index("parameters,")
    quiet = call(train.main, *own, "--quiet", "--config=steps=4")[1]
    assert "left out" not in quiet


def test_the_same_text_elsewhere_goes_on(folder, call):
    (folder / "data").rename(folder / "other")
    (folder / "other/a.txt").rename(folder / "other/b.txt")
    code, out, _ = call(train.main, *flags(folder, "other"), "--config=steps=5")
    assert code == 0 and "the data has changed" not in out
    assert all(line["split"] != "data" for line in worker.record(folder / "run"))
    code, _, _ = call(evaluate.main, *scored(folder, "other"))
    assert code == 0
    assert "changed_data" not in json.loads((folder / "run/evaluation_valid.json").read_text())


@pytest.mark.slow
def test_with_the_flag_a_run_goes_on_and_its_record_says_so(folder, monkeypatch, call):
    data = folder / "data/a.txt"
    data.write_bytes(TEXT + b"more text" * 9)
    allowed = "--allow_changed_data"
    code, out, err = call(evaluate.main, *scored(folder), "--split=test", allowed)
    assert code == 0 and "note: the data has changed: test was 100 bytes" in out, err
    noted = json.loads((folder / "run/evaluation_test.json").read_text())["changed_data"]
    assert list(noted) == ["test"] and noted["test"]["is"].startswith("104 bytes of CRC-32 ")

    # Stopped by an error before its next checkpoint and run again, it has one such line.
    steps = "--config=steps=5"
    with monkeypatch.context() as patch:
        patch.setattr("reformax.cli.report.training", lambda *_, **__: 0)
        patch.setattr("reformax.training.loop.save", lambda run, state, temporary: None)
        call(train.main, *flags(folder), steps, allowed)
    code, out, err = call(train.main, *flags(folder), steps, allowed)
    assert code == 0 and "note: the data has changed: test was 100 bytes" in out, err
    lines = worker.record(folder / "run")
    (line,) = [line for line in lines if line["split"] == "data"]
    assert line["step"] == 4 and line["changed"]["test"] == noted["test"]
    assert [x["step"] for x in lines if x["split"] == "train"] == [1, 2, 3, 4, 5]
    # Scores of the old text are not compared with those of the new one.
    assert json.loads((folder / "run/checkpoints/5/checkpoint.json").read_text())["extra"][
        "scored"
    ]["data"].startswith("104 bytes")
    # From here on the new text is the run's.
    code, *_ = call(train.main, *flags(folder), "--config=steps=6")
    assert code == 0
    data.write_bytes(TEXT)
    code, *_ = call(train.main, *flags(folder), "--config=steps=7")
    assert code == 1


def test_every_checkpoint_has_the_fingerprint_of_each_split(folder):
    (step,) = checkpoint.Checkpoints(folder / "run").steps()
    kept = checkpoint.Checkpoints(folder / "run").extra(step)["data"]
    task = text(str(folder / "data"))
    assert kept == {split: task.fingerprint(split) for split in ("train", "valid", "test")}
    assert len(set(kept.values())) == 3


@pytest.mark.parametrize("make", [duplication, reverse])
def test_a_generated_task_is_its_parameters(make):
    one, same, other = (make(n_eval=n).fingerprint("train") for n in (4, 4, 5))
    assert one == same != other and "n_eval=4" in one


def test_pairs_are_their_lines(tmp_path):
    def write(name, lines):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return text_pairs(str(tmp_path), vocab_size=8)

    for split in ("train", "val", "test"):
        write(f"{split}.en", ["a b", "c", "d"])
        task = write(f"{split}.de", ["A B", "C", "D"])
    assert task.fingerprint("train") == task.fingerprint("valid")  # a function of the lines alone
    first = task.fingerprint("valid")
    assert first.startswith("3 pairs of CRC-32 ")
    changed = [
        write("val.en", ["a b", "c", "e"]).fingerprint("valid"),
        write("val.en", ["c", "a b", "d"]).fingerprint("valid"),
        write("val.en", ["a", "b c", "d"]).fingerprint("valid"),
    ]
    assert len({first, *changed}) == 4
    # A split that is missing and not needed is left out; the other splits need no others' files.
    (tmp_path / "test.de").unlink()
    task = text_pairs(str(tmp_path), vocab_size=8)
    assert list(fingerprints.of(task, ("train", "valid"))) == ["valid", "train"]
    with pytest.raises(FileNotFoundError, match="test"):
        fingerprints.of(task, ("train", "test"))


def test_a_fingerprint_is_taken_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(TEXT)
    task = text(str(tmp_path))
    task.fingerprint("train")
    monkeypatch.setattr("zlib.crc32", lambda data: pytest.fail("computed again"))
    task.fingerprint("train")

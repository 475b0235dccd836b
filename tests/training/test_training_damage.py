"""Damage is found, told in a line and survived; an error of the system is not taken for it."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from reformax.cli import saved_run
from reformax.training import loop, manifest
from reformax.training.checkpoint import Checkpoints
from tests.training import worker

OPTIONS = {"steps": 20, "checkpoint_every": 5, "keep": 3, "model": {"dropout": 0.2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with the checkpoints 10, 15 and 20, of which the last is the best."""
    folder = tmp_path_factory.mktemp("whole")
    loop.train(folder, **worker.arguments(**OPTIONS))
    assert Checkpoints(folder).steps() == [10, 15, 20]
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def train(folder):
    return loop.train(folder, **worker.arguments(**OPTIONS))


def flip(path, place=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def arrays(folder, step):
    """The bytes of every tensor of a checkpoint."""
    tensors, info = Checkpoints(folder)._read(step)
    del info["record"], info["timing"]  # its lines have times in them
    return info, {name: x.tobytes() for name, x in tensors.items()}


def test_a_run_goes_on_from_the_newest_whole_checkpoint(run, whole, capsys):
    before = {}
    for step in (15, 20):
        flip(largest(run / f"checkpoints/{step}"))
        before[step] = largest(run / f"checkpoints/{step}").read_bytes()
    (run / "checkpoints/damaged.20").mkdir()  # of another time
    result = train(run)
    said = capsys.readouterr().err.splitlines()
    for step, line in zip((20, 15), said, strict=True):
        assert f"checkpoint {step} is damaged (arrays/" in line and "has changed" in line
        assert "goes on from the newest whole one, step 10" in line
    assert result["step"] == 20
    assert worker.record(run) == worker.record(whole) and arrays(run, 20) == arrays(whole, 20)
    # The damaged ones are kept, and nothing that had such a name is lost.
    assert os.listdir(run / "checkpoints/damaged.20") == []
    assert largest(run / "checkpoints/damaged.20.2").read_bytes() == before[20]
    assert largest(run / "checkpoints/damaged.15").read_bytes() == before[15]


def test_without_a_whole_checkpoint_nothing_is_begun_again(run):
    for step in (10, 15, 20):
        flip(largest(run / f"checkpoints/{step}"))
    there = sorted(run.rglob("*"))
    with pytest.raises(ValueError) as error:
        train(run)
    line = str(error.value)
    assert "\n" not in line and "no checkpoint" in line and "is whole (20: arrays/" in line
    assert "15: arrays/" in line and "10: arrays/" in line and "copy one back" in line
    assert sorted(run.rglob("*")) == there


@pytest.mark.parametrize("which", ["latest", "best"])
def test_a_damaged_checkpoint_is_refused_with_those_that_are_whole(run, which):
    flip(largest(run / "checkpoints/20"))
    flip(run / "checkpoints/10/checkpoint.json")
    there = sorted(run.rglob("*"))
    if which == "best":  # 10 may be the best, for all that can be read
        with pytest.raises(ValueError, match=r"checkpoints/10 is damaged .*steps 15, and"):
            saved_run.choose(Checkpoints(run), which)
        shutil.rmtree(run / "checkpoints/10")
        there = sorted(run.rglob("*"))
    step = saved_run.choose(Checkpoints(run), which)
    with pytest.raises(ValueError) as error:
        Checkpoints(run).restore_params(step, {})
    line = str(error.value)
    assert "\n" not in line and "checkpoints/20 is damaged" in line
    assert "whole are those of steps 15, and --checkpoint=15 takes one" in line
    assert sorted(run.rglob("*")) == there


def rewrite_manifest(folder):
    (folder / manifest.FILE).unlink()
    manifest.write(folder)


def edit(name, value):
    """A checkpoint.json that its manifest agrees with, and that holds something else."""

    def harm(folder):
        described = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps(described | {name: value}))
        rewrite_manifest(folder)

    return harm


def set_manifest(text):
    return lambda folder: (folder / manifest.FILE).write_text(text)


def forget(name):
    """A manifest that leaves a file out."""

    def harm(folder):
        noted = json.loads((folder / manifest.FILE).read_text())
        noted = {file: x for file, x in noted.items() if name not in file}
        (folder / manifest.FILE).write_text(json.dumps(noted))

    return harm


def pipe(folder):
    path = largest(folder)
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "renamed from 15": (lambda folder: None, "checkpoint.json is of step 15"),
    "no manifest": (lambda folder: (folder / manifest.FILE).unlink(), "manifest.json is missing"),
    "an empty manifest": (set_manifest("{}"), "manifest.json does not hold"),
    "a list": (set_manifest("[]"), "manifest.json does not hold"),
    "nothing": (set_manifest(""), "manifest.json is cut short"),
    "deep": (set_manifest("[" * 99999), "manifest.json is cut short or has changed"),
    "no sizes": (set_manifest('{"checkpoint.json": 7}'), "manifest.json does not hold"),
    "true": (set_manifest('{"a": {"size": true, "crc32": 0}}'), "manifest.json does not hold"),
    "another file": (
        set_manifest('{"../../../config": {"size": 1, "crc32": 0}}'),
        "manifest.json lists '../../../config', which is no file of a checkpoint",
    ),
    "a file cut short": (lambda folder: os.truncate(largest(folder), 9), "has 9 bytes of"),
    "a changed file": (lambda folder: flip(largest(folder)), "has changed"),
    "a missing file": (lambda folder: largest(folder).unlink(), "is missing"),
    "a changed description": (
        lambda folder: flip(folder / "checkpoint.json"),
        "checkpoint.json has changed",
    ),
    "a file too few": (forget("_METADATA"), r"_METADATA is not in manifest.json"),
    "no description": (forget("checkpoint.json"), "checkpoint.json is not in manifest.json"),
    "a file too many": (lambda folder: (folder / "more").touch(), "more is not in manifest.json"),
    "a pipe": (pipe, "is no regular file"),
    "a step in words": (edit("step", "20"), "checkpoint.json has no step that is a whole number"),
    "a score in words": (edit("score", "1.5"), "has no score that is a finite number or null"),
    "no number": (edit("score", float("nan")), "has no score that is a finite number or null"),
    "a config of numbers": (edit("config", 5), "has no config that is a text or null"),
    "a list of extras": (edit("extra", []), "has no extra that is a table"),
    "tensors without a shape": (edit("tensors", {"w": "float32"}), "has no tensors that is"),
    "a dtype of fantasy": (edit("tensors", {"w": [[2], "float99"]}), "has no tensors that is"),
    "a format in words": (edit("format", "3"), "checkpoint.json has no format"),
    "packages": (edit("packages", None), "has no packages that is a table"),
    "previous": (edit("previous", -1), "has no previous that is a step or null"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_kind_of_damage_is_found(run, name):
    harm, words = DAMAGE[name]
    if name == "renamed from 15":
        shutil.rmtree(run / "checkpoints/20")
        os.rename(run / "checkpoints/15", run / "checkpoints/20")
        shutil.copytree(run / "checkpoints/10", run / "checkpoints/15")
        edit("step", 15)(run / "checkpoints/15")
    harm(run / "checkpoints/20")
    checkpoints = Checkpoints(run)
    for read in (checkpoints.restore, checkpoints.restore_params):
        with pytest.raises(ValueError, match=f"checkpoints/20 is damaged .*{words}.*: whole are"):
            read(20, {})
    assert checkpoints.newest_whole() == 15


def test_names_that_no_checkpoint_gets_are_none(run):
    for name in ("007", "٣", "9" * 30, "21.old", "-5", "damaged.30"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints/25").touch()
    assert Checkpoints(run).steps() == [10, 15, 20, 25]
    with pytest.raises(ValueError, match=r"checkpoints/25 is damaged .manifest.json is missing"):
        Checkpoints(run).restore(25, {})
    assert Checkpoints(run).newest_whole() == 20


class Failing:
    """Opening a file of a name fails with an error of the system."""

    def __init__(self, monkeypatch, name, number):
        real = os.open

        def fails(path, *args, **kwargs):
            if str(path).endswith(name):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", fails)


@pytest.mark.parametrize(
    "name, number",
    [
        ("manifest.json", errno.EIO),
        ("_METADATA", errno.EACCES),
        ("metrics.jsonl", errno.EMFILE),
    ],
)
def test_an_error_of_the_system_is_no_damage(run, monkeypatch, name, number):
    there = sorted(run.rglob("*"))
    Failing(monkeypatch, name, number)
    with pytest.raises(OSError) as error:
        train(run)
    line = str(error.value)
    assert "\n" not in line and f"{name} cannot be read ({os.strerror(number)})" in line
    assert "delete" not in line and "damage" not in line and error.value.errno == number
    monkeypatch.undo()
    assert [p for p in sorted(run.rglob("*")) if "tensorboard" not in str(p)] == [
        p for p in there if "tensorboard" not in str(p)
    ]
    assert train(run)["step"] == 20


def test_a_folder_that_cannot_be_listed_is_no_new_run(run, monkeypatch):
    real = os.listdir

    def fails(path):
        if str(path).endswith("checkpoints"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(OSError, match="checkpoints cannot be read .Input/output error"):
        train(run)
    monkeypatch.undo()
    shutil.move(run / "checkpoints", run / "elsewhere")
    (run / "checkpoints").symlink_to(run / "gone")
    with pytest.raises(OSError, match="is a link to a folder that is not there"):
        train(run)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_cannot_be_read_is_never_deleted(tmp_path, monkeypatch, damaged):
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = {"w": np.arange(3.0)}
    for step, score in [(1, 1.0), (2, 2.0)]:
        checkpoints.save(step, state, score)
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    if damaged:
        flip(tmp_path / "checkpoints/1/checkpoint.json")
    else:
        Failing(monkeypatch, "1/checkpoint.json", errno.EIO)
    for step in (3, 4):
        checkpoints.save(step, state, float(step))
        checkpoints.wait()
    # Of those that can be read the best one stays, too.
    assert checkpoints.steps() == [1, 2, 4]
    monkeypatch.undo()
    checkpoints.save(5, state, 5.0)
    checkpoints.wait()
    assert checkpoints.steps() == ([1, 2, 5] if damaged else [1, 5])


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_told(run, monkeypatch):
    like = jax.eval_shape(lambda: {"w": np.zeros(3)})
    real = manifest.damage

    def pruned(folder, *more):
        shutil.rmtree(folder, ignore_errors=True)
        return real(folder, *more)

    monkeypatch.setattr(manifest, "damage", pruned)
    with pytest.raises(ValueError, match=r"no checkpoint of step 15 in .* there is 10, 20 .a run"):
        Checkpoints(run).restore_params(15, like)


# The record.


def lines_of(run):
    return (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def test_a_flipped_byte_of_the_record_costs_its_line_alone(run, whole, capsys):
    lines = lines_of(run)
    before = b"".join([*lines[:3], b"#" + lines[3][1:], *lines[4:]])
    (run / "metrics.jsonl").write_bytes(before)
    (run / "metrics.jsonl.damaged").write_text("of another time")
    train(run)
    (said,) = capsys.readouterr().err.splitlines()
    assert "1 lines up to step 20 are lost, 6 are kept" in said
    assert str(run / "metrics.jsonl.damaged.2") in said
    assert (run / "metrics.jsonl.damaged.2").read_bytes() == before
    assert (run / "metrics.jsonl.damaged").read_text() == "of another time"
    record, all_lines = worker.record(run), worker.record(whole)
    assert record[-1] == {"tag": "note", "step": 20, "split": "note", "lost_lines": 1}
    assert record[:-1] == all_lines[:3] + all_lines[4:]
    # The next run finds the record as this one left it, hole and all.
    assert train(run)["step"] == 20 and capsys.readouterr().err == ""


def test_lines_that_a_power_cut_took_are_told(run, capsys):
    lines = lines_of(run)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + b"\0" * 100)
    train(run)
    assert "5 lines up to step 20 are lost, 2 are kept" in capsys.readouterr().err
    assert worker.record(run)[-1] == {"tag": "note", "step": 20, "split": "note", "lost_lines": 5}
    (run / "metrics.jsonl").unlink()
    train(run)
    assert "7 lines up to step 20 are lost, 0 are kept" in capsys.readouterr().err
    assert worker.record(run) == [{"tag": "note", "step": 20, "split": "note", "lost_lines": 7}]


def test_a_changed_number_of_the_record_is_told(run, capsys):
    data = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(data.replace('"step": 4,', '"step": 3,', 1))
    train(run)
    assert "lines have changed, 7 are kept" in capsys.readouterr().err


def test_lines_after_the_checkpoint_are_cut_without_a_word(run, whole, capsys):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "split": "valid", "bits_per_dim": 1.0}\n{"step": 24, "spl')
    train(run)
    assert capsys.readouterr().err == "" and lines_of(run) == lines_of(whole)

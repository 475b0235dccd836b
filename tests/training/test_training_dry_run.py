"""A dry run refuses what a run refuses before its first step, and writes nothing."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from reformax.data.vocabulary import SentencePieces
from reformax.training import dry_run, loop, manifest, optimizer
from reformax.training.checkpoint import Checkpoints
from reformax.training.step import TrainState
from tests.training import tiny, worker


def counting(data="same"):
    return tiny.counting().replace(fingerprint=lambda split: f"{data} {split}")


def arguments(settings):
    """Those of a short run, with a task whose data has a fingerprint."""
    model = settings.get("model")
    given = worker.arguments(model=model, steps=2, eval_every=None)
    return given | {"task": counting()} | {x: y for x, y in settings.items() if x != "model"}


def run(folder, **settings):
    return loop.train(folder, **arguments(settings))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs, and other folders, that the cases of `REFUSED` name."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("begun", "other", "damaged"):
        run(folder / name)
    run(folder / "copied", checkpoint_copies=str(folder / "copies"))
    for path in (folder / "damaged/checkpoints").glob("*/checkpoint.json"):
        path.write_text("{}")
    pieces = Checkpoints(folder / "pieces")
    pieces.save(
        0, TrainState(np.int32(0), worker.params(folder / "begun"), (), None), vocabulary="v"
    )
    pieces.wait()
    (folder / "file").touch()
    return folder


# The run's folder, its settings, and the refusal.
REFUSED = {
    "weights": (
        "begun",
        {"init_from": "other"},
        "init_from=other: .* weights of its own and is at",
    ),
    "no weights": ("begun", {"init_from": "nowhere"}, "init_from=nowhere: .* weights of its own"),
    "model": ("begun", {"model": {"d_model": 9}}, "is of another model: params.embedding has"),
    "optimizer": (
        "begun",
        {"optimizer": optimizer.adafactor(1e-3)},
        "is of another optimizer or ema_decay",
    ),
    "ema": ("begun", {"ema_decay": 0.5}, "is of another optimizer or ema_decay: ema"),
    "data": ("begun", {"task": counting("other")}, "the data is not that of checkpoint 2: t"),
    "damage": ("damaged", {}, "no checkpoint in .* is whole"),
    "file": ("file", {}, "output_dir=file cannot be written"),
    "below a file": ("file/a/b", {}, "output_dir=file/a/b cannot be written"),
    "store": (
        "new",
        {"checkpoint_copies": "ftp://a"},
        "checkpoint_copies=ftp://a must be a folder",
    ),
    "own folder": (
        "new",
        {"checkpoint_copies": "new/checkpoints"},
        "checkpoint_copies=new/checkpoints is the folder of the run's own",
    ),
    "others' copies": (
        "begun",
        {"checkpoint_copies": "copies"},
        "checkpoint_copies=copies has the copies of the run in .*/copied/checkpoints on",
    ),
    "other model": (
        "new",
        {"init_from": "other", "model": {"d_model": 9}},
        "shape .16, 8. there and shape .16, 9. in this config: set init_from to",
    ),
    "damaged weights": ("new", {"init_from": "damaged/checkpoints/2"}, "damaged/.*is damaged"),
    "vocabulary": ("new", {"init_from": "pieces"}, "vocabulary v and this run has None: copy"),
    "heads": (
        "new",
        {"init_from": "other", "fresh_heads": True},
        "fresh_heads is True and model TinyLM has no backbone_names",
    ),
    "samples": (
        "new",
        {"eval_every": 1, "sample_every": 1},
        "sample_every is 1 and .*: leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_refuses_a_dry_run_refuses(made, monkeypatch, case):
    monkeypatch.chdir(made)
    folder, settings, words = REFUSED[case]
    settings = {"steps": 4} | settings
    before = {path: path.lstat().st_mtime_ns for path in made.rglob("*")}
    lines = []
    for begin in (
        lambda **settings: dry_run.report(output_dir=folder, **settings),
        lambda **settings: loop.train(folder, **settings),
    ):
        with pytest.raises((ValueError, OSError), match=words) as refusal:
            begin(**arguments(settings))
        lines.append(str(refusal.value).replace(os.strerror(17), "").partition("(")[0])
        assert before == {path: path.lstat().st_mtime_ns for path in made.rglob("*")} or lines[1:]
    assert lines[0] == lines[1]


def test_what_a_run_goes_on_from_a_dry_run_takes(made, monkeypatch):
    monkeypatch.chdir(made)
    allowed = {"task": counting("other"), "allow_changed_data": True}
    copied = {"checkpoint_copies": "copies", "model": {"d_model": 9}}
    for folder, settings in (
        ("begun", {}),
        ("begun", allowed),
        ("new", {"init_from": "other"}),
        ("new", copied),  # of which it fetches none
        ("new/of/a/run", {}),
    ):
        assert any(
            "MiB of a device" in x for x in dry_run.report(output_dir=folder, **arguments(settings))
        )
    assert not os.path.exists("new")


def test_without_data_only_what_it_decides_is_not_checked(made, monkeypatch):
    """A model may take its number of classes from the data."""
    monkeypatch.chdir(made)
    wide, other, none = {"model": {"d_model": 9}}, {"init_from": "other"}, {"init_from": "nowhere"}
    for folder, settings in (
        ("begun", wide),
        ("new", other | wide),
        ("new", {"init_from": "pieces"}),
    ):
        dry_run.report(output_dir=folder, has_data=False, **arguments(settings))
    damaged = {"init_from": "damaged/checkpoints/2"}
    for folder, settings in (("begun", other), ("new", none), ("new", damaged), ("file", {})):
        with pytest.raises((ValueError, OSError)):
            dry_run.report(output_dir=folder, has_data=False, **arguments(settings))


def test_weights_that_cannot_be_read_are_not_taken_for_data(made, monkeypatch):
    """The command retries without data after an error of the system, which must come again."""
    monkeypatch.chdir(made)

    def fails(folder, *_, **__):
        raise PermissionError(13, os.strerror(13), str(folder))

    monkeypatch.setattr(manifest, "damage", fails)
    for has_data in (True, False):
        with pytest.raises(OSError, match="other/checkpoints/2"):
            dry_run.report(has_data=has_data, **arguments({"init_from": "other"}))


@pytest.mark.parametrize("settings", [{}, {"init_from": "begun"}], ids=["own", "weights"])
def test_a_vocabulary_that_cannot_be_read_is_not_taken_for_data(
    made, monkeypatch, tmp_path, settings
):
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "made"))
    Path("begun/vocabulary.model").write_bytes(b"a vocabulary")
    opened = os.open

    def fails(path, *options):
        if str(path).endswith("begun/vocabulary.model"):
            raise PermissionError(13, os.strerror(13), str(path))
        return opened(path, *options)

    monkeypatch.setattr(os, "open", fails)
    folder = "new" if settings else "begun"
    with pytest.raises(OSError, match="begun/vocabulary.model cannot be read .*: get the right"):
        dry_run.report(output_dir=folder, has_data=False, **arguments(settings))


def test_a_split_is_checked_once_its_vocabulary_is_learnt():
    def n_targets(split):
        raise ValueError(f"split={split}: expected train or valid")

    task = counting().replace(n_targets=n_targets, vocabulary=SentencePieces(16, list))
    with pytest.raises(ValueError, match="split=valid: expected"):
        dry_run.report(**arguments({"task": task}))

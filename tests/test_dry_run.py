"""A dry run without data or extras; what a run says, and when."""

import functools
import sys

import gin
import numpy as np
import pytest

from reformax.cli import config, dummy_task, errors, train, translations
from reformax.training import dry_run, folder

TINY = ["n_layers=2", "steps=4", "batch_size=2", "length=32", "warmup_steps=1", "d_model=32"]


@pytest.fixture
def run(call, monkeypatch, tmp_path):
    """`reformax train` in a folder of its own: `(exit code, stdout, stderr)`."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, train.main)


@pytest.mark.parametrize(
    "file, sizes",
    [
        ("reformer_text.gin", ["n_layers=2", "length=64", "batch_size=1"]),  # no data_dir
        ("enwik8.gin", []),
        ("reviews.gin", ["n_layers=1", "length=64", "batch_size=1"]),
        ("transformer_multi30k.gin", ["n_layers=1", "length=32", "batch_size=1"]),
    ],
)
def test_a_dry_run_needs_no_data_and_no_extra(file, sizes, run, no_search, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    name = "transformer_enwik8_800k.gin" if file == "enwik8.gin" else file
    sizes = ["n_layers=1", "length=64", "batch_size=1"] if file == "enwik8.gin" else sizes
    flags = ["--dry_run", "--device_memory=3.5", *(f"--config={x}" for x in sizes)]
    code, out, err = run(f"--config_file={name}", *flags)
    assert code == 0 and "MiB of a device" in out, err
    assert "1 cpu device, 3.5 GiB of memory each" in out
    assert "programs for cpu have the figures below, those for a GPU have others" in out
    assert "note: the data is not read (" in out


@pytest.mark.slow
def test_a_line_is_printed_once_it_is_known(run, monkeypatch, capsys):
    needs, printed = dry_run.needs, []

    def compiled(*args):
        printed.append(capsys.readouterr().out)
        return needs(*args)

    monkeypatch.setattr(dry_run, "needs", compiled)
    flags = ["--dry_run", "--device_memory=0.5", *(f"--config={x}" for x in TINY)]
    code, out, err = run("--config_file=quickstart.gin", *flags)
    assert code == 0, err
    assert "of memory each" in printed[0] and "MiB of a device" not in printed[0]
    assert "MiB of a device" in printed[1]
    assert any("longest sequence that fits" in text for text in printed)
    assert "largest batch that fits" in out and "longest" not in out


def test_the_memory_of_a_device_is_of_a_dry_run_alone(run):
    code, _, err = run("--config_file=quickstart.gin", "--device_memory=59")
    assert code == 2
    assert err == "error: --device_memory=59.0: give --dry_run too, or leave the flag out\n"
    code, _, err = run("--config_file=quickstart.gin", "--dry_run", "--device_memory=0")
    assert code == 2 and "device_memory is 0.0: expected a number above 0" in err
    code, _, err = run("--config_file=quickstart.gin", "--dry_run", "--profile")
    assert code == 2 and "--profile: a dry run makes no step" in err


def test_a_stand_in_has_the_shapes_of_the_task(tmp_path):
    """The batches of the quickstart's task and of what stands in for it compile the same step."""
    config.parse(["quickstart.gin"], TINY)
    settings, lines = dummy_task.reported(lambda **settings: iter([]))
    assert list(lines) == []
    real = settings["task"].train_batch(0, 0, 2, 32)
    other = dummy_task.task_of(settings["model"](mode="train")).train_batch(0, 0, 2, 32)
    for one, two in zip(real, other, strict=True):
        assert (np.shape(one), np.asarray(one).dtype) == (np.shape(two), np.asarray(two).dtype)


def test_an_error_of_the_data_keeps_its_number():
    config.parse(["quickstart.gin"], TINY)

    @gin.configurable("unreadable")
    def report(**settings):
        raise PermissionError(13, "Permission denied", "a/b")

    with pytest.raises(PermissionError) as found:
        dummy_task.reported(report)
    assert errors.one_line(found.value).startswith("a/b cannot be used (Permission denied): get")


@pytest.mark.slow
def test_a_begun_run_is_checked_as_the_run_would_be(run, tmp_path):
    (tmp_path / "mine.txt").write_text("a text of some words. " * 900)
    sizes = [*TINY, "loop.train.eval_tokens=64", "loop.train.eval_whole=False"]
    flags = ["--config_file=reformer_text.gin", "--data_dir=mine.txt", "--output_dir=run"]
    flags += [f"--config={x}" for x in [*sizes, "vocab_size=256"]]
    assert run(*flags)[0] == 0
    longer = ["--config=steps=8", "--config=loop.train.sample_every=250"]
    code, out, err = run(*flags, *longer, "--dry_run")
    assert code == 0 and "MiB of a device" in out, err
    for more in (["--init_from=other"], ["--config=d_model=64"]):
        refused = run(*flags, *longer, *more)
        assert run(*flags, *longer, *more, "--dry_run") == refused
        assert refused[0] == 2 and refused[2].count("\n") == 1
    with (tmp_path / "mine.txt").open("a") as file:
        file.write("more. " * 900)
    code, _, err = run(*flags, *longer, "--dry_run")
    assert code == 1 and "the data is not that of checkpoint 4" in err
    code, out, err = run(*flags, *longer, "--dry_run", "--allow_changed_data")
    assert code == 0 and "MiB of a device" in out, err


@pytest.mark.slow
def test_changes_are_told_before_compiling(run, tmp_path):
    flags = ["--config_file=quickstart.gin", "--output_dir=run", *(f"--config={x}" for x in TINY)]
    flags += ["--config=loop.train.eval_tokens=64", "--config=loop.train.eval_whole=False"]
    code, out, err = run(*flags)
    assert code == 0, err
    assert out.index("\ncompiling\n") < out.index("\ncompiled in ")
    code, out, err = run(*flags, "--config=steps=5")
    assert code == 0, err
    assert out.index("settings changed since the last run") < out.index("\ncompiling\n")


@pytest.mark.slow
def test_tokenizing_is_said_before_a_vocabulary_of_translation_is_learnt(
    run, tmp_path, monkeypatch, capsys
):
    from reformax.data import vocabulary

    for name, n in (("train", 300), ("val", 20), ("test", 20)):
        for language in ("en", "de"):
            lines = [f"{language} {i % 7} ab cd ef {i % 5}" for i in range(n)]
            (tmp_path / f"{name}.{language}").write_text("\n".join(lines) + "\n")
    learnt, said = vocabulary.learnt, []

    def learns(*args):
        said.append(capsys.readouterr().out)
        return learnt(*args)

    monkeypatch.setattr(vocabulary, "learnt", learns)
    flags = ["--config_file=transformer_multi30k.gin", "--data_dir=.", "--output_dir=run"]
    sizes = ["n_layers=1", "steps=2", "batch_size=2", "length=32", "warmup_steps=1", "d_model=32"]
    sizes += ["vocab_size=20", "d_ff=32", "n_heads=2"]
    code, out, err = run(*flags, *(f"--config={x}" for x in sizes))
    assert code == 0, err
    assert len(said) == 1 and said[0].endswith("tokenizing\n") and "\ncompiling\n" in out


def test_a_config_that_is_not_used_stays(tmp_path):
    said = []
    assert folder.write_config(tmp_path, "a = 1\n", used=False) == "a = 1\n"
    folder.tell_changes(tmp_path, "a = 2\n", False, said.append)
    assert "config.gin stays" in said[0] and folder.write_config(tmp_path, "a = 2\n", False)
    assert (tmp_path / "config.gin").read_text() == "a = 1\n"


def test_translations_that_are_all_empty_are_told(monkeypatch, capsys):
    from typing import NamedTuple

    import reformax.generation as generation

    class Line(NamedTuple):
        text: str
        score: float = 0.0
        log_p: float = 0.0
        n_tokens: int = 1

    class Translation(NamedTuple):
        vocabulary: None = None

        def sentences(self, split):
            return ["ein Hund", "eine Katze"], ["a dog", "a cat"]

    for texts, told in ((["", " "], True), (["a dog", ""], False)):
        monkeypatch.setattr(
            generation, "translate_lines", lambda *a, t=texts, **k: [Line(x) for x in t]
        )
        translations.score_split(None, None, Translation(), "test", lambda name, text: None)
        assert ("all 2 translations of test are empty" in capsys.readouterr().err) == told


@pytest.mark.parametrize("of_bytes", [True, False])
def test_bits_per_dim_of_bytes_are_named(of_bytes, capsys):
    from reformax.cli import evaluate
    from reformax.data import base
    from reformax.training import loss

    data = {x: np.zeros(99, np.uint8) for x in ("train", "valid", "test")}
    task = base.byte_language_model("text", data)
    task = task if of_bytes else task.replace(of_bytes=False)
    result = {"split": "test", "length": 8, "stride": 8, "n_targets": 9, "whole": True}
    result |= {"accuracy": 0.5, "checkpoint_steps": [3], **loss.bits_of(task, "test", 1.5)}
    evaluate._print(result, "on a device", task)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "bits_per_dim: 1.5000" + " (bits per byte)" * of_bytes

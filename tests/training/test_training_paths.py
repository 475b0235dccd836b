"""Runs in folders whose paths have characters that libraries take for more than letters."""

import json
import shutil
from pathlib import Path

import pytest

import evaluate
import generate
import train
from reformax.cli import runs, sweep
from reformax.declared import SettingError
from reformax.training import array_reader, loop
from reformax.training.checkpoint import Checkpoints
from tests.training import worker
from tests.training.test_training_saved_run import RUN

NAMES = {
    "brackets": "lr[0.1]",
    "brackets alone": "[draft]",
    "an open bracket": "a[",
    "a closed bracket": "b]",
    "a pattern": "x?*",
    "a backslash": "back\\slash",
    "other than a": "[!a]",
    "braces": "{a,b}",
    "a space": "a b",
    "a percent sign": "100%",
    "letters beyond ASCII": "ü#~",
    "a new line": "a\nb",
    "a byte that is no UTF-8": "\udcff",
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The working directory, with a text and a config."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


def write(folder):
    (folder / "corpus.txt").write_text("abcdefgh, hgfedcba. " * 60)
    (folder / "run.gin").write_text(RUN)
    (folder / "grid.gin").write_text("include 'run.gin'\nloop.train.seed = [1, 2]\n")


def flags(steps, output_dir):
    settings = [f"loop.train.steps={steps}", "loop.train.checkpoint_every=2"]
    return [
        "--config_file=run.gin",
        "--data_dir=corpus.txt",
        f"--output_dir={output_dir}",
        *(f"--config={setting}" for setting in settings),
    ]


OPTIONS = {"eval_every": 4, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The same run in a folder of letters alone."""
    folder = tmp_path_factory.mktemp("elsewhere") / "run"
    loop.train(folder, **worker.arguments(steps=8, **OPTIONS))
    return folder


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_run_is_saved_and_restored_in_a_folder_of_any_name(tmp_path, elsewhere, name):
    # What a pattern of the name would find, or a slash in place of the backslash.
    for other in ("l", "d", "xyz", "back/slash"):
        shutil.copytree(elsewhere, tmp_path / other / "run")
    before = sorted(tmp_path.rglob("*"))
    folder = tmp_path / name / "run"
    for steps in (4, 8):
        assert loop.train(folder, **worker.arguments(steps=steps, **OPTIONS))["step"] == steps
    found, expected = (Checkpoints(x)._read(8)[0] for x in (folder, elsewhere))
    assert {n: x.tobytes() for n, x in found.items()} == {
        n: x.tobytes() for n, x in expected.items()
    }
    shutil.rmtree(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the working directory", "the output_dir"])
@pytest.mark.parametrize("name", ["lr[0.1]", "back\\slash"], ids=["brackets", "a backslash"])
def test_every_command_works_there(written, monkeypatch, name, where, call):
    output_dir = f"runs/{name}"
    if where == "the working directory":
        (written / name).mkdir()
        write(written / name)
        monkeypatch.chdir(written / name)
        output_dir = "runs/it"

    def ok(main, *arguments):
        code, out, err = call(main, *arguments)
        assert code == 0, err
        return out

    ok(train.main, *flags(2, output_dir))
    assert "going on from step 2 to 4" in ok(train.main, *flags(4, output_dir))
    ok(evaluate.main, f"--output_dir={output_dir}")
    assert json.loads(Path(output_dir, "evaluation_valid.json").read_text())["bits_per_dim"] > 0
    assert "abc" in ok(generate.main, f"--output_dir={output_dir}", "--prompt=abc")
    assert "it" in (table := ok(lambda: runs.main([output_dir]))) or name in table
    monkeypatch.setattr(sweep, "_run", lambda command, _: train.main(command[1:]))
    ok(
        lambda: sweep.main(
            ["grid.gin", *flags(2, "grid")[1:2], f"--output_dir={output_dir}/grid"]
            + ["--config=loop.train.steps=2"]
        )
    )
    for seed in (1, 2):
        ok(evaluate.main, f"--output_dir={output_dir}/grid/seed={seed}")


def test_what_cannot_be_written_is_refused_before_step_1(tmp_path, monkeypatch):
    """On a system without /proc."""
    monkeypatch.setattr(array_reader, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(SettingError, match=r"output_dir=.*\[x\].* is .*: give one of letters"):
        loop.train(tmp_path / "[x]", **worker.arguments(steps=1))
    assert not (tmp_path / "[x]").exists()
    loop.train(tmp_path / "x", **worker.arguments(steps=1))


def test_errors_name_the_folder_itself(tmp_path):
    folder = tmp_path / "[x]"
    folder.mkdir()
    with pytest.raises(OSError, match="x") as error, array_reader.plain(folder) as path:
        assert "[" not in str(path)
        (path / "none").read_bytes()
    assert error.value.filename == str(folder / "none")
    with pytest.raises(ValueError, match="x") as error, array_reader.plain(folder) as path:
        raise ValueError(f"{path}/a and {path}/b", 1)
    assert error.value.args == (f"{folder}/a and {folder}/b", 1)

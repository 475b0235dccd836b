"""The command `reformax`, and the configs that come with it."""

import re
import tomllib
from pathlib import Path

import pytest

import reformax
from reformax import __main__ as command
from reformax.cli import configs

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`(exit code, stdout, stderr)` of `reformax ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/reformax", *arguments])
        code = command.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_installed_command_is_this_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"reformax": f"{command.__name__}:main"}


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_has_its_help_and_the_reference_every_flag(name, run, capsys):
    first, *parts = (ROOT / "docs/reference/command_line.md").read_text().split("\n## ")
    (part,) = (part for part in parts if part.startswith(f"reformax {name}\n"))
    with pytest.raises(SystemExit, match="0"):
        run(name, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: reformax {name} [-h]")
    flags = set(re.findall(r"--\w+", shown.split("\noptions:")[1]))
    assert flags and flags <= set(re.findall(r"--\w+", first + part))


def test_help_lists_the_commands_and_version_prints_it(run):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(*arguments)
        assert code == 0 and all(f"\n  {name} " in out for name in command.COMMANDS)
    assert run("--version")[:2] == (0, f"reformax {reformax.__version__}\n")


def test_a_wrong_command_names_the_near_one(run):
    code, _, err = run("trian")
    assert code == 2 and err == "error: reformax has no command trian; did you mean train?\n"


def test_configs_are_listed_with_what_they_are(run):
    code, out, _ = run("configs")
    assert code == 0
    assert "quickstart.gin\n    A small Reformer on the source text of Python's standard" in out
    runs, _, rest = out.partition("not run to their end (configs/not_run)\n")
    not_run, _, parts = rest.partition("parts, to be included\n")
    for path in (ROOT / "configs").rglob("*.gin"):
        assert path.name in {"not_run": not_run, "parts": parts}.get(path.parent.name, runs)
    folders = {path.name for path in (ROOT / "configs").iterdir()}
    assert folders == {*configs.SUBJECTS, configs.PARTS}


def test_configs_of_a_subject_are_listed_alone(run):
    code, out, _ = run("configs", "translation")
    assert code == 0 and out.startswith("sentence pairs")
    assert "transformer_multi30k.gin\n" in out and "your own pairs" in " ".join(out.split())
    assert "quickstart" not in out and "37m is 37 million parameters" in out


@pytest.mark.parametrize("name", ["quickstart", "quickstart.gin", "configs/quickstart.gin"])
def test_a_config_is_printed(name, run):
    assert run("configs", name)[:2] == (0, (ROOT / "configs/text/quickstart.gin").read_text())


def test_a_wrong_config_names_the_near_one(run):
    code, _, err = run("configs", "quikstart")
    assert code == 2 and err.startswith("error: no config quikstart; did you mean quickstart.gin")


@pytest.mark.parametrize(
    "name, subject",
    [
        ("classificatoin", "classification"),
        ("fine-tuning", "fine_tuning"),
        ("attention", "attentions"),
    ],
)
def test_a_wrong_subject_names_the_near_one(name, subject, run):
    code, _, err = run("configs", name)
    assert (code, err) == (2, f"error: no config or subject {name}; did you mean {subject}?\n")


@pytest.mark.parametrize("flag", ["quickstart.gin", "configs/reformer_reverse.gin", None])
def test_training_finds_a_config_that_comes_with_the_package(flag, run):
    files = [] if flag is None else [f"--config_file={flag}"]
    code, _, err = run("train", *files, "--config=loop.train.steps=0")
    assert code == 2 and "steps is 0" in err


def test_a_config_of_the_working_directory_goes_first_and_includes_packaged_ones(run, tmp_path):
    mine = "include 'transformer_reverse.gin'\nsteps = -7\n"
    (tmp_path / "quickstart.gin").write_text(mine)
    code, _, err = run("train", "--config_file=quickstart.gin")
    assert code == 2 and "steps is -7" in err


def test_the_packaged_configs_are_those_at_the_top():
    assert configs.FOLDER == ROOT / "reformax/configs"
    assert configs.FOLDER.resolve() == ROOT / "configs"

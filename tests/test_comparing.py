"""`reformax runs` and `reformax sweep`: tables of runs, and grids of settings that are trained."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reformax.cli import errors, runs, sweep, train
from reformax.cli import statements as statements_lib

ROOT = Path(__file__).resolve().parents[1]

BASE = """
from __gin__ import dynamic_registration
from reformax.training import loop
from reformax.training import optimizer
from tests.training import tiny

steps = 4
loop.train.steps = %steps
loop.train.batch_size = 8
loop.train.length = 16
loop.train.log_every = 2
loop.train.model = @tiny.TinyLM
loop.train.task = @tiny.counting()
loop.train.optimizer = @optimizer.adamw()
optimizer.adamw.learning_rate = 1e-2
"""
GRID = """
include 'base.gin'
loop.train.eval_every = 2
tiny.TinyLM.d_model = [4, 6]
tiny.counting.noise = [0.1, 0.2]
"""
NAMES = [f"d_model={d},noise={noise}" for d in (4, 6) for noise in (0.1, 0.2)]


def statements(text):
    return statements_lib.read(text, "grid.gin")


def test_lists_are_a_grid_and_other_lines_are_the_same_in_all_runs():
    members = sweep.grid(statements(GRID), "grid.gin")
    assert [member.name for member in members] == NAMES
    assert members[1].overrides == [
        "loop.train.eval_every = 2",
        "tiny.TinyLM.d_model = 4",
        "tiny.counting.noise = 0.2",
    ]


def test_references_and_lists_are_values_too():
    text = "a.f.ops = [(@near/b.g(), %c), @b.g]\na.f.sizes = [[1, 2]]\nscope/a.f.name = ['x']\n"
    members = sweep.grid(statements(text), "grid.gin")
    assert [member.name for member in members] == [
        "ops=near_b.g_c,sizes=1_2,name=x",
        "ops=b.g,sizes=1_2,name=x",
    ]
    assert members[0].overrides == [
        "a.f.ops = (@near/b.g(), %c)",
        "a.f.sizes = [1, 2]",
        "scope/a.f.name = 'x'",
    ]


def test_names_that_are_long_or_the_same_are_told_apart():
    names = [m.name for m in sweep.grid(statements("a = ['x/y', 'x.y', 'x:y']"), "grid.gin")]
    assert len(set(names)) == 3 and names[1] == "a=x.y" and names[0].startswith("a=x_y.")
    (one, other) = sweep.grid(statements(f"a = ['{'x' * 200}1', '{'x' * 200}2']"), "grid.gin")
    assert len(one.name) == len(other.name) < 120 and one.name != other.name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a base config and a grid over it."""
    (tmp_path / "base.gin").write_text(BASE)
    (tmp_path / "grid.gin").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def swept(folder, monkeypatch, call):
    """`(exit code, stdout, stderr, the runs that began)` of a sweep; its runs are in process."""
    begun = []

    def run(command, interrupt):
        (folder,) = (flag for flag in command if flag.startswith("--output_dir="))
        begun.append(Path(folder).name)
        monkeypatch.setattr("sys.argv", ["reformax", *command])
        return errors.exit_code(lambda: train.main(command[1:]))

    monkeypatch.setattr(sweep, "_run", run)

    def swept(*flags):
        begun.clear()
        code, out, err = call(lambda: sweep.main(flags))
        return code, out, err, list(begun)

    return swept


@pytest.mark.slow
def test_a_sweep_trains_each_and_leaves_what_has_finished(swept, folder):
    (folder / "grid.gin").write_text(GRID.replace("[4, 6]", "[4]"))
    code, out, err, begun = swept("grid.gin")
    assert (code, begun) == (0, NAMES[:2]), err
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    head = "run, noise, best bits per dim of valid, steps done, tokens/s, minutes"
    assert [cell.strip() for cell in rows[0]] == head.split(", ")
    found = [[cell.strip() for cell in row[:2]] for row in rows[2:]]
    assert found == [[NAMES[0], "0.1"], [NAMES[1], "0.2"]]
    assert (folder / "runs/grid/runs.png").read_bytes()[:4] == b"\x89PNG"
    code, out, _, begun = swept("grid.gin")
    assert (code, begun) == (0, []) and out.count("finished before") == 2
    # More steps are other settings: the runs go on.
    code, out, _, begun = swept("grid.gin", "--config=steps=6")
    assert (code, begun) == (0, NAMES[:2]) and "going on from step 4 to 6" in out
    assert swept("grid.gin", "--config=steps=6", "--quiet")[3] == []
    # Without more steps the score of the settings before would be shown as theirs.
    for changed in ("steps=5", "optimizer.adamw.learning_rate=1e-3"):
        code, _, err, begun = swept("grid.gin", f"--config={changed}")
        assert (code, begun) == (2, []) and err.count("\n") == 1, err
        told = r"0\.1 was trained to step 6 with other settings, and steps=[45] leaves none for"
        assert re.search(told, err), err


def test_flags_of_a_sweep_are_its_runs(folder, monkeypatch, call):
    commands = []
    monkeypatch.setattr(sweep, "_run", lambda command, _: commands.append(command))
    monkeypatch.setattr(sweep, "_checked", lambda x, *_: sweep.CheckedConfig(x.name, 4))
    flags = "--quiet", "--data_dir=data", "--config=steps=6"
    call(lambda: sweep.main(["grid.gin", *flags]))
    assert len(commands) == 4 and all({*flags} <= {*command} for command in commands)


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_the_next_begins(swept, folder):
    text = GRID.replace("[0.1, 0.2]", "0.1").replace("[4, 6]", "6")
    (folder / "bad.gin").write_text(f"{text}tiny.counting.poison_step = [1, -1]\n")
    code, out, err, begun = swept("bad.gin", "--quiet")
    assert (code, begun) == (1, ["poison_step=1", "poison_step=-1"])
    assert "error: not finished: poison_step=1 (exit code 1)" in err.splitlines()[-1]
    assert "loss is" in err and "| poison_step=-1 |" in out
    assert swept("bad.gin")[3] == ["poison_step=1"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("import numpy\nsteps = [1]", "grid.gin imports numpy: include a config that has"),
        (
            f"{GRID}loop.train.keep = [1, 1]",
            "are the same run: a list has a value twice, or --config",
        ),
        ("steps = 3", "grid.gin has no list: write the values to try as one"),
        ("steps = []", "grid.gin: steps is []: expected at least one value"),
        ("steps = [1", "steps = [1"),
        ("include 'base.gin'\ntiny.TinyLM.d_modle = [1]", "d_modle"),
        (f"{GRID}loop.train.keep = [1, 0]", f"{NAMES[0]},keep=0: loop.train.keep is 0: expected"),
        (
            f"{GRID}optimizer.adamw.weight_decay = [0, -1]",
            ",weight_decay=-1: optimizer.adamw.weight_decay is -1: ",
        ),
        (f"{GRID}tiny.TinyLM.vocab_size = [16, 8]", ",vocab_size=8: task counting has ids "),
        (f"{GRID}tiny.TinyLM.max_length = [16, 8]", ",max_length=8: loop.train.length=16 is above"),
        ("include 'quikstart.gin'\nsteps = [1]", "no config file quikstart.gin; did you mean"),
    ],
)
def test_a_wrong_grid_is_told_before_anything_runs(swept, folder, text, message):
    (folder / "grid.gin").write_text(text)
    code, out, err, begun = swept("grid.gin")
    assert code == 2 and not begun and message in err and err.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_setting_of_the_command_does_not_stand_for_a_list(swept):
    code, _, err, begun = swept("grid.gin", "--config=tiny.TinyLM.d_model=8")
    assert (code, begun) == (2, []) and f"{NAMES[0]} and {NAMES[2]} are the same run" in err


def test_imports_of_what_is_found_without_may_stand_in_a_grid(folder):
    imports = "from __gin__ import dynamic_registration\nfrom reformax.ops import moba\n"
    (folder / "grid.gin").write_text(imports + GRID)
    assert len(sweep._read(folder / "grid.gin").values) == 3


def test_no_file_is_told(swept):
    assert swept("none.gin")[2] == (
        "error: no file none.gin: give a file of settings, some of them lists\n"
    )


def write_run(folder, config_text, *scores, seconds=60.0, split="valid"):
    folder.mkdir(parents=True)
    (folder / "config.gin").write_text(config_text)
    lines = []
    for step, score in enumerate(scores, start=1):
        train = dict(step=step, tag="train", split="train", bits_per_dim=score - 0.1)
        lines.append(train | dict(timing=dict(tokens_per_second=1000.0 * step)))
        timing = dict(seconds=seconds * step)
        score = dict(step=step, tag="eval", split=split, bits_per_dim=score)
        lines.append(score | dict(timing=timing))
    torn = '{"step": 9'
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + torn)


LSH = "n = 2\na.A.op = @lsh.lsh()\nlsh.lsh.n_hashes = {}\nlsh.lsh.chunk_len = 64\na.A.n = %n\n"


def test_the_table_and_the_plot_name_bits_per_byte(tmp_path, capsys):
    write_run(tmp_path / "one", "n = 2\n", 3.0, 2.0)
    path = tmp_path / "one/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]  # not the torn one
    lines = [line | {"bits_per_byte": line["bits_per_dim"]} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.main([str(tmp_path / "one")]) == 0
    assert "| best bits per dim (bits per byte) of valid |" in capsys.readouterr().out
    assert runs.read([str(tmp_path / "one")])[0].unit == "bits per dim (bits per byte)"


def test_a_folder_without_room_for_the_plot_is_one_line(tmp_path, capsys):
    """The table is there all the same."""
    write_run(tmp_path / "one", "n = 2\n", 3.0, 2.0)
    (tmp_path / "runs.png").mkdir()
    with pytest.raises(OSError, match="runs.png.*; --plot=FILE draws the curves elsewhere$"):
        runs.main([str(tmp_path / "one")])
    assert "| one |" in capsys.readouterr().out


def test_the_table_has_what_differs_and_the_best(tmp_path, capsys):
    write_run(tmp_path / "one", LSH.format(2), 3.0, 2.0, 2.5)
    write_run(tmp_path / "two", LSH.format(4), 3.0, 2.25, seconds=30, split="test")
    write_run(tmp_path / "dense", "n = 2\na.A.op = @dense.dense()\na.A.n = 3\n", 4.0)
    assert runs.main([str(tmp_path / "one"), str(tmp_path)]) == 0
    out = capsys.readouterr().out
    head, _, *rows = [[x.strip() for x in row.split("|")[1:-1]] for row in out.splitlines()[:5]]
    best = "best bits per dim of valid", "best bits per dim of test"
    assert head[:4] == ["run", "op", "n_hashes", "n"]
    assert [row[0] for row in rows] == ["one", "dense", "two"]
    table = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["op"] for row in table] == ["@lsh.lsh()", "@dense.dense()", "@lsh.lsh()"]
    assert [row["n_hashes"] for row in table] == ["2", "-", "4"]
    assert [row["n"] for row in table] == ["2", "3", "2"]
    assert [row[best[0]] for row in table] == ["2.0000 at 2", "4.0000 at 1", "-"]
    assert table[2][best[1]] == "2.2500 at 2"
    assert [row["tokens/s"] for row in table] == ["2,000", "1,000", "1,500"]
    assert [row["minutes"] for row in table] == ["3.0", "1.0", "1.0"]
    assert (tmp_path / "runs.png").read_bytes()[:4] == b"\x89PNG"


def test_the_table_of_unlike_runs_fits_and_says_how_to_see_the_rest(tmp_path, monkeypatch, capsys):
    text = "".join(f"a.A.setting_{i} = {{}}\n" for i in range(30))
    write_run(tmp_path / "one", text.replace("{}", "1") + "b.B.of_one = 1\nb.B.z = 2\n", 3.0)
    write_run(tmp_path / "two", text.replace("{}", "2") + "b.B.z = 3\n", 3.0)
    for columns, n in (("200", 10), ("20", runs.LEAST_SHOWN)):
        monkeypatch.setenv("COLUMNS", columns)
        assert runs.main([str(tmp_path)]) == 0
        head, *_, note, _, path = capsys.readouterr().out.splitlines()
        assert head.count("setting_") == n and "| setting_0 |" in head and path[:7] == "curves:"
        assert note == f"{32 - n} more settings differ: --all of `reformax runs` shows all"
        assert len(head) <= 200 < len(head) + len(" setting_29 |") or n == runs.LEAST_SHOWN
    found = runs.read([str(tmp_path)])
    whole = len(runs.table(found)[0])
    assert runs.table(found, whole)[-1].startswith("| two ")
    assert runs.table(found, whole - 1)[-1].startswith("1 more setting differs: --all of ")
    assert runs.main([str(tmp_path), "--all"]) == 0
    every = capsys.readouterr().out
    assert every.splitlines()[0].count("setting_") == 30 and "| of_one |" in every
    monkeypatch.delenv("COLUMNS")
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "__stdout__", file)
        assert runs.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == every  # a file has room for all
    assert "more settings differ" not in every


@pytest.mark.parametrize(
    "other, columns",
    [
        ("n = 4\na.A.n = 4\na.B.n = %n\n", {"n": ["2", "4"]}),
        ("a.A.n = 4\na.B.n = 2\n", {"n": ["2", "4"]}),
        ("n = 4\na.A.n = 8\na.B.n = %n\n", {"n": ["2", "4"], "A.n": ["2", "8"]}),
        ("n = 2\na.A.n = 4\na.B.n = %n\n", {"n": ["2", "4"]}),
        ("n = 4\na.A.n = %n\na.B.n = %n\n", {"n": ["2", "4"]}),
    ],
)
def test_a_macro_and_its_use_are_one_difference(other, columns):
    texts = ("n = 2\na.A.n = %n\na.B.n = %n\n", other)
    found = [statements(f"steps = 9\n{text}").values for text in texts]
    settings = [{name: repr(value) for name, value in values.items()} for values in found]
    assert runs.differences(settings) == columns


def test_a_folder_without_runs_is_told(tmp_path):
    with pytest.raises(ValueError, match="has no metrics.jsonl, nor has a folder in it: give"):
        runs.main([str(tmp_path)])


def test_runs_of_one_name_have_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name, "", 1.0)
    found = runs.read([str(tmp_path / "a"), str(tmp_path / "b/run"), str(tmp_path / "b")])
    assert [run.name for run in found] == ["a/run", "b/run"]


@pytest.mark.parametrize("x, last", [("step", 3), ("minutes", 3.0)])
def test_curves_go_by_steps_or_minutes(tmp_path, monkeypatch, x, last):
    write_run(tmp_path / "one", "", 3.0, 2.0, 2.5)
    drawn = []
    monkeypatch.setattr(runs.curves, "png", lambda figure: drawn.append(figure) or b"")
    runs.main([str(tmp_path), f"--x={x}"])
    (axes,) = drawn[0].axes
    scores = axes.get_lines()[1].get_xydata().tolist()
    assert scores[-1] == [last, 2.5] and axes.get_xlabel() == x
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one"]


@pytest.mark.slow
def test_a_sweep_that_is_stopped_saves_and_goes_on(folder):
    """The signal reaches the sweep alone, which passes it on."""
    command = [sys.executable, "-m", "reformax", "sweep", "grid.gin", "--config=steps=100000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = folder / "runs/grid" / NAMES[0]
    with subprocess.Popen(command, **options) as process:
        while process.poll() is None and not (first / "metrics.jsonl").is_file():
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "SIGINT" in err and "saved at step" in out and f"| {NAMES[0]} |" in out
    assert any((first / "checkpoints").iterdir()) and NAMES[1] not in out
    command[-1] = "--config=loop.train.max_minutes=0.001"
    run = subprocess.run(command, **options)
    assert run.returncode == 0, run.stderr
    assert "going on from step" in run.stdout and f"| {NAMES[3]} |" in run.stdout

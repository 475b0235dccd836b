"""train.py and evaluate.py: gin configs, overrides, exit codes, and errors in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gin
import pytest

import evaluate
import train
from reformax.cli import config, configs, parsed
from reformax.training import loop, optimizer
from tests.training import tiny, worker

ROOT = Path(__file__).resolve().parents[2]

BASE = """
from __gin__ import dynamic_registration
from reformax.training import loop
from reformax.training import optimizer

steps = 12
loop.train.steps = %steps
loop.train.batch_size = 8
loop.train.length = 16
loop.train.eval_every = 10
loop.train.log_every = 4
loop.train.optimizer = @optimizer.adamw()
optimizer.adamw.learning_rate = @optimizer.cosine()
optimizer.cosine.max_value = 3e-2
optimizer.cosine.warmup_steps = 2
"""
RUN = """
from __gin__ import dynamic_registration
from reformax.training import loop
from tests.training import tiny
include 'base.gin'

loop.train.model = @tiny.TinyLM
loop.train.task = @small/tiny.counting()
small/tiny.counting.n_valid = 100
tiny.TinyLM.d_model = 6
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a config that includes another."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.gin").write_text(BASE)
    (tmp_path / "configs" / "run.gin").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_config_trains_and_evaluates(folder, call):
    overrides = [
        "--config=loop.train.seed=3",
        "--config=steps=11",
        "--config=tiny.TinyLM.d_model=5",
    ]
    code, out, _ = call(train.main, "--config_file=configs/run.gin", *overrides)
    assert code == 0
    run = folder / "runs" / "run"  # the default: by the config's name, in the working directory
    last = worker.record(run)[-1]
    assert (last["step"], last["split"]) == (11, "valid")
    assert f"valid bits per dim: {last['bits_per_dim']:.4f} at step 11" in out
    assert "evaluate.py --output_dir=runs/run --split=test" in out and "note:" not in out
    for name in ["config.gin", "metrics.jsonl", "loss.png", "tensorboard", "checkpoints"]:
        assert (run / name).exists() and name in out

    # The settings in use, those of included files, overrides and defaults: nothing else is needed.
    written = (run / "config.gin").read_text()
    for line in ["steps = 11", "loop.train.seed = 3", "TinyLM.d_model = 5", "adamw.b1 = 0.9"]:
        assert line in written
    (folder / "configs" / "run.gin").unlink()
    flags = ["--output_dir=runs/run", "--split=test", "--trust_config"]
    code, out, _ = call(evaluate.main, *flags)
    assert code == 0
    result = json.loads((run / "evaluation_test.json").read_text())
    assert out.splitlines()[-1] == f"bits_per_dim: {result['bits_per_dim']:.4f}"
    # tiny's splits are the same, and both were scored by the same function.
    assert result["bits_per_dim"] == last["bits_per_dim"]
    assert (result["n_targets"], result["length"], result["stride"]) == (100, 16, 16)
    assert result["checkpoint_steps"] == [11]

    # Each flag is heeded.
    def scored(*more):
        flags = ["--output_dir=runs/run", "--trust_config", *more]
        code, _, err = call(evaluate.main, *flags)
        assert code == 0, err
        return json.loads((run / "evaluation_valid.json").read_text())

    assert scored()["split"] == "valid"
    longer = scored("--length=20", "--stride=4", "--batch_size=3", "--seed=7")
    assert (longer["length"], longer["stride"], longer["seed"]) == (20, 4, 7)
    assert longer["bits_per_dim"] != result["bits_per_dim"]
    assert scored("--checkpoint=10")["checkpoint_steps"] == [10]
    assert scored("--checkpoint=latest")["checkpoint_steps"] == [11]
    noisier = "--config=small/tiny.counting.n_valid=50"
    assert scored(noisier)["n_targets"] == 50 and scored(noisier)["overrides"] == [noisier[9:]]

    # The same command again finds it finished; with more steps it goes on, and says what changed.
    flags = ["--config_file=runs/run/config.gin", "--output_dir=runs/run"]
    before = sorted((run / "tensorboard").iterdir())
    assert ", at step 11 of 11 already, in " in call(train.main, *flags)[1]
    code, out, err = call(train.main, *flags, "--quiet")
    assert code == 0 and err == "" and worker.record(run)[-1] == last
    assert [line.split()[0] for line in out.splitlines()] == ["valid", "in", "next:"]
    assert sorted((run / "tensorboard").iterdir()) == before
    code, out, _ = call(train.main, *flags, "--config=steps=13")
    assert code == 0 and "- steps = 11\n+ steps = 13" in out
    assert "going on from step 11 to 13" in out

    for more, message in [
        (["--checkpoint=99"], "no checkpoint of step 99"),
        (["--checkpoint=worst"], "checkpoint=worst must be best, latest, average:N or one of"),
        (["--stride=17"], "stride=17 must be from 1 to length=16"),
        (["--config=tiny.TinyLM.d_model=7"], ": leave out the settings that change it\n"),
        (["--config=tiny.TinyLM.d_modle=7"], "did you mean d_model"),
        (["--data_dir=empty"], "no data in --data_dir=empty"),
    ]:
        flags = ["--output_dir=runs/run", "--trust_config", *more]
        code, out, err = call(evaluate.main, *flags)
        assert code in (1, 2) and err.count("\n") == 1 and message in err


@pytest.mark.slow
def test_the_best_checkpoint_is_scored(folder, call):
    # A learning rate that explodes after step 10: the last evaluation is the worse one.
    flags = ["--config_file=run.gin", "--output_dir=out", "--config=steps=30"]
    flags += ["--config=optimizer.cosine.max_value=5.0", "--config=optimizer.adamw.clip=None"]
    (folder / "run.gin").write_text(RUN.replace("base.gin", "configs/base.gin"))
    assert call(train.main, *flags)[0] == 0
    valid = {x["step"]: x["bits_per_dim"] for x in worker.record("out") if x["split"] == "valid"}
    best = min(valid, key=valid.get)
    flags = ["--output_dir=out", "--trust_config"]
    code, _, _ = call(evaluate.main, *flags)
    result = json.loads((folder / "out" / "evaluation_valid.json").read_text())
    assert (result["checkpoint_steps"], result["bits_per_dim"]) == ([best], valid[best])


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--config=loop.train.stps=3"], 2, "no parameter stps: loop.train.stps=3; did you mean s"),
        (["--config=loop.trian.steps=3"], 2, "no trian: loop.trian.steps=3; did you mean train"),
        (["--config=tiny.TinyLM.x.y=3"], 2, "tiny.TinyLM has no x: tiny.TinyLM.x.y=3"),
        (["--config=loop.train.steps=%stepz"], 2, "the config uses %stepz, which no"),
        (["--config_file=bad_include.gin"], 2, "bas.gin"),
        (["--config_file=bad_import.gin"], 2, "No module named 'tests.training.tinny'"),
        (["--config_file=bad_name.gin"], 2, "TinyLM has no parameter d_modle (", ),
        (["--config_file=empty.gin"], 2, "the config sets nothing of loop.train: it needs"),
        (["--config_file=base.gin"], 2, "the config sets no 'model' and 'task' of loop.train: add"),
        (["--config=loop.train.eval_length=5000"], 1, "length=5000 is above max_length=4096"),
        (["--config=optimizer.cosine.steps=2"], 2, "cosine.warmup_steps=2 must be"),
        (["--data_dir=empty"], 2, "no data in --data_dir=empty: give the folder that has it"),
        (["--config=loop.train.task=@tiny.TinyLM()", "--data_dir=x"], 2, "TinyLM reads no files"),
        ([*(f"--config={x}=@masked.masked()" for x in ("loop.train.task", "masked.masked.task")),
          "--data_dir=x"], 2, "masked reads no files"),
        (["--output_dir=file/out"], 1, "cannot be written"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(folder, monkeypatch, flags, code, message, call):
    (folder / "file").write_text("")
    configs = folder / "configs"
    (configs / "empty.gin").write_text("")
    (configs / "bad_include.gin").write_text(RUN.replace("base.gin", "bas.gin"))
    (configs / "bad_import.gin").write_text(RUN.replace("import tiny", "import tinny"))
    (configs / "bad_name.gin").write_text(RUN.replace("d_model", "d_modle"))
    monkeypatch.setattr("reformax.cli.configs.FOLDER", configs)
    if not any(flag.startswith("--config_file") for flag in flags):
        flags = ["--config_file=run.gin", *flags]
    got, out, err = call(train.main, *flags)
    assert got == code and message in err
    lines = [line for line in err.splitlines() if not line.startswith(("usage:", " "))]
    assert len(lines) == 1 and "error: " in lines[0]
    assert not (folder / "runs").exists()


def test_a_traceback_is_shown_on_request_and_for_faults(folder, call):
    flags = ["--config_file=configs/run.gin", "--config=loop.train.steps=0"]
    assert call(train.main, *flags)[0] == 2
    with pytest.raises(ValueError, match="steps is 0"):
        call(train.main, *flags, "--traceback")
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0)


def test_an_interrupt_before_the_first_step_is_no_fault(call):
    def interrupted():
        raise KeyboardInterrupt

    assert call(interrupted) == (130, "", "stopped\n")


def test_files_and_overrides_win_in_their_order(folder):
    (folder / "more.gin").write_text("include 'configs/base.gin'\nsteps = 5")
    config.parse(["configs/run.gin", "more.gin"])
    assert gin.query_parameter("steps/gin.macro.value") == 5
    config.parse(["configs/run.gin"], ["steps=6", "steps=7"], data_dir="somewhere")
    assert gin.query_parameter("steps/gin.macro.value") == 7
    # --data_dir reaches the task that is chosen, in the scope that it is chosen in.
    assert "small/tiny.counting.data_dir = 'somewhere'" in gin.config_str()
    config.parse(["configs/run.gin"])
    assert "somewhere" not in gin.config_str()


STAGED = """
from __gin__ import dynamic_registration
from reformax.data import stdlib
from reformax.data import text
from reformax.training import loop
from reformax.training import stages
include 'run.gin'

loop.train.task = @stdlib.stdlib()
loop.train.stages = (@a/stages.Stage(), @b/stages.Stage(), @c/stages.Stage())
stages.Stage.task = @own/text.text()
b/stages.Stage.task = @stdlib.stdlib()
a/stages.Stage.until = 1
b/stages.Stage.until = 2
c/stages.Stage.until = 3
"""


def test_the_folder_of_data_reaches_tasks_of_stages(folder):
    (folder / "configs/staged.gin").write_text(STAGED)
    (folder / "mine.txt").write_text("a text of some length " * 20)
    config.parse(["configs/staged.gin"], data_dir="mine.txt")
    found = parsed.bindings(loop.train, ("stages",))["stages"]
    assert [stage.task.name for stage in found] == ["text", "stdlib", "text"]
    config.parse(["configs/staged.gin"], ["c/stages.Stage.task=None"], data_dir="mine.txt")
    assert parsed.bindings(loop.train, ("stages",))["stages"][2].task is None
    with pytest.raises(config.ConfigError, match="c/stages.Stage.task is 3: expected a task"):
        config.parse(["configs/staged.gin"], ["c/stages.Stage.task=3"], data_dir="mine.txt")
    kept = "text.text.data_dir = 'kept.txt'"
    config.parse(["configs/staged.gin"], [kept], data_dir="mine.txt")
    assert "kept.txt" in gin.config_str() and "mine.txt" not in gin.config_str()


def test_the_folder_of_data_reaches_tasks_of_evaluations(folder):
    (folder / "configs/evaluated.gin").write_text("""
from __gin__ import dynamic_registration
from reformax.data import stdlib
from reformax.data import text
from reformax.training import evaluations
from reformax.training import loop
loop.train.task = @stdlib.stdlib()
loop.train.evaluations = {
    'a': @a/evaluations.Evaluation(), 'b': @b/evaluations.Evaluation(),
    'c': @evaluations.Evaluation()}
a/evaluations.Evaluation.task = @other/text.text()
b/evaluations.Evaluation.task = @text.text()
""")
    (folder / "mine.txt").write_text("a text of some length " * 20)
    whole = "by_name = {'a': @a/evaluations.Evaluation()}", "loop.train.evaluations = %by_name"
    for more, tasks in (("", ["text", "text", None]), ("\n".join(whole), ["text"])):
        path = folder / "configs/evaluated.gin"
        path.write_text(f"{path.read_text()}\n{more}\n")
        config.parse(["configs/evaluated.gin"], data_dir="mine.txt")
        found = parsed.bindings(loop.train, ("evaluations",))["evaluations"]
        assert [x.task and x.task.name for x in found.values()] == tasks
    kept = "other/text.text.data_dir = 'mine.txt'"
    config.parse(["configs/evaluated.gin"], [kept], data_dir="nowhere.txt")
    (found,) = parsed.bindings(loop.train, ("evaluations",))["evaluations"].values()
    assert found.task.name == "text"  # the folder that the config gives stays


def test_only_what_the_files_name_is_written(folder):
    # A function that its own module made configurable, as some of Trax's are.
    configurable = gin.external_configurable(worker.arguments)
    (folder / "call.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom tests.training import tiny\n"
        "small/tiny.counting.vocab_size = 4\n"
    )
    config.parse(["call.gin"])
    with gin.config_scope("small"):
        parsed.configured(tiny.counting)()
        configurable()
    assert "worker.arguments.task = None" in gin.operative_config_str()
    text = parsed.operative()
    assert "worker" not in text
    assert "small/tiny.counting.vocab_size = 4" in text and "counting.noise = 0.1" in text


def test_includes_are_found_from_any_folder(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    config.parse([str(folder / "configs" / "run.gin")])
    assert gin.query_parameter("steps/gin.macro.value") == 12
    monkeypatch.setattr("reformax.cli.configs.FOLDER", folder)
    for name in ("run.gin", "run", "configs/run.gin"):  # in any folder of ours
        config.parse([name])


def test_includes_are_of_the_folder_in_use(folder):
    (folder / "other").mkdir()
    for name in ("run.gin", "base.gin"):
        text = (folder / "configs" / name).read_text()
        (folder / "other" / name).write_text(text.replace("steps = 12", "steps = 13"))
    for name, steps in {"other": 13, "configs": 12}.items():
        config.parse([str(folder / name / "run.gin")])
        assert gin.query_parameter("steps/gin.macro.value") == steps


@pytest.mark.slow
def test_an_override_that_nothing_uses_is_told(folder, call):
    flags = ["--config_file=configs/run.gin", "--config=optimizer.adam.b1=0.5", "--config=steps=3"]
    flags += ["--config=optimizer.adamw.b1=0.5", "--config=small/tiny.counting.noise=0.2"]
    code, out, _ = call(train.main, *flags)
    assert code == 0 and out.count("note:") == 1
    assert "note: --config='optimizer.adam.b1=0.5' sets something that this run does not use" in out
    flags += ["--config=rate=0.5", "--output_dir=runs/other"]
    with open("configs/run.gin", "a") as file:
        file.write("\nrate = 0.1\n")
    out = call(train.main, *flags)[1]
    assert out.count("note:") == 2 and "note: --config='rate=0.5' sets something" in out
    # Before the first step, and in a dry run.
    assert out.index("note:") < out.index("step 3: valid")
    out = call(train.main, *flags, "--dry_run")[1]
    assert out.count("note:") == 2


def test_a_misspelt_name_of_a_file_is_told(folder, call):
    Path("configs/mine.gin").write_text("include 'run.gin'\nstesp = 3\n")
    flags = ["--config_file=configs/mine.gin", "--output_dir=runs/mine"]
    code, _, err = call(train.main, *flags)
    assert code == 2 and not Path("runs/mine").exists()
    assert (
        err == "error: configs/mine.gin sets stesp, and nothing has %stesp; did you mean steps?\n"
    )
    # An argument of what nothing calls may be meant for another run.
    Path("configs/mine.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom reformax.training import optimizer as o\n"
        "include 'run.gin'\nsteps = 3\no.adamw.b1 = 0.5\noptimizer.adam.b1 = 0.5\n"
    )
    code, out, _ = call(train.main, *flags)
    assert code == 0 and out.count("note:") == 1
    assert "note: configs/mine.gin sets optimizer.adam.b1, which this run does not use" in out


def test_a_setting_may_take_the_place_of_a_files_macro(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text("length = 64\nloop.train.length = %length\n")
    config.parse([str(path)], ["loop.train.length=32"])
    assert parsed.bindings(loop.train, ["length"]) == {"length": 32}


@pytest.mark.parametrize("which", ["best", "average:5"])
def test_evaluating_a_folder_without_a_run_is_told(which, folder, call):
    flags = ["--output_dir=nowhere", f"--checkpoint={which}"]
    code, _, err = call(evaluate.main, *flags)
    assert code == 2 and "output_dir=nowhere holds no run" in err and err.count("\n") == 1


def test_a_signal_ends_the_script_saved(folder, monkeypatch, call):
    signals = [f"--config=small/tiny.counting.{x}" for x in ("signal_step=5", "number=15")]
    flags = ["--config_file=configs/run.gin", "--output_dir=out"]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # JAX read it before
    code, out, _ = call(train.main, *flags, *signals)
    assert code == 143
    assert "stopped by SIGTERM; saved at step" in out
    again = "JAX_NUM_CPU_DEVICES=1 python script.py --config_file=configs/run.gin --output_dir=out"
    assert re.search(f"to go on: (JAX_PLATFORMS=cpu )?{re.escape(again)}", out)
    code, out, _ = call(train.main, *flags)
    assert code == 0 and "going on from step" in out


def test_a_script_runs_as_a_program_from_any_folder(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    flags = ["--config_file=configs/run.gin", "--config=loop.train.length=0"]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "error: loop.train.length is 0: expected at least 1\n"


def test_a_warm_up_longer_than_the_run_is_told_as_it_was_typed(folder, call):
    flags = ["--config_file=configs/run.gin", "--config=steps=2", "--output_dir=out"]
    code, out, _ = call(train.main, *flags)
    assert code == 0
    line = "note: optimizer.cosine.warmup_steps=2 is not below steps=2: the learning rate does"
    assert line in out, out
    assert "is not below" not in call(train.main, *flags)[1]  # no step is left


@pytest.mark.slow
def test_every_config_has_one_schedule_however_the_steps_are_typed():
    found = 0
    for file in configs.runs():
        rates = []
        for typed in ("steps", "loop.train.steps"):
            config.parse([str(file)], [f"{typed}=1000"])
            run = parsed.bindings(loop.train, ("optimizer", "steps"))
            rate = optimizer.build(run["optimizer"], run["steps"]).learning_rate
            rates.append([float(rate(count)) for count in (0, 500, 999)])
        assert rates[0] == rates[1], file.name
        found += 1
    assert found > 60

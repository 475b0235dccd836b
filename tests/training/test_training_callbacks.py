"""Callbacks are part of a run, loggers are beside it; a run can begin with another's weights."""

import json
import sys
import types

import jax
import numpy as np
import pytest

from reformax.cli import config, parsed
from reformax.declared import SettingError
from reformax.training import loop, optimizer, starting_weights, wandb_log
from reformax.training.callbacks import Callback
from reformax.training.checkpoint import Checkpoints
from reformax.training.step import TrainState
from tests.training import worker

SHORT = {"steps": 12, "eval_every": 5, "checkpoint_every": 4, "log_every": 3}


def run(folder, **settings):
    return loop.train(folder, **worker.arguments(**SHORT | settings))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without callbacks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run(folder)


def values(result):
    return {name: x for name, x in result.items() if name != "output_dir"}


def test_each_hook_is_called_and_changes_nothing(plain, tmp_path):
    seen = []

    def note(what):
        return lambda *arguments: seen.append((what, *arguments))

    names = "on_step", "on_evaluation", "on_checkpoint", "on_end"
    result = run(tmp_path, callbacks=[Callback(**{name: note(name) for name in names})])
    assert worker.record(tmp_path) == worker.record(plain[0]) and values(result) == values(plain[1])
    steps = {name: [x[1] for x in seen if x[0] == name] for name in names}
    assert steps["on_step"] == list(range(1, 13)) and steps["on_evaluation"] == [5, 10, 12]
    assert steps["on_checkpoint"] == [4, 5, 8, 10, 12] and steps["on_end"] == [result]
    assert seen[-1][0] == "on_end" and seen[-2] == (
        "on_checkpoint",
        12,
        tmp_path / "checkpoints/12",
    )
    lines = worker.record(tmp_path)
    bits = [x[2]["bits_per_dim"] for x in seen if x[0] == "on_step"]
    assert [x["bits_per_dim"] for x in lines if x["split"] == "train"] == pytest.approx(
        np.mean(np.reshape(bits, (4, 3)), axis=1), rel=1e-12
    )
    scores = [x[2] for x in seen if x[0] == "on_evaluation"]
    valid = [x for x in lines if x.pop("split") == "valid" and x.pop("tag") == "eval"]
    assert [x.pop("step") for x in valid] == [5, 10, 12] and valid == scores


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("on_evaluation", "on_checkpoint")]


@pytest.mark.parametrize("hook", ["on_step", *SLOW])
def test_a_callback_that_raises_ends_the_run_once_it_is_saved(plain, tmp_path, hook):
    def broken(step, *_):
        if step > 4:
            raise RuntimeError("no more")

    others = []
    later = Callback(**{hook: lambda step, *_: others.append(step)})
    with pytest.raises(RuntimeError, match="no more") as error:
        run(tmp_path, callbacks=[Callback(**{hook: broken}), later])
    assert error.value.__notes__ == [f"raised by {hook} of a callback; what is trained is saved"]
    reached = Checkpoints(tmp_path).steps()[-1]
    assert 5 <= reached <= 10 and max(others, default=0) <= 4
    result = run(tmp_path)
    assert worker.record(tmp_path) == worker.record(plain[0]) and values(result) == values(plain[1])


@pytest.mark.slow
def test_an_error_at_the_end_is_raised(tmp_path):
    def broken(result):
        raise ValueError(f"ended at {result['step']}")

    with pytest.raises(ValueError, match="ended at 1"):
        run(tmp_path, callbacks=[Callback(on_end=broken)], steps=1)


class Lines:
    """A logger that fails where it is told to."""

    def __init__(self, fails=()):
        self.fails, self.calls = fails, []

    def note(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fails:
            raise ConnectionError(f"no {name}")

    def open(self, *arguments):
        self.note("open", *arguments)

    def write(self, *arguments):
        self.note("write", *arguments)

    def close(self):
        self.note("close")


def test_scores_of_the_training_split_are_no_points_of_its_loss(tmp_path):
    lines = Lines()
    run(tmp_path, loggers=[lines], steps=2, eval_every=1, log_every=1, eval_split="train")
    written = [(call[1], call[2]) for call in lines.calls if call[0] == "write"]
    assert written == [(1, "train"), (1, "train_split"), (2, "train"), (2, "train_split")]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"train_split/bits_per_dim") == 2
    assert {line["split"] for line in worker.record(tmp_path)} == {"train"}


@pytest.mark.slow
def test_loggers_get_the_lines_and_may_fail(plain, tmp_path, capsys):
    whole, mute, closed = Lines(), Lines({"write", "close"}), Lines({"open"})
    options = {"loggers": [mute, closed, whole], "config_text": lambda: "a = 1\n"}
    result = run(tmp_path, **options)
    assert worker.record(tmp_path) == worker.record(plain[0]) and values(result) == values(plain[1])
    first, *written, last = whole.calls
    assert first == ("open", tmp_path, 0, "a = 1\n") and last == ("close",)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # a logger gets numbers alone
        del line["tag"]
        line["timing"] = {name: x for name, x in line["timing"].items() if x is not None}
    got = [{"step": a, "split": b, **c, "timing": d} for _, a, b, c, d in written]
    assert got == lines
    assert len(mute.calls) == len(whole.calls) and [x[0] for x in closed.calls] == ["open"]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all("Lines failed, and the work goes on" in line for line in told)
    again = Lines()
    run(tmp_path, loggers=[again])  # done: there is nothing to log
    assert again.calls == []


class Wandb(types.ModuleType):
    """Takes what wandb 0.2x takes, and keeps it."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(
        self, entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None,
        config=None, config_exclude_keys=None, config_include_keys=None, allow_val_change=None,
        group=None, job_type=None, mode=None, force=None, reinit=None, resume=None,
        resume_from=None, fork_from=None, save_code=None, tensorboard=None, sync_tensorboard=None,
        monitor_gym=None, settings=None,
    ):  # fmt: skip
        given = {name: x for name, x in locals().items() if name != "self" and x is not None}
        self.runs.append(WandbRun(given))
        return self.runs[-1]


class WandbRun:
    def __init__(self, given):
        self.given, self.logged, self.finished = given, [], False

    def log(self, data, step=None, commit=None):
        assert all(type(x) in (int, float, bool, dict) for x in data.values())
        self.logged.append((step, data))

    def finish(self, exit_code=None, quiet=None):
        self.finished = True


LOGGED = """
from __gin__ import dynamic_registration
from reformax.training import loop
from reformax.training import wandb_log
loop.train.loggers = [@wandb_log.wandb_log()]
wandb_log.wandb_log.project = 'mine'
wandb_log.wandb_log.mode = 'offline'
"""


@pytest.mark.slow
def test_weights_and_biases_by_gin(tmp_path, monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    # evaluate.py and the others may read such a run's config; nothing is opened by that.
    config.parse_saved(LOGGED, "config.gin")
    train = parsed.configured(loop.train)
    folder = tmp_path / "a_run"
    for steps in (4, 8):
        train(folder, **worker.arguments(steps=steps, log_every=4, config_text=lambda: "b = 2"))
    one, two = fake.runs
    assert one.given["id"] == two.given["id"] == (folder / "wandb_id").read_text()
    assert one.given | {"id": 0} == {
        "project": "mine", "mode": "offline", "name": "a_run", "dir": str(folder), "id": 0,
        "resume": "allow", "config": {"b": 2, "gin": "b = 2"},
    }  # fmt: skip
    assert [step for step, _ in one.logged + two.logged] == [4, 4, 8, 8] and two.finished
    assert {"train/bits_per_dim", "train/tokens", "train/seconds"} <= one.logged[0][1].keys()
    assert "valid/bits_per_dim" in one.logged[1][1]


def test_without_wandb_one_line_says_so(monkeypatch):
    from reformax.training.wandb_log import wandb_log

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingError, match="pip install wandb"):
        wandb_log()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"callbacks": [print]}, "callbacks is .*: expected a list, each a Callback"),
        ({"loggers": ["wandb"]}, "loggers is .*: expected a list, each a Logger"),
        ({"init_from": ""}, "init_from is '': expected a path"),
        ({"init_from": "nowhere"}, "init_from=nowhere holds no checkpoint: give the folder of a"),
    ],
)
def test_what_is_none_of_these_is_refused(tmp_path, settings, message):
    with pytest.raises(SettingError, match=message) as error:
        run(tmp_path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(plain, tmp_path, capsys):
    source, result = plain
    # Without a learning rate it computes the other's score, of the best or of any checkpoint.
    still = {"optimizer": optimizer.adamw(0.0), "steps": 2, "eval_every": None}
    begun = run(tmp_path / "a", init_from=source, progress=True, **still)
    assert begun["step"] == 2 and begun["bits_per_dim"] == result["best_bits_per_dim"]
    assert (
        f"with the weights of {source} after step {result['best_step']} from"
        in capsys.readouterr().out
    )
    run(tmp_path / "b", init_from=source / "checkpoints/10", **still)
    jax.tree.map(
        np.testing.assert_array_equal, worker.params(tmp_path / "b", 2), worker.params(source, 10)
    )


@pytest.mark.slow
def test_optimizer_and_steps_begin_anew(plain, tmp_path):
    """The same as from these weights in a converted model, which has no more."""
    source = plain[0]
    (state,) = [TrainState(np.int32(0), worker.params(source, 12), (), None)]
    converted = Checkpoints(tmp_path / "converted")
    converted.save(0, state)
    converted.wait()
    for name, origin in (("c", source), ("d", tmp_path / "converted")):
        run(tmp_path / name, init_from=origin, ema_decay=0.5)
    assert worker.record(tmp_path / "c") == worker.record(tmp_path / "d") != worker.record(source)
    # It goes on from its own checkpoints, which hold the moving average, not from the other's.
    longer = run(tmp_path / "c", init_from=source, ema_decay=0.5, steps=14)
    assert longer["step"] == 14


@pytest.mark.parametrize("first", ["plain", None])
def test_a_begun_run_refuses_to_begin_with_other_weights(plain, tmp_path, first):
    """It would go on from its own checkpoint, and the setting would change nothing."""
    source = plain[0]
    begin = {"init_from": source} if first else {}
    run(tmp_path / "a", **begin, steps=2, eval_every=None)
    began = f"those of {source}" if first else "weights of its own"
    with pytest.raises(SettingError, match=f"^init_from=other: .* began with {began} and is at st"):
        run(tmp_path / "a", init_from="other", steps=3, eval_every=None)
    for settings in ({}, begin):  # the same again, or without it, goes on
        assert run(tmp_path / "a", **settings, steps=3, eval_every=None)["step"] == 3


def test_weights_of_another_model_or_vocabulary_are_refused(plain, tmp_path):
    source, _ = plain
    shapes = r"shape \(16, 8\) there and shape \(16, 9\) in this config: set init_from"
    with pytest.raises(ValueError, match=shapes):
        run(tmp_path, init_from=source, model={"d_model": 9})
    assert not (tmp_path / "metrics.jsonl").exists()
    like = jax.eval_shape(lambda: worker.params(source, 12))
    with pytest.raises(SettingError, match="vocabulary None and this run has v2: copy"):
        starting_weights.read(source, like, "v2")


def test_weights_and_biases_gets_settings_by_their_names():
    text = """import lm
# Macros:
steps = 100  # a = 1
attention = @lsh.lsh()
loop.train.steps = %steps
short/lm.ReformerLM.attention_type = \\
    (@local.local(), %attention)
lm.ReformerLM.attention_type = %attention
lm.ReformerLM.pos_type = 'rotary'
loop.train.sample_prompts = ['a = 1\\n',
'b']
loop.train.mesh = {'fsdp': %devices}
x = %x
one = %other
other = [%one]
"""
    assert wandb_log.settings_of(text) == {
        "steps": 100,
        "attention": "@lsh.lsh()",
        "loop.train.steps": 100,
        "short/lm.ReformerLM.attention_type": ["@local.local()", "@lsh.lsh()"],
        "lm.ReformerLM.attention_type": "@lsh.lsh()",
        "lm.ReformerLM.pos_type": "rotary",
        "loop.train.sample_prompts": ["a = 1\n", "b"],
        "loop.train.mesh": {"fsdp": "%devices"},
        "x": "%x",
        "one": ["%other"],
        "other": [["%one"]],
    }

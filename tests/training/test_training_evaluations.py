"""Evaluations besides the run's own: each by its name, split, task, metric, length and interval."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from reformax.training import checkpoint, evaluation, loop, metrics
from reformax.training.callbacks import Callback
from reformax.training.evaluation import evaluate
from reformax.training.evaluations import Evaluation
from reformax.training.schedule import due_after
from reformax.training.settings import TrainSettings
from tests.training import tiny, worker

OTHERS = {
    "short": Evaluation(length=4, tokens=None, every=6, metric="accuracy"),
    "noisy": Evaluation(task=tiny.counting(n_valid=96), split="test", tokens=16),
}


def arguments(**others):
    return worker.arguments(**({"evaluations": OTHERS} | others))


def of(folder, label):
    return [line for line in worker.record(folder) if line["split"] == label]


def test_each_has_its_own_interval_length_task_and_split(tmp_path):
    scored = []

    def on_evaluation(step, score, params):
        scored.append((step, {name: np.array(x) for name, x in params.items() if name == "head"}))
        if step == 24:
            for label, task, split, length in (
                ("short", tiny.counting(), "valid", 4),
                ("noisy", OTHERS["noisy"].task, "test", 16),
            ):
                one = evaluate(
                    tiny.TinyLM("eval"), params, task, split, batch_size=8, length=length
                )
                expected[label] = one["bits_per_dim"], one["n_targets"]

    expected = {}
    callbacks = [Callback(on_evaluation=on_evaluation)]
    result = loop.train(tmp_path, **arguments(callbacks=callbacks))
    assert [line["step"] for line in of(tmp_path, "short")] == [6, 12, 18, 24]
    assert [line["step"] for line in of(tmp_path, "noisy")] == [10, 20, 24]
    assert [line["step"] for line in of(tmp_path, "valid")] == [10, 20, 24]
    assert all(line["tag"] == "eval" for line in of(tmp_path, "short") + of(tmp_path, "noisy"))
    assert [step for step, _ in scored] == [10, 20, 24]  # of the run's own alone
    last = of(tmp_path, "short")[-1]
    assert (last["bits_per_dim"], last["n_targets"]) == expected["short"] and last["whole"]
    noisy = of(tmp_path, "noisy")
    assert not noisy[0]["whole"] and "whole_split" not in noisy[0]
    whole = noisy[-1]["whole_split"]
    assert (whole["bits_per_dim"], whole["n_targets"]) == expected["noisy"]
    assert result["evaluations"]["short"]["accuracy"] == last["accuracy"]
    assert result["bits_per_dim"] != last["bits_per_dim"]


@pytest.mark.slow
def test_without_them_a_run_is_the_same(tmp_path):
    loop.train(tmp_path / "with", **arguments())
    loop.train(tmp_path / "without", **arguments(evaluations={}))
    lines = [x for x in worker.record(tmp_path / "with") if x["split"] not in OTHERS]
    assert lines == worker.record(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["valid", "short"])
def test_a_run_that_is_stopped_between_evaluations_finds_the_others(tmp_path, monkeypatch, after):
    """A signal after one of the evaluations of the last step: the others are of the resumed run."""
    evaluate, stopped = loop.evaluate, []

    def stopping(run, state, label, last):
        evaluate(run, state, label, last)
        if last and label == after and not stopped:
            stopped.append(label)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "evaluate", stopping)
    loop.train(tmp_path / "whole", **arguments())  # stops; goes on below
    loop.train(tmp_path / "whole", **arguments())
    monkeypatch.undo()
    assert stopped
    loop.train(tmp_path / "again", **arguments())
    assert worker.record(tmp_path / "whole") == worker.record(tmp_path / "again")
    before = worker.record(tmp_path / "again")
    loop.train(tmp_path / "again", **arguments())  # nothing is left to score
    assert worker.record(tmp_path / "again") == before


@pytest.mark.slow
def test_one_that_fails_loses_no_step_and_no_score(tmp_path, monkeypatch):
    evaluate, failing = loop.evaluate, []

    def fails(run, state, label, last):
        if label == "short" and state.step in failing:
            raise MemoryError("short")
        evaluate(run, state, label, last)

    monkeypatch.setattr(loop, "evaluate", fails)
    for failing, found in ([18], []), ([24], ["scored"]):
        with pytest.raises(MemoryError):
            loop.train(tmp_path / "stopped", **arguments())
        checkpoints = checkpoint.Checkpoints(tmp_path / "stopped")
        (step,) = failing
        assert checkpoints.newest_whole() == step
        extra = checkpoints.extra(step)
        assert [name for name in ("scored", "evaluations") if name in extra] == found
    failing = []
    again = loop.train(tmp_path / "stopped", **arguments())
    whole = loop.train(tmp_path / "whole", **arguments())
    assert worker.record(tmp_path / "stopped") == worker.record(tmp_path / "whole")
    assert again["evaluations"] == whole["evaluations"] and len(again["evaluations"]) == 2


@pytest.mark.slow
def test_a_metric_that_no_target_has_weight_in_is_null(tmp_path, monkeypatch, capsys):
    of_nothing = lambda found: (found.nats, 0 * found.weights)  # noqa: E731
    monkeypatch.setitem(metrics.METRICS, "of_nothing", of_nothing)
    others = {"none": Evaluation(metric="of_nothing", tokens=16)}
    loop.train(tmp_path, **arguments(evaluations=others, progress=True))
    last = of(tmp_path, "none")[-1]
    assert last["of_nothing"] is None and last["whole_split"]["of_nothing"] is None
    assert "step 24: none no of nothing: no target has weight in it" in capsys.readouterr().out


def test_bits_that_are_no_number_are_noticed_where_another_metric_is_printed(tmp_path, monkeypatch):
    def of_nan(*args, **kwargs):
        return evaluate(*args, **kwargs) | (
            {"bits_per_dim": np.nan} if kwargs["length"] == 4 else {}
        )

    monkeypatch.setattr(evaluation, "evaluate", of_nan)
    with pytest.raises(FloatingPointError, match="short bits_per_dim is nan after step 6"):
        loop.train(tmp_path, **arguments())
    assert not of(tmp_path, "short")


def test_a_damaged_record_keeps_the_scores_of_others_alone(tmp_path, monkeypatch):
    one = arguments(evaluations={"short": OTHERS["short"]}, steps=12, log_every=3)
    evaluate, scored = loop.evaluate, []

    def noting(run, state, label, last):
        scored.append((state.step, label))
        evaluate(run, state, label, last)
        if state.step == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "evaluate", noting)
    loop.train(tmp_path, **one)
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    loop.train(tmp_path, **one)
    assert scored.count((6, "short")) == 1
    assert [line["step"] for line in of(tmp_path, "short")] == [6, 12]


@pytest.mark.slow
def test_a_finished_run_is_scored_by_one_that_is_new_or_has_changed(tmp_path):
    loop.train(tmp_path, **arguments())
    changed = OTHERS | {"short": Evaluation(length=8), "new": Evaluation(split="test")}
    result = loop.train(tmp_path, **arguments(evaluations=changed))
    assert result["evaluations"].keys() == {"short", "noisy", "new"}
    assert [len(of(tmp_path, x)) for x in ("short", "noisy", "new", "valid")] == [5, 3, 1, 3]
    extra = checkpoint.Checkpoints(tmp_path).extra(24)["evaluations"]
    assert extra["short"]["scored"]["length"] == 8


def test_they_are_due_by_their_own_steps():
    others = {"own": Evaluation(split="test"), "three": Evaluation(split="test", every=3)}
    settings = TrainSettings(**arguments(steps=10, eval_every=4, evaluations=others))
    due = {step: due_after(settings, 0, step, 0.0).others for step in range(11)}
    assert {step: names for step, names in due.items() if names} == {
        3: ("three",),
        4: ("own",),
        6: ("three",),
        8: ("own",),
        9: ("three",),
        10: ("own", "three"),
    }


@pytest.mark.parametrize(
    "name, given, line",
    [
        ("valid", Evaluation(), r"evaluations\['valid'\] has the name of other lines"),
        ("train", Evaluation(), "choose another than train, data, note, sample, valid"),
        ("x", Evaluation(metric="bleu"), r"metric='bleu' is none of bits_per_dim, .*accuracy"),
        (
            "x",
            Evaluation(length=4, stride=5),
            r"\['x'\].stride=5 must not be above its length of 4",
        ),
        ("x", Evaluation(task=tiny.counting(vocab_size=99)), r"\['x'\]: task .* ids below 99"),
        ("x", {"length": 4}, "evaluations is .*: expected a table by a name, each an Evaluation"),
    ],
)
def test_one_that_does_not_fit_is_told_before_the_first_step(tmp_path, name, given, line):
    with pytest.raises(ValueError, match=line):
        loop.train(tmp_path, **arguments(evaluations={name: given}))


@pytest.mark.slow
def test_a_config_names_them_and_its_saved_one_is_read(tmp_path, monkeypatch, call):
    import train

    Path(tmp_path / "run.gin").write_text("""
from __gin__ import dynamic_registration
from reformax.data import stdlib
from reformax.training import loop
from reformax.training import evaluations
include 'quickstart.gin'
loop.train.sample_prompts = []
d_model = 16
n_layers = 2
length = 64
steps = 2
warmup_steps = 1
batch_size = 2
stdlib.stdlib.max_bytes = 20000
loop.train.evaluations = {'long': @long/evaluations.Evaluation()}
long/evaluations.Evaluation.length = 128
long/evaluations.Evaluation.metric = 'accuracy'
""")
    monkeypatch.chdir(tmp_path)
    flags = ["--config_file=run.gin", "--output_dir=out"]
    wrong = "--config=long/evaluations.Evaluation.split='nowhere'"
    code, _, err = call(train.main, *flags, wrong)
    assert code == 2 and "evaluations['long']: split='nowhere' must be one of train" in err, err
    wrong = "--config=long/evaluations.Evaluation.stride=199"
    code, _, err = call(train.main, *flags, wrong)
    line = "long/evaluations.Evaluation.stride=199 must not be above its length of 128"
    assert code == 2 and line in err, err
    code, out, err = call(train.main, *flags)
    assert code == 0, err
    assert "step 2: long 0." in out and "accuracy" in out
    assert "\nlong accuracy: 0." in out.partition("bits per byte): ")[2]  # below the run's own
    (line,) = of("out", "long")
    assert json.dumps(line) and line["accuracy"] > 0
    import evaluate as script

    flags = ["--output_dir=out", "--tokens=256", "--quiet"]
    code, out, err = call(script.main, *flags)
    assert code == 0, err


def test_settings_resolve_what_is_left_out():
    settings = TrainSettings(**arguments(eval_length=8, eval_stride=2, eval_batch_size=4))
    short, noisy = settings.other_evaluations
    assert short.sizes == {"batch_size": 4, "length": 4, "stride": 4}
    assert noisy.sizes == {"batch_size": 4, "length": 8, "stride": 2} and noisy.split == "test"

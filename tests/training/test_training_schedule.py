"""What is due is a function of the step and the time; settings refuse what is out of bounds."""

import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest

from reformax.training import loop
from reformax.training.schedule import Due, due_after
from reformax.training.settings import TrainSettings

NOTHING, ALL = Due(False, False, False), Due(True, True, True)


def schedule(first, steps, eval_every=None, checkpoint_every=None, **limits):
    """`(step, minutes, since_save) -> Due` of a run that began at `first`."""
    settings = dict(steps=steps, eval_every=eval_every, checkpoint_every=checkpoint_every)
    settings |= dict(other_evaluations=[], checkpoint_minutes=None, max_minutes=None) | limits
    return partial(due_after, SimpleNamespace(**settings), first)


def due_steps(due, which):
    return [step for step in range(13) if getattr(due(step, 0.0), which)]


@pytest.mark.parametrize(
    "due, evaluate, save",
    [
        (schedule(0, 12), [12], [12]),
        (schedule(0, 12, eval_every=5), [5, 10, 12], [5, 10, 12]),
        (schedule(0, 12, checkpoint_every=5), [12], [5, 10, 12]),
        (schedule(0, 12, eval_every=6, checkpoint_every=4), [6, 12], [4, 6, 8, 12]),
        (schedule(7, 12, eval_every=5), [5, 10, 12], [5, 10, 12]),
    ],
)
def test_what_is_due(due, evaluate, save):
    assert due_steps(due, "evaluate") == evaluate
    assert due_steps(due, "save") == save
    assert due_steps(due, "stop") == [12]


def test_nothing_is_due_before_the_first_step_and_all_beyond_the_last():
    assert schedule(0, 12, 1, 1, max_minutes=1)(0, 2) == NOTHING
    assert schedule(20, 12)(20, 0) == ALL


def test_time_runs_out_after_at_least_one_step():
    due = schedule(3, 12, max_minutes=1)
    assert due(3, 2) == NOTHING
    assert due(4, 1) == NOTHING
    assert due(4, 1.01) == ALL


def test_the_clock_asks_where_no_step_does():
    due = schedule(3, 12, eval_every=10, checkpoint_every=4, checkpoint_minutes=5)
    asked = {s: due(s, 60, since_save=5.01) for s in range(3, 13)}
    assert [s for s, found in asked.items() if found.save_temporary] == [5, 6, 7, 9, 11]
    assert not any(due(s, 60, since_save=5).save_temporary for s in range(13))
    assert not schedule(3, 12)(5, 60, since_save=1e9).save_temporary


def test_train_has_the_settings_as_its_arguments():
    parameters = inspect.signature(loop.train).parameters
    fields = inspect.signature(TrainSettings).parameters
    assert list(parameters) == ["output_dir", *fields]
    assert {name: parameters[name].default for name in fields} == {
        name: field.default for name, field in fields.items()
    }
    documented = re.findall(r"^  (\w+): ", inspect.getdoc(TrainSettings), re.MULTILINE)
    assert [*fields, "ValueError"] == documented


@pytest.mark.parametrize("name", ["stps", "lenght"])
def test_a_misspelt_setting_is_an_error_of_train(tmp_path, name):
    with pytest.raises(TypeError, match=rf"train\(\) got an unexpected keyword argument '{name}'"):
        loop.train(tmp_path, **{name: 3})


def test_a_missing_setting_is_an_error_of_train(tmp_path):
    with pytest.raises(TypeError, match=r"train\(\) missing 5 required keyword-only arguments"):
        loop.train(tmp_path, steps=3)

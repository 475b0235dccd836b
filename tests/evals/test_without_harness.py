"""Commands where lm-evaluation-harness is not installed."""

import sys

import evaluate
from reformax.cli import lm_eval, task_scores

LINE = "lm-evaluation-harness is not there: pip install 'reformax[evals]'"


def test_one_line_says_how_to_install_it(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = call(lambda: lm_eval.main(["--model", "reformax"]))
    assert code == 1 and err == f"error: {LINE}\n"


def test_evaluate_also_names_the_tasks_that_need_no_harness(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = call(evaluate.main, "--output_dir=none", "--tasks=needle,hellaswag")
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"error: --tasks: hellaswag is a task of the harness, and {LINE}; the ")
    of_package = err.rstrip().rpartition("the package's tasks are ")[2].split(", ")
    assert of_package == [task_scores.TEXT, *task_scores.QUESTION_TASKS]


def test_a_misspelt_task_of_the_package_needs_no_harness(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    flags = ["--output_dir=none", "--tasks=needel"]
    code, _, err = call(evaluate.main, *flags)
    assert code == 2
    assert err == "error: --tasks: there is no task needel; did you mean needle or needles?\n"

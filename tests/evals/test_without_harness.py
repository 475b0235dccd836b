"""Commands where lm-evaluation-harness is not installed."""

import sys

import pytest

import evaluate
from reformax.cli import lm_eval

LINE = "lm-evaluation-harness is not there: pip install 'reformax[evals]'"


@pytest.mark.parametrize(
    "main, flags",
    [
        (evaluate.main, ["--output_dir=none", "--tasks=needle,hellaswag"]),
        (lambda: lm_eval.main(["--model", "reformax"]), []),
    ],
)
def test_one_line_says_how_to_install_it(main, flags, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = call(main, *flags)
    assert code == 1 and err == f"error: {LINE}\n"


def test_a_misspelt_task_of_the_package_needs_no_harness(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    flags = ["--output_dir=none", "--tasks=needel"]
    code, _, err = call(evaluate.main, *flags)
    assert code == 2
    assert err == "error: --tasks: there is no task needel; did you mean needle or needles?\n"

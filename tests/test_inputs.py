"""Wrong input is refused in one line: cases of the reliability benchmark."""

import itertools
import random
import sys

import pytest

from benchmarks.reliability import input_cases, inputs
from benchmarks.reliability.input_cases import Case
from reformax.cli import flags
from reformax.declared import fits, hints_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with configs, data and bad files."""
    folder = tmp_path_factory.mktemp("inputs")
    input_cases.prepare(folder)
    return folder


def some(cases, n):
    """As many of the cases that must be refused; those of convert import more."""
    refused = [case for case in cases if case.must_refuse and case.script != "convert"]
    return random.Random(0).sample(refused, n)


QUICK = [*some(input_cases.flag_cases(), 40), *some(input_cases.setting_cases(), 60)]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_wrong_flag_or_setting_is_one_line(case, root):
    result = inputs.run_here(case, root)
    assert result.verdict == "refused", result.line


@pytest.mark.parametrize(
    "setting, message",
    [
        ("lm.TransformerLM.n_layers=100000000", "expected at least 1 and at most 10,000"),
        ("loop.train.eval_length=1000000000", "lower eval_batch_size or eval_length"),
        ("loop.train.batch_size=100000000", "lower batch_size or length"),
        ("lm.TransformerLM.d_model=100000000", "lower the model's sizes"),
        ("optimizer.adamw.b1=2", "b1 is 2: expected a rate in [0, 1)"),
        ("optimizer.adamw.weight_decay=-1", "expected a number of at least 0"),
        ("optimizer.adamw.learning_rate=@lm.ReformerLM", "or a schedule such as"),
        ("loop.train.model=@text.text()", "expected a model without its call"),
        ("loop.train.model=@text.text", "expected a model without its call"),
        ("loop.train.task=@text.text", "without (): expected a task, such as @stdlib.stdlib()"),
        ("loop.train.optimizer=@optimizer.adamw", "expected an optimizer, such as"),
        ("steps=%steps", "the config's %steps needs itself: %steps -> %steps"),
        ("optimizer.adamw.learning_rate=@optimizer.adamw()", "needs itself"),
        ("loop.train.length=2k", "@lsh.lsh(): loop.train.length=2k"),
    ],
)
def test_what_a_setting_is_told(setting, message, root):
    argv = ("--config_file={root}/all.gin", f"--config={setting}")
    result = inputs.run_here(Case("train", argv), root)
    assert result.verdict == "refused" and result.line.startswith("2 error: ")
    assert message in result.line


def test_a_macro_may_hold_another(root):
    lines = (
        "inner = @dense.dense()",
        "outer = (%inner,)",
        "lm.TransformerLM.attention_type=%outer",
    )
    imports = "from __gin__ import dynamic_registration\nfrom reformax.models import lm\n"
    text = imports + "from reformax.ops import dense\ninclude 'all.gin'\n" + "\n".join(lines)
    (root / "macros.gin").write_text(text)
    argv = ("--config_file={root}/macros.gin", "--config=loop.train.batch_size=-7")
    assert "batch_size is -7" in inputs.run_here(Case("train", argv), root).line


@pytest.mark.parametrize("script", ["train", "evaluate", "generate"])
def test_an_empty_config_is_refused(script, root):
    case = Case(script, ("--output_dir=x", "--config="))
    assert inputs.run_here(case, root) == ("refused", "2 error: config is '': expected NAME=VALUE")


@pytest.mark.parametrize("task", ["3", "None", "%itself", "[@text.text()]", "%nothing"])
def test_data_for_no_task(task, root):
    """--data_dir looks for the task's function through macros, which need not end."""
    argv = ("--config_file={root}/all.gin", f"--config=loop.train.task={task}", "--data_dir=x")
    argv = (*argv, "--config=itself=%itself")
    result = inputs.run_here(Case("train", argv), root)
    assert result.verdict == "refused" and result.line.startswith("2 error: "), result.line


@pytest.mark.parametrize("name", [*input_cases.BAD_GIN, "huge.gin", "folder.gin", "pipe.gin"])
def test_a_file_that_is_no_config_is_one_line(name, root):
    result = inputs.run_here(Case("train", (f"--config_file={{root}}/{name}",)), root)
    assert result.verdict == "refused" and result.line.startswith("2 error: "), result.line


def test_every_setting_is_declared():
    """A value that is nothing at all is refused, but where a function checks for itself."""
    undeclared = {
        f"{name}.{parameter}"
        for name, function in input_cases.configurables().items()
        for parameter, hint in hints_of(function).items()
        if fits(object(), hint)
    }
    assert undeclared == {"block_sparse.block_sparse.pattern"}


def test_cases_need_no_tensorflow_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # its import fails
    monkeypatch.delitem(sys.modules, "reformax.data.enwik8_builder", raising=False)
    assert input_cases.modules.__wrapped__()


def test_a_flag_without_a_type_is_told(monkeypatch):
    class Script:
        @staticmethod
        def parser():
            parser = flags.parser("doc")
            parser.add_argument("--size", type=int)
            return parser

    monkeypatch.setattr(input_cases, "SCRIPTS", {"train": Script})
    with pytest.raises(TypeError, match=r"--size of train declares no type: give it flags.of"):
        list(input_cases.flag_cases())


def test_a_new_flag_joins_by_being_declared(monkeypatch):
    from reformax.declared import Size

    class Script:
        @staticmethod
        def parser():
            parser = flags.parser("doc")
            parser.add_argument("--size", type=flags.of(Size))
            return parser

    monkeypatch.setattr(input_cases, "SCRIPTS", {"train": Script})
    cases = [case for case in input_cases.flag_cases() if case.argv and "--size=" in case.argv[-1]]
    refused = {case.argv[-1]: case.must_refuse for case in cases}
    assert refused["--size=nan"] and refused["--size=0"] and not refused["--size=2"]


def test_verdicts():
    wrong, right = Case("train", ()), Case("train", (), must_refuse=False)
    assert inputs.judged(wrong, 0, "").verdict == "wrongly taken"
    assert inputs.judged(right, 0, "note\n").verdict == "taken"
    assert inputs.judged(wrong, 2, "note\nerror: x is 0\n").verdict == "refused"
    for code, err in ((1, "error: x\nmore\n"), (1, ""), (3, "error: x\n"), (2, "usage: x\n")):
        assert inputs.judged(wrong, code, err).verdict == "not one line"


@pytest.mark.slow
def test_the_campaign(root, tmp_path_factory):
    """In processes, with runs; and what hangs or fills the memory is told and ended."""
    inputs.make_runs(root)
    cases = inputs.sampled(input_cases.all_cases(), 30, seed=0)
    found = list(itertools.islice(inputs.campaign(cases, root, 2), len(cases)))
    assert len(found) == 30
    assert not [(case, x) for case, x in found if x.verdict not in inputs.GOOD]


@pytest.mark.slow
@pytest.mark.parametrize("name, verdict", [("endless", "hang"), ("large", "memory")])
def test_a_case_that_never_ends(name, verdict, root, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "SECONDS", 5 if verdict == "hang" else 60)
    config = "from __gin__ import dynamic_registration\nfrom tests import bad_tasks\n"
    config += "from reformax.training import loop\n"
    config += f"loop.train.steps = 1\nloop.train.task = @bad_tasks.{name}()\n"
    (tmp_path / "bad.gin").write_text(config)
    worker = inputs.Worker(root)
    try:
        result = worker.run(Case("train", (f"--config_file={tmp_path}/bad.gin",)))
    finally:
        worker.close()
    assert result.verdict == verdict

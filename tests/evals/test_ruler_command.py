"""From a text with tasks in context to a picture of accuracies, by the commands."""

import json
import re

import pytest

import evaluate
import train
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.evals import in_context
from tests.layers import plain
from tests.training import worker

SMALL = (
    *("d_model=16", "d_ff=16", "d_head=8", "n_heads=2", "n_layers=4", "scan_layers=True"),
    *("steps=4", "warmup_steps=1", "batch_size=2", "length=1024", "stages.Stage.batch_size=2"),
    *("stages.Stage.length=512", "lsh.lsh.n_hashes=2", "lsh.lsh.chunk_len=32"),
    *("local.local.window=64", "loop.train.eval_length=512", "loop.train.eval_stride=512"),
    *("loop.train.eval_batch_size=2", "loop.train.eval_tokens=1024", "loop.train.eval_whole=False"),
    *("loop.train.report_kept_mass_every=2", "in_context.in_context.share=1.0"),
)


@pytest.mark.slow
def test_a_model_of_tasks_is_trained_and_scored_at_lengths(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    lines = (f"Line {i}, in which nothing is that one could ask for.\n" for i in range(3_000))
    (tmp_path / "mine.txt").write_text("".join(lines))
    flags = ["--config_file=transformer_tasks_64k_37m.gin", "--data_dir=mine.txt"]
    flags += ["--output_dir=run", *(f"--config={one}" for one in SMALL)]
    code, out, err = call(train.main, *flags)
    assert code == 0, err
    assert "of rows with needle, needles" in out and "step 4: kept mass 0." in out
    found = [x for x in worker.record("run") if x["tag"] == "kept_mass"]
    assert [x["step"] for x in found] == [2, 4] and 0 < found[1]["kept_mass_layer_3"] < 1
    flags = ["--output_dir=run", "--tasks=ruler", "--lengths=1024,1536", "--limit=3", "--quiet"]
    more = ["--depths=3", "--texts=mine.txt", "--config=lsh.lsh.n_hashes_eval=4"]
    code, out, err = call(evaluate.main, *flags, *more)
    assert code == 0, err
    scores = json.loads((tmp_path / "run" / "evaluation_tasks.json").read_text())
    assert list(scores["tasks"]) == [
        *("needle", "needles", "multi_value", "multi_query", "variables", "common_words"),
        *("recall", "copy"),
    ]
    for one in scores["tasks"].values():
        assert [line["length"] for line in one["by_length"]] == [1024, 1536]
        assert one["accuracy"] == 0.0 and one["n_questions"] == 3  # of four steps
    assert len(scores["tasks"]["copy"]["by_length"][0]["accuracy_by_depth"]) == 3
    assert "| length | accuracy | 0-33% | 33-66% | 66-100% |" in out
    assert scores["picture"].startswith("evaluation_tasks_step4_length1536_")
    assert (tmp_path / "run" / scores["picture"]).stat().st_size > 5_000
    assert (scores["length"], scores["texts"]) == (1536, "mine.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run `run`, whose positions hold 256 tokens."""
    folder = tmp_path_factory.mktemp("ruler")
    sizes = dict(vocab_size=256, d_model=16, d_ff=16, n_heads=2, n_layers=1)
    axial = dict(pos_type="axial", pos_axial_shape=(8, 32), pos_d_axial_embs=(8, 8))
    spec = Spec.make("TransformerLM", [Op("dense", {})], **sizes, **axial)
    params = plain.init(spec.build(), (1, 8), seed=3)
    run_folder.write(folder / "run", spec, params, {}, "a test")
    return folder


@pytest.fixture
def score(folder, monkeypatch, call):
    """(exit code, stderr) of the command with flags."""
    monkeypatch.chdir(folder)

    def run(*flags):
        flags = ("--output_dir=run", "--quiet", "--limit=3", *flags)
        code, _, err = call(evaluate.main, *flags)
        return code, err

    return run


@pytest.mark.slow
def test_each_picture_of_tasks_has_a_name_of_its_own(score, folder):
    names = []
    for flags in (["--length=144"], ["--lengths=144,150"], ["--length=144", "--depths=2"]):
        assert score("--tasks=needle", *flags)[0] == 0
        kept = json.loads((folder / "run/evaluation_tasks.json").read_text())
        assert kept["complete"]
        names.append(kept["picture"])
    assert sorted(names) == sorted(path.name for path in (folder / "run").glob("*.png"))
    assert len(set(names)) == 3


def test_what_is_cut_off_has_printed_and_written_what_was_done(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    score, done = in_context.answered, []

    def answered(*arguments):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments)
        return score(*arguments)

    monkeypatch.setattr(in_context, "answered", answered)
    flags = ("--output_dir=run", "--limit=3", "--tasks=needle,recall", "--lengths=144,250")
    monkeypatch.setattr("sys.argv", ["evaluate.py", *flags])
    with pytest.raises(KeyboardInterrupt):
        evaluate.main()
    out = capsys.readouterr().out
    assert [x for x in out.splitlines() if "---" not in x and not x.startswith("| length")] == [
        "needle", *re.findall(r"\| (?:144|250) \| .*", out)[:2],
        "needle accuracy: 0.0000",
        "recall", *re.findall(r"\| 144 \| .*", out)[1:],
    ]  # fmt: skip
    kept = json.loads((folder / "run/evaluation_tasks.json").read_text())
    lengths = {x: [line["length"] for line in y["by_length"]] for x, y in kept["tasks"].items()}
    assert lengths == {"needle": [144, 250], "recall": [144]} and not kept["complete"]
    record = (folder / "run/evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["complete"] for line in record].count(False) == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--length=9"], "--length=9: the sentences of needle alone have"),
        (["--lengths=144,9"], "--lengths=144,9: the sentences of needle alone have"),
        (["--lengths=9,512"], "--lengths=9,512: the model's positions hold 256 tokens: lower 512"),
        (
            ["--length=512"],
            "--length=512: the model's positions hold 256 tokens: lower 512 to that",
        ),
        (
            ["--config=loop.train.length=64"],
            "the run's length is 64: the sentences of needle alone have",
        ),
    ],
)
def test_a_length_that_does_not_fit_is_named_as_typed(score, flags, message):
    code, err = score("--tasks=needle", *flags)
    assert code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tasks=text", "--lengths=9"], "--lengths=9: the task text does not read it"),
        (["--tasks=hellaswag", "--texts=a"], "--texts=a: only needle, needles"),
        (["--tasks=ruler", "--lengths=9,a"], "--lengths=9,a: expected different numbers"),
        (["--tasks=ruler", f"--lengths=9,{2**40}"], f"--lengths=9,{2**40}: expected different num"),
        (["--tasks=ruler", "--lengths=0"], "--lengths=0: expected different numbers"),
        (["--tasks=ruler", "--lengths=9", "--length=9"], "--length=9: --lengths=9 has the lengths"),
        (["--lengths=9"], "--lengths=9: only --tasks reads it"),
        (["--n_hashes=2,2"], "--n_hashes=2,2: expected different numbers"),
        (["--n_hashes=2,0"], "--n_hashes=2,0: expected different numbers"),
        (["--tasks=ruler", "--depths=0"], "depths is 0: expected"),
        (
            ["--tasks=ruler", "--texts=nowhere"],
            "--texts=nowhere does not exist: give a file or folder of text",
        ),
        (
            ["--tasks=ruler", "--texts=blank"],
            "--texts=blank: the text that needles shall lie in is",
        ),
        (["--tasks=ruler", "--texts=few"], "--texts=few: 3 bytes are too few"),
    ],
)
def test_wrong_flags_are_told_before_the_run_is_read(tmp_path, monkeypatch, flags, message, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank").write_text("\n" * 100)
    (tmp_path / "few").write_text("ab\n")
    code, _, err = call(evaluate.main, "--output_dir=none", *flags)
    assert code == 2 and message in err and err.count("\n") == 1, err

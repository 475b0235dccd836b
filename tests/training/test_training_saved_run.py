"""Reading a run: a checkpoint with its own config, beside training, in a folder without writing."""

import errno
import json
import math
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import evaluate
import generate
import train
from reformax import durable
from reformax.cli import errors, hash_counts, results, saved_run
from reformax.convert import __main__ as convert
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.training import arrays, evaluation
from tests.training import worker

RUN = """
from __gin__ import dynamic_registration
from reformax.data import text
from reformax.models import lm
from reformax.ops import dense
from reformax.ops import local
from reformax.training import loop
from reformax.training import optimizer

n_heads = 2
loop.train.model = @lm.TransformerLM
loop.train.task = @text.text()
loop.train.optimizer = @optimizer.adam()
optimizer.adam.learning_rate = 1e-2
loop.train.batch_size = 8
loop.train.length = 32
loop.train.keep = 3
lm.TransformerLM.vocab_size = 256
lm.TransformerLM.d_model = 8
lm.TransformerLM.d_ff = 8
lm.TransformerLM.n_layers = 1
lm.TransformerLM.n_heads = %n_heads
lm.TransformerLM.dropout = 0.0
lm.TransformerLM.attention_type = @dense.dense()
local.local.chunk_len = 2
"""
LOCAL = "--config=lm.TransformerLM.attention_type=@local.local()"
# The config of a checkpoint of dense attention does not have this.
CHUNK = "--config=local.local.chunk_len=2"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `run`: two steps of dense attention, then four of local attention."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "corpus.txt").write_text("abcdefgh, hgfedcba. " * 60)
        (folder / "run.gin").write_text(RUN)
        for more in (["--config=loop.train.steps=2"], ["--config=loop.train.steps=6", LOCAL]):
            flags = ["--config_file=run.gin", "--data_dir=corpus.txt", "--output_dir=run", *more]
            flags.append("--config=loop.train.eval_every=2")
            patch.setattr(sys, "argv", ["train.py", *flags])
            assert errors.exit_code(train.main) == 0
    return folder


@pytest.fixture
def run(made, tmp_path, monkeypatch, call):
    """`(exit code, stdout, stderr)` of a script with flags, in a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return lambda main, *flags: call(main, "--output_dir=run", *flags)


def scored(split="valid"):
    with open(f"run/evaluation_{split}.json") as file:
        return json.load(file)


def test_a_checkpoint_is_scored_with_its_own_config(run):
    valid = {x["step"]: x["bits_per_dim"] for x in worker.record("run") if x["split"] == "valid"}
    for step in (2, 6):  # of dense attention and of local
        assert run(evaluate.main, f"--checkpoint={step}")[0] == 0
        assert scored()["bits_per_dim"] == valid[step], step
    # The settings of --config are on top: with local attention the first computes something else.
    code, out, _ = run(evaluate.main, "--checkpoint=2", LOCAL, CHUNK, "--by_position")
    assert code == 0 and "positions" in out and os.path.getsize(f"run/{scored()['picture']}")
    assert scored()["bits_per_dim"] != valid[2]
    (band,) = scored()["by_position"]  # the windows are short
    assert band["n_targets"] == scored()["n_targets"]
    assert band["bits_per_dim"] == pytest.approx(scored()["bits_per_dim"], rel=1e-5)


def test_a_run_in_the_home_is_found_by_its_tilde(run, tmp_path, monkeypatch, call):
    """A shell leaves that of --output_dir=~/run as it is, and so does training."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = call(evaluate.main, "--output_dir=~/run", "--quiet")
    assert code == 0 and scored()["checkpoint_steps"] == [6], err


def test_what_is_scored_is_said_before_it(run, monkeypatch):
    """The first line of progress comes after the first batch, which may take a minute."""
    monkeypatch.setattr(evaluation, "_LARGE", 64)
    assert run(evaluate.main, "--length=50")[2] == ""
    monkeypatch.setattr(evaluation, "_A_WAIT", 100)
    code, out, err = run(evaluate.main, "--length=50", "--by_position", "--batch_size=1")
    assert code == 0 and err == "valid: scoring 60 targets in 2 windows of 50\n"
    assert "padding" not in out
    code, out, err = run(evaluate.main, "--length=4000", "--quiet")
    assert code == 0 and err == ""
    assert out.startswith("note: 99.") and ": valid has 60 tokens, and " in out
    assert out.splitlines()[0].endswith(": set --length=7 or less")


@pytest.mark.slow
def test_training_notes_an_evaluation_of_padding(run, monkeypatch, call):
    monkeypatch.setattr(evaluation, "_LARGE", 64)
    flags = ["--config_file=run.gin", "--data_dir=corpus.txt", "--output_dir=new"]
    flags += ["--config=loop.train.steps=1", "--config=loop.train.eval_length=4000"]
    code, out, err = call(train.main, *flags)
    assert code == 0, err
    (line,) = [line for line in (out + err).splitlines() if "is padding: " in line]
    assert "valid has 60 tokens" in line and "eval_length=7 or less" in line


@pytest.mark.slow
def test_a_dense_model_is_scored_with_clusters_without_training(run):
    """`--config` names Smyrf: a cluster of all is dense attention, and small ones are not."""
    smyrf = "--config=lm.TransformerLM.attention_type=@smyrf.smyrf()"
    scores = []
    for more in ((), *((smyrf, f"--config=smyrf.smyrf.chunk_len={n}") for n in (32, 2))):
        assert run(evaluate.main, "--checkpoint=2", *more)[0] == 0
        scores.append(scored()["bits_per_dim"])
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    assert abs(scores[2] - scores[0]) > 1e-4 * scores[0]


SMYRF = (
    "--config=lm.TransformerLM.attention_type=@smyrf.smyrf()",
    "--config=smyrf.smyrf.chunk_len=4",
)


@pytest.mark.slow
def test_a_run_is_scored_with_each_number_of_hashes(run):
    flags = "--checkpoint=2", *SMYRF, "--kept_mass", "--n_hashes=8,1", "--tokens=64"
    code, out, err = run(evaluate.main, *flags)
    assert code == 0, err
    found = scored()
    few, many = found["by_n_hashes"]
    assert (few["n_hashes"], many["n_hashes"]) == (1, 8)
    assert 0 < few["kept_mass"] < found["kept_mass"] < many["kept_mass"] <= 1  # its own are 4
    assert few["kept_mass"] == few["kept_mass_layer_1"]
    best = min(few["bits_per_dim"], many["bits_per_dim"])
    fewest = 1 if few["bits_per_dim"] <= best + hash_counts.SUFFICES else 8
    assert found["fewest_n_hashes"] == fewest
    assert f"fewest hashes within 0.005 bits of the best: {fewest}\n" in out
    assert f"| 8 | {many['bits_per_dim']:.4f} | {many['kept_mass']:.4f} |" in out
    assert f"kept mass {found['kept_mass']:.4f}, by layer 1: " in out
    one = "--config=smyrf.smyrf.n_hashes=1"
    assert run(evaluate.main, "--checkpoint=2", *SMYRF, one, "--tokens=64")[0] == 0
    assert scored()["bits_per_dim"] == few["bits_per_dim"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--n_hashes=2,4"], "--n_hashes: no attention of model TransformerLM hashes, leave it"),
        (["--n_hashes=2,2", *SMYRF], "--n_hashes=2,2: expected different numbers, each"),
        (["--n_hashes=many", *SMYRF], "--n_hashes=many: expected different numbers, each"),
        (["--n_hashes=0", *SMYRF], "--n_hashes=0: expected different numbers"),
        (["--kept_mass"], "--kept_mass: no attention of model TransformerLM chooses keys"),
        (["--kept_mass", "--tasks=needle"], "--kept_mass: only the task text reads it"),
    ],
)
def test_hashes_of_a_model_that_has_none_are_refused(run, flags, message):
    code, _, err = run(evaluate.main, "--checkpoint=2", *flags)
    assert code == 2 and message in err and err.count("\n") == 1, err


def test_the_fewest_hashes_are_those_within_the_tolerance_of_the_best():
    class Model:
        def __init__(self, n=None):
            self.n = n

        def with_n_hashes(self, n):
            return Model(n)

    bits = {2: 1.02, 4: 1.0051, 8: 1.0049, 16: 1.0}
    found = hash_counts.score(
        Model(),
        list(bits),
        "bits",
        lambda model: {"bits": bits[model.n], "standard_error": None},
        lambda model: {"kept_mass": 0.5},
    )
    assert found["fewest_n_hashes"] == 8 and len(found["by_n_hashes"]) == 4


@pytest.mark.slow
def test_the_other_scripts_take_the_config_too(run):
    own, other = (
        run(generate.main, "--checkpoint=2", "--prompt=abc", "--max_new_tokens=40", *more)[1]
        for more in ((), (LOCAL, CHUNK))
    )
    assert own.startswith("abc") and own != other
    specs = [run_folder.read("run", step).spec for step in (2, 4)]
    assert [[op.name for op in spec.attention] for spec in specs] == [["dense"], ["local"]]


def test_the_folder_s_config_counts_where_the_checkpoint_has_none(run, tmp_path):
    text = (tmp_path / "run/config.gin").read_text()
    (tmp_path / "run/config.gin").unlink()
    before = run(evaluate.main, "--checkpoint=2")[1]
    assert before and not (tmp_path / "run/config.gin").exists()
    from tests.training.test_training_trust import change

    change(tmp_path / "run", step=2, config=None)
    code, _, err = run(evaluate.main, "--checkpoint=2")
    assert code == 2 and err.startswith("error: --output_dir=run holds no run: training writes ")
    (tmp_path / "run/config.gin").write_text(text.replace("@local.local()", "@dense.dense()"))
    assert run(evaluate.main, "--checkpoint=2")[1] == before


def test_an_average_is_of_one_model(run):
    code, out, _ = run(evaluate.main, "--checkpoint=average:2")
    assert code == 0 and scored()["checkpoint_steps"] == [4, 6]
    code, out, err = run(evaluate.main, "--checkpoint=average:3")
    assert (code, out) == (2, "")
    assert err == (
        "error: average:3 is of several models: model.attention_type is @dense at step 2 and "
        "@local at step 4: average the checkpoints after step 2 alone\n"
    )
    # Settings of --config that make them one count.
    code, _, err = run(evaluate.main, "--checkpoint=average:3", LOCAL)
    assert code == 2 and "model.attention_type.chunk_len is 64 at step 2 and 2 at step 4" in err
    assert run(evaluate.main, "--checkpoint=average:3", LOCAL, CHUNK)[0] == 0


def lose(monkeypatch, how):
    """Before each read of arrays calls `how` with the checkpoint's folder; returns the calls."""
    read, calls = arrays.restore, []

    def restore(folder, shapes):
        calls.append(folder.name)
        how(folder, len(calls))
        return read(folder, shapes)

    monkeypatch.setattr(arrays, "restore", restore)
    return calls


@pytest.mark.parametrize("which, then", [("latest", "4"), ("average:1", "4")])
def test_a_checkpoint_that_training_deletes_is_replaced_by_what_is_there(
    run, monkeypatch, which, then
):
    calls = lose(monkeypatch, lambda folder, n: shutil.rmtree(folder) if n == 1 else None)
    code, _, err = run(evaluate.main, f"--checkpoint={which}")
    assert code == 0, err
    assert calls == ["6", then] and scored()["checkpoint_steps"] == [int(then)]


def test_the_best_that_training_deletes_is_another_then(run, monkeypatch):
    best = saved_run.choose(run_folder.Checkpoints("run"), "best")
    calls = lose(monkeypatch, lambda folder, n: shutil.rmtree(folder) if n == 1 else None)
    code, out, err = run(evaluate.main)
    assert code == 0 and calls[0] == str(best), err
    assert scored()["checkpoint_steps"] == [int(calls[1])] and calls[1] != calls[0]


def test_a_step_that_training_deletes_is_told(run, monkeypatch):
    lose(monkeypatch, lambda folder, n: shutil.rmtree(folder))
    code, out, err = run(evaluate.main, "--checkpoint=4")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no checkpoint of step 4" in err and "there is 2, 6" in err


def test_a_training_that_is_faster_is_told(run, monkeypatch):
    def save_again(folder, n):
        shutil.copytree(folder, f"{folder}.copy")
        shutil.rmtree(folder)
        shutil.move(f"{folder}.copy", folder)
        raise ValueError("NOT_FOUND")

    calls = lose(monkeypatch, save_again)
    code, _, err = run(evaluate.main, "--checkpoint=latest")
    assert code == 1 and calls == ["6"] * saved_run.TRIES and err.count("\n") == 1
    assert "training replaced the checkpoints" in err and "5 times: try again" in err


def test_an_error_of_a_whole_checkpoint_is_raised_at_once(run, monkeypatch):
    def fail(folder, n):
        raise ValueError("something else")

    calls = lose(monkeypatch, fail)
    code, _, err = run(evaluate.main, "--checkpoint=latest")
    assert code == 1 and "something else" in err and calls == ["6"]


def refuse(number):
    def write(path, data):
        error = OSError(number, "No space left on device", str(path))
        raise durable.explained(error, "written", path)

    return write


def test_a_result_that_cannot_be_written_is_printed(run, monkeypatch, tmp_path):
    """As root no folder refuses a file, so the calls of the system fail here."""
    code, printed, _ = run(evaluate.main, "--split=test")
    assert code == 0
    before = (tmp_path / "run/evaluation_test.json").read_bytes()
    monkeypatch.setattr(durable, "write", refuse(errno.ENOSPC))
    code, out, err = run(evaluate.main, "--split=test")
    assert code == 1 and out.splitlines()[1:] == printed.splitlines()[1:]
    assert "not in a file" in out and err.count("\n") == 1
    assert "error: run/evaluation_test.json cannot be written (No space left" in err
    assert "the result is printed above; the file there is of before" in err
    assert (tmp_path / "run/evaluation_test.json").read_bytes() == before


def test_a_folder_for_reading_is_told_before_the_work(run, monkeypatch):
    def refused(**options):
        raise OSError(errno.EROFS, "Read-only file system")

    def stop(*args):
        raise ValueError("the work begins")

    monkeypatch.setattr(results.tempfile, "TemporaryFile", refused)
    monkeypatch.setattr(saved_run, "restore", stop)
    _, _, err = run(evaluate.main)
    assert err.splitlines() == [
        "note: run cannot be written (Read-only file system): the result will be printed alone",
        "error: the work begins",
    ]


def test_the_record_has_the_evaluations_of_every_length(run):
    """A file has the last one. Of two that are the same the record has one."""
    for flags in (["--length=8"], ["--length=8", "--stride=4", "--by_position"], ["--length=8"]):
        assert run(evaluate.main, *flags)[0] == 0
    found = [json.loads(line) for line in Path("run/evaluations.jsonl").read_text().splitlines()]
    assert [(one["length"], one["stride"]) for one in found] == [(8, 4), (8, 8)]
    assert found[0]["by_position"] and found[1] == scored()
    assert found[0]["picture"] == "by_position_valid_step6_length8.png"


def test_pictures_of_different_evaluations_have_different_names():
    name = results.picture_name
    same = name("by_position_valid", [6], 8, seed=0, config=[], tokens=None)
    assert same == "by_position_valid_step6_length8.png"
    others = dict(seed=1), dict(config=["a=1"]), dict(config=["a=2"]), dict(tokens=1)
    names = [name("by_position_valid", [6], 8, **one) for one in others]
    names += [name("by_position_test", [6], 8), name("by_position_valid", [5, 6], 8)]
    names += [name("by_position_valid", [6], 16), same]
    assert len(set(names)) == len(names)
    assert name("tasks", [1], 8, config=["a=1"]) == name("tasks", [1], 8, config=["a=1"], seed=0)


def test_results_of_several_at_once_are_all_written(tmp_path, monkeypatch):
    """The last one stays, the record has all; none finds the file of another half written."""
    sync = os.fsync
    monkeypatch.setattr(durable.os, "fsync", lambda x: (time.sleep(0.002), sync(x)))

    def write(number):
        files = results.ResultFiles(tmp_path)
        for step in range(10):
            files.write_result("result.json", [number, step])
        return files.exit_code()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(4))) == [0] * 4
    assert json.loads((tmp_path / "result.json").read_text())[1] == 9
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "result.json"]
    record = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert sorted(map(json.loads, record)) == [[number, 9] for number in range(4)]


SIZES = dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=1)


def write_run(folder, value):
    """A run whose logits have the weight `value`."""
    attention = [Op("local", dict(chunk_len=4))]
    spec = Spec.make("ReformerLM", attention, **SIZES, vocab_size=256, pos_type="none")
    model, rng = spec.build(), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    params = jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), shapes)
    params["logits"]["w"][:] = value
    run_folder.write(folder, spec, params, {}, "A test.")


@pytest.mark.parametrize("value, said", [(math.nan, "logits.w"), (3e38, "")])
def test_what_is_not_finite_is_no_result(value, said, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", value)
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 50)
    flags = ["--output_dir=run", "--data_dir=text", "--length=16"]
    code, out, err = call(evaluate.main, *flags)
    assert (code, out) == (1, "") and not list(tmp_path.rglob("evaluation*"))
    line = err.splitlines()[-1]
    assert line.startswith("error: ") and "finite" in line if said else "is nan" in line
    assert said in line
    flags = ["--from=run", "--to=deep/made.pkl.gz"]
    code, _, err = call(convert.main, *flags)
    assert code == 1 and said in err and "finite" in err and err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"run", "text"}

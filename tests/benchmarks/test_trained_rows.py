"""Tables of trained models: global_layers, reversible and long_range_arena."""

import argparse
import collections
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from benchmarks import global_layers, long_range_arena, reversible
from benchmarks.harness import campaign, processes
from benchmarks.rows import trained as trained_rows
from reformax.declared import SettingError
from reformax.models import ReformerLM
from reformax.training.callbacks import Callback

ROOT = Path(__file__).resolve().parents[2]


def traced(file, given):
    """The model of a config, which is taken whole; it is traced with its gradient."""
    from reformax.cli import config, parsed
    from reformax.training import loop
    from reformax.training.settings import build

    config.parse([file], given)
    settings = parsed.bindings(loop.train, ("model", "length"))
    model, key = build(settings["model"], "train"), jax.random.PRNGKey(0)
    shape = (1, settings["length"])
    params = jax.eval_shape(lambda key: model.init_params(key, shape), key)

    def loss(params, tokens):
        return model.features(params, tokens, rng=key).sum()

    tokens = jax.ShapeDtypeStruct(shape, "int32")
    jax.eval_shape(jax.grad(loss, allow_int=True), params, tokens)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", global_layers.ROWS)
@pytest.mark.parametrize("reversible", [False, True])
def test_every_row_of_global_layers_is_a_model(reversible, name):
    args = argparse.Namespace(reversible=reversible, steps=900, tiny=True, data_dir=None)
    model = traced(*global_layers.config_of(name, args))
    kinds = 1 if name == "windows" else 3 if name in global_layers.HYBRIDS else 2
    assert len({op.name for op in model.attention_type}) == kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, pretrained",
    [
        (name, pretrained)
        for name, settings in long_range_arena.ROWS.items()
        if settings
        for pretrained in ((False,) if long_range_arena.CAUSAL in settings else (False, True))
    ],
)
def test_every_row_of_long_range_arena_is_a_model(name, pretrained):
    given = dict(task="listops", steps=9, pretrained=pretrained, tiny=False, runs=Path("runs"))
    given |= dict(curriculum=False, pooling="cls")
    causal = long_range_arena.CAUSAL in long_range_arena.ROWS[name]
    parts = long_range_arena.parts_of(name, argparse.Namespace(**given))
    models = [traced(*part) for part in parts]
    kinds = [model.task_kind for model in models]
    assert kinds == (["masked", "labels"] if pretrained else ["labels"])
    assert len({(model.vocab_size, model.d_model) for model in models}) == 1
    assert models[-1].causal == causal
    assert causal or models[-1].attention_type.causality != "only"
    assert models[-1].pooling == ("last" if causal else "cls")
    assert name.split(",")[0] in (models[-1].attention_type.name, "bigbird")


@pytest.mark.parametrize("name", reversible.ROWS)
def test_every_deep_row_is_a_model_of_48_layers(name):
    args = argparse.Namespace(layers=48, length=65_536, tiny=False)
    part = reversible.config_of(name, args, 100)
    if name.endswith("offloaded"):
        with pytest.raises(SettingError, match="offload_activations is True"):
            traced(*part)
        return
    model = traced(*part)
    assert (model.n_layers, model.d_model, model.scan_layers) == (48, 768, True)
    assert isinstance(model, ReformerLM) == name.startswith("reversible")
    assert model.remat_policy == ("nothing" if "all again" in name else "attention")


@pytest.mark.parametrize("task, n_pixels", [("pathfinder", 1024), ("path_x", 16_384)])
@pytest.mark.slow
def test_pathfinder_has_the_positions_of_its_grid(task, n_pixels):
    given = dict(task=task, steps=9, pretrained=True, curriculum=False, tiny=False)
    given |= dict(pooling="mean", runs=None)
    masked, classes = long_range_arena.parts_of(long_range_arena.OWN, argparse.Namespace(**given))
    assert "loop.train.stages=()" in masked[1] and "loop.train.stages=()" not in classes[1]
    for part in (masked, classes):
        model = traced(*part)
        assert model.pos_type == "rotary" and math.prod(model.pos_axial_shape) == n_pixels


@pytest.mark.parametrize("task, steps", [("pathfinder", 560), ("listops", 1400)])
def test_the_warm_up_of_a_task_is_its_own(task, steps):
    given = dict(task=task, steps=14_000, pretrained=False, curriculum=False, tiny=False)
    given |= dict(pooling="mean", runs=None)
    ((_, settings),) = long_range_arena.parts_of("flash", argparse.Namespace(**given))
    assert f"warmup_steps={steps}" in settings


def test_a_curriculum_begins_with_short_lists():
    given = dict(task="listops", steps=9, pretrained=True, curriculum=True, tiny=False)
    given |= dict(pooling="mean", runs=None)
    parts = long_range_arena.parts_of("flash", argparse.Namespace(**given))
    last = [dict(x.split("=", 1) for x in settings) for _, settings in parts]
    assert [x.get("length") for x in last] == [None, "128", "512", None]
    assert [x.get("batch_size") for x in last] == [None, "512", "128", None]
    assert [x["steps"] for x in last] == ["9", "6", "6", "9"]
    assert ["loop.train.fresh_heads" in x for x in last] == [False, True, False, False]


def test_a_curriculum_of_a_task_that_has_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        long_range_arena.main(["--task=cifar10", "--curriculum"])
    told = "--curriculum with --task=cifar10: expected one of listops, listops_short"
    assert told in capsys.readouterr().err


def test_rows_are_spread_over_gpus(tmp_path, monkeypatch, capsys):
    """Each has as many rows as are at once on it, and takes another when one has ended."""
    on, together = collections.Counter(), []

    def ask(python, function, *, env, turn, **request):
        gpu = env["CUDA_VISIBLE_DEVICES"]
        assert turn.endswith({"5": "turn5", "7": "turn7"}[gpu])
        on[gpu] += 1
        together.append(dict(on))
        time.sleep(0.01)
        on[gpu] -= 1
        yield {"bits": 1.0, "n_targets": 10, "tokens_per_second": 1.0, "accuracy": 0.5}

    monkeypatch.setattr(campaign, "ask", ask)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    long_range_arena.main(["--gpus=2", "--at_once=2", f"--runs={tmp_path}"])
    assert len(together) == len(long_range_arena.ROWS) - 1  # lists have no attention for them alone
    assert all(max(counts.values()) <= 2 for counts in together)
    assert any(set(counts) == {"5", "7"} for counts in together)
    assert "| linformer | 50.0% | 1.000 | 10 | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="gpus is 3 and CUDA_VISIBLE_DEVICES is 5,7: .* at most 2"):
        long_range_arena.main(["--gpus=3", f"--runs={tmp_path}"])


def test_rows_of_other_data_or_seeds_are_trained_again(tmp_path, monkeypatch, capsys):
    """A home's '~' may stand before the data."""
    trained = []

    def ask(python, function, *, name, parts, data_dir, folder, **request):
        trained.append((name, data_dir, folder, parts[0][1][-1]))
        yield {"bits": 1.0, "n_targets": 10, "tokens_per_second": 1.0}

    monkeypatch.setattr(campaign, "ask", ask)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_bytes(b"")
    flags = ["--steps=3", f"--saved={tmp_path / 'saved'}", f"--runs={tmp_path}", "--only", "flash"]
    for data_dir in ("~/wheels", tmp_path / "wheels", "~/other", "~/other"):
        global_layers.main([f"--data_dir={data_dir}", *flags])
    for _ in range(2):
        global_layers.main(["--data_dir=~/other", "--seed=1", *flags])
    assert trained == [
        ("flash", str(tmp_path / data), str(tmp_path / folder / "flash"), f"loop.train.seed={seed}")
        for data, folder, seed in (
            ("wheels", "3_wheels", 0),
            ("other", "3_other", 0),
            ("other", "3_other_seed1", 1),
        )
    ]
    args = argparse.Namespace(reversible=False, steps=3, tiny=False, data_dir=tmp_path / "wheels")
    assert "package_sources" in global_layers.config_of("flash", args)[1][-2]


@pytest.mark.slow
def test_a_row_that_is_cut_off_goes_on(tmp_path, monkeypatch):
    args = argparse.Namespace(
        **dict(task="listops_short", steps=20, pretrained=False, curriculum=False),
        **dict(tiny=True, pooling="mean", runs=None),
    )
    parts = [
        (file, [*settings, "listops.listops.n_eval=4"])
        for file, settings in long_range_arena.parts_of("flash", args)
    ]
    request = dict(name="flash", parts=parts, data_dir=None, folder=str(tmp_path / "run"))
    request |= dict(turn=str(tmp_path / "turn"), limit=None)

    def stops(turn, last, name):
        return Callback(on_step=lambda step, _: step == 2 and signal.raise_signal(signal.SIGTERM))

    with monkeypatch.context() as patch:
        patch.setattr(trained_rows, "in_turn", stops)
        with pytest.raises(TimeoutError, match=r"^saved after step \d of 20$"):
            list(trained_rows.train(**request))
    _, found = trained_rows.train(**request)
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if x["split"] == "train"] == [*range(1, 21)]
    assert found["steps"] == 20 and found["n_targets"] == 4


def test_a_row_that_names_none_right_in_the_end_has_that_score():
    lines = [{"split": "valid", "accuracy": x} for x in (0.5, None, 0.0)]
    assert trained_rows._of(lines, "valid", lambda line: line["accuracy"]) == [0.5, 0.0]


TRAINS = """
import os, sys, time
from pathlib import Path
from benchmarks.rows.trained import in_turn

folder, name, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(trains := in_turn(folder / "turn", 3, name).on_step)(1, {})
alone = folder / "trains"
alone.mkdir()  # fails where another process trains
time.sleep(0.2)
alone.rmdir()
if last < 3:
    os._exit(1)
trains(2, {})
trains(3, {})
time.sleep(0.5)  # evaluates
"""


@pytest.mark.slow
def test_processes_train_in_turn_and_a_process_that_fails_gives_its_turn_back(tmp_path):
    command = [sys.executable, "-c", TRAINS, str(tmp_path)]
    last = {"fails": 2, "a": 3, "b": 3}
    options = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with processes.alone(tmp_path / "turn"):
        trainings = [subprocess.Popen([*command, x, str(n)], **options) for x, n in last.items()]
        for training in trainings:
            assert training.stderr.readline().endswith("compiled\n")
    said = [training.communicate(timeout=60)[1] for training in trainings]
    assert [training.returncode for training in trainings] == [1, 0, 0], said
    assert "fails: trained" not in said[0] and "a: trained" in said[1] and "b: trained" in said[2]

"""Classes as targets: a run learns them and says how many are right; misfits are refused."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest

import evaluate
import generate
import train
from reformax.cli import config, parsed
from reformax.data import labelled, stdlib
from reformax.declared import SettingError
from reformax.models import ReformerEncoder, TransformerEncoder, TransformerLM, TransformerMaskedLM
from reformax.models.backbone import Backbone
from reformax.task import Labels
from reformax.training import evaluation, loop, optimizer
from reformax.training import mesh as mesh_lib
from reformax.training.checkpoint import Checkpoints
from reformax.training.step import TrainState
from tests.layers import plain
from tests.training import tiny

SMALL = dict(vocab_size=8, d_model=8, d_ff=8, n_layers=1, n_heads=1, dropout=0.0)
RUN = """
from __gin__ import dynamic_registration
from reformax.models import encoder
from reformax.training import loop
from reformax.training import optimizer
from tests.training import test_training_labels

loop.train.model = @encoder.TransformerEncoder
loop.train.task = @test_training_labels.first_token()
loop.train.optimizer = @optimizer.adam()
optimizer.adam.learning_rate = 3e-2
loop.train.steps = 40
loop.train.batch_size = 16
loop.train.length = 5
encoder.TransformerEncoder.vocab_size = 8
encoder.TransformerEncoder.n_classes = 4
encoder.TransformerEncoder.d_model = 8
encoder.TransformerEncoder.d_ff = 8
encoder.TransformerEncoder.n_layers = 1
encoder.TransformerEncoder.n_heads = 1
encoder.TransformerEncoder.d_attention_key = 4
encoder.TransformerEncoder.d_attention_value = 4
encoder.TransformerEncoder.dropout = 0.0
"""


def first_token(pairs=False, n_classes=4):
    """The class of a row is its only token below 5, or for pairs the same of the second row."""

    def examples(split, numbers):
        rng = np.random.default_rng(["train", "valid"].index(split))
        rows = rng.integers(5, 8, (64, 5))
        classes = rng.integers(4, size=64)
        rows[np.arange(64), rng.integers(5, size=64)] = classes + 1
        rows, classes = rows[numbers], classes[numbers]
        return ((np.full_like(rows, 6), rows) if pairs else rows), classes

    return labelled.labelled_task(
        "first_token", vocab_size=8, labels=Labels(n_classes, pairs),
        sizes={"train": 64, "valid": 64}, examples=examples, made_by=lambda split: "by hand",
    )  # fmt: skip


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_learns_classes_and_says_how_many_are_right(pairs, tmp_path, monkeypatch, call):
    (tmp_path / "run.gin").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    flags = [f"--config={x}.pairs=True" for x in ("encoder.TransformerEncoder", NAME)] * pairs
    code, out, err = call(train.main, "--config_file=run.gin", "--output_dir=run", *flags)
    assert code == 0, err
    assert "bits per label, accuracy " in out
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] > 0.6 and lines[-1]["n_targets"] == 64  # 0.25 by chance
    assert lines[-1]["bits_per_label"] < lines[0]["bits_per_label"]

    trusted = ["--output_dir=run", "--trust_config"]
    code, out, err = call(evaluate.main, *trusted, "--batch_size=10")
    assert code == 0, err
    assert f"accuracy: {lines[-1]['accuracy']:.4f}" in out
    assert f"bits_per_label: {lines[-1]['bits_per_label']:.4f}" in out
    for main, flag, message in (
        (evaluate.main, "--by_position", "has one target a row, its class"),
        (generate.main, "--prompt=1", "TransformerEncoder, which does not write text"),
    ):
        code, _, err = call(main, *trusted, flag)
        assert code != 0 and message in err.strip().splitlines()[-1]


NAME = "test_training_labels.first_token"


def masked_task():
    return stdlib.stdlib(max_bytes=2000).replace(masked=True)


@pytest.mark.parametrize(
    "model, task, message",
    [
        (partial(TransformerLM, 8), first_token, "names the class of a row, and model Transf"),
        (partial(TransformerEncoder, 8), partial(first_token, True), "class of a pair of docum"),
        (partial(TransformerEncoder, 8, 4, pairs=True), first_token, "TransformerEncoder names"),
        (
            partial(TransformerEncoder, 8, 5),
            first_token,
            "set --config='encoder.TransformerEncoder.n_classes=4'",
        ),
        (partial(ReformerEncoder, 256), partial(stdlib.stdlib, 2000), "that continues text, and"),
        (partial(TransformerMaskedLM, 8), first_token, "set loop.train.model to a classifier"),
        (partial(TransformerLM, 256), masked_task, "that fills in hidden tokens, and model"),
        (partial(TransformerEncoder, 7, 4), first_token, "set the model's vocab_size=8"),
    ],
)
def test_a_model_of_another_task_is_refused(model, task, message):
    with pytest.raises(ValueError, match=message) as caught:
        evaluation.check_model(model(), task())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_masked_models_weights_begin_a_classifier(tmp_path, capsys):
    """Its backbone is taken, heads are fresh; a backbone of other shapes is refused."""
    model = SMALL | dict(vocab_size=9, d_attention_key=4, d_attention_value=4)
    other = jax.tree.map(lambda x: x + 1, plain.init(TransformerMaskedLM(**model), (4, 5)))
    source = Checkpoints(tmp_path / "masked")
    source.save(0, TrainState(np.int32(0), other, (), None))
    source.wait()
    classes = partial(TransformerEncoder, **model, n_classes=4, d_classifier=6)
    train_on = partial(
        loop.train, task=first_token(), optimizer=optimizer.adamw(0.0), steps=1, batch_size=4,
        length=5, init_from=tmp_path / "masked", fresh_heads=True,
    )  # fmt: skip
    train_on(tmp_path / "a", model=classes)
    says = "with fresh hidden, logits and the embedding, norm, stack of "
    assert f"{says}{tmp_path / 'masked'} after step 0 from" in capsys.readouterr().out

    like = plain.init(classes(), (4, 5))
    got, _ = Checkpoints(tmp_path / "a").restore_params(1, like)
    for name in ("embedding", "norm", "stack"):
        jax.tree.map(np.testing.assert_array_equal, got[name], other[name])
    for name in ("hidden", "logits"):
        assert jax.tree.map(np.shape, got[name]) == jax.tree.map(np.shape, like[name])
        assert np.std(got[name]["w"]) > 0 and not got[name]["b"].any()

    axial = dict(pos_type="axial", pos_axial_shape=(1, 5), pos_d_axial_embs=(4, 4))
    for options, message in (
        ({"fresh_heads": False}, "hidden.* has shape .*fresh_heads=True leaves the heads of an"),
        ({"init_from": None}, "fresh_heads is True and init_from is None"),
        ({"model": tiny.TinyLM, "task": tiny.counting()}, "TinyLM has no backbone_names"),
        ({"model": partial(classes, vocab_size=8)}, r"shape \(9, 8\) there and shape \(8, 8\) in"),
        ({"model": partial(classes, **axial)}, "positions.* has no such tensor there"),
    ):
        with pytest.raises(SettingError, match=message):
            train_on(tmp_path / "b", **{"model": classes} | options)


def test_the_configs_of_pretraining_have_one_backbone():
    """Shapes do not tell where positions or activations differ."""

    def backbone(name):
        config.parse([name])
        model = parsed.bindings(loop.train)["model"](mode="eval")
        return {x.name: getattr(model, x.name) for x in dataclasses.fields(Backbone)}

    for task in ("listops", "path_x"):
        assert backbone(f"{task}_masked.gin") == backbone(f"{task}_pretrained.gin")


def test_devices_cannot_share_the_positions_of_a_row(monkeypatch):
    monkeypatch.setattr(evaluation.devices, "n_sequence_shards", lambda mesh=None: 2)
    with pytest.raises(ValueError, match="context=2 devices cannot share: leave context out"):
        evaluation.check_mesh(first_token(), mesh_lib.make())


def test_the_sums_are_those_of_a_table_of_logits():
    task, model = first_token(), TransformerEncoder(**SMALL, n_classes=4, mode="eval")
    params = plain.init(model, (4, 5))
    found = evaluation.evaluate(model, params, task, batch_size=24, length=5)
    batch = next(task.eval_batches("valid", 64, 5, 5))
    logits = np.asarray(jax.jit(model.apply)(params, batch.inputs), np.float64)[:, 0]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    of_target = np.take_along_axis(log_p, batch.targets, axis=1)
    np.testing.assert_allclose(found["bits_per_label"], -of_target.mean() / np.log(2), rtol=1e-5)
    right = logits.argmax(axis=1) == batch.targets[:, 0]
    assert found["accuracy"] == pytest.approx(right.mean())

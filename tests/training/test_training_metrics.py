"""A metric is one function: lines, evaluations and runs that have begun show it from then on."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.models import lm
from reformax.training import (
    callbacks,
    loop,
    mesh,
    metrics,
    record_lines,
    stages,
    step_log,
    utilization,
)
from reformax.training.metrics import Ratio
from reformax.training.settings import TrainSettings
from reformax.training.step_log import StepLog
from tests.training import tiny, worker


def top_2(found):
    """Whether the target is one of the two most probable ids, of even targets."""
    target = jnp.take_along_axis(found.logits, found.targets[..., None], -1)
    inside = jnp.sum(found.logits > target, axis=-1) < 2
    return inside, found.weights * (found.targets % 2 == 0)


@pytest.fixture
def with_top_2(monkeypatch):
    monkeypatch.setitem(metrics.METRICS, "top_2", top_2)


def test_a_metric_is_in_every_line_of_training_and_evaluation(tmp_path, with_top_2):
    steps = []
    on_step = callbacks.Callback(on_step=lambda step, values: steps.append(values))
    result = loop.train(tmp_path, **worker.arguments(callbacks=[on_step], steps=12))
    lines = worker.record(tmp_path)
    assert {line["tag"] for line in lines} == {"train", "eval"}
    for line in lines:
        assert line["accuracy"] <= line["top_2"] + 0.2 and 0 < line["top_2"] < 1
    assert all(0 <= values["top_2"] <= 1 for values in steps) and result["step"] == 12
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("*"))
    assert b"train/top_2" in events and b"valid/top_2" in events


@pytest.mark.slow
def test_a_run_goes_on_with_a_new_metric_and_its_other_columns_stay(tmp_path, monkeypatch):
    for name, steps in (("whole", [24]), ("resumed", [10, 24])):
        for until in steps:
            if until == 24 and name == "resumed":
                monkeypatch.setitem(metrics.METRICS, "top_2", top_2)
            loop.train(tmp_path / name, **worker.arguments(steps=until, log_every=3))
    whole, resumed = (worker.record(tmp_path / name) for name in ("whole", "resumed"))
    has = [(line["step"], line["tag"]) for line in resumed if "top_2" in line]
    assert has[0] == (12, "train") and (24, "eval") in has

    def without(lines):  # steps of the run that ended at 10
        kept = [x for x in lines if (x["step"], x["tag"]) not in {(10, "train"), (12, "train")}]
        return [{k: v for k, v in x.items() if k not in ("top_2", "whole_split")} for x in kept]

    assert without(resumed) == without(whole)


def test_a_mean_of_steps_is_by_the_weights_of_a_metric():
    settings = TrainSettings(**worker.arguments())
    log = StepLog(settings, None, None, [], 0, lambda: 0.0)
    rows = [{"nats": [1.0, 8.0], "accuracy": [0.5, 2.0]}, {"nats": [3.0, 8.0]}]
    rows += [{"nats": [2.0, 8.0], "accuracy": [0.0, 0.0]}]
    found = log._shown(rows, settings.task)
    assert found["bits_per_dim"] == pytest.approx(2 / np.log(2)) and found["accuracy"] == 0.5
    assert "accuracy" not in log._shown(rows[1:], settings.task)  # nothing of it has weight


def test_an_evaluation_of_the_training_split_is_evaluated_again(tmp_path):
    """A damaged record that is cut back to a checkpoint without a score keeps no evaluation."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "tag": tag, "split": "train"} for tag in ("train", "eval")]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    record_lines.RecordLines(path, 1, None, scored=()).close()
    assert [line["tag"] for line in record_lines.read(path)] == ["train"]


@pytest.mark.parametrize("stated", [None, 1e9])
def test_each_line_has_tokens_a_second_and_the_share_of_the_peak(tmp_path, monkeypatch, stated):
    if stated:
        monkeypatch.setitem(utilization.PEAKS, "cpu", stated)
        monkeypatch.setattr(tiny.TinyLM, "dtype", "bfloat16", raising=False)
    loop.train(tmp_path, **worker.arguments(log_every=1))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    timings = [line["timing"] for line in lines if line["tag"] == "train"]
    assert all(timing.keys() == {"seconds", "tokens_per_second", "mfu"} for timing in timings)
    known = [timing for timing in timings if timing["tokens_per_second"] is not None]
    assert len(known) > 12
    for timing in known:
        if stated is None:
            assert timing["mfu"] is None
        else:  # three forward passes of a product with 8 x 8 and one with 8 x 16
            flops = 3 * 2 * (8 * 8 + 8 * 16)
            share = flops * timing["tokens_per_second"] / (stated * len(jax.devices()))
            assert timing["mfu"] == pytest.approx(share)


def test_the_share_of_the_peak_is_of_the_stage_of_each_step(monkeypatch):
    """A line may have the last steps of a stage and the first ones of the next."""
    stage = stages.Stage(until=2, length=8)
    settings = TrainSettings(**worker.arguments(steps=4, stages=[stage]))
    written, clock = [], iter([0.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(step_log, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    record = SimpleNamespace(write=lambda *line, tag: written.append(line[-1]))
    bar = SimpleNamespace(advance=lambda *shown: None)
    log = StepLog(settings, record, bar, [], 0, lambda: 0.0, at_peak={0: 0.1, 1: 0.4})
    for step in range(1, 5):
        log.add(step, {"nats": Ratio(1.0, 1.0), "grad_norm": 1.0})
    log.drain()
    (timing,) = written
    assert timing["tokens_per_second"] == (8 * 8 + 2 * 8 * 16) / 4
    assert timing["mfu"] == pytest.approx((0.1 + 0.4 + 0.4) / 4)


def test_operations_are_those_of_all_devices_and_of_one_forward_pass():
    model, tokens = tiny.TinyLM(), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    params = jax.eval_shape(lambda key: model.init_params(key, (8, 16)), jax.random.PRNGKey(0))
    for devices in (1, len(jax.devices())):
        on = mesh.make(devices=jax.devices()[:devices])
        found = utilization.flops_of_step(model, params, tokens, on)
        assert found == 3 * 2 * 8 * 16 * (8 * 8 + 8 * 16)


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v4 lite", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_devices_name(kind, peak, monkeypatch):
    class Device:
        device_kind = kind

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    model = lm.TransformerLM(vocab_size=16, d_model=8, n_layers=1, dtype="bfloat16")
    assert utilization.peak(model) == peak
    for other in (lm.TransformerLM(vocab_size=16, d_model=8, n_layers=1), tiny.TinyLM()):
        assert utilization.peak(other) is None  # of float32, or of it does not say

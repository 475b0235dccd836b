"""The curves of a record, and what its figure shows."""

import gc
import tracemalloc

import numpy as np
import pytest

from reformax.training import curves
from reformax.training import record as record_lib
from reformax.training.record_lines import RecordLines

pytestmark = pytest.mark.usefixtures("figures")


def lines(split="valid", n=40):
    """Every tenth step is followed by an evaluation; a step takes 9 s."""
    found = []
    for step in range(1, n + 1):
        found.append({"step": step, "tag": "train", "split": "train", "bits_per_dim": 8 / step})
        if step % 10 == 0:
            timing = {"seconds": 9.0 * step}
            line = {"step": step, "tag": "eval", "split": split, "bits_per_dim": 9 / step}
            found.append(line | {"timing": timing})
    return [*found, {"step": n, "tag": "note", "split": "note", "lost_lines": 1}]


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the figures that were drawn."""
    found = []
    png = curves.png

    def keep(figure):
        (axes,) = figure.axes
        found.append(axes)
        return png(figure)

    monkeypatch.setattr(curves, "png", keep)
    return found


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("split", ["valid", "train"])
def test_the_evaluations_of_any_split_are_drawn(split, drawn):
    curves.draw(lines(split), "bits_per_dim", "mine", 4096)
    (axes,) = drawn
    assert labels(axes)[1] == f"{split}, best 0.225 at step 40"
    raw, smoothed, scores = axes.get_lines()
    assert scores.get_xydata().tolist() == [[10, 0.9], [20, 0.45], [30, 0.3], [40, 0.225]]
    assert raw.get_xydata().tolist() == [[step, 8 / step] for step in range(1, 41)]
    assert axes.get_title() == "mine" and axes.get_xlabel() == "step of 4,096 tokens"


def test_scores_of_a_part_of_the_split_are_not_those_of_all():
    part = dict(tag="eval", split="valid", n_targets=1000, whole=False)
    found = curves.scores(
        [
            dict(step=1, bits_per_dim=3.0, **part),
            dict(step=2, bits_per_dim=2.0, **part, whole_split=dict(bits_per_dim=2.5)),
        ],
        "bits_per_dim",
    )
    assert found["valid, 1,000 targets"].values.tolist() == [3, 2]
    assert [x.tolist() for x in found["valid"]] == [[2], [2.5]]


def test_time_is_a_second_axis(drawn):
    curves.draw(lines(), "bits_per_dim", "mine", 1)
    (clock,) = drawn[0].child_axes
    assert clock.get_xlabel() == "minutes"
    shown = [label.get_text() for label in clock.get_xticklabels()]
    assert shown == ["0", "1", "2", "3", "4", "5", "6"]
    assert clock.get_xticks()[3] == pytest.approx(20)


def test_ticks_of_time_keep_their_distance(drawn):
    """Between the steps 20 and 21 an evaluation takes a minute."""
    found = [line | {"timing": {"seconds": 9.0 * line["step"]}} for line in lines()]
    for line in found:
        if line["step"] > 20:
            line["timing"]["seconds"] += 60
    curves.draw(found, "bits_per_dim", "mine", 1)
    (clock,) = drawn[0].child_axes
    shown = [label.get_text() for label in clock.get_xticklabels()]
    assert shown == ["0", "1", "2", "3", "5", "6", "7"]
    assert np.diff(clock.get_xticks()).min() > 2


def test_a_record_of_nothing_has_a_figure(drawn):
    assert curves.draw([], "bits_per_dim", "mine", 1)[:4] == b"\x89PNG"
    assert drawn[0].get_lines() == [] and drawn[0].child_axes == []


def test_time_is_that_of_the_record():
    lines = [{"step": n, "timing": {"seconds": s}} for n, s in [(10, 5.0), (20, 9.0)]]
    found = curves.seconds([*lines, {"step": 25}, {"step": 30, "timing": {}}])
    assert found.steps.tolist() == [0, 10, 20] and found.values.tolist() == [0, 5, 9]


@pytest.mark.parametrize("n", [0, 1, 2, 40, 1000])
def test_smoothing_keeps_a_line_and_the_length(n):
    assert curves.smooth(np.full(n, 2.0)) == pytest.approx(np.full(n, 2.0))
    noise = np.random.default_rng(0).normal(size=n)
    smoothed = curves.smooth(noise)
    assert smoothed.shape == (n,)
    assert n < 40 or smoothed.std() < 0.7 * noise.std()


def test_a_plot_reads_the_record_line_by_line(tmp_path, monkeypatch):
    record_lines = RecordLines(tmp_path / "metrics.jsonl", 0, say=pytest.fail)
    for step in range(20, 160_000, 20):
        split, tag = ("valid", "eval") if step % 4000 == 0 else ("train", "train")
        line = {"step": step, "tag": tag, "split": split, "bits_per_dim": 8 / step}
        line |= {"grad_norm": 1.0, "tokens": step, "timing": {"seconds": step}}
        record_lines.append(line)
    found = []

    def drawn(lines, metric, *_):
        found[:] = [curves.losses(lines, metric), curves.seconds(lines)]
        found.append(curves.scores(lines, metric)["valid"])
        return b""

    monkeypatch.setattr(curves, "draw", drawn)
    record = record_lib.Record(tmp_path, record_lines, 0)
    tracemalloc.start()
    try:
        record.plot()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(curve.steps) for curve in found] == [7960, 8000, 39]
    assert found[0].values[0] == 8 / 20 and found[2].steps[-1] == 156_000
    # The texts of the lines are not in memory again, nor are their dicts: 12 times their bytes.
    assert peak < 2 * (tmp_path / "metrics.jsonl").stat().st_size
    record.close()


@pytest.mark.slow
def test_a_figure_that_was_drawn_is_not_kept(tmp_path):
    from matplotlib.figure import Figure

    record_lines = RecordLines(tmp_path / "metrics.jsonl", 0, say=pytest.fail)
    record = record_lib.Record(tmp_path, record_lines, 0)
    gc.collect()
    before = sum(isinstance(x, Figure) for x in gc.get_objects())
    gc.disable()  # which does not collect in time
    try:
        for line in lines():
            record_lines.append(line)
        record.plot()
        assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
        assert sum(isinstance(x, Figure) for x in gc.get_objects()) == before
    finally:
        gc.enable()
        record.close()

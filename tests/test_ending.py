"""What a finished run prints: its loss as a curve, and a sample of text."""

import json
import signal

import gin
import pytest

from reformax.cli import ending, train
from tests.training.scripts import call

TINY = (
    *("d_model=16", "d_ff=16", "d_head=8", "n_heads=2", "n_layers=2", "length=64", "steps=3"),
    *("batch_size=2", "warmup_steps=1", "stdlib.stdlib.max_bytes=20_000"),
    *("loop.train.log_every=1", "loop.train.eval_whole=False"),
)


def finish(monkeypatch, capsys, folder, *settings):
    flags = [f"--config={setting}" for setting in (*TINY, *settings)]
    try:
        return call(train.main, monkeypatch, capsys, f"--output_dir={folder}", "--quiet", *flags)
    finally:
        gin.clear_config()


def test_the_quickstart_ends_with_its_curve_and_a_sample(monkeypatch, capsys, tmp_path):
    settings = ("ending.ending.max_new_tokens=7", "ending.ending.temperature=0")
    code, out, err = finish(monkeypatch, capsys, tmp_path / "run", *settings)
    assert code == 0, err
    curve, _, rest = out.partition("a sample: ")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    bits = [line["bits_per_dim"] for line in lines if "grad_norm" in line]
    assert "bits per dim of training batches" in curve and f"{max(bits):.3f} |*" in curve
    command, _, sample = rest.partition("\n")
    assert command.endswith("'--prompt=def ' --max_new_tokens=7 --temperature=0")
    text, _, last = sample.partition("\nvalid bits per dim")
    assert text.startswith("def ") and last
    assert "note:" not in out
    # The settings are read once the run is saved: what opens the run does not meet them.
    assert "ending" not in (tmp_path / "run/config.gin").read_text()


def test_a_config_without_them_prints_neither(monkeypatch, capsys, tmp_path):
    settings = ("ending.ending.curve=False", "ending.ending.prompt=None")
    code, out, _ = finish(monkeypatch, capsys, tmp_path / "run", *settings)
    assert code == 0 and out.startswith("valid bits per dim")


def test_a_wrong_setting_is_refused_before_the_first_step(monkeypatch, capsys, tmp_path):
    code, _, err = finish(monkeypatch, capsys, tmp_path / "run", "ending.ending.temperature=-1")
    assert code == 2 and "temperature is -1" in err and not (tmp_path / "run").exists()


RESULT = {"output_dir": "runs/none", "metric": "bits_per_dim", "interrupted_by": None}
OPTIONS = {"curve": False, "prompt": "a", "max_new_tokens": 1, "temperature": 0.0}


def test_a_sample_that_fails_leaves_a_note(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    ending.show(RESULT, **OPTIONS)
    assert "note: no sample: output_dir=runs/none holds no run" in capsys.readouterr().out


def test_several_processes_write_no_sample(capsys):
    ending.show(RESULT, **OPTIONS, alone=False)
    assert "note: no sample: one process writes text" in capsys.readouterr().out


def test_an_interrupted_run_prints_nothing_of_it(capsys):
    ending.show(RESULT | {"interrupted_by": signal.SIGTERM}, **OPTIONS | {"curve": True})
    assert capsys.readouterr().out == ""


def test_a_curve_goes_from_its_first_value_to_its_last():
    text = ending.drawn([10, 20, 30], [8.0, 4.0, float("nan")], "bits")
    first, *rows, axis, ends = text.splitlines()
    assert first == "bits of training batches" and "4.000" in rows[-1] and "8.000" in rows[0]
    columns = [row.partition("|")[2] for row in rows]
    assert columns[0].startswith("*") and len(columns[-1]) == ending.COLUMNS
    assert len(rows) == ending.ROWS and ends.endswith("step 20") and "step 10" in ends
    # Each column has one star, and they fall.
    places = [[i for i, row in enumerate(columns) if row[c : c + 1] == "*"] for c in range(64)]
    assert all(len(place) == 1 for place in places) and places == sorted(places)


@pytest.mark.parametrize("values", [[], [float("inf")]])
def test_no_curve_without_a_finite_value(values):
    assert ending.drawn(list(range(len(values))), values, "bits").endswith("no step was recorded")

"""What a finished run prints: a sample of text, and its loss as a curve."""

import json

import pytest

from reformax.cli import terminal_curve, train

TINY = (
    *("d_model=16", "d_ff=16", "d_head=8", "n_heads=2", "n_layers=2", "length=64", "steps=3"),
    *("batch_size=2", "warmup_steps=1", "stdlib.stdlib.max_bytes=20_000"),
    *("loop.train.log_every=1", "loop.train.eval_whole=False"),
)


def finish(call, folder, *settings, flags=()):
    flags = [*flags, *(f"--config={setting}" for setting in (*TINY, *settings))]
    return call(train.main, f"--output_dir={folder}", *flags)


@pytest.mark.slow
def test_the_quickstart_ends_with_a_sample_and_its_curve(call, tmp_path):
    code, out, err = finish(call, tmp_path / "run", "loop.train.sample_tokens=7")
    assert code == 0, err
    sample, _, curve = out.partition("bits per dim of training batches\n")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    bits = [line["bits_per_dim"] for line in lines if line["tag"] == "train"]
    assert f"{max(bits):.3f} |*" in curve and "\nvalid bits per dim" in curve
    (texts,) = [line["texts"] for line in lines if line["tag"] == "sample"]
    assert texts[0].startswith("def ") and f"step 3: a sample: {texts[0]}\n" in sample


@pytest.mark.slow
def test_a_quiet_run_prints_its_result_alone(call, tmp_path):
    code, out, _ = finish(call, tmp_path / "run", flags=["--quiet"])
    assert code == 0 and out.startswith("valid bits per dim")


@pytest.mark.slow
def test_a_curve_that_fails_ends_no_run(call, monkeypatch, tmp_path):
    def fails(*args):
        raise OSError("gone")

    monkeypatch.setattr(terminal_curve, "of_run", fails)
    code, out, err = finish(call, tmp_path / "run", "loop.train.sample_prompts=[]")
    assert code == 0 and "note: the curve failed, and the work goes on (OSError: gone)" in err
    assert "\nvalid bits per dim" in out


def test_a_curve_goes_from_its_first_value_to_its_last():
    text = terminal_curve.drawn([10, 20, 30], [8.0, 4.0, float("nan")], "bits")
    first, *rows, axis, ends = text.splitlines()
    assert first == "bits of training batches" and "4.000" in rows[-1] and "8.000" in rows[0]
    columns = [row.partition("|")[2] for row in rows]
    assert columns[0].startswith("*") and len(columns[-1]) == terminal_curve.COLUMNS
    assert len(rows) == terminal_curve.ROWS and ends.endswith("step 20") and "step 10" in ends
    # Each column has one star, and they fall.
    places = [[i for i, row in enumerate(columns) if row[c : c + 1] == "*"] for c in range(64)]
    assert all(len(place) == 1 for place in places) and places == sorted(places)


def test_one_value_is_no_curve():
    text = terminal_curve.drawn([4, 8], [8.1512, float("nan")], "bits")
    assert text == "bits of training batches: 8.151 at step 4"


@pytest.mark.parametrize("values", [[], [float("inf")]])
def test_no_curve_without_a_finite_value(values):
    assert terminal_curve.drawn(list(range(len(values))), values, "bits").endswith(
        "no step was recorded"
    )

"""Lines of kept mass in a run's record, and of a split."""

import json
import sys
from functools import partial

import jax
import numpy as np
import pytest

from reformax.cli import hash_counts
from reformax.models.lm import TransformerLM
from reformax.ops import local, lsh, shared_qk
from reformax.training import kept_mass, loop, stages
from reformax.training.callbacks import Callback
from tests.layers import plain
from tests.training import tiny, worker

SIZES = dict(vocab_size=16, d_model=8, d_ff=8, n_heads=2, n_layers=2, dropout=0.1)
NEAR = local.local(chunk_len=4)
HASHED = partial(TransformerLM, **SIZES, attention_type=(NEAR, lsh.lsh(chunk_len=4, n_buckets=4)))
DENSE = partial(TransformerLM, **SIZES, attention_type=(NEAR, shared_qk.shared_qk()))
SETTINGS = dict(batch_size=4, eval_every=None, report_kept_mass_every=2)


def lines(folder):
    return [x for x in worker.record(folder) if x["tag"] == "kept_mass"]


@pytest.mark.slow
def test_a_run_records_what_hashing_keeps_in_stages_of_dense_attention_too(tmp_path):
    dense_first = [stages.Stage(until=3, model=DENSE, batch_size=8)]
    last = {}
    keep = Callback(on_evaluation=lambda *x: last.update(params=jax.device_get(x[2])))
    options = dict(steps=6, stages=dense_first, accumulate=2, callbacks=[keep])
    settings = worker.arguments(**SETTINGS, **options) | dict(model=HASHED)
    loop.train(tmp_path, **settings)
    found = lines(tmp_path)
    assert [x["step"] for x in found] == [2, 4, 6] and {x["split"] for x in found} == {"train"}
    for line in found:
        assert 0.2 < line["kept_mass"] == line["kept_mass_layer_2"] < 1
    assert len({x["kept_mass"] for x in found}) == 3
    events = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"train/kept_mass_layer_2" in events
    # The last line is of the last weights and of the last step's first micro-batch.
    model = HASHED(mode="train")
    batch = tiny.counting().train_batch(0, 5, 4, 16).inputs[::2]
    rng = jax.random.fold_in(jax.random.PRNGKey(0), 6)
    want = jax.jit(model.kept_mass)(last["params"], batch, rng)
    np.testing.assert_allclose(found[-1]["kept_mass_layer_2"], want[2], rtol=1e-6)


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_lines_of_one_that_never_stopped(tmp_path):
    for name, ends in {"once": [6], "twice": [4, 6]}.items():
        for steps in ends:
            settings = worker.arguments(**SETTINGS, steps=steps) | dict(model=HASHED)
            loop.train(tmp_path / name, **settings)
    first = [lines(tmp_path / name)[0] for name in ("once", "twice")]
    assert first[0] == first[1]
    assert [x["step"] for x in lines(tmp_path / "twice")] == [2, 4, 6]


@pytest.mark.slow
def test_the_kept_mass_of_a_split_is_the_mean_of_some_batches(monkeypatch):
    model, task = HASHED(mode="eval"), tiny.counting()
    params = plain.init(model, (2, 16))
    monkeypatch.setattr(kept_mass, "_BATCHES", 2)
    found = kept_mass.of_split(model, params, task, "valid", batch_size=2, length=16)
    batches = [b.inputs for b in task.eval_batches("valid", 2, 16, 16)]
    assert len(batches) == 7
    key, each = jax.random.PRNGKey(0), jax.jit(model.kept_mass)
    want = [each(params, batches[i], jax.random.fold_in(key, i))[2] for i in (0, 3)]
    assert found["kept_mass"] == pytest.approx(float(np.mean(want)), rel=1e-6)
    assert kept_mass.words(found) == (
        f"kept mass {found['kept_mass']:.4f}, by layer 2: {found['kept_mass_layer_2']:.4f}"
    )
    assert json.dumps(found)


@pytest.mark.slow
def test_rows_that_fill_up_a_batch_are_not_measured():
    model, task = HASHED(mode="eval"), tiny.counting()
    params = plain.init(model, (2, 16))
    (batch,) = task.eval_batches("valid", 13, 16, 16)
    sizes = dict(batch_size=29, length=16)  # two times 13 rows, and the first 3
    rows = batch.inputs[np.arange(29) % 13]
    want = jax.jit(model.kept_mass)(params, rows, jax.random.fold_in(jax.random.PRNGKey(0), 0))[2]
    found = kept_mass.of_split(model, params, task, "valid", **sizes)
    assert found["kept_mass"] == pytest.approx(float(want), rel=1e-5)


def test_a_model_that_measures_no_layer_is_scored_by_its_hashes_alone():
    measure = lambda model: kept_mass.named({})  # noqa: E731
    scores = {"bits": 1.0, "standard_error": 0.1}
    found = hash_counts.score(HASHED(mode="eval"), [2, 4], "bits", lambda model: scores, measure)
    assert found["by_n_hashes"][1] == {"n_hashes": 4, **scores} and found["fewest_n_hashes"] == 2
    assert hash_counts.table(found, "bits").startswith("| hashes | bits |\n| ---: | ---: |\n| 2 |")


def test_hashes_are_counted_by_the_model():
    model = HASHED(mode="eval").with_n_hashes(16)
    assert model.attention_type[0] == NEAR
    assert model.attention_type[1] == lsh.lsh(
        chunk_len=4, n_buckets=4, n_hashes=16, n_hashes_eval=16
    )
    assert DENSE(mode="eval").with_n_hashes(4) is None


def test_a_table_has_no_column_of_each_layer_where_the_terminal_is_narrow(tmp_path, monkeypatch):
    masses = {"kept_mass": 0.5} | {f"kept_mass_layer_{layer}": 0.5 for layer in range(24)}
    line = {"n_hashes": 2, "bits": 1.0, "standard_error": None, **masses}
    found = {"by_n_hashes": [line], "fewest_n_hashes": 2}
    monkeypatch.setenv("COLUMNS", "300")
    whole = hash_counts.table(found, "bits")
    assert "| layer 23 |" in whole.splitlines()[0]
    monkeypatch.setenv("COLUMNS", "120")
    head, _, _, note, _ = hash_counts.table(found, "bits").splitlines()
    assert head == "| hashes | bits | kept mass |"
    assert note == "kept mass of each of 24 layers: by_n_hashes of the file"
    monkeypatch.delenv("COLUMNS")
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "__stdout__", file)
        assert hash_counts.table(found, "bits") == whole

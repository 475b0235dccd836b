"""The examples run, and what they train learns."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


# `test_own_jax_model.py` trains a model of flax too, and a page's walk in CI.
@pytest.mark.slow
@pytest.mark.parametrize("name, package", [("train_minimal", "jax"), ("train_flax", "flax")])
def test_an_example_trains_evaluates_and_samples(name, package, capsys, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/NAME.py` has it
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bits = module.main(steps=20, batch_size=4, length=64, d_model=32)
    out = capsys.readouterr().out
    assert 3.0 < bits < 6.0  # 8 is that of any byte
    assert "step 1: " in out and "step 20: " in out and f"valid: {bits:.3f}" in out
    if name == "train_minimal":
        assert out.splitlines()[out.count("step ") + 1 :][0].startswith("def ")
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 75

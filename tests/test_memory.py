"""Sizes beyond the machine's memory are refused before they are computed."""

import jax
import jax.numpy as jnp
import pytest

from reformax import memory
from reformax.declared import SettingError
from reformax.generation import decoding
from reformax.models import TransformerLM
from reformax.training import loop
from tests.layers import plain
from tests.training import worker


def test_what_there_is():
    assert 2**28 < memory.available() < 2**60


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("123456\n")
    assert memory.available() == 123456
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() > 123456


def test_bytes_of_arrays_and_of_shapes():
    tree = {"a": jnp.zeros((3, 4), jnp.float32), "b": jax.ShapeDtypeStruct((10,), jnp.bfloat16)}
    assert memory.size_of(tree) == 48 + 20


@pytest.fixture
def small(monkeypatch):
    """A machine of a mebibyte."""
    monkeypatch.setattr(memory, "available", lambda: 2**20)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model": {"d_model": 4096}}, "parameters, their gradient and the optimizer's state take"),
        ({"batch_size": 2**13}, "tokens of 8,192 rows of 16 take .* lower batch_size or length"),
        ({"eval_length": 2**14}, "lower eval_batch_size or eval_length"),
        ({"model": {"d_model": 64}, "length": 300}, "features of 8 rows of 300 positions take"),
    ],
)
def test_training_that_does_not_fit(small, settings, message, tmp_path):
    with pytest.raises(SettingError, match=message) as error:
        loop.train(tmp_path, **worker.arguments(**settings))
    assert "\n" not in str(error.value) and not (tmp_path / "checkpoints" / "1").exists()


def test_training_that_fits(small, tmp_path):
    assert loop.train(tmp_path, **worker.arguments(steps=1))["step"] == 1


def test_caches_that_do_not_fit():
    sizes = dict(d_model=16, d_ff=16, n_heads=2, n_layers=1)
    model = TransformerLM(256, **sizes, mode="eval")
    params = plain.init(model, (1, 8))
    with pytest.raises(SettingError, match=r"caches of 1 rows of 2,147,483,647 tokens take .* GiB"):
        decoding.generate(model, params, [[1]], 4, max_length=2**31 - 1)

"""What a run will take is told before it takes it, and what cannot fit is refused."""

import re

import jax
import jax.numpy as jnp
import pytest

from reformax import memory
from reformax.declared import SettingError
from reformax.training import forecast, loop
from tests.training import tiny, worker

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))
ONE = 2 * 8 * 16 * 16  # additions and multiplications of X @ W


def products(function, *arguments):
    return forecast.products(jax.jit(function).trace(*arguments).jaxpr)


def test_products_of_matrices_are_counted():
    assert products(lambda x, w: x @ w, X, W) == (8 * 16 * 4, ONE)
    assert products(lambda x, w: (x @ w).T @ x, X, W) == (16 * 16 * 4, ONE + 2 * 16 * 8 * 16)
    assert products(lambda x, w: jnp.einsum("bx,xy->by", x.astype(jnp.bfloat16), w), X, W)[1] == ONE
    assert products(lambda x: x + 1, X) == (0, 0)
    looped = products(lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, 7)[0], X, W)
    assert looped == (8 * 16 * 4, 7 * ONE)
    either = products(lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x), X, W)
    assert either == (0, 0)
    nested = products(jax.checkpoint(jax.jit(lambda x, w: x @ w)), X, W)
    assert nested == (8 * 16 * 4, ONE)


def test_a_gradient_has_three_times_the_arithmetic():
    loss = jax.grad(lambda x, w: jnp.square(x @ w).sum(), argnums=(0, 1))
    assert products(loss, X, W)[1] == 3 * ONE


class Wide(tiny.TinyLM):
    """Has a hidden layer of 4,096 features."""

    def init_params(self, rng, shape):
        return super().init_params(rng, shape) | {"wide": jnp.ones((self.d_model, 4096))}

    def features(self, params, tokens, rng=None):
        x = super().features(params, tokens, rng)
        return jnp.tanh(x @ params["wide"]) @ params["wide"].T


# A hidden layer of 8 rows of 16 tokens takes 2 MiB; state and gradient take less than one.
WIDE = worker.arguments(steps=2, batch_size=8 * jax.device_count()) | {"model": Wide}


@pytest.mark.parametrize("which", ["largest product of a step", "compiled step"])
def test_a_step_that_cannot_fit_is_refused_before_it_runs(tmp_path, monkeypatch, which):
    monkeypatch.setattr(memory, "available", lambda: 2 * 2**20)
    if which == "compiled step":
        monkeypatch.setattr(forecast, "check_step", lambda *_: None)
    with pytest.raises(SettingError, match=f"state and the {which} take .* MiB or more") as error:
        loop.train(tmp_path, **WIDE)
    assert "\n" not in str(error.value) and "lower batch_size or length" in str(error.value)
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()


def test_what_a_compiled_step_asks_for():
    step = jax.jit(lambda x, w: jnp.tanh(x @ w) @ w.T, donate_argnums=0)
    asked = forecast.memory_of(step.trace(X, W).lower().compile(), 1)
    assert X.nbytes + W.nbytes <= asked < 10 * (X.nbytes + W.nbytes)


class Scaled(tiny.TinyLM):
    """Has a weight made of a Python number, which gives it a type that JAX calls weak."""

    def init_params(self, rng, shape):
        return super().init_params(rng, shape) | {"scale": jnp.full(self.d_model, 1.0)}

    def features(self, params, tokens, rng=None):
        return super().features(params, tokens, rng) * params["scale"]


def test_a_run_says_what_it_takes_and_compiles_its_step_once(tmp_path, capsys, caplog):
    with jax.log_compiles():
        settings = worker.arguments(progress=True, eval_every=None) | {"model": Scaled}
        loop.train(tmp_path, **settings)
    out = capsys.readouterr().out
    assert re.search(r"compiled in .*: a step takes \d+ KiB of .* GiB of memory\n", out)
    assert out.index("336 parameters") < out.index("compiled in")
    compiled = [x.message for x in caplog.records if x.message.startswith("Compiling")]
    assert sum("step" in message.split()[1] for message in compiled) == 1, compiled

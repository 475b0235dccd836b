"""Chunked cross-entropy equals the plain one, in less memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.training import loss


def problem(length, vocab=11, d=5, batch=3):
    keys = jax.random.split(jax.random.PRNGKey(length), 4)
    features = jax.random.normal(keys[0], (batch, length, d))
    matrix = jax.random.normal(keys[1], (d, vocab))
    targets = jax.random.randint(keys[2], (batch, length), 0, vocab)
    weights = jax.random.uniform(keys[3], (batch, length)).at[0, 0].set(0)
    return features, matrix, targets, weights


def plain(features, matrix, targets, weights):
    log_p = jax.nn.log_softmax(features @ matrix)
    nats = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    correct = (log_p.argmax(-1) == targets) * weights
    return (nats * weights).sum(), weights.sum(), correct.sum()


def chunked(features, matrix, targets, weights, chunk_len):
    return loss.cross_entropy(lambda f: f @ matrix, features, targets, weights, chunk_len)


@pytest.mark.parametrize("length, chunk_len", [(1, 1), (1, 5), (13, 5), (13, 13)])
def test_sums_and_gradients_equal_the_plain_ones(length, chunk_len):
    args = problem(length)

    @jax.jit
    def both(*args):
        sums = chunked(*args, chunk_len), plain(*args)
        grads = (
            jax.grad(lambda f, m: chunked(f, m, *args[2:], chunk_len).nats, (0, 1))(*args[:2]),
            jax.grad(lambda f, m: plain(f, m, *args[2:])[0], (0, 1))(*args[:2]),
        )
        return sums, grads

    (sums, expected_sums), (grads, expected_grads) = both(*args)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)


def test_chunks_bound_the_memory_of_the_gradient():
    args = problem(1024, vocab=256)

    def temp(chunk_len):
        gradient = jax.grad(lambda f, m: chunked(f, m, *args[2:], chunk_len).nats, (0, 1))
        compiled = jax.jit(gradient).lower(*args[:2]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(32) < temp(1024) / 4


def test_bad_chunk_len_is_told():
    with pytest.raises(ValueError, match="loss_chunk_len=0"):
        chunked(*problem(7), 0)


def test_bits_per_dim():
    assert loss.bits_per_dim(3 * math.log(2), 2) == pytest.approx(1.5)
    assert math.isnan(loss.bits_per_dim(1.0, 0.0))

"""The gradient of an indexer's loss in kernels, by lists and by tiles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.kernels.triton import indexer_gradient as kernel
from reformax.ops.kernels.triton import indexer_gradient_lists
from reformax.ops.numerics.logits import Logits
from tests.helpers import assert_trees_close

LENGTH, N_HEADS, SIZE, D_INDEX, N_CHOSEN = 150, 18, 8, 5, 70


def visible(rule, ids, key_ids):
    """Which keys a query sees."""
    n_keys = LENGTH // rule.span
    last = np.arange(n_keys) * rule.span + rule.span - 1
    mask = ids[:, :, None] == key_ids[:, None]
    mask &= (ids != 0)[:, :, None]
    return mask & (last <= np.arange(LENGTH)[:, None]) if rule.causal else mask


def lists(rng, mask):
    """Some of the keys that each query sees, in any order, between slots without one."""
    draws = np.where(mask, rng.random(mask.shape), 2)
    chosen = np.argsort(draws, axis=-1)[..., :N_CHOSEN]
    gone = np.take_along_axis(draws, chosen, axis=-1) > 0.8
    return np.where(gone, -1, chosen).astype(np.int32)


@pytest.mark.parametrize(
    "listed_cost, summed_cost",
    [(0, 1e9), (0, 0), pytest.param(1e9, 0, marks=pytest.mark.slow)],
    ids=["lists", "sums of lists", "tiles"],
)
@pytest.mark.parametrize(
    "rule, n_kv, packed, others",
    [
        (kernel.KeyRule(True, Logits(soft_cap=3.0)), 2, False, False),
        pytest.param(kernel.KeyRule(True, Logits(), 2), 1, True, True, marks=pytest.mark.slow),
        pytest.param(kernel.KeyRule(False, Logits()), 6, True, False, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_gradient_of_the_divergence(
    rule, n_kv, packed, others, listed_cost, summed_cost, monkeypatch
):
    """With other keys in the softmax, the attention to the listed ones is divided by its sum."""
    monkeypatch.setattr(kernel, "LISTED_COST", listed_cost)
    monkeypatch.setattr(kernel, "SUMMED_COST", summed_cost)
    monkeypatch.setattr(kernel.listed, "MAX_BYTES", 0)
    monkeypatch.setattr(kernel.listed, "LEAST_PAIRS", 128)
    monkeypatch.setattr(indexer_gradient_lists, "LIST_COLUMNS", 16)
    monkeypatch.setattr(indexer_gradient_lists, "MAX_PART_BYTES", 0)
    rng, n_keys = np.random.default_rng(0), LENGTH // rule.span

    def draw(*shape):
        return rng.normal(size=(2, *shape)).astype(np.float32)

    index = kernel.IndexerArrays(draw(LENGTH, 3, D_INDEX), draw(LENGTH, 3), draw(n_keys, D_INDEX))
    q, k = draw(LENGTH, N_HEADS, SIZE), draw(n_keys, n_kv, SIZE)
    ids = np.ones((2, LENGTH), np.int32)
    if packed:
        ids = np.repeat([[1, 2, 0], [3, 1, 1]], LENGTH // 3, axis=1)
    key_ids = ids[:, rule.span - 1 :: rule.span]
    mask = visible(rule, ids, key_ids)
    chosen = lists(rng, mask)
    mask &= (chosen[..., None] == np.arange(n_keys)).any(axis=2)

    products = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, N_HEADS // n_kv, axis=2))
    logits = np.asarray(jax.jit(rule.logits.capped)(products / math.sqrt(SIZE)))
    row_max = np.where(mask[:, None], logits, np.float32(-1e30)).max(axis=-1)
    weights = np.exp(np.where(mask[:, None], logits - row_max[..., None], -np.float32(np.inf)))
    row_sum = weights.sum(axis=-1)
    row_sum = row_sum + others * rng.random(row_sum.shape).astype(np.float32)
    total = (weights / np.where(row_sum == 0, 1, row_sum)[..., None]).sum(axis=1)
    share = total / np.where(total.sum(-1) == 0, 1, total.sum(-1))[..., None]

    def divergence(index):
        products = jnp.einsum("btjd,bsd->btjs", index.queries, index.keys)
        scores = jnp.einsum("btj,btjs->bts", index.weights, jax.nn.relu(products))
        found = jax.nn.log_softmax(jnp.where(mask, scores / math.sqrt(3 * D_INDEX), -1e30))
        return -jnp.where(mask, share * found, 0).sum()

    want = jax.jit(jax.grad(divergence))(index)
    attention = kernel.AttentionInputs(q, k, row_max, row_sum, total.sum(-1) if others else None)
    masks = (jnp.asarray(ids), jnp.asarray(key_ids)) if packed else (None, None)
    run = jax.jit(lambda *x: kernel.indexer_gradient(rule, True, *x))
    assert_trees_close(run(index, attention, chosen, *masks), want, 2e-5)

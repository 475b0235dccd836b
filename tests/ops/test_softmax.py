"""The softmax of rows over what they see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.kernels.triton import block_sparse, chunked
from reformax.ops.kernels.triton.common import matmul_in_parts
from reformax.ops.kernels.triton.recurrence_chunk import parts_of
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.logits import PLAIN
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout
from reformax.ops.softmax.online import Softmax, masked_softmax, softmax_over
from reformax.ops.softmax.orders import Chunking, UnsortedInputs


def test_logits_that_round_in_two_ways_are_no_nan():
    """A compiled program may compute a product twice, of which one is fused."""
    keys = jnp.array([-0.16693555, -0.47568884, -0.3640811, -0.20929329])
    seen = np.ones(4, bool)
    weights = jax.jit(lambda q: masked_softmax(q * keys, seen))(jnp.float32(3e38))
    assert weights.tolist() == [1, 0, 0, 0]


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.fixture(scope="module")
def parts():
    """The softmaxes of [2, 5] rows over three parts of their keys, and their attended values."""
    q, k, v = draw((2, 5, 32), (2, 12, 32), (2, 12, 3))
    mask = np.random.default_rng(1).random((2, 5, 12)) < 0.6
    mask[0, 0] = False  # a row without keys
    mask[0, 1, 4:] = False  # two parts without keys
    weights = np.exp(np.einsum("bqh,bkh->bqk", *map(np.float64, (q, k))) / 32**0.5) * mask
    total = weights.sum(-1, keepdims=True)
    want = np.einsum("bqk,bkv->bqv", weights / np.where(total == 0, 1, total), np.float64(v))
    found = []
    for keys in np.split(np.arange(12), 3):
        logits = PLAIN.of("bqh,bkh->bqk", q, k[:, keys])
        found.append(softmax_over(logits, mask[..., keys], "bqk,bkv->bqv", v[:, keys]))
    return found, want


def check(whole, want):
    np.testing.assert_allclose(whole.output(), want, rtol=1e-5, atol=1e-6)


def test_softmaxes_merge_two_by_two(parts):
    check(
        functools.reduce(Softmax.merge, parts[0], Softmax.empty((2, 5), 3, jnp.float32)), parts[1]
    )
    again = [Softmax.of_output(x.output(), *x[1:]) for x in parts[0]]
    check(functools.reduce(Softmax.merge, again), parts[1])


def test_softmaxes_merge_along_an_axis(parts):
    stacked = Softmax(*(jnp.stack(x, axis=1) for x in zip(*parts[0], strict=True)))
    check(stacked.merged(axis=1), parts[1])


def test_parts_that_do_not_exist_may_hold_anything(parts):
    nothing = Softmax(*(jnp.full_like(x, jnp.nan) for x in parts[0][0]))
    stacked = Softmax(*(jnp.stack(x, axis=2) for x in zip(*parts[0], nothing, strict=True)))
    check(stacked.merged(axis=2, where=jnp.arange(4) < 3), parts[1])


def test_softmaxes_merge_by_the_index_of_their_row(parts):
    found, want = parts
    dropped = Softmax(*(x + 100 for x in found[0]))
    flat = Softmax(
        *(jnp.concatenate([x[0] for x in all_]) for all_ in zip(*found, dropped, strict=True))
    )
    row = jnp.concatenate([jnp.arange(5)] * 3 + [jnp.full(5, 5)])
    check(flat.merged_at(row, 5), want[0])


def test_kernels_store_the_maximum_of_scaled_logits():
    q, k, v = draw(*[(1, 64, 1, 32)] * 3)
    logits = np.einsum("btnh,bsnh->bnts", *map(np.float64, (q, k))) / 32**0.5
    logits[..., ~np.tri(64, dtype=bool)] = -np.inf
    want = logits.max(-1)
    layout = FullLayout(64, 64, True, 0.0)
    _, row_max, row_sum = block_sparse.forward(
        layout, BlockInputs(q, k, v, None, None, None), interpret=True
    )
    np.testing.assert_allclose(row_max, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(row_sum, np.exp(logits - want[..., None]).sum(-1), rtol=1e-5)
    chunks = Chunking(64, 64, 0, 0, causal=True, shared_qk=False)
    _, row_max, _ = chunked.forward(
        chunks, UnsortedInputs(q, k, v, None, None, None), interpret=True
    )
    np.testing.assert_allclose(row_max, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("contract", ["10", "00", "11"])
@pytest.mark.parametrize(("n", "error"), [(2, 1e-4), (3, 3e-7)])
def test_products_in_parts_are_as_exact_as_their_parts(contract, n, error):
    a, b = draw((16, 16), (16, 16))
    found = matmul_in_parts(*(parts_of(x, n) for x in (a, b)), contract=contract)
    want = np.tensordot(np.float64(a), np.float64(b), (int(contract[0]), int(contract[1])))
    assert np.abs(found - want).max() < error * np.abs(want).max()


@pytest.mark.parametrize("n_best", [3, 6])
def test_the_best_are_the_first_of_equal_scores(n_best):
    scores = np.random.default_rng(0).integers(0, 4, (5, 9)).astype(np.float32)
    allowed = np.random.default_rng(1).random((5, 9)) < 0.7
    allowed[0] = False
    scores[1, 4], scores[2, 3] = np.nan, -np.float32(np.nan)
    allowed[1, 4] = allowed[2, 3] = True
    for row, seen, found in zip(scores, allowed, best_of(scores, allowed, n_best), strict=True):
        order = np.argsort(np.where(np.isnan(row), -np.inf, -row), kind="stable")
        want = [i for i in order if seen[i]][:n_best]
        assert found.tolist() == want + [-1] * (n_best - len(want))

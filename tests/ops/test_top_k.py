"""The kernel that chooses each row's largest scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.kernels.triton import top_k
from reformax.ops.kernels.triton.top_k import HIDDEN, HIGHEST

WIDTH = 512


def rows(rng, n):
    """Scores of many kinds: `[kinds, n, WIDTH]`."""
    shape = n, WIDTH
    numbers = rng.integers(HIDDEN + 1, HIGHEST, shape)

    def rarely(share, other):
        return np.where(rng.random(shape) < share, numbers, other)

    kinds = {
        "numbers": numbers,
        "few values": rng.integers(-2, 2, shape),
        "all equal": np.zeros(shape),
        "half of them zeros": rarely(0.5, 0),
        "ascending": np.sort(numbers, axis=-1),
        "most are hidden": rarely(0.1, HIDDEN),
        "a tenth are the highest": rarely(0.9, HIGHEST),
        "the first half is low": np.where(np.arange(WIDTH) < WIDTH // 2, -(2**30), numbers),
        "what the sample sees is low": np.where(np.arange(WIDTH) % 32 < 8, -(2**30), numbers),
        "what the sample sees is high": np.where(np.arange(WIDTH) % 32 < 8, 2**30, numbers // 2),
    }
    return np.stack([x.astype(np.int32) for x in kinds.values()])


def best(scores, n_best):
    """By a stable sort."""
    order = np.argsort(-scores.astype(np.int64), axis=-1, kind="stable")[..., :n_best]
    shown = np.take_along_axis(scores, order, axis=-1) > HIDDEN
    order = np.sort(np.where(shown, order, WIDTH), axis=-1)
    return np.where(order == WIDTH, -1, order)


@pytest.mark.parametrize(
    "n_best, causal, list_tile",
    [
        (16, False, 512),
        (60, True, 32),
        (300, True, 512),
        pytest.param(16, True, 16, marks=pytest.mark.slow),
        pytest.param(60, False, 512, marks=pytest.mark.slow),
        pytest.param(300, False, 128, marks=pytest.mark.slow),
    ],
)
def test_it_chooses_what_a_stable_sort_does(n_best, causal, list_tile, monkeypatch):
    """With bounds from samples that are good, bad or absent, and lists of one tile or several."""
    small = dict(SAMPLES=16, NEIGHBOURS=8, ROW_TILE=64, LIST_TILE=list_tile, MIN_LIST=32, MIN_ROW=0)
    for name, value in small.items():
        monkeypatch.setattr(top_k, name, value)
    n, start, span = 4, 1000, 3
    rule = top_k.RowRule(start + n - 1, 500, causal, span)
    scores = rows(np.random.default_rng(0), n)
    ends = np.array([int(rule.end(start + i)) for i in range(n)])
    assert ends[-1] == 0 and ends[0] == ((start + 1) // span if causal else 500)
    scores[:, np.arange(WIDTH) >= ends[:, None]] = HIDDEN
    run = jax.jit(lambda x, start: top_k.top_k(n_best, True, x, rule, start))
    got = run(scores, jnp.array([start], jnp.int32))
    np.testing.assert_array_equal(got, best(scores, n_best))

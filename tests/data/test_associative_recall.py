"""Multi-query associative recall."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reformax.data.associative_recall import (
    associative_recall,
    distinct,
    without_replacement,
)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 20),
    st.sampled_from((0.01, 1.0, 2.5)),
    st.integers(0, 2**63 - 1),
)
def test_each_key_comes_twice_with_its_value(n_pairs, more, power, seed):
    length = 4 * max(n_pairs) + 2 * more
    task = associative_recall(length, n_pairs, vocab_size=2048, power=power)
    batch = task.train_batch(seed, 3, 5, length)
    np.testing.assert_array_equal(batch.inputs, batch.targets)
    assert batch.inputs.shape == (5, length)
    assert (batch.inputs.dtype, batch.weights.dtype) == (np.int32, np.float32)
    for tokens, weights in zip(batch.inputs, batch.weights, strict=True):
        answers = np.nonzero(weights)[0]
        n = len(answers)
        assert n in n_pairs
        value_of = dict(zip(tokens[0 : 2 * n : 2], tokens[1 : 2 * n : 2], strict=True))
        assert len(value_of) == n
        assert min(value_of) >= 1 and max(value_of) < 1024 <= min(value_of.values())
        assert (answers >= 2 * n).all() and (answers % 2 == 1).all()
        assert {tokens[t - 1]: tokens[t] for t in answers} == value_of


def test_a_power_law_of_distances():
    """The first distances are as likely as they should be, to four standard errors."""
    length, n = 64, 4000
    for power in (0.2, 1.0):
        task = associative_recall(length, (1,), 64, power)
        weights = task.train_batch(0, 0, n, length).weights
        steps = (np.argmax(weights, axis=1) - 3) // 2
        likely = np.arange(1, 32) ** (power - 1)
        likely /= likely.sum()
        for step in (0, 1, 5):
            share, p = np.mean(steps == step), likely[step]
            assert abs(share - p) < 4 * np.sqrt(p * (1 - p) / n)


def test_draws_without_replacement_are_one_after_another():
    """The second draw is in proportion to what the first has left."""
    likely = np.array([0.6, 0.3, 0.1, 0.0])
    draws = without_replacement(np.random.default_rng(0), np.tile(likely, (20_000, 1)), 3)
    assert (np.sort(draws, axis=1) == [0, 1, 2]).all()
    first, second = draws[:, 0], draws[:, 1]
    assert abs(np.mean(first == 0) - 0.6) < 0.02
    assert abs(np.mean(second[first == 0] == 1) - 0.75) < 0.02


def test_distinct_numbers_are_every_ordered_choice_alike():
    """12 ordered pairs of 4 numbers, each as often as the others, to five standard errors."""
    n = 12_000
    drawn = distinct(np.random.default_rng(0), 4, n, 2)
    counts = np.bincount(4 * drawn[:, 0] + drawn[:, 1], minlength=16).reshape(4, 4)
    assert (np.diag(counts) == 0).all()
    others = counts[~np.eye(4, dtype=bool)]
    assert (np.abs(others - n / 12) < 5 * np.sqrt(n / 12)).all()
    whole = distinct(np.random.default_rng(0), 6, 3, 6)
    assert (np.sort(whole, axis=1) == np.arange(6)).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: associative_recall(15, (2,)), "length=15 must be even and at least 8"),
        (lambda: associative_recall(16, (2, 5)), "length=16 must be even and at least 20"),
        (lambda: associative_recall(16, ()), r"n_pairs is \(\): give the numbers of pairs"),
        (lambda: associative_recall(16, (0,)), "each a whole number of at least 1"),
        (lambda: associative_recall(64, (9,), 18), "vocab_size=18 must be at least 20"),
        (lambda: associative_recall(64, (9,), power=0), "power is 0: expected above 0"),
        (lambda: associative_recall().train_batch(0, 0, 1, 8), "associative_recall's own length"),
        (lambda: associative_recall().n_targets("train"), "must be one of valid, test"),
    ],
)
def test_errors_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()

"""The duplication task, 0w0w."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reformax.data.duplication import duplication


def check(batch, length, vocab_size):
    half, word = length // 2, length // 2 - 1
    np.testing.assert_array_equal(batch.inputs, batch.targets)
    np.testing.assert_array_equal(batch.inputs[:, :half], batch.inputs[:, half:])
    assert not batch.inputs[:, 0].any()
    assert batch.inputs[:, 1:half].min() >= 1
    assert batch.inputs.max() < vocab_size
    assert (batch.inputs.dtype, batch.weights.dtype) == (np.int32, np.float32)
    expected = [0.0] * (half + 1) + [1.0] * word
    np.testing.assert_array_equal(batch.weights, [expected] * len(batch.weights))


sizes = st.integers(2, 40).map(lambda half: 2 * half)


@given(sizes, st.integers(2, 300), st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(1, 5))
def test_training_examples(length, vocab_size, seed, step, batch_size):
    task = duplication(length, vocab_size)
    batch = task.train_batch(seed, step, batch_size, length)
    assert batch.inputs.shape == (batch_size, length)
    check(batch, length, vocab_size)
    again = duplication(length, vocab_size).train_batch(seed, step, batch_size, length)
    np.testing.assert_array_equal(again.inputs, batch.inputs)


def test_training_examples_are_fresh_and_uniform():
    task = duplication(64, 16)
    words = np.concatenate([task.train_batch(s, t, 8, 64).inputs for s in (0, 1) for t in (0, 1)])
    assert len(np.unique(words, axis=0)) == 32
    counts = np.bincount(words[:, 1:32].ravel(), minlength=16)[1:]
    assert counts.min() > 40  # 66 expected
    assert counts.max() < 100


def examples(task, split, batch_size, length):
    batches = list(task.eval_batches(split, batch_size, length, length))
    assert all(batch.inputs.shape == (batch_size, length) for batch in batches)
    scored = np.concatenate([batch.weights.any(axis=1) for batch in batches])
    return np.concatenate([batch.inputs for batch in batches])[scored], batches


@given(sizes, st.integers(1, 20), st.integers(1, 7))
def test_evaluation_is_a_fixed_set_whatever_the_batch(length, n_eval, batch_size):
    task = duplication(length, n_eval=n_eval)
    for split in ("valid", "test"):
        found, batches = examples(task, split, batch_size, length)
        assert len(found) == n_eval
        assert len(batches) == -(-n_eval // batch_size)
        np.testing.assert_array_equal(found, examples(task, split, 1, length)[0])
        assert sum(batch.weights.sum() for batch in batches) == task.n_targets(split)
    (batch,) = task.eval_batches("valid", n_eval, length, length)
    check(batch, length, 128)


def test_splits_share_no_example():
    task = duplication(32, n_eval=100)
    train = [task.train_batch(seed, 0, 100, 32).inputs for seed in range(3)]
    held_out = [examples(task, split, 100, 32)[0] for split in ("valid", "test")]
    assert len(np.unique(np.concatenate(train + held_out), axis=0)) == 500


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: duplication(length=7), "length=7 must be even and at least 4"),
        (lambda: duplication(length=2), "length=2 must be even and at least 4"),
        (lambda: duplication(vocab_size=1), "vocab_size is 1: expected at least 2"),
        (lambda: duplication(n_eval=0), "n_eval is 0: expected at least 1"),
        (lambda: duplication(8).train_batch(0, 0, 1, 16), "length=16 must be 8"),
        (lambda: duplication(8).train_batch(-1, 0, 1, 8), "seed=-1 must be from 0"),
        (lambda: duplication(8).train_batch(0, 0, 0, 8), "batch_size=0 must be at least 1"),
        (lambda: duplication(8).eval_batches("test", 1, 16, 16), "length=16 must be 8"),
        (lambda: duplication(8).eval_batches("test", 1, 8, 4), "stride=4 must be 8"),
        (lambda: duplication(8).eval_batches("test", 0, 8, 8), "batch_size=0 must be at least 1"),
        (lambda: duplication(8).eval_batches("train", 1, 8, 8), "must be one of valid, test"),
        (lambda: duplication(8).n_targets("dev"), "split='dev' must be one of valid, test"),
    ],
)
def test_errors_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()

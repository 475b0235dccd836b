"""The byte language model: its splits, its training windows, its evaluation windows."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reformax.data.base import byte_language_model, generator, split_bytes


def some_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def task_of(n, n_valid=1):
    return byte_language_model(
        "bytes", {"train": some_bytes(n), "valid": some_bytes(n_valid, 1), "test": some_bytes(1, 2)}
    )


@given(st.integers(20, 10_000))
def test_split_is_ninety_five_five_in_order(n):
    data = some_bytes(n)
    splits = split_bytes(data, "x")
    assert list(splits) == ["train", "valid", "test"]
    np.testing.assert_array_equal(np.concatenate(list(splits.values())), data)
    assert len(splits["valid"]) == len(splits["test"]) == int(n * 0.05 + 1e-9)


@pytest.mark.parametrize(
    "n, sizes",
    [(4_154_064, (3_738_658, 207_703, 207_703)), (10**8, (90_000_000, 5_000_000, 5_000_000))],
)
def test_split_sizes_of_enwik8_and_its_prefix(n, sizes):
    splits = split_bytes(np.broadcast_to(np.uint8(0), n), "x")
    assert tuple(map(len, splits.values())) == sizes


def test_too_short_to_split(fails_in_one_line):
    with fails_in_one_line(ValueError, "notes.txt: 19 bytes are too few"):
        split_bytes(some_bytes(19), "notes.txt")


@st.composite
def evaluations(draw):
    n = draw(st.integers(1, 200))
    length = draw(st.integers(1, 80))
    return n, draw(st.integers(1, 9)), length, draw(st.integers(1, length))


@given(evaluations())
@example((1, 1, 1, 1))
@example((7, 4, 80, 3))  # a split shorter than a window
@example((80, 2, 80, 80))  # one window
@example((81, 3, 80, 80))  # the last window is scored on one byte
@example((64, 4, 16, 16))  # no rounding anywhere
def test_evaluation_predicts_each_byte_once_with_enough_context(arguments):
    n, batch_size, length, stride = arguments
    task = task_of(50, n_valid=n)
    text = some_bytes(n, 1)
    scored = []
    for tokens, targets, weights in task.eval_batches("valid", batch_size, length, stride):
        np.testing.assert_array_equal(tokens, targets)
        assert tokens.shape == weights.shape == (batch_size, length)
        assert (tokens.dtype, weights.dtype) == (np.int32, np.float32)
        assert set(np.unique(weights)) <= {0.0, 1.0}
        for row, weight in zip(tokens, weights, strict=True):
            (at,) = np.nonzero(weight)
            if not len(at):
                continue  # fills the last batch
            begin = len(scored) - at[0]
            assert 0 <= begin <= max(0, n - length)
            # The rest of a window is context, and padding only if the split is too short.
            real = min(length, n)
            np.testing.assert_array_equal(row[:real], text[begin : begin + real])
            assert not row[real:].any()
            assert at[0] >= min(len(scored), length - stride)
            assert len(at) <= (stride if scored else length)
            scored += list(row[at])
    np.testing.assert_array_equal(scored, text)
    assert task.n_targets("valid") == n


@given(evaluations())
def test_evaluation_makes_no_more_batches_than_it_needs(arguments):
    n, batch_size, length, stride = arguments
    batches = list(task_of(50, n_valid=n).eval_batches("valid", batch_size, length, stride))
    windows = 1 + max(0, int(np.ceil((n - length) / stride)))
    assert len(batches) == int(np.ceil(windows / batch_size))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(1, 8), st.integers(1, 300))
def test_training_batch_is_a_pure_function_giving_windows_of_train(seed, step, batch_size, length):
    task, text = task_of(300), some_bytes(300).tobytes()
    batch = task.train_batch(seed, step, batch_size, length)
    assert batch.inputs.shape == batch.weights.shape == (batch_size, length)
    assert (batch.inputs.dtype, batch.weights.dtype) == (np.int32, np.float32)
    assert (batch.weights == 1).all()
    assert all(row.astype(np.uint8).tobytes() in text for row in batch.inputs)
    np.testing.assert_array_equal(batch.inputs, batch.targets)
    task.train_batch(seed, (step + 1) % 2**63, 3, 7)  # a call in between changes nothing
    np.testing.assert_array_equal(
        task.train_batch(seed, step, batch_size, length).inputs, batch.inputs
    )


def test_training_batches_differ_by_seed_and_by_step():
    task = task_of(100_000)
    keys = [(seed, step) for seed in range(4) for step in range(50)]
    assert len({task.train_batch(*key, 4, 16).inputs.tobytes() for key in keys}) == len(keys)


def test_training_windows_begin_everywhere():
    text = np.arange(12, dtype=np.uint8)
    task = byte_language_model("bytes", {"train": text, "valid": text, "test": text})
    starts = task.train_batch(0, 0, 2000, 5).inputs[:, 0]
    counts = np.bincount(starts)
    assert len(counts) == 8
    assert counts.min() > 180


def test_seed_and_step_are_not_interchangeable():
    assert generator(1, 2).integers(2**60) != generator(2, 1).integers(2**60)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: t.train_batch(0, 0, 1, 51), "length=51 must be at most 50, .*bytes trains on"),
        (lambda t: t.train_batch(0, 0, 0, 5), "batch_size=0 must be at least 1"),
        (lambda t: t.train_batch(0, 0, 1, 0), "length=0 must be at least 1"),
        (lambda t: t.train_batch(-1, 0, 1, 5), "seed=-1 must be from 0"),
        (lambda t: t.train_batch(0, 2**63, 1, 5), r"step=\d+ must be from 0"),
        (lambda t: t.eval_batches("dev", 1, 5, 5), "split='dev' must be one of train, valid, test"),
        (lambda t: t.n_targets("dev"), "split='dev' must be one of .*task bytes"),
        (lambda t: t.eval_batches("test", 1, 5, 6), "stride=6 must be at most length=5"),
        (lambda t: t.eval_batches("test", 1, 5, 0), "stride=0 must be at least 1"),
        (lambda t: t.eval_batches("test", 1, -5, 1), "length=-5 must be at least 1"),
        (lambda t: t.eval_batches("test", 0, 5, 5), "batch_size=0 must be at least 1"),
    ],
)
def test_errors_come_with_the_call_and_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call(task_of(50))

"""Tasks of labels: every example once, cut or padded, the same rows in any process."""

import numpy as np
import pytest

from reformax.data.labelled import labelled_task, padded
from reformax.task import Labels

SIZES = {"train": 9, "valid": 5}


def task(pairs=False, longest=None, in_order=False):
    """Example i of a split is i + 1 tokens i + 1, and its class is i % 3."""

    def examples(split, numbers):
        rows = padded([np.full(i + 1, i + 1, np.uint8) for i in numbers])
        return (rows, 2 * rows) if pairs else rows, numbers % 3

    return labelled_task(
        "counts", vocab_size=20, labels=Labels(3, pairs), sizes=SIZES, examples=examples,
        made_by=lambda split: f"{SIZES[split]} counts", longest=longest,
        in_order=in_order,
    )  # fmt: skip


@pytest.mark.parametrize("length", [2, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 7])
def test_an_evaluation_has_each_example_once(length, batch_size):
    batches = list(task().eval_batches("valid", batch_size, length, length))
    assert all(batch.inputs.shape == (batch_size, length) for batch in batches)
    assert all(batch.targets.shape == batch.weights.shape == (batch_size, 1) for batch in batches)
    inputs, targets, weights = (np.concatenate(x) for x in zip(*batches, strict=True))
    assert inputs.dtype == targets.dtype == np.int32 and weights.dtype == np.float32
    assert weights.sum() == task().n_targets("valid") == 5
    assert not weights[5:].any() and not inputs[5:].any()
    for i in range(5):
        row = ([i + 1] * (i + 1) + [0] * length)[:length]
        assert inputs[i].tolist() == row and targets[i] == i % 3


def test_pairs_have_two_documents():
    made = task(pairs=True)
    assert made.kind == "pairs"
    batch = made.train_batch(0, 3, 4, 9)
    np.testing.assert_array_equal(2 * batch.inputs.first, batch.inputs.second)
    assert batch.inputs.first.shape == (4, 9)


def test_a_step_draws_uniformly_and_a_process_makes_its_rows():
    made, rows = task(), np.array([1, 3])
    whole = made.train_batch(5, 2, 4, 9)
    part = made.train_rows(5, 2, 4, 9, rows)
    for got, want in zip(part, whole, strict=True):
        np.testing.assert_array_equal(got, want[rows])
    drawn = made.train_batch(0, 0, 4500, 9).inputs[:, 0]
    counts = np.bincount(drawn, minlength=10)[1:]
    assert counts.sum() == 4500 and np.abs(counts - 500).max() < 5 * np.sqrt(500)


def test_steps_in_order_go_round():
    made = task(in_order=True)
    steps = [made.train_batch(7, step, 6, 9) for step in range(3)]
    numbers = np.concatenate([batch.inputs[:, 0] for batch in steps]) - 1
    np.testing.assert_array_equal(numbers, (numbers[0] + np.arange(18)) % 9)
    assert len({int(made.train_batch(s, 0, 1, 9).inputs[0, 0]) for s in range(20)}) > 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: task(longest=9).train_batch(0, 0, 1, 8), "length=8 must be at least 9"),
        (lambda: task().eval_batches("valid", 1, 9, 4), "stride=4 must be length=9"),
        (lambda: task().eval_batches("test", 1, 9, 9), "must be one of train, valid"),
        (lambda: task().train_batch(0, 0, 0, 9), "batch_size=0 must be at least 1"),
        (lambda: task().n_targets("dev"), "split='dev' must be one of train, valid"),
    ],
)
def test_what_does_not_fit_is_refused(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()

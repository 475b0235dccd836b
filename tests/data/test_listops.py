"""Long ListOps: its lists are well formed and come to their labels."""

import numpy as np
import pytest

from reformax.data.listops import WORDS, listops, trees

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def parse(words):
    """The value of a list, its depth and the most arguments of an operation, with a stack."""
    stack, depth, most = [], 0, 0
    for i, word in enumerate(words):
        if word in OPERATIONS:
            stack.append((word, []))
            depth = max(depth, len(stack))
            continue
        value = word
        if word == "]":
            name, values = stack.pop()
            assert len(values) >= 2
            most, value = max(most, len(values)), OPERATIONS[name](values)
        if not stack:
            assert i == len(words) - 1
            return value, depth, most
        stack[-1][1].append(int(value))
    raise AssertionError("a list has no end")


@pytest.mark.parametrize("bounds", [(5, 40, 4, 5), (1, 200, 6, 3), (500, 2000, 10, 10)])
def test_a_list_comes_to_its_label(bounds):
    found = trees(np.random.default_rng(1), 600, *bounds)
    shortest, longest, max_depth, max_args = bounds
    assert len(found.rows) == len(found.values) > 20
    seen = set()
    for row, value in zip(found.rows, found.values, strict=True):
        assert shortest < len(row) < longest
        words = [WORDS[i] for i in row]
        got, depth, most = parse(words)
        assert got == value and 1 <= depth < max_depth and most <= max_args
        seen |= {*words, most}
    assert {*WORDS[1:], max_args} <= seen


def test_the_shares_of_the_grammar():
    # Roots: a quarter are operations, of 2 to 4 arguments and of four kinds alike.
    found = trees(np.random.default_rng(2), 4000, 1, 10**6, 2, 4)
    n = len(found.rows)
    assert abs(n - 1000) < 5 * np.sqrt(4000 * 3 / 16)
    for counts in (
        np.bincount([row[0] - 11 for row in found.rows], minlength=4),
        np.bincount([len(row) - 4 for row in found.rows], minlength=3),
    ):
        share = n / len(counts)
        assert np.abs(counts - share).max() < 5 * np.sqrt(share)


SMALL = dict(min_length=5, max_length=30, max_depth=3, max_args=4, n_train=40, n_eval=7)


def test_an_example_is_a_function_of_its_number(tmp_path):
    task = listops(**SMALL)
    assert task.kind == "labels" and task.labels.n_classes == 10 and task.vocab_size == 16
    batches = list(task.eval_batches("valid", 3, 32, 32))
    assert [int(batch.weights.sum()) for batch in batches] == [3, 3, 1]
    again = next(listops(**SMALL).eval_batches("valid", 7, 32, 32))
    joined = np.concatenate([batch.inputs for batch in batches])
    np.testing.assert_array_equal(joined[:7], again.inputs)
    other = next(listops(**SMALL, data_seed=1).eval_batches("valid", 7, 32, 32))
    test = next(task.eval_batches("test", 7, 32, 32))
    for unlike in (other, test):
        assert (unlike.inputs != again.inputs).any(axis=1).all()
    for _ in range(2):  # drawn, and read
        kept = next(listops(**SMALL, data_dir=str(tmp_path)).eval_batches("valid", 7, 32, 32))
        np.testing.assert_array_equal(kept.inputs, again.inputs)
        np.testing.assert_array_equal(kept.targets, again.targets)
    assert [path.name for path in tmp_path.iterdir()] == ["listops_5_30_3_4_0_valid_0.npz"]
    assert "data_seed=1" in listops(**SMALL, data_seed=1).fingerprint("train")


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match="expected a difference of 2 or more"):
        listops(min_length=10, max_length=11)
    with pytest.raises(ValueError, match="set max_depth or max_args higher, or other lengths"):
        listops(50, 60, max_depth=2, max_args=3).train_batch(0, 0, 1, 64)

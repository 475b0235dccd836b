"""The toy of translation: reverse a sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reformax.data.reverse import reverse


def check(batch, max_symbols, vocab_size):
    source, target, source_segment_ids, target_segment_ids = batch.inputs
    assert batch.targets is target and source.dtype == target.dtype == np.int32
    assert source_segment_ids.dtype == target_segment_ids.dtype == bool
    for row in zip(
        source, target, source_segment_ids, target_segment_ids, batch.weights, strict=True
    ):
        n = int(row[4].sum())
        word = row[0][: n - 1]
        assert 1 <= len(word) <= max_symbols and word.min() >= 3 and word.max() < vocab_size
        rest = [0] * (source.shape[1] - n)
        np.testing.assert_array_equal(row[0], [*word, 1, *rest])
        np.testing.assert_array_equal(row[1], [*word[::-1], 1, *rest])
        for part in row[2:]:
            np.testing.assert_array_equal(part, [1] * n + rest)


@given(st.integers(1, 20), st.integers(4, 300), st.integers(0, 2**63 - 1), st.integers(1, 5))
def test_training_pairs(max_symbols, vocab_size, seed, batch_size):
    length = max_symbols + 1 + seed % 3
    task = reverse(max_symbols, vocab_size)
    batch = task.train_batch(seed, 7, batch_size, length)
    assert batch.inputs.source.shape == batch.weights.shape == (batch_size, length)
    check(batch, max_symbols, vocab_size)
    again = reverse(max_symbols, vocab_size).train_batch(seed, 7, batch_size, length)
    np.testing.assert_array_equal(again.inputs, batch.inputs)


def test_training_pairs_are_fresh():
    batches = [reverse().train_batch(s, t, 64, 16).inputs.source for s in (0, 1) for t in (0, 1)]
    long = [tuple(row) for rows in batches for row in rows if row[5]]
    assert len(set(long)) == len(long) > 100


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_evaluation_is_a_fixed_set_with_its_sentences(split, batch_size):
    task = reverse(5, 12, n_eval=20)
    batches = list(task.eval_batches(split, batch_size, 9, 9))
    assert {batch.weights.shape for batch in batches} == {(batch_size, 9)}
    rows = [np.concatenate(parts) for parts in zip(*(b.inputs for b in batches), strict=True)]
    assert sum(batch.weights.sum() for batch in batches) == task.n_targets(split)
    sources, references = task.translation.sentences(split)
    assert len(sources) == len(references) == 20
    vocabulary = task.translation.vocabulary
    for side, sentences in zip(rows[:2], (sources, references), strict=True):
        assert [vocabulary.decode(ids) for ids in side[:20].tolist()] == sentences
        assert not side[20:].any()
        for ids, sentence in zip(side[:20].tolist(), sentences, strict=True):
            assert vocabulary.encode(sentence) == ids[: ids.index(1) + 1]
    assert [s.split()[::-1] for s in sources] == [r.split() for r in references]


def test_splits_share_no_draw():
    task = reverse(30, 100)
    splits = [set(task.translation.sentences(split)[0]) for split in ("valid", "test")]
    assert len(splits[0] & splits[1]) < 20  # words of one or two symbols


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: reverse(0), "max_symbols is 0: expected at least 1"),
        (lambda: reverse(vocab_size=3), "vocab_size is 3: expected at least 4"),
        (lambda: reverse(n_eval=0), "n_eval is 0: expected at least 1"),
        (lambda: reverse(8).train_batch(0, 0, 1, 8), "length=8 must be above 8"),
        (lambda: reverse(8).train_batch(-1, 0, 1, 9), "seed=-1 must be from 0"),
        (lambda: reverse(8).train_batch(0, 0, 0, 9), "batch_size=0 must be at least 1"),
        (lambda: reverse(8).eval_batches("test", 1, 9, 4), "stride=4 must be length=9"),
        (lambda: reverse(8).eval_batches("train", 1, 9, 9), "must be one of valid, test"),
        (lambda: reverse(8).n_targets("dev"), "split='dev' must be one of valid, test"),
        (lambda: reverse().translation.vocabulary.encode("3 x"), "'x' is no id of this model"),
        (lambda: reverse().translation.vocabulary.encode("3 32"), "give numbers from 3 to 31"),
        (lambda: reverse().translation.vocabulary.encode("1"), "'1' is no id of this model"),
    ],
)
def test_errors_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()

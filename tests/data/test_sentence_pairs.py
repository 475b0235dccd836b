"""Packing holds every pair once, apart and in its place; batches are a function of (seed, step)."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reformax.data.packing import pack
from reformax.data.sentence_pairs import sentence_pairs
from reformax.data.vocabulary import SentencePieces

LETTERS = list("abcdefghijkl")


def text(n, longest, seed):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(LETTERS, rng.integers(1, longest + 1))) for _ in range(n)]


TRAIN = text(300, 14, 1), text(300, 14, 2)
TEST = text(40, 30, 3), text(40, 30, 4)
SENTENCES = {"train": TRAIN, "valid": (TEST[0][:7], TEST[1][:7]), "test": TEST}


def make(sentences=SENTENCES):
    def training_text():
        return [*sentences["train"][0], *sentences["train"][1]]

    # Pieces are single letters and the mark of a word's start: n letters are n + 2 tokens.
    vocabulary = SentencePieces(16, training_text, model_type="char")
    return sentence_pairs("letters", sentences.__getitem__, vocabulary)


TASK = make()


def pairs_of(batch, vocabulary):
    """The sentences of a batch, read segment by segment, and whether the rows are well formed."""
    source, target, *segment_ids = batch.inputs
    assert batch.targets is target
    np.testing.assert_array_equal(batch.weights, segment_ids[1] > 0)
    found = []
    for row in range(len(source)):
        for side, ids in zip((source, target), segment_ids, strict=True):
            n = int((ids[row] > 0).sum())
            assert not side[row, n:].any() and side[row, :n].all()
            steps = np.diff(ids[row, :n])
            assert n == 0 or (
                ids[row, 0] == 1 and set(steps) <= {0, 1} and (ids[row, :n] > 0).all()
            )
        assert segment_ids[0][row].max() == segment_ids[1][row].max()
        for k in range(1, segment_ids[0][row].max() + 1):
            pair = [side[row][ids[row] == k] for side, ids in zip(batch.inputs, segment_ids)]  # noqa: B905
            assert all((part == 1).sum() == 1 and part[-1] == 1 for part in pair)
            found.append(tuple(vocabulary.decode(part) for part in pair))
    return found


def of(split):
    return sorted(zip(*SENTENCES[split], strict=True))


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 10))
def test_pack_puts_each_pair_in_one_row_that_holds_it(n, length, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, size=(n + 3, 2))
    chosen = rng.permutation(n + 3)[:n]
    rows = pack(lengths, chosen, length)
    assert sorted(rows.items) == sorted(chosen) and rows.starts[0] == 0
    assert rows.starts[-1] == n and (np.diff(rows.starts) > 0).all()
    for begin, end in zip(rows.starts, rows.starts[1:], strict=False):
        assert (lengths[rows.items[begin:end]].sum(axis=0) <= length).all()


def test_packing_is_dense():
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(3.2, 0.6, 20_000), 1, 256).astype(int)
    target = np.clip(source * rng.lognormal(0, 0.2, 20_000), 1, 256).astype(int)
    lengths = np.stack([source, target], axis=1)
    n_rows = len(pack(lengths, rng.permutation(20_000), 256))
    assert lengths.sum(axis=0).min() / (n_rows * 256) > 0.94


def test_an_epoch_has_every_pair_once_and_the_next_in_another_order():
    vocabulary = TASK.translation.vocabulary
    batches = [TASK.train_batch(5, step, 1, 32) for step in range(1000)]
    found, epochs = [], []
    for batch in batches:
        assert batch.inputs.source.shape == batch.weights.shape == (1, 32)
        found += pairs_of(batch, vocabulary)
        if len(found) == 300:
            epochs.append(found)
            found = []
    assert len(epochs) > 2
    for epoch in epochs:
        assert sorted(epoch) == of("train")
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("batch_size, length", [(1, 17), (4, 64), (50, 64)])
def test_batches_are_pure_and_go_through_the_rows(batch_size, length):
    """A large batch is several small ones joined, across the ends of epochs too."""
    fresh = make()
    steps = (0, 3, 40, 2**40)
    for step in steps:
        batch = TASK.train_batch(7, step, batch_size, length)
        for a, b in zip(
            batch.inputs, fresh.train_batch(7, step, batch_size, length)[0], strict=True
        ):
            np.testing.assert_array_equal(a, b)
        singles = [TASK.train_batch(7, step * batch_size + i, 1, length) for i in range(batch_size)]
        joined = np.concatenate([single.inputs.target for single in singles])
        np.testing.assert_array_equal(batch.targets, joined)
    other = TASK.train_batch(8, 0, batch_size, length)
    assert not np.array_equal(other.targets, TASK.train_batch(7, 0, batch_size, length).targets)


@pytest.mark.parametrize("batch_size, length", [(1, 8), (3, 20), (8, 64)])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_evaluation_scores_every_pair_once_however_long(split, batch_size, length, caplog):
    with caplog.at_level(logging.WARNING):
        batches = list(TASK.eval_batches(split, batch_size, length, length))
    vocabulary = TASK.translation.vocabulary
    found = [pair for batch in batches for pair in pairs_of(batch, vocabulary)]
    assert sorted(found) == of(split)
    assert sum(batch.weights.sum() for batch in batches) == TASK.n_targets(split)
    tokens = [max(map(len, map(vocabulary.encode, pair))) for pair in of(split)]
    n_long = sum(n > length for n in tokens)
    assert {batch.targets.shape[0] for batch in batches} == {batch_size}
    widths = {batch.targets.shape[1] for batch in batches}
    assert all(width // length in (1, 2, 4) and width % length == 0 for width in widths)
    assert (max(widths) > length) == (n_long > 0) == bool(caplog.messages)
    if n_long:
        assert f"{n_long:,} of {len(tokens):,} {split} pairs are longer than" in caplog.messages[0]


def test_what_training_leaves_out_is_counted(caplog):
    sentences = SENTENCES | {"train": (["ab", "", "c" * 30, "d"], ["ef", "gh", "i", " "])}
    task = make(sentences)
    with caplog.at_level(logging.WARNING):
        batches = [task.train_batch(0, step, 2, 16) for step in range(2)]
    empty, long = caplog.messages
    assert "letters: 2 of 4 training pairs have an empty side and are left out" in empty
    assert "letters: 1 of 2 training pairs are longer than length=16 tokens and are left" in long
    assert {p for b in batches for p in pairs_of(b, task.translation.vocabulary)} == {("ab", "ef")}


def test_an_empty_line_of_a_test_set_stays():
    task = make(SENTENCES | {"test": (["ab", ""], ["", "cd"])})
    (batch,) = task.eval_batches("test", 1, 16, 16)
    assert sorted(pairs_of(batch, task.translation.vocabulary)) == [("", "cd"), ("ab", "")]
    assert task.translation.sentences("test") == (["ab", ""], ["", "cd"])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: TASK.train_batch(0, 0, 1, 2), "length=2 must be at least"),
        (lambda: TASK.train_batch(0, 0, 0, 20), "batch_size=0 must be at least 1"),
        (lambda: TASK.train_batch(0, -1, 1, 20), "step=-1 must be from 0"),
        (lambda: TASK.eval_batches("test", 1, 20, 4), "stride=4 must be length=20"),
        (lambda: TASK.eval_batches("dev", 1, 20, 20), "split='dev' must be one of train, valid"),
        (lambda: TASK.translation.sentences("dev"), "split='dev' must be one of train, valid"),
        (lambda: make({"train": ([""], ["a"])}).n_targets("train"), "every training pair has an"),
    ],
)
def test_errors_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()


def test_a_fingerprint_tells_where_lines_end():
    def found(*sources):
        sides = list(sources), ["x"] * len(sources)
        return make({"train": sides}).fingerprint("train")

    assert found("ab", "c") == found("ab", "c") != found("a", "bc")

"""Rows with hidden tokens: which are chosen, what stands in their place, and a run on them."""

import numpy as np
import pytest

from reformax.data import base, labelled, listops, mixture, reverse, text
from reformax.data.masked import masked
from reformax.data.rng import philox
from reformax.models import TransformerMaskedLM
from reformax.task import Labels
from reformax.training import evaluation
from tests.layers import plain

SMALL = dict(min_length=5, max_length=30, max_depth=3, max_args=4, n_train=400, n_eval=9)


@pytest.fixture(scope="module")
def both():
    own = listops.listops(**SMALL)
    return own, masked(own, 32, rate=0.3)


def test_the_shares_are_those_of_bert(both):
    own, task = both
    assert task.kind == "masked" and task.vocab_size == own.vocab_size + 1
    rows = own.train_batch(3, 1, 400, 32).inputs
    inputs, targets, weights = task.train_batch(3, 1, 400, 32)
    np.testing.assert_array_equal(targets, rows)
    chosen = weights > 0
    assert not chosen[rows == 0].any()
    np.testing.assert_array_equal(inputs[~chosen], rows[~chosen])
    n, n_tokens = chosen.sum(), (rows > 0).sum()
    assert abs(n - 0.3 * n_tokens) < 5 * np.sqrt(0.21 * n_tokens)
    is_mask = inputs[chosen] == own.vocab_size
    # One of 15 random tokens is the one that was there.
    stays = inputs[chosen] == rows[chosen]
    for found, share in ((is_mask, 0.8), (stays, 0.1 + 0.1 / 15)):
        assert abs(found.sum() - share * n) < 5 * np.sqrt(share * (1 - share) * n)
    assert inputs[chosen].min() >= 1
    other = task.train_batch(3, 2, 400, 32)
    assert (other.weights != weights).any()


@pytest.mark.parametrize("batch_size", [1, 4, 9, 16])
def test_an_evaluation_hides_the_same_tokens_in_any_batches(both, batch_size):
    own, task = both
    batches = list(task.eval_batches("valid", batch_size, 32, 32))
    weights = np.concatenate([batch.weights for batch in batches])
    assert weights.sum() == task.n_targets("valid") > 0 and not weights[9:].any()
    whole = next(task.eval_batches("valid", 9, 32, 32))
    np.testing.assert_array_equal(weights[:9], whole.weights)
    inputs = np.concatenate([batch.inputs for batch in batches])
    np.testing.assert_array_equal(inputs[:9], whole.inputs)
    rows = next(own.eval_batches("valid", 9, 32, 32)).inputs
    np.testing.assert_array_equal(whole.targets, rows)


def test_a_mixture_hides_the_same_tokens_in_any_batches(tmp_path):
    """Each of its texts fills its last batch, so that a row's index depends on the batches."""
    for name, n in (("a", 40), ("b", 60)):
        (tmp_path / name).write_text("the cat sat on the mat, and the dog ran after it.\n" * n)
    texts = [text.text(tmp_path / name, offset=1) for name in "ab"]
    task = masked(mixture.mixture(texts, (1, 2)), 32)
    found = []
    for batch_size in (1, 3, 4):
        batches = list(task.eval_batches("train", batch_size, 32, 32))
        inputs = np.concatenate([batch.inputs[batch.inputs.any(axis=1)] for batch in batches])
        found.append(inputs)
        n_hidden = sum(batch.weights.sum() for batch in batches)
        assert n_hidden == task.n_targets("train")
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_drew_the_rows_does_not_choose_their_tokens():
    """A row of `stdlib_packages` is drawn by a generator of its number, as its choice is."""

    def examples(split, numbers):
        drawn = [philox(2**63, 2**32 * base.SPLITS.index(split) + n).random() for n in numbers]
        return np.array([[1 + int(10 * x), 1] for x in drawn]), np.zeros(len(numbers))

    sizes = dict.fromkeys(base.SPLITS, 400)
    options = dict(vocab_size=11, labels=Labels(1), sizes=sizes, made_by=str)
    task = masked(labelled.labelled_task("drawn", examples=examples, **options), 2, rate=0.5)
    (batch,) = task.eval_batches("valid", 400, 2, 2)
    is_low, chosen = batch.targets[:, 0] <= 5, batch.weights[:, 0] > 0
    assert abs((is_low == chosen).sum() - 200) < 5 * np.sqrt(100)


def test_a_document_mask_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the cat sat on the mat.\n" * 9)
    task = text.text(tmp_path, offset=1, document_mask=True)
    with pytest.raises(ValueError, match=r"document_mask is True \(task text\): hidden tokens are"):
        masked(task, 32)


def test_a_model_of_hidden_tokens_is_scored(both):
    task = both[1]
    sizes = dict(n_layers=1, d_model=8, d_ff=8, n_heads=1)
    model = TransformerMaskedLM(task.vocab_size, **sizes, mode="eval")
    params = plain.init(model, (4, 32))
    found = evaluation.evaluate(model, params, task, batch_size=4, length=32)
    assert found["n_targets"] == task.n_targets("valid") and 0 < found["bits_per_dim"] < 20


def test_windows_of_a_text(tmp_path, fails_in_one_line):
    """Of bytes and of pieces: every token of a split is in one window, the end in two."""
    path = tmp_path / "it.txt"
    path.write_text("the cat sat on the mat, and the dog ran after it.\n" * 80)
    for options, size in ((dict(offset=1), 257), (dict(vocab_size=280), 280)):
        own = text.text(path, **options)
        task = masked(own, 32, rate=0.5)
        assert task.kind == "masked" and task.vocab_size == own.vocab_size + 1 == size + 1
        if own.vocabulary is not None:
            task.vocabulary.keep_in(tmp_path, begun=False)
        windows = list(own.eval_batches("valid", 4, 32, 32))
        batches = list(task.eval_batches("valid", 4, 32, 32))
        for window, batch in zip(windows, batches, strict=True):
            np.testing.assert_array_equal(batch.targets, window.inputs)
            assert not batch.weights[window.weights == 0].any()
        n_hidden = sum(batch.weights.sum() for batch in batches)
        assert n_hidden == task.n_targets("valid")
        assert abs(n_hidden / own.n_targets("valid") - 0.5) < 0.2
        its_own = masked(own, 32, rate=0.5, mask_id=5)
        assert its_own.vocab_size == own.vocab_size
        np.testing.assert_array_equal(
            its_own.train_batch(0, 1, 4, 32).inputs == 5,
            np.isin(task.train_batch(0, 1, 4, 32).inputs, [5, size]),
        )
        assert its_own.fingerprint("train") == task.fingerprint("train") + ", mask_id=5"
        with fails_in_one_line(ValueError, "^stride=16 must be length=32: "):
            task.eval_batches("valid", 4, 32, 16)
        batch = task.train_batch(0, 1, 4, 32)
        np.testing.assert_array_equal(batch.targets, own.train_batch(0, 1, 4, 32).inputs)
        assert (batch.inputs == size).any()


def test_windows_in_turn_are_taken_so(tmp_path):
    """A run of stages asks for the order; an end that two windows have is hidden in one alone."""
    (tmp_path / "it.txt").write_bytes(bytes(range(1, 101)))
    own = text.text(tmp_path / "it.txt", offset=1, windows="each_once")
    task = masked(own, 32, rate=1.0)
    assert task.in_order and not masked(text.text(tmp_path / "it.txt", offset=1), 32).in_order
    batches = [task.train_batch(0, step, 1, 32) for step in range(3)]  # 90 tokens
    assert sum(batch.weights.sum() for batch in batches) == own.n_targets("train") == 90


def test_what_does_not_fit_is_refused(both, fails_in_one_line):
    own, task = both
    for call, message in (
        (lambda: masked(reverse.reverse(), 32), "is neither a text nor single rows with lab"),
        (lambda: masked(own, 32, rate=0.0), "rate is 0.0: expected"),
        (lambda: masked(own, 32, mask_id=own.vocab_size), "mask_id is .*: expected an id below"),
        (lambda: task.train_batch(0, 0, 1, 31), "length=31 must be 32, masked.masked.length"),
        (lambda: task.eval_batches("dev", 1, 32, 32), "split='dev' must be one of"),
        (lambda: task.n_targets("dev"), "split='dev' must be one of"),
    ):
        with fails_in_one_line(ValueError, message):
            call()

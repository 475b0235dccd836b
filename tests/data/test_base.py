"""The byte language model: its splits, its training windows, its evaluation windows."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reformax.data import base
from reformax.data import windows as window_lib
from reformax.data.base import WindowSettings, byte_language_model, split_borders, split_bytes
from reformax.data.rng import generator, permuted
from reformax.data.windows import document_starts


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
    batches = list(task.eval_batches("valid", batch_size, length, stride))
    n_windows = 1 + max(0, int(np.ceil((n - length) / stride)))
    assert len(batches) == int(np.ceil(n_windows / batch_size))
    for tokens, targets, weights in batches:
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


def test_windows_that_begin_anywhere_are_those_of_the_first_numbers_of_a_step():
    """A run goes on with the batches that it began with."""
    batch = task_of(300).train_batch(3, 7, 64, 10)
    starts = generator(3, 7).integers(291, size=64)
    text = some_bytes(300)
    np.testing.assert_array_equal(batch.inputs, [text[i : i + 10] for i in starts])


def times_seen(sizes, length):
    """Of documents of such sizes: how often windows begin, and a token is a target, on average."""
    n, borders = sum(sizes), np.cumsum([0, *sizes[:-1]])
    places, back = np.indices((n, length)).reshape(2, -1)
    starts = document_starts(borders, n, length, places, back)
    assert starts.min() >= 0 and starts.max() <= n - length
    begins = np.bincount(starts, minlength=n) / length
    return begins, np.convolve(begins, np.ones(length))[:n] / length


@st.composite
def texts(draw):
    """Documents of about 10 windows of text together, and the length of a window."""
    length = draw(st.integers(1, 12))
    size = st.one_of(
        st.integers(1, 3),
        st.integers(1, length),
        st.integers(max(1, length - 1), length + 2),
        st.integers(1, 4 * length),
    )
    sizes = draw(st.lists(size, min_size=2, max_size=30))
    return [*sizes, draw(st.integers(2 * length, 4 * length))], length


@given(texts())
@example(([12, 1, 12, 12, 1, 36], 12))  # a short one behind one of a window
@example(([18, 37, 6, 8, 2, 2, 2, 11, 24], 12))
@example(([13, 13, 13, 24], 12))  # a little longer than a window
def test_by_documents_each_token_is_a_target_about_equally_often(arguments):
    """`document_starts` states the bounds; the numbers are exact, no sample."""
    sizes, length = arguments
    begins, seen = times_seen(sizes, length)
    assert seen.mean() == pytest.approx(1)
    inner = seen[length : len(seen) - length]
    assert inner.min() >= 3 / 8 and inner.max() <= 2
    first = 0
    for size in sizes:
        if 2 * length < size <= len(seen) - length - first:  # the last window ends the text
            np.testing.assert_allclose(seen[first + length : first + size - length], 1)
        first += size


@given(texts())
def test_by_documents_windows_begin_with_those_that_fit(arguments):
    sizes, length = arguments
    begins, _ = times_seen(sizes, length)
    first, n = 0, sum(sizes)
    for size in sizes:
        inside = begins[first + 1 : min(first + size, n - length)]  # the last window ends the text
        if size <= length:
            assert not inside.any()
        elif first + size <= n - length:
            assert inside.sum() == pytest.approx(size - (length + 1) / 2)
            np.testing.assert_allclose(inside[: size - length], 1)
        first += size


def documents_task(windows="documents", offset=0, document_mask=False):
    """A text whose byte is the number of its document: sizes 5, 60, 1, 30 and 104."""
    sizes = [5, 60, 1, 30, 104]
    text = np.repeat(np.arange(5, dtype=np.uint8), sizes)
    borders = dict.fromkeys(("train", "valid", "test"), np.cumsum([0, *sizes[:-1]]))
    splits = {"train": text, "valid": text[:70], "test": text[:9]}
    return byte_language_model(
        "bytes", splits, offset, borders, WindowSettings(windows, document_mask)
    )


@pytest.mark.parametrize("windows", ["anywhere", "documents"])
def test_a_document_mask_numbers_the_documents_of_training_windows(windows):
    """A byte is the number of its document here, so a row's segments are its tokens."""
    plain, masked = (documents_task(windows, 2, mask) for mask in (False, True))
    batch, want = masked.train_batch(5, 6, 500, 30), plain.train_batch(5, 6, 500, 30)
    assert masked.document_mask and not plain.document_mask
    assert batch.inputs.tokens is batch.targets
    np.testing.assert_array_equal(batch.targets, want.inputs)
    np.testing.assert_array_equal(batch.weights, want.weights)
    tokens, segment_ids = batch.inputs
    np.testing.assert_array_equal(segment_ids, tokens - tokens[:, :1] + 1)
    assert segment_ids.dtype == np.int32 and set(segment_ids.max(axis=1)) == {1, 2, 3}
    rows = np.array([3, 4, 90])
    own = masked.train_rows(5, 6, 500, 30, rows)
    np.testing.assert_array_equal(own.inputs.segment_ids, segment_ids[rows])


@pytest.mark.parametrize("length, stride", [(30, 30), (30, 7), (80, 80)])
def test_a_document_mask_changes_no_target_of_an_evaluation(length, stride):
    """Padding of a short split, and rows that fill a batch, are of no document."""
    sizes = 4, length, stride
    batches, want = (
        list(documents_task(document_mask=mask).eval_batches("valid", *sizes))
        for mask in (True, False)
    )
    assert len(batches) == len(want)
    for batch, plain in zip(batches, want, strict=True):
        np.testing.assert_array_equal(batch.targets, plain.inputs)
        np.testing.assert_array_equal(batch.weights, plain.weights)
        tokens, segment_ids = batch.inputs
        real = (np.arange(length) < 70) & plain.weights.any(axis=1, keepdims=True)
        np.testing.assert_array_equal(segment_ids, np.where(real, tokens - tokens[:, :1] + 1, 0))


def test_a_document_mask_is_part_of_the_fingerprint():
    plain, masked = (documents_task(document_mask=mask) for mask in (False, True))
    assert masked.fingerprint("valid") == plain.fingerprint("valid") + ", document_mask=True"


def test_batches_by_documents_are_windows_of_them_and_processes_make_their_own_rows():
    task = documents_task(offset=2)
    batch = task.train_batch(5, 6, 500, 30)
    np.testing.assert_array_equal(batch.inputs, task.train_batch(5, 6, 500, 30).inputs)
    assert (batch.inputs != task.train_batch(5, 7, 500, 30).inputs).any()
    rows = np.array([3, 4, 90])
    np.testing.assert_array_equal(task.train_rows(5, 6, 500, 30, rows).inputs, batch.inputs[rows])
    assert (batch.weights == 1).all() and batch.inputs.shape == (500, 30)
    document, at_begin = batch.inputs[:, 0] - 2, (batch.inputs == batch.inputs[:, :1]).sum(1)
    assert (at_begin[document == 0] == 5).all() and (at_begin[document == 3] == 30).all()
    assert set(document) == {0, 1, 2, 3, 4}
    anywhere = documents_task("anywhere", 2).train_batch(5, 6, 500, 30)
    assert (anywhere.inputs != batch.inputs).any()


def test_borders_behind_the_end_of_a_split_are_left_out():
    task = documents_task()
    assert list(task.borders("train")) == [0, 5, 65, 66, 96]
    assert list(task.borders("valid")) == [0, 5, 65, 66]
    assert list(task.borders("test")) == [0, 5]
    with pytest.raises(ValueError, match="split='dev' must be one of"):
        task.borders("dev")
    assert task_of(50).borders is None


def test_borders_are_split_as_the_text_is(fails_in_one_line):
    parts = {"train": np.arange(10), "valid": np.arange(4), "test": np.arange(3)}

    def split(**begins):
        found = split_borders({s: np.array(x) for s, x in begins.items()}, parts)
        return found and [list(found[s]) for s in ("train", "valid", "test")]

    assert split(train=[0, 3, 9, 10, 12, 16]) == [[0, 3, 9], [0, 2], [2]]
    assert split(train=[0, 3, 12], test=[0, 1]) == [[0, 3], [2], [0, 1]]
    assert split(train=[0, 3], valid=[0], test=[0]) == [[0, 3], [0], [0]]
    assert split(train=[0]) is None


@pytest.mark.parametrize("borders", [None, [0], [0, 60]])
def test_windows_by_documents_need_documents(borders, fails_in_one_line):
    borders = borders and dict.fromkeys(("train", "valid", "test"), np.array(borders))
    splits = dict.fromkeys(("train", "valid", "test"), some_bytes(50))
    with fails_in_one_line(ValueError, "windows is 'documents': the text .* one document, give"):
        byte_language_model("bytes", splits, 0, borders, WindowSettings("documents"))
    with fails_in_one_line(ValueError, "document_mask is True: the text .* one document, give"):
        byte_language_model("bytes", splits, 0, borders, WindowSettings(document_mask=True))


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


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_a_permutation_has_every_place_once(n):
    for seed in range(3):
        found = permuted(np.arange(n), n, np.random.default_rng(seed))
        assert sorted(found) == list(range(n))
    others = permuted(np.arange(n), n, np.random.default_rng(9))
    assert n < 17 or (found != others).any() and (found != np.arange(n)).any()
    large = permuted(np.array([0, 10**12 - 1]), 10**12, np.random.default_rng(0))
    assert large[0] != large[1] and (large >= 0).all() and (large < 10**12).all()


def test_a_permutation_mixes():
    """Neighbours go anywhere: distances are as those of random places."""
    found = permuted(np.arange(10**5), 10**5, np.random.default_rng(0))
    for lag in (1, 2, 256):
        distance = np.abs(found[lag:] - found[:-lag]).mean() / 10**5
        assert 0.31 < distance < 0.36  # 1/3
    assert abs(np.corrcoef(found, np.arange(10**5))[0, 1]) < 0.02


@pytest.mark.parametrize("n, length, batch_size", [(1000, 16, 7), (96, 16, 4), (50, 50, 1)])
def test_each_token_is_a_target_once_an_epoch(n, length, batch_size):
    text = np.random.default_rng(0).integers(0, 256, 3 * n).astype(np.uint8)
    splits = {"train": text[:n], "valid": text[n : 2 * n], "test": text[2 * n :]}
    task = base.byte_language_model("bytes", splits, windows=WindowSettings("each_once"))
    anywhere = base.byte_language_model("bytes", splits)
    assert task.in_order and not anywhere.in_order
    n_windows = -(-n // length)
    counts = []
    for epoch in range(2):
        count = np.zeros(n, int)
        for number in range(epoch * n_windows, (epoch + 1) * n_windows):
            step, row = divmod(number, batch_size)
            batch = task.train_rows(5, step, batch_size, length, np.array([row]))
            (start,), (first,) = window_lib.each_once(n, length, 5, np.array([number]))
            assert np.array_equal(batch.targets[0], text[start : start + length])
            assert batch.weights[0].sum() == length - first
            count[start : start + length] += batch.weights[0].astype(int)
        counts.append(count)
    assert all((count == 1).all() for count in counts)
    starts = [
        window_lib.each_once(n, length, 5, e * n_windows + np.arange(n_windows))[0] for e in (0, 1)
    ]
    assert n_windows < 9 or (starts[0] != starts[1]).any()
    whole = task.train_batch(5, 3, batch_size, length)
    for row in range(batch_size):
        one = task.train_rows(5, 3, batch_size, length, np.array([row]))
        assert np.array_equal(one.targets[0], whole.targets[row])

"""Several texts as one task, by weights."""

import numpy as np
import pytest

from reformax.data.duplication import duplication
from reformax.data.in_context import in_context
from reformax.data.mixture import mixture
from reformax.data.reverse import reverse
from reformax.data.text import text
from reformax.data.token_ids import token_ids
from reformax.data.vocabulary import FILE

LENGTH = 16


@pytest.fixture
def texts(tmp_path):
    """A text of small letters, and one of large ones."""
    rng = np.random.default_rng(0)
    for name, first in (("small", 97), ("large", 65)):
        (tmp_path / f"{name}.txt").write_bytes(
            (first + rng.integers(0, 26, 5000)).astype(np.uint8).tobytes()
        )
    return tmp_path / "small.txt", tmp_path / "large.txt"


def test_rows_are_of_each_text_by_its_weight(texts):
    small, large = map(text, texts)
    task = mixture((small, large), (3, 1.0))
    n_small = 0
    for step in range(100):
        batch = task.train_batch(4, step, 8, LENGTH)
        of_texts = [one.train_batch(4, step, 8, LENGTH).targets for one in (small, large)]
        is_small = batch.targets[:, 0] >= 97
        n_small += is_small.sum()
        assert (batch.targets == np.where(is_small[:, None], *of_texts)).all()
        assert batch.inputs is batch.targets and (batch.weights == 1).all()
        rows = np.array([6, 1, 2])
        part = task.train_rows(4, step, 8, LENGTH, rows)
        assert (part.targets == batch.targets[rows]).all()
    assert 540 < n_small < 660  # of 800, three quarters: 600
    assert (
        task.train_batch(5, 0, 8, LENGTH).targets != task.train_batch(4, 0, 8, LENGTH).targets
    ).any()


def test_a_task_that_makes_whole_batches_gives_its_rows():
    tasks = duplication(LENGTH), duplication(LENGTH, vocab_size=128)
    batch, *wholes = (one.train_batch(4, 1, 8, LENGTH) for one in (mixture(tasks, (1, 1)), *tasks))
    for row, *of_tasks in zip(batch.targets, *(whole.targets for whole in wholes), strict=True):
        assert any(np.array_equal(row, one) for one in of_tasks)


def test_held_out_text_is_that_of_all(texts, content):
    small, large = map(text, texts)
    task = mixture((small, large), (1.0, 1.0))
    assert content(task, "test") == content(small, "test") + content(large, "test")
    assert task.n_targets("valid") == small.n_targets("valid") + large.n_targets("valid")
    assert task.of_bytes and task.vocab_size == 256
    other = mixture((small, large), (2.0, 1.0))
    assert task.fingerprint("train") != other.fingerprint("train")
    assert task.fingerprint("valid") == other.fingerprint("valid")  # whose scores compare
    assert [line.partition(" of rows: ")[0] for line in task.summary()] == ["50.0%", "50.0%"]


def test_pieces_share_the_vocabulary_of_the_first(texts, tmp_path):
    options = {"vocab_size": 290, "max_held_out": 50}
    task = mixture(tuple(text(path, **options) for path in texts), (1.0, 1.0))
    kept = task.vocabulary.keep_in(tmp_path, begun=False)
    alone = text(texts[0], **options)
    assert alone.vocabulary.keep_in(tmp_path, begun=True) == kept
    decoded = [task.vocabulary.decode(x) for x in task.train_batch(0, 0, 32, 4).targets.tolist()]
    assert any(x.islower() for x in decoded) and any(x.isupper() for x in decoded)
    assert task.n_bytes("test") == 100


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_ids_without_a_vocabulary_are_of_the_others(texts, tmp_path, order):
    (tmp_path / "ids.bin").write_bytes(np.arange(280, dtype=np.uint16).tobytes())
    ids = token_ids(tmp_path / "ids.bin", 290).replace(fingerprint=None)
    pieces = text(texts[0], vocab_size=290, max_held_out=50)
    task = mixture((pieces, ids)[order], (1.0, 1.0))
    assert task.fingerprint is None
    assert task.vocabulary.keep_in(tmp_path, begun=False) and (tmp_path / FILE).exists()


def test_documents_stay_apart(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one of them"}\n' * 99)
    tasks = [text(tmp_path / f"{name}.jsonl", document_mask=True) for name in "ab"]
    batch = mixture(tuple(tasks), (1.0, 1.0)).train_batch(0, 0, 4, 40)
    assert batch.inputs.segment_ids.shape == (4, 40) and batch.inputs.segment_ids.max() > 2


def test_what_does_not_mix_is_told(texts, fails_in_one_line):
    small, large = map(text, texts)
    rows = [
        ((small, large), (1.0,), "weights has 1 numbers and tasks 2: give one for each text"),
        ((), (), "weights has 0 numbers and tasks 0"),
        ((small, reverse()), (1.0, 1.0), "task reverse is no text: give texts"),
        ((small, text(texts[1], offset=1)), (1.0, 1.0), "vocab_size is 256 of text and 257 of tex"),
        ((text(texts[0], windows="each_once"),), (1.0,), "takes its rows in turn, and a mixture"),
        ((small, large), (1.0, 0.0), "weights"),
        ((small, mixture((small, large), (1, 1))), (1, 1), "task mixture is a mixture itself: giv"),
        (
            (small, in_context(mixture((small, large), (1, 1)))),
            (1, 1),
            "task in_context is a mixture itself",
        ),
    ]
    for tasks, weights, message in rows:
        with fails_in_one_line(ValueError, message):
            mixture(tasks, weights)

"""Rows of a text with tasks in context."""

import re

import numpy as np
import pytest

from reformax.data import in_context, question_words, questions
from reformax.data.associative_recall import associative_recall
from reformax.data.chats import chats
from reformax.data.text import text
from reformax.task import Documents

LENGTH = 4_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A text of numbered lines, in three files."""
    folder = tmp_path_factory.mktemp("texts")
    for name in "abc":
        lines = (f"Line {i} of {name}, and nothing that one could ask for.\n" for i in range(4_000))
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


def decoded(ids):
    return bytes(ids.astype(np.uint8)).decode()


def facts(text):
    """(key, value) of every sentence of a fact for training."""
    found = []
    for template in question_words.TRAINING.fact:
        pattern = re.escape(template).replace(r"\{\}", "{}").format(r"([a-z ]+?)", r"(\d{7})")
        found += re.findall(pattern, text)
    return found


def test_an_answer_of_a_needle_is_what_is_hidden_in_the_row_s_own_text(source):
    task = in_context.in_context(text(source), share=1.0, tasks=("needles",), answer_weight=5.0)
    batch, plain = (one.train_batch(3, 7, 4, LENGTH) for one in (task, text(source)))
    assert batch.inputs is batch.targets and batch.targets.dtype == np.int32
    for row, weights, before in zip(batch.targets, batch.weights, plain.targets, strict=True):
        whole = decoded(row)
        found = facts(whole)
        answers = re.findall(r"\d{7}", "".join(decoded(row[weights == 5.0])))
        hidden = set(found)  # in parts of a row a key may come again
        assert len(answers) >= questions.N_ASKED and len(answers) % questions.N_ASKED == 0
        assert len(found) == len(hidden) + len(answers)  # each key is hidden, and may be asked for
        assert {*weights} == {1.0, 5.0} and set(answers) <= {x for _, x in hidden}
        # The rest is the row's text, in its order.
        rest = [line for line in whole.split("\n") if line.startswith("Line")]
        assert len(rest) > 20 and all(line in decoded(before) for line in rest[:-1])


@pytest.mark.parametrize("name", questions.KINDS)
def test_every_kind_marks_its_answers(source, name):
    task = in_context.in_context(text(source), share=1.0, tasks=(name,), answer_weight=2.0)
    batch = task.train_batch(0, 0, 2, LENGTH)
    assert batch.targets.shape == (2, LENGTH)
    for row, weights in zip(batch.targets, batch.weights, strict=True):
        marked = weights == 2.0
        answers = [decoded(x) for x in np.split(row, np.flatnonzero(np.diff(marked)) + 1)]
        answers = answers[1 if not marked[0] else 0 :: 2]
        whole = decoded(row)
        assert answers and all(x.endswith(".") for x in answers)
        for one in answers:  # what is asked for was said before
            words = re.findall(r"\w+", one)
            assert all(len(re.findall(rf"\b{word}\b", whole)) >= 2 for word in words)


def test_rows_are_a_function_of_their_number_and_a_share_has_tasks(source):
    task, plain = in_context.in_context(text(source), share=0.3), text(source)
    whole = task.train_batch(1, 2, 60, 1_000)
    same = (whole.targets == plain.train_batch(1, 2, 60, 1_000).targets).all(axis=1)
    assert 30 < same.sum() < 54  # of 60, seven tenths: 42
    rows = np.array([7, 3, 50])
    part = task.train_rows(1, 2, 60, 1_000, rows)
    np.testing.assert_array_equal(part.targets, whole.targets[rows])
    np.testing.assert_array_equal(part.weights, whole.weights[rows])
    again = task.train_batch(1, 3, 60, 1_000)
    assert (again.targets != whole.targets).any(axis=1).all()


def test_held_out_text_is_the_text_s_own(source, content):
    task, plain = in_context.in_context(text(source), share=1.0), text(source)
    assert content(task, "valid") == content(plain, "valid")
    assert task.fingerprint("valid") == plain.fingerprint("valid")
    assert task.fingerprint("train") == (
        f"{plain.fingerprint('train')}; 1 of rows with {', '.join(questions.KINDS)} of 512 tokens "
        "and more, answers weighted 1"
    )
    assert task.of_bytes and task.summary()[0] == plain.summary()[0]


def test_a_row_of_documents_with_tasks_is_one(source):
    given = text(source, document_mask=True, windows="documents")
    found = in_context.in_context(given, share=0.5).train_batch(0, 0, 16, 2_000)
    plain = given.train_batch(0, 0, 16, 2_000)
    assert isinstance(found.inputs, Documents) and found.inputs.tokens is found.targets
    changed = (found.targets != plain.targets).any(axis=1)
    assert 2 < changed.sum() < 14 and (found.inputs.segment_ids[changed] == 1).all()
    np.testing.assert_array_equal(
        found.inputs.segment_ids[~changed], plain.inputs.segment_ids[~changed]
    )


def test_pieces_have_tasks_too(source, tmp_path):
    given = text(source, vocab_size=300, max_held_out=1_000)
    task = in_context.in_context(given, share=1.0, tasks=("needle",), answer_weight=2.0)
    task.vocabulary.keep_in(tmp_path, begun=False)
    batch = task.train_batch(0, 0, 2, 600)
    for row, weights in zip(batch.targets, batch.weights, strict=True):
        whole = task.vocabulary.decode(row.tolist())
        answer = task.vocabulary.decode(row[weights == 2.0].tolist())
        ((_, value), *_) = facts(whole)
        assert value in answer and whole.count(value) == 2


@pytest.mark.parametrize("name", questions.FILLING)
@pytest.mark.parametrize("words", [False, True])
def test_what_fills_a_text_fills_its_part(name, words):
    def encode(text):  # names of five letters differ in tokens
        found = re.findall(r"[A-M]+|[a-z]+|\d{1,3}|.|\n", text) if words else text
        return np.array([len(x) for x in found], np.int32)

    for seed in range(8):
        rng = np.random.default_rng(seed)
        tokens, _, n_read = in_context._part(name, np.zeros(0, int), 2_000, rng, encode, None)
        assert 1_800 < len(tokens) <= 2_000 and n_read == 0


def test_kinds_that_do_not_fit_leave_the_row_to_those_that_do(source):
    names = ("needle", "variables")
    task = in_context.in_context(text(source), share=1.0, tasks=names, answer_weight=2.0)
    batch = task.train_batch(0, 0, 16, 520)  # variables have more
    assert (batch.weights == 2.0).any(axis=1).all()


def test_a_row_too_short_for_a_task_is_text(source):
    task = in_context.in_context(text(source), share=1.0, least_length=64)
    plain = text(source).train_batch(0, 0, 2, 63)
    np.testing.assert_array_equal(task.train_batch(0, 0, 2, 63).targets, plain.targets)
    one = in_context.in_context(text(source), share=1.0, tasks=("variables",), least_length=64)
    np.testing.assert_array_equal(one.train_batch(0, 0, 2, 63).targets, plain.targets)
    assert one.train_batch(0, 0, 2, 300).targets.shape == (2, 300)  # its sentences have more


def some_chats(source):
    """Rows of questions and answers, most tokens of which have no weight."""
    file = source.parent / f"{source.name}.jsonl"
    file.write_text('{"prompt": "Who?", "answer": "I."}\n' * 20)
    return chats(file)


@pytest.mark.parametrize(
    "given, options, message",
    [
        (some_chats, {}, "task is chats, whose rows have tokens that are not predicted: give a te"),
        (lambda source: associative_recall(length=16, n_pairs=(2,)), {}, "whose ids are no bytes"),
        (lambda source: text(source), dict(tasks=()), r"tasks is \(\): give some of needle"),
        (lambda source: text(source), dict(tasks=("neddle",)), "tasks is .*neddle"),
        (lambda source: text(source), dict(share=2.0), "share is 2.0: expected"),
        (lambda source: text(source), dict(answer_weight=0.0), "answer_weight is 0.0: expected"),
    ],
)
def test_what_has_no_tasks_is_refused(source, given, options, message):
    with pytest.raises(ValueError, match=message):
        in_context.in_context(given(source), **options)

"""Needles: what is hidden where, and that a model which reads is told from one which guesses."""

import re

import numpy as np
import pytest

from reformax.evals import needles
from reformax.evals.likelihood import Likelihood


def encode(text):
    return list(text.encode())


HIDDEN = re.compile(r"The number of (\w+) is (\d{7})\. ")


@pytest.mark.parametrize("n_needles", needles.TASKS.values())
def test_a_question_asks_for_a_number_of_its_text_at_its_depth(n_needles):
    asked = needles.questions(n_needles, 11, 2_000, encode, seed=0)
    assert [one.depth for one in asked] == pytest.approx(np.linspace(0, 1, 11))
    for one in asked:
        assert 2_000 - 30 <= len(encode(one.text + one.answer)) <= 2_000
        hidden = dict(HIDDEN.findall(one.text))
        assert len(hidden) == len(set(hidden.values())) == n_needles
        name = re.search(r"The number of (\w+) is$", one.text)[1]
        assert one.answer == f" {hidden[name]}."
        before = HIDDEN.sub("", one.text[: one.text.index(f"of {name} is {hidden[name]}")])
        filler = HIDDEN.sub("", one.text)
        assert len(before) / len(filler) == pytest.approx(one.depth, abs=0.05)
    assert len({one.answer for one in asked}) == 11
    assert asked == needles.questions(n_needles, 11, 2_000, encode, seed=0)
    assert asked != needles.questions(n_needles, 11, 2_000, encode, seed=1)


class Reader:
    """Answers with a number of the text that it sees the end of."""

    max_length = 1_000

    def __init__(self, sees, chooses):
        self.sees, self.chooses = sees, chooses

    def likelihoods(self, pairs):
        for context, answer in pairs:
            text = bytes(context).decode()
            name = re.search(r"The number of (\w+) is$", text)[1]
            hidden = dict(HIDDEN.findall(text[-self.sees :]))
            found = self.chooses(hidden, name)
            yield Likelihood(-1.0, bytes(answer).decode() == f" {found}.")


def by_name(hidden, name):
    return hidden.get(name)


@pytest.mark.parametrize("name", needles.TASKS)
def test_a_reader_finds_all_and_one_that_sees_half_finds_the_last_half(name):
    found = needles.score(Reader(1_000, by_name), encode, name, n=20)
    assert found["accuracy"] == 1 and found["accuracy_by_depth"] == [1] * 5
    half = needles.score(Reader(500, by_name), encode, name, n=20)
    assert half["accuracy_by_depth"][0] == 0 and half["accuracy_by_depth"][4] == 1
    assert 0.3 < half["accuracy"] < 0.7


def test_of_many_needles_any_is_not_the_one():
    first = Reader(1_000, lambda hidden, name: next(iter(hidden.values())))
    assert needles.score(first, encode, "needle", n=20)["accuracy"] == 1
    assert needles.score(first, encode, "needles", n=20)["accuracy"] < 0.5


def test_a_text_shorter_than_its_needles_is_refused():
    with pytest.raises(ValueError, match="length is 100: the needles alone have 2"):
        needles.questions(8, 3, 100, encode, seed=0)
    assert len(needles.questions(1, 1, 100, encode, seed=0)) == 1

"""Common words: that one is the most frequent, and that only who counts them all knows it."""

import collections
import re

import pytest

from reformax.evals import common_words
from reformax.evals.likelihood import Likelihood


def encode(text):
    return list(text.encode())


def counts(text):
    return collections.Counter(re.findall(r"\w+", text.partition(":")[2].rpartition(". The")[0]))


def test_the_answer_is_the_word_that_is_listed_most():
    asked = common_words.questions(9, 2_000, encode, seed=0)
    n_round = len(common_words.WORDS) - 1 + common_words.TIMES
    for one in asked:
        found = counts(one.text)
        times = min(found.values())
        assert set(found) == set(common_words.WORDS) and times > 5
        most, *others = (n for _, n in found.most_common())
        assert most == common_words.TIMES * times and set(others) == {times}
        assert one.answer == f" {found.most_common(1)[0][0]}."
        assert 2_000 - 10 * n_round < len(encode(one.text + one.answer)) <= 2_000
    assert len({one.answer for one in asked}) > 4
    assert asked == common_words.questions(9, 2_000, encode, seed=0)
    assert asked != common_words.questions(9, 2_000, encode, seed=1)


class Reader:
    """Answers with a word of the text, by the counts of what it reads."""

    max_length = 2_000

    def __init__(self, chooses):
        self.chooses = chooses

    def likelihoods(self, pairs):
        for context, answer in pairs:
            found = self.chooses(bytes(context).decode())
            yield Likelihood(-1.0, bytes(answer).decode() == f" {found}.")


def test_who_counts_is_right_and_who_reads_the_last_word_is_not():
    counting = Reader(lambda text: counts(text).most_common(1)[0][0])
    found = common_words.score(counting, encode, 40)
    assert found == {"accuracy": 1.0, "n_questions": 40, "length": 2_000}
    last = Reader(lambda text: re.findall(r"(\w+)\. The most", text)[0])
    assert common_words.score(last, encode, 40)["accuracy"] < 0.5
    a_tenth = Reader(lambda text: counts(f":{text[-230:]}").most_common(1)[0][0])
    assert common_words.score(a_tenth, encode, 40)["accuracy"] < 0.5


def test_a_text_shorter_than_a_round_is_refused():
    with pytest.raises(ValueError, match="length is 100: the words of a round alone have 2"):
        common_words.questions(3, 100, encode, seed=0)

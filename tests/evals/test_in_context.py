"""Accuracy on questions by length and depth: who reads is told from who guesses."""

import re

import pytest

from reformax.data.question_words import HELD_OUT
from reformax.data.questions import KINDS, Hay, checksum
from reformax.evals import in_context, likelihood
from reformax.evals.likelihood import LanguageScorer, Likelihood
from reformax.models import lm
from reformax.ops import local
from tests.layers import plain


def encode(text):
    return list(text.encode())


FACT = [
    re.escape(x).replace(r"\{\}", "{}").format("([a-z]+ [a-z]+)", r"(\d{7})") for x in HELD_OUT.fact
]


class Reader:
    """Answers with a number of the text that it sees the end of."""

    def __init__(self, sees, chooses):
        self.sees, self.chooses, self.lengths = sees, chooses, []

    def likelihoods(self, pairs, least):
        for context, answer in pairs:
            self.lengths.append(len(context) + len(answer))
            text = bytes(context).decode()
            hidden = dict(pair for fact in FACT for pair in re.findall(fact, text[-self.sees :]))
            key = re.search(r"([a-z]+ [a-z]+) (is|was)$", text)[1]
            found = self.chooses(hidden, key)
            yield Likelihood(-1.0, bytes(answer).decode() == f" {found}.")


def scored(*arguments):
    """The figures of all lengths."""
    *_, figures = in_context.score(*arguments)
    return figures


def by_key(hidden, key):
    return hidden.get(key)


@pytest.mark.parametrize("name", ["needle", "needles"])
def test_a_reader_finds_all_and_one_that_sees_half_finds_the_last_half(name):
    settings = in_context.QuestionSettings((1_000, 2_000), n_questions=20)
    reader = Reader(2_000, by_key)
    found = scored(reader, encode, name, settings)
    assert found["accuracy"] == 1 and found["n_questions"] == 20
    short, long = found["by_length"]
    assert (short["length"], long["length"]) == (1_000, 2_000)
    assert short["accuracy_by_depth"] == long["accuracy_by_depth"] == [1] * 5
    assert max(reader.lengths[:20]) <= 1_000 < min(reader.lengths[20:]) <= 2_000
    half = scored(Reader(1_000, by_key), encode, name, settings)
    assert half["by_length"][0]["accuracy"] == 1
    depths = half["by_length"][1]["accuracy_by_depth"]
    assert depths[0] == 0 and depths[4] == 1
    assert half["accuracy"] == pytest.approx((1 + half["by_length"][1]["accuracy"]) / 2)
    assert 0.3 < half["by_length"][1]["accuracy"] < 0.7
    assert half["by_length"][1]["standard_error"] == pytest.approx(0.11, abs=0.01)


def test_of_many_needles_any_is_not_the_one():
    first = Reader(1_000, lambda hidden, key: next(iter(hidden.values())))
    settings = in_context.QuestionSettings((1_000,), n_questions=20)
    assert scored(first, encode, "needle", settings)["accuracy"] == 1
    assert scored(first, encode, "needles", settings)["accuracy"] < 0.5


def test_questions_differ_by_text_and_seed_and_the_checksum_tells():
    settings = in_context.QuestionSettings((1_000,), n_questions=3, n_depths=2)
    reader = Reader(1_000, by_key)
    lines = [
        scored(reader, encode, "needle", one)["by_length"][0]
        for one in (
            settings,
            settings._replace(seed=1),
            settings._replace(hay=Hay.of_text("a line\n" * 9)),
        )
    ]
    assert len({line["checksum"] for line in lines}) == 3
    assert lines[0]["checksum"] == checksum(in_context.questions(settings, "needle", 1_000, encode))
    assert len(lines[0]["accuracy_by_depth"]) == 2
    few = scored(reader, encode, "needle", settings._replace(n_questions=1, n_depths=5))
    assert few["by_length"][0]["accuracy_by_depth"] == [None, None, 1, None, None]


def test_an_answer_in_several_places_has_no_depth():
    class Knows:
        def likelihoods(self, pairs, least):
            return [Likelihood(0.0, True) for _ in pairs]

    settings = in_context.QuestionSettings((1_500,), n_questions=2)
    for name in KINDS:
        (line,) = scored(Knows(), encode, name, settings)["by_length"]
        spread = name in ("multi_value", "multi_query", "variables", "common_words")
        assert ("accuracy_by_depth" not in line) == spread, name
    assert in_context.names_of("ruler") == list(KINDS) and in_context.names_of("copy") == ["copy"]


def scorer_of(max_length):
    sizes = dict(d_model=8, d_ff=8, n_heads=1, n_layers=1)
    model = lm.TransformerLM(256, attention_type=local.local(chunk_len=64), mode="eval", **sizes)
    return LanguageScorer(model, plain.init(model, (1, 8)), max_length)


def test_all_kinds_of_a_length_are_of_one_program():
    """Whatever the lengths of questions and answers."""
    text = "".join(f"{'a long line ' * (i % 30)}\n" for i in range(400))
    settings = in_context.QuestionSettings((1_500, 3_000), n_questions=3, hay=Hay.of_text(text))
    scorer, before = scorer_of(3_000), likelihood._token_scores._cache_size()
    for name in KINDS:
        figures = scored(scorer, encode, name, settings)
        assert [line["length"] for line in figures["by_length"]] == [1_500, 3_000]
    assert likelihood._token_scores._cache_size() - before == 2


@pytest.mark.slow
def test_padding_to_a_length_changes_no_likelihood():
    scorer = scorer_of(400)
    pairs = [(encode("a" * n), encode("b" * m)) for n, m in ((1, 2), (90, 3), (300, 40))]
    plain, padded = scorer.likelihoods(pairs), scorer.likelihoods(pairs, least=400)
    assert [one.log_p for one in padded] == pytest.approx([one.log_p for one in plain], rel=1e-5)

"""Questions about long texts: the answer is what is hidden, of words unseen in training."""

import collections
import re
import zlib

import numpy as np
import pytest

from reformax.data import question_words, questions
from reformax.data.question_words import HELD_OUT, TRAINING, Draw
from reformax.data.questions import KINDS, Hay

NUMBER = r"\d{7}"
TEXT = "".join(f"Line {i} of a text, as long as it is.\n" for i in range(500)) + "word " * 300


def encode(text):
    return list(text.encode())


def ask(name, number=0, depth=0.5, length=3_000, seed=0, hay=questions.REPEATED):
    return questions.question(name, number, depth, length, encode, seed, hay)


def facts(text, kind):
    """(key, value) of all sentences of a kind, whichever template they are of."""
    found = []
    for template in getattr(HELD_OUT, kind):
        pattern = re.escape(template).replace(r"\{\}", "{}").format(r"([a-zA-Z ]+?)", r"([\w ]+?)")
        found += [(m.start(), *m.groups()) for m in re.finditer(pattern + r"(?=\s)", text)]
    return [pair for _, *pair in sorted(found)]


def last_sentence(one):
    return one.text.splitlines()[-1].rpartition(". ")[2]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("hay", [questions.REPEATED, Hay.of_text(TEXT)], ids=["repeated", "text"])
def test_a_question_fills_its_length_and_is_a_function_of_its_seed(name, hay):
    one = ask(name, hay=hay)
    size = len(encode(one.text + one.answer))
    assert 3_000 - (450 if hay is not questions.REPEATED else 230) < size <= 3_000
    assert one == ask(name, hay=hay)
    others = [ask(name, hay=hay, seed=1), ask(name, number=1, hay=hay)]
    assert all(other.text != one.text for other in others)
    assert len({ask(name, number=i).answer for i in range(9)}) > 4
    assert one.answer.endswith(".") and one.answer.startswith(" ")


@pytest.mark.parametrize("name, n", [("needle", 1), ("needles", 8)])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_at_its_depth_and_is_the_answer(name, n, depth):
    one = ask(name, depth=depth)
    hidden = dict(facts(one.text, "fact"))
    assert len(hidden) == len(set(hidden.values())) == n
    (key,) = (key for key in hidden if key in last_sentence(one))
    assert one.answer == f" {hidden[key]}." and one.depth == depth
    at = one.text.index(hidden[key]) / len(one.text)
    assert at == pytest.approx(depth, abs=0.25 if n > 1 else 0.06)


def test_several_values_are_asked_for_in_their_order():
    one = ask("multi_value")
    found = facts(one.text, "one_of")
    (key,) = {key for key, _ in found if key in last_sentence(one)}
    assert collections.Counter(key for key, _ in found)[key] == questions.N_VALUES
    assert len(found) == 2 * questions.N_VALUES and one.depth is None
    assert one.answer == f" {', '.join(value for of, value in found if of == key)}."


def test_several_keys_are_asked_for_together():
    one = ask("multi_query")
    hidden, asked = dict(facts(one.text, "fact")), re.findall(NUMBER, one.answer)
    assert len(hidden) == questions.N_KEYS and len(asked) == questions.N_ASKED
    by_value = {value: key for key, value in hidden.items()}
    assert ", ".join(by_value[value] for value in asked) in last_sentence(one)


def test_variables_are_those_that_a_number_is_passed_on_to():
    one = ask("variables")
    values = {}
    for line in re.split(r"(?<=\.)\s", one.text):
        names = re.findall(r"\b[A-Z]{5}\b", line)
        if number := re.findall(NUMBER, line):
            values |= dict.fromkeys(names, number[0])
        elif len(names) == 2:
            values[names[0]] = values[names[1]]  # set before
    (asked,) = re.findall(NUMBER, last_sentence(one))
    of_number = [name for name, value in values.items() if value == asked]
    assert one.answer == f" {', '.join(of_number)}."
    assert len(of_number) == questions.N_VARIABLES
    assert len(values) == questions.N_CHAINS * questions.N_VARIABLES


def test_the_common_word_is_listed_most():
    one = ask("common_words")
    found = collections.Counter(re.findall(r"\w+", one.text.rpartition(",")[0]))
    counts = [n for word, n in found.items() if word in HELD_OUT.words]
    word = one.answer.strip(" .")
    times = min(counts)
    assert len(counts) == len(HELD_OUT.words) and times > 5 and one.depth is None
    assert abs(found[word] - questions.TIMES * times) <= 1 and sorted(counts)[-2] <= times + 1


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_recall_is_of_pairs_alone(depth):
    one = ask("recall", depth=depth)
    lines = one.text.splitlines()
    pairs = facts(one.text, "pair")
    assert len(pairs) == len(lines) - 1 > 100 and len(dict(pairs)) == len(pairs)
    key, value = pairs[round(depth * (len(pairs) - 1))]
    assert key in lines[-1] and one.answer == f" {value}."


def test_a_passage_is_copied():
    one = ask("copy", depth=0.2)
    ((key, passage),) = facts(one.text, "passage")
    assert key in last_sentence(one) and one.answer == f" {passage}."
    assert len(passage.split()) == question_words.N_WORDS


def test_needles_lie_between_lines_of_the_text():
    one = ask("needles", hay=Hay.of_text(TEXT))
    lines = one.text.splitlines()[:-1]
    assert sum(line in TEXT for line in lines) == len(lines) - questions.N_KEYS


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_has_no_sentence_key_or_number_of_training(name):
    """Of sentences no template, of what is drawn no text: training cannot have seen it."""
    assert not set(sum(map(list, TRAINING), [])) & set(sum(map(list, HELD_OUT), []))
    drawn = [set(), set()]
    for side in (False, True):
        draw = Draw(np.random.default_rng(0), held_out=side)
        drawn[side] |= {*draw.numbers(300), *draw.keys(30), *draw.names(300, 5), draw.passage()}
    assert not drawn[0] & drawn[1]
    training = [KINDS[name](Draw(np.random.default_rng(i), False), 0.5, 3) for i in range(20)]
    held_out = [KINDS[name](Draw(np.random.default_rng(i), True), 0.5, 3) for i in range(20)]
    answers = [{ask.answer for one in side for ask in one.asked} for side in (training, held_out)]
    assert not answers[0] & answers[1]


def test_questions_are_those_of_a_checksum():
    """The same on every machine and in every version: results compare."""
    found = [ask(name, hay=Hay.of_text(TEXT)) for name in KINDS]
    assert questions.checksum(found) == "6cf12ebe53b4ee84"
    assert questions.checksum(found[:-1]) != questions.checksum(found)


def test_a_question_fills_its_length_where_lines_are_longer_than_most():
    """A step back by the mean line would leave no text at all."""
    chapters = [f"{'heading ' * 2}\n" * 300, f"{'long ' * 79}\n" * 40] * 20
    hay, length = Hay.of_text("".join(chapters)), 3_000
    for number in range(30):
        one = ask("needle", number, length=length, hay=hay)
        assert length - 400 <= len(one.text + one.answer) <= length


@pytest.mark.parametrize("held_out", [False, True])
def test_texts_drawn_together_are_those_drawn_one_by_one(held_out):
    def one_by_one(rng, n, one):
        found = {}
        while len(found) < n:
            text = one(rng)
            if (zlib.crc32(text.encode()) % 8 == 0) == held_out:
                found[text] = None
        return list(found)

    def name(rng):
        return "".join(chr(ord("A") + i) for i in rng.integers(26, size=3))

    def number(rng):
        return str(rng.integers(1_000_000, 10_000_000))

    rng, draw = np.random.default_rng(5), Draw(np.random.default_rng(5), held_out)
    for n in (1, 700, 4):  # a seventh of all names of three letters: some come twice
        assert draw.names(n, 3) == one_by_one(rng, n, name)
        assert draw.numbers(n) == one_by_one(rng, n, number)
    assert draw.rng.random() == rng.random()


@pytest.mark.parametrize("name", KINDS)
def test_a_question_encodes_few_times_its_length(name):
    n_encoded = []

    def counted(text):
        n_encoded.append(len(text))
        return text.encode()

    hay, length = Hay.of_text(TEXT), 20_000
    questions.question(name, 0, 0.5, length, counted, 0, hay)
    n_encoded.clear()
    for number in range(1, 5):
        questions.question(name, number, 0.5, length, counted, 0, hay)
    assert sum(n_encoded) / 4 < 5 * length


def test_a_seed_may_be_below_zero():
    assert ask("needle", seed=-1) != ask("needle", seed=1)


def test_a_text_shorter_than_what_is_hidden_is_refused():
    with pytest.raises(ValueError, match="length is 100: the sentences of needles alone have"):
        ask("needles", length=100)
    with pytest.raises(ValueError, match="the text that needles shall lie in is empty"):
        Hay.of_text(" \n")

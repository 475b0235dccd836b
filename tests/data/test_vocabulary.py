"""Vocabularies are deterministic, invert themselves and stay with their run."""

import io
from typing import get_args

import pytest
import sentencepiece

from reformax.data import vocabulary
from reformax.data.vocabulary import SentencePieces

TEXT = [
    f"Der {a} Mann sieht die {b} Frau, {a} und {b}."
    for a in ("alte", "junge", "größte", "naïve")
    for b in ("kluge", "schöne", "erste", "zweite")
]


def make(size=40, sentences=TEXT, **options):
    return SentencePieces(size, lambda: sentences, **options)


@pytest.mark.parametrize("model_type", get_args(vocabulary.ModelType))
def test_training_twice_gives_the_same_and_decoding_inverts_encoding(model_type):
    size = {"char": 30, "word": 20}.get(model_type, 40)
    one, two = (make(size, model_type=model_type) for _ in range(2))
    assert one.serialised == two.serialised and one.fingerprint == two.fingerprint
    encoded = one.encode_all(TEXT)
    assert encoded == [one.encode(sentence) for sentence in TEXT]
    for ids, sentence in zip(encoded, TEXT, strict=True):
        assert ids[-1] == 1 and min(ids[:-1]) >= 2 and max(ids) < size
        if model_type != "word":
            assert 2 not in ids
            assert one.decode(ids) == sentence
            assert one.decode([0, *ids, 7, 8]) == sentence
    assert one.encode("") == [1] and one.decode([1]) == one.decode([]) == ""


def test_settings_reach_the_trainer():
    assert make(38).fingerprint != make(40).fingerprint
    assert make(model_type="bpe").fingerprint != make().fingerprint
    rare = [*TEXT * 50, "ẞ"]
    ids = make(sentences=rare, character_coverage=0.9995).encode("ẞ")
    assert 2 in ids and "ẞ" not in make(sentences=rare, character_coverage=0.9995).decode(ids)
    assert 2 not in make(sentences=rare).encode("ẞ")
    some = make(35, sentences=[x for s in TEXT for x in (s, "Quux")], max_sentences=len(TEXT))
    assert some.serialised == make(35).serialised


def test_the_run_keeps_it(tmp_path):
    trained = make()
    assert trained.keep_in(tmp_path, begun=False) == trained.fingerprint
    assert (tmp_path / "vocabulary.model").read_bytes() == trained.serialised
    assert {path.name for path in tmp_path.iterdir()} == {"vocabulary.model"}

    def never():
        raise AssertionError("trained again")

    assert make().keep_in(tmp_path, begun=False) == trained.fingerprint
    kept = SentencePieces(40, never)
    assert kept.keep_in(tmp_path, begun=True) == trained.fingerprint
    assert kept.encode(TEXT[0]) == trained.encode(TEXT[0])
    loaded = vocabulary.load(tmp_path)
    assert (loaded.size, loaded.fingerprint) == (40, trained.fingerprint)
    assert loaded.decode(trained.encode(TEXT[0])) == TEXT[0]


def test_what_does_not_fit_is_told(tmp_path, fails_in_one_line):
    with fails_in_one_line(ValueError, "vocabulary.model is missing: the model's ids mean nothing"):
        make().keep_in(tmp_path, begun=True)
    make().keep_in(tmp_path, begun=False)
    with fails_in_one_line(
        ValueError, "has 40 pieces and the config vocab_size=50: set vocab_size"
    ):
        make(50).keep_in(tmp_path, begun=True)
    with fails_in_one_line(ValueError, "has model_type='unigram' and the config 'bpe': set model"):
        make(model_type="bpe").keep_in(tmp_path, begun=True)
    with fails_in_one_line(ValueError, "has character_coverage=1.0 and the config 0.9"):
        make(character_coverage=0.9).keep_in(tmp_path, begun=True)
    with fails_in_one_line(ValueError, "is not the vocabulary of this text and these"):
        make(38).keep_in(tmp_path, begun=False)
    path = tmp_path / "vocabulary.model"
    path.write_bytes(b"damaged")
    with fails_in_one_line(ValueError, "vocabulary.model is no sentencepiece model"):
        vocabulary.load(tmp_path)
    other = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=other, vocab_size=35, minloglevel=2
    )
    path.write_bytes(other.getvalue())
    with fails_in_one_line(ValueError, r"padding, EOS and unknown at \(-1, 2, 0\)"):
        vocabulary.load(tmp_path)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make(8000).serialised, r"vocab_size is 8000: expected at most \d+, all that the"),
        (lambda: make(5).serialised, r"vocab_size is 5: expected at least \d+, for the charact"),
        (lambda: make(sentences=[]).serialised, "vocab_size=40 does not fit the training text: "),
        (lambda: make(3), "size is 3: expected at least 4"),
        (lambda: make(model_type="words"), "model_type is 'words': expected 'unigram', 'bpe'"),
        (lambda: make(character_coverage=0), "character_coverage is 0: expected a number above 0"),
        (lambda: make(max_sentences=0), "max_sentences is 0: expected at least 1"),
    ],
)
def test_errors_name_the_argument(call, message, fails_in_one_line):
    with fails_in_one_line(ValueError, message):
        call()

"""Models of sentencepiece (Kudo & Richardson 2018): learnt, and read."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from reformax.data.base import EOS, PAD, UNKNOWN
from reformax.declared import SettingError

# The unigram trainer sums over threads. Their number decides the last bits, so it is fixed.
_THREADS = 16
# The variable of the environment that says how many threads encode; without it, one a core.
THREADS = "REFORMAX_THREADS"


def n_threads() -> int:
    """How many threads encode texts; -1 for one a core."""
    return int(os.environ.get(THREADS, -1))


class SentencePieceModel:
    """A model that was read."""

    names: dict[int, str] = {}  # ids by which a file names tokens; this one has none

    def __init__(self, serialised: bytes):
        """Reads a model as sentencepiece writes it; `RuntimeError` if it is none."""
        import sentencepiece

        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=serialised)
        self.size = self._pieces.get_piece_size()
        self.model_type = settings_of(serialised)["model_type"]
        self.end = self._pieces.eos_id()
        self.special_ids = self._pieces.pad_id(), self.end, self._pieces.unk_id()
        self.mask = None

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores."""
        return self._pieces.encode(list(texts), num_threads=n_threads())

    def name_of(self, i: int) -> str:
        """The text of a piece."""
        return self._pieces.id_to_piece(i)

    def ids_before(self, text: str, characters: Sequence[int]) -> np.ndarray:
        """How many ids of a text come before each of some characters, whose positions are sorted.

        Exact where a piece ends before each, as learnt pieces do after a newline.
        """
        ends = [*characters, len(text)]
        parts = [text[first:last] for first, last in pairwise([0, *ends])]
        whole, *counts = map(len, self.encode_all([text, *parts]))
        before = np.cumsum(counts, dtype=np.int64)
        return before[:-1] * whole // max(before[-1], 1)

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return self._pieces.decode(ids)


def settings_of(serialised: bytes) -> dict[str, Any]:
    """The model_type and the character_coverage that a sentencepiece model was learnt by."""
    from sentencepiece import sentencepiece_model_pb2

    spec = sentencepiece_model_pb2.ModelProto.FromString(serialised).trainer_spec
    return {
        "model_type": spec.ModelType.Name(spec.model_type).lower(),
        "character_coverage": float(f"{spec.character_coverage:.6g}"),  # kept in float32
    }


def learnt(sentences: Iterable[str], size: int, settings: Mapping[str, Any]) -> bytes:
    """A sentencepiece model of `size` pieces, as sentencepiece writes it.

    Args:
      sentences: to learn from.
      size: pieces, with those of padding, EOS and unknown.
      settings: more arguments of sentencepiece's trainer.

    Raises:
      SettingError: the sentences have fewer pieces, or need more.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=size,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNKNOWN,
            bos_id=-1,
            normalization_rule_name="identity",  # texts are scored as they are
            num_threads=_THREADS,
            minloglevel=2,
            **settings,
        )
    except RuntimeError as error:
        raise SettingError(_explained(error, size)) from None
    return model.getvalue()


def _explained(error: RuntimeError, size: int) -> str:
    """What sentencepiece's trainer says, by our setting instead of its flags."""
    text = " ".join(str(error).split())
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return (
            f"vocab_size is {size}: expected at least {least[1]}, for the characters of the "
            "training text"
        )
    if most := re.search(r"set it to a value <= (\d+)", text):
        return f"vocab_size is {size}: expected at most {most[1]}, all that the training text has"
    return f"vocab_size={size} does not fit the training text: {text.rpartition('] ')[2]}"

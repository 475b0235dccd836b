"""The two kinds of vocabulary files: tokenizer.json of Hugging Face, and sentencepiece models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reformax.data.sentencepieces import SentencePieceModel
from reformax.declared import SettingError

# The names of a hidden token, and of a document's end, in vocabularies of Hugging Face.
_MASKS = ("[MASK]", "<mask>")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class HuggingFaceTokenizer:
    """A tokenizer.json that was read."""

    def __init__(self, serialised: bytes):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(
                "a tokenizer.json is read by tokenizers, which is not there: "
                "pip install 'reformax[tokenizers]'"
            ) from None
        self._tokenizer = Tokenizer.from_buffer(serialised)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(known.values())
        self.model_type = type(self._tokenizer.model).__name__.lower()
        self.end = next((known[name] for name in ENDS if name in known), -1)
        self.mask = next((known[name] for name in _MASKS if name in known), None)
        self.names = {i: name for name, i in known.items()}

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def name_of(self, i: int) -> str:
        return self.names.get(i, "")

    def ids_before(self, text: str, characters: Sequence[int]) -> np.ndarray:
        begins = [
            first for first, _ in self._tokenizer.encode(text, add_special_tokens=False).offsets
        ]
        return np.searchsorted(begins, characters)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def codec_of(serialised: bytes, path: Path) -> SentencePieceModel | HuggingFaceTokenizer:
    """The vocabulary of a file's bytes; raises `SettingError` for one of neither kind."""
    try:
        is_json = serialised.lstrip()[:1] == b"{"
        return HuggingFaceTokenizer(serialised) if is_json else SentencePieceModel(serialised)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises that alone
        reason = " ".join(str(error).split())[:200]
        raise SettingError(
            f"{path} is no vocabulary ({reason}): give a tokenizer.json or a sentencepiece model"
        ) from None

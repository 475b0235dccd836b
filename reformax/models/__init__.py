"""Named models, assembled from `reformax.layers`."""

from reformax.models.lm import LanguageModel, ReformerLM, TransformerLM
from reformax.models.seq2seq import EncoderDecoder, Reformer, Transformer

__all__ = [
    "EncoderDecoder",
    "LanguageModel",
    "Reformer",
    "ReformerLM",
    "Transformer",
    "TransformerLM",
]

"""Named models, assembled from `reformax.layers`."""

from reformax.models.encoder import (
    Classifier,
    MaskedLanguageModel,
    ReformerEncoder,
    ReformerMaskedLM,
    TransformerEncoder,
    TransformerMaskedLM,
)
from reformax.models.lm import LanguageModel, ReformerLM, TransformerLM
from reformax.models.seq2seq import EncoderDecoder, Reformer, Transformer

__all__ = [
    "Classifier",
    "EncoderDecoder",
    "LanguageModel",
    "MaskedLanguageModel",
    "Reformer",
    "ReformerEncoder",
    "ReformerLM",
    "ReformerMaskedLM",
    "Transformer",
    "TransformerEncoder",
    "TransformerLM",
    "TransformerMaskedLM",
]

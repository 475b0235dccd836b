"""Named models, assembled from `reformax.layers`."""

from reformax.models.lm import LanguageModel, ReformerLM, TransformerLM

__all__ = ["LanguageModel", "ReformerLM", "TransformerLM"]

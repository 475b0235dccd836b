"""Text from trained models: language models continue prompts, encoder-decoders translate."""

from reformax.generation.decoding import generate, read, stream
from reformax.generation.sampling import Sampler
from reformax.generation.texts import TextState
from reformax.generation.translation import prepare, translate, translate_lines

__all__ = [
    "Sampler",
    "TextState",
    "generate",
    "prepare",
    "read",
    "stream",
    "translate",
    "translate_lines",
]

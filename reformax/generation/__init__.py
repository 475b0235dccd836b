"""Text from trained models: language models continue prompts, encoder-decoders translate."""

from reformax.generation.decoding import generate, stream
from reformax.generation.sampling import Sampler
from reformax.generation.translation import prepare, translate, translate_lines

__all__ = ["Sampler", "generate", "prepare", "stream", "translate", "translate_lines"]

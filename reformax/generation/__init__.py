"""Text from trained models: language models go on with a prompt, encoder-decoders translate."""

from reformax.generation.loop import generate, stream
from reformax.generation.sampling import Sampler
from reformax.generation.translation import translate, translate_lines

__all__ = ["Sampler", "generate", "stream", "translate", "translate_lines"]

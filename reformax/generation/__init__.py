"""Text from a trained language model: prompts in at once, then a token at a time."""

from reformax.generation.loop import generate, stream
from reformax.generation.sampling import Sampler

__all__ = ["Sampler", "generate", "stream"]

"""Draws the next token from its logits: temperature, then top-k, then top-p.

Their order and meaning are those of Hugging Face's `generate`. In a compiled step the settings are
arrays, so that other values compile nothing anew.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import Count, NonNegative, TopP, check_all, hints_of


class Sampler(NamedTuple):
    """The distribution that tokens are drawn from.

    Attributes:
      temperature: divides the logits; 0 always takes the most probable token.
      top_k: the number of most probable tokens to draw from; ties with the last of them stay. 0 for
        all.
      top_p: draws from the fewest most probable tokens whose probabilities, after top-k, add up to
        this, and ties with the last of them (nucleus sampling, Holtzman et al. 2020); 1 for all.
    """

    temperature: NonNegative = 1.0
    top_k: Count = 0
    top_p: TopP = 1.0

    def check(self) -> Sampler:
        """Returns itself; raises `ValueError` for a setting out of range."""
        check_all(hints_of(Sampler), self._asdict())
        return self

    def arrays(self) -> Sampler:
        """Itself for a compiled step: 1 and 1.0 run the same program.

        Where no token is left out, `top_k` and `top_p` are None, and the program ranks none.
        """
        some = self.top_k > 0 or self.top_p < 1
        of_ranks = (jnp.int32(self.top_k), jnp.float32(self.top_p)) if some else (None, None)
        return Sampler(jnp.float32(self.temperature), *of_ranks)

    def logits(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Unnormalised log-probabilities of the draw; -inf for tokens left out."""
        n_tokens = logits.shape[-1]
        # Below the largest, so that a tiny temperature makes -inf of them and no nan.
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = scaled / jnp.where(self.temperature > 0, self.temperature, 1.0)
        if self.top_k is None:  # from `arrays`
            return scaled
        ranked = -jnp.sort(-scaled, axis=-1)
        n_top = jnp.where(self.top_k > 0, jnp.minimum(self.top_k, n_tokens), n_tokens)
        # Ties with the last of the top k stay: they are equally good.
        least = jnp.take(ranked, n_top - 1, axis=-1)[:, None]
        ranked = jnp.where(ranked >= least, ranked, -jnp.inf)
        probability = jax.nn.softmax(ranked, axis=-1)
        above = jnp.cumsum(probability, axis=-1) - probability
        inside = (above < self.top_p) | (self.top_p >= 1.0)
        inside = inside.at[:, 0].set(True) & (ranked > -jnp.inf)
        least = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(scaled >= least, scaled, -jnp.inf)

    def draw(self, logits: Float[Array, "B V"], keys: PRNGKeyArray) -> Int[Array, " B"]:
        """Draws a token for each row; each row has its own key."""
        kept = self.logits(logits)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, kept.shape[1:], kept.dtype))(keys)
        noise = jnp.where(self.temperature > 0, noise, 0)
        return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)

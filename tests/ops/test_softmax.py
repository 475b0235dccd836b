"""The softmax of rows over what they see."""

import jax
import jax.numpy as jnp
import numpy as np

from reformax.ops.softmax.online import masked_softmax


def test_logits_that_round_in_two_ways_are_no_nan():
    """A compiled program may compute a product twice, of which one is fused."""
    keys = jnp.array([-0.16693555, -0.47568884, -0.3640811, -0.20929329])
    seen = np.ones(4, bool)
    weights = jax.jit(lambda q: masked_softmax(q * keys, seen))(jnp.float32(3e38))
    assert weights.tolist() == [1, 0, 0, 0]

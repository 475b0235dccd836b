"""Layers that go on from a state: parts of packed rows compute what whole rows do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.models.packing import with_positions
from reformax.ops.masking.masks import Tokens
from tests.helpers import assert_trees_close
from tests.layers import plain
from tests.ops.test_states import OPS

# Segments that end before the cut at 9 and go on behind it, padding within one and behind.
IDS = np.array([[1] * 4 + [2] * 9 + [3] * 4, [1] * 7 + [0] + [1] * 4 + [0] * 5], np.int32)
CUT = 9


@pytest.mark.slow
@pytest.mark.parametrize("n_qk_heads", [None, 1])
@pytest.mark.parametrize("name", OPS)
def test_parts_of_packed_rows(name, n_qk_heads):
    """With rotary positions, a gate, and the gradients of all weights through the state."""
    options = dict(n_heads=2, d_qk=4, d_v=4, causal=True, masked=True, use_rotary=True)
    layer = layers.Attention(OPS[name], **options, n_qk_heads=n_qk_heads, gate="headwise")
    x = np.random.default_rng(0).normal(size=(*IDS.shape, 8)).astype(np.float32)
    params = plain.init(layer, x.shape, IDS.shape)
    positions = with_positions(jnp.asarray(IDS)).positions

    def loss(params, cuts):
        outs, state, start = [], layer.first_state(2, "float32"), 0
        for end in (*cuts, x.shape[1]):
            part = slice(start, end)
            tokens = Tokens(IDS[:, part], positions=positions[:, part])
            out, state = layer.apply_from(params, x[:, part], state, tokens)
            outs, start = [*outs, out], end
        out = jnp.concatenate(outs, axis=1)
        return jnp.sum(jnp.sin(out)), (out, state)

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnames="cuts")
    got, want = (run(params, cuts=cuts) for cuts in ((CUT,), ()))
    assert_trees_close(got, want, 2e-5)
    whole = layer.apply(params, x, Tokens(IDS, positions=positions))
    assert_trees_close(want[1][0], whole, 1e-5)

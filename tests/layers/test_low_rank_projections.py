"""Projections through few numbers: two thin matrices compute what their product does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import gated_linear, kda
from tests.layers import plain

N, D, H, V = 2, 8, 4, 3
# The op, the same with whole matrices, and the ranks of its projections.
PAIRS = {
    "gated_linear": (
        gated_linear.gated_linear(gate_rank=5),
        gated_linear.gated_linear(),
        {"gate": 5},
    ),
    "kda": (kda.kda(), kda.kda(low_rank=False), {"forget": H, "output_gate": V}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_thin_matrices_are_one_whole(name):
    thin, whole, ranks = PAIRS[name]
    low, full = (layers.Attention(op, N, H, V, causal=True, mode="eval") for op in (thin, whole))
    x = np.random.default_rng(0).normal(size=(2, 11, D)).astype(np.float32)
    params = plain.init(low, x.shape)
    products = {}
    for projection, rank in ranks.items():
        down, up = params[f"w_{projection}"], params[f"up_{projection}"]
        assert down.shape == (1, D, rank) and up.shape[:2] == (N, rank)
        products[f"w_{projection}"] = jnp.einsum("dr,nrh->ndh", down[0], up)
    of_whole = {k: w for k, w in params.items() if not k.startswith("up_")} | products
    want = jax.jit(full.apply)(of_whole, x)
    np.testing.assert_allclose(jax.jit(low.apply)(params, x), want, atol=1e-5)
    plain.assert_decodes(low, params, x, np.array([4, 6]), want, None)
    assert plain.init(full, x.shape).keys() == of_whole.keys()

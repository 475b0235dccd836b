"""Whether an op reads further projections depends on its options, which callers ask it."""

import jax
import numpy as np
import pytest

from reformax import layers
from reformax.declared import Unsupported
from reformax.nn import dot_product_attention, op_of
from reformax.ops import dense, longformer, retention
from reformax.ops.base import options
from reformax.ops.calls.dims import Projection

PLAIN = dict(normalized=False, gated=False)


@options
class gated_dense(dense.dense):
    """Dense attention that reads a gate, if it has one."""

    gated: bool = True

    def extra_projections(self, dims):
        return {"gate": Projection(dims.n_heads, 1)} if self.gated else {}


def test_cross_attention():
    with pytest.raises(Unsupported, match=r"gated_dense\(\): it reads further projections, which"):
        layers.CrossAttention(gated_dense())
    x = np.random.default_rng(0).normal(size=(2, 2, 9, 8)).astype(np.float32)
    layer, plain = (layers.CrossAttention(y) for y in (gated_dense(gated=False), dense.dense()))
    params = plain.init_params(jax.random.key(0), x[0].shape, x[1].shape)
    np.testing.assert_array_equal(layer.apply(params, *x), plain.apply(params, *x))
    # Those that need none, but read one sequence, are refused for that alone.
    for one in (longformer.longformer(), retention.retention(**PLAIN)):
        with pytest.raises(Unsupported, match="cannot attend from one sequence to another, as it"):
            layers.CrossAttention(one)
    for one in (longformer.longformer(n_global=1), retention.retention(normalized=False)):
        with pytest.raises(Unsupported, match="it reads further projections, which a memory has"):
            layers.CrossAttention(one)


@pytest.mark.parametrize("one", [longformer.longformer(window=4), retention.retention(**PLAIN)])
def test_a_function_of_queries_keys_and_values(one):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 9, 2, 4)).astype(np.float32)
    assert op_of(one) == one
    got = dot_product_attention(q, k, v, is_causal=True, implementation=one)
    np.testing.assert_allclose(got, one(q, k, v, causal=True), rtol=1e-5, atol=1e-6)
    more = longformer.longformer(n_global=1), retention.retention(normalized=False)
    for other in more:
        with pytest.raises(Unsupported, match="it reads further projections of a layer's input"):
            op_of(other)

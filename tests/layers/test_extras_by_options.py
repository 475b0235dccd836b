"""Whether an op reads further projections depends on its options, which callers ask it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.declared import Unsupported
from reformax.nn import dot_product_attention, op_of
from reformax.ops import dense, hca, longformer, nsa, retention
from reformax.ops.base import options
from reformax.ops.calls.dims import Projection
from reformax.ops.masking.masks import Tokens
from tests.layers import plain

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


def _with_more_keys(**options):
    """Layers of ops that project queries or keys of other branches, and their arguments."""
    x = np.random.default_rng(1).normal(size=(1, 12, 6)).astype(np.float32)
    tokens = Tokens(None, global_tokens=jnp.arange(12)[None] % 6 == 1)
    nsa_sizes = dict(compress_len=4, compress_stride=2, block_size=4, n_selected=1, window=3)
    for one in (
        longformer.longformer(window=3, n_global=2),
        nsa.nsa(**nsa_sizes, independent_kv=True),
        hca.hca(block_size=2, window=4),
    ):
        sizes = dict(n_heads=2, d_qk=4, d_v=4, causal=True)
        layer = layers.Attention(one, **sizes, masked=True, **options)
        params = plain.init(layer, x.shape, x.shape[:2])
        queries = {name: to for name, to in layer.projections().items() if to.role == "query"}
        keys = {name: to for name, to in layer.projections().items() if to.role == "key"}
        assert len(queries) + len(keys) > 2
        yield one, params, queries, keys, jax.jit(lambda p, layer=layer: layer.apply(p, x, tokens))


@pytest.mark.parametrize("norm", [True, "joint"])
def test_all_queries_and_keys_are_normalised(norm):
    for one, params, queries, keys, apply in _with_more_keys(qk_norm=norm, norm_epsilon=0.0):
        want = apply(params)
        for name in (*queries, *keys):
            larger = params | {f"w_{name}": 3 * params[f"w_{name}"]}
            np.testing.assert_allclose(apply(larger), want, 1e-4, 1e-5, err_msg=f"{one} {name}")
            scaled = params | {f"{name}_norm": params[f"{name}_norm"] + 1}
            assert not np.allclose(apply(scaled), want, 1e-4, 1e-5), f"{one} {name}"


def test_all_queries_have_the_factor():
    scaled, plainly = (_with_more_keys(scale=scale) for scale in (1.5, 0.5))
    for (one, params, queries, _, apply), (*_, default) in zip(scaled, plainly, strict=True):
        larger = {f"w_{name}": 3 * params[f"w_{name}"] for name in queries}
        np.testing.assert_allclose(apply(params), default(params | larger), 1e-4, 1e-5, str(one))

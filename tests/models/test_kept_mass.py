"""Kept mass by layer: that of the layers' own queries and keys, in every kind of stack."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from reformax.models.lm import ReformerLM, TransformerLM
from reformax.ops import dense, local, lsh
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.softmax.kept_mass import kept_mass
from tests.layers import plain

SIZES = dict(vocab_size=16, d_model=16, d_ff=16, n_heads=2, d_attention_key=8, d_attention_value=8)
HASHED = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, attend_self_if_alone=False)
SIZES |= dict(attention_type=(local.local(chunk_len=4), HASHED), n_layers=4)
TOKENS = np.random.default_rng(0).integers(1, 16, (2, 32)).astype(np.int32)
KEY = jax.random.key(5)


@functools.cache
def measured(kind, **options):
    model = kind(**SIZES | options)
    assert model.kept_mass_layers == (2, 4)
    params = plain.init(model, TOKENS.shape)
    params = jax.tree.map(lambda x: 3 * x, params)  # attention that is far from even
    return model, params, jax.jit(model.kept_mass)(params, TOKENS, KEY)


def by_hand(model, params):
    """Layer by layer, in a pre-norm Transformer without dropout."""
    stack, found, rng = model._layers, {}, jax.random.split(KEY, 3)[1]
    x = params["embedding"][np.pad(TOKENS, ((0, 0), (1, 0)))[:, :-1]]
    for i in range(stack.n_layers):
        repeat, block = divmod(i, len(stack.blocks))
        layer = stack.blocks[block]
        p = jax.tree.map(lambda y: y[repeat], params["stack"][f"block_{block}"])  # noqa: B023
        own = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(rng, repeat), block), 0)
        attention, h = layer.attention, stack._norm.apply(p["attention_norm"], x)
        qkv, gate = attention.project(p["attention"], h)
        plan = attention.plan(p["attention"], qkv, rng=own)
        if attention.op.chooses_keys:
            masks = dict(plan=plan, segment_ids=None, causal=True)
            shares = kept_mass(attention.op, (), *qkv[:3], **masks)
            found[i + 1] = shares[..., 0].sum() / shares[..., 1].sum()
        heads = attention.attend(p["attention"], qkv, plan, rng=own)
        x = x + attention.combine(p["attention"], heads, gate)
        x = x + layer.feed_forward.apply(
            p["feed_forward"], stack._norm.apply(p["feed_forward_norm"], x)
        )
    return found


def close(one, other):
    assert list(one) == list(other) == [2, 4]
    for layer in one:
        assert 0.1 < float(one[layer]) < 0.999
        np.testing.assert_allclose(one[layer], other[layer], rtol=1e-5)


@pytest.mark.slow
def test_layers_are_measured_on_their_own_inputs():
    model, params, found = measured(TransformerLM, dropout=0.0)
    close(found, by_hand(model, params))
    assert abs(float(found[2] - found[4])) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(scan_layers=False), dict(remat_policy="attention")], ids=str
)
def test_no_way_of_computing_a_transformer_changes_it(options):
    close(
        measured(TransformerLM, dropout=0.0, **options)[2], measured(TransformerLM, dropout=0.0)[2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TransformerLM, ReformerLM])
def test_kernels_measure_what_array_operations_do(kind):
    kernels = dataclasses.replace(HASHED, impl=INTERPRETED)
    options = dict(dropout=0.0, attention_type=(local.local(chunk_len=4), kernels))
    close(measured(kind, **options)[2], measured(kind, dropout=0.0)[2])


@pytest.mark.slow
@pytest.mark.parametrize("n_slots", [None, 5])
def test_reversible_stacks_are_measured_alike(n_slots):
    sizes = dict(dropout=0.0) if n_slots is None else dict(dropout=0.0, n_slots=n_slots)
    found = measured(ReformerLM, **sizes)[2]
    close(found, measured(ReformerLM, **sizes, remat_policy="attention")[2])
    close(found, measured(ReformerLM, **sizes, scan_layers=False)[2])


@pytest.mark.slow
def test_dropout_of_weights_hides_no_key():
    model, params, found = measured(TransformerLM, dropout=0.0, attention_dropout=0.5)
    first = by_hand(model, params)[2]  # the layer before drops nothing, or it would differ
    assert float(found[2]) > 0.5 * float(first)


def test_a_model_that_chooses_no_keys_measures_none():
    model = TransformerLM(**SIZES | dict(attention_type=dense.dense(), n_layers=1))
    params = plain.init(model, TOKENS.shape)
    assert model.kept_mass_layers == ()
    assert jax.eval_shape(model.kept_mass, params, TOKENS, KEY) == {}

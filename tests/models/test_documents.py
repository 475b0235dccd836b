"""Language models on windows of several documents: each is computed as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.models import ReformerLM, TransformerLM
from reformax.ops import (
    dense,
    flash,
    gated_linear,
    local,
    longformer,
    lsh,
    retention,
    shared_qk,
    sinks,
)
from tests.helpers import assert_trees_close
from tests.layers import plain

RNG = jax.random.PRNGKey(4)
SMALL = dict(
    vocab_size=16,
    d_model=8,
    d_ff=20,
    d_attention_key=4,
    d_attention_value=4,
    n_layers=2,
    n_heads=2,
    dropout=0.0,
)
AXIAL = dict(pos_type="axial", pos_axial_shape=(4, 6), pos_d_axial_embs=(2, 6))
WHOLE = dict(chunk_len=24, n_hashes=2)
BY_CONTENT = (local.local(chunk_len=4, window=3), lsh.lsh(**WHOLE, attend_self_if_alone=False))
MODELS = {
    "dense, axial": (TransformerLM, dict(attention_type=dense.dense(), **AXIAL)),
    "dense, sinusoids": (
        TransformerLM,
        dict(attention_type=dense.dense(), pos_type="sinusoidal", first_token=3),
    ),
    "t5": (TransformerLM, dict(attention_type=flash.flash(), pos_type="t5", post_norm=True)),
    "two streams, rotary": (
        ReformerLM,
        dict(attention_type=(local.local(chunk_len=4, window=3), lsh.lsh(**WHOLE))),
    ),
    "slots, next value": (
        ReformerLM,
        dict(attention_type=BY_CONTENT, n_slots=3, next_value=True, pos_type="rotary_local"),
    ),
    "exact, axial": (ReformerLM, dict(attention_type=BY_CONTENT, exact=True, **AXIAL)),
    "kept activations": (
        ReformerLM,
        dict(
            attention_type=shared_qk.shared_qk(attend_self_if_alone=False),
            next_value=True,
            remat_policy="all",
            pos_type="none",
        ),
    ),
    "longformer": (
        TransformerLM,
        dict(attention_type=longformer.longformer(window=3), **AXIAL),
    ),
    "retention": (ReformerLM, dict(attention_type=retention.retention())),
    "gated linear, rotary": (TransformerLM, dict(attention_type=gated_linear.gated_linear())),
    "hashed": (
        ReformerLM,
        dict(attention_type=lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4), n_slots=3),
    ),
}
# Chunks go by the position in the row: documents are of whole ones.
LENGTHS = {"hashed": (8, 4)}
ON_GRID = ("slots, next value", "exact, axial", "hashed")


def documents(length, seed):
    return np.random.default_rng(seed).integers(0, 16, (4, length), np.int32)


def packed(*parts):
    """A row of documents, and their segments."""
    ids = [np.full(len(part), i + 1, np.int32) for i, part in enumerate(parts)]
    row, ids = np.concatenate(parts), np.concatenate(ids)
    return [np.pad(x, (0, 24 - len(x))) for x in (row, ids)]


def nats(model, params, inputs, targets, weights):
    """The sum of -log p of the targets."""
    log_p = jax.nn.log_softmax(model.logits(params, model.features(params, inputs, RNG)))
    picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * weights)


@pytest.mark.parametrize("name", MODELS)
def test_a_window_computes_what_its_documents_compute_alone(name):
    """Nats and every gradient: windows of several, with padding, against batches of one length."""
    constructor, options = MODELS[name]
    model = constructor(**SMALL | options)
    params = plain.init(model, (2, 24))
    long, short = map(documents, LENGTHS.get(name, (7, 3)), (0, 1))
    rows = (long[0], short[0], long[1]), (short[1], long[2], short[2], long[3])
    tokens, segment_ids = (np.stack(x) for x in zip(*(packed(*row) for row in rows), strict=True))
    gradient = jax.jit(jax.value_and_grad(lambda p, *x: nats(model, p, *x)))
    got = gradient(params, (tokens, segment_ids), tokens, segment_ids > 0)
    parts = [gradient(params, x, x, np.ones(x.shape)) for x in (long, short[:3])]
    want = jax.tree.map(lambda *x: sum(x), *jax.device_get(parts))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3 if name in ON_GRID else 1e-5)
    # On the grid the two now and then round to another multiple of it. Norms of small heads enlarge
    # what sums in another order round, by as much as the processor's order differs.
    assert_trees_close(got[1], want[1], 5e-3 if name in ON_GRID else 1e-4)
    assert all(np.any(g) for g in jax.tree.leaves(jax.device_get(got[1])))


@pytest.mark.slow  # `ops/test_against_oracle.py` has packed hashing
@pytest.mark.parametrize("options", [{}, dict(strictly_causal=True)], ids=["chunks", "strict"])
def test_hashing_keeps_documents_apart(options):
    """What other documents hold changes nothing, and no gradient crosses a border."""
    op = lsh.lsh(chunk_len=4, n_hashes=2, attend_self_if_alone=False, **options)
    model = ReformerLM(**SMALL, attention_type=op, next_value=True, n_slots=3)
    params, tokens = plain.init(model, (4, 16)), documents(16, 3)
    segment_ids = np.repeat([[1, 2, 3]], 4, axis=0).repeat([5, 4, 7], axis=1).astype(np.int32)
    other = np.where(segment_ids == 2, tokens, (tokens + 1) % 16)
    features = jax.jit(lambda tokens: model.features(params, (tokens, segment_ids), RNG))
    one, two = features(tokens), features(other)
    np.testing.assert_array_equal(one[:, 5:9], two[:, 5:9])
    assert np.abs(one - two)[:, 9:].max() > 0.1
    table = jax.jit(
        jax.grad(lambda p: nats(model, p, (tokens, segment_ids), tokens, segment_ids == 2))
    )
    read = np.unique([0, *tokens[:, 5:8].ravel()])  # 0 is in front
    found = np.flatnonzero(np.any(table(params)["embedding"], axis=1))
    np.testing.assert_array_equal(found, read)


def test_what_tells_no_documents_apart_is_refused():
    tokens = np.ones((1, 30), np.int32)

    def trace(**options):
        model = TransformerLM(**SMALL, **options)
        shapes = jax.eval_shape(model.init_params, RNG, ((1, 16)))
        jax.eval_shape(model.features, shapes, (tokens, tokens))

    match = r"op is sinks\(.* and rows are packed, as with document_mask=True: leave that out"
    with pytest.raises(NotImplementedError, match=match):
        trace(attention_type=(dense.dense(), sinks.sinks(window=4, n_sinks=1)))
    with pytest.raises(ValueError, match="a row has 30 positions and the model's hold 24: enlarge"):
        trace(**AXIAL)

"""Compressed attention: what summaries are over, who sees them, and what the indexer chooses.

Published implementations have let summaries of the future be seen, summed padding and other
segments, and hidden the last block or weighted the zeros behind it. A test each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import advanced, measured
from reformax.declared import SettingError
from reformax.ops import csa, hca
from reformax.ops.base import Dims
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import listed
from reformax.ops.numerics import query_chunks
from tests.helpers import assert_trees_close
from tests.ops import compressed, inputs
from tests.ops.rows import Shape, visible

SIZES = dict(block_size=4, window=6)
OPS = [hca.hca(**SIZES), csa.csa(**SIZES, top_k=2, n_index_heads=2, d_index=4)]
over_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def attend(op, x, segment_ids=None):
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return np.asarray(_attend(op, x, segment_ids))


@functools.partial(jax.jit, static_argnums=0)
def _attend(op, x, segment_ids):
    return inputs.call(op, x, causal=True, segment_ids=segment_ids)


@over_ops
def test_no_summary_of_the_future_is_seen(op):
    """At each position within a block, by a call that chooses anew."""
    one, other = (inputs.draw(op, length=19, seed=seed) for seed in (0, 1))
    want = attend(op, one)
    for now in range(12, 17):
        mixed = one.zip(lambda x, y, now=now: np.concatenate([x[:, :now], y[:, now:]], 1), other)
        np.testing.assert_array_equal(attend(op, mixed)[:, :now], want[:, :now])


@over_ops
def test_an_incomplete_block_and_what_fills_it_up(op):
    """A row's outputs are those of a longer row: zeros behind it have no weight."""
    x = inputs.draw(op, length=24)
    want = attend(op, x)
    for length in (3, 4, 13):
        short = x.at(slice(None), slice(length))
        np.testing.assert_allclose(attend(op, short), want[:, :length], atol=2e-6)


def test_every_position_up_to_the_query_is_seen():
    """The last ones by the window, the others by summaries, whatever the block is filled to."""
    op = hca.hca(block_size=4, window=4)
    x = inputs.draw(op, batch=1, length=23)

    @jax.jit
    def influence(x):
        def outputs(v, summaries):
            extra = x.extra_projections | {"summary_v": summaries}
            out = inputs.call(op, x._replace(v=v, extra_projections=extra), causal=True)
            return out.sum(axis=(0, 2, 3))

        by_value, by_summary = jax.jacrev(outputs, argnums=(0, 1))(
            x.v, x.extra_projections["summary_v"]
        )
        return sum(jnp.abs(y).sum(axis=(1, 3, 4)) for y in (by_value, by_summary))

    np.testing.assert_array_equal(influence(x) > 0, np.tril(np.ones((23, 23), bool)))


@over_ops
@pytest.mark.parametrize("junk", [3.0, np.nan])
def test_padding_is_in_no_summary(op, junk):
    """Two whole blocks of padding before the tokens, and then a part of a block."""
    for n in (8, 6):
        x = inputs.draw(op, length=20)
        is_token = np.arange(20) >= n
        dirty = x.map(lambda y, seen=is_token: np.where(seen[None, :, None, None], y, junk))
        ids = np.broadcast_to(is_token, (2, 20))
        got, want = attend(op, dirty, ids), attend(op, x, ids)
        np.testing.assert_array_equal(got, want)
        if n == 8:
            alone = attend(op, x.at(slice(None), slice(n, None)))
            np.testing.assert_allclose(got[:, n:], alone, atol=2e-6)


@over_ops
def test_a_summary_across_a_border_is_of_its_last_segment(op):
    """As if the other segment's positions were padding."""
    x = inputs.draw(op, length=20)
    ids = np.repeat([[1, 2]], [6, 14], axis=1).repeat(2, axis=0)
    got, alone = attend(op, x, ids), attend(op, x, np.where(ids == 2, 1, 0))
    np.testing.assert_allclose(got[:, 6:], alone[:, 6:], atol=2e-6)
    first = attend(op, x.at(slice(None), slice(6)))
    np.testing.assert_allclose(got[:, :6], first, atol=2e-6)


@pytest.mark.parametrize("shares", [False, True])
@over_ops
def test_grouped_heads_and_rotations_are_those_of_the_equations(op, shares):
    """Four query heads on two key heads, whose first features the op rotates."""
    settings = SIZES | dict(share_kv=shares, rotary_features=4, rotary_base=50.0)
    settings |= {} if op.name == "hca" else dict(top_k=2, n_index_heads=2, d_index=4)
    op, length = type(op)(**settings), 22
    ids = np.repeat([[1, 2, 0]], [9, 8, 5], axis=1).repeat(2, axis=0)
    rng = np.random.default_rng(0)
    dims = Dims(4, 6, 6, length, 2)
    q, k, v, d_out = (rng.normal(size=(2, length, n, 6)).astype(np.float32) for n in (4, 2, 2, 4))
    extra_projections = {
        name: rng.normal(size=(2, length, x.n_heads, x.size)).astype(np.float32)
        for name, x in op.extra_projections(dims).items()
    }
    params = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32),
        op.init(jax.random.key(0), dims),
    )
    x = inputs.Inputs(q, k, v, extra_projections, params)
    masks = dict(segment_ids=jnp.asarray(ids), causal=True)
    mask = visible(Shape(2, length, length, 4), True, ids)
    reference = getattr(compressed, op.name)

    @jax.jit
    def both(x, d_out):
        plan = inputs.plan(op, x, **masks)

        def ours(x):
            return inputs.apply(op, x, plan=plan, **masks)

        def wanted(x):
            keep = np.ones((2, 4, length, 99))
            return reference(settings, x.params, plan, x[:3], x.extra_projections, mask, keep)

        return [(out, vjp(d_out)) for out, vjp in (jax.vjp(f, x) for f in (ours, wanted))]

    assert_trees_close(*both(x, d_out), 2e-5)


@pytest.mark.parametrize("index_dtype, impl", [("float32", "xla"), ("bfloat16", INTERPRETED)])
def test_a_query_chooses_the_best_complete_summaries_of_its_segment(index_dtype, impl):
    op = dataclasses.replace(OPS[1], index_dtype=index_dtype, impl=impl)
    x = inputs.draw(op, length=30)
    ids = np.repeat([[1, 2]], [13, 17], axis=1).repeat(2, axis=0)
    plan = jax.jit(lambda x: inputs.plan(op, x, segment_ids=jnp.asarray(ids), causal=True))(x)
    options = dict(**SIZES, n_index_heads=2, index_dtype=index_dtype, learned_sinks=True)
    mask = visible(Shape(2, 30, 30, 2), True, ids)

    @jax.jit
    def scores(x):
        parts = compressed.Parts(options, x.params, x[:3], x.extra_projections, mask, n_series=2)
        return compressed.index_scores(options, x.params, parts)

    found, plan = np.asarray(scores(x)), np.asarray(plan)
    for b, t in np.ndindex(plan.shape[:2]):
        allowed = [c for c in range(7) if 4 * c + 3 <= t and ids[b, 4 * c + 3] == ids[b, t]]
        chosen = set(plan[b, t]) - {-1}
        assert len(chosen) == min(2, len(allowed)) and chosen <= set(allowed)
        left = [found[b, t, c] for c in set(allowed) - chosen]
        assert not left or found[b, t, list(chosen)].min() >= max(left) - 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
def test_the_reported_loss_is_the_mean_divergence(impl):
    """Of the indexer from the heads' weights of summaries, in a softmax with window and sinks."""
    options = SIZES | dict(top_k=3, n_index_heads=2, d_index=4)
    op, length = csa.csa(**options, report_loss=True, impl=impl), 22
    x = inputs.draw(op, length=length)
    ids = np.repeat([[1, 2, 0]], [9, 10, 3], axis=1).repeat(2, axis=0)

    def total(params):
        y = x._replace(params=params)
        return 0 * inputs.call(op, y, causal=True, segment_ids=jnp.asarray(ids)).sum()

    change = jax.jit(jax.grad(total))(x.params)
    got = measured(advanced(x.params, change))["index_loss"]
    plan = inputs.plan(op, x, segment_ids=jnp.asarray(ids), causal=True)
    mask = visible(Shape(2, length, length, 2), True, ids)
    parts = compressed.Parts(options, x.params, x[:3], x.extra_projections, mask, n_series=2)
    chosen = (np.asarray(plan)[..., None] == np.arange(5)).any(axis=2)[:, None] & parts.seen
    _, weights = parts.attend(chosen, np.ones((2, 2, length, 99)))
    attention, chosen = np.asarray(weights.sum(axis=1)), np.asarray(chosen)[:, 0]
    attention = attention / np.maximum(attention.sum(axis=-1, keepdims=True), 1e-30)
    found = np.where(chosen, compressed.index_scores(options, x.params, parts), -np.inf)
    index = np.exp(np.where(chosen, found - np.where(chosen, found, -1e9).max(-1)[..., None], -1e9))
    index = index / np.maximum(index.sum(axis=-1, keepdims=True), 1e-30)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(attention > 0, attention * np.log(attention / index), 0)
    assert terms.sum() > 0.1
    np.testing.assert_allclose(got, terms.sum() / np.sum(ids != 0), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n_kv_heads", [1, 16])
def test_kernels_read_lists_of_few_summaries_or_all_by_bits(n_kv_heads, monkeypatch):
    """With many query heads of a key head a query's summaries are read by its list."""
    options = dict(block_size=2, window=3, top_k=2, n_index_heads=2, d_index=4, soft_cap=3.0)
    length, found, pays = 43, [], listed.pays
    monkeypatch.setattr(listed, "BYTE_COST", 0)
    monkeypatch.setattr(listed, "pays", lambda *x: (found.append(pays(*x)), found[-1])[1])
    ids = jnp.asarray(np.repeat([[1, 2, 0]], [16, 22, 5], axis=1).repeat(2, axis=0))
    rng, dims = np.random.default_rng(0), Dims(16, 4, 4, length, n_kv_heads)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, 4))) for n in (16, *[n_kv_heads] * 2))
    op = csa.csa(**options)
    extra_projections = {
        name: jnp.asarray(rng.normal(size=(2, length, x.n_heads, x.size)))
        for name, x in op.extra_projections(dims).items()
    }
    x = inputs.Inputs(q, k, v, extra_projections, op.init(jax.random.key(0), dims))
    masks = dict(segment_ids=ids, causal=True, rng=jax.random.key(1))
    plan = inputs.plan(op, x, **masks)

    def run(impl):
        def loss(x):
            out = inputs.apply(csa.csa(**options, impl=impl), x, plan=plan, dropout=0.2, **masks)
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.value_and_grad(loss))(x)

    assert_trees_close(run(INTERPRETED), run("xla"), 2e-5)
    assert set(found) == {n_kv_heads == 1}


@pytest.mark.parametrize("top_k, refused", [(2**16, "pairs=274877906944"), (512, None)])
def test_kernels_have_no_limit_of_pairs_where_they_read_lists(top_k, refused):
    """A bit for each of too many pairs is refused."""
    op, length = csa.csa(top_k=top_k, n_index_heads=2, d_index=8, impl=INTERPRETED), 2**20
    dims = Dims(8, 16, 16, length, 1)

    def array(n, size=16):
        return jax.ShapeDtypeStruct((1, length, n, size), jnp.bfloat16)

    extra = {name: array(x.n_heads, x.size) for name, x in op.extra_projections(dims).items()}
    params = jax.eval_shape(lambda rng: op.init(rng, dims), jax.random.key(0))
    x = inputs.Inputs(array(8), array(1), array(1), extra, params)
    attend = functools.partial(jax.eval_shape, lambda x: inputs.call(op, x, causal=True), x)
    if refused is None:
        assert attend().shape == x.q.shape
        return
    with pytest.raises(NotImplementedError, match=refused):
        attend()


@pytest.mark.slow
@over_ops
def test_chunks_of_queries_compute_the_same(op, monkeypatch):
    x = inputs.draw(op, length=23)

    def run():
        masks = dict(segment_ids=None, causal=True, rng=jax.random.key(1))

        def loss(x):
            plan = inputs.plan(op, x, **masks)
            return jnp.sum(jnp.sin(inputs.apply(op, x, plan=plan, dropout=0.3, **masks)))

        return jax.jit(jax.value_and_grad(loss))(x)

    want = run()
    monkeypatch.setattr(query_chunks, "AT_A_TIME", 300)
    assert_trees_close(run(), want, 2e-5)


@pytest.mark.parametrize(
    "op, options, message",
    [
        (hca.hca, dict(window=100), "window is 100 and block_size 128: expected a window of at"),
        (csa.csa, dict(rotary_features=3), "rotary_features is 3: expected an even number"),
        (hca.hca, dict(rotary_base=50.0), "rotary_base is 50.0 and rotary_features 0: set the f"),
        (csa.csa, dict(rotary_features=66), "rotary_features is 66 and d_index 64: expected"),
    ],
)
def test_options_that_do_not_fit_together(op, options, message):
    with pytest.raises(SettingError, match=message):
        op(**options)


def test_heads_that_do_not_fit():
    op = hca.hca(share_kv=True)
    x = inputs.draw(op, length=8)
    with pytest.raises(SettingError, match="share_kv is True, and keys have 4 features and values"):
        inputs.call(op, x._replace(v=x.v[..., :3]), causal=True)
    op = hca.hca(rotary_features=6)
    x = inputs.draw(op, length=8)
    with pytest.raises(SettingError, match="rotary_features is 6: expected at most the size of a"):
        inputs.call(op, x, causal=True)


def test_a_long_window_has_no_matrix_of_all_its_pairs(monkeypatch):
    """At 1,024 positions, which are all in the window, 2^22 pairs of heads in a square."""
    monkeypatch.setattr(query_chunks, "AT_A_TIME", 2**16)
    op = hca.hca(block_size=64, window=1024)
    x = inputs.draw(op, batch=1, length=1024, n_heads=4)
    gradient = jax.jit(jax.grad(lambda q: inputs.call(op, x._replace(q=q), causal=True).sum()))
    analysis = gradient.lower(x.q).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 4 * 2**20

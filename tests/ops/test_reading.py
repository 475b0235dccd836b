"""Several positions read at once from a cache: what one step after the other computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense
from reformax.ops.decoding import reading
from tests.ops import inputs
from tests.ops.rows import one_of_each_kind, over
from tests.ops.test_decoding import DECODING, KEY, draw

TOTAL, CAPACITY = 29, 32


def empty(op, x):
    """The cache before the first position."""
    first = x.at(slice(None), slice(0, 1))
    none = np.zeros(len(x.q), np.int32)
    ids = jnp.zeros((len(x.q), 1), jnp.int32)
    masks = dict(segment_ids=ids, causal=True, rng=KEY, train=False, length=CAPACITY)

    @jax.jit
    def begin(x):
        plan = inputs.plan(op, x, **masks)
        return inputs.init_cache(op, x, plan=plan, lengths=none, capacity=CAPACITY, rng=KEY)

    return begin(first)


def in_pieces(op, x, totals, size, padding=1e4):
    """The outputs of rows of `totals` tokens, read `size` at a time, and the last cache."""
    read = jax.jit(functools.partial(inputs.read_on, op))
    cache, outs = empty(op, x), []
    for start in range(0, max(totals), size):
        lengths = np.clip(np.array(totals) - start, 0, size).astype(np.int32)
        kept = np.arange(size) < lengths[:, None]
        index = np.minimum(start + np.arange(size), TOTAL - 1)
        piece = x.map(
            lambda y, i=index, kept=kept: np.where(kept[..., None, None], y[:, i], padding)
        )
        position = np.minimum(start, totals).astype(np.int32)
        out, cache, _ = read(piece, cache, position=position, lengths=lengths)
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


@over(DECODING, quick=one_of_each_kind)
def test_a_piece_is_its_steps(row):
    """From the first position on, of rows that end at different ones."""
    op, totals = row.op(), np.array([TOTAL - 1, 17])
    x = draw(op, 2, TOTAL)
    got, cache = in_pieces(op, x, totals, 7)
    want, position, held = [], np.zeros(2, np.int32), empty(op, x)
    step = jax.jit(functools.partial(inputs.step, op))
    for t in range(TOTAL):
        out, held = step(x.at(slice(None), slice(t, t + 1)), held, position=position + t)
        want.append(out)
    want = np.concatenate(want, axis=1)
    for b, n in enumerate(totals):
        scale = max(1, np.abs(want[b, :n]).max())
        np.testing.assert_allclose(got[b, :n], want[b, :n], atol=1e-5 * scale)
    # The next step goes on from what was read.
    new = x.at(np.arange(2)[:, None], totals[:, None])
    out, _ = step(new, cache, position=totals.astype(np.int32))
    for b, n in enumerate(totals):
        np.testing.assert_allclose(
            out[b, 0], want[b, n], atol=1e-5 * max(1, np.abs(want[b, n]).max())
        )


@pytest.mark.parametrize("slab", [5, 32])
def test_slabs_of_a_cache_are_one_softmax(slab, monkeypatch):
    """With grouped heads, a bias by distance and sinks, beside the whole call."""
    monkeypatch.setattr(reading, "SLAB", slab)
    op, n = dense.dense(learned_sinks=True, soft_cap=2.0), 23
    x = draw(op, 2, n, n_heads=4, n_kv_heads=2)._replace(params={"sinks": jnp.arange(4.0)})

    def bias(queries, keys):
        far = (queries[:, :, None] - keys[:, None])[:, None].astype(jnp.float32)
        return -far * jnp.arange(1.0, 5.0)[:, None, None] / 8

    @jax.jit
    def read(x, cache, position, lengths):
        options = dict(position=position, lengths=lengths, bias=bias)
        return op.read_on(x.params, x.q, x.k, x.v, cache, **options)

    outs, cache = [], empty(op, x)
    for start in (0, 9, 18):
        piece = x.at(slice(None), slice(start, start + 9))
        n_new = piece.q.shape[1]
        out, cache, _ = read(piece, cache, np.full(2, start), np.full(2, n_new))
        outs.append(out)
    at = jnp.arange(n)[None]
    want = inputs.call(op, x, causal=True, bias=bias(at, at))
    np.testing.assert_allclose(np.concatenate(outs, axis=1), want, atol=1e-5)

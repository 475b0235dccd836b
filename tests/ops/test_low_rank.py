"""Linformer, Nystromformer and Long-Short: where they are dense.

`low_rank.py` has their references, and the shared tests compare with those.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, linformer, local, long_short, nystromformer

KEY = jax.random.key(0)


def draw(length=23, d_qk=4, scale=1, seed=0):
    x = np.random.default_rng(seed).normal(size=(3, 2, length, 2, d_qk)).astype(np.float32)
    return x[0] * scale, x[1] * scale, x[2]


def attend(op, q, k, v, params=None, **options):
    params = op.init(KEY, op.dims(q, v)) if params is None else params
    return op(q, k, v, params=params, rng=KEY, **options)


# Where they are dense attention.


@pytest.mark.parametrize("share", ["none", "heads", "values"])
def test_linformer_with_identities_is_dense(share):
    q, k, v = draw()
    one = jnp.eye(30)[:, :23]  # of a longer maximal length
    one = jnp.stack([one, one]) if share == "none" else one
    params = {"e": one} if share == "values" else {"e": one, "f": one}
    out = attend(linformer.linformer(n_projected=23, share=share), q, k, v, params)
    np.testing.assert_allclose(out, dense.dense()(q, k, v), atol=1e-6)


def test_linformer_refuses_what_is_longer_than_its_weights():
    q, k, v = draw()
    with pytest.raises(ValueError, match="q has 23 positions, but linformer's weights are for 20"):
        attend(linformer.linformer(), q, k, v, {"e": jnp.ones((20, 4)), "f": jnp.ones((20, 4))})


def test_nystromformer_with_a_landmark_for_each_token_is_dense():
    q, k, v = draw()
    errors = [
        np.abs(
            attend(nystromformer.nystromformer(n_landmarks=64, n_iterations=n), q, k, v)
            - dense.dense()(q, k, v)
        ).max()
        for n in (2, 6, 14)
    ]
    assert errors[0] > 0.1 > errors[1] > errors[2]
    assert errors[2] < 1e-3


def test_the_pseudo_inverse():
    a = jax.nn.softmax(jax.random.normal(KEY, (3, 12, 12)), axis=-1)
    got = nystromformer.pseudo_inverse(a, 20)
    np.testing.assert_allclose(got, np.linalg.pinv(np.asarray(a, np.float64)), atol=2e-3)
    # Of less than full rank, with zeros for what is not there.
    a = np.zeros((5, 5), np.float32)
    a[:4, :4] = 0.25
    np.testing.assert_allclose(nystromformer.pseudo_inverse(a, 6), a, atol=1e-6)
    np.testing.assert_array_equal(nystromformer.pseudo_inverse(np.zeros_like(a), 6), 0)


@pytest.mark.parametrize("length, n_landmarks", [(12, 4), (13, 4), (3, 7)])
def test_landmarks_are_means_of_equal_segments(length, n_landmarks):
    """As the paper has them where the length is a multiple; whatever padding stands between."""
    x = np.random.default_rng(0).normal(size=(1, length, 1, 2)).astype(np.float32)
    groups = nystromformer.landmark_groups(length, None, n_landmarks)
    got = nystromformer.segment_means(x, groups)
    if length % n_landmarks == 0:
        want = x.reshape(1, n_landmarks, -1, 1, 2).mean(axis=2)
        np.testing.assert_allclose(got, want, atol=1e-6)
    sizes = np.asarray(groups.real.sum(axis=-1))
    assert sizes.sum() == length and sizes.max() - sizes.min() <= 1
    among = np.full((1, 2 * length, 1, 2), np.nan, np.float32)
    among[:, ::2] = x
    segments = jnp.asarray(np.arange(2 * length) % 2 == 0)[None].astype(jnp.int32)
    padded = nystromformer.landmark_groups(2 * length, segments, n_landmarks)
    there = nystromformer.segment_means(np.nan_to_num(among), padded)
    some = np.asarray(padded.real.any(axis=-1))[0]
    np.testing.assert_allclose(there[:, some], got, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_long_short_without_its_long_part_is_local(causal):
    q, k, v = draw()
    op = long_short.long_short(window=5, rank=0, dual_norm=False)
    window = local.local(window=5, chunk_len=4, n_chunks_after=1)
    want = window(q, k, v, causal=causal)
    np.testing.assert_allclose(attend(op, q, k, v, causal=causal), want, atol=1e-6)
    whole = long_short.long_short(window=23, rank=0, dual_norm=False)
    want = dense.dense()(q, k, v, causal=causal)
    np.testing.assert_allclose(attend(whole, q, k, v, causal=causal), want, atol=1e-6)


def test_long_short_with_a_summary_of_each_position_is_dense():
    q, k, v = draw()
    op = long_short.long_short(window=1, rank=1, chunk_len=1, dual_norm=False)
    want = dense.dense()(q, k, v, causal=True)
    np.testing.assert_allclose(attend(op, q, k, v, causal=True), want, atol=1e-6)

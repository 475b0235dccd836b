"""The loss that moves queries towards the keys that dense attention weighs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import advanced, measured
from reformax.declared import SettingError
from reformax.ops import asymmetric_lsh, lsh
from reformax.ops.hashing.bucket_loss import log_collision
from reformax.ops.hashing.centring import centred
from reformax.ops.numerics.normalization import length_normalize
from tests.ops import inputs

HASHES = dict(chunk_len=4, n_buckets=8, n_hashes=2)
OPS = [lsh.lsh, asymmetric_lsh.asymmetric_lsh]


def attend(op, causal, segment_ids=None):
    def run(q, k, v):
        call = dict(segment_ids=segment_ids, causal=causal)
        plan = op.plan((), q, k, **call, rng=jax.random.key(1), train=True)
        return op.apply((), q, k, v, plan=plan, **call)

    return run


def exponent(c):
    return jnp.where(c < 0, 1 - 2 * c, (1 - c) / (1 + jnp.maximum(c, 0)))


def whole_matrix(q, k, hashed, sees):
    """The mean divergence of all queries, from its definition."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(sees, logits, -1e30), axis=-1)
    weights = jax.lax.stop_gradient(jnp.where(sees, weights, 0))
    norm = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    cosine = jnp.minimum(jnp.einsum("btnh,bsnh->bnts", norm(q), norm(hashed)), 1 - 1e-4)
    p = jnp.minimum(8.0 ** -exponent(cosine), 1 - 1e-4)
    share = jnp.where(sees, 1 - (1 - p) ** 2, 0)
    share = share / jnp.maximum(share.sum(axis=-1, keepdims=True), 1e-30)
    logs = jnp.log(jnp.maximum(weights, 1e-30)) - jnp.log(jnp.maximum(share, 1e-30))
    loss = jnp.where(weights > 0, weights * logs, 0).sum(axis=-1)
    return loss.sum() / jnp.broadcast_to(sees.any(axis=-1), loss.shape).sum()


@pytest.mark.parametrize("factory", OPS)
@pytest.mark.parametrize("causal, packed", [(True, False), (False, True)])
def test_the_gradient_is_that_of_the_whole_matrix_and_the_output_stays(factory, causal, packed):
    op, plain = factory(**HASHES, bucket_loss=0.7), factory(**HASHES)
    x = inputs.draw(op, length=20, seed=2)
    q, k, v = (None if y is None else jnp.asarray(y) for y in x[:3])
    ids = np.r_[[1] * 11, [2] * 6, [0] * 3][None].repeat(2, 0) if packed else np.ones((2, 20), int)
    sees = (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, None]
    sees = sees & np.tri(20, dtype=bool) if causal else sees
    sees = sees & ~np.eye(20, dtype=bool) if op.shared_qk else sees
    ids = jnp.asarray(ids, jnp.int32) if packed else None

    def reference(q, k):
        keys = length_normalize(q) if op.shared_qk else k
        hashed = keys if op.shared_qk else centred(k, ids, causal)
        return 0.7 * whole_matrix(q, keys, hashed, sees)

    def loss(op, q, k):
        out = attend(op, causal, ids)(q, k, v)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    arguments = (1,) if op.shared_qk else (1, 2)
    gradient = jax.jit(jax.grad(loss, arguments, has_aux=True), static_argnums=0)
    (with_loss, out), (without, same) = gradient(op, q, k), gradient(plain, q, k)
    np.testing.assert_array_equal(out, same)
    want = jax.jit(jax.grad(reference, tuple(i - 1 for i in arguments)))(q, k)
    for a, b, c in zip(with_loss, without, want, strict=True):
        np.testing.assert_allclose(a - b, c, atol=3e-5)
        assert np.abs(c).max() > 1e-3


@pytest.mark.parametrize("factory", OPS)
def test_what_is_in_padding_changes_no_gradient(factory):
    op = factory(**HASHES, bucket_loss=1.0)
    x = inputs.draw(op, length=20, seed=2)
    ids = jnp.asarray(np.r_[[1] * 16, [0] * 4][None].repeat(2, 0), jnp.int32)
    v = jnp.ones_like(x.v)

    def gradient(fill):
        arrays = [jnp.asarray(y).at[:, 16:].set(fill) for y in x[:2] if y is not None]

        def loss(arrays):
            q, k = arrays if len(arrays) == 2 else (*arrays, None)
            return 0 * attend(op, True, ids)(q, k, v)[:, :16].sum()

        return [g[:, :16] for g in jax.grad(loss)(arrays)]

    for one, other in zip(gradient(jnp.nan), gradient(0.0), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)
        assert np.abs(one).max() > 1e-4


def test_the_probability_is_that_of_any_of_the_hashes():
    cosine = jnp.linspace(-0.99, 0.99, 41)
    run = jax.jit(log_collision, static_argnums=(1, 2))
    logs = (np.asarray(run(cosine, 64, n), np.float64) for n in (1, 4))
    one, four = map(np.exp, logs)
    np.testing.assert_allclose(four, -np.expm1(4 * np.log1p(-one)), rtol=1e-3)
    np.testing.assert_allclose(one, 64.0 ** -np.asarray(exponent(cosine), np.float64), rtol=1e-4)
    slope = jax.jit(jax.vmap(jax.grad(lambda c: log_collision(c, 2**14, 8))))
    slopes = slope(jnp.linspace(-1, 1, 401))
    assert (slopes >= 0).all() and slopes.max() < 2.1 * math.log(2**14)


@pytest.mark.parametrize("factory", OPS)
def test_a_step_draws_its_queries_and_reports_their_loss(factory):
    """Over many steps the mean is that of all queries."""
    op = factory(**HASHES, bucket_loss=0.7, loss_queries=32, report_loss=True)
    x = inputs.draw(op, batch=1, length=128, seed=2)
    q, k, v = (None if y is None else jnp.asarray(y) for y in x[:3])
    keys = length_normalize(q) if op.shared_qk else k
    hashed = keys if op.shared_qk else centred(k, None, True)
    sees = np.tri(128, k=-1 if op.shared_qk else 0, dtype=bool)[None, None]
    params, call = op.init(None, op.dims(q, v)), dict(segment_ids=None, causal=True)
    plan_of = functools.partial(op.plan, **call, rng=jax.random.key(1), train=True)
    plan = jax.jit(plan_of)(params, q, k)

    def out(params, rng):
        return 0 * op.apply(params, q, k, v, plan=plan, **call, rng=rng).sum()

    reported = jax.jit(jax.vmap(lambda rng: measured(advanced(params, jax.grad(out)(params, rng)))))
    found = reported(jax.random.split(jax.random.key(3), 64))["bucket_loss"]
    assert len(set(found.tolist())) == 64
    np.testing.assert_allclose(found.mean(), whole_matrix(q, keys, hashed, sees), rtol=0.03)


@pytest.mark.parametrize("factory", OPS)
def test_no_loss_is_no_report(factory):
    with pytest.raises(SettingError, match="report_loss is True and bucket_loss 0"):
        factory(report_loss=True)
    with pytest.raises(SettingError, match="loss_queries is 8 and bucket_loss 0: set bucket_loss"):
        factory(loss_queries=8)


@pytest.mark.slow
@pytest.mark.parametrize("factory", OPS)
def test_steps_along_it_put_more_of_dense_attention_s_mass_into_buckets(factory):
    op = factory(chunk_len=8, n_buckets=16, n_hashes=1, bucket_loss=1.0)
    x = inputs.draw(op, length=96, d_qk=8, d_v=16, seed=3)
    q, k = 2 * jnp.asarray(x.q), None if x.k is None else 2 * jnp.asarray(x.k) + 1
    arrays = q if k is None else (q, k)

    def pair(arrays):
        return (arrays, None) if k is None else arrays

    def kept(arrays):
        q, k = pair(arrays)
        call, shares = dict(segment_ids=None, causal=True), []
        for seed in range(8):
            plan = op.plan((), q, k, **call, rng=jax.random.key(seed), train=True)
            shares.append(op.kept_mass((), q, k, x.v, plan=plan, **call))
        found = jnp.stack(shares)
        return found[..., 0].sum() / found[..., 1].sum()

    step = jax.jit(jax.grad(lambda arrays: 0 * attend(op, True)(*pair(arrays), x.v).sum()))
    before, measure = arrays, jax.jit(kept)
    for _ in range(40):
        arrays = jax.tree.map(lambda y, d: y - 100 * d, arrays, step(arrays))
    assert measure(arrays) > measure(before) + 0.03


def test_two_sequences_are_refused():
    op = asymmetric_lsh.asymmetric_lsh(**HASHES, bucket_loss=1.0)
    x, y = inputs.draw(op, length=20), inputs.draw(op, length=30)
    with pytest.raises(NotImplementedError, match="bucket_loss is 1.0 and queries and keys are of"):
        op(x.q, y.k, y.v, rng=jax.random.key(0))

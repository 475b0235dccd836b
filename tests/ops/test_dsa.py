"""DeepSeek sparse attention: what its indexer chooses, and what it learns from."""

import jax
import jax.numpy as jnp
import numpy as np

from reformax.ops import dense, dsa
from tests.helpers import assert_trees_close
from tests.ops import indexed

OPTIONS = dict(n_index_heads=3, d_index=4)


def numbers(length, seed=0):
    return np.random.default_rng(seed).normal(size=(3, 2, length, 2, 8)).astype(np.float32)


def weights(op, q):
    return op.init(jax.random.key(1), op.dims(q, q))


def test_a_query_chooses_the_best_of_those_before_it():
    q, k, _ = numbers(21)
    op = dsa.dsa(top_k=5, **OPTIONS)
    params = weights(op, q)
    ids = np.repeat([[1, 2, 0], [1, 1, 1]], 7, axis=1)
    options = dict(segments=ids, causal=True, rng=None, train=True)
    plan = np.asarray(jax.jit(lambda *x: op.plan(*x, **options))(params, q, k))
    scores = np.asarray(indexed.scores(OPTIONS, params, q, k))
    for b, t in np.ndindex(plan.shape[:2]):
        may = [s for s in range(t + 1) if ids[b, t] and ids[b, s] == ids[b, t]]
        chosen = set(plan[b, t]) - {-1}
        assert len(chosen) == min(5, len(may)) and chosen <= set(may)
        left = [scores[b, t, s] for s in set(may) - chosen]
        assert not left or min(scores[b, t, list(chosen)]) >= max(left) - 1e-6


def test_the_indexer_learns_from_the_attention_and_from_nothing_else():
    """Eq. 3: with all keys chosen, the slope of the divergence from dense attention's weights."""
    q, k, v = numbers(9)
    op = dsa.dsa(top_k=9, index_loss=0.5, **OPTIONS)
    params = weights(op, q)
    attend = lambda params, q, k, v: op(q, k, v, causal=True, params=params)  # noqa: E731
    np.testing.assert_allclose(
        attend(params, q, k, v), dense.dense()(q, k, v, causal=True), atol=1e-6
    )

    seen = np.tril(np.ones((9, 9), bool))
    eye = np.broadcast_to(np.eye(9, dtype=np.float32)[None, :, None], (2, 9, 2, 9))
    attention = jnp.swapaxes(dense.dense()(q, k, eye, causal=True), 1, 2).mean(axis=1)

    def divergence(params):
        scores = jnp.where(seen, indexed.scores(OPTIONS, params, q, k), -1e30)
        return -jnp.where(seen, attention * jax.nn.log_softmax(scores), 0).sum() / 18

    want = jax.tree.map(lambda x: 0.5 * x, jax.grad(divergence)(params))
    for scale in (0.0, 3.0):
        total = lambda *x, scale=scale: scale * jnp.sin(attend(*x)).sum()  # noqa: E731
        got, *others = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(params, q, k, v)
        assert_trees_close(got, want, 1e-5)
        assert all(np.any(x) == bool(scale) for x in others)

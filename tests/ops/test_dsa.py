"""DeepSeek sparse attention: what its indexer chooses, and what it learns from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.models import lm
from reformax.ops import dense, dsa, local
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
        jax.jit(attend)(params, q, k, v), dense.dense()(q, k, v, causal=True), atol=1e-6
    )

    seen = np.tril(np.ones((9, 9), bool))
    eye = np.broadcast_to(np.eye(9, dtype=np.float32)[None, :, None], (2, 9, 2, 9))
    attention = jnp.swapaxes(dense.dense()(q, k, eye, causal=True), 1, 2).mean(axis=1)

    def divergence(params):
        scores = jnp.where(seen, indexed.scores(OPTIONS, params, q, k), -1e30)
        return -jnp.where(seen, attention * jax.nn.log_softmax(scores), 0).sum() / 18

    want = jax.tree.map(lambda x: 0.5 * x, jax.jit(jax.grad(divergence))(params))
    for scale in (0.0, 3.0):
        total = lambda *x, scale=scale: scale * jnp.sin(attend(*x)).sum()  # noqa: E731
        got, *others = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(params, q, k, v)
        assert_trees_close(got, want, 1e-5)
        assert all(np.any(x) == bool(scale) for x in others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lm.ReformerLM, lm.TransformerLM])
def test_in_a_model_the_loss_reaches_the_indexer_alone(kind):
    sizes = dict(vocab_size=32, d_model=16, d_ff=16, d_attention_key=8, d_attention_value=8)
    op = dsa.dsa(top_k=6, n_index_heads=2, d_index=4)
    cycle = local.local(chunk_len=8), op
    model = kind(**sizes, n_heads=2, n_layers=2, attention_type=cycle, mode="train")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 24)))
    params = model.init_params(jax.random.key(0), tokens.shape)
    total = lambda params: 0 * model.features(params, tokens, rng=jax.random.key(1)).sum()  # noqa: E731
    gradient = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(total))(params))
    reached = [jax.tree_util.keystr(path) for path, x in gradient if np.any(x)]
    assert len(reached) == 3
    assert all("['op']" in name for name in reached)

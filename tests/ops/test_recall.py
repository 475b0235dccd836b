"""What the hashing is for: the keys that LSH attention shows are those that carry the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.recall import mean_recall
from reformax.ops import asymmetric_lsh, smyrf
from reformax.ops.masking.masks import visibility
from reformax.ops.softmax.reference import reference_attention


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_recall_of_the_attention_weight_grows_with_the_hashes(causal):
    """1,024 vectors in 32 clusters, chunks of 64."""
    weight, keys = zip(
        *(mean_recall(n, n_seeds=2, causal=causal) for n in (1, 2, 4, 8)), strict=True
    )
    assert weight[0] < weight[1] < weight[2] < weight[3]
    assert weight[3] > 0.9
    # One hash shows a query far more of the weight than of the keys, so it is not the number of
    # keys that does it.
    assert weight[0] > 2 * keys[0]


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "op", [asymmetric_lsh.asymmetric_lsh, smyrf.smyrf], ids=lambda f: f.__name__
)
def test_separate_queries_and_keys_find_each_other(op, causal):
    """Keys have a mean, and in two segments two: no softmax sees a mean."""
    rng = np.random.default_rng(0)
    length, size = 256, 32
    keys = rng.normal(size=(length, size))
    queries = 2 * keys[rng.permutation(length)] + rng.normal(size=keys.shape)
    second = np.arange(length) >= length // 2
    keys = keys + np.where(second[:, None], 3 * rng.normal(size=size), 3 * rng.normal(size=size))
    q, k = (x[None, :, None].astype(np.float32) for x in (queries, keys))
    segment_ids = second[None] + 1
    names = np.eye(length, dtype=np.float32)[None, :, None]
    attend = op(chunk_len=16, n_hashes=1, attend_self_if_alone=False)

    @jax.jit
    def shares(names, rng):
        mask = visibility(length, length, causal=causal, segment_ids=segment_ids)
        truth = reference_attention(q, k, names, mask)[0, :, 0]
        # Equal logits: what a query sees is above 0, however small its weight.
        plan = attend.plan((), q, k, segment_ids=segment_ids, causal=causal, rng=rng, train=True)
        options = dict(plan=plan, segment_ids=segment_ids, causal=causal, dropout=0.0, rng=None)
        shown = attend.apply((), 0 * q, k, names, **options)[0, :, 0] > 0
        n_keys = mask[0, 0].sum(axis=-1)
        many = n_keys > length // 4  # of a few keys all are near
        weight = jnp.sum(truth, where=shown, axis=-1).mean(where=many)
        return weight, (shown.sum(axis=-1) / n_keys).mean(where=many)

    for seed in range(3):
        weight, share = shares(names, jax.random.key(seed))
        assert weight > 1.3 * share

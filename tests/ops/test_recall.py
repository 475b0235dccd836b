"""What the hashing is for: the keys that LSH attention shows are those that carry the weight."""

import pytest

from benchmarks.recall import mean_recall


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_recall_of_the_attention_weight_grows_with_the_hashes(causal):
    """1,024 vectors in 32 clusters, chunks of 64."""
    weight, keys = zip(
        *(mean_recall(n, n_seeds=2, causal=causal) for n in (1, 2, 4, 8)), strict=True
    )
    assert weight[0] < weight[1] < weight[2] < weight[3]
    assert weight[3] > 0.9
    # One round shows a query far more of the weight than of the keys, so it is not the number of
    # keys that does it.
    assert weight[0] > 2 * keys[0]

"""Hash-sparse attention: the buckets, the tiles that are visited, and linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import hash_sparse
from reformax.ops.hashing import sorted_groups
from reformax.ops.hashing.angular import draw_rotations

KEY = jax.random.key(2)


def test_a_group_is_a_bucket_of_a_segment():
    """Buckets by the definition, in float64; both orders go by group and position."""
    q, k = np.random.default_rng(0).normal(size=(2, 2, 40, 3, 8)).astype(np.float32)
    ids = np.repeat([[7, 0, 2, 7], [1, 1, 3, 0]], 10, axis=1)
    op = hash_sparse.hash_sparse(n_buckets=4)
    options = dict(causal=True, rng=KEY, train=True)
    plan = jax.jit(lambda q, k: op.plan((), q, k, segment_ids=ids, **options))(q, k)
    rotations = np.asarray(draw_rotations(q, (4,), 1, KEY), float)[:, :, 0]
    for x, order in zip((q, k), plan, strict=True):
        rotated = np.einsum("btnh,nhf->bntf", x, rotations)
        bucket = np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1)
        position, group = map(np.asarray, order)
        segment = np.take_along_axis(np.broadcast_to(ids[:, None], bucket.shape), position, -1)
        bucket = np.take_along_axis(bucket, position, -1)
        slot = np.lexsort((position, group))
        np.testing.assert_array_equal(slot, np.broadcast_to(np.arange(40), slot.shape))
        for b, n in np.ndindex(2, 3):
            pairs = {*zip(group[b, n], segment[b, n], bucket[b, n], strict=True)}
            pairs = {(g, *((s, c) if s else (0, 0))) for g, s, c in pairs}
            assert len(pairs) == len({g for g, *_ in pairs}) == len({x[1:] for x in pairs})
            assert not np.any((group[b, n] == 0) != (segment[b, n] == 0))


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_share_a_pair_meet(causal):
    """Tiles of one position are visited only if they have a visible pair."""
    rng = np.random.default_rng(1)
    groups = np.sort(rng.integers(0, 4, (2, 5, 23)), axis=-1)
    positions = [[rng.permutation(23) for _ in range(5)] for _ in range(2)]
    queries, keys = (
        sorted_groups.SortedSequence(
            jnp.asarray([p[np.lexsort((p, g))] for p, g in zip(*each, strict=True)]),
            jnp.asarray(each[1]),
        )
        for each in zip(positions, groups, strict=True)
    )
    pairs = np.asarray(queries.group)[..., None] == np.asarray(keys.group)[:, None]
    pairs &= (np.asarray(queries.group) != 0)[..., None]
    if causal:
        pairs &= np.asarray(queries.position)[..., None] >= np.asarray(keys.position)[:, None]
    find = jax.jit(sorted_groups.visits, static_argnums=(0, 1))
    for sizes in ((1, 1), (4, 3)):
        plan = find(sizes, causal, queries, keys)
        for visits, visible, tile_sizes in (
            (plan.by_query, pairs, sizes),
            (plan.by_key, pairs.swapaxes(1, 2), sizes[::-1]),
        ):
            n_tiles, n_other_tiles = (-(-23 // n) for n in tile_sizes)
            shape = 5, n_tiles, tile_sizes[0], n_other_tiles, tile_sizes[1]
            padded = np.zeros((5, n_tiles * tile_sizes[0], n_other_tiles * tile_sizes[1]), bool)
            padded[:, :23, :23] = visible
            has_pair = padded.reshape(shape).any(axis=(2, 4))
            number = np.arange(n_other_tiles)
            start, stop = (np.asarray(x)[..., None] for x in visits[:2])
            visited = (number >= start) & (number < stop)
            assert not np.any(has_pair & ~visited)
            if sizes == (1, 1):
                np.testing.assert_array_equal(has_pair, visited)


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """Both passes, also where many positions have one bucket."""
    op = hash_sparse.hash_sparse(n_buckets=2, impl="xla")

    def temp(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        attend = lambda q, k, v: op(q, k, v, causal=True, rng=KEY).sum()  # noqa: E731
        lowered = jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(x, x, x)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(8192) < 2.5 * temp(4096) < 2.5 * 4096**2

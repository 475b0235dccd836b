"""Block-sparse attention beyond the shared tests: patterns, lists, cost, heads, kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import block_patterns, block_sparse
from reformax.ops.calls.call import Call
from reformax.ops.kernels.triton import block_sparse as kernel
from reformax.ops.masking.masks import except_self, visibility
from reformax.ops.sharding import array_calls
from reformax.ops.softmax import block_lists, tiles
from reformax.ops.softmax.block_lists import BlockInputs
from reformax.ops.softmax.dropout import seed_words
from reformax.ops.softmax.reference import reference_attention
from tests.helpers import assert_trees_close, with_gradients

KEY = jax.random.key(0)


# Patterns, as the papers define their sets.


def _butterfly(i, j):
    return i == j or any(i ^ j == 2**m for m in range(20))


def _two_factors_and_global(i, j):
    return i == j or i ^ j in (1, 2) or min(i, j) < 1


def _strided(i, j):
    return j in range(i - 3, i + 4) or (i - j) % 3 == 0


def _fixed(i, j):
    return i // 4 == j // 4 or j % 4 in (2, 3)


def _longformer(i, j):
    return i - 2 <= j <= i + 1 or i < 1 or j < 1


@pytest.mark.parametrize(
    "pattern, sees",
    [
        (block_patterns.butterfly(), _butterfly),
        (block_patterns.butterfly(n_factors=2, n_global=1), _two_factors_and_global),
        (block_patterns.strided(stride=3), _strided),
        (block_patterns.fixed(stride=4, n_summary=2), _fixed),
        (block_patterns.local_global(n_before=2), _longformer),
    ],
    ids=["butterfly", "butterfly_global", "strided", "fixed", "local_global"],
)
def test_a_pattern_is_its_definition_at_every_length(pattern, sees):
    for shape in ((1, 1), (13, 13), (32, 32), (5, 17), (17, 3)):
        want = [[sees(i, j) for j in range(shape[1])] for i in range(shape[0])]
        got = pattern(*shape)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, np.array(want))


def test_a_butterfly_has_a_logarithm_of_blocks_a_row():
    mask = block_patterns.butterfly()(512, 512)
    assert set(mask.sum(axis=0)) == set(mask.sum(axis=1)) == {1 + 9}
    assert np.tril(mask).sum() == 512 * (1 + 9 / 2)
    # The sum of the factors of a butterfly matrix, each a block diagonal of [[1, 1], [1, 1]].
    factors = [
        np.kron(np.eye(256 // 2**m), np.kron(np.ones((2, 2)), np.eye(2**m))) for m in range(9)
    ]
    np.testing.assert_array_equal(mask, sum(factors) > 0)


# Lists of tiles.


def layout(mask, block, length, causal=True, dropout=0.0):
    mask = np.asarray(mask)
    mask = mask if mask.ndim == 3 else mask[None]
    return block_lists.Layout(mask, block, block, length, length, causal, dropout)


def check_lists(rows, visible, tile_row, tile_column):
    """Each tile with a visible pair is once in its row's list, whole tiles first."""
    n_masks, n_rows, n_columns = visible.shape
    tiles = np.pad(visible, ((0, 0), (0, -n_rows % tile_row), (0, -n_columns % tile_column)))
    shape = n_masks, tiles.shape[1] // tile_row, tile_row, -1, tile_column
    tiles = tiles.reshape(shape).sum(axis=(2, 4)).reshape(-1, tiles.shape[2] // tile_column)
    for row, start, count, n_whole in zip(tiles, rows.start, rows.count, rows.n_whole, strict=True):
        entries = rows.entries[start : start + count]
        assert sorted(entries) == list(np.flatnonzero(row))
        whole = entries[:n_whole]
        assert np.all(row[whole] == tile_row * tile_column)
        yield np.setdiff1d(np.flatnonzero(row == tile_row * tile_column), whole)


def test_random_blocks_of_bigbird():
    """Each block draws up to 3 earlier blocks, and a longer sequence changes no draw."""
    options = dict(n_before=1, n_after=1, n_global=2, n_random=3)
    mask = block_patterns.bigbird(**options)(60, 60)
    near = block_patterns.local_global(n_before=1, n_after=1, n_global=2)(60, 60)
    random = mask & ~near
    np.testing.assert_array_equal(mask, mask.T)
    candidates = np.maximum(np.arange(60) - 1 - 2, 0)
    np.testing.assert_array_equal(np.tril(random).sum(axis=1), np.minimum(candidates, 3))
    assert np.all(mask >= near)
    np.testing.assert_array_equal(block_patterns.bigbird(**options)(77, 64)[:60, :60], mask)
    assert np.any(mask != block_patterns.bigbird(**options, seed=1)(60, 60))
    # The last block draws each of 16 others in 3 of 16 seeds, with a deviation of 0.02.
    # What asks for more than there are gets all, without a draw for each.
    everything = block_patterns.bigbird(n_random=10**8)(60, 60)
    assert everything.all()

    pattern = functools.partial(block_patterns.bigbird, n_before=0, n_after=0, n_global=0)
    drawn = np.mean([pattern(seed=i)(17, 17)[16, :16] for i in range(400)], axis=0)
    assert np.abs(drawn - 3 / 16).max() < 0.1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile_q, tile_k", [(8, 8), (4, 2), (2, 8)])
def test_lists_hold_each_tile_once(causal, tile_q, tile_k):
    length, rng = 37, np.random.default_rng(0)
    mask = rng.random((2, 5, 5)) < 0.5
    blocks = layout(mask, 8, length, causal)
    visible = np.kron(mask, np.ones((8, 8)))[:, :length, :length]
    visible = visible * (np.tri(length) if causal else 1)
    for rows, seen, sizes in (
        (blocks.rows(tile_q, tile_k), visible, (tile_q, tile_k)),
        (blocks.columns(tile_q, tile_k), np.swapaxes(visible, 1, 2), (tile_k, tile_q)),
    ):
        assert not any(len(missed) for missed in check_lists(rows, seen, *sizes))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile_q, tile_k", [(8, 8), (4, 2), (2, 8), (16, 4)])
@pytest.mark.parametrize("n_queries, n_keys", [(32, 32), (37, 37), (32, 21), (9, 48), (50, 16)])
def test_lists_of_everything_hold_each_tile_once(n_queries, n_keys, causal, tile_q, tile_k):
    everything = block_lists.FullLayout(n_queries, n_keys, causal, 0.0)
    visible = np.tri(n_queries, n_keys) if causal else np.ones((n_queries, n_keys))
    for rows, seen, sizes in (
        (everything.rows(tile_q, tile_k), visible, (tile_q, tile_k)),
        (everything.columns(tile_q, tile_k), visible.T, (tile_k, tile_q)),
    ):
        missed = list(check_lists(rows, seen[None], *sizes))
        # A whole tile may be listed as masked where the last row of tiles is incomplete.
        assert n_queries % tile_q or not any(map(len, missed))


def test_merging_parts_is_summing_them():
    rng = np.random.default_rng(0)
    per_row = np.array([1, 70, 2, 1, 9, 8])
    parts = rng.normal(size=(per_row.sum(), 3)).astype(np.float32)
    want = [part.sum(axis=0) for part in np.split(parts, np.cumsum(per_row)[:-1])]
    merged = jax.jit(lambda parts: block_lists.merge_sums(parts, per_row))(parts)
    np.testing.assert_allclose(merged, want, atol=1e-5)


# Cost.


@pytest.mark.parametrize(
    "pattern",
    [block_patterns.butterfly(), block_patterns.local_global(), block_patterns.fixed(stride=4)],
    ids=["butterfly", "local_global", "fixed"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_nonzero_blocks_are_computed_once_in_each_pass_and_others_never(
    pattern, causal, monkeypatch
):
    """Also for very uneven rows: a full row and a full column among short ones."""
    ran, logits = [], tiles.logits

    def counted(tiling, x, group, queries, keys, q, k):
        jax.debug.callback(lambda *at: ran.append(at), queries.position[0], keys.position[0])
        return logits(tiling, x, group, queries, keys, q, k)

    monkeypatch.setattr(tiles, "logits", counted)
    traced_anew = array_calls._compiled.__wrapped__
    monkeypatch.setattr(array_calls, "_compiled", traced_anew)
    op = block_sparse.block_sparse(pattern=pattern, block_size=2, impl="xla")
    *arrays, d_out = np.random.default_rng(0).normal(size=(4, 1, 32, 1, 2)).astype(np.float32)
    jax.block_until_ready(with_gradients(functools.partial(op, causal=causal))(d_out, *arrays))
    jax.effects_barrier()
    mask = pattern(16, 16) & (np.tri(16, dtype=bool) if causal else True)
    want = [(2 * i, 2 * j) for i, j in np.argwhere(mask)]
    assert sorted((int(i), int(j)) for i, j in ran) == sorted(2 * want)


# Heads with different masks.


def random_case(per_head=True, n_heads=3, length=83, block=16):
    rng = np.random.default_rng(0)
    n = -(-length // block)
    mask = rng.random((n_heads, n, n)) < 0.4
    mask[:, 0] = mask[:, :, 0] = True  # global blocks
    mask[0, 2] = mask[0, :, 3] = False  # a row that sees no key, and an unseen column
    mask = mask if per_head else mask[0]
    arrays = (rng.normal(size=(2, length, n_heads, d)).astype(np.float32) for d in (8, 8, 5, 5))
    segment_ids = rng.integers(0, 3, (2, length)).astype(np.int32)
    return mask, tuple(arrays), segment_ids


def reference(mask, block, causal, segment_ids, dropout):
    def attend(q, k, v):
        full = np.kron(mask, np.ones((block, block))).astype(bool)
        full = full.reshape(-1, *full.shape[-2:])[:, : q.shape[1], : k.shape[1]]
        visible = full & visibility(q.shape[1], k.shape[1], causal=causal, segment_ids=segment_ids)
        return reference_attention(q, k, v, visible, Call(dropout=dropout, seed=seed_words(KEY, 2)))

    return attend


@pytest.mark.parametrize("causal, packed", [(True, False), (False, True)])
def test_heads_have_masks_of_their_own(causal, packed):
    mask, (*arrays, d_out), segment_ids = random_case()
    masks = dict(causal=causal, segment_ids=segment_ids if packed else None, dropout=0.2)
    op = block_sparse.block_sparse(pattern=mask, block_size=16, impl="xla")
    got = with_gradients(functools.partial(op, **masks, rng=KEY))(d_out, *arrays)
    assert_trees_close(got, with_gradients(reference(mask, 16, **masks))(d_out, *arrays))


def test_a_step_sees_the_blocks_of_its_head():
    def pattern(n_blocks_q, n_blocks_k):
        return np.stack([p(n_blocks_q, n_blocks_k) for p in patterns])

    patterns = block_patterns.butterfly(), block_patterns.fixed(stride=3)
    op = block_sparse.block_sparse(pattern=pattern, block_size=4)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 33, 2, 4)).astype(np.float32)
    want = jax.jit(functools.partial(op, causal=True))(q, k, v)[0, -1]

    @jax.jit
    def step(q, k, v):
        lengths = jnp.array([32])
        cache = op.init_cache((), q, k, v, plan=(), lengths=lengths, capacity=40, rng=None)
        last = (x[:, 32:] for x in (q, k, v))
        return op.step((), *last, cache, position=lengths)[0]

    out = step(q, k, v)
    np.testing.assert_allclose(out[0, 0], want, atol=1e-6)


# Kernels, interpreted.


@pytest.mark.slow  # whose parts the first of these has too
@pytest.mark.parametrize(
    "per_head, causal, packed, dropout, min_part, sizes",
    [
        (False, True, False, 0.0, 2, (16, 16)),
        pytest.param(None, True, True, 0.2, 2, (16, 32), marks=pytest.mark.slow),
        (None, False, True, 0.0, 16, (32, 16)),
        pytest.param(None, True, False, 0.0, 16, (16, 16), marks=pytest.mark.slow),
        pytest.param(True, False, True, 0.2, 1, (16, 32), marks=pytest.mark.slow),
        (True, True, False, 0.2, 16, (32, 16)),
    ],
)
def test_rows_in_parts_are_one_attention(
    per_head, causal, packed, dropout, min_part, sizes, monkeypatch
):
    monkeypatch.setattr(kernel, "MIN_PART", min_part)
    mask, (q, k, v, d_out), segment_ids = random_case(per_head, length=115, block=32)
    blocks = layout(mask, 32, q.shape[1], causal, dropout)
    if per_head is None:  # no mask at all
        mask, blocks = np.ones_like(mask), block_lists.FullLayout(115, 115, causal, dropout)
        segment_ids = np.sort(segment_ids, axis=1) if causal else segment_ids
    block_tiles = kernel.BlockTiles(*sizes, 4, 2)
    ids = (segment_ids, segment_ids) if packed else (None, None)

    @jax.jit
    def run(q, k, v, d_out):
        x = BlockInputs(q, k, v, *ids, seed_words(KEY, len(q)) if dropout else None)
        results = kernel.forward(blocks, x, tiles=block_tiles, interpret=True)
        both = block_tiles, block_tiles
        gradients = kernel.backward(blocks, x, results, d_out, tiles=both, interpret=True)
        return results[0], gradients

    attend = reference(mask, 32, causal, segment_ids if packed else None, dropout)
    want = with_gradients(attend)(d_out, q, k, v)
    assert_trees_close(run(q, k, v, d_out), want)


@pytest.mark.parametrize("by_query", [True, False])
def test_segments_leave_out_the_tiles_that_none_of_them_is_in(by_query):
    queries = np.repeat([1, 2, 3, 4, 0], [9, 1, 14, 5, 11]).astype(np.int32)
    keys = np.repeat([1, 2, 4, 7, 0], [8, 8, 3, 5, 8]).astype(np.int32)
    everything = block_lists.FullLayout(40, 32, causal=False, dropout=0.0)
    entries = (everything.rows if by_query else everything.columns)(8, 8).entries
    ids = (queries, keys) if by_query else (keys, queries)
    spans_of = jax.jit(
        lambda *x: kernel._spans(*(kernel._tile_ids(y[None], 8) for y in x), entries)
    )
    spans = spans_of(*ids)
    tiles_of_programs, other_tiles = ([set(tile) - {0} for tile in x.reshape(-1, 8)] for x in ids)
    for tile, span in zip(tiles_of_programs, np.stack(spans, axis=2)[0], strict=True):
        indices = np.flatnonzero([bool(tile & other_tiles[entry]) for entry in entries])
        assert list(range(*span[:2])) == list(indices)


@pytest.mark.parametrize("by_query", [True, False])
def test_tiles_of_one_segment_need_no_mask(by_query):
    """A run of them: others of the same segment behind it have a mask."""
    ids = np.repeat([1, 2, 3, 2, 4, 5, 4, 0], [8, 16, 8, 8, 9, 6, 9, 8]).astype(np.int32)
    everything = block_lists.FullLayout(72, 72, causal=False, dropout=0.0)
    entries = (everything.rows if by_query else everything.columns)(8, 8).entries

    @jax.jit
    def run(ids):
        of_tiles = kernel._tile_ids(ids[None], 8)
        return of_tiles.only, kernel._spans(of_tiles, of_tiles, entries)

    only, spans = run(ids)
    assert list(only[0]) == [1, 2, 2, 3, 2, 4, 0, 4, 0]
    spans = np.stack(spans, axis=2)[0, :, 2:]
    found = [sorted(entries[first:end].tolist()) for first, end in spans]
    of_two = [1, 2] if by_query else [4]
    of_four = [5] if by_query else [7]
    assert found == [[0], of_two, of_two, [3], of_two, of_four, [], of_four, []]


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [16, 32])
def test_long_segments_with_and_without_masks(causal, exclude_self, size):
    """Whole tiles before, between and behind masked ones; parts; rows of padding."""
    length = 150
    lengths = [[64, 40, 46], [100, 30, 20], [150, 0, 0], [0, 0, 150]]
    ids = np.stack([np.repeat([3, 1, 0], n) for n in lengths]).astype(np.int32)
    ids[1] = np.repeat([2, 1, 2, 0], [48, 40, 48, 14])
    q, k, v, d_out = np.random.default_rng(0).normal(size=(4, 4, length, 2, 8)).astype(np.float32)
    d_out = np.where(ids[..., None, None] != 0, d_out, 0)
    layout = block_lists.FullLayout(length, length, causal, 0.2, exclude_self=exclude_self)
    seed, tiles = seed_words(KEY, 4), kernel.BlockTiles(size, 16, 4, 2)

    @jax.jit
    def run(q, k, v, d_out):
        x = BlockInputs(q, k, v, ids, ids, seed)
        results = kernel.forward(layout, x, tiles=tiles, interpret=True)
        both = dict(tiles=(tiles, tiles), interpret=True)
        return results[0], kernel.backward(layout, x, results, d_out, **both)

    def attend(q, k, v):
        mask = visibility(length, length, causal=causal, segment_ids=ids)
        mask = except_self(mask, False) if exclude_self else mask
        call = Call(dropout=0.2, seed=seed)
        return reference_attention(q, k, v, mask, call)

    assert_trees_close(run(q, k, v, d_out), with_gradients(attend)(d_out, q, k, v))

"""Indexers: what a query chooses, from all keys and from candidates, and what that costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.ops import dsa
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing import streaming
from reformax.ops.indexing.candidates import Clustered, Coded, Hashed, Pooled
from reformax.ops.indexing.indexer import Indexer
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import Indexed, IndexQueries, scores_of_gathered
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.precision import MAX_INDEX, rounded

KEY = jax.random.key(3)
ALL_CLUSTERS = Clustered(stride=4, n_clusters=100, n_nearest=106)
ALL_CODES = Coded(n_bits=8, n_best=100)
ALL_BLOCKS = Pooled(block_sizes=(12, 4), n_blocks=100)
INDEXERS = {
    "all": Indexer(),
    "product": Indexer(score="product"),
    "local": Indexer(n_local=3),
    "grouped": Indexer(n_local=5, group=4),
    "pooled": Indexer(candidates=Pooled(block_sizes=(5,), n_blocks=2)),
    "levels": Indexer(n_local=2, candidates=Pooled(block_sizes=(12, 4), n_blocks=2)),
    "clustered": Indexer(candidates=Clustered(stride=5, n_clusters=2, n_nearest=4)),
    "hashed": Indexer(score="product", candidates=Hashed(n_hashes=3, n_buckets=4, n_nearest=6)),
    "hashed relu": Indexer(candidates=Hashed(n_hashes=2, n_nearest=5)),
    "coded": Indexer(n_local=2, candidates=Coded(n_bits=24, n_best=11)),
}


def integers(length, n_heads=3, size=4, seed=0, n_batch=2):
    """Vectors of -1, 0 and 1: scores are exact, and many of them are equal, most of those 0."""
    rng = np.random.default_rng(seed)
    shapes = (n_batch, length, n_heads, size), (n_batch, length, n_heads), (n_batch, length, size)
    queries, weights, keys = (rng.integers(-1, 2, s).astype(np.float32) for s in shapes)
    return Indexed(IndexQueries(queries, weights), keys)


def packed(length):
    """Contiguous segments with padding behind them, and one segment with padding in front."""
    position = np.arange(length)
    several = np.where(position < length - 3, 1 + position * 3 // length, 0)
    return np.stack([several, (position > 4).astype(np.int64)]).astype(np.int32)


def choose(indexer, x, top_k, causal, ids=None, key=KEY):
    if indexer.learns and not x.params:
        x = x._replace(params=indexer.candidates.init(KEY, x.keys.shape[2]))
    return np.asarray(_choose(indexer, x, ids, top_k, causal, key))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _choose(indexer, x, ids, top_k, causal, key):
    return indexer.choose(x, ids, top_k, causal, x.keys.shape[1], key)


def scores(indexer, x):
    products = np.einsum("btjd,bsd->btjs", x.queries.queries, x.keys)
    if indexer.score == "relu":
        products = np.maximum(products, 0)
    return np.einsum("btjs,btj->bts", products, x.queries.weights)


def plain(indexer, x, top_k, causal, ids):
    """The keys of each query: the local ones, and its leader's best by (score, position)."""
    found, length = scores(indexer, x), x.keys.shape[1]
    n_local, group = indexer.n_local, indexer.group
    sets = []
    for b, t in np.ndindex(found.shape[:2]):
        leader = t // group * group
        near = np.abs(np.arange(length) - t) < n_local
        if causal:
            near &= np.arange(length) <= t
        left_out = np.arange(length) > leader + group - 1 - n_local
        left_out &= np.arange(length) < leader + n_local
        visible = (ids[b] == ids[b, leader]) & (ids[b, leader] != 0)
        if causal:
            visible &= np.arange(length) <= leader
        choice = sorted(
            np.flatnonzero(visible & ~left_out), key=lambda s: (-found[b, leader, s], s)
        )
        n_near = min(n_local, length) if causal else max(2 * min(n_local, length) - 1, 0)
        sets.append(set(choice[: min(top_k - n_near, length)]) | set(np.flatnonzero(near)))
    return sets


def as_sets(chosen):
    """The set of each query, which has no position twice."""
    rows = [row[row >= 0] for row in chosen.reshape(-1, chosen.shape[-1])]
    assert all(len(set(row)) == len(row) for row in rows)
    return [set(row) for row in rows]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name, top_k", [("all", 9), ("product", 60), ("grouped", 14)])
def test_tiles_choose_what_one_row_of_scores_does(name, top_k, causal, is_packed, monkeypatch):
    monkeypatch.setattr(streaming, "TILE", 8)
    monkeypatch.setattr(streaming, "AT_A_TIME", 2**11)
    _choose.clear_cache()  # of programs of other tiles
    indexer, x = INDEXERS[name], integers(53)
    ids = packed(53) if is_packed else np.ones((2, 53), np.int32)
    got = choose(indexer, x, top_k, causal, ids)
    assert as_sets(got) == plain(indexer, x, top_k, causal, ids)
    again = choose(indexer, x, top_k, causal, ids)
    np.testing.assert_array_equal(got, again)


def test_zeros_of_either_sign_are_a_tie():
    """A negative weight times ReLU's 0 is -0, of a score that must not sort behind 0."""
    x = integers(40, n_heads=1)
    assert (x.queries.weights < 0).any()
    got = choose(Indexer(), x, 12, True)
    assert as_sets(got) == plain(Indexer(), x, 12, True, np.ones((2, 40), np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinity_is_the_largest_number_of_an_index_vector(dtype):
    x = jnp.array([np.inf, -np.inf, np.nan, 1e30, -3.0])
    np.testing.assert_array_equal(rounded(x, dtype), [MAX_INDEX, -MAX_INDEX, np.nan, MAX_INDEX, -3])
    gradient = jax.grad(lambda x: jnp.sum(rounded(x, dtype) * jnp.arange(5.0)))(x)
    np.testing.assert_array_equal(gradient, np.arange(5))


@pytest.mark.parametrize(
    "candidates, dtype", [(None, "float32"), (None, "bfloat16"), (ALL_BLOCKS, "float32")], ids=str
)
def test_kernels_choose_infinite_keys_where_array_operations_do(candidates, dtype):
    """Those of one infinite number and of several, by queries some of which are infinite too."""
    indexer, x, position = Indexer(candidates=candidates, dtype=dtype), integers(37), jnp.arange(37)
    x = jax.tree.map(lambda y: np.where(y == 0, np.float32(2), y), x)
    x.keys[:, 7], x.keys[:, 9, 1], x.keys[:, 12, 2] = np.inf, -np.inf, np.inf
    x.keys[:, 15, :2], x.queries.queries[:, 11, 1, 3] = [np.inf, -np.inf], -np.inf
    queries = indexer.scored(x.queries.queries, position[None])
    keys = indexer.scored(x.keys[:, :, None], position[None])[:, :, 0]
    x = Indexed(IndexQueries(queries, np.ones((2, 37, 3), np.float32)), keys)
    got, want = (
        np.asarray(jax.jit(lambda x, impl=impl: indexer.choose(x, None, 5, True, 37, KEY, impl))(x))
        for impl in (INTERPRETED, "xla")
    )
    assert as_sets(got) == as_sets(want)
    seen = (np.einsum("btjd,bd->btj", queries, keys[:, 12]) > MAX_INDEX / 2).any(axis=-1)[:, 12:]
    assert seen.any() and not seen.all()
    assert (seen <= (got[:, 12:] == 12).any(axis=-1)).all()


@pytest.mark.parametrize("score", ["relu", "product"])
def test_a_score_of_zero_has_a_slope(score):
    """One head's weight is 0, which learns from the product of its vectors."""
    vectors, keys = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 4))

    def total(weights):
        return scores_of_gathered(score, IndexQueries(vectors, weights), keys).sum()

    for zero in (0.0, -0.0):
        np.testing.assert_array_equal(jax.grad(total)(jnp.full((1, 1, 1), zero)), [[[4.0]]])


@pytest.mark.parametrize("name", ["levels", "clustered", "hashed relu", "coded"])
def test_a_kernel_chooses_among_candidates_what_array_operations_do(name):
    """With 16 heads, where no row of a tile is left over: all zeros may then be -0."""
    x, ids, settings = integers(37, n_heads=16), packed(37), (9, True, 37, KEY)
    x = x._replace(queries=IndexQueries(x.queries.queries, -abs(x.queries.weights)))
    if INDEXERS[name].learns:
        x = x._replace(params=INDEXERS[name].candidates.init(KEY, x.keys.shape[2]))
    chosen = [
        jax.jit(lambda x, ids, impl=impl: INDEXERS[name].choose(x, ids, *settings, impl))(x, ids)
        for impl in (INTERPRETED, "xla")
    ]
    got, want = map(np.asarray, chosen)
    assert as_sets(got) == as_sets(want)


def test_whole_blocks_are_chosen_by_their_means():
    """The first of equal scores, complete ones alone, and what is there of the query's own."""
    x, size, ids = integers(31), 4, np.repeat([[1, 2, 0]], [10, 17, 4], axis=1).repeat(2, axis=0)
    got = as_sets(choose(Indexer(block_size=size), x, 11, True, ids))
    for b, t in np.ndindex(ids.shape):
        found = []
        for block in range((t + 1) // size):
            own = [s for s in range(block * size, block * size + size) if ids[b, s]]
            own = [s for s in own if ids[b, s] == ids[b, own[-1]]]
            if not own or ids[b, own[0]] != ids[b, t]:
                continue
            products = np.maximum(x.queries.queries[b, t] @ x.keys[b, own].mean(axis=0), 0)
            found.append((-(x.queries.weights[b, t] @ products), block))
        seen = {
            s for _, block in sorted(found)[:2] for s in range(block * size, block * size + size)
        }
        own = range((t + 1) // size * size, t + 1)
        assert got[b * 31 + t] == seen | set(own) or ids[b, t] == 0, (b, t)


def compiled(indexer, length, top_k=64, n_heads=4, size=32):
    x = Indexed(
        IndexQueries(
            jax.ShapeDtypeStruct((1, length, n_heads, size), jnp.float32),
            jax.ShapeDtypeStruct((1, length, n_heads), jnp.float32),
        ),
        jax.ShapeDtypeStruct((1, length, size), jnp.float32),
    )
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    run = jax.jit(lambda x, ids: indexer.choose(x, ids, top_k, True, length, KEY))
    return run.lower(x, ids).compile()


@pytest.mark.parametrize("candidates", [None, Pooled(block_sizes=(512, 64)), Hashed()], ids=repr)
def test_no_array_holds_all_pairs(candidates):
    """Besides tiles of a constant size, memory grows with the length."""
    for length in (2**14, 2**17):
        analysis = compiled(Indexer(candidates=candidates), length).memory_analysis()
        assert analysis.temp_size_in_bytes <= 80 * 2**20 + 1500 * length


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "every", [ALL_BLOCKS, ALL_CLUSTERS, ALL_CODES], ids=["blocks", "clusters", "codes"]
)
def test_candidates_that_cover_all_keys_leave_the_choice_as_it_is(causal, is_packed, every):
    x = integers(53)
    ids = packed(53) if is_packed else np.ones((2, 53), np.int32)
    for options in (dict(), dict(n_local=5, group=4)):
        got, want = (
            choose(Indexer(candidates=candidates, **options), x, 10, causal, ids)
            for candidates in (every, None)
        )
        assert as_sets(got) == as_sets(want)


def clustered(length, n_clusters=16, size=16, seed=0):
    """Queries and keys near the same centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(n_clusters, size))

    def near():
        at = centres[rng.integers(0, n_clusters, length)]
        return at + 0.3 * rng.normal(size=(length, size))

    queries, keys = near()[None, :, None], near()[None]
    weights = np.ones((1, length, 1))
    queries, weights, keys = (x.astype(np.float32) for x in (queries, weights, keys))
    return Indexed(IndexQueries(queries, weights), keys)


def recall(candidates, x, top_k=8, shift=0.0):
    x = x._replace(keys=x.keys + np.float32(shift))
    got, want = (
        as_sets(choose(Indexer(score="product", candidates=c), x, top_k, True))
        for c in (candidates, None)
    )
    return np.mean([len(a & b) / len(b) for a, b in zip(got, want, strict=True)])


@pytest.mark.slow
def test_recall_rises_with_hashes_and_with_blocks():
    x = clustered(600)
    hashed = [recall(Hashed(n_hashes=n, n_buckets=16, n_nearest=64), x) for n in (1, 2, 4, 12)]
    assert np.all(np.diff(hashed) > 0.02) and hashed[-1] > 0.95
    assert recall(Hashed(n_hashes=64, n_buckets=2, n_nearest=600), x) == 1
    pooled = [recall(Pooled(block_sizes=(8,), n_blocks=n), x) for n in (2, 8, 32, 75)]
    assert np.all(np.diff(pooled) > 0.02) and pooled[-1] == 1
    in_clusters = [
        recall(Clustered(stride=8, n_clusters=n, n_nearest=600), x) for n in (1, 2, 8, 75)
    ]
    assert np.all(np.diff(in_clusters) > 0.02) and in_clusters[-1] == 1
    assert in_clusters[1] > pooled[1], "of two clusters against eight blocks of as many keys"


def test_without_their_mean_keys_that_point_to_one_side_have_buckets_of_their_own():
    x = clustered(600)
    options = dict(n_hashes=4, n_buckets=16, n_nearest=64)
    plain, centred = (
        recall(Hashed(**options, centre=centre), x, shift=6.0) for centre in (False, True)
    )
    assert plain < 0.4 < 0.7 < centred


@pytest.mark.slow
def test_codes_learn_to_find_what_the_exact_scores_choose():
    """Of vectors whose scores depend on few directions, by the loss of the codes alone."""
    x, rng = clustered(400), np.random.default_rng(2)
    noise = 2 * rng.normal(size=(2, 1, 400, 16)).astype(np.float32)
    x = Indexed(
        IndexQueries(
            np.concatenate([x.queries.queries, noise[0][:, :, None]], -1), x.queries.weights
        ),
        np.concatenate([x.keys, 0 * noise[1]], -1),
    )
    indexer = Indexer(score="product", candidates=Coded(n_bits=16, n_best=40))
    params = indexer.candidates.init(KEY, 32)

    def found(params):
        got, want = (
            as_sets(choose(y, x._replace(params=params), 8, True))
            for y in (indexer, Indexer(score="product"))
        )
        return np.mean([len(a & b) / len(b) for a, b in zip(got, want, strict=True)])

    @jax.jit
    def step(params):
        def loss(params):
            return indexer.candidates_loss(x._replace(params=params), None, True, None)

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)

    losses, before = [], found(params)
    for _ in range(60):
        value, params = step(params)
        losses.append(value)
    assert losses[-1] < 0.8 * losses[0] and found(params) > before + 0.1, (losses[-1], before)


@pytest.mark.parametrize("name", INDEXERS)
def test_later_tokens_change_no_choice(name):
    length, indexer = 40, INDEXERS[name]
    one, other = clustered(length), clustered(length, seed=1)
    for cut in (7, 20, 33):
        x = jax.tree.map(lambda a, b, c=cut: np.concatenate([a[:, :c], b[:, c:]], 1), one, other)
        got, want = (choose(indexer, y, 9, True)[:, :cut] for y in (x, one))
        assert as_sets(got) == as_sets(want)


@pytest.mark.parametrize("name", INDEXERS)
def test_a_segment_sees_nothing_of_its_neighbours(name):
    """Their vectors change no choice, whatever they are."""
    indexer, x, other = INDEXERS[name], clustered(36), clustered(36, seed=1)
    ids = np.repeat([[1, 2, 3]], 12, axis=1)
    mixed = jax.tree.map(
        lambda a, b: np.concatenate([b[:, :12], a[:, 12:24], b[:, 24:]], 1), x, other
    )
    for causal in (True, False):
        got, want = (choose(indexer, y, 11, causal, ids)[0, 12:24] for y in (mixed, x))
        within = [{s for s in row if ids[0, s] == 2} for row in as_sets(got)]
        assert within == [{s for s in row if ids[0, s] == 2} for row in as_sets(want)]


@pytest.mark.parametrize("name", ["levels", "clustered", "hashed", "coded"])
def test_what_padding_holds_changes_no_choice(name):
    x, ids = clustered(36), np.concatenate([np.repeat([[1, 2]], 14, axis=1), np.zeros((1, 8))], 1)
    ids = ids.astype(np.int32)
    nan = x._replace(keys=np.where(ids[..., None] != 0, x.keys, np.nan))
    for causal in (True, False):
        got, want = (choose(INDEXERS[name], y, 9, causal, ids) for y in (nan, x))
        np.testing.assert_array_equal(got[:, :28], want[:, :28])


def test_of_blocks_of_equal_scores_the_first_is_kept():
    """Whichever blocks they are in: with ReLUs whole blocks have a score of 0."""
    x = integers(48, n_batch=1)
    x = x._replace(keys=0 * x.keys)
    got = as_sets(choose(Indexer(candidates=Pooled(block_sizes=(12, 4), n_blocks=2)), x, 40, True))
    assert got[47] == {*range(8), *range(44, 48)}


def test_a_query_sees_its_incomplete_block():
    """Its keys are candidates however low their mean's score is."""
    x = clustered(30)
    opposite = x.queries._replace(queries=-np.broadcast_to(x.keys[:, :, None], (1, 30, 1, 16)))
    candidates = Pooled(block_sizes=(10,), n_blocks=1)
    got = as_sets(choose(Indexer(candidates=candidates), x._replace(queries=opposite), 20, True))
    assert all(set(range(t // 10 * 10, t + 1)) <= got[t] for t in range(30))


# `test_no_array_holds_all_pairs` has their memory.
@pytest.mark.slow
@pytest.mark.parametrize(
    "candidates, most",
    [
        (lambda n: Hashed(n_hashes=2, n_nearest=16), 6),  # and the hash's buckets grow
        (
            lambda n: Pooled(
                block_sizes=[4**i for i in range(8, 0, -1) if 4**i <= n // 16], n_blocks=4
            ),
            6,
        ),
        (lambda n: Pooled(block_sizes=(int(n**0.5),), n_blocks=4), 10),  # T^1.5
        (lambda n: Clustered(stride=int(n**0.5), n_clusters=4, n_nearest=16), 10),
        (lambda n: None, None),
    ],
    ids=["hashed", "levels", "one size", "clustered", "all"],
)
def test_cost_grows_slower_than_pairs(candidates, most, monkeypatch):
    """Floating-point operations and bytes of the compiled program, from T to 4 T.

    The cost analysis counts the body of a loop once, so all is in one chunk and one tile.
    """
    monkeypatch.setattr(streaming, "TILE", 2**14)
    monkeypatch.setattr(streaming, "AT_A_TIME", 2**40)
    monkeypatch.setattr("reformax.ops.numerics.query_chunks.AT_A_TIME", 2**40)
    costs = [
        compiled(Indexer(score="product", candidates=candidates(n)), n, 16, 1, 16).cost_analysis()
        for n in (2**10, 2**12)
    ]
    for name in ("flops", "bytes accessed"):
        growth = costs[1][name] / costs[0][name]
        assert growth > 12 if most is None else growth < most, name


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(
        SettingError, match="group is 4 and n_local 3: expected n_local of at least"
    ):
        Indexer(group=4, n_local=3)
    with pytest.raises(SettingError, match=r"block_sizes is \(8, 3\): expected at least one size"):
        Pooled(block_sizes=(8, 3))
    with pytest.raises(SettingError, match="block_size is 4: expected no n_local, group and"):
        Indexer(block_size=4, n_local=3)
    with pytest.raises(SettingError, match="block_size is 9 and top_k 8: expected at most top_k"):
        dsa.dsa(top_k=8, indexer=Indexer(block_size=9))
    with pytest.raises(SettingError, match="n_buckets is 3: expected"):
        Hashed(n_buckets=3)
    with pytest.raises(SettingError, match="score is 'dot': expected 'relu' or 'product'"):
        Indexer(score="dot")
    with pytest.raises(SettingError, match="n_local is 8 and top_k 8: expected it below top_k"):
        dsa.dsa(top_k=8, indexer=Indexer(n_local=8))
    q = np.ones((1, 9, 2, 4), np.float32)
    op = dsa.dsa(top_k=8, indexer=Indexer(n_local=5))
    with pytest.raises(NotImplementedError, match="n_local is 5, 9 keys of both sides"):
        op.plan(op.init(KEY, op.dims(q, q)), q, q, segment_ids=None, causal=False)


def test_equal_indexers_make_equal_ops():
    one, other = (dsa.dsa(indexer=Indexer(candidates=Hashed(n_buckets=[4, 8]))) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != dsa.dsa(indexer=Indexer(candidates=Hashed(n_buckets=(4, 6))))
    assert repr(one) == "dsa(indexer=Indexer(candidates=Hashed(n_buckets=(4, 8))))"


@pytest.mark.parametrize("n_best", [3, 7])
def test_the_best_of_each_devices_keys_are_the_best_of_all(n_best):
    """Of equal scores the first position, and NaN as high as infinity, as on one device."""
    length, n = 24, 3
    x, at, ids = integers(length), np.arange(length)[None], np.ones((2, length), np.int32)
    x.keys[:, 7] = np.copysign(np.float32(np.nan), np.float32(-1))
    best = functools.partial(streaming.best_keys, "relu", ChoiceRule(causal=True), n_best)

    def of_device(i, keys):
        of_keys = ids[:, : keys.shape[1]]
        found = best(x.queries, keys, Side(at, ids), of_keys, every=(i, n))
        return streaming.best_over("devices", *found)

    parts = np.moveaxis(x.keys.reshape(2, length // n, n, -1), 2, 0)
    got = jax.jit(jax.vmap(of_device, axis_name="devices"))(np.arange(n), parts)
    _, want = jax.jit(best)(x.queries, x.keys, Side(at, ids), ids)
    assert (np.asarray(want)[:, 7:] == 7).any(axis=-1).all()
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))

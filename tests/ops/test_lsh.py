"""LSH attention: the hashes, the order, what every option does, the gradient's mask and memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import lsh, shared_qk
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.hashing import angular as hashing
from reformax.ops.hashing import sorting
from reformax.ops.softmax.orders import Order
from tests.helpers import assert_trees_close, with_gradients
from tests.ops import oracle, rows

KEY = jax.random.key(0)


def draw(*sizes, seed=0):
    """One float32 array `[B, T, N, size]` for each size, with B=2, T=40, N=2."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(2, 40, 2, size)).astype(np.float32) for size in sizes)


def make_plan(op, q, *, segment_ids=None, train=True):
    plan = functools.partial(op.plan, causal=False, rng=KEY, train=train)
    return jax.jit(lambda q: plan((), q, None, segment_ids=segment_ids))(q)


def attend(op, q, v, rng=KEY, **settings):
    return np.asarray(compiled(op, q, v, rng, **settings))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("causal", "train"))
def compiled(op, q, v, rng, **settings):
    return op(q, None, v, rng=rng, **settings)


def hash_vectors(x, factors, n_hashes):
    @jax.jit
    def hashed(x):
        rotations = hashing.draw_rotations(x, factors, n_hashes, KEY)
        return hashing.hash_by(rotations, x, factors, "xla")

    return np.asarray(hashed(x))


# Hashing


def test_same_direction_same_bucket_and_opposite_another():
    (x,) = draw(8)
    for factors in ((2,), (16,), (4, 6)):
        bucket, longer, opposite = (hash_vectors(y, factors, 3) for y in (x, 7.5 * x, -x))
        np.testing.assert_array_equal(bucket, longer)
        # Each factor's digit moves by half of its range: [xR; -xR] changes halves.
        for factor in factors:
            np.testing.assert_array_equal(opposite % factor, (bucket + factor // 2) % factor)
            bucket, opposite = bucket // factor, opposite // factor


def test_buckets_are_filled_evenly():
    """Random directions fall in every bucket equally often, within five standard deviations."""
    x = np.random.default_rng(0).normal(size=(1, 2048, 1, 32)).astype(np.float32)
    for factors in ((8,), (4, 6)):
        n_buckets, n_hashes = math.prod(factors), 64
        buckets = hash_vectors(x, factors, n_hashes)
        share = np.bincount(np.ravel(buckets), minlength=n_buckets) / buckets.size
        assert len(share) == n_buckets
        # Many rotations of few vectors: what varies is how unevenly each rotation fills buckets.
        per_hash = np.stack([np.bincount(b, minlength=n_buckets) for b in buckets[0, 0]]) / 2048
        error = per_hash.std(axis=0) / np.sqrt(n_hashes)
        assert np.all(np.abs(share - 1 / n_buckets) < 5 * error)
        assert per_hash.min() > 0


def test_near_vectors_share_buckets_more_often_than_far_ones():
    rng = np.random.default_rng(0)
    x, away = rng.normal(size=(2, 1, 500, 1, 16)).astype(np.float32)
    shares = []
    for angle in (0.1, 0.5, 1.0, math.pi / 2):
        away -= x * np.sum(x * away, -1, keepdims=True) / np.sum(x * x, -1, keepdims=True)
        away *= np.linalg.norm(x, axis=-1, keepdims=True) / np.linalg.norm(
            away, axis=-1, keepdims=True
        )
        rotated = math.cos(angle) * x + math.sin(angle) * away
        same = hash_vectors(x, (16,), 8) == hash_vectors(rotated, (16,), 8)
        shares.append(float(np.mean(same)))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.7 and abs(shares[-1] - 1 / 16) < 0.02


@pytest.mark.parametrize("factors", [(8,), (6, 4), (2, 4, 6)])
def test_buckets_are_mixed_radix_numbers_of_argmaxes(factors):
    (x,) = draw(5)
    rotations = np.asarray(jax.random.normal(KEY, (2, 5, 3, sum(factors) // 2)), np.float64)
    rotated = np.einsum("btnh,nhrf->bnrtf", x.astype(np.float64), rotations)
    want, scale = 0, 1
    for half in np.split(rotated, np.cumsum(factors)[:-1] // 2, axis=-1):
        want = want + scale * np.argmax(np.concatenate([half, -half], axis=-1), axis=-1)
        scale *= 2 * half.shape[-1]
    np.testing.assert_array_equal(hash_vectors(x, factors, 3), want)
    assert np.unique(want).size > scale // 2


def test_heads_and_rounds_hash_differently():
    x = np.broadcast_to(draw(5)[0][:, :, :1], (2, 40, 3, 5))
    buckets = hash_vectors(x, (8,), 3)
    flat = buckets.transpose(1, 2, 0, 3).reshape(9, -1)
    same = np.mean(flat[:, None] == flat[None], axis=-1)
    assert np.all(same[~np.eye(9, dtype=bool)] < 0.6)


@pytest.mark.parametrize("chunk_len", [1, 64, 100])
def test_automatic_bucket_counts(chunk_len):
    """Even factors, about two buckets a chunk, and no factor of more than a few hundred."""
    for length in (1, 63, 64, 65, 1000, 4096, 5000, 65_536, 10**6):
        wanted = 2 * -(-length // chunk_len)
        factors = hashing.auto_buckets(length, chunk_len)
        assert all(factor >= 2 and factor % 2 == 0 for factor in factors)
        assert 0.6 * wanted <= math.prod(factors) <= wanted
        assert max(factors) <= max(128, 2 * math.sqrt(wanted))
    assert math.prod(hashing.auto_buckets(65_536, 64)) == 2048


def test_given_rotations_are_the_hash():
    """Those that the rng would have drawn give the same plan, without an rng."""
    q, v = draw(8, 3)
    options = dict(chunk_len=8, n_hashes=2, n_buckets=(4, 6))
    drawn = jax.random.normal(KEY, (2, 8, 2, 5))
    given = lsh.lsh(**options, rotations=drawn)
    assert given.plan_needs == "inputs"
    want = attend(lsh.lsh(**options), q, v)
    np.testing.assert_array_equal(attend(given, q, v, rng=None), want)
    other = lsh.lsh(**options, rotations=np.random.default_rng(0).normal(size=drawn.shape))
    assert np.abs(attend(other, q, v, rng=None) - want).max() > 0.1
    wrong = lsh.lsh(**options, rotations=drawn[:, :, :, :4])
    with pytest.raises(
        ValueError, match=r"rotations have shape \(2, 8, 2, 4\): expected \(2, 8, 2, 5"
    ):
        wrong(q, None, v)


# The order


@pytest.mark.parametrize("segment_dtype", [None, np.int32, np.uint8])
@pytest.mark.parametrize(
    "n_buckets, backend",
    # Of 12 rows on a GPU: a key in 16 bits, a key with its position in 32, a key in 32, or neither.
    [
        (6, "cpu"),
        (2**31 // 45 + 1, "cpu"),
        (2**16 // 12 - 1, "gpu"),
        (2**16, "gpu"),
        (2**28, "gpu"),
        (2**29, "gpu"),
    ],
)
@pytest.mark.parametrize("n_pad", [0, 5])
def test_order_is_by_segment_then_bucket_then_position(
    n_buckets, backend, segment_dtype, n_pad, monkeypatch
):
    """Padding comes last, whether one packed word is sorted or keys with their positions."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    buckets = rng.integers(0, 6, (2, 3, 2, 40)).astype(np.int32) + n_buckets - 6
    segment_ids, last = None, np.zeros((2, 1, 1, 40), int)
    if segment_dtype is not None:
        segment_ids = rng.integers(0, 4, (2, 40)).astype(segment_dtype)
        last = np.where(segment_ids == 0, 99, segment_ids.astype(int))[:, None, None]
    sort = jax.jit(lambda buckets: sorting.sort_by_bucket(buckets, n_buckets, segment_ids, n_pad))
    order, slots = (np.asarray(x) for x in sort(buckets).with_slots()[:2])
    position = np.broadcast_to(np.arange(40), buckets.shape)
    real = np.lexsort((position, buckets, np.broadcast_to(last, buckets.shape)), axis=-1)
    is_real = order < 40
    np.testing.assert_array_equal(order[is_real].reshape(real.shape), real)
    if segment_ids is None:
        assert np.all(is_real[..., :40])
    np.testing.assert_array_equal(
        np.take_along_axis(slots, order, axis=-1),
        np.broadcast_to(np.arange(40 + n_pad), slots.shape),
    )
    np.testing.assert_array_equal(np.sort(order, axis=-1)[0, 0, 0], np.arange(40 + n_pad))


def test_the_plan_sorts_the_hashes_of_the_queries():
    (q,) = draw(8)
    segment_ids = np.repeat([[2, 1, 0]], [15, 20, 5], axis=1).repeat(2, axis=0)
    op = lsh.lsh(chunk_len=16, n_hashes=3, n_buckets=(2, 4))
    for ids in (None, segment_ids):
        plan = make_plan(op, q, segment_ids=ids)
        buckets = hash_vectors(q, (2, 4), 3)
        np.testing.assert_array_equal(
            plan.query_positions, sorting.sort_by_bucket(buckets, 8, ids, 8).query_positions
        )


# The options


def test_a_plan_made_for_the_kernel_serves_array_operations():
    """The kernel may take the queries and not the values, and its plan has no slots."""
    q, v = draw(8, 3)
    options = dict(chunk_len=8, n_hashes=1, n_buckets=4)
    plan = make_plan(lsh.lsh(**options, impl=INTERPRETED), q)
    assert plan.query_slots is None
    op = lsh.lsh(**options, impl="xla")
    masks = dict(segment_ids=None, causal=True, dropout=0.0, rng=None)
    outs = [
        jax.jit(lambda plan: op.apply((), q, None, v, plan=plan, **masks))(plan)
        for plan in (plan, make_plan(op, q))
    ]
    np.testing.assert_array_equal(*outs)


def test_number_of_hashes():
    q, v = draw(8, 3)
    for n_eval, expected in ((None, 3), (5, 5)):
        op = lsh.lsh(chunk_len=8, n_hashes=3, n_hashes_eval=n_eval)
        for train, n in ((True, 3), (False, expected)):
            plan = jax.eval_shape(functools.partial(make_plan, op, train=train), q)
            assert plan.query_positions.shape == (2, 2, n, 40)
    both = lsh.lsh(chunk_len=8, n_hashes=1, n_hashes_eval=4)
    train, evaluation = (attend(both, q, v, train=train) for train in (True, False))
    np.testing.assert_array_equal(train, attend(lsh.lsh(chunk_len=8, n_hashes=1), q, v))
    np.testing.assert_array_equal(evaluation, attend(lsh.lsh(chunk_len=8, n_hashes=4), q, v))
    assert np.abs(train - evaluation).max() > 0.1


def test_number_of_buckets():
    (q,) = draw(8)
    numbers = "auto", 10, 2, 8, (4, 2), (2, 4), (8,), [4, 2]
    *orders, of_one, of_list = jax.jit(
        lambda q: [make_plan(lsh.lsh(chunk_len=8, n_buckets=n), q).query_positions for n in numbers]
    )(q)
    orders = dict(zip(numbers[:-2], orders, strict=True))
    # 40 positions are 5 chunks of 8, two buckets each.
    np.testing.assert_array_equal(orders.pop("auto"), orders[10])
    for i, one in enumerate(orders):
        for other in list(orders)[:i]:
            assert np.any(orders[one] != orders[other]), (one, other)
    np.testing.assert_array_equal(of_one, orders[8])
    np.testing.assert_array_equal(of_list, orders[4, 2])


def test_every_option_of_apply_changes_the_output():
    q, v = draw(8, 3)
    base = dict(chunk_len=8, n_hashes=3, n_buckets=4)
    options = (
        {},
        dict(chunk_len=5),
        dict(n_chunks_before=0),
        dict(n_chunks_before=2),
        dict(n_chunks_after=1),
        dict(count_once=False),
    )
    ops = [lsh.lsh(**base | option) for option in options]
    outs = jax.device_get(jax.jit(lambda q, v: [op(q, None, v, rng=KEY) for op in ops])(q, v))
    for i, one in enumerate(outs):
        for other in outs[:i]:
            assert np.abs(one - other).max() > 0.05


def test_same_rng_same_result():
    q, v = draw(8, 3)
    op = jax.jit(
        lambda rng: lsh.lsh(chunk_len=8, n_hashes=2)(q, None, v, rng=rng, dropout=0.2, causal=True)
    )
    np.testing.assert_array_equal(op(KEY), op(jax.random.key(0)))
    assert np.abs(np.subtract(op(KEY), op(jax.random.key(1)))).max() > 0.1
    # Keys of both kinds are the same randomness.
    np.testing.assert_array_equal(op(KEY), op(jax.random.PRNGKey(0)))


# One chunk over the whole length


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_full_shared_qk_attention(causal, packed):
    """With dropout too: a weight's coin depends on which weight it is, not on where it lies."""
    q, v, d_out = draw(8, 3, 3)
    ids = np.repeat([[3, 1, 0, 2]], [13, 16, 4, 7], axis=1).repeat(2, axis=0) if packed else None
    masks = dict(causal=causal, segment_ids=ids, rng=KEY, dropout=0.2)
    one_chunk = dict(chunk_len=48, n_hashes=2, n_chunks_before=0)
    ops = shared_qk.shared_qk(), *(lsh.lsh(**one_chunk, count_once=x) for x in (True, False))

    @jax.jit
    def run(q, v):
        pairs = (jax.vjp(lambda q, v, op=op: op(q, None, v, **masks), q, v) for op in ops)
        return [(out, vjp(d_out)) for out, vjp in pairs]

    want, *found = run(q, v)
    for got in found:
        assert_trees_close(got, want)


# What causality promises


def test_future_values_never_reach_the_past():
    """Outright, plan and all: hashes are of the queries, so no value decides where anyone looks."""
    q, v, other = draw(8, 3, 3)
    now = 22
    op = jax.jit(
        lambda v: lsh.lsh(chunk_len=8, n_hashes=2)(q, None, v, causal=True, rng=KEY, dropout=0.2)
    )
    changed = np.concatenate([v[:, :now], other[:, now:]], axis=1)
    one, two = (np.asarray(op(x)) for x in (v, changed))
    np.testing.assert_array_equal(one[:, :now], two[:, :now])
    assert np.abs(one[:, now:] - two[:, now:]).max() > 0.1


def test_future_queries_reach_the_past_through_chunk_borders_alone():
    """The one thing that causal LSH attention does not promise, as in the paper.

    Chunks cut the order of *all* positions, so a later token can move an earlier query and its key
    apart. It then decides whether a past key is seen, and no more: with as many chunks in reach as
    there are, the past is the same whatever follows.
    """
    q, other, v = draw(8, 8, 3)
    now = 22
    changed = np.concatenate([q[:, :now], other[:, now:]], axis=1)

    def past(q, n_chunks_before):
        op = lsh.lsh(chunk_len=8, n_hashes=2, n_buckets=4, n_chunks_before=n_chunks_before)
        return attend(op, q, v, causal=True)[:, :now]

    assert np.abs(past(q, 1) - past(changed, 1)).max() > 1e-3
    in_reach = lsh.lsh(chunk_len=8, n_hashes=2, n_buckets=4, n_chunks_before=4, n_chunks_after=4)
    full, again = (attend(in_reach, x, v, causal=True)[:, :now] for x in (q, changed))
    np.testing.assert_allclose(full, again, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_a_strict_plan_shows_a_query_its_own_bucket(packed):
    """By each hash, the last `reach` positions before it in its bucket, by brute force."""
    (q,) = draw(8)
    ids = np.repeat([[2, 1, 0]], [15, 20, 5], axis=1).repeat(2, axis=0) if packed else None
    op = lsh.lsh(chunk_len=3, n_hashes=2, n_buckets=4, n_chunks_before=2, strictly_causal=True)
    plan = jax.tree.map(np.asarray, make_plan(op, q, segment_ids=ids))
    buckets = hash_vectors(q, (4,), 2)
    cut = False
    for b, n, r, t in np.ndindex(2, 2, 2, 40):
        if packed and ids[b, t] == 0:
            continue
        alike = [
            j
            for j in range(t + 1)
            if buckets[b, n, r, j] == buckets[b, n, r, t] and (not packed or ids[b, j] == ids[b, t])
        ]
        cut = cut or len(alike) > 7
        slots = slice(plan.first_slot[b, n, r, t], plan.query_slots[b, n, r, t] + 1)
        seen = plan.query_positions[b, n, r, slots]
        # Another segment's bucket may lie just before; segments hide it.
        seen = [j for j in seen if not packed or ids[b, j] == ids[b, t]]
        assert seen == alike[-7:]
    assert cut, "some bucket is larger than the reach"


@pytest.mark.parametrize(
    "length, count_once", [(45, True), (7, True), pytest.param(45, False, marks=pytest.mark.slow)]
)
def test_kernels_of_strictly_causal_lsh(length, count_once):
    """Outputs and gradients of the array path, with segments and padding."""
    rng = np.random.default_rng(length)
    q, v, d_out = (
        jax.device_put(rng.normal(size=(2, length, 2, 8)).astype(jnp.float32)) for _ in "qvd"
    )
    ids = jnp.asarray(np.sort(rng.integers(1, 3, (2, length)), axis=1).astype(np.int32))
    ids = ids.at[0, -2:].set(0)
    options = dict(chunk_len=8, n_hashes=3, n_buckets=4, count_once=count_once)
    masks = dict(causal=True, segment_ids=ids, rng=jax.random.key(2))

    def run(impl):
        op = lsh.lsh(strictly_causal=True, impl=impl, **options)
        return with_gradients(lambda q, v: op(q, None, v, **masks))(d_out, q, v)

    assert_trees_close(run(INTERPRETED), run("xla"), 2e-5)


def test_strictly_causal_lsh_reads_nothing_of_the_future():
    """No row changes, whatever follows and however much: plan, hashes and all."""
    q, other, v, other_v = draw(8, 8, 3, 3)
    now = 22
    op = lsh.lsh(chunk_len=4, n_hashes=3, n_buckets=4, strictly_causal=True)
    q2, v2 = (np.concatenate([x[:, :now], y[:, now:]], 1) for x, y in ((q, other), (v, other_v)))
    whole, changed = (attend(op, *x, causal=True)[:, :now] for x in ((q, v), (q2, v2)))
    shorter = attend(op, q[:, :now], v[:, :now], causal=True)
    np.testing.assert_allclose(whole, changed, atol=1e-6)
    np.testing.assert_allclose(whole, shorter, atol=1e-6)
    wide = lsh.lsh(chunk_len=4, n_hashes=3, n_buckets=4)
    assert np.abs(attend(wide, q, v, causal=True)[:, :now] - whole).max() > 0.05


@pytest.mark.parametrize(
    "impl, n_hashes, dtype, tolerance",
    [
        ("xla", 12, np.float32, 1e-5),
        pytest.param("xla", 33, np.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param("xla", 33, jnp.bfloat16, 2e-2, marks=pytest.mark.slow),
        pytest.param(INTERPRETED, 17, np.float32, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_many_hashes_show_the_union_of_their_chunks(impl, n_hashes, dtype, tolerance):
    """Clustered vectors of large logits. The more hashes, the nearer is dense attention."""
    rng = np.random.default_rng(0)
    length, sizes = 85, (2, 85, 2, 8)
    of_cluster = 3 * rng.normal(size=(6, 8))
    q = (of_cluster[rng.integers(6, size=sizes[:3])] + rng.normal(size=sizes)).astype(dtype)
    v, d_out = (rng.normal(size=sizes).astype(dtype) for _ in range(2))
    earlier = np.tril(np.ones((length, length), int), -1)
    reach = dict(chunk_len=4, n_chunks_before=1, n_chunks_after=0)

    def of_oracle(counts):
        q64, v64, d64 = (np.asarray(x, np.float64) for x in (q, v, d_out))
        out, (dq, _, dv, _) = oracle.attention(q64, None, v64, counts, 1.0, d64)
        return out, (dq, dv)

    op = lsh.lsh(chunk_len=4, n_hashes=n_hashes, attend_self_if_alone=False, impl=impl)
    masks = dict(segment_ids=None, causal=True)

    @jax.jit
    def run(q, v, d_out):
        plan = op.plan((), q, None, rng=KEY, train=True, **masks)
        attend = functools.partial(op.apply, (), plan=plan, dropout=0.0, rng=None, **masks)
        out, vjp = jax.vjp(lambda q, v: attend(q, None, v), q, v)
        return plan, (out, vjp(d_out))

    def counts(plan):
        shape = rows.Shape(2, length, length, 2)
        return earlier * (rows.hashes_that_reach(reach, plan, shape) > 0)

    plan, found = run(q, v, d_out)
    assert_trees_close(found, of_oracle(counts(plan)), tolerance)
    dense, of_two = of_oracle(earlier), of_oracle(counts(Order(plan.query_positions[:, :, :2])))
    errors = [np.abs(np.asarray(x[0], np.float64) - dense[0]).mean() for x in (found, of_two)]
    assert errors[0] < errors[1] / 2


# The backward pass


@pytest.mark.parametrize("count_once", [True, False])
def test_backward_drops_the_weights_that_forward_dropped(count_once):
    """At a fixed plan and rng, out = A v, so the gradient is A^T d for that same A, coins and all.

    It holds whichever weights the rng drops; a mask drawn again in the backward would break it.
    """
    q, v, d_out = draw(8, 3, 3)
    op = lsh.lsh(chunk_len=8, n_hashes=3, count_once=count_once)
    plan = make_plan(op, q)

    def run(rng):
        masks = dict(plan=plan, segment_ids=None, causal=True, dropout=0.5, rng=rng)
        return with_gradients(lambda v: op.apply((), q, None, v, **masks))(d_out, v)

    out, (dv,) = run(KEY)
    forward, backward = (np.sum(x * y, axis=(1, 3)) for x, y in ((out, d_out), (v, dv)))
    np.testing.assert_allclose(forward, backward, atol=1e-4)
    other, (other_dv,) = run(jax.random.key(1))
    assert np.abs(other - out).max() > 0.1
    mixed = np.sum(v * other_dv, axis=(1, 3))
    assert np.abs(forward - mixed).min() > 0.1


def residuals(n_hashes, length=4096):
    """The arrays that the forward pass keeps for the backward, by shape."""
    op = lsh.lsh(chunk_len=64, n_hashes=n_hashes)
    x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)

    def pullback(q, v):
        return jax.vjp(lambda q, v: op(q, None, v, causal=True, rng=KEY, dropout=0.1), q, v)[1]

    return jax.tree.leaves(jax.eval_shape(pullback, x, x))


def test_nothing_but_the_plan_grows_with_the_rounds():
    few, many = residuals(2), residuals(8)
    floats = [
        sum(x.size for x in kept if jnp.issubdtype(x.dtype, jnp.floating)) for kept in (few, many)
    ]
    assert floats[0] == floats[1]
    # q, v and the output, and at most four statistics a row.
    assert floats[0] <= 4096 * (3 * 16 + 4)
    integers = sum(x.size for x in many if jnp.issubdtype(x.dtype, jnp.integer))
    assert integers <= 2 * 8 * 4096 + 16


def test_temporary_memory_of_the_gradient():
    length = 4096

    def temp(n_hashes):
        op = lsh.lsh(chunk_len=64, n_hashes=n_hashes)
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        gradient = jax.grad(lambda q, v: op(q, None, v, causal=True, rng=KEY).sum(), argnums=(0, 1))
        return jax.jit(gradient).lower(x, x).compile().memory_analysis().temp_size_in_bytes

    few, many = temp(2), temp(8)
    assert many < length**2 * 4 / 3, "a third of one float32 matrix of logits"
    assert many < 1.15 * few


@pytest.mark.parametrize("strictly_causal", [False, True])
def test_the_program_does_not_grow_with_the_number_of_hashes(strictly_causal):
    """A body for each pair of hashes took minutes to compile at hundreds of them."""

    def n_lines(n_hashes):
        op = lsh.lsh(chunk_len=4, n_hashes=n_hashes, strictly_causal=strictly_causal)

        def loss(q, v):
            return op(q, None, v, causal=True, rng=KEY).sum()

        return jax.jit(jax.grad(loss, (0, 1))).lower(*draw(8, 8)).as_text().count("\n")

    assert n_lines(17) == n_lines(97)


@pytest.mark.slow
@pytest.mark.parametrize("strictly_causal", [False, True])
def test_a_key_that_many_hashes_show_counts_once(strictly_causal):
    """Hashes that repeat three others change nothing, in the loop over them and before it."""
    q, v = draw(8, 8)
    rotations = np.random.default_rng(1).normal(size=(2, 8, 3, 4)).astype(np.float32)

    def attended(n_hashes):
        options = dict(chunk_len=4, n_buckets=8, strictly_causal=strictly_causal)
        of_all = np.resize(np.moveaxis(rotations, 2, 0), (n_hashes, 2, 8, 4))
        op = lsh.lsh(n_hashes=n_hashes, rotations=np.moveaxis(of_all, 0, 2), **options)
        return with_gradients(lambda q, v: op(q, None, v, causal=True))(v, q, v)

    for n_hashes in (6, 9, 10, 21):
        assert_trees_close(attended(n_hashes), attended(3))

"""Performer, Linformer, Nystromformer and Long-Short: where they are dense, and how they come near.

`low_rank.py` has their references, and the shared tests compare with those.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import Buffer
from reformax.ops import dense, linformer, local, long_short, nystromformer, performer
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.recurrence.random_features import orthogonal_directions, positive_features
from tests.helpers import assert_trees_close, with_gradients
from tests.ops.inputs import first_weights

KEY = jax.random.key(0)


def draw(length=23, d_qk=4, scale=1, seed=0):
    x = np.random.default_rng(seed).normal(size=(3, 2, length, 2, d_qk)).astype(np.float32)
    return x[0] * scale, x[1] * scale, x[2]


def attend(op, q, k, v, params=None, **options):
    params = first_weights(op, op.dims(q, v), KEY) if params is None else params
    return op(q, k, v, params=params, rng=KEY, **options)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_long_short_computes_blocks_in_groups_as_at_once(causal, monkeypatch):
    q, k, v = draw(length=70)
    op = long_short.long_short(window=8, rank=2, chunk_len=8)
    params = first_weights(op, op.dims(q, v), KEY)
    segment_ids = np.where(np.arange(70) < 67, 1, 0)[None].repeat(2, axis=0)

    def run():
        def loss(params, q, k, v):
            out = attend(op, q, k, v, params, causal=causal, segment_ids=segment_ids, dropout=0.3)
            return jnp.sum(out * v), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(params, q, k, v)

    want = run()
    monkeypatch.setattr(long_short, "LOGITS_AT_A_TIME", 4000)  # of 2 to 4 of the 9 blocks
    assert_trees_close(run(), want, 1e-5)


# Where they are dense attention.


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
def test_linformer_with_identities_is_dense(sharing):
    q, k, v = draw()
    one = jnp.eye(30)[:, :23]  # of a longer maximal length
    one = jnp.stack([one, one]) if sharing == "none" else one
    params = {"e": one} if sharing == "key-value" else {"e": one, "f": one}
    out = attend(linformer.linformer(n_projected=23, parameter_sharing=sharing), q, k, v, params)
    np.testing.assert_allclose(out, dense.dense()(q, k, v), atol=1e-6)


def test_linformer_refuses_what_is_longer_than_its_weights():
    q, k, v = draw()
    with pytest.raises(ValueError, match="q has 23 positions, but linformer's weights are for 20"):
        params = {"e": jnp.ones((20, 4)), "f": jnp.ones((20, 4))}
        attend(linformer.linformer(n_projected=4), q, k, v, params)


def test_a_gpu_writes_gradients_of_mixed_rows_in_their_own_dtype(monkeypatch):
    """Their sums in float32 would be the largest arrays of the backward pass."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, d_mixtures = jnp.ones((1, 40, 2, 8), jnp.bfloat16), jnp.ones((1, 4, 2, 8), jnp.bfloat16)

    def gradients(x, weights, d_mixtures):
        return jax.vjp(linformer._mixed, x, weights)[1](d_mixtures)

    program = jax.make_jaxpr(gradients)(x, jnp.ones((40, 4)), d_mixtures)
    assert [str(y) for y in program.out_avals] == ["bfloat16[1,40,2,8]", "float32[40,4]"]
    assert "f32[1,40,2,8]" not in str(program)


def test_nystromformer_with_a_landmark_for_each_token_is_dense():
    q, k, v = draw()
    want = np.asarray(dense.dense()(q, k, v))
    ops = (nystromformer.nystromformer(n_landmarks=64, n_iterations=n) for n in (2, 6, 14))
    errors = [np.abs(np.asarray(attend(op, q, k, v)) - want).max() for op in ops]
    assert errors[0] > 0.1 > errors[1] > errors[2]
    assert errors[2] < 1e-3


def test_the_pseudo_inverse():
    inverse = jax.jit(nystromformer.pseudo_inverse, static_argnums=1)
    a = jax.jit(lambda: jax.nn.softmax(jax.random.normal(KEY, (3, 12, 12)), axis=-1))()
    got = inverse(a, 20)
    np.testing.assert_allclose(got, np.linalg.pinv(np.asarray(a, np.float64)), atol=2e-3)
    # Of less than full rank, with zeros for what is not there.
    a = np.zeros((5, 5), np.float32)
    a[:4, :4] = 0.25
    np.testing.assert_allclose(inverse(a, 6), a, atol=1e-6)
    np.testing.assert_array_equal(inverse(np.zeros_like(a), 6), 0)


@pytest.mark.parametrize("length, n_landmarks", [(12, 4), (13, 4), (3, 7)])
def test_landmarks_are_means_of_equal_segments(length, n_landmarks):
    """As the paper has them where the length is a multiple; whatever padding stands between."""
    x = np.random.default_rng(0).normal(size=(1, length, 1, 2)).astype(np.float32)

    @jax.jit
    def means(x, segment_ids):
        groups = nystromformer.landmark_groups(x.shape[1], segment_ids, n_landmarks)
        return groups.real, nystromformer.segment_means(x, groups)

    real, got = means(x, None)
    if length % n_landmarks == 0:
        want = x.reshape(1, n_landmarks, -1, 1, 2).mean(axis=2)
        np.testing.assert_allclose(got, want, atol=1e-6)
    sizes = np.sum(real, axis=-1)
    assert sizes.sum() == length and sizes.max() - sizes.min() <= 1
    among = np.full((1, 2 * length, 1, 2), np.nan, np.float32)
    among[:, ::2] = x
    segment_ids = jnp.asarray(np.arange(2 * length) % 2 == 0)[None].astype(jnp.int32)
    real, there = means(np.nan_to_num(among), segment_ids)
    some = np.any(real, axis=-1)[0]
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


# How Performer comes near.


def test_directions_are_orthogonal_and_as_long_as_normal_vectors():
    directions = np.asarray(orthogonal_directions(KEY, 1001, 7))
    assert directions.shape == (1001, 7)
    for block in (directions[:7], directions[7:14], directions[994:]):
        products = block @ block.T
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-5)
    # Each number is normal: mean 0, variance 1, fourth moment 3, within five standard errors.
    n = directions.size
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (4, 3, 96)):
        assert abs(np.mean(directions**power) - mean) < 5 * np.sqrt(variance / n)
    for axis in range(7):
        assert abs(directions[:, axis].mean()) < 5 / np.sqrt(len(directions))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_so_far(packed, reverse):
    """And what it has grown by; NaN from a NaN on, in its segment."""
    x = np.random.default_rng(0).normal(size=(1, 12, 1, 1)).astype(np.float32)
    x[0, 7] = np.nan
    ids = np.repeat([[1, 2] if packed else [1, 1]], [5, 7], axis=1)
    order = slice(None, None, -1 if reverse else 1)
    top, rise = (np.zeros(12, np.float32) for _ in range(2))
    for i in set(ids[0]):
        at = np.flatnonzero(ids[0] == i)[order]
        top[at] = np.maximum.accumulate(x[0, at, 0, 0])
        rise[at] = np.diff(top[at], prepend=x[0, at[:1], 0, 0])
    got = jax.jit(lambda x: performer.running_max(x, ids if packed else None, reverse))(x)
    for a, b in zip(got, (top, rise), strict=True):
        np.testing.assert_array_equal(a[0, :, 0, 0], b)


def test_products_of_features_are_exponentials_on_average():
    """To five standard errors of a mean over 4,000 draws of orthogonal directions."""
    x, y = 0.7 * np.random.default_rng(0).normal(size=(2, 1, 1, 1, 4)).astype(np.float32)

    @jax.jit
    @jax.vmap
    def products(rng):
        directions = orthogonal_directions(rng, 8, 4)
        a, b = (positive_features(z, directions, 0.0) for z in (x, y))
        return jnp.mean(a.x * b.x * jnp.exp(a.scale + b.scale))

    draws = np.asarray(products(jax.random.split(KEY, 4000)), np.float64)
    error = draws.std() / np.sqrt(len(draws))
    want = np.exp(np.sum(np.float64(x) * y))
    assert abs(draws.mean() - want) < 5 * error
    assert error < 0.02 * want


def test_performers_features_are_redrawn_every_few_steps():
    """In training after 3 steps, in evaluation and decoding one step later."""
    op, x = performer.performer(n_features=8, redraw=3), draw()

    @functools.partial(jax.jit, static_argnames="train")
    def run(steps, train):
        params = {"steps": Buffer(steps)}
        out, vjp = jax.vjp(lambda params: op(*x, params=params, causal=True, train=train), params)
        return out, vjp(jnp.ones_like(out))[0]["steps"].value

    trained, changes = zip(*(run(jnp.float32(n), train=True) for n in range(7)), strict=True)
    assert changes == (1,) * 7
    for n, m in itertools.combinations(range(7), 2):
        assert np.array_equal(trained[n], trained[m]) == (n // 3 == m // 3)
    for n in range(7):
        evaluated = run(jnp.float32(n), train=False)[0]
        np.testing.assert_allclose(evaluated, trained[max(n - 1, 0)], atol=1e-6)

    @jax.jit
    def last_step(steps):
        params, masks = {"steps": Buffer(steps)}, dict(segment_ids=None, causal=True, rng=None)
        before = [y[:, :-1] for y in x]
        plan = op.plan(params, *before[:2], **masks, train=False)
        lengths = jnp.full(2, 22)
        options = dict(plan=plan, lengths=lengths, capacity=23, rng=None)
        cache = op.init_cache(params, *before, **options)
        return op.step(params, *(y[:, -1:] for y in x), cache, position=lengths)[0]

    np.testing.assert_allclose(last_step(jnp.float32(4))[:, 0], trained[3][:, -1], atol=1e-5)


def test_performer_redraws_of_a_seed():
    with pytest.raises(ValueError, match="^redraw is 5 and seed None, which draws at every call"):
        performer.performer(seed=None, redraw=5)


@pytest.mark.slow
def test_performers_error_falls_with_the_root_of_the_number_of_features():
    q, k, v = draw(length=40, d_qk=8, scale=np.float32(0.5))
    want = dense.dense()(q, k, v, causal=True)
    numbers = np.array([16, 128, 1024])
    errors = []
    for n in numbers:
        op = performer.performer(n_features=int(n), seed=None, chunk_len=64)
        each = jax.jit(jax.vmap(lambda rng, op=op: op(q, k, v, causal=True, rng=rng)))
        out = each(jax.random.split(KEY, 12))
        errors.append(np.sqrt(np.mean((out - want) ** 2)))
    slope = np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    assert -0.65 < slope < -0.35
    assert errors[-1] < 0.05


def test_performers_features_are_the_seeds_or_the_rngs():
    q, k, v = draw(length=9)
    outs = {}
    for seed in (1, 2, None):
        op = performer.performer(n_features=8, seed=seed)
        run = jax.jit(functools.partial(op, q, k, v))
        for rng in (0, 1):
            outs[seed, rng] = np.asarray(run(rng=jax.random.key(rng)))
    np.testing.assert_array_equal(outs[1, 0], outs[1, 1])
    assert np.abs(outs[1, 0] - outs[2, 0]).max() > 1e-3
    assert np.abs(outs[None, 0] - outs[None, 1]).max() > 1e-3


def test_performers_sums_hold_keys_of_any_length():
    """Later keys whose features are e^80 times the first ones', and the other way round."""
    q, k, v = draw(length=32)
    q = 0.1 * q
    op = performer.performer(n_features=16, chunk_len=8)
    attend = with_gradients(lambda q, k, v: op(q, k, v, causal=True))
    for factors in (np.linspace(0.1, 14, 32), np.linspace(14, 0.1, 32)):
        out, gradients = attend(v, q, k * np.float32(factors)[:, None, None], v)
        for y in (out, *gradients):
            assert np.isfinite(y).all()
        # Each row is a mean of values, with weights above 0.
        assert np.abs(out).max() <= np.abs(v).max() + 1e-5


@pytest.mark.slow
def test_landmarks_of_a_long_row_cover_it():
    groups = nystromformer.landmark_groups(2**20, None, 2560)
    sizes = groups.real.sum(axis=-1)
    assert sizes.sum() == 2**20 and sizes.min() == 409 and sizes.max() == 410


@pytest.mark.parametrize(
    "options, causal",
    [
        (dict(rank=3), False),
        (dict(rank=3, dual_norm=False), False),
        (dict(rank=0), True),
        (dict(rank=0, dual_norm=False), False),
        (dict(rank=3, chunk_len=5), True),  # a tile of summaries begins within a chunk's
        (dict(rank=1, chunk_len=1, dual_norm=False), True),  # summaries fill several tiles
        (dict(rank=2, chunk_len=200), True),  # a chunk, which no query sees
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_of_long_short_attention_is_the_same_function(options, causal, padded, dropout):
    length = 150
    lengths = np.array([length, 90, 1, 0])
    q, k, v, d_out = np.random.default_rng(0).normal(size=(4, 4, length, 2, 8)).astype(np.float32)
    d_out = np.where((np.arange(length) < lengths[:, None])[..., None, None], d_out, 0)
    masks = dict(causal=causal) | (dict(lengths=lengths) if padded else {})
    masks |= dict(dropout=dropout, rng=KEY) if dropout else {}
    results = []
    for impl in (INTERPRETED, "xla"):
        op = long_short.long_short(window=40, impl=impl, **options)
        params = first_weights(op, op.dims(q, v), KEY)
        params = jax.tree.map(
            lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params
        )
        attend = lambda params, *qkv, op=op: op(*qkv, params=params, **masks)  # noqa: E731
        results.append(with_gradients(attend)(d_out, params, q, k, v))
    assert_trees_close(*results, 1e-5)


def test_long_short_attention_decodes_by_its_impl():
    q, k, v = draw()
    outs = []
    for impl in (INTERPRETED, "xla"):
        op = long_short.long_short(window=4, rank=2, chunk_len=4, impl=impl)
        params = first_weights(op, op.dims(q, v), KEY)
        lengths = jnp.full(len(q), 9)
        first = functools.partial(op.init_cache, plan=None, capacity=q.shape[1])
        cache = jax.jit(first)(params, q, k, v, lengths=lengths)
        token = (x[:, 9:10] for x in (q, k, v))
        step = jax.jit(functools.partial(op.step, params, *token, position=lengths))
        assert ("pallas_call" in str(jax.make_jaxpr(step)(cache))) == (impl == INTERPRETED)
        outs.append(step(cache)[0])
    np.testing.assert_allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("padding", [None, "behind", "anywhere"])
@pytest.mark.parametrize("impl, dtype", [("xla", np.float32), (INTERPRETED, jnp.bfloat16)])
def test_performers_features_of_some_positions_at_a_time(padding, impl, dtype, monkeypatch):
    """Chunks that do not divide the length, in both passes."""
    length = 23
    lengths, given = np.array([length, 9]), {}
    if padding == "behind":
        given = dict(lengths=lengths)
    elif padding == "anywhere":
        given = dict(segment_ids=np.arange(length) % 3 < np.array([[3], [2]]))
    q, k, v, d_out = np.random.default_rng(0).normal(size=(4, 2, length, 2, 8))
    op = performer.performer(n_features=16, impl=impl)
    whole = with_gradients(lambda *x: performer.performer(n_features=16, impl="xla")(*x, **given))
    want = whole(*(np.float32(x) for x in (d_out, q, k, v)))
    monkeypatch.setattr(performer, "FEATURES_AT_A_TIME", 2 * 2 * 16 * 7)
    run = with_gradients(lambda q, k, v: op.apply((), q, k, v, plan=(), **masks))
    masks = dict(causal=False, segment_ids=given.get("segment_ids"))
    if padding == "behind":
        masks |= dict(segment_ids=np.arange(length) < lengths[:, None], lengths=lengths)
    got = run(*(jnp.asarray(x, dtype) for x in (d_out, q, k, v)))
    assert_trees_close(got, want, 1e-5 if dtype == np.float32 else 3e-2)


@pytest.mark.parametrize("gradient", [False, True])
def test_performers_memory_has_no_features_of_all_positions(gradient):
    op, sizes = performer.performer(n_features=256), []

    def attend(q, k, v):
        return op(q, k, v).sum()

    function = jax.grad(attend, (0, 1, 2)) if gradient else attend
    for length in (2**17, 2**18):
        x = jax.ShapeDtypeStruct((8, length, 8, 16), jnp.float32)
        compiled = jax.jit(function).lower(x, x, x).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes / (8 * length * 8 * 4))
    # Numbers for each position and head: features alone would be 512.
    assert sizes[1] - sizes[0] / 2 < 8 * 16

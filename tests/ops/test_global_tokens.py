"""Global tokens, given as marks, against attention in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import Attention
from reformax.ops import block_patterns, block_sparse, longformer
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.masking.masks import Tokens
from reformax.ops.masking.visibility import Visibility
from reformax.ops.softmax import band
from reformax.ops.softmax.dropout import full_dropout_mask, seed_words
from tests.helpers import assert_trees_close, with_gradients
from tests.layers import plain
from tests.ops import inputs, oracle
from tests.ops.rows import Shape, visible

LENGTH = 23
MARKED = (3, 4, 17, 22)
SEGMENTS = np.repeat([[1, 2, 0], [3, 0, 0]], [9, 11, 3], axis=1)


def _counts(shape, causal, segment_ids, global_tokens, window, dilation, n_global):
    """Which keys each query sees, and which queries are global."""
    query, key = np.ogrid[: shape.n_queries, : shape.n_keys]
    steps = np.broadcast_to(dilation, shape.n_heads)[:, None, None]
    near = (abs(query - key) < window * steps) & ((query - key) % steps == 0)
    marked = (global_tokens > 0) & (True if segment_ids is None else segment_ids != 0)
    chosen = marked & (np.cumsum(marked, axis=1) <= n_global)
    mask = visible(shape, causal, segment_ids)
    return mask * (near[None] | chosen[:, None, None]), mask, chosen


def _global_tokens(length):
    global_tokens = np.zeros((2, length), np.int32)
    global_tokens[:, MARKED] = 1
    global_tokens[1, 0] = 2
    return global_tokens


def _differentiated(op, x, **masks):
    """The output, a random gradient of it, and with it those of the inputs."""
    d_out = np.random.default_rng(5).normal(size=x.v.shape).astype(np.float32)
    out, (gradient,) = with_gradients(lambda x: inputs.call(op, x, **masks))(d_out, x)
    return out, d_out, gradient


@pytest.mark.parametrize(
    "causal, segment_ids, dilation, n_global, projected, dropout, impl",
    [
        (False, None, 1, 6, True, 0.0, "xla"),
        (True, SEGMENTS, (1, 3), 4, True, 0.3, "xla"),
        (True, SEGMENTS, 1, 3, True, 0.3, INTERPRETED),
        (False, SEGMENTS, 3, 3, True, 0.3, INTERPRETED),
        pytest.param(True, None, (1, 2), 3, True, 0.0, INTERPRETED, marks=pytest.mark.slow),
        pytest.param(False, None, 1, 6, False, 0.0, INTERPRETED, marks=pytest.mark.slow),
        pytest.param(False, SEGMENTS, (2, 1), 2, True, 0.3, "xla", marks=pytest.mark.slow),
        pytest.param(True, None, 2, 3, False, 0.0, "xla", marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients(causal, segment_ids, dilation, n_global, projected, dropout, impl):
    options = dict(window=4, dilation=dilation, n_global=n_global)
    op = longformer.longformer(**options, global_projections=projected, impl=impl)
    x = inputs.draw(op, length=LENGTH, d_v=3)
    global_tokens, rng = _global_tokens(LENGTH), jax.random.key(3)
    masks = dict(
        causal=causal,
        segment_ids=segment_ids,
        global_tokens=global_tokens,
        dropout=dropout,
        rng=rng,
    )
    out, d_out, got = _differentiated(op, x, **masks)

    shape = Shape(2, LENGTH, LENGTH, 2)
    near, everything, chosen = _counts(shape, causal, segment_ids, global_tokens, **options)
    keep = np.ones((2, 2, LENGTH, LENGTH))
    if dropout:
        keep = np.asarray(
            jax.jit(lambda: full_dropout_mask(seed_words(rng, 2), dropout, keep.shape))()
        )
    wide = x.map(lambda y: y.astype(np.float64))
    read = [wide.extra_projections[f"global_{name}"] for name in "qkv"] if projected else wide[:3]
    row = chosen[..., None, None]
    want, of_near = oracle.attention(*wide[:3], near, keep, np.where(row, 0, d_out))
    far, of_far = oracle.attention(*read, everything, keep, np.where(row, d_out, 0))
    assert_trees_close({"out": out}, {"out": np.where(row, far, want)}, 1e-5)
    if projected:
        of_projections = dict(zip(("global_q", "global_k", "global_v"), of_far[:3], strict=True))
        assert_trees_close(got.extra_projections, of_projections, 1e-5)
    else:
        of_near = [a + b for a, b in zip(of_near, of_far, strict=True)]
    for name, mine, wanted in zip("qkv", got[:3], of_near, strict=False):
        assert_trees_close({f"d{name}": mine}, {f"d{name}": wanted}, 1e-5)


@pytest.mark.parametrize(
    "sizes, n_global, block_size, dropout, impl",
    [
        ((9, 11, 3), 3, (4, 5), 0.3, "xla"),
        pytest.param((23,), 6, 4, 0.0, "xla", marks=pytest.mark.slow),
        pytest.param((33, 40, 10), 3, 16, 0.3, INTERPRETED, marks=pytest.mark.slow),
        pytest.param((96,), 40, (16, 32), 0.0, INTERPRETED, marks=pytest.mark.slow),
    ],
)
def test_global_tokens_beside_random_blocks(sizes, n_global, block_size, dropout, impl):
    """The ETC form of BigBird. Dropout of a global key goes by its slot among extra keys."""
    length = sum(sizes)
    segment_ids = np.repeat([[1, 2, 0], [3, 0, 0]], sizes, axis=1) if len(sizes) > 1 else None
    pattern = block_patterns.bigbird(n_before=1, n_after=0, n_global=0, n_random=1)
    options = dict(pattern=pattern, block_size=block_size, impl=impl)
    op = block_sparse.block_sparse(n_global=n_global, **options)
    x = inputs.draw(op, length=length, d_v=3)
    global_tokens, rng = _global_tokens(length), jax.random.key(3)
    masks = dict(
        causal=False, segment_ids=segment_ids, global_tokens=global_tokens, dropout=dropout, rng=rng
    )
    out, d_out, got = _differentiated(op, x, **masks)

    everything = visible(Shape(2, length, length, 2), False, segment_ids)
    marked = (global_tokens > 0) & (True if segment_ids is None else segment_ids != 0)
    chosen = marked & (np.cumsum(marked, axis=1) <= n_global)
    block_q, block_k = np.broadcast_to(block_size, 2)
    query, key = np.ogrid[:length, :length]
    near = pattern(-(-length // block_q), -(-length // block_k))[query // block_q, key // block_k]
    assert not near.all(axis=-1).all()
    near = everything * (near | chosen[:, None, None])
    keep = keep_near = np.ones((2, 2, length, length))
    if dropout:
        n_slots = -(-length // block_k) * block_k + n_global
        shape = (2, 2, length, n_slots)
        drawn = np.asarray(jax.jit(lambda: full_dropout_mask(seed_words(rng, 2), dropout, shape))())
        keep, keep_near = drawn[..., :length], drawn[..., :length].copy()
        for row, key in zip(*np.nonzero(chosen), strict=True):
            slot = n_slots - n_global + chosen[row, :key].sum()
            keep_near[row, :, :, key] = drawn[row, :, :, slot]
    wide = x.map(lambda y: y.astype(np.float64))
    row = chosen[..., None, None]
    want, of_near = oracle.attention(*wide[:3], near, keep_near, np.where(row, 0, d_out))
    far, of_far = oracle.attention(*wide[:3], everything, keep, np.where(row, d_out, 0))
    assert_trees_close({"out": out}, {"out": np.where(row, far, want)}, 1e-5)
    for name, mine, *parts in zip("qkv", got[:3], of_near, of_far, strict=False):
        assert_trees_close({f"d{name}": mine}, {f"d{name}": sum(parts)}, 1e-5)


def test_global_tokens_of_blocks_need_marks_and_both_ways():
    op = block_sparse.block_sparse(block_size=4, n_global=2)
    x = inputs.draw(op, length=LENGTH)
    plain = inputs.call(block_sparse.block_sparse(block_size=4), x, causal=False)
    np.testing.assert_array_equal(inputs.call(op, x, causal=False), plain)
    with pytest.raises(NotImplementedError, match="causal"):
        inputs.call(op, x, causal=True)


def test_a_step_sees_the_global_tokens_of_the_prompt():
    op = longformer.longformer(window=3, dilation=(1, 2), n_global=3)
    x = inputs.draw(op, length=LENGTH)
    global_tokens = np.zeros((2, LENGTH), np.int32)
    global_tokens[0, 1], global_tokens[1, [0, 5]] = 1, 1
    whole = np.asarray(inputs.call(op, x, causal=True, global_tokens=global_tokens))
    prompt = x.at(slice(None), slice(0, 9))
    lengths = np.array([9, 7])
    global_tokens = global_tokens[:, :9]
    masks = dict(segment_ids=None, causal=True, rng=None, train=False, length=LENGTH)

    @jax.jit
    def start(prompt, lengths):
        plan = inputs.plan(op, prompt, **masks, global_tokens=global_tokens)
        held = dict(plan=plan, lengths=lengths, capacity=LENGTH, rng=None)
        return inputs.init_cache(op, prompt, **held)

    cache = start(prompt, lengths)
    step = jax.jit(lambda x, cache, position: inputs.step(op, x, cache, position=position))
    row = np.arange(2)[:, None]
    for n in range(14):
        position = lengths + n
        out, cache = step(x.at(row, position[:, None]), cache, position)
        np.testing.assert_allclose(out, whole[row, position[:, None]], atol=1e-5)
    assert cache.ring.keys.shape[2] == 5  # the window of the head of two positions a step


def test_each_head_has_its_own_dilation_and_no_gradient_is_scattered():
    """A GPU adds up atomically what is scattered, which takes longer than the attention."""
    rng = np.random.default_rng(8)
    q, k, v = rng.normal(size=(3, 2, LENGTH, 3, 4)).astype(np.float32)
    bands = [Visibility(False, 3, dilation) for dilation in (2, 1, 2)]

    def attended(q, k, v, bands):
        return band.attend(Call(), bands, q, k, v, None, "xla")

    @jax.jit
    def by_head(q, k, v):
        heads = ([x[:, :, i : i + 1] for x in (q, k, v)] for i in range(3))
        each = [attended(*x, [band]) for x, band in zip(heads, bands, strict=True)]
        return jnp.concatenate(each, axis=2)

    got = jax.jit(functools.partial(attended, bands=bands))(q, k, v)
    np.testing.assert_allclose(got, by_head(q, k, v), atol=1e-6)
    gradient = jax.grad(lambda *x: attended(*x, bands).sum(), argnums=(0, 1, 2))
    assert "scatter" not in str(jax.make_jaxpr(gradient)(q, k, v))


@pytest.mark.slow
def test_heads_one_after_the_other_compute_the_same(monkeypatch):
    op = longformer.longformer(window=4, n_global=2)
    x = inputs.draw(op, length=LENGTH, n_heads=3)
    global_tokens = np.zeros((2, LENGTH), np.int32)
    global_tokens[:, 7] = 1

    def run(x):  # not the op's call, which is compiled once
        plan = inputs.plan(
            op, x, segment_ids=None, causal=True, rng=None, train=True, global_tokens=global_tokens
        )
        out = inputs.apply(
            op, x, plan=plan, segment_ids=None, causal=True, dropout=0.2, rng=jax.random.key(0)
        )
        return jnp.sum(jnp.sin(out)), out

    def compiled():
        return jax.jit(lambda x: jax.value_and_grad(run, has_aux=True)(x)).lower(x).compile()

    at_once = compiled()
    monkeypatch.setattr(band, "LOGITS_AT_A_TIME", 1)
    in_turn = compiled()
    assert at_once.as_text().count("while(") < in_turn.as_text().count("while(")
    ((_, out), gradient), ((_, got), got_gradient) = at_once(x), in_turn(x)
    np.testing.assert_allclose(got, out, atol=1e-6)
    assert_trees_close(got_gradient.extra_projections, gradient.extra_projections, 1e-5)


def test_a_layer_gives_a_global_token_projections_of_its_own():
    layer = Attention(longformer.longformer(window=3, n_global=1), n_heads=2, d_qk=4, d_v=4)
    params = plain.init(layer, (1, LENGTH, 8))
    x = np.random.default_rng(0).normal(size=(1, LENGTH, 8)).astype(np.float32)
    global_tokens = np.zeros((1, LENGTH), np.int32)
    global_tokens[0, 5] = 1
    run = jax.jit(lambda params: layer.apply(params, x, Tokens(None, global_tokens), rng=None))
    before = run(params)
    after = run(params | {"w_global_q": -params["w_global_q"]})
    changed = np.any(np.asarray(before != after), axis=-1)[0]
    np.testing.assert_array_equal(np.nonzero(changed)[0], [5])

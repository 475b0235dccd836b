"""DeepSeek sparse attention: the indexer's choice, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import advanced, measured
from reformax.models import lm
from reformax.ops import dense, dsa, local
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.candidates import Pooled
from reformax.ops.indexing.indexer import Indexer
from reformax.ops.kernels.triton import indexer, indexer_gradient, top_k
from tests.helpers import assert_trees_close
from tests.ops import indexed, inputs

OPTIONS = dict(n_index_heads=3, d_index=4)


IMPLS = pytest.mark.parametrize("impl", ["xla", INTERPRETED])


def numbers(length, seed=0):
    return np.random.default_rng(seed).normal(size=(3, 2, length, 2, 8)).astype(np.float32)


def weights(op, q):
    return inputs.first_weights(op, op.dims(q, q), jax.random.key(1))


scores_of = jax.jit(functools.partial(indexed.scores, OPTIONS))


@IMPLS
def test_a_query_chooses_the_best_of_those_before_it(impl):
    q, k, _ = numbers(21)
    op = dsa.dsa(top_k=5, **OPTIONS, impl=impl)
    params = weights(op, q)
    ids = np.repeat([[1, 2, 0], [1, 1, 1]], 7, axis=1)
    options = dict(segment_ids=ids, causal=True, rng=None, train=True)
    plan = np.asarray(jax.jit(lambda *x: op.plan(*x, **options))(params, q, k))
    scores = np.asarray(scores_of(params, q, k))
    for b, t in np.ndindex(plan.shape[:2]):
        allowed = [s for s in range(t + 1) if ids[b, t] and ids[b, s] == ids[b, t]]
        chosen = set(plan[b, t]) - {-1}
        assert len(chosen) == min(5, len(allowed)) and chosen <= set(allowed)
        left = [scores[b, t, s] for s in set(allowed) - chosen]
        assert not left or min(scores[b, t, list(chosen)]) >= max(left) - 1e-6


@IMPLS
def test_the_indexer_learns_from_the_attention_and_from_nothing_else(impl):
    """Eq. 3: with all keys chosen, the slope of the divergence from dense attention's weights."""
    q, k, v = numbers(9)
    op = dsa.dsa(top_k=9, index_loss=0.5, **OPTIONS, impl=impl)
    params = weights(op, q)
    attend = lambda params, q, k, v: op(q, k, v, causal=True, params=params)  # noqa: E731
    np.testing.assert_allclose(
        jax.jit(attend)(params, q, k, v), dense.dense()(q, k, v, causal=True), atol=1e-6
    )

    seen = np.tril(np.ones((9, 9), bool))
    eye = np.broadcast_to(np.eye(9, dtype=np.float32)[None, :, None], (2, 9, 2, 9))
    attention = jnp.swapaxes(dense.dense()(q, k, eye, causal=True), 1, 2).mean(axis=1)

    def divergence(params):
        scores = jnp.where(seen, scores_of(params, q, k), -1e30)
        return -jnp.where(seen, attention * jax.nn.log_softmax(scores), 0).sum() / 18

    want = jax.tree.map(lambda x: 0.5 * x, jax.jit(jax.grad(divergence))(params))
    for scale in (0.0, 3.0):
        total = lambda *x, scale=scale: scale * jnp.sin(attend(*x)).sum()  # noqa: E731
        got, *others = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(params, q, k, v)
        assert_trees_close(got, want, 1e-5)
        assert all(np.any(x) == bool(scale) for x in others)


SOME = Pooled(block_sizes=(8,), n_blocks=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(block_size=4), marks=pytest.mark.slow),
        pytest.param(dict(candidates=SOME), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rounded_vectors_are_chosen_by_as_their_exact_products_say(options):
    """Of both implementations; in float32 they choose otherwise."""
    q, k, _ = numbers(120)
    call = dict(segment_ids=None, causal=True, rng=jax.random.key(0))

    def plan(dtype, impl):
        op = dsa.dsa(top_k=16, **OPTIONS, indexer=Indexer(**options, dtype=dtype), impl=impl)
        run = jax.jit(functools.partial(op.plan, **call))
        return np.sort(run(weights(op, q), q, k), axis=2)

    got, want = (plan("bfloat16", x) for x in (INTERPRETED, "xla"))
    assert (got == want).all()
    assert 0.001 < (want != plan("float32", "xla")).mean() < 0.2


@pytest.mark.parametrize("top_k, choice", [(9, Indexer()), (3, Indexer(n_local=2))])
def test_the_reported_loss_is_the_one_that_the_indexer_learns_from(top_k, choice):
    """Its meter becomes the mean divergence, of eq. 4 over the chosen keys alone."""
    q, k, v = numbers(9)
    ids = np.array([[1] * 5 + [2] * 3 + [0], [1] * 9])
    op = dsa.dsa(top_k=top_k, **OPTIONS, indexer=choice, report_loss=True)
    params = weights(op, q)
    attend = lambda params: op(q, k, v, causal=True, segment_ids=ids, params=params)  # noqa: E731
    change = jax.jit(jax.grad(lambda params: 0 * attend(params).sum()))(params)
    got = measured(advanced(params, change))["index_loss"]

    plan = np.asarray(jax.jit(lambda *x: op.plan(*x, segment_ids=ids, causal=True))(params, q, k))
    seen = (plan[..., None] == np.arange(9)).any(axis=2) & np.tril(np.ones((9, 9), bool))
    seen &= (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8)
    attention = np.mean(softmax(logits, seen[:, None]), axis=1)
    index = softmax(np.asarray(scores_of(params, q, k)), seen)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(attention > 0, attention * np.log(attention / index), 0)
    np.testing.assert_allclose(got, terms.sum() / np.sum(ids != 0), rtol=1e-4)


def softmax(logits, mask):
    weights = np.where(mask, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)


def small_chunks(monkeypatch):
    """Chunks of one tile of queries, and rows of several tiles of scores."""
    monkeypatch.setattr(indexer, "MAX_SCORE_BYTES", 1)
    for name, value in dict(SAMPLES=8, ROW_TILE=64, MIN_LIST=32, MIN_ROW=0).items():
        monkeypatch.setattr(top_k, name, value)


def three_segments(length):
    """Interleaved segments in one row, contiguous ones in another, both with padding."""
    position = np.arange(length)
    return jnp.asarray(np.stack([position * 7 % 4, 3 - position * 4 // length]), jnp.int32)


@pytest.mark.parametrize(
    "top_k, causal, packed, n_local",
    [(40, True, False, 0), (70, False, True, 0), (40, True, True, 7), (170, True, False, 150)],
)
def test_kernels_choose_among_ties_what_array_operations_do(
    top_k, causal, packed, n_local, monkeypatch
):
    """Sums of integers are exact, so many positions have equal scores, of either sign."""
    small_chunks(monkeypatch)
    rng, length = np.random.default_rng(0), 301
    q, k = rng.integers(-1, 2, (2, 2, length, 2, 8)).astype(np.float32)
    params = {"query": (2, 8, 3, 4), "key": (2, 8, 4), "weight": (2, 8, 3)}
    params = {name: rng.integers(-1, 2, x).astype(np.float32) for name, x in params.items()}
    masks = dict(segment_ids=three_segments(length) if packed else None, causal=causal)
    options = dict(top_k=top_k, **OPTIONS, indexer=Indexer(n_local=n_local))
    got, want = (
        jax.jit(
            lambda *x, impl=impl: dsa.dsa(**options, impl=impl).plan(
                *x, **masks, rng=None, train=True
            )
        )(params, q, k)
        for impl in (INTERPRETED, "xla")
    )
    # The local keys come last, by distance.
    np.testing.assert_array_equal(*(x[..., top_k - n_local :] for x in (got, want)))
    got, want = (np.asarray(x)[..., : top_k - n_local] for x in (got, want))
    in_order = lambda plan: np.sort(np.where(plan < 0, length, plan), axis=-1)  # noqa: E731
    np.testing.assert_array_equal(in_order(got), in_order(want))
    np.testing.assert_array_equal(np.where(got < 0, length, got), in_order(got))
    scores = np.asarray(scores_of(params, q, k))
    chosen = np.take_along_axis(scores, np.maximum(got, 0), axis=-1)
    tied = (scores == chosen.min(axis=-1, where=got >= 0, initial=np.inf, keepdims=True)).sum(-1)
    assert tied.max() > 30 and chosen.min() < 0


def test_kernels_score_as_exactly_as_sums_in_float32():
    """With vectors of very different lengths, some of whose numbers are small."""
    rng, length, n_best = np.random.default_rng(0), 60, 20

    def draw(*shape):
        lengths = 10.0 ** rng.integers(-9, 9, (*shape[:-1], 1))
        return (rng.normal(size=shape) * lengths * 10.0 ** rng.integers(-6, 1, shape)).astype("f4")

    queries, keys = draw(1, length, 3, 16), draw(1, length, 16)
    weights = rng.normal(size=(1, length, 3)).astype("f4")
    run = functools.partial(indexer.choose_positions, n_best, False, True)
    (got,) = np.asarray(jax.jit(run)(queries, weights, keys, None, None))
    queries, keys, weights = (x[0].astype(float) for x in (queries, keys, weights))
    products = np.einsum("tjd,sd->tjs", queries, keys)
    found = np.einsum("tj,tjs->ts", weights, np.maximum(products, 0))
    sizes = np.linalg.norm(queries, axis=-1)[..., None] * np.linalg.norm(keys, axis=-1)
    error = 2.0**-22 * np.einsum("tj,tjs->ts", abs(weights), sizes)
    is_chosen = (got[..., None] == np.arange(length)).any(axis=1)
    assert (is_chosen.sum(axis=1) == n_best).all()
    lowest = np.where(is_chosen, found + error, np.inf).min(axis=1)
    assert (np.where(is_chosen, -np.inf, found - error).max(axis=1) <= lowest).all()


@pytest.mark.slow
@pytest.mark.parametrize("listed_cost", [0, 1e9], ids=["lists", "tiles"])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_kernels_differentiate_as_array_operations_do(dtype, tolerance, listed_cost, monkeypatch):
    small_chunks(monkeypatch)
    monkeypatch.setattr(indexer_gradient, "LISTED_COST", listed_cost)
    length = 301
    q, k, v = (x.astype(dtype) for x in numbers(length))
    d_out = numbers(length, 1)[0]
    op = dsa.dsa(top_k=60, **OPTIONS)
    params, segment_ids = weights(op, q), three_segments(length)
    masks = dict(segment_ids=segment_ids, causal=True, rng=jax.random.key(2))
    plan = jax.jit(lambda *x: op.plan(*x, **masks, train=True))(params, q, k)

    def run(impl):
        op = dsa.dsa(top_k=60, **OPTIONS, impl=impl)
        attend = lambda *x: op.apply(*x, plan=plan, dropout=0.2, **masks)  # noqa: E731
        out, vjp = jax.vjp(attend, params, q, k, v)
        return out, vjp(d_out.astype(out.dtype))

    got, want = (jax.jit(run, static_argnums=0)(x) for x in (INTERPRETED, "xla"))
    assert_trees_close(got, want, tolerance)


@pytest.mark.slow
def test_kernels_attend_to_the_best_candidates():
    """Which array operations find for both."""
    q, k, v = numbers(50)
    choice = Indexer(n_local=4, group=3, candidates=Pooled(block_sizes=(8,), n_blocks=2))

    def run(impl):
        op = dsa.dsa(top_k=12, **OPTIONS, indexer=choice, impl=impl)
        total = lambda *x: jnp.sin(op(*x[1:], causal=True, params=x[0])).sum()  # noqa: E731
        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(weights(op, q), q, k, v)

    got, want = (jax.jit(run, static_argnums=0)(x) for x in (INTERPRETED, "xla"))
    assert_trees_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "packed, dropout, wide", [(False, 0.0, 1), (True, 0.2, 1), (True, 0.2, 17)]
)
def test_kernels_choose_and_attend_to_whole_blocks(packed, dropout, wide):
    """Two query heads on a key head, with a last block that is not complete.

    Programs of blocks do not hold heads above 128, whose positions are a list.
    """
    q, k, v = (np.tile(x, wide) / wide for x in numbers(43))
    k, v = k[:, :, :1], v[:, :, :1]
    ids = jnp.asarray(np.repeat([[1, 2, 0], [1, 1, 1]], [20, 17, 6], axis=1)) if packed else None
    masks = dict(segment_ids=ids, causal=True, rng=jax.random.key(2))

    def run(impl):
        op = dsa.dsa(top_k=10, **OPTIONS, indexer=Indexer(rotary=True, block_size=4), impl=impl)
        params = weights(op, q)
        plan = op.plan(params, q, k, train=True, **masks)

        def total(*x):
            return jnp.sin(op.apply(*x, plan=plan, dropout=dropout, **masks)).sum()

        gradients = jax.value_and_grad(total, argnums=(0, 1, 2, 3))(params, q, k, v)
        return jnp.sort(plan, axis=2), gradients

    got, want = (jax.jit(run, static_argnums=0)(x) for x in (INTERPRETED, "xla"))
    assert_trees_close(got, want, 1e-5)


def sizes_of(jaxpr):
    """Bytes of all results of a program and of the programs in it, kernels excepted."""
    for eqn in jaxpr.eqns:
        yield from (x.aval.size * x.aval.dtype.itemsize for x in eqn.outvars)
        if eqn.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
                if is_program(inner):
                    yield from sizes_of(getattr(inner, "jaxpr", inner))


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_kernels_have_no_scores_of_all_pairs_in_memory():
    length = 2**17
    op = dsa.dsa(top_k=64, **OPTIONS, impl=INTERPRETED)
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.bfloat16)
    params = jax.eval_shape(lambda rng: op.init(rng, op.dims(x, x)), jax.random.key(0))
    total = lambda *x: op(*x[1:], causal=True, params=x[0]).sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2, 3)))(params, x, x, x)
    largest = max(sizes_of(jaxpr.jaxpr))
    assert indexer.MAX_SCORE_BYTES / 2 < largest <= max(indexer.MAX_SCORE_BYTES, length**2 // 8)


@pytest.mark.parametrize(
    "length, top_k, d_index, message",
    [(2**18 + 1, 2**14, 8, "pairs=68720001025"), (9, 2, 129, "d_index=129"), (2**20, 64, 8, None)],
)
def test_kernels_refuse_what_they_do_not_hold(length, top_k, d_index, message):
    """A bit for each of too many pairs, where lists do not pay."""
    op = dsa.dsa(top_k=top_k, d_index=d_index, impl=INTERPRETED)
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    params = jax.eval_shape(lambda rng: op.init(rng, op.dims(x, x)), jax.random.key(0))
    attend = functools.partial(jax.eval_shape, lambda *x: op(*x[1:], params=x[0]), params, x, x, x)
    if message is None:
        assert attend().shape == x.shape
        return
    with pytest.raises(NotImplementedError, match=f"{message}: use impl='auto' or 'xla'"):
        attend()


@pytest.mark.parametrize(
    "choice, message",
    [
        (dict(n_local=2), "n_local=2 in a call that is not causal"),
        (dict(n_local=2, group=2), "group=2"),
        (dict(score="product"), "score=product"),
    ],
)
def test_kernels_refuse_choices_that_they_cannot_make(choice, message):
    op = dsa.dsa(top_k=5, **OPTIONS, indexer=Indexer(**choice), impl=INTERPRETED)
    q, k, _ = numbers(9)
    with pytest.raises(NotImplementedError, match=f"with {message}: use impl='auto' or 'xla'"):
        op.plan(weights(op, q), q, k, segment_ids=None, causal=False)


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

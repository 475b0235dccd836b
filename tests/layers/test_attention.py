"""The attention layer around every op: its projections, masks, rngs and options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import dense, flash, gated_delta, hca, linear, lsh, shared_qk
from reformax.ops.base import Dims
from reformax.ops.calls.heads import QKV
from reformax.ops.softmax.dropout import seed_words
from tests.helpers import changed
from tests.layers import plain
from tests.ops import inputs
from tests.ops.inputs import Inputs
from tests.ops.reference import ADDRESSES, Asked, expected, kept_weights
from tests.ops.rows import ROWS, Shape, one_of_each_kind, over

RNG = jax.random.PRNGKey(5)
SIZES = dict(n_heads=3, d_qk=6, d_v=5)
over_rows = over(ROWS, quick=one_of_each_kind)


def numbers(length=13, d_model=7, seed=0):
    return np.random.default_rng(seed).normal(size=(2, length, d_model)).astype(np.float32)


def rotated(x):
    """RoFormer, sec. 3.2.2, as multiplication of complex numbers `x_i + i x_{i + H/2}`."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("everything", [False, True])
@over_rows
def test_equals_an_independent_computation(row, everything):
    """Projections, rotation, plan, attention and output in NumPy float64."""
    x = numbers()
    causal = row.causal(everything)
    options = dict(causal=causal, bias=everything, use_rotary=everything, masked=everything)
    rate = row.dropout(0.3) if everything else 0.0
    op = row.op()
    layer = layers.Attention(op, **SIZES, **options, attention_dropout=rate)
    segment_ids = row.segment_ids(plain.some_segments(*x.shape[:2])) if everything else None
    mask = (segment_ids,) if everything else ()
    params = plain.init(layer, x.shape, *(m.shape for m in mask))
    got = jax.jit(lambda params: layer.apply(params, x, *mask, rng=RNG))(params)

    def head(name):
        y = np.einsum("btd,ndh->btnh", x, np.asarray(params[f"w_{name}"], np.float64))
        y = y + np.asarray(params[f"b_{name}"]) if everything else y
        if f"up_{name}" in params:  # of a low rank
            y = np.einsum("btr,nrh->btnh", y[:, :, 0], np.asarray(params[f"up_{name}"]))
        return y

    heads = {name[2:]: head(name[2:]) for name in params if name[:2] == "w_" and name != "w_o"}
    if everything:
        extra_projections = op.extra_projections(Dims(3, 6, 5, 13))
        rotated_names = {"q", "k"} | {
            name for name, extra in extra_projections.items() if extra.role
        }
        heads |= {name: rotated(heads[name]) for name in rotated_names & heads.keys()}
    q, k, v = heads.pop("q"), heads.pop("k", None), heads.pop("v")
    assert (k is None) == op.shared_qk
    read = Inputs(q, k, v, heads or None, params["op"])
    masks = dict(segment_ids=segment_ids, causal=causal, rng=jax.random.fold_in(RNG, 0), train=True)
    plan = jax.jit(lambda read: inputs.plan(op, read, **masks))(read.map(np.float32))
    shape = Shape(batch=2, n_queries=13, n_keys=13, n_heads=3)
    keep = np.ones((2, 3, 13, ADDRESSES))
    if rate:
        seed = seed_words(jax.random.fold_in(RNG, 1), 2)
        keep = jax.jit(lambda: kept_weights(seed, rate, *keep.shape[:3]))()
    asked = Asked(row, row.first, plan, shape, causal, segment_ids, np.asarray(keep))
    out, _ = expected(asked, read, None, np.zeros_like(v))
    want = np.einsum("btnv,nvd->btd", out, np.asarray(params["w_o"], np.float64))
    np.testing.assert_allclose(got, want, atol=1e-5 * row.rounding * max(1, np.abs(want).max()))


def test_sizes_are_those_asked_for():
    layer = layers.Attention(dense.dense(), **SIZES, bias=True)
    params = layer.init_params(RNG, (2, 13, 7))
    assert {name: w.shape for name, w in params.items() if name != "op"} == {
        "w_q": (3, 7, 6),
        "w_k": (3, 7, 6),
        "w_v": (3, 7, 5),
        "w_o": (3, 5, 7),
        "b_q": (3, 6),
        "b_k": (3, 6),
        "b_v": (3, 5),
    }
    # Glorot's variance, 2 / (fan in + fan out), with respect to all heads together.
    wide = layers.Attention(dense.dense(), 8, 16, 32).init_params(RNG, (1, 4, 64))
    for name, d_head in (("w_q", 16), ("w_k", 16), ("w_v", 32), ("w_o", 32)):
        assert np.var(wide[name]) == pytest.approx(2 / (64 + 8 * d_head), rel=0.1)


def test_the_algorithms_own_weights_are_kept():
    class Scaled(dense.dense):
        def _init(self, rng, dims):
            return {"scale": jnp.full(dims.n_heads, 2.0)}

        def _apply(self, call, params, q, k, v, plan):
            return v * params["scale"][:, None]

    layer, x = layers.Attention(Scaled(), **SIZES), numbers()
    params = layer.init_params(RNG, x.shape)
    values = layer.project(params, x)[0].v
    want = jnp.einsum("btnv,nvd->btd", 2 * values, params["w_o"])
    np.testing.assert_allclose(layer.apply(params, x), want, atol=1e-5)


@over_rows
def test_a_boolean_mask_is_one_segment(row):
    """Ops compute less where rows are known to be of one segment, so last bits may differ."""
    x, rounding = numbers(), 5e-6
    layer = layers.Attention(row.op(), **SIZES, causal=row.causal(False), masked=True)
    mask = np.arange(13) >= np.array([[0], [7]])
    params = plain.init(layer, x.shape, mask.shape)
    apply = jax.jit(lambda mask, x: layer.apply(params, x, mask, rng=RNG))
    out = apply(mask, x)
    if row.op().packed:
        np.testing.assert_allclose(out, apply(mask.astype(np.int32), x), rtol=0, atol=rounding)
    else:
        with pytest.raises(NotImplementedError, match="segment_ids of a row are integers"):
            apply(mask.astype(np.int32), x)
    assert not np.any(out[~mask])
    junk = np.where(mask[..., None], x, 9)
    np.testing.assert_array_equal(apply(mask, junk)[mask], out[mask])
    assert np.abs(apply(np.ones_like(mask), x) - out)[mask].max() > 100 * rounding


def test_masked_says_how_many_inputs_come():
    assert layers.Attention(dense.dense()).n_in == 1
    assert layers.Attention(dense.dense(), masked=True).n_in == 2


@pytest.mark.parametrize("random_plan", [False, True])
def test_dropout_is_a_function_of_the_rng(random_plan):
    x = numbers()
    op = next(row.op() for row in ROWS if (row.op().plan_needs == "rng") == random_plan)
    layer = layers.Attention(op, **SIZES)
    params = plain.init(layer, x.shape)
    # The plan is fixed, so that an rng changes the dropout alone.
    plan = jax.jit(lambda: layer.plan(params, layer.project(params, x)[0], rng=RNG))()
    op = changed(op, _plan=lambda *_, **__: plan, plan_needs="rng")

    def apply(**options):
        layer = layers.Attention(op, **SIZES, **options)
        return jax.jit(lambda seed: layer.apply(params, x, rng=jax.random.PRNGKey(seed)))

    without = apply()(0)
    np.testing.assert_array_equal(without, apply()(1))
    for rates in (dict(attention_dropout=0.4), dict(output_dropout=0.4)):
        drop = apply(**rates)
        np.testing.assert_array_equal(drop(0), drop(0))
        assert not np.allclose(drop(0), drop(1))
        assert not np.allclose(drop(0), without)
        np.testing.assert_array_equal(apply(**rates, mode="eval")(0), without)


def test_output_dropout_zeros_and_scales_the_output():
    x, layer = numbers(200), layers.Attention(dense.dense(), **SIZES, output_dropout=0.25)
    params = plain.init(layer, x.shape)
    whole = jax.jit(layers.Attention(dense.dense(), **SIZES).apply)(params, x)
    out = jax.jit(lambda x: layer.apply(params, x, rng=RNG))(x)
    assert np.mean(out == 0) == pytest.approx(0.25, abs=0.04)
    np.testing.assert_allclose(out, np.where(out == 0, 0, whole / 0.75), atol=1e-6)


def test_the_two_dropouts_draw_apart():
    """Hashes, attention weights and output derive their own rngs from the one given."""
    seen = {}

    def plan(self, call, params, q, k):
        seen["plan"] = seed_words(call.rng, len(q))
        return ()

    def apply(self, call, params, q, k, v, plan):
        seen["weights"] = call.seed
        return v

    op = changed(dense.dense(), _plan=plan, _apply=apply, plan_needs="rng")
    layer, x = layers.Attention(op, attention_dropout=0.1), numbers()
    layer.apply(layer.init_params(RNG, x.shape), x, rng=RNG)
    assert not np.array_equal(seen["plan"], seen["weights"])


def test_mode_selects_the_hashes_of_evaluation():
    x = numbers(32)
    op = lsh.lsh(chunk_len=4, n_hashes=1, n_hashes_eval=3)
    params = plain.init(layers.Attention(op, **SIZES), x.shape)

    def plan(op, mode):
        layer = layers.Attention(op, **SIZES, mode=mode)
        return jax.eval_shape(lambda: layer.plan(params, layer.project(params, x)[0], rng=RNG))

    assert plan(op, "train").query_positions.shape[2] == 1
    assert plan(op, "eval").query_positions.shape[2] == 3
    three = layers.Attention(lsh.lsh(chunk_len=4, n_hashes=3), **SIZES)
    one = layers.Attention(op, **SIZES, mode="eval")
    outs = (jax.jit(layer.apply)(params, x, rng=RNG) for layer in (one, three))
    np.testing.assert_array_equal(*outs)


RELATIVE = [
    row
    for row in ROWS
    if (row.relative or row.exact)
    and (row.op().causality != "never" and not row.in_kernel)
    and row.counts  # of others the products of queries and keys may not be all that counts
]


@over(RELATIVE)
def test_rotary_is_relative(row):
    """The same tokens further along the sequence attend to each other the same."""
    x, shift = numbers(), 11
    layer = layers.Attention(row.op(), **SIZES, causal=True, masked=True, use_rotary=True)
    params = plain.init(layer, x.shape, x.shape[:2])
    later = np.concatenate([numbers(shift, seed=1), x], axis=1)
    apply = jax.jit(layer.apply)
    out = apply(params, x, np.ones(x.shape[:2], bool))
    out_later = apply(params, later, np.arange(13 + shift)[None].repeat(2, 0) >= shift)
    np.testing.assert_allclose(out_later[:, shift:], out, atol=1e-5)
    without = jax.jit(layers.Attention(row.op(), **SIZES, causal=True).apply)(params, x)
    assert not np.allclose(out, without, atol=1e-2)


@over_rows
def test_computes_in_the_dtype_of_its_input(row):
    x = numbers().astype(jnp.bfloat16)
    options = dict(causal=row.causal(False), bias=True, use_rotary=True, output_dropout=0.1)
    layer = layers.Attention(row.op(), **SIZES, **options)
    params = plain.init(layer, x.shape)

    @jax.jit
    def run(x):
        """Both at the plan of the first."""
        narrow, wide = (layer.project(params, y)[0] for y in (x, x.astype(np.float32)))
        assert all(y.dtype == jnp.bfloat16 for y in jax.tree.leaves(narrow))
        plan = layer.plan(params, narrow, rng=RNG)
        heads = (layer.attend(params, y, plan, rng=RNG) for y in (narrow, wide))
        return [layer.combine(params, y, rng=RNG) for y in heads]

    out, want = run(x)
    assert out.dtype == jnp.bfloat16 and want.dtype == jnp.float32
    np.testing.assert_allclose(
        out.astype(np.float32), want, atol=4e-2 * row.rounding * np.abs(want).max()
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_heads=0), "n_heads is 0: expected at least 1"),
        (dict(n_heads=3, n_kv_heads=2), "n_kv_heads is 2: expected a divisor of n_heads, 3"),
        (dict(n_kv_heads=1, op=shared_qk.shared_qk()), "n_kv_heads is 1, but shared_qk() makes"),
        (dict(op="lsh"), "op is 'lsh': expected an AttentionOp, such as lsh.lsh()"),
        (dict(op=dense.dense), "op is <class 'reformax.ops.dense.dense'>: expected an AttentionOp"),
        (dict(attention_dropout=1.0), "attention_dropout is 1.0: expected a rate in [0, 1)"),
        (dict(output_dropout=-0.1), "output_dropout is -0.1: expected a rate in [0, 1)"),
        (
            dict(op=linear.linear(), attention_dropout=0.1),
            "attention_dropout is 0.1, but linear() makes no attention weights to drop: set it to",
        ),
        (
            dict(op=gated_delta.gated_delta(), causal=True, scale=0.5),
            "scale is 0.5, but gated_delta() makes no attention weights: leave it out",
        ),
        (
            dict(op=flash.flash(scale=2.0), scale=0.5),
            "scale is 0.5 and the scale of flash(scale=2.0) 2.0: set one",
        ),
        (dict(mode="predict"), "mode is 'predict': expected 'train' or 'eval'"),
        (dict(next_value=True), "next_value is True with causal=False and op=dense(): a position"),
        (
            dict(op=hca.hca(rotary_features=2), use_rotary=True),
            "use_rotary is True and hca(rotary_features=2) rotates queries and keys by itself",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_errors_of_construction(options, message):
    with pytest.raises(ValueError) as error:
        layers.Attention(**({"op": dense.dense()} | options))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, mask, message",
    [
        (dict(op=lsh.lsh()), None, "rng is None: lsh, which draws its plan at random, needs one"),
        (dict(attention_dropout=0.1), None, "rng is None: dropout > 0 needs one"),
        (dict(masked=True), np.ones((2, 12), bool), "mask has shape (2, 12): expected"),
    ],
    ids=["lsh", "attention_dropout", "mask"],
)
def test_errors_of_use(options, mask, message):
    x, layer = numbers(), layers.Attention(**({"op": dense.dense()} | options))
    params = layer.init_params(RNG, x.shape)
    with pytest.raises(ValueError) as error:
        layer.apply(params, x, *(() if mask is None else (mask,)))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("of_memory", [False, True])
def test_a_sequence_without_a_mask_meets_every_segment_of_the_other(of_memory):
    """Not its first segment alone: padding is all that the mask hides."""
    layer, x, memory = layers.CrossAttention(dense.dense(), **SIZES), numbers(), numbers(9, seed=1)
    params = plain.init(layer, x.shape, memory.shape)
    ids = np.array([[1, 1, 2, 2, 0, 3, 3, 3, 3], [7] * 8 + [0]], np.int32)
    ids = ids if of_memory else np.pad(ids, ((0, 0), (0, 4)), mode="edge")
    name, other = ("memory_mask", "mask") if of_memory else ("mask", "memory_mask")
    everything = {other: np.ones((2, 13 if of_memory else 9), bool)}
    given = {name: ids}, {name: ids} | everything, {name: ids > 0} | everything
    found = [layer.apply(params, x, memory, **masks) for masks in given]
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[2])
    assert np.abs(found[0] if of_memory else np.asarray(found[0])[ids == 3]).min() > 0


@pytest.mark.parametrize("shape", [(2, 13, 4), (13, 8)])
def test_an_input_of_another_size(shape):
    layer = layers.Attention(dense.dense(), **SIZES)
    params = plain.init(layer, (2, 13, 8))
    message = (
        rf"^x has shape \({', '.join(map(str, shape))}\): expected \[batch, length, (8|features)\]$"
    )
    with pytest.raises(ValueError, match=message):
        layer.apply(params, np.zeros(shape, np.float32))


@over((row for row in ROWS if row.decodes and row.plans_ahead), quick=one_of_each_kind)
def test_prefill_and_steps_are_apply(row):
    """With biases, by the merged weights; the rows' prompts have different lengths."""
    layer = layers.Attention(
        row.op(),
        **SIZES,
        causal=True,
        bias=True,
        output_bias=True,
        use_rotary=True,
        mode="eval",
    )
    x, lengths = numbers(), np.array([6, 3])
    params = plain.init(layer, x.shape)
    whole = jax.jit(lambda x: layer.apply(params, x, rng=RNG))(x)
    plain.assert_decodes(layer, params, x, lengths, whole, RNG)


@pytest.mark.parametrize(
    "op",
    [
        shared_qk.shared_qk(attend_self_if_alone=False),
        lsh.lsh(
            chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True, attend_self_if_alone=False
        ),
    ],
    ids=["shared_qk", "lsh"],
)
def test_a_key_brings_the_next_value(op):
    """In one call by hand; in steps, where the newest key's next value comes with the next step."""
    layer = layers.Attention(op, **SIZES, causal=True, next_value=True, mode="eval")
    x, lengths = numbers(), np.array([6, 3])
    assert not layer.init_params(RNG, x.shape)["next_value"].weak_type
    params = plain.init(layer, x.shape)
    whole = jax.jit(lambda x: layer.apply(params, x, rng=RNG))(x)
    without = layers.Attention(op, **SIZES, causal=True, mode="eval")

    @jax.jit
    def by_hand(params, x):
        q, _, v, *_ = without.project(params, x)[0]
        current, following = params["next_value"]
        mixed = current * v + following * jnp.concatenate([v[:, 1:], 0 * v[:, :1]], axis=1)
        qkv = QKV(q, None, mixed)
        heads = without.attend(params, qkv, without.plan(params, qkv, rng=RNG))
        return without.combine(params, heads)

    np.testing.assert_allclose(whole, by_hand(params, x), atol=1e-5)
    assert not np.any(whole[:, 0])

    cache = plain.assert_decodes(layer, params, x, lengths, whole, RNG)
    # Beams that go on from one parent have different values there, so their caches are separate.
    second = np.array([1, 1])
    reordered = layer.reorder_cache(cache, second)
    np.testing.assert_array_equal(reordered.last_value, cache.last_value[second])


def test_a_value_has_none_of_padding_or_another_segment():
    op = shared_qk.shared_qk(attend_self_if_alone=False)
    layer = layers.Attention(op, **SIZES, causal=True, next_value=True, masked=True)
    x, ids = numbers(), np.array([[0, 1, 1, 2, 1, 2, 1, 1, 0, 2, 2, 0, 0]] * 2)
    params = plain.init(layer, x.shape, ids.shape)
    apply = jax.jit(lambda x: layer.apply(params, x, ids))
    want = apply(x)
    padding = apply(np.where(ids[..., None] == 0, np.nan, x))
    np.testing.assert_array_equal(padding[ids > 0], want[ids > 0])
    other = apply(np.where(ids[..., None] == 2, 2 * x, x))
    np.testing.assert_array_equal(other[ids == 1], want[ids == 1])


def test_what_cannot_decode():
    x, lengths = numbers(), np.array([13, 13])
    for options in (dict(causal=False, mode="eval"), dict(causal=True, mode="train")):
        layer = layers.Attention(dense.dense(), **SIZES, **options)
        with pytest.raises(ValueError, match=r"decoding needs causal=True and mode='eval'$"):
            layer.prefill(layer.init_params(RNG, x.shape), x, lengths, 20)


def test_further_projections_come_in_the_order_of_their_declaration():
    """In that of a set of names each process makes another program, which no cache has."""
    op = gated_delta.gated_delta(gated=True)
    layer = layers.Attention(op, n_heads=2, d_qk=4, d_v=4, causal=True)
    params = plain.init(layer, (1, 3, 8))
    found = layer.project(params, jnp.zeros((1, 3, 8)))[0].extra_projections
    assert list(found) == [name for name in layer.projections() if name not in ("q", "k", "v")]
    assert len(found) > 2

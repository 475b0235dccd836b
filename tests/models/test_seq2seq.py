"""Encoder-decoders: the equations, packing, padding, gradients, decoding, and what is refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import CrossAttention
from reformax.layers._trax import signature
from reformax.models import Reformer, Transformer
from reformax.ops import asymmetric_lsh, dense, local, lsh, shared_qk, smyrf
from reformax.ops.decoding.cache import take_rows
from tests.helpers import assert_trees_close, changed
from tests.layers import plain

RNG = jax.random.PRNGKey(5)
SMALL = dict(
    input_vocab_size=13,
    d_model=8,
    d_ff=12,
    n_encoder_layers=2,
    n_decoder_layers=2,
    n_heads=2,
    dropout=0.0,
    mode="eval",
)
WINDOW = local.local(chunk_len=4, window=3, n_chunks_after=1)
MODELS = {
    "transformer": (Transformer, {}),
    "post-norm, axial": (
        Transformer,
        dict(
            post_norm=True,
            attention_bias=True,
            pos_type="axial",
            pos_axial_shape=(4, 8),
            pos_d_axial_embs=(2, 6),
        ),
    ),
    "rotary": (Transformer, dict(pos_type="rotary", remat_policy="nothing")),
    "reformer": (Reformer, dict(pos_type="rotary")),
    "reformer, windows, two vocabularies": (
        Reformer,
        dict(
            output_vocab_size=17,
            d_attention_key=3,
            encoder_attention_type=(WINDOW, dense.dense()),
            decoder_attention_type=local.local(chunk_len=4, window=4),
            ff_chunk_size=3,
            exact=True,
        ),
    ),
}


@functools.cache
def make(name):
    constructor, options = MODELS[name]
    model = constructor(**SMALL | options)
    return model, plain.init(model, (2, 12))


def sentences(lengths, seed=0, low=2):
    rng = np.random.default_rng(seed)
    return [rng.integers(low, 13, n).astype(np.int32) for n in lengths]


def packed(rows, length):
    """Rows of sentences one after the other, and their segments."""
    tokens, segment_ids = np.zeros((2, len(rows), length), np.int32)
    for b, row in enumerate(rows):
        at = 0
        for k, sentence in enumerate(row):
            tokens[b, at : at + len(sentence)] = sentence
            segment_ids[b, at : at + len(sentence)] = k + 1
            at += len(sentence)
    return tokens, segment_ids


def nats(model, params, inputs, weights):
    """The sum of -log p of the targets."""
    log_p = jax.nn.log_softmax(model.logits(params, model.features(params, inputs, RNG)))
    picked = jnp.take_along_axis(log_p, inputs[1][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * weights)


@pytest.mark.parametrize(
    "name",
    [
        "transformer",
        "post-norm, axial",
        "rotary",
        "reformer",
        "reformer, windows, two vocabularies",
    ],
)
def test_a_packed_batch_trains_like_its_sentences_one_by_one(name):
    """Loss and every gradient, of three pairs in a row, and of one in the next, with padding."""
    model, params = make(name)
    sources, targets = sentences([5, 3, 4, 7]), sentences([4, 6, 3, 9], seed=1)
    (source, source_segment_ids), (target, target_segment_ids) = (
        packed([x[:3], x[3:]], 16) for x in (sources, targets)
    )
    gradient = jax.jit(jax.value_and_grad(functools.partial(nats, model)))
    got = gradient(
        params, (source, target, source_segment_ids, target_segment_ids), target_segment_ids > 0
    )
    parts = []
    for pair in zip(sources, targets, strict=True):
        # With an empty row, for a batch of the same shape: nothing is compiled again.
        (s, s_segments), (t, t_segments) = (packed([[x], []], 16) for x in pair)
        parts.append(gradient(params, (s, t, s_segments, t_segments), t_segments > 0))
    want = jax.tree.map(lambda *x: sum(x), *jax.device_get(parts))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # With exact=True the two now and then round to another multiple of the grid.
    assert_trees_close(got[1], want[1], 2e-3 if "windows" in name else 2e-5)
    assert all(np.any(g) for g in jax.tree.leaves(jax.device_get(got[1])))


@pytest.mark.parametrize("name", ["transformer", "reformer"])
def test_padding_changes_nothing(name):
    """Neither its length nor its tokens, on either side."""
    model, params = make(name)
    (source, segment_ids), (target, target_segment_ids) = (
        packed([[s]], 12) for s in sentences([5, 7])
    )
    features = jax.jit(lambda *inputs: model.features(params, inputs, RNG))
    want = features(source, target, segment_ids, target_segment_ids)[:, :7]
    short = features(source[:, :5], target[:, :7], segment_ids[:, :5], target_segment_ids[:, :7])
    np.testing.assert_allclose(short, want, atol=1e-5)
    junk = [np.where(s > 0, x, 3) for x, s in ((source, segment_ids), (target, target_segment_ids))]
    got = features(*junk, segment_ids, target_segment_ids)[:, :7]
    np.testing.assert_array_equal(got, want)
    # By default a segment is the tokens that are not 0.
    np.testing.assert_array_equal(features(source, target)[:, :7], want)


def test_no_target_is_read_before_its_time():
    model, params = make("reformer")
    source, target = (np.stack(sentences([6, 6], seed)) for seed in (0, 1))
    apply = jax.jit(lambda t: model.apply(params, source, t, rng=RNG))
    other = target.copy()
    other[:, 3] = (other[:, 3] - 2 + 1) % 11 + 2
    before, after = apply(target), apply(other)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-3


def attention(p, x, memory, mask):
    """Multi-head attention, a head at a time."""
    out = 0
    for w_q, w_k, w_v, w_o in zip(*(p[f"w_{letter}"] for letter in "qkvo"), strict=True):
        scores = (x @ w_q) @ (memory @ w_k).T / math.sqrt(w_q.shape[1])
        weights = np.exp(np.where(mask, scores, -np.inf))
        out = out + weights / weights.sum(axis=-1, keepdims=True) @ (memory @ w_v) @ w_o
    return out


def norm(p, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return centred / deviation * p["scale"] + p["bias"]


def by_hand(params, source, target, order):
    """The logits in NumPy float64: pre-norm, post-norm, or reversible with pre-norm."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    d_model = params["embedding"].shape[1]

    def embedded(tokens):
        angle = np.arange(len(tokens))[:, None] / 10_000 ** (
            np.arange(d_model // 2) / (d_model / 2)
        )
        return params["embedding"][tokens] * math.sqrt(d_model) + np.concatenate(
            [np.sin(angle), np.cos(angle)], axis=1
        )

    def run(side, x, sublayers):
        stack, streams = params[side]["stack"]["block_0"], [x, x] if order == "reversible" else [x]
        for layer in range(2):
            p = jax.tree.map(lambda w: w[layer], stack)  # noqa: B023
            for name, function in sublayers.items():
                read = streams[-1] if order == "post" else norm(p[f"{name}_norm"], streams[-1])
                y = streams[0] + function(p[name], read)
                streams = [*streams[1:], norm(p[f"{name}_norm"], y) if order == "post" else y]
        x = sum(streams) / len(streams)
        return x if order == "post" else norm(params[side]["norm"], x)

    def feed_forward(p, x):
        return np.maximum(x @ p["w1"] + p["b1"], 0) @ p["w2"] + p["b2"]

    everything = np.ones((len(source), len(source)), bool)
    encoder = {"attention": lambda p, x: attention(p, x, x, everything)}
    memory = run("encoder", embedded(source), encoder | {"feed_forward": feed_forward})
    decoder = {
        "attention": lambda p, x: attention(p, x, x, np.tri(len(x), dtype=bool)),
        "cross_attention": lambda p, x: attention(p, x, memory, True),
        "feed_forward": feed_forward,
    }
    x = run("decoder", embedded(np.concatenate([[0], target[:-1]])), decoder)
    return x @ params["embedding"].T


@pytest.mark.parametrize("order", ["pre", "post", "reversible"])
def test_logits_are_the_equations(order):
    constructor = Reformer if order == "reversible" else Transformer
    model = constructor(**SMALL, **(dict(post_norm=True) if order == "post" else {}))
    params = plain.init(model, (1, 7))
    source, target = sentences([5, 7])
    got = jax.jit(model.apply)(params, source[None], target[None])[0]
    want = by_hand(params, source, target, order)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.slow
def test_a_fresh_model_guesses():
    model = Transformer(**SMALL | dict(input_vocab_size=1000, d_model=64, d_ff=128))
    params = jax.jit(lambda: model.init_params(RNG, (1, 12)))()
    source, target = np.random.default_rng(0).integers(2, 1000, (2, 8, 12), np.int32)
    loss = jax.jit(functools.partial(nats, model))(params, (source, target), 1) / target.size
    assert abs(loss - math.log(1000)) < 1


def test_dtype_is_what_sublayers_and_logits_compute_in():
    source, target = (np.stack(sentences([6, 6], seed)) for seed in (0, 1))
    params = make("reformer")[1]
    wide, narrow = (
        jax.jit(Reformer(**SMALL, pos_type="rotary", dtype=dtype).apply)(params, source, target)
        for dtype in ("float32", "bfloat16")
    )
    assert wide.dtype == narrow.dtype == jnp.float32
    assert 1e-4 < np.abs(wide - narrow).max() < 0.3


@pytest.mark.parametrize(
    "dtype, of_features",
    [("bfloat16", "bfloat16"), ("float8", "bfloat16"), ("float16", "float32")],
)
@pytest.mark.parametrize("post_norm", [False, True])
def test_features_have_the_dtype_that_the_loss_has_a_kernel_for(dtype, of_features, post_norm):
    model = Transformer(**SMALL, dtype=dtype, post_norm=post_norm)
    tokens = jnp.ones((2, 6), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(RNG, (2, 6)))
    found = jax.eval_shape(lambda params: model.features(params, (tokens, tokens)), params)
    assert found.dtype == of_features


def test_dropout_is_in_training_alone():
    source, target = (np.stack(sentences([6, 6], seed)) for seed in (0, 1))
    params = make("transformer")[1]
    train = Transformer(**SMALL | dict(dropout=0.3, mode="train"))
    evaluation = Transformer(**SMALL | dict(dropout=0.3))
    one, other = (
        jax.jit(train.features)(params, (source, target), jax.random.PRNGKey(i)) for i in (0, 1)
    )
    assert np.abs(one - other).max() > 0.1
    got, want = (
        jax.jit(model.features).lower(params, (source, target)).as_text()
        for model in (evaluation, make("transformer")[0])
    )
    assert got == want


@pytest.mark.slow  # `test_lm.py` trains a model so
def test_in_trax():
    model = Transformer(**SMALL)
    source, target = (np.stack(sentences([6, 6], seed)) for seed in (0, 1))
    model.init(signature((source, target)))
    assert model((source, target)).shape == (2, 6, 13)


STRICT = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True)


class Random(dense.dense):
    """Dense attention of a sharpness that is drawn for each head."""

    plan_needs = "rng"

    def _plan(self, call, params, q, k):
        return jax.random.randint(call.rng, q.shape[2:3], 1, 4)

    def _apply(self, call, params, q, k, v, plan):
        sharper = (q * plan[:, None].astype(q.dtype)).astype(q.dtype)
        return super()._apply(call, params, sharper, k, v, ())


RANDOM = Random()
DECODERS = {
    "dense": (Transformer, dict(post_norm=True)),
    "t5": (Transformer, dict(pos_type="t5")),
    "rotary": (Reformer, dict(pos_type="rotary", n_kv_heads=1)),
    "local": (Reformer, dict(decoder_attention_type=local.local(chunk_len=4))),
    "lsh": (Reformer, dict(decoder_attention_type=(local.local(chunk_len=4), STRICT))),
    "shared": (Transformer, dict(decoder_attention_type=shared_qk.shared_qk())),
    "random": (Transformer, dict(cross_attention_type=RANDOM)),
    # Of a source that one chunk covers; of a longer one, queries push each other aside.
    "hashed": (Reformer, dict(cross_attention_type=asymmetric_lsh.asymmetric_lsh(chunk_len=8))),
    "clusters": (Transformer, dict(cross_attention_type=smyrf.smyrf(chunk_len=8))),
}


@pytest.mark.parametrize("name", DECODERS)
def test_every_step_is_that_of_the_forward(name):
    """Two rows for each source, sources of different lengths, a cache longer than needed."""
    constructor, options = DECODERS[name]
    model = constructor(**SMALL | options)
    params = plain.init(model, (2, 12))
    source, _ = packed([[s] for s in sentences([7, 4])], 8)
    target = np.stack(sentences([9] * 4, seed=1))
    rows = np.repeat(np.arange(2), 2)
    # Automatic settings depend on the capacity.
    padded = np.pad(target, ((0, 0), (0, 3)))
    want = np.asarray(jax.jit(model.apply)(params, source[rows], padded, rng=RNG))
    weights, capacity = model.for_decoding(params), padded.shape[1]
    start = jax.jit(lambda p, w, s: model.prefill(p, w, s, capacity, RNG))
    logits, decoding, memory = start(params, weights, source)
    logits, decoding = jax.device_get((logits, decoding))
    logits, decoding = logits[rows], take_rows(decoding, rows)
    step = jax.jit(model.step)
    for t in range(target.shape[1]):
        np.testing.assert_allclose(logits, want[:, t], atol=1e-5 * np.abs(want).max())
        logits, decoding = step(weights, target[:, t], decoding, memory)


def test_no_target_is_longer_than_the_capacity():
    model, params = make("post-norm, axial")
    source = np.ones((2, 5), np.int32)
    weights, token = jax.jit(model.for_decoding)(params), np.array([1, 1])
    start = jax.jit(model.prefill, static_argnames="capacity")
    _, decoding, memory = start(params, weights, source, capacity=2)
    _, decoding = jax.jit(model.step)(weights, token, decoding, memory)
    match = "^decoding.position has 2 to 2: expected 0 to 1, below .* 2: give a larger one$"
    with pytest.raises(ValueError, match=match):
        model.step(weights, token, decoding, memory)


HASHED = asymmetric_lsh.asymmetric_lsh, smyrf.smyrf


@pytest.mark.parametrize("factory", HASHED, ids=lambda f: f.__name__)
def test_a_step_of_hashed_cross_attention_is_the_layer_at_one_position(factory):
    layer = CrossAttention(factory(chunk_len=4, n_hashes=1), n_heads=2, d_qk=4, d_v=3, masked=True)
    numbers = np.random.default_rng(0)
    x, memory = (numbers.normal(size=(2, n, 8)).astype(np.float32) for n in (1, 30))
    params = plain.init(layer, x.shape, memory.shape)
    ones, ids = np.ones((2, 1), np.int32), np.ones((2, 30), np.int32)
    ids[1, 20:] = 0
    apply = jax.jit(layer.apply)
    want = np.asarray(apply(params, x, memory, ones, ids, RNG))

    @jax.jit
    def step(params, x, memory):
        weights = layer.for_decoding(params, "float32")
        heads = layer.precompute_kv(weights, memory, "float32", RNG)
        return layer.step(weights, x, heads, ids)

    np.testing.assert_allclose(step(params, x, memory), want, atol=1e-5)
    memory[1, 20:] = np.nan
    changed = apply(params, x, memory, ones, ids, RNG)
    np.testing.assert_array_equal(changed, want)
    assert np.any(want, axis=-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("constructor", [Transformer, Reformer])
@pytest.mark.parametrize("factory", HASHED, ids=lambda f: f.__name__)
def test_translation_with_hashed_cross_attention(factory, constructor):
    """Sources of several chunks, packed; gradients, and steps of decoding."""
    options = dict(cross_attention_type=factory(chunk_len=3, n_hashes=2))
    model = constructor(**SMALL | options)
    params = plain.init(model, (2, 12))
    source, source_segment_ids = packed([[s] for s in sentences([14, 9])], 16)
    target, target_segment_ids = packed([[s] for s in sentences([10, 11], seed=1)], 12)

    @jax.jit
    def loss(params):
        logits = model.apply(
            params, source, target, source_segment_ids, target_segment_ids, rng=RNG
        )
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), logits

    (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    assert np.isfinite(logits).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    weights = model.for_decoding(params)
    logits, decoding, memory = jax.jit(lambda p, w: model.prefill(p, w, source, 12, RNG))(
        params, weights
    )
    for t in range(3):
        logits, decoding = jax.jit(model.step)(weights, target[:, t], decoding, memory)
        assert np.isfinite(logits).all()


def test_an_algorithms_weights_know_the_length_of_their_own_side():
    lengths = []

    def init(self, rng, dims):
        lengths.append(dims.length)
        return ()

    op = changed(dense.dense(), init=init)
    model = Transformer(**SMALL, encoder_attention_type=op, decoder_attention_type=op)
    jax.eval_shape(lambda: model.init_params(RNG, (2, 12), (2, 7)))
    assert lengths == [12, 7]  # once for all layers of a side


@pytest.mark.parametrize(
    "op, why", [(lsh.lsh(), "its keys are its own queries"), (local.local(), "reads one sequence")]
)
def test_what_cannot_cross_is_refused(op, why):
    with pytest.raises(NotImplementedError, match=f"{why}; use one whose cross is True"):
        Transformer(**SMALL, cross_attention_type=op)
    with pytest.raises(NotImplementedError, match="cannot attend from one sequence to another"):
        CrossAttention(op)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(input_vocab_size=1), "input_vocab_size is 1: expected at least 2"),
        (dict(n_heads=3), "d_model is 8: expected a multiple of n_heads, 3"),
        (dict(pos_type="learned"), "pos_type is 'learned'"),
        (dict(encoder_attention_type="lsh"), "encoder_attention_type is 'lsh'"),
        (dict(cross_attention_type=None), "cross_attention_type is None: expected an AttentionOp"),
        (dict(ff_activation="gleu"), "ff_activation is 'gleu'"),
        (dict(n_decoder_layers=3, decoder_attention_type=(WINDOW, WINDOW)), "n_layers is 3"),
    ],
)
def test_a_mistake_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        Transformer(**SMALL | options)


def test_arrays_of_another_kind_are_told():
    model, params = make("transformer")
    tokens = np.ones((2, 7), np.int32)
    for other in (tokens[0], tokens[None], tokens / 1.0):
        for name, inputs in (("source", (other, tokens)), ("target", (tokens, other))):
            with pytest.raises(
                ValueError, match=f"^{name} has shape .* expected integers"
            ) as error:
                model.apply(params, *inputs)
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="^source has shape .* expected integers"):
            model.prefill(params, model.for_decoding(params), other, 5)
    with pytest.raises(
        ValueError, match=r"^segment_ids has shape \(2, 6\): expected .batch, length. of source"
    ):
        model.apply(params, tokens, tokens, tokens[:, :6], tokens)
    with pytest.raises(ValueError, match="^target has 1 rows and source 2: expected as many$"):
        model.apply(params, tokens, tokens[:1])
    sizes = SMALL | dict(output_vocab_size=17)
    for other, name, shape in (
        (dict(d_model=4), "embedding", "17, 4"),
        (dict(input_vocab_size=9), "source_embedding", "9, 8"),
    ):
        params = plain.init(Transformer(**sizes | other), (2, 7), (2, 7))
        match = rf"^params\['{name}'\] has shape \({shape}\): expected \[vocab_size, d_model\]"
        with pytest.raises(ValueError, match=match):
            Transformer(**sizes).apply(params, tokens, tokens)


def test_positions_that_hold_too_little():
    model, params = make("post-norm, axial")
    tokens = np.ones((1, 33), np.int32)
    with pytest.raises(ValueError, match="33 positions and the model's hold 32"):
        jax.eval_shape(model.features, params, (tokens, tokens))
    with pytest.raises(ValueError, match="capacity is 33: expected at most 32"):
        jax.eval_shape(lambda p: model.prefill(p, p, tokens[:, :5], 33), params)

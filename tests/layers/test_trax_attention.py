"""Our SelfAttention and LSHSelfAttention against Trax's of the same name, with the same weights."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers import Attention, ResidualStack, TransformerBlock
from reformax.layers._trax import signature, tl
from reformax.layers.feed_forward import FeedForward
from reformax.layers.trax_attention import LSHSelfAttention, SelfAttention
from reformax.ops import dense
from tests.helpers import assert_trees_close
from tests.layers import plain

LENGTH = 32
SIZES = dict(n_heads=2, d_qk=8, d_v=4)
X = np.random.default_rng(0).normal(size=(2, LENGTH, 16)).astype(np.float32)
MASK = np.arange(LENGTH) < np.array([[20], [LENGTH]])
RNG = jax.random.PRNGKey(3)


def run(layer, mask, rows):
    """`((rows of the output, new state), (gradient of x, gradients of the weights))`."""
    cotangent = rows[..., None] * np.random.default_rng(9).normal(size=X.shape).astype(np.float32)

    def total(x, weights):
        inputs = x if mask is None else (x, mask)
        y, state = layer.pure_fn(inputs, weights, layer.state, RNG)
        return jnp.sum(y * cotangent), (y * rows[..., None], state)

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(X, layer.weights)
    return out, gradients


def assert_equals_trax(ours, theirs, masked=False, rows=None):
    """Outputs at `rows`, the state, and the gradients of those outputs."""
    mask = jax.device_put(MASK) if masked else None
    rows = np.ones(X.shape[:2], bool) if rows is None else rows
    rows = rows & MASK if masked else rows  # padding has other values
    inputs = signature(X if mask is None else (X, mask))
    theirs.init(inputs, rng=jax.random.PRNGKey(1))
    jax.eval_shape(lambda: ours.init(inputs, rng=jax.random.PRNGKey(2)))  # it gets their weights
    assert ours.n_in == theirs.n_in
    shapes = [jax.tree.map(jnp.shape, (layer.weights, layer.state)) for layer in (ours, theirs)]
    assert shapes[0] == shapes[1]
    ours.weights, ours.state = theirs.weights, theirs.state
    assert_trees_close(run(ours, mask, rows), run(theirs, mask, rows))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True, bias=True, masked=True),
        dict(share_qk=True, masked=True),
        dict(share_qk=True, causal=True, bias=True),
    ],
)
def test_dense_self_attention(options):
    ours, theirs = (layer(**SIZES, **options) for layer in (SelfAttention, tl.SelfAttention))
    assert_equals_trax(ours, theirs, options.get("masked", False))


@pytest.mark.parametrize(
    "options",
    [
        # The first chunk sees the last one, and the other way around.
        dict(chunk_len=8, n_chunks_before=1, n_chunks_after=1),
        # In two chunks each sees itself twice.
        dict(chunk_len=16, n_chunks_before=2, causal=True, share_qk=True),
        # The last chunk sees the first one behind it, which causality does not hide.
        dict(chunk_len=8, n_chunks_after=1, causal=True),
    ],
)
def test_chunked_self_attention(options):
    assert_equals_trax(SelfAttention(**SIZES, **options), tl.SelfAttention(**SIZES, **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            dict(chunk_len=LENGTH, n_parallel_heads=2, n_hashes=2, causal=True, masked=True),
            marks=pytest.mark.slow,
        ),
        # Several chunks: the hashes must be Trax's own.
        dict(chunk_len=8, n_hashes=3, n_buckets=[4, 2], masked=True, n_chunks_after=1),
        pytest.param(
            dict(chunk_len=8, n_hashes=3, n_buckets=4, causal=True), marks=pytest.mark.slow
        ),
        pytest.param(dict(chunk_len=8, max_length_for_buckets=40), marks=pytest.mark.slow),
    ],
)
def test_lsh_self_attention(options):
    rows = None
    if options["chunk_len"] == LENGTH:
        # One chunk sees itself twice in Trax's circle, and with it the first position, which sees
        # nothing else; by float32's rounding at -100,000 that is not the same as once.
        rows = np.arange(LENGTH)[None] > 0
    options = dict(SIZES, **options)
    masked = options.get("masked", False)
    ours, theirs = LSHSelfAttention(**options), tl.LSHSelfAttention(**options)
    assert_equals_trax(ours, theirs, masked, rows)


@pytest.mark.parametrize("length", [2, 13])
@pytest.mark.parametrize(
    "layer",
    [
        SelfAttention(**SIZES, chunk_len=8, n_chunks_before=1, causal=True, masked=True),
        LSHSelfAttention(**SIZES, chunk_len=8, n_hashes=2, causal=True, masked=True, bias=True),
    ],
)
def test_any_length_and_padding(layer, length):
    x, mask = X[:, :length], jnp.arange(length) < jnp.array([[length // 2], [length]])
    layer.init(signature((x, mask)), rng=jax.random.PRNGKey(1))
    attend = jax.jit(lambda x: layer.pure_fn((x, mask), layer.weights, layer.state, RNG)[0])
    y = attend(x)
    assert y.shape == x.shape and jnp.isfinite(y).all()
    np.testing.assert_array_equal(y[0, length // 2 :], 0.0)
    # The input at padding changes nothing.
    np.testing.assert_allclose(attend(jnp.where(mask[..., None], x, 9.0)), y, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, n_parallel_heads",
    [
        (SelfAttention, 1),
        (functools.partial(LSHSelfAttention, chunk_len=8), 2),
    ],
)
def test_blocks_of_heads_compute_the_same(layer, n_parallel_heads):
    options = dict(n_heads=4, d_qk=8, d_v=4, causal=True, masked=True)
    x, mask = jnp.concatenate([X, X + 1]), jnp.concatenate([MASK, MASK])
    at_once, in_blocks = (layer(**options, n_parallel_heads=n) for n in (None, n_parallel_heads))
    at_once.init(signature((x, mask)), rng=jax.random.PRNGKey(1))

    def loss(layer, x, weights):
        y, state = layer.pure_fn((x, mask), weights, at_once.state, RNG)
        return jnp.sum(jnp.sin(y)), (y, state)

    def results(layer):
        of_layer = functools.partial(loss, layer)
        return jax.jit(jax.value_and_grad(of_layer, (0, 1), has_aux=True))(x, at_once.weights)

    assert_trees_close(results(in_blocks), results(at_once))


def dropping(n_parallel_heads, **options):
    options = dict(SIZES, attention_dropout=0.3, output_dropout=0.2, masked=True) | options
    return LSHSelfAttention(
        chunk_len=8, n_hashes=2, n_parallel_heads=n_parallel_heads, causal=True, **options
    )


@pytest.mark.slow
def test_the_backward_pass_attends_to_what_the_forward_pass_did():
    layer = dropping(1)
    layer.init(signature((X, MASK)), rng=jax.random.PRNGKey(1))
    grad = np.random.default_rng(9).normal(size=X.shape).astype(np.float32)

    @jax.jit
    def forward(state):
        def pure(x, weights):
            return layer.pure_fn((x, MASK), weights, state, RNG)

        y, vjp, left_behind = jax.vjp(pure, X, layer.weights, has_aux=True)
        return y, vjp(grad), left_behind

    @jax.jit
    def backward(left_behind):
        output, state, (x_grad, mask_grad), weights_grad = layer.forward_and_or_backward(
            (X, MASK), layer.weights, left_behind, RNG, output_grad=grad, update_state=False
        )
        assert state is None and mask_grad.dtype == jax.dtypes.float0
        return output, (x_grad, weights_grad)

    y, grads, left_behind = forward(layer.state)
    again, grads_again = backward(left_behind)
    np.testing.assert_allclose(again, y, atol=1e-6)
    assert_trees_close(grads_again, grads)
    # A forward pass from that state draws new hashes.
    new, _, left_behind_next = forward(left_behind)
    assert not np.array_equal(left_behind[0], left_behind_next[0])
    assert not np.allclose(new, y, atol=1e-3)


def test_a_pass_returns_what_it_is_asked_for():
    layer = SelfAttention(**SIZES)
    layer.init(signature(X))
    call = functools.partial(layer.forward_and_or_backward, X, layer.weights, layer.state, RNG)
    y, *rest = jax.jit(call)()
    assert rest == [(), None, None]
    backward = functools.partial(call, compute_output=False, update_state=False)
    none, state, x_grad, weights_grad = jax.jit(backward)(y)
    assert none is None and state is None and x_grad.shape == X.shape
    assert jax.tree.map(jnp.shape, weights_grad) == jax.tree.map(jnp.shape, layer.weights)


def test_dropout_is_off_at_evaluation_and_drops_features_of_the_output_in_training():
    def outputs(layer):
        layer.init(signature((X, MASK)), rng=jax.random.PRNGKey(1))
        attend = jax.jit(
            lambda rng: layer.pure_fn((X, MASK), layer.weights, layer.state, rng)[0][MASK]
        )
        return attend(RNG), attend(jax.random.PRNGKey(4))

    first, second = outputs(dropping(None, attention_dropout=0.0))
    for y in (first, second):
        dropped = (y == 0).all(axis=0)
        assert 0 < dropped.sum() < dropped.size
        np.testing.assert_array_equal((y == 0).any(axis=0), dropped)
    first, second = outputs(dropping(None, mode="eval"))
    np.testing.assert_array_equal(first, second)
    assert (first != 0).all()


def test_apply_is_pure():
    layer = LSHSelfAttention(**SIZES, chunk_len=8)
    params = plain.init(layer, X.shape)
    attend = jax.jit(lambda rng: layer.apply(params, X, rng=rng))
    np.testing.assert_array_equal(attend(RNG), attend(RNG))
    assert not np.array_equal(attend(RNG), attend(jax.random.PRNGKey(4)))
    with pytest.raises(ValueError, match="rng is None"):
        layer.apply(params, X)
    dense = SelfAttention(**SIZES)
    params = plain.init(dense, X.shape)
    without, given = jax.jit(lambda: [dense.apply(params, X, rng=rng) for rng in (None, RNG)])()
    np.testing.assert_array_equal(without, given)


@pytest.mark.parametrize("layer", [SelfAttention, LSHSelfAttention])
@pytest.mark.parametrize(
    "error, options, message",
    [
        (NotImplementedError, dict(mode="predict"), "mode='predict'"),
        (NotImplementedError, dict(use_python_loop=True), "use_python_loop=True"),
        (NotImplementedError, dict(use_reference_code=True), "use_reference_code=True"),
        (ValueError, dict(n_heads=4, n_parallel_heads=3), "n_parallel_heads is 3"),
        (ValueError, dict(output_dropout=1.5), "output_dropout is 1.5"),
        (ValueError, dict(mode="test"), "mode is 'test'"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_line(layer, error, options, message):
    with pytest.raises(error, match=message) as caught:
        layer(**options)
    assert "\n" not in str(caught.value)


def test_what_one_of_them_cannot_do_is_said_in_one_line():
    with pytest.raises(NotImplementedError, match="share_qk=False"):
        LSHSelfAttention(share_qk=False)
    with pytest.raises(ValueError, match="set chunk_len"):
        SelfAttention(n_chunks_before=1)


@pytest.mark.parametrize(
    "batch, length, message",
    [
        (2, 40, "the state has room for 32: initialise"),
        (4, LENGTH, "has batch 4, but the state is for 2: initialise"),
        (3, LENGTH, "expected a divisor of the batch, 3"),
    ],
)
def test_an_input_that_does_not_fit_is_said_in_one_line(batch, length, message):
    layer = LSHSelfAttention(**SIZES, chunk_len=8, n_parallel_heads=4)
    layer.init(signature(X))
    with pytest.raises(tl.LayerError, match=message):
        layer.output_signature(signature(jnp.zeros((batch, length, 16))))


def reformer_lm(*attention_types):
    from trax.models.reformer.reformer import ReformerLM

    return ReformerLM(
        vocab_size=16,
        d_model=16,
        d_ff=32,
        d_attention_key=8,
        d_attention_value=8,
        n_layers=len(attention_types),
        n_heads=2,
        dropout=0.0,
        max_len=LENGTH,
        attention_type=attention_types,
    )


@pytest.mark.parametrize("layer", [layers.Attention, layers.CrossAttention])
def test_a_model_of_trax_says_which_layers_it_takes(layer):
    """Trax would call the layer again, with other arguments, after a TypeError."""
    with pytest.raises(ValueError, match="give reformax.layers.LSHSelfAttention or SelfAttention"):
        reformer_lm(layer)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'op'"):
        layer(n_heads=2)


def test_a_mask_that_is_missing_is_said_in_one_line():
    layer, ready = SelfAttention(**SIZES, masked=True), SelfAttention(**SIZES, masked=True)
    ready.init(signature((X, MASK)))
    for call in (lambda: layer.init(signature(X)), lambda: ready(X)):
        with pytest.raises(Exception, match="reads 2 inputs and got 1: .* the mask of masked=True"):
            call()


def test_a_layer_of_trax_in_a_block_is_named():
    attention = Attention(dense.dense(), n_heads=2, d_qk=8, d_v=8)
    with pytest.raises(ValueError, match="feed_forward Dense_8: .*, such as FeedForward"):
        ResidualStack([TransformerBlock(attention, tl.Dense(8))], 1)


@pytest.mark.parametrize(
    "layer, line",
    [
        (SelfAttention(**SIZES), "SelfAttention reads 1 input and got 2: .* set masked=True to"),
        (FeedForward(16), "FeedForward reads 1 input and got 2: pass one array$"),
    ],
)
def test_an_input_too_many_is_said_in_one_line(layer, line):
    with pytest.raises(Exception, match=line):
        layer.init(signature((X, MASK)))


@pytest.mark.slow
def test_traxs_reformer_takes_our_layers_and_weights_saved_from_its_own(tmp_path):
    tokens = jax.random.randint(jax.random.PRNGKey(0), (2, LENGTH), 1, 16)
    ours, theirs = (
        reformer_lm(functools.partial(layer, chunk_len=LENGTH, n_chunks_before=0))
        for layer in (LSHSelfAttention, tl.LSHSelfAttention)
    )
    theirs.init(signature(tokens), rng=jax.random.PRNGKey(1))
    path = str(tmp_path / "model.pkl.gz")
    theirs.save_to_file(path, input_signature=signature(tokens))
    ours.init(signature(tokens))
    ours.init_from_file(path)

    def results(model):
        def loss(weights):
            logits, state = model.pure_fn(tokens, weights, model.state, RNG)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
            return -chosen.mean(), (logits, state)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(model.weights)

    assert_trees_close(results(ours), results(theirs))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="Trax's loop needs TensorFlow"
)
def test_a_reformer_with_our_layers_learns_in_traxs_training_loop():
    from trax import optimizers
    from trax.supervised import training

    def batches():
        rng = np.random.default_rng(0)
        while True:  # counting modulo 15 from anywhere
            start = rng.integers(15, size=(4, 1))
            tokens = (1 + (start + np.arange(LENGTH)) % 15).astype(np.int32)
            yield tokens, tokens, np.ones(tokens.shape, np.float32)

    model = reformer_lm(functools.partial(LSHSelfAttention, chunk_len=8, n_hashes=2))
    loss = tl.WeightedCategoryCrossEntropy
    task = training.TrainTask(batches(), loss(), optimizers.Adam(0.01))
    evaluation = training.EvalTask(batches(), [loss()], metric_names=["loss"])
    loop = training.Loop(model, task, eval_tasks=[evaluation], eval_at=lambda step: step in (1, 60))
    loop.run(60)
    (_, first), (_, last) = loop.history.get("eval", "metrics/loss")
    assert last < 0.5 * first

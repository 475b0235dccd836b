"""What is no input of a layer is refused in one line that names the argument and the fix."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import dense, local

RNG = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
IDS = np.ones((2, 7), np.int32)
SIZES = dict(n_heads=2, d_qk=4, d_v=4)


def block(op=None, cross=None):
    attention = layers.Attention(op or dense.dense(), **SIZES)
    return layers.TransformerBlock(attention, layers.FeedForward(16), cross)


CROSS = layers.CrossAttention(dense.dense(), **SIZES)
LAYERS = {
    layer.name: layer
    for layer in (
        layers.Attention(dense.dense(), **SIZES),
        layers.AxialPositionalEncoding((4, 2), (4, 4)),
        CROSS,
        layers.Dropout(0.5),
        layers.FeedForward(16),
        layers.LayerNorm(),
        layers.LSHSelfAttention(**SIZES, chunk_len=4),
        layers.RMSNorm(),
        layers.ResidualStack([block()], 1),
        layers.ReversibleStack([block()], 1),
        layers.SelfAttention(**SIZES),
        layers.SinusoidalPositionalEncoding(),
    )
}
ANY_SHAPE = "Dropout", "LayerNorm", "RMSNorm"
WITHOUT_WEIGHTS = "Dropout", "SinusoidalPositionalEncoding"


def refused(message, function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_every_public_layer_is_one_of_these():
    found = [getattr(layers, name) for name in layers.__all__ if name not in ("tl", "Layer")]
    named = {x.__name__ for x in found if inspect.isclass(x) and issubclass(x, layers.Layer)}
    assert named == LAYERS.keys()


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_array_of_floats(name):
    layer = LAYERS[name]
    params = layer.init_params(RNG, *[X.shape] * layer.n_in)

    def apply(x):
        return layer.apply(params, x, *[X] * (layer.n_in - 1), rng=RNG)

    assert jax.tree.leaves(jax.eval_shape(apply, X))[0].shape == X.shape
    refused("x is [[[", apply, X.tolist())
    refused("x has dtype int32: expected floats, as x.astype(float)", apply, X.astype(np.int32))
    if name not in ANY_SHAPE:
        refused("x has shape (7, 8): expected [batch, length, ", apply, X[0])
        refused("x has shape (1, 2, 7, 8): expected [batch, length, ", apply, X[None])


@pytest.mark.parametrize("name", [x for x in LAYERS if x not in WITHOUT_WEIGHTS])
@pytest.mark.parametrize("given", [X, 8, (), (2, 7, 8.0)], ids=["array", "int", "empty", "float"])
def test_what_is_no_shape(name, given):
    refused("shape is ", LAYERS[name].init_params, RNG, given)


@pytest.mark.parametrize(
    "mask, message",
    [
        (IDS[:, :6], "has shape (2, 6): expected [batch, length] of "),
        (IDS[0], "has shape (7,): expected [batch, length] of "),
        (IDS[:, None, None], "has shape (2, 1, 1, 7): expected [batch, length] of "),
        (IDS.astype(np.float32), "has dtype float32: expected integers or booleans"),
        (IDS.tolist(), "is [[1, 1, "),
    ],
    ids=["short", "of one row", "of four axes", "floats", "list"],
)
def test_a_mask_is_called_as_the_layer_calls_it(mask, message):
    attention, cross = LAYERS["Attention"], LAYERS["CrossAttention"]
    params = attention.init_params(RNG, X.shape)
    refused(f"mask {message}", attention.apply, params, X, mask)
    params = cross.init_params(RNG, X.shape, X.shape)
    refused(f"mask {message}", cross.apply, params, X, X, mask)
    refused(f"memory_mask {message}", cross.apply, params, X, X, None, mask)
    for kind in (layers.ResidualStack, layers.ReversibleStack):
        stack = kind([block(cross=CROSS)], 1)
        streams = [X] * stack.n_streams
        params = stack.init_params(RNG, *[x.shape for x in streams])
        refused(f"segment_ids {message}", stack.apply, params, *streams, mask, X)
        refused(f"memory_segment_ids {message}", stack.apply, params, *streams, None, X, mask)


def test_inputs_that_do_not_fit_one_another():
    stack = LAYERS["ReversibleStack"]
    params = stack.init_params(RNG, X.shape, X.shape)
    refused("1 inputs are given: expected 2 streams", stack.apply, params, X)
    refused("stream 2 has shape (2, 5, 8): expected [2, 7, 8]", stack.apply, params, X, X[:, :5])
    with_memory = layers.ResidualStack([block(cross=CROSS)], 1)
    params = with_memory.init_params(RNG, X.shape)
    refused("memory is None and blocks have cross_attention", with_memory.apply, params, X)
    wrong = with_memory.apply, params, X, None
    refused("memory has shape (1, 7, 8): expected [2, length, 8]", *wrong, X[:1])
    refused("memory has dtype int32: expected floats", *wrong, X.astype(np.int32))


def test_weights_of_another_depth_and_those_of_training_in_a_step():
    two, four = (layers.ResidualStack([block(local.local(chunk_len=4))] * 2, n) for n in (2, 4))
    params = four.init_params(RNG, X.shape)
    refused("params are of 4 layers: expected those of n_layers=2", two.apply, params, X)
    position = jnp.zeros(2, jnp.int32)
    refused("params are those of `apply`: expected", four.step, params, (X,), (), position)


def test_weights_that_would_not_be_read_and_those_that_are_missing():
    """Without this check the output would be that of other weights."""
    attention, gated = LAYERS["Attention"], layers.FeedForward(16, gated=True)
    biased = layers.Attention(dense.dense(), bias=True, **SIZES)
    of = {layer: layer.init_params(RNG, X.shape) for layer in (attention, biased, gated)}
    refused("params has b_k: expected w_k, w_o, w_q, w_v of", attention.apply, of[biased], X)
    refused("params has no b_k: expected b_k, b_q, b_v, w_k", biased.apply, of[attention], X)
    refused("params has b3: expected b1, b2, w1, w2 of", LAYERS["FeedForward"].apply, of[gated], X)
    refused("params is None: expected a dict, as of init_p", attention.apply, None, X)


@pytest.mark.parametrize(
    "blocks, message",
    [
        (block(), "blocks has Attention("),
        ([block().attention], "blocks has Attention("),
        ([block()[::-1][1:]], "blocks has attention FeedForward"),
        ([(block().attention, "relu")], "blocks has feed_forward 'relu': expected a layer of"),
    ],
)
def test_what_is_no_block(blocks, message):
    refused(message, layers.ResidualStack, blocks, 1)


@pytest.mark.parametrize(
    "x, position, message",
    [
        (X, None, "x has shape (2, 7, 8): expected [batch, length, heads, size]"),
        (X[:, :, None].tolist(), None, "x is [[[["),
        (X[:, :, None].astype(int), None, "x has dtype "),
        (X[:, :, None], np.arange(5)[None], "position has shape (1, 5): expected [batch, length]"),
        (X[:, :, None], np.zeros((3, 7), int), "position has shape (3, 7): expected [batch, len"),
        (X[:, :, None], np.zeros((2, 1, 7), int), "position has shape (2, 1, 7): expected [batch"),
    ],
    ids=["without heads", "list", "integers", "positions", "other rows", "another axis"],
)
def test_what_is_no_input_of_rotary(x, position, message):
    refused(message, layers.rotary, x, position)


@pytest.mark.parametrize(
    "x, rng, message",
    [
        (X, 0, "rng is 0: expected a key, such as jax.random.key(0)"),
        (X, np.zeros((3, 2), np.uint32), "rng has shape (3, 2) and dtype uint32: expected one key"),
        (np.float32(1), RNG, "x is a scalar: expected one axis at least"),
    ],
    ids=["number", "several", "scalar"],
)
def test_what_dropout_refuses(x, rng, message):
    refused(message, layers.Dropout(0.5).apply, (), x, rng=rng)

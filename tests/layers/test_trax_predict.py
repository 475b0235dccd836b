"""A Trax model of mode "predict" reads one position at a time: layers that need the past say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers, models
from reformax.layers import tl
from reformax.layers._trax import signature
from reformax.ops import dense, gated_delta, lsh

SIZES = dict(n_heads=2, d_qk=4, d_v=4)
DENSE = dense.dense()
ONE_TOKEN = signature(np.zeros((2, 1), np.int32))


def attention(op=DENSE, **options):
    return layers.Attention(op, **SIZES, causal=True, **options)


def stack(kind, **options):
    block = layers.TransformerBlock(attention(), layers.FeedForward(16))
    return kind([block], n_layers=2, **options)


def decoder(layer, mode="predict"):
    """A user's own language model, whose mode reaches Trax's layers alone."""
    return tl.Serial(
        tl.ShiftRight(mode=mode),
        tl.Embedding(11, 8),
        tl.PositionalEncoding(mode=mode),
        tl.Residual(tl.LayerNorm(), layer, tl.Dropout(mode=mode)),
        tl.Dense(11),
    )


NEED_THE_PAST = {
    "Attention": attention,
    "Attention for evaluation": lambda: attention(mode="eval"),
    "LSH": lambda: attention(lsh.lsh(chunk_len=4)),
    "a recurrence": lambda: attention(gated_delta.gated_delta()),
    "SelfAttention": lambda: layers.SelfAttention(**SIZES, causal=True),
    "LSHSelfAttention": lambda: layers.LSHSelfAttention(**SIZES, causal=True),
    "ResidualStack": lambda: stack(layers.ResidualStack),
    "SinusoidalPositionalEncoding": layers.SinusoidalPositionalEncoding,
    "AxialPositionalEncoding": lambda: layers.AxialPositionalEncoding((4, 4), (4, 4)),
}


@pytest.mark.parametrize("name", NEED_THE_PAST)
def test_a_layer_that_needs_the_past_refuses_to_predict(name):
    layer = NEED_THE_PAST[name]()
    line = (
        rf"SettingError: {layer.name} is in a Trax model with mode='predict' \(.*\), and keeps no"
    )
    with pytest.raises(tl.LayerError, match=line):
        decoder(layer).init(ONE_TOKEN)
    for mode in ("train", "eval"):
        other = decoder(NEED_THE_PAST[name](), mode)
        jax.eval_shape(lambda model=other: model.init(signature(np.zeros((2, 4), np.int32))))


def test_streams_models_and_accelerators_refuse_to_predict():
    reversible = tl.Serial(tl.Embedding(11, 8), tl.Dup(), stack(layers.ReversibleStack))
    lm = models.TransformerLM(11, d_model=8, d_ff=16, n_layers=1, n_heads=2)
    for model, name in (
        (tl.Serial(reversible, tl.Concatenate(), tl.CausalAttention(16, mode="predict")), "Rev"),
        (tl.Serial(tl.ShiftRight(mode="predict"), lm), "TransformerLM"),
        (tl.Accelerate(decoder(attention())), "Attention"),
    ):
        with pytest.raises(tl.LayerError, match=f"SettingError: {name}.* with mode='predict'"):
            model.init(ONE_TOKEN)


def test_the_mode_is_found_where_only_a_function_of_trax_has_it():
    model = tl.Serial(tl.ShiftRight(mode="predict"), tl.Embedding(11, 8), attention())
    with pytest.raises(tl.LayerError, match=r"mode='predict' \(ShiftRight\(1\)\)"):
        model.init(ONE_TOKEN)


def test_training_mode_that_drops_refuses_to_predict():
    """An encoder is read whole in a model that predicts; layers that drop there lack the mode."""
    for layer in (
        layers.Attention(dense.dense(), **SIZES, attention_dropout=0.1),
        layers.FeedForward(16, dropout=0.1),
        layers.Dropout(0.1),
    ):
        with pytest.raises(tl.LayerError, match=f"SettingError: {layer.name} has mode='train' in"):
            decoder(layer).init(ONE_TOKEN)
    cross = layers.CrossAttention(dense.dense(), **SIZES, output_dropout=0.1)
    model = tl.Serial(tl.Dup(), cross, tl.CausalAttention(8, mode="predict"))
    with pytest.raises(tl.LayerError, match="SettingError: CrossAttention has mode='train' in"):
        model.init(signature(np.zeros((2, 1, 8), np.float32)))


def test_what_needs_no_past_predicts():
    """Positions of an encoder, which is read whole, and layers that read one position anyway."""
    encoder = tl.Serial(
        tl.Embedding(11, 8),
        tl.Dropout(mode="eval"),
        layers.SinusoidalPositionalEncoding(),
        layers.Attention(dense.dense(), **SIZES, mode="eval"),
    )
    model = tl.Serial(
        tl.Parallel(encoder, tl.Serial(tl.Embedding(11, 8), tl.CausalAttention(8, mode="predict"))),
        tl.Select([1, 0]),
        layers.CrossAttention(dense.dense(), **SIZES, mode="eval"),
        layers.FeedForward(16),
        layers.LayerNorm(),
    )
    source, target = jnp.ones((2, 5), jnp.int32), jnp.ones((2, 1), jnp.int32)
    model.init(signature((source, target)))
    run = jax.jit(lambda *x: model.pure_fn(x, model.weights, model.state, model.rng)[0])
    assert run(source, target).shape == (2, 1, 8)


def test_one_position_in_training_is_a_mode_that_was_lost():
    """Where no other layer has a mode, the first token that is sampled tells."""
    model = tl.Serial(tl.Embedding(11, 8), attention(), tl.Dense(11))
    model.init(ONE_TOKEN)  # as Trax does it for a model of any mode
    assert model(np.zeros((2, 4), np.int32)).shape == (2, 4, 11)
    with pytest.raises(tl.LayerError, match="SettingError: Attention has mode='train' and reads"):
        jax.eval_shape(model.pure_fn, np.zeros((2, 1), np.int32), *model.init(ONE_TOKEN), None)
    evaluated = tl.Serial(tl.Embedding(11, 8), attention(mode="eval"))
    evaluated.init(ONE_TOKEN)
    assert evaluated(np.zeros((2, 1), np.int32)).shape == (2, 1, 8)  # Trax samples so in eval_mode


@pytest.mark.parametrize("make", (layers.SelfAttention, layers.LSHSelfAttention, attention))
def test_predict_is_refused_where_the_mode_did_reach_the_layer(make):
    with pytest.raises((ValueError, NotImplementedError), match=r"mode.*'predict'.*'eval'"):
        make(mode="predict")

"""Models with 64-bit types: training steps stay float32, and generation runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import generation
from reformax.models import Reformer, ReformerLM, Transformer, TransformerLM
from reformax.ops import block_sparse, flash, local, lsh, shared_qk
from reformax.training import loss
from tests.helpers import with_x64
from tests.layers import plain

RNG = jax.random.PRNGKey(4)
SIZES = dict(d_model=8, d_ff=12, n_heads=2)
CHUNKED = local.local(chunk_len=4), lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4)
MODELS = {
    "reformer_lm": (ReformerLM, dict(vocab_size=11, n_layers=2, attention_type=CHUNKED)),
    "transformer_lm": (
        TransformerLM,
        dict(
            vocab_size=11,
            n_layers=3,
            attention_type=(flash.flash(), block_sparse.block_sparse(), shared_qk.shared_qk()),
        ),
    ),
    "reformer": (
        Reformer,
        dict(input_vocab_size=11, n_encoder_layers=1, n_decoder_layers=2, pos_type="sinusoidal"),
    ),
    "transformer": (
        Transformer,
        dict(input_vocab_size=11, n_encoder_layers=1, n_decoder_layers=1, attention_bias=True),
    ),
}
models = pytest.mark.parametrize("name", MODELS)


@pytest.mark.filterwarnings("error:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.slow
@models
def test_a_training_step_and_generation(name):
    constructor, options = MODELS[name]
    tokens = np.random.default_rng(0).integers(3, 11, (2, 13)).astype(np.int32)
    translates = "input_vocab_size" in options
    model = constructor(**SIZES, **options, dropout=0.1, attention_dropout=0.1, dtype="bfloat16")
    inputs = (tokens, tokens) if translates else (tokens,)
    params = plain.init(model, *(x.shape for x in inputs))

    def loss_of(params):
        features = model.features(params, inputs if translates else tokens, rng=RNG)
        weights = jnp.ones(tokens.shape)
        sums = loss.cross_entropy(model.logits, params, features, tokens, weights, 5, 0.1)
        return sums.loss

    evaluated = constructor(**SIZES, **options, mode="eval")
    with with_x64():
        gradient = jax.jit(jax.grad(loss_of))(params)
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(gradient))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
        if translates:
            for beam_size in (1, 2):
                generation.translate(evaluated, params, tokens.tolist(), beam_size=beam_size, end=1)
        else:
            generation.generate(evaluated, params, tokens.tolist(), 4, temperature=0.7)

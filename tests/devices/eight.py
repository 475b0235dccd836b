"""A step of training on eight simulated devices, beside one of them.

`test_devices.py` runs this file in a process of its own, which sees eight devices.
"""

from functools import cache

import jax
import numpy as np
import optax
import pytest

from reformax import devices
from reformax.data.base import SentencePairs
from reformax.models import Reformer, ReformerLM, Transformer, TransformerLM
from reformax.ops import block_sparse, dense, flash, local, lsh, memory_efficient, shared_qk
from reformax.ops.block_patterns import local_global
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from tests.helpers import assert_trees_close

# data, fsdp, context
SIZES = [(8, 1, 1), (2, 4, 1), (2, 2, 2)]
BATCH, LENGTH, VOCAB = 8, 32, 40

LM = dict(vocab_size=VOCAB, d_model=16, d_ff=64, n_heads=2, d_attention_key=8, d_attention_value=8)
SEQ2SEQ = dict(LM, input_vocab_size=VOCAB, n_encoder_layers=1, n_decoder_layers=1)
del SEQ2SEQ["vocab_size"]
DROPOUT = dict(dropout=0.1, attention_dropout=0.1)
HASHES = dict(chunk_len=8, n_hashes=2)
KERNELS = dict(impl="pallas_interpret")


def windows():
    """Block-sparse attention by a kernel."""
    return block_sparse.block_sparse(pattern=local_global(), block_size=16, **KERNELS)


def both(op, **options):
    """A cycle of local attention and an algorithm."""
    return local.local(chunk_len=8), op(**options)


LANGUAGE = {
    "reformer": (ReformerLM, dict(attention_type=both(lsh.lsh, **HASHES), n_layers=4)),
    "reformer kernels": (
        ReformerLM,
        dict(attention_type=lsh.lsh(**HASHES, **KERNELS), n_layers=2, scan_layers=False),
    ),
    "reformer slots": (
        ReformerLM,
        dict(attention_type=lsh.lsh(**HASHES), n_layers=2, n_slots=4, ff_chunk_size=12),
    ),
    "strict": (TransformerLM, dict(attention_type=lsh.lsh(**HASHES, strictly_causal=True))),
    "dense": (TransformerLM, dict(attention_type=dense.dense(), remat=True)),
    "local": (TransformerLM, dict(attention_type=local.local(chunk_len=8, **KERNELS))),
    "flash": (TransformerLM, dict(attention_type=flash.flash(**KERNELS), scan_layers=False)),
    "flash tiles": (TransformerLM, dict(attention_type=flash.flash())),
    "memory efficient": (
        TransformerLM,
        dict(attention_type=memory_efficient.memory_efficient()),
    ),
    "shared": (TransformerLM, dict(attention_type=shared_qk.shared_qk())),
    "sparse": (TransformerLM, dict(attention_type=windows())),
}
PAIRS = {
    "translating transformer": (Transformer, {}),
    "translating reformer": (
        Reformer,
        dict(encoder_attention_type=lsh.lsh(**HASHES), decoder_attention_type=local.local()),
    ),
}
# One with each kind of stack; the others are slow.
QUICK = {("reformer kernels", (2, 4, 1)), ("dense", (8, 1, 1))}


@cache
def model_of(name):
    """A model with dropout and, where it can, kernels that are interpreted."""
    constructor, options = (LANGUAGE | PAIRS)[name]
    if name in PAIRS:
        return constructor(**SEQ2SEQ | DROPOUT | options)
    return constructor(**LM | DROPOUT | dict(n_layers=2) | options)


@cache
def batch_of(is_pairs):
    """Tokens, targets and weights, of which some are 0."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCAB, (2, BATCH, LENGTH)).astype(np.int32)
    weights = (random.random((BATCH, LENGTH)) < 0.9).astype(np.float32)
    if not is_pairs:
        return tokens[0], tokens[0], weights
    segments = np.repeat([[1, 2, 3, 0]], BATCH, axis=0).repeat(LENGTH // 4, axis=1)
    segments = segments.astype(np.int32)
    pairs = SentencePairs(*tokens * (segments > 0), segments, segments)
    return pairs, pairs.target, weights * (segments > 0)


def step_on(mesh, name):
    """(nats, gradient) of a step."""
    model, sgd = model_of(name), optax.sgd(1.0)
    shape = (BATCH, LENGTH)
    shapes = (shape, shape) if name in PAIRS else (shape,)
    params = jax.device_get(jax.jit(lambda: model.init_params(jax.random.PRNGKey(1), *shapes))())
    state = step_lib.first_state(params, sgd, ema=False)
    placement = devices.placement(state, mesh)
    state = jax.device_put(state, placement)
    batch = jax.device_put(batch_of(name in PAIRS), devices.over_batch(mesh))
    run = step_lib.step_fn(model, sgd, mesh, loss_chunk_len=12, placement=placement)
    after, metrics = run(state, batch, jax.random.PRNGKey(2))
    return float(metrics["nats"]), jax.tree.map(np.subtract, params, jax.device_get(after.params))


@cache
def on_one(name):
    return step_on(mesh_lib.make(devices=jax.devices()[:1]), name)


CASES = [(name, sizes) for name in LANGUAGE | PAIRS for sizes in SIZES]


@pytest.mark.parametrize(
    "name, sizes",
    [pytest.param(*c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
def test_a_step_is_that_of_one_device(monkeypatch, name, sizes):
    monkeypatch.setattr(devices, "LEAST_SPLIT", 64)
    assert len(jax.devices()) == 8
    mesh = mesh_lib.make(dict(zip(devices.AXES, sizes, strict=True)))
    nats, gradient = step_on(mesh, name)
    assert np.isclose(nats, on_one(name)[0], rtol=1e-5)
    assert_trees_close(gradient, on_one(name)[1])

"""Policies of rematerialization: the same numbers, memory and arithmetic in order, offloading."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.declared import SettingError
from reformax.layers import remat
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dense, flash, gated_linear, local, lsh, performer
from tests.helpers import assert_trees_close
from tests.layers import plain

RNG = jax.random.PRNGKey(3)
POLICIES = "nothing", "attention", "all"
STACKS = {
    "residual": (layers.ResidualStack, {}),
    "written out": (layers.ResidualStack, dict(scan_layers=False)),
    "post-norm": (layers.ResidualStack, dict(post_norm=True)),
    "reversible": (layers.ReversibleStack, {}),
    "kept": (layers.ReversibleStack, dict(keep_ff_outputs=True, scan_layers=False)),
    "exact": (layers.ReversibleStack, dict(exact=True)),
}
OPS = {
    "local": local.local(chunk_len=4),
    "dense": dense.dense(),
    "flash": flash.flash(),
    "lsh": lsh.lsh(chunk_len=4, n_hashes=2),
    "gated_linear": gated_linear.gated_linear(),
    "performer": performer.performer(n_features=8),
}


def gradient_of(stack, masked=False):
    """`(params, *streams) -> (loss, gradients)`, and its arguments."""
    streams = np.random.default_rng(0).normal(size=(stack.n_streams, 2, 13, 8)).astype(np.float32)
    segment_ids = (plain.some_segments(2, 13),) if masked else ()
    shapes = [x.shape for x in (*streams, *segment_ids)]

    def loss(params, *streams):
        out = jax.tree.leaves(stack.apply(params, *streams, *segment_ids, rng=RNG))
        return sum(jnp.sum(jnp.sin(y)) for y in out)

    run = jax.value_and_grad(loss, tuple(range(1 + len(streams))))
    return run, (plain.init(stack, *shapes), *streams)


@functools.cache
def found(name, op, policy, offload=False):
    kind, options = STACKS[name]
    if policy == "all":
        options = {x: y for x, y in options.items() if x != "keep_ff_outputs"}
    cycle = plain.blocks([OPS[op]], rate=0.1 if OPS[op].dropout else 0.0)
    masked = name != "written out"
    settings = dict(remat_policy=policy, offload_activations=offload, masked=masked)
    stack = kind(cycle, 3, **settings, **options)
    run, arguments = gradient_of(stack, masked)
    return jax.jit(run)(*arguments)


PAIRS = [(name, op) for name in STACKS for op in ("flash", "lsh")]
PAIRS += [(name, op) for name in ("residual", "reversible") for op in OPS.keys() - {"flash", "lsh"}]


@pytest.mark.parametrize("name, op", sorted(PAIRS))
@pytest.mark.parametrize("policy", POLICIES[:2])
def test_losses_and_gradients_are_those_of_every_policy(name, op, policy):
    want = found(name, op, "all")
    loss, gradients = found(name, op, policy)
    np.testing.assert_allclose(loss, want[0], rtol=1e-6, atol=1e-5)  # a sum of both signs
    assert_trees_close(gradients, want[1], 1e-5)


def lowered(kind, op, policy, n_layers=6, length=512, lower=True, **options):
    """The lowered gradient of a stack; the function and its arguments."""
    cycle = plain.blocks([op], d_head=16, d_ff=128, rate=0.0)
    stack = kind(cycle, n_layers, remat_policy=policy, **options)
    x = [jax.ShapeDtypeStruct((1, length, 32), jnp.float32)] * stack.n_streams
    params = jax.eval_shape(lambda: stack.init_params(RNG, *(y.shape for y in x)))

    def loss(params, *x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(stack.apply(params, *x, rng=RNG)))

    gradient = jax.grad(loss, tuple(range(1 + len(x))))
    program = jax.jit(gradient).lower(params, *x) if lower else None
    return program, (gradient, params, x)


@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
@pytest.mark.parametrize("op", [flash.flash(), local.local(chunk_len=16)], ids=repr)
def test_memory_is_in_the_order_of_the_policies(kind, op):
    temp = {
        policy: lowered(kind, op, policy)[0].compile().memory_analysis().temp_size_in_bytes
        for policy in POLICIES
    }
    of_attention = 6 * 512 * 32 * 4  # every layer's output of attention
    assert temp["nothing"] + 0.9 * of_attention < temp["attention"], temp
    assert temp["attention"] + 5 * of_attention < temp["all"], temp


# Offloading. A CPU's memory is the host's: there the program alone can be looked at.


@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
def test_what_is_kept_is_on_the_host_and_nowhere_twice(kind, monkeypatch):
    """Attention's output, maxima and sums, once each, and the stream between residual layers."""
    monkeypatch.setattr(remat, "check_offload", lambda: None)
    options = dict(offload_activations=True, lower=False)
    _, (gradient, params, x) = lowered(kind, flash.flash(), "attention", **options)
    text = str(jax.make_jaxpr(gradient)(params, *x))
    outputs = "".join(re.findall(r"((?:\w+:\S+\s+)+)= device_put\[", text))
    moved = re.findall(r"f32<host>\[([\d,]*)\]", outputs)
    stream = ["1,512,32"] if kind is layers.ResidualStack else []
    assert moved == [*stream, "1,512,2,16", "1,2,512", "1,2,512"]


@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
def test_offloading_changes_no_number(kind, monkeypatch):
    monkeypatch.setattr(remat, "check_offload", lambda: None)
    name = "residual" if kind is layers.ResidualStack else "reversible"
    want = found(name, "local", "attention")
    loss, gradients = found(name, "local", "attention", offload=True)
    np.testing.assert_allclose(loss, want[0], rtol=1e-6)
    assert_trees_close(gradients, want[1], 1e-6)


@pytest.mark.parametrize("model_fn", [ReformerLM, TransformerLM])
def test_a_cpu_has_no_other_memory_to_offload_to(model_fn):
    sizes = dict(vocab_size=7, d_model=8, d_ff=8, n_heads=2, n_layers=2)
    options = sizes | dict(remat_policy="attention", offload_activations=True)
    tokens = np.ones((1, 8), np.int32)
    for mode in ("eval", "train"):
        model = model_fn(**options, attention_type=dense.dense(), mode=mode)
        params = jax.eval_shape(lambda model=model: model.init_params(RNG, tokens.shape))
        trace = functools.partial(jax.eval_shape, model.apply, params, tokens, RNG)
        if mode == "eval":
            trace()
            continue
        with pytest.raises(SettingError, match="^offload_activations is True and the backend is"):
            trace()


@pytest.mark.parametrize(
    "kind, policy, message",
    [
        (layers.ResidualStack, "all", "remat_policy is 'all': set remat_policy='attention' or"),
        (layers.ReversibleStack, "all", "remat_policy is 'all': set remat_policy='attention' or"),
        (layers.ReversibleStack, "nothing", "'nothing', which keeps nothing of these layers"),
        (layers.ResidualStack, "most", "'most': expected 'nothing', 'attention' or 'all'"),
    ],
)
def test_what_cannot_be_kept_is_told(kind, policy, message):
    with pytest.raises(SettingError, match=message):
        offload = policy != "most"
        cycle = plain.blocks([dense.dense()])
        kind(cycle, 2, remat_policy=policy, offload_activations=offload)

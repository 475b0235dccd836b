"""Slots of reversible stacks: two of them, the inputs that are rebuilt, which layers share one."""

import jax
import numpy as np
import pytest

from reformax import layers
from reformax.layers import coupling, reversible
from reformax.ops import local, lsh
from tests.helpers import default_jit
from tests.layers import plain

RNG = jax.random.PRNGKey(3)
LSH = [lsh.lsh(chunk_len=4, n_hashes=2)]


def stream(length=13, d_model=8, batch=2):
    return np.random.default_rng(0).normal(size=(batch, length, d_model)).astype(np.float32)


def test_two_slots_are_two_streams(monkeypatch):
    """`(x - s_2, x - s_1)`, from the same start."""
    monkeypatch.setattr(reversible, "to_grid", lambda x: x)
    cycle, x = plain.blocks([local.local(chunk_len=4)]), stream()
    slots, streams = (layers.ReversibleStack(cycle, 2, n_slots=n) for n in (2, None))
    params = plain.init(slots, x.shape)
    a, b = jax.jit(streams.apply)(params, x, x, rng=RNG)
    np.testing.assert_allclose(jax.jit(slots.apply)(params, x, rng=RNG), a + b - x, atol=1e-5)


# `layers/test_every_op.py` has a gradient with slots, wrong where inputs are not rebuilt.
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, options",
    [
        ("float32", {}),
        ("bfloat16", dict(exact=True, n_layers=24)),
        ("float32", dict(exact=True, keep_ff_outputs=True)),
    ],
)
def test_the_inputs_are_rebuilt(dtype, options):
    """Bit for bit if exact; otherwise except where a sublayer rounds to another multiple."""
    x = stream(19, batch=1)
    options = dict(n_layers=6, n_slots=5, dtype=dtype) | options
    stack = layers.ReversibleStack(plain.blocks(LSH), **options)
    params = plain.init(stack, x.shape)
    # Exactness depends on what the compiler fuses, so this is optimised as in use.
    jit = default_jit if stack.exact else jax.jit
    run = jit(lambda params, x: stack.rebuild(params, x, rng=RNG))
    (got, *slots), rebuilt = run(params, x)
    np.testing.assert_allclose(got, x, atol=reversible.GRID / 2, rtol=0)
    assert len(slots) == 5 and not any(np.any(slot) for slot in slots)
    error = max(np.abs(a - b).max() for a, b in zip(rebuilt, (got, *slots), strict=True))
    assert error <= (0 if stack.exact else 8 * reversible.GRID)


def test_layers_that_see_far_share_no_slot():
    """Where there are enough slots; of more layers, neighbours have different ones."""
    blocks = plain.blocks([local.local(), local.local(), LSH[0], local.local()])
    for n_layers in (4, 8, 12):
        layers.ReversibleStack(blocks, n_layers, n_slots=6)
    for n_layers, n_slots, enough in ((12, 4, 5), (8, 2, 3), (24, 6, 7)):
        with pytest.raises(ValueError, match=rf"^n_slots is {n_slots}: .*; set n_slots={enough}$"):
            layers.ReversibleStack(blocks, n_layers, n_slots=n_slots)
        layers.ReversibleStack(blocks, n_layers, n_slots=enough)
    layers.ReversibleStack(plain.blocks([local.local()]), 4, n_slots=2)
    with pytest.raises(ValueError, match="^n_slots is 1: expected at least 2"):
        layers.ReversibleStack(blocks, 4, n_slots=1)
    with pytest.raises(ValueError, match="^remat_policy is 'all', keep_ff_outputs is True"):
        layers.ReversibleStack(blocks, 4, remat_policy="all", keep_ff_outputs=True)


@pytest.mark.parametrize(
    "indices, n_slots, shared",
    [([0, 2, 4], 6, False), ([0, 6], 6, True), ([0, 2, 4, 6], 3, False), ([0, 2, 4], 2, True)],
)
def test_which_sublayers_share_a_slot(indices, n_slots, shared):
    assert coupling.share_a_slot(indices, n_slots) == shared

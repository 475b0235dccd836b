"""Every op in every kind of stack: the gradient is autodiff's, weights and gates included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from tests.helpers import assert_trees_close
from tests.layers import plain
from tests.ops.rows import ROWS, over
from tests.ops.toys import TOYS

RNG = jax.random.PRNGKey(3)
STACKS = {
    "reversible": dict(keep_ff_outputs=True),
    "exact": dict(exact=True),
    "slots": dict(n_slots=4),
}


def stack_of(row, **options):
    attention = layers.Attention(
        row.op(),
        n_heads=2,
        d_qk=4,
        d_v=4,
        causal=row.causal(),
        masked=True,
        use_rotary=True,
        attention_dropout=row.dropout(0.1),
        output_dropout=0.1,
    )
    block = layers.TransformerBlock(attention, layers.FeedForward(12, 0.1, 0.1))
    return layers.ReversibleStack([block], 2, masked=True, **options)


def check(row, options):
    stack = stack_of(row, **options)
    streams = np.random.default_rng(0).normal(size=(stack.n_streams, 2, 13, 8)).astype(np.float32)
    segment_ids = row.segment_ids(plain.some_segments(2, 13))
    params = plain.init(stack, *[streams[0].shape] * stack.n_streams, segment_ids.shape)

    def loss(stack, params, streams):
        out = jax.tree.leaves(stack.apply(params, *streams, segment_ids, rng=RNG))
        return sum(jnp.sum(jnp.sin(y)) for y in out)

    plainly = dataclasses.replace(stack, remat_policy="all", keep_ff_outputs=False)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, x), (0, 1)))(params, streams)
        for x in (stack, plainly)
    )
    assert_trees_close(got, want, 1e-4)
    assert all(np.any(x) for x in jax.tree.leaves(jax.device_get(want[0]["block_0"]["attention"])))


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("row", TOYS, ids=lambda row: row.name)
def test_weights_and_gates(row, kind):
    check(row, STACKS[kind])


@pytest.mark.slow
@over(row for row in ROWS if not row.in_kernel)
def test_exact(row):
    check(row, STACKS["exact"])

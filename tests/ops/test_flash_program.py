"""The bodies of flash attention over a program that is no op's."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.common import QueryRows, launch
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.online import Softmax, nonzero
from tests.helpers import assert_trees_close, with_gradients

TILE, LENGTH = 16, 40


class Inputs(NamedTuple):
    q: Any
    k: Any
    v: Any


class Tile(NamedTuple):
    position: Any
    exists: Any
    segment: Any = None


@dataclasses.dataclass(frozen=True)
class EveryOther(flash.Program):
    """A query sees the keys at an even distance; tiles are visited from the last to the first."""

    x: Inputs
    row: QueryRows | None
    batch: Any
    head: Any
    logits: Logits

    @classmethod
    def located(cls, logits, x, row=None):
        return cls(x, row, pl.program_id(2), pl.program_id(1), logits)

    def tile(self, i):
        position = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        return Tile(position, position < LENGTH)

    def over_keys(self, queries, body, carry):
        n = -(-LENGTH // TILE)
        return lax.fori_loop(0, n, lambda i, carry: body(self.tile(n - 1 - i), carry), carry)

    over_queries = over_keys

    def address(self, block):
        return block.position, self.head, block.exists

    def visible(self, queries, keys):
        return ((queries.position - keys.position) % 2 == 0) & keys.exists

    def dropped(self, queries, keys):
        return jnp.where(keys.position == 3, 0.0, 1.25)


def forward_kernel(x, out, *, logits):
    program = EveryOther.located(logits, x)
    queries = program.tile(pl.program_id(0))
    acc, row_max, row_sum = flash.forward(program, queries)
    program.put_rows(out.acc, queries, acc / nonzero(row_sum)[:, None])
    program.put_numbers(out.row_max, queries, row_max * program.scale)
    program.put_numbers(out.row_sum, queries, row_sum)


def backward_kernel(x, row, out, *, logits):
    program = EveryOther.located(logits, x, row)
    tile = program.tile(pl.program_id(0))
    dq = flash.d_queries(program, tile, program.rows(x.q, tile))
    dk, dv = flash.d_keys(program, tile)
    gradients = dq * program.scale, dk * program.scale, dv
    for ref, value in zip(out, gradients, strict=True):
        program.put_rows(ref, tile, value)


def run(kernel, logits, inputs, shapes):
    n_batch, length, n_heads, _ = inputs[0].q.shape
    grid = -(-length // TILE), n_heads, n_batch
    options = dict(num_warps=4, num_stages=1, interpret=True, name="every_other")
    kernel = functools.partial(kernel, logits=logits)
    return launch(kernel, inputs, (shapes,), grid=grid, **options)[0]


def forward(logits, x, interpret):
    assert interpret
    statistic = jax.ShapeDtypeStruct((x.q.shape[0], x.q.shape[2], x.q.shape[1]), jnp.float32)
    shapes = Softmax(jax.ShapeDtypeStruct(x.v.shape, x.v.dtype), statistic, statistic)
    return tuple(run(forward_kernel, logits, (x,), shapes))


def backward(logits, x, results, d_out, interpret):
    row = QueryRows.of(d_out, results, None)
    shapes = Inputs(*(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in x))
    return tuple(run(backward_kernel, logits, (x, row), shapes))


def in_arrays(cap, q, k, v):
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[3])
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    position = jnp.arange(LENGTH)
    sees = (position[:, None] - position) % 2 == 0
    weights = jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1)
    weights = weights * jnp.where(position == 3, 0.0, 1.25)
    return jnp.einsum("bnts,bsnv->btnv", weights, v)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("with_sums", [False, True])
def test_a_program_says_what_is_visited_and_seen(with_sums, cap):
    rng = np.random.default_rng(0)
    shapes = [(2, LENGTH, 2, size) for size in (8, 8, 5, 5)]
    q, k, v, d_out = (jax.device_put(rng.normal(size=s).astype(jnp.float32)) for s in shapes)
    logits = Logits(soft_cap=cap)
    attend = functools.partial(flash.attention(forward, backward, with_sums), logits, True)

    def output(q, k, v):
        found = attend(Inputs(q, k, v))
        return found[0] if with_sums else found

    got, want = (
        with_gradients(f)(d_out, q, k, v) for f in (output, functools.partial(in_arrays, cap))
    )
    assert_trees_close(got, want)
    if with_sums:
        row_sum = jax.jit(attend)(Inputs(q, k, v))[1]
        assert row_sum.shape == (2, 2, LENGTH)
        assert np.all(np.asarray(row_sum) >= 1)

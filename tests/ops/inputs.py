"""The inputs of any op: its arrays, its own weights, its extra projections."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reformax.buffers import trained
from reformax.ops.base import AttentionOp, Dims


class Inputs(NamedTuple):
    """The arrays of a call, and the op's own weights."""

    q: Any
    k: Any  # None where the op makes its keys of the queries
    v: Any
    extra_projections: Any = None  # a dict; None where the op reads none
    params: Any = ()

    def map(self, function) -> "Inputs":
        """The same with `function` of each array `[B, T, ...]`; the weights stay."""
        return Inputs(*jax.tree.map(function, self[:4]), self.params)

    def at(self, *index) -> "Inputs":
        """Some rows and positions."""
        return self.map(lambda x: x[index])

    def zip(self, function, *others) -> "Inputs":
        """`map` with the arrays of other inputs besides."""
        rest = (other[:4] for other in others)
        return Inputs(*jax.tree.map(function, self[:4], *rest), self.params)


def draw(
    op: AttentionOp,
    batch=2,
    length=13,
    n_heads=2,
    d_qk=4,
    d_v=4,
    dtype=np.float32,
    seed=0,
    n_kv_heads=None,
) -> Inputs:
    """Normally distributed numbers, and the weights that the op begins with."""
    rng = np.random.default_rng(seed)
    n_kv_heads = n_kv_heads or n_heads

    def numbers(length, n_heads, size):
        return rng.normal(size=(batch, length, n_heads, size)).astype(dtype)

    q, k = numbers(length, n_heads, d_qk), numbers(length, n_kv_heads, d_qk)
    v = numbers(length, n_kv_heads, d_v)
    dims = Dims(n_heads, d_qk, d_v, length)
    extra_projections = {
        name: numbers(length, extra.n_heads, extra.size)
        for name, extra in op.extra_projections(dims).items()
    }
    params = first_weights(op, dims, jax.random.key(seed))
    return Inputs(q, None if op.shared_qk else k, v, extra_projections or None, params)


def first_weights(op: AttentionOp, dims: Dims, key):
    """The weights that the op begins with, drawn in one program if there are any."""
    first = functools.partial(op.init, dims=dims)
    return jax.jit(first)(key) if jax.tree.leaves(jax.eval_shape(first, key)) else first(key)


# The op's functions of inputs.


def call(op: AttentionOp, x: Inputs, **options):
    return op(x.q, x.k, x.v, params=x.params, extra_projections=x.extra_projections, **options)


def with_gradients(row, rng, options=None, **sizes):
    """A call of a row's op with its gradients, as a function of arrays, and these arrays.

    They are the gradient of the output, `Inputs` of such `sizes` without weights, segments of
    packed rows, and the weights. It has dropout where the op has that. `options` are the op's.
    Changes of what is carried are left out.
    """
    op = row.op(**options or {})
    x = draw(op, **sizes)
    random, (n_batch, length) = np.random.default_rng(1), x.q.shape[:2]
    d_out = random.normal(size=(*x.q.shape[:3], x.v.shape[3])).astype(np.float32)
    ids = np.sort(random.integers(1, 4, (n_batch, length)))[:, ::-1]
    ids = np.where(np.arange(length) < length - 3, ids, 0)
    ids = jnp.asarray(ids if op.packed else ids != 0)
    options = dict(causal=row.causal(), dropout=row.dropout(0.3), rng=rng)

    def run(d_out, arrays, ids, params):
        def attend(arrays, params):
            return call(op, Inputs(*arrays, params), segment_ids=ids, **options)

        out, vjp = jax.vjp(attend, arrays, params)
        of_arrays, of_params = vjp(d_out.astype(out.dtype))
        return (out, of_arrays), trained(of_params)

    return run, (d_out, x[:4], ids, x.params)


def plan(op: AttentionOp, x: Inputs, *, segment_ids=None, **options):
    return op.plan(x.params, x.q, x.k, x.v, segment_ids=segment_ids, **options)


def apply(op: AttentionOp, x: Inputs, *, dropout=0.0, rng=None, **options):
    options |= dict(dropout=dropout, rng=rng, extra_projections=x.extra_projections)
    return op.apply(x.params, x.q, x.k, x.v, **options)


def init_cache(op: AttentionOp, x: Inputs, **options):
    return op.init_cache(x.params, x.q, x.k, x.v, **options, extra_projections=x.extra_projections)


def step(op: AttentionOp, x: Inputs, cache, **options):
    return op.step(x.params, x.q, x.k, x.v, cache, **options, extra_projections=x.extra_projections)


def read_on(op: AttentionOp, x: Inputs, cache, **options):
    return op.read_on(
        x.params, x.q, x.k, x.v, cache, **options, extra_projections=x.extra_projections
    )

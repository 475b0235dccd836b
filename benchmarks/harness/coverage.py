"""The share of a trained model's attention weight that falls on the keys that an op would show.

An op is asked for nothing but its plan and its arithmetic: rows of its attention are read off its
gradient, as `softmax.kept_mass` does. Queries and keys of zeros make all logits equal: what is
above 0 is then seen, however small its weight would be. So any op can be asked whose attention is a
softmax over the keys that its plan shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from benchmarks.harness.rows import EXACT
from reformax.buffers import advanced, merged, trained
from reformax.declared import SettingError, Unsupported
from reformax.ops.base import AttentionOp, Dims
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.kept_mass import weight_rows

# Rows of the matrix of attention that a call computes: values then have a head's usual size.
ROWS = 64
# How often an op's carried weights, such as running means, see a layer's vectors first, and the
# steps of Adam of weights that learn by a loss of their own, such as an indexer's.
N_ADVANCED, N_LEARNT, LEARNING_RATE = 50, 200, 2e-3
# An op's further projections when it is asked what it shows: all numbers of one by its last axis.
# NSA's gates shut its summaries, in which every position has a part, and open both other branches.
EXTRAS = {"nsa": {"gate": (-1e9, 0.0, 0.0)}}


class Layer(NamedTuple):
    """What the attention of a layer has read: float32, of one sequence."""

    number: int
    op: AttentionOp
    q: Float[Array, "1 T N H"]
    k: Float[Array, "1 T N H"] | None
    params: Any = ()  # the op's own weights


class Found(NamedTuple):
    """What an op shows of a layer's attention, by head."""

    weight: Float[Array, " N"]  # the share of the weight
    keys: Float[Array, " N"]  # the mean number of keys that a query sees


def layers(
    model: Any,
    params: Any,
    tokens: Int[Array, "1 T"],
    rng: PRNGKeyArray,
    kinds: tuple[type[AttentionOp], ...] = EXACT,
) -> list[Layer]:
    """The queries and keys of the layers whose attention sees every key.

    Args:
      model: a language model, built for evaluation.
      params: its weights.
      tokens: a sequence.
      rng: of the model's own hashes.
      kinds: of the layers; others than those that see every key.

    Raises:
      SettingError: the model has no such layer.
    """
    ops, read = model.attention_type, []
    ops = (ops,) if isinstance(ops, AttentionOp) else tuple(ops)
    asked = [i for i, op in enumerate(ops) if isinstance(op, kinds)]
    if not asked:
        wanted = (
            "that see every key, such as dense.dense(), for their attention is the true one"
            if kinds is EXACT
            else "of " + ", ".join(x.__name__ for x in kinds)
        )
        raise SettingError(
            f"the run's attention is {', '.join(map(repr, ops))}: expected layers {wanted}"
        )
    watched = [_watched(op, read) if isinstance(op, kinds) else op for op in ops]
    model = dataclasses.replace(model, attention_type=tuple(watched))
    jax.block_until_ready(jax.jit(model.features)(params, tokens, rng=rng))
    jax.effects_barrier()
    numbers = [n for n in range(model.n_layers) if n % len(ops) in asked]
    return [
        Layer(n, ops[n % len(ops)], *known, _op_weights(params["stack"], *divmod(n, len(ops))))
        for n, known in zip(numbers, read, strict=True)
    ]


def _op_weights(params: Any, repeat: int, i: int) -> Any:
    """The weights of the op of block `i` in a repeat of a stack's cycle, as NumPy arrays."""
    weights = params[f"block_{i}"]["attention"]["op"]
    return jax.tree.map(lambda x: np.array(x[repeat]), weights)


def _watched(op: AttentionOp, read: list) -> AttentionOp:
    """`op`, each call of which appends queries and keys, as NumPy arrays, to `read`.

    It hands out no weights: XLA joins a callback and its slices of a stack's weights to one kernel,
    and for NVIDIA GPUs it then aborts, at the callback's token.
    """

    class Watched(type(op)):
        def _apply(self, call, params, q, k, v, plan):
            arrays = [x.astype(jnp.float32) for x in (q, *repeat_heads(q, k)) if x is not None]

            def add(*arrays):
                read.append((*map(np.array, arrays), None)[:2])

            jax.debug.callback(add, *arrays, ordered=True)
            return super()._apply(call, params, q, k, v, plan)

    return Watched(**{field.name: getattr(op, field.name) for field in dataclasses.fields(op)})


def own_weights(op: AttentionOp, layer: Layer, rng: PRNGKeyArray) -> Any:
    """Weights of an op in a layer's place, after steps of training on the layer's vectors.

    These are weights that learn without the model's loss: what is carried, and what a loss of the
    op's own reaches.

    Raises:
      Unsupported: the op does not fit the layer, makes no attention weights, or has others.
    """
    if not op.dropout:
        raise Unsupported(f"{op} makes no attention weights, so it shows no keys")
    if op.shared_qk and not layer.op.shared_qk:
        raise Unsupported(f"{op} makes its keys of the queries, and layer {layer.number} has keys")
    q, k = _vectors(op, layer)
    dims = op.dims(q, q)
    params = op.init(rng, dims)
    if op.extra_projections(dims).keys() - EXTRAS.get(op.name, {}).keys():
        raise Unsupported(f"{op} has projections of its own, which the run has not trained")
    if not jax.tree.leaves(params):
        return params

    own = trained(params)
    optimizer = optax.adam(LEARNING_RATE)
    state = optimizer.init(own)
    for i in range(N_LEARNT if jax.tree.leaves(own) else N_ADVANCED):
        changes = own_gradient(op, params, q, k, rng)
        if i == 0 and not all(jnp.any(x) for x in jax.tree.leaves(trained(changes))):
            raise Unsupported(f"{op} has weights of its own, which the run has not trained")
        updates, state = optimizer.update(trained(changes), state, own)
        own = optax.apply_updates(own, updates)
        params = merged(advanced(params, changes), own)
    return params


@functools.partial(jax.jit, static_argnums=0)
def own_gradient(op, params, q, k, rng):
    """What reaches the weights while nothing of the output does."""

    def attend(params):
        options = dict(segment_ids=None, causal=True, rng=rng)
        plan = op.plan(params, q, k, **options, train=True)
        return op.apply(params, q, k, q, plan=plan, dropout=0.0, **options, **_extras(op, q))

    out, vjp = jax.vjp(attend, params)
    return vjp(jnp.zeros_like(out))[0]


def _extras(op: AttentionOp, q: Float[Array, "1 T N H"]) -> dict[str, Any]:
    """The argument `extra_projections` of an op that has some, of `EXTRAS`."""
    wanted = op.extra_projections(op.dims(q, q))
    of_each = {
        name: jnp.broadcast_to(
            jnp.asarray(EXTRAS[op.name][name], q.dtype), (*q.shape[:2], extra.n_heads, extra.size)
        )
        for name, extra in wanted.items()
    }
    return {"extra_projections": of_each} if of_each else {}


def _vectors(op: AttentionOp, layer: Layer) -> tuple[Array, Array | None]:
    """A layer's queries and keys as `op` takes them."""
    if op.shared_qk:
        return layer.q, None
    # What the queries are shared as: a query's own vector, of the length that a key has.
    return layer.q, length_normalize(layer.q) if layer.k is None else layer.k


def found(op: AttentionOp | int, layer: Layer, rng: PRNGKeyArray, *, causal: bool = True) -> Found:
    """What `op`, with hashes of `rng`, would show of a layer's attention.

    A number is of the keys of the largest weight of each query: no choice of so many shows more.

    Raises:
      Unsupported: from `own_weights`.
    """
    if isinstance(op, int):
        return jax.device_get(_shares(op, layer.op, causal, (), layer[2:4], layer[2:4], rng))
    params = own_weights(op, layer, rng)
    vectors = _vectors(op, layer)
    return jax.device_get(_shares(op, layer.op, causal, params, vectors, layer[2:4], rng))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _shares(op, true_op, causal, params, vectors, true_vectors, rng) -> Found:
    call = dict(segment_ids=None, causal=causal, rng=rng)
    true = true_op, true_op.init(rng, Dims(1, 1, 1, 1)), *true_vectors
    weight_of, visible_of = (_rows_of(*true, call, equal) for equal in (False, True))
    shown_of = None if isinstance(op, int) else _rows_of(op, params, *vectors, call, True)
    length = true_vectors[0].shape[1]

    def sums(at: Int[Array, " C"]) -> Float[Array, "3 N"]:  # never of the whole matrix
        weight = weight_of(at)
        if shown_of is None:
            least = jax.lax.top_k(weight, min(op, length))[0][..., -1:]
            sees = (weight >= least) & (weight > 0)
        else:
            sees = (visible_of(at) > 0) & (shown_of(at) > 0)
        return jnp.stack([x.sum(axis=(0, 2)) for x in (weight, jnp.where(sees, weight, 0), sees)])

    at = jnp.arange(-(-length // ROWS) * ROWS).reshape(-1, ROWS)
    total, weight, keys = jax.lax.map(sums, at).sum(axis=0)
    return Found(weight / total, keys / length)


def _rows_of(
    op, params, q, k, call, equal: bool
) -> Callable[[Int[Array, " C"]], Float[Array, "C N T"]]:
    """The weights of an op's attention by the positions of queries, or those of equal logits."""
    plan = op.plan(params, q, k, **call, train=False)
    call = call | _extras(op, q)
    if equal:
        q, k = jax.tree.map(jnp.zeros_like, (q, k))
    attend = functools.partial(op.apply, params, q, k, plan=plan, dropout=0.0, **call)
    v = jnp.zeros((*q.shape[:3], ROWS), q.dtype)
    return lambda at: weight_rows(attend, v, at)[:, 0]


def at_equal_keys(points: Sequence[tuple[float, float]], n_keys: Sequence[int]) -> dict[int, float]:
    """The second numbers of `points` where the first are `n_keys`, on lines between the points."""
    first, second = zip(*sorted(points), strict=True)
    inside = [n for n in n_keys if first[0] <= n <= first[-1]]
    return dict(zip(inside, map(float, np.interp(inside, first, second)), strict=True))

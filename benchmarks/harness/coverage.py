"""The share of a trained model's attention weight that falls on the keys that an op would show.

An op is asked for nothing but its plan and its arithmetic. Values that are rows of the identity
make its output the matrix of its attention. Queries of zeros make all logits equal: what is above 0
is then seen, however small its weight would be. So any op can be asked whose attention is a softmax
over the keys that its plan shows.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from benchmarks.harness.rows import EXACT
from reformax.buffers import advanced, merged, trained
from reformax.declared import SettingError, Unsupported
from reformax.ops.base import AttentionOp, Dims
from reformax.ops.numerics.normalization import length_normalize

# Columns of the matrix of attention that a call computes: as values they have a head's usual size.
COLUMNS = 64
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
    k: Float[Array, "1 T G H"] | None


class Truth(NamedTuple):
    """The attention of a layer, by blocks of keys, the last of which zeros fill up."""

    weight: Float[Array, "C T N K"]
    visible: Bool[Array, "C T N K"]


class Found(NamedTuple):
    """What an op shows of a layer's attention, by head."""

    weight: Float[Array, " N"]  # the share of the weight
    keys: Float[Array, " N"]  # the mean number of keys that a query sees


def cycle(model: Any) -> tuple[AttentionOp, ...]:
    """The algorithms that the layers of a language model cycle through."""
    ops = model.attention_type
    return (ops,) if isinstance(ops, AttentionOp) else tuple(ops)


def layers(model: Any, params: Any, tokens: Int[Array, "1 T"], rng: PRNGKeyArray) -> list[Layer]:
    """The queries and keys of the layers whose attention sees every key.

    Args:
      model: a language model, built for evaluation.
      params: its weights.
      tokens: a sequence.
      rng: of the model's own hashes.

    Raises:
      SettingError: the model has no such layer.
    """
    ops, read = cycle(model), []
    exact = [i for i, op in enumerate(ops) if isinstance(op, EXACT)]
    if not exact:
        raise SettingError(
            f"the run's attention is {', '.join(map(repr, ops))}: expected layers that see every "
            "key, such as dense.dense(), for their attention is the true one"
        )
    watched = [_watched(op, read) if isinstance(op, EXACT) else op for op in ops]
    model = dataclasses.replace(model, attention_type=tuple(watched))
    jax.block_until_ready(jax.jit(model.features)(params, tokens, rng=rng))
    jax.effects_barrier()
    numbers = (n for n in range(model.n_layers) if n % len(ops) in exact)
    return [Layer(n, ops[n % len(ops)], *arrays) for n, arrays in zip(numbers, read, strict=True)]


def _watched(op: AttentionOp, read: list) -> AttentionOp:
    """`op`, each call of which appends its queries and its keys, as NumPy arrays, to `read`."""

    class Watched(type(op)):
        def _apply(self, call, params, q, k, v, plan):
            arrays = [x.astype(jnp.float32) for x in (q, k) if x is not None]
            jax.debug.callback(
                lambda *x: read.append((*map(np.array, x), None)[:2]), *arrays, ordered=True
            )
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
        changes = _own_gradient(op, params, q, k, rng)
        if i == 0 and not all(jnp.any(x) for x in jax.tree.leaves(trained(changes))):
            raise Unsupported(f"{op} has weights of its own, which the run has not trained")
        updates, state = optimizer.update(trained(changes), state, own)
        own = optax.apply_updates(own, updates)
        params = merged(advanced(params, changes), own)
    return params


@functools.partial(jax.jit, static_argnums=0)
def _own_gradient(op, params, q, k, rng):
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


def truth(layer: Layer, rng: PRNGKeyArray) -> Truth:
    """The causal attention of a layer's own op, which all others are measured by."""
    params = layer.op.init(rng, Dims(1, 1, 1, 1))
    return _truth(layer.op, params, (layer.q, layer.k), rng)


def found(op: AttentionOp, layer: Layer, known: Truth, rng: PRNGKeyArray) -> Found:
    """What `op` would show of a layer's attention, which is `known`, with hashes of `rng`."""
    params = own_weights(op, layer, rng)
    return Found(*jax.device_get(_shares(op, params, _vectors(op, layer), rng, known)))


def largest(known: Truth, n_keys: int) -> Found:
    """What the `n_keys` keys of the largest weight show of each query: no choice shows more."""
    return Found(*jax.device_get(_largest(known, n_keys)))


def _columns(op, params, vectors, rng, seen: bool):
    """`first -> [T, N, K]`: the weights of an op's causal attention to keys from `first` on.

    With `seen` they are those of equal logits.
    """
    q, k = vectors
    options = dict(segment_ids=None, causal=True, rng=rng)
    plan = op.plan(params, q, k, **options, train=False)
    if seen:
        q, k = jnp.zeros_like(q), None if k is None else jnp.zeros_like(k)
    length, n_heads = q.shape[1], q.shape[2] if k is None else k.shape[2]
    options |= _extras(op, q)

    def columns(first: Int[Array, ""]) -> Float[Array, "T N K"]:
        key = first + jnp.arange(COLUMNS)
        v = (jnp.arange(length)[:, None] == key[None]).astype(q.dtype)
        v = jnp.broadcast_to(v[None, :, None], (1, length, n_heads, COLUMNS))
        return op.apply(params, q, k, v, plan=plan, dropout=0.0, **options)[0]

    return columns


@functools.partial(jax.jit, static_argnums=0)
def _truth(op, params, vectors, rng) -> Truth:
    weight, visible = (_columns(op, params, vectors, rng, seen) for seen in (False, True))
    first = jnp.arange(0, vectors[0].shape[1], COLUMNS)
    return Truth(*jax.lax.map(lambda x: (weight(x), visible(x) > 0), first))


@functools.partial(jax.jit, static_argnums=0)
def _shares(op, params, vectors, rng, known: Truth):
    shown, length = _columns(op, params, vectors, rng, True), vectors[0].shape[1]

    def sums(block):  # the whole matrix of an op is never in memory
        first, (weight, visible) = block
        sees = visible & (shown(first) > 0)
        return jnp.stack([x.sum(axis=(0, 2)) for x in (weight, jnp.where(sees, weight, 0), sees)])

    first = jnp.arange(0, length, COLUMNS)
    total, weight, keys = jax.lax.map(sums, (first, known)).sum(axis=0)
    return weight / total, keys / length


@functools.partial(jax.jit, static_argnums=1)
def _largest(known: Truth, n_keys: int):
    n_blocks, length, n_heads, size = known.weight.shape

    def of_head(head: Int[Array, ""]) -> Array:
        weight = jnp.swapaxes(known.weight[:, :, head], 0, 1).reshape(length, n_blocks * size)
        best = jax.lax.top_k(weight, min(n_keys, weight.shape[1]))[0]
        return best.sum() / weight.sum()

    keys = jnp.minimum(known.visible.sum(axis=(0, 3)), n_keys).mean(axis=0)
    return jax.lax.map(of_head, jnp.arange(n_heads)), keys


def instead(model: Any, op: AttentionOp) -> Any:
    """The model with `op` in the place of each attention that sees every key.

    Raises:
      Unsupported: the weights of a layer do not fit it.
    """
    ops = cycle(model)
    for own in ops:
        if isinstance(own, EXACT) and op.shared_qk != own.shared_qk:
            raise Unsupported(f"{op} and {own} have other projections")
    if jax.tree.leaves(op.init(jax.random.key(0), Dims(1, 1, 1, 1))):
        raise Unsupported(f"{op} has weights of its own, which the run has not")
    if op.extra_projections(Dims(1, 1, 1, 1)):
        raise Unsupported(f"{op} has projections of its own, which the run has not")
    ops = tuple(op if isinstance(own, EXACT) else own for own in ops)
    return dataclasses.replace(model, attention_type=ops)


def ops_of(text: str) -> dict[str, AttentionOp]:
    """The ops of a call such as "lsh.lsh(chunk_len=64, n_hashes={1, 2})", by their own texts.

    A set is the values of an option to try one after the other. Values are literals.

    Raises:
      SettingError: the text is no such call, or an option is wrong.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        module, name = call.func.value.id, call.func.attr
        options = {x.arg: list(_values(x.value)) for x in call.keywords}
        if call.args or None in options:
            raise ValueError(text)
        factory = getattr(importlib.import_module(f"reformax.ops.{module}"), name)
    except (SyntaxError, ValueError, AttributeError, ImportError):
        raise SettingError(
            f"op is {text!r}: expected a call such as 'lsh.lsh(chunk_len=64, n_hashes={{1, 2}})'"
        ) from None
    try:
        found = [
            factory(**dict(zip(options, values, strict=True)))
            for values in itertools.product(*options.values())
        ]
    except TypeError as error:
        raise SettingError(f"op is {text!r}: {error}") from None
    return {f"{module}.{op}": op for op in found}


def _values(node: ast.expr) -> Iterator[Any]:
    return map(ast.literal_eval, node.elts if isinstance(node, ast.Set) else [node])


def at_equal_keys(points: Sequence[tuple[float, float]], n_keys: Sequence[int]) -> dict[int, float]:
    """The second numbers of `points` where the first are `n_keys`, on lines between the points."""
    first, second = zip(*sorted(points), strict=True)
    inside = [n for n in n_keys if first[0] <= n <= first[-1]]
    return dict(zip(inside, map(float, np.interp(inside, first, second)), strict=True))

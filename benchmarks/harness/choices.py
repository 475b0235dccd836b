"""What the choice among candidates loses of a trained indexer's exact choice, and its time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from benchmarks.harness import coverage
from benchmarks.harness.calls import Times, time_calls
from reformax.ops import dsa
from reformax.ops.indexing.candidates.base import Candidates
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks

# Queries that are looked at, spread evenly; the positions that codes learn from, as
# `coverage.own_weights` has them learn; seconds of the timed calls.
N_QUERIES, LEARNT_LENGTH, MOST = 256, 4096, 1.0


class Choice(NamedTuple):
    """A choice of keys.

    Attributes:
      times: of a call that chooses for all queries.
      recall: the share of the exact choice that is chosen.
      weight: the share of the attention's weight that falls on the chosen keys.
      keys: chosen ones of a query.
    """

    times: Times
    recall: float
    weight: float
    keys: float


def choice(
    candidates: Candidates | None, layer: coverage.Layer, rng: PRNGKeyArray, repeats: int
) -> Choice:
    """What a layer of `dsa` chooses among such candidates, by its trained indexer.

    Args:
      candidates: None: all keys.
      layer: from `coverage.layers`.
      rng: of hashes, and of codes before they learn.
      repeats: timed calls.
    """
    exact, chooses = (with_candidates(layer.op, x) for x in (None, candidates))
    params = weights_of(chooses, layer, rng)
    params, *arrays = jax.device_put((params, *layer[2:4], rng))
    call = functools.partial(_chosen, chooses, params, *arrays)
    times = time_calls(call, jax.block_until_ready, repeats, MOST)
    spread = jnp.linspace(0, layer.q.shape[1] - 1, N_QUERIES).astype(jnp.int32)
    own = {name: x for name, x in params.items() if name != "candidates"}
    found, wanted = call()[:, spread], _chosen(exact, own, *arrays)[:, spread]
    shares = _shares(*arrays[:2], spread, found, wanted)
    return Choice(times, *map(float, shares))


def with_candidates(op: dsa.dsa, candidates: Candidates | None) -> dsa.dsa:
    """The op with other candidates."""
    indexer = dataclasses.replace(op.indexer, candidates=candidates)
    options = {x.name: getattr(op, x.name) for x in dataclasses.fields(op)}
    return dsa.dsa(**options | dict(indexer=indexer, report_loss=False))


def weights_of(op: dsa.dsa, layer: coverage.Layer, rng: PRNGKeyArray) -> dict[str, Any]:
    """The layer's trained indexer, and weights of candidates that have learnt on its vectors."""
    own = {x: layer.params[x] for x in ("query", "key", "weight")}
    if not op.indexer.learns:
        return own
    q, k = (x[:, :LEARNT_LENGTH] for x in layer[2:4])
    params = own | {"candidates": op.init(rng, op.dims(q, q))["candidates"]}
    optimizer = optax.adam(coverage.LEARNING_RATE)
    state = optimizer.init(params["candidates"])
    for _ in range(coverage.N_LEARNT):
        slope = coverage.own_gradient(op, params, q, k, rng)["candidates"]
        updates, state = optimizer.update(slope, state)
        params["candidates"] = optax.apply_updates(params["candidates"], updates)
    return params


@functools.partial(jax.jit, static_argnums=0)
def _chosen(op: dsa.dsa, params, q, k, rng) -> Int[Array, "1 T K"]:
    return op.plan(params, q, k, segment_ids=None, causal=True, rng=rng, train=False)


@jax.jit
def _shares(
    q: Float[Array, "1 T N H"],
    k: Float[Array, "1 T N H"],
    at: Int[Array, " Q"],
    found: Int[Array, "1 Q K"],
    wanted: Int[Array, "1 Q K"],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The recall, the weight and the number of keys of the queries at some positions."""
    length, n_heads, size = k.shape[1:]

    def shares(q, at, found, wanted):
        is_wanted, is_found = (_members(x[0], length) for x in (wanted, found))
        recall = (is_wanted & is_found).sum(axis=-1) / is_wanted.sum(axis=-1)
        logits = jnp.einsum("qnh,snh->qns", q[0], k[0]) / size**0.5
        seen = jnp.arange(length) <= at[0][:, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
        weight = jnp.where(is_found[:, None], weights, 0).sum(axis=-1).mean(axis=-1)
        return jnp.stack([recall, weight, is_found.sum(axis=-1)], axis=-1)[None]

    each = by_chunks(shares, 4 * n_heads * length, q[:, at], at[None], found, wanted)
    return tuple(join_chunks(each, len(at))[0].mean(axis=0))


def _members(chosen: Int[Array, "Q K"], length: int) -> Array:
    """Whether each query chose each key, `[Q, S]`."""
    none = jnp.zeros((len(chosen), length), bool)
    at = jnp.where(chosen < 0, length, chosen)
    return none.at[jnp.arange(len(chosen))[:, None], at].set(True, mode="drop")

"""Metrics of predicted targets: each is one function here, and everything shows it.

A function takes `Predictions` and returns a value for each target and the weights of these. Its
name is that of a column in metrics.jsonl, TensorBoard and the results of evaluations. A run that
goes on from a checkpoint without the column has it from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Ratio(NamedTuple):
    """A sum over targets and the weight of these."""

    sum: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """The sum over the weight; 0 where nothing has weight."""
        return self.sum / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


class Predictions(NamedTuple):
    """A chunk of positions: their logits, and what the loss has made of them.

    Attributes:
      logits: in float32, or as the kernel of the loss reads them.
      best: the first id of the largest logit.
      nats: `-log p` of the target, without label smoothing.
      targets, weights: as in `loss.cross_entropy`.
    """

    logits: Float[Array, "B C V"]
    best: Int[Array, "B C"]
    nats: Float[Array, "B C"]
    targets: Int[Array, "B C"]
    weights: Float[Array, "B C"]


METRICS: dict[str, Callable[[Predictions], tuple[Array, Array]]] = {}


def metric(function):
    """Adds a function to `METRICS`."""
    METRICS[function.__name__] = function
    return function


@metric
def nats(found: Predictions) -> tuple[Array, Array]:
    """`-log p` of the target; shown in bits, see `loss.bits_of`."""
    return found.nats, found.weights


@metric
def accuracy(found: Predictions) -> tuple[Array, Array]:
    """Whether the most probable id is the target."""
    return found.best == found.targets, found.weights


def sums(found: Predictions) -> dict[str, Ratio]:
    """The float32 sums of each metric."""
    return {name: _ratio(*function(found)) for name, function in METRICS.items()}


def no_sums() -> dict[str, Ratio]:
    """The sums over nothing."""
    return {name: Ratio(*(jnp.zeros((), jnp.float32) for _ in range(2))) for name in METRICS}


def _ratio(values: Array, weights: Array) -> Ratio:
    return Ratio(jnp.sum(values.astype(jnp.float32) * weights), jnp.sum(weights))

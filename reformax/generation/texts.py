"""The state of texts that a model has read or written, from which it goes on.

A model whose attentions are recurrences needs nothing else of a text. A state can be kept, saved as
any tree of arrays, and shared by many continuations of one text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

T = TypeVar("T")


class TextState(NamedTuple):
    """The state of texts, a row each."""

    model: Any  # the model's, after all tokens but the last, with `position`
    token: Int[Array, " B"]  # the last one, which the model has not read
    drawn: Int[Array, ""]  # tokens drawn of each row, by which the seed's draws go on


class Resumed(NamedTuple):
    """Texts that are to be read on."""

    rows: list[Int[np.ndarray, " n"]]  # the tokens that the model has not read
    model: Any  # its state before them; None: they begin texts
    drawn: Int[Array, ""]
    n_longest: int  # tokens of the longest text, `rows` with it


def resumed(
    model, params, rows: Sequence[Int[np.ndarray, " n"]], state: TextState | None
) -> Resumed:
    """The texts of `state`, or new ones, that go on with `rows`.

    Raises:
      ValueError: the state is of another model, or of another number of rows.
      NotImplementedError: an attention of the model carries no state.
    """
    if state is None:
        return Resumed(list(rows), None, jnp.int32(0), max(map(len, rows)))
    model.check_carries_state()
    _check(model, params, state, len(rows))
    state = of_rows(state, len(rows))
    rows = [np.append(token, row) for token, row in zip(np.asarray(state.token), rows, strict=True)]
    n_read = np.asarray(state.model.position) - 1  # of them the first is the model's own
    n_longest = int(np.max(n_read + [len(row) for row in rows]))
    return Resumed(rows, state.model, jnp.int32(state.drawn), n_longest)


def _check(model, params, state: Any, n_rows: int) -> None:
    if not isinstance(state, TextState):
        raise ValueError(
            f"state is of type {type(state).__name__}: expected one from generation.read or of a "
            "call with return_state=True"
        )
    n = len(state.token)
    if n not in (1, n_rows):
        raise ValueError(f"state has {n} rows and prompts {n_rows}: expected as many, or one row")
    shapes = _first_state.eval_shape(model, n, params)
    if (
        np.max(state.token) >= model.vocab_size
        or jax.tree.structure(state.model) != jax.tree.structure(shapes)
        or any(
            (x.shape, x.dtype) != (y.shape, y.dtype)
            for x, y in zip(*map(jax.tree.leaves, (state.model, shapes)), strict=True)
        )
    ):
        raise ValueError("state is of another model: read its text again, by generation.read")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _first_state(model, n: int, params) -> Any:
    """A state of n rows, for its shapes: they are traced once."""
    return model.prefill(params, jnp.zeros((n, 1), int), jnp.ones(n, int), capacity=2)[1]


def of_rows(tree: T, n: int) -> T:
    """The first n rows of a tree of arrays; the last one stands for those that are missing."""

    def first(x):
        if not jnp.ndim(x) or len(x) == n:
            return x
        return x[np.minimum(np.arange(n), len(x) - 1)]

    return jax.tree.map(first, tree)


def where_rows(mask: Bool[Array, " B"], tree: T, other: T) -> T:
    """The rows of `tree` where the mask is True, and of `other` elsewhere."""
    return jax.tree.map(
        lambda x, y: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), tree, other
    )

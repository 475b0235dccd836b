"""The state of texts that a model has read or written, from which it goes on.

It is the caches of all layers: of a recurrence a state of one size, of other attention the keys and
values of the text, with room for a number of tokens. A state can be kept, saved as any tree of
arrays, and shared by many continuations of one text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from reformax import devices
from reformax.declared import SettingError


class TextState(NamedTuple):
    """The state of texts, a row each."""

    model: Any  # the model's, after all tokens but the last, with `position`
    token: Int[Array, " B"]  # the last one, which the model has not read
    drawn: Int[Array, ""]  # tokens drawn of each row, by which the seed's draws go on
    room: Int[Array, ""]  # the most tokens of a text; 0: any number
    parts: Int[Array, ""]  # as in `parts_of`, of the mesh that divides the caches


def parts_of(mesh: Mesh | None) -> int:
    """The number of devices that each have a part of a text's positions."""
    return 1 if mesh is None else devices.n_sequence_shards(mesh)


class Resumed(NamedTuple):
    """Texts that are to be read on."""

    rows: list[Int[np.ndarray, " n"]]  # the tokens that the model has not read
    model: Any  # its state before them; None: they begin texts
    drawn: Int[Array, ""]
    n_before: Sequence[int]  # tokens of each text before its row
    room: int  # as in `TextState`, of `model`

    @property
    def n_each(self) -> list[int]:
        """Tokens of each text, its row with it."""
        return [n + len(row) for n, row in zip(self.n_before, self.rows, strict=True)]


def resumed(
    model,
    params,
    rows: Sequence[Int[np.ndarray, " n"]],
    state: TextState | None,
    n_new: int,
    max_length: int | None = None,
    mesh: Mesh | None = None,
) -> Resumed:
    """The texts of `state`, or new ones, that go on with `rows` and `n_new` tokens on a mesh.

    Raises:
      ValueError: the state is of another model, mesh, number of rows or length, or full.
      NotImplementedError: an attention of the model cannot decode.
    """
    if state is None:
        return Resumed(list(rows), None, jnp.int32(0), [0] * len(rows), 0)
    _check(model, params, state, len(rows), mesh)
    state = of_rows(model, state, len(rows))
    rows = [np.append(token, row) for token, row in zip(np.asarray(state.token), rows, strict=True)]
    n_read = np.asarray(state.model.position) - 1  # of them the first is the model's own
    room = int(state.room)
    texts = Resumed(rows, state.model, jnp.int32(state.drawn), n_read.tolist(), room)
    n_all = max(texts.n_each) + n_new
    if room and max_length not in (None, room):
        raise SettingError(
            f"max_length is {max_length}: state has room for texts of {room} tokens, which stays: "
            "leave max_length out, or read the text again by generation.read with that"
        )
    if room and n_all > room:
        raise SettingError(
            f"state has room for texts of {room} tokens, and prompts and new tokens make "
            f"{n_all}: read the text again by generation.read with a larger max_length"
        )
    return texts


def _check(model, params, state: Any, n_rows: int, mesh: Mesh | None) -> None:
    if not isinstance(state, TextState):
        raise ValueError(
            f"state is of type {type(state).__name__}: expected one from generation.read or of a "
            "call with return_state=True"
        )
    n = len(state.token)
    if n not in (1, n_rows):
        raise ValueError(f"state has {n} rows and prompts {n_rows}: expected as many, or one row")
    # Whole caches have positions in another order than divided ones. Those of one size are whole.
    before, now = int(state.parts), parts_of(mesh)
    if before != now and model.endless_from is None:
        raise SettingError(
            f"state has caches of context={before}, and this call's mesh and divide_caches have "
            f"context={now}: give those with which its text was read, or read it again"
        )
    capacity = int(state.room) or model.endless_from  # None: its texts all end
    given = mesh, params, jax.random.PRNGKey(0), np.zeros(n, np.int32)
    shapes = capacity and compiled_first_state.eval_shape(model, capacity, *given)
    if (
        np.max(state.token) >= model.vocab_size
        or jax.tree.structure(state.model) != jax.tree.structure(shapes)
        or any(
            (x.shape, x.dtype) != (y.shape, y.dtype)
            for x, y in zip(*map(jax.tree.leaves, (state.model, shapes)), strict=True)
        )
    ):
        raise ValueError("state is of another model: read its text again, by generation.read")


def first_state(model, n: int, capacity: int, mesh, params, rng) -> Any:
    """The model's state before n texts of up to `capacity` tokens, on the devices of the mesh."""
    zeros = devices.placed(mesh, np.zeros(n, np.int32), ())[0]
    return compiled_first_state(model, capacity, mesh, params, rng, zeros)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def compiled_first_state(model, capacity: int, mesh, params, rng, zeros: Int[Array, " B"]) -> Any:
    """`first_state`, of zeros by which JAX knows the devices: nothing else may be read."""
    options = dict(batch=len(zeros), capacity=capacity, rng=rng)
    state = devices.on(mesh, functools.partial(model.first_state, **options))(params)
    return state._replace(position=state.position + zeros)


def of_rows(model, state: TextState, n: int) -> TextState:
    """The first n rows of a state; the last one stands for those that are missing."""
    n_rows = len(state.token)
    if n == n_rows:
        return state
    rows = np.minimum(np.arange(n), n_rows - 1)
    return state._replace(model=model.take_rows(state.model, rows), token=state.token[rows])

"""How texts are read: whole, or in pieces, each from the state after those before it.

Then memory besides the caches does not grow with the text. A piece computes what a step for each
token would.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from reformax import devices, memory
from reformax.declared import SettingError
from reformax.generation.prompts import in_pieces, padded, rounded
from reformax.generation.texts import Resumed, compiled_first_state, first_state, parts_of

# Prompts that are longer are read in pieces of so many tokens, where that computes the same.
PIECE = 65_536


class Reading(NamedTuple):
    """How texts are read."""

    capacity: int  # of caches that begin
    rng: Array  # of their hashes
    mesh: Mesh | None
    n_row_shards: int  # that rows are a multiple of
    piece: int | None  # tokens at a time; None: all


def reading_of(model, texts: Resumed, capacity, hash_seed, mesh, n_row_shards, piece) -> Reading:
    """How texts are read, `piece` tokens at a time; None: as the model and the mesh ask for."""
    longest, divided = max(map(len, texts.rows)), parts_of(mesh)
    piece = piece and int(piece)
    if piece is None and longest > PIECE and model.reads_ahead:
        piece = PIECE
    if divided > 1:
        size = piece or min(PIECE, rounded(longest + 1))
        piece = size + -size % divided
    rng = jax.random.fold_in(jax.random.PRNGKey(hash_seed), 0)
    return Reading(capacity, rng, mesh, n_row_shards, piece)


def check_readable(model, params, texts: Resumed, n_new: int, reading: Reading) -> None:
    """Raises `SettingError` for texts that the model cannot read on by n new tokens.

    Their keys would rotate otherwise on the way, the devices cannot hold their caches, or the model
    has none.
    """
    _check_angles(model, texts, n_new, reading)
    if texts.model is None:
        _check_memory(model, params, texts, reading)


def _check_memory(model, params, texts: Resumed, reading: Reading) -> None:
    """Raises `SettingError` for caches that the devices cannot hold, or a model that has none."""
    capacity, rng, mesh, n_row_shards, piece = reading
    n_rows, n_devices = len(texts.rows), n_row_shards
    if piece is None:
        tokens, lengths = padded(texts.rows, n_row_shards, capacity - 1)
        held = prefill.eval_shape(model, capacity, mesh, params, tokens, lengths, rng)
    else:
        zeros = np.zeros(-(-n_rows // n_row_shards) * n_row_shards, np.int32)
        held = compiled_first_state.eval_shape(model, capacity, mesh, params, rng, zeros)
        n_devices *= parts_of(mesh)
    memory.check(
        f"caches of {n_rows:,} rows of {capacity:,} tokens",
        memory.size_of(held) // n_devices,
        "max_length, max_new_tokens or num_samples",
    )


def _check_angles(model, texts: Resumed, n_new: int, reading: Reading) -> None:
    """Raises `SettingError` for a text on whose way all earlier keys would rotate otherwise."""
    border = model.angles_change_after
    if border is None:
        return
    for n_before, n in zip(texts.n_before, texts.n_each, strict=True):
        if n < border < n + n_new:
            raise SettingError(
                f"max_new_tokens is {n_new}: after a prompt of {n} tokens the text would pass "
                f"rotary_trained_length={border}, where keys that are cached would rotate by other "
                f"factors: at most {border - n} can be generated, or give a prompt of {border}"
            )
        if n_before < border < n and (texts.model is not None or reading.piece is not None):
            raise SettingError(
                f"prompts has a text of {n} tokens, and not all are read at once: it would pass "
                f"rotary_trained_length={border}, where keys that are cached would rotate by other "
                "factors: give the whole text, without prompt_piece"
            )


def mesh_of(mesh: Mesh | None, n_rows: int, divide_caches: bool) -> tuple[Mesh | None, int]:
    """The mesh that divides so many rows, and into how many shards."""
    if divide_caches:
        if mesh is None or devices.n_sequence_shards(mesh) == 1:
            raise SettingError(
                "divide_caches is True and the mesh has no axis context of several devices: give "
                "one, as of training.mesh.make({'context': 4})"
            )
        return mesh, devices.n_row_shards(mesh)
    mesh = devices.whole_sequences(mesh)
    n_row_shards = 1 if mesh is None else devices.n_row_shards(mesh)
    if mesh is not None and n_rows < n_row_shards and mesh.shape["fsdp"] == 1:
        return None, 1  # some devices would have no row
    return mesh, n_row_shards


def read_texts(model, params, texts: Resumed, reading: Reading) -> tuple[Array, Any]:
    """The logits of each row's next token, and the model's state after its tokens."""
    capacity, rng, mesh, n_row_shards, piece = reading
    if texts.model is None and piece is None:
        tokens, lengths = padded(texts.rows, n_row_shards, capacity - 1)
        tokens, lengths = devices.placed(mesh, (tokens, lengths), ())[0]
        return prefill(model, capacity, mesh, params, tokens, lengths, rng)
    rows, state = texts.rows, texts.model
    n_rows = -(-len(rows) // n_row_shards) * n_row_shards
    if state is None:
        state = first_state(model, n_rows, capacity, mesh, params, rng)
        rows = [np.append(np.int32(model.first_token), row) for row in rows]
    else:  # the loop donates it
        if n_rows != (n := len(state.position)):
            state = model.take_rows(state, np.minimum(np.arange(n_rows), n - 1))
        state = jax.tree.map(jnp.copy, state)
    logits = None
    for tokens, lengths in in_pieces(rows, n_row_shards, piece, model.max_length or np.inf):
        tokens, lengths = devices.placed(mesh, (tokens, lengths), ())[0]
        found, state = read_piece(model, mesh, params, tokens, lengths, state)
        logits = found if logits is None else jnp.where(lengths[:, None] > 0, found, logits)
    return logits, state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def prefill(model, capacity, mesh, params, tokens, lengths, rng):
    """Reads whole prompts."""
    call = devices.on(mesh, functools.partial(model.prefill, capacity=capacity))
    return call(params, tokens, lengths, rng=rng)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def read_piece(model, mesh, params, tokens, lengths, state):
    """Reads some tokens more of each row."""
    call = devices.on(mesh, functools.partial(model.prefill, capacity=0))
    return call(params, tokens, lengths, state=state)

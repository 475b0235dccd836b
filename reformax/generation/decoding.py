"""Decoding: one forward pass reads the prompts, then one compiled step draws each token.

The compiled programs depend on the model, the number of rows and two lengths: that of the longest
prompt, rounded up to a few sizes, and the capacity of the cache. Other prompts, numbers of new
tokens, seeds and sampling settings run the same programs, of which there are two: one ranks tokens
to leave some out.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from reformax import devices, memory
from reformax.declared import (
    AnySeed,
    Bounds,
    Count,
    SettingError,
    Size,
    check_all,
    hints_of,
)
from reformax.generation.prompts import capacity_of, padded, rows_of
from reformax.generation.sampling import Sampler
from reformax.generation.texts import TextState, of_rows, resumed, where_rows

# The most new tokens that one call computes: the host waits once for all of them.
BLOCK = 64
Block = Annotated[int, Bounds(1, BLOCK)]
End = Count | Sequence[Count] | None


class _Draws(NamedTuple):
    """The settings of drawing tokens, as arrays."""

    sampler: Sampler  # its fields are arrays
    key: Array
    ends: Int[Array, " E"]  # -1: none

    def ended_by(self, token: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether a token ends its row."""
        return jnp.any(token[:, None] == self.ends[None], axis=1)


class _State(NamedTuple):
    """The state that goes from one token to the next."""

    decoding: Any  # the model's
    token: Int[Array, " B"]  # the last one drawn
    done: Bool[Array, " B"]  # whether a row has ended
    count: Int[Array, ""]  # tokens drawn in each row


def ends_of(end: End) -> list[int]:
    """The tokens that end a row."""
    return list(end) if isinstance(end, Sequence) else [] if end is None else [end]


def generate(
    model,
    params,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end: End = None,
    return_state: bool = False,
    **options,
) -> list[np.ndarray] | tuple[list[np.ndarray], TextState]:
    """Continues prompts.

    Args:
      model: as in `stream`, and the other arguments.
      params: its weights.
      prompts: the tokens of each.
      max_new_tokens: tokens to add to each.
      end: a token that ends a row, or several.
      return_state: whether to return the texts' state too.
      **options: the other arguments of `stream`.

    Returns:
      The new tokens of each row, up to and with its first `end`; and the state.

    Raises:
      ValueError: as `stream`.
      NotImplementedError: as `stream`.
    """
    options |= dict(end=end, return_state=return_state)
    blocks, state = _all_of(stream(model, params, prompts, max_new_tokens, **options))
    rows = list(np.concatenate(blocks, axis=1))
    ends = [np.isin(row, ends_of(end)) for row in rows]
    rows = [row[: np.argmax(x) + 1] if x.any() else row for row, x in zip(rows, ends, strict=True)]
    return (rows, state) if return_state else rows


def _all_of(generator: Generator) -> tuple[list[Any], Any]:
    """What a generator yields, and what it returns."""
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as stop:
            return items, stop.value


def stream(
    model,
    params,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Size,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: AnySeed = 0,
    hash_seed: AnySeed = 0,
    end: End = None,
    max_length: Size | None = None,
    every: Block = BLOCK,
    mesh: Mesh | None = None,
    state: TextState | None = None,
    return_state: bool = False,
) -> Generator[np.ndarray, None, TextState | None]:
    """Continues prompts and hands out the tokens as they come.

    The next tokens are computed while the last are handed out.

    Args:
      model: a language model built for evaluation, with `prefill` and `step`, and for states with
        `check_carries_state`.
      params: its weights.
      prompts: the tokens of each, of any lengths; an empty one begins a text.
      max_new_tokens: tokens to add to each.
      temperature: see `Sampler`, as for the next two.
      top_k: the number of most probable tokens to draw from.
      top_p: the probability of the tokens to draw from.
      seed: of the draws. A row's text depends on the seed, its index among the rows and its prompt.
      hash_seed: of the hashes of LSH attention, as `seed` in `training.evaluation.evaluate`.
      end: a token that ends a row, or several. The row then repeats the first of them until all
        rows have ended.
      max_length: tokens that the cache holds, prompt and new tokens together. LSH's
        `n_buckets="auto"` goes by it. None: as many as needed, rounded up.
      every: tokens to hand out together, 1 to `BLOCK`.
      mesh: devices that share the rows; None: one device.
      state: of the texts that the prompts go on from, a row for each prompt or one for all, from
        `read` or an earlier call. All attentions of the model must carry a state. With the seed of
        the earlier call this one draws what that would have drawn next, but for rounding. None:
        prompts begin texts.
      return_state: whether the generator returns the state of the texts, to `yield from`. A row
        that has ended stays at its `end`.

    Yields:
      New tokens `[B, n]`; the first array has one token of each row.

    Raises:
      ValueError: an argument out of range, or more tokens than `max_length` or the model's
        positions hold.
      NotImplementedError: an attention of the model cannot decode, or carries no state.
    """
    mesh, shares = _mesh_of(mesh, len(prompts))
    rows = rows_of(prompts, model.vocab_size)
    settings = dict(max_new_tokens=max_new_tokens, max_length=max_length, end=end, every=every)
    check_all(hints_of(stream), settings | dict(seed=seed, hash_seed=hash_seed))
    max_new_tokens = int(max_new_tokens)  # `rounded` takes no whole numbers of NumPy
    ends = ends_of(end)
    if max(ends, default=0) >= model.vocab_size:
        raise SettingError(f"end is {end}: expected a token below {model.vocab_size}, or None")
    sampler = Sampler(temperature, top_k, top_p).check()
    if return_state:
        model.check_carries_state()
    texts = resumed(model, params, rows, state)
    _check_angles(model, rows, max_new_tokens)
    capacity = capacity_of(texts.n_longest, max_new_tokens, max_length, model.max_length)
    # A state has room for any length, so that one program reads further lengths too.
    most = capacity if texts.model is None else model.max_length or np.inf
    tokens, lengths = padded(texts.rows, shares, most - 1)
    draws = _Draws(
        sampler.arrays(),
        jax.random.PRNGKey(seed),
        jnp.array(ends or [-1], jnp.int32),
    )
    hash_rng = jax.random.fold_in(jax.random.PRNGKey(hash_seed), 0)
    given = tokens, lengths, of_rows(texts.model, len(tokens))
    (tokens, lengths, before), params = devices.placed(mesh, given, params)
    if before is not None:
        capacity = tokens.shape[1] + 1
    arrays = params, tokens, lengths, np.int32(len(prompts)), draws, hash_rng, before, texts.drawn
    start = functools.partial(_start, model, capacity, mesh, *arrays)
    memory.check(
        f"caches of {len(prompts):,} rows of {capacity:,} tokens",
        memory.size_of(_start.eval_shape(*start.args)) // shares,
        "max_length, max_new_tokens or num_samples",
    )
    n_rows = len(prompts), max_new_tokens, every
    return _blocks(model, mesh, params, start, draws, *n_rows, return_state)


def read(
    model,
    params,
    prompts: Sequence[Sequence[int]],
    *,
    state: TextState | None = None,
    mesh: Mesh | None = None,
) -> TextState:
    """Reads prompts, to go on from them in several calls of `generate`, `stream` or `read`.

    Args:
      model: as in `stream`. All its attentions must carry a state.
      params: its weights.
      prompts: the tokens of each, of any lengths. One that begins a text has at least one token.
      state: of the texts that they go on from, as in `stream`.
      mesh: devices that share the rows; None: one device.

    Returns:
      The state of each row's text. Its size does not depend on the text's length.

    Raises:
      ValueError: a prompt begins a text and is empty, or has more tokens than the model's positions
        hold.
      NotImplementedError: an attention of the model carries no state.
    """
    mesh, shares = _mesh_of(mesh, len(prompts))
    rows = rows_of(prompts, model.vocab_size)
    model.check_carries_state()
    texts = resumed(model, params, rows, state)
    for i, row in enumerate(texts.rows):
        if not len(row):
            raise ValueError(f"prompts[{i}] is empty: expected a token, as no state is given")
    most = model.max_length or np.inf
    if texts.n_longest > most:
        raise SettingError(
            f"prompts has a text of {texts.n_longest} tokens: the model's positions hold {most}"
        )
    last = np.array([row[-1] for row in texts.rows], np.int32)
    tokens, lengths = padded([row[:-1] for row in texts.rows], shares, most - 1)
    if not tokens.size:  # nothing is left to read, and attention takes at least one position
        tokens = np.zeros((len(tokens), 1), np.int32)
    given = tokens, lengths, of_rows(texts.model, len(tokens))
    (tokens, lengths, before), params = devices.placed(mesh, given, params)
    found = _read(model, mesh, params, tokens, lengths, before)
    return TextState(of_rows(found, len(last)), last, texts.drawn)


def _check_angles(model, rows: Sequence[np.ndarray], n_new: int) -> None:
    """Raises `SettingError` for a text on whose way all earlier keys would rotate otherwise."""
    border = getattr(model, "angles_change_after", None)
    for n in map(len, rows) if border is not None else ():
        if n < border < n + n_new:
            raise SettingError(
                f"max_new_tokens is {n_new}: after a prompt of {n} tokens the text would pass "
                f"rotary_trained_length={border}, where keys that are cached would rotate by other "
                f"factors: at most {border - n} can be generated, or give a prompt of {border}"
            )


def _mesh_of(mesh: Mesh | None, n_rows: int) -> tuple[Mesh | None, int]:
    """The mesh that shares so many rows, and in how many parts."""
    mesh = devices.whole_sequences(mesh)
    shares = 1 if mesh is None else devices.n_row_shards(mesh)
    if mesh is not None and n_rows < shares and mesh.shape["fsdp"] == 1:
        return None, 1  # some devices would have no row
    return mesh, shares


def _blocks(
    model,
    mesh,
    params,
    start,
    draws: _Draws,
    n_prompts: int,
    n_new: int,
    every: int,
    return_state: bool,
) -> Generator[np.ndarray, None, TextState | None]:
    state = start()
    # The next call donates the state, so copies of it are handed out.
    ready, done = jnp.copy(state.token)[:, None], jnp.copy(state.done)
    left = n_new - 1
    params = for_decoding(model, mesh, params)
    while left:
        n = min(every, left)
        state, block = _go_on(model, mesh, return_state, params, state, draws, jnp.int32(n))
        yield np.asarray(ready)[:n_prompts]
        if np.all(done):
            break
        ready, done, left = block[:, :n], jnp.copy(state.done), left - n
    else:
        yield np.asarray(ready)[:n_prompts]
    if not return_state:
        return None
    return of_rows(TextState(state.decoding, state.token, state.count), n_prompts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def for_decoding(model, mesh, params) -> Any:
    """The weights as a model's steps take them, on the devices of a mesh."""
    return devices.on(mesh, model.for_decoding)(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _start(
    model, capacity, mesh, params, tokens, lengths, n_real, draws: _Draws, hash_rng, before, drawn
):
    """Reads the prompts and draws the first token of each row; rows from `n_real` on have ended."""
    logits, decoding = _prefill(model, capacity, mesh, params, tokens, lengths, hash_rng, before)
    n_rows = tokens.shape[0]
    token = draws.sampler.draw(logits, _keys(draws.key, drawn, n_rows))
    done = draws.ended_by(token) | (jnp.arange(n_rows) >= n_real)
    return _State(decoding, token, done, drawn + 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(model, mesh, params, tokens, lengths, before):
    """The model's state after the rows."""
    capacity = tokens.shape[1] + 1
    return _prefill(model, capacity, mesh, params, tokens, lengths, None, before)[1]


def _prefill(model, capacity, mesh, params, tokens, lengths, rng, before):
    prefill = devices.on(mesh, functools.partial(model.prefill, capacity=capacity))
    given = {} if before is None else {"state": before}
    return prefill(params, tokens, lengths, rng=rng, **given)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _go_on(
    model, mesh, keep_ended: bool, params, state: _State, draws: _Draws, n_new: Int[Array, ""]
) -> tuple[_State, Int[Array, "B n"]]:
    """Draws `n_new` tokens of each row into the first columns; stops when all rows have ended.

    A row that has ended keeps its last token, and with `keep_ended` its state.
    """
    n_rows, step = state.token.shape[0], devices.on(mesh, model.step)

    def more(carry):
        i, state, _ = carry
        return (i < n_new) & ~jnp.all(state.done)

    def draw(carry):
        i, state, out = carry
        logits, decoding = step(params, state.token, state.decoding)
        if keep_ended:
            decoding = where_rows(state.done, state.decoding, decoding)
        token = draws.sampler.draw(logits, _keys(draws.key, state.count, n_rows))
        token = jnp.where(state.done, state.token, token)
        shown = jnp.where(state.done, draws.ends[0], token)
        state = _State(decoding, token, state.done | draws.ended_by(token), state.count + 1)
        return i + 1, state, out.at[:, i].set(shown)

    out = jnp.full((n_rows, BLOCK), draws.ends[0], jnp.int32)
    _, state, out = jax.lax.while_loop(more, draw, (jnp.int32(0), state, out))
    return state, out


def _keys(key, count: Int[Array, ""], n_rows: int) -> Array:
    """The key of each row's draw number `count`."""
    key = jax.random.fold_in(key, count)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows))

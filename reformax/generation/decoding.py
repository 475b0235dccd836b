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

from reformax import devices
from reformax.declared import AnySeed, Bounds, Count, SettingError, Size, check_all, hints_of
from reformax.generation.prompts import capacity_of, rounded, rows_of
from reformax.generation.reading import check_readable, mesh_of, read_texts, reading_of
from reformax.generation.sampling import Sampler
from reformax.generation.texts import Resumed, TextState, of_rows, parts_of, resumed

# The most new tokens that one call computes: the host waits once for all of them.
BLOCK = 64
Block = Annotated[int, Bounds(1, BLOCK)]
# Steps of a GPU from one look at whether all rows have ended to the next. For each look it waits
# for the host, which takes as long as a twentieth of a small model's step.
ROUND = 16
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
    """The values that a generator yields, and the one that it returns."""
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
    divide_caches: bool = False,
    prompt_piece: Size | None = None,
    state: TextState | None = None,
    return_state: bool = False,
) -> Generator[np.ndarray, None, TextState | None]:
    """Continues prompts and hands out the tokens as they come.

    The next tokens are computed while the last are handed out.

    Args:
      model: a language model built for evaluation, with `prefill` and `step`, and for states and
        pieces with the other methods of `models.LanguageModel` for decoding.
      params: its weights.
      prompts: the tokens of each, of any lengths; an empty one begins a text.
      max_new_tokens: tokens to add to each.
      temperature: see `Sampler`, as for the next two.
      top_k: the number of most probable tokens to draw from.
      top_p: the probability of the tokens to draw from.
      seed: of the draws. A row's text depends on the seed, its index among the rows and its prompt.
      hash_seed: of the hashes of LSH attention, as `seed` in `training.evaluation.evaluate`. Texts
        of a state keep theirs.
      end: a token that ends a row, or several. The row then repeats the first of them until all
        rows have ended.
      max_length: tokens that the cache holds, prompt and new tokens together. LSH's
        `n_buckets="auto"` goes by it. None: as many as needed, rounded up. With a state that has
        room for so many: None, or that.
      every: tokens to hand out together, 1 to `BLOCK`.
      mesh: devices that share the rows; None: one device.
      divide_caches: whether the devices along the mesh's axis `context` share each text, and not
        rows: each keeps its part of the positions that attention to all positions sees. Prompts are
        then read in pieces.
      prompt_piece: tokens of the prompts to read at a time. A token then sees what it would see in
        its own step of decoding. None: `PIECE` where the model's `reads_ahead` says that a piece
        computes what the whole does, and otherwise all.
      state: of the texts that the prompts go on from, a row for each prompt or one for all, from
        `read` or an earlier call whose caches were divided alike. With the seed of the earlier call
        this one draws what that would have drawn next, but for rounding. None: prompts begin texts.
      return_state: whether the generator returns the state of the texts, to `yield from`. A row
        that has ended stays at its `end`.

    Yields:
      New tokens `[B, n]`; the first array has one token of each row.

    Raises:
      ValueError: an argument out of range, or more tokens than `max_length`, the state or the
        model's positions hold.
      NotImplementedError: an attention of the model cannot decode.
    """
    mesh, n_row_shards = mesh_of(mesh, len(prompts), divide_caches)
    rows = rows_of(prompts, model.vocab_size)
    settings = dict(max_new_tokens=max_new_tokens, max_length=max_length, end=end, every=every)
    settings |= dict(prompt_piece=prompt_piece, divide_caches=divide_caches)
    check_all(hints_of(stream), settings | dict(seed=seed, hash_seed=hash_seed))
    max_new_tokens = int(max_new_tokens)  # `rounded` takes no whole numbers of NumPy
    ends = ends_of(end)
    if max(ends, default=0) >= model.vocab_size:
        raise SettingError(f"end is {end}: expected a token below {model.vocab_size}, or None")
    sampler = Sampler(temperature, top_k, top_p).check()
    texts = resumed(model, params, rows, state, max_new_tokens, max_length, mesh)
    capacity = capacity_of(max(texts.n_each), max_new_tokens, max_length, model.max_length)
    draws = _Draws(sampler.arrays(), jax.random.PRNGKey(seed), jnp.array(ends or [-1], jnp.int32))
    reading = reading_of(model, texts, capacity, hash_seed, mesh, n_row_shards, prompt_piece)
    weights = devices.placed(mesh, (), params)[1]
    check_readable(model, weights, texts, max_new_tokens, reading)

    def start() -> _State:
        logits, decoding = read_texts(model, weights, texts, reading)
        n_real = np.int32(len(prompts))
        return _first_draw(logits, decoding, n_real, draws, texts.drawn)

    sizes = len(prompts), max_new_tokens, every
    room = _room_of(model, texts, capacity, max_length) if return_state else None
    return _blocks(model, mesh, weights, start, draws, *sizes, room)


def read(
    model,
    params,
    prompts: Sequence[Sequence[int]],
    *,
    max_length: Size | None = None,
    hash_seed: AnySeed = 0,
    state: TextState | None = None,
    mesh: Mesh | None = None,
    divide_caches: bool = False,
    prompt_piece: Size | None = None,
) -> TextState:
    """Reads prompts, to go on from them in several calls of `generate`, `stream` or `read`.

    Args:
      model: as in `stream`, and the next two arguments.
      params: its weights.
      prompts: the tokens of each. One that begins a text has at least one token.
      max_length: the most tokens that a text of the state may have. None: any number where all
        attentions of the model are recurrences or windows, and otherwise as many as are given,
        rounded up, and as many again. With a state that has room for so many: None, or that.
      hash_seed: of the hashes of texts that begin, as in `stream`.
      state: of the texts that they go on from, as in `stream`.
      mesh: devices that share the rows; None: one device.
      divide_caches: as in `stream`.
      prompt_piece: as in `stream`.

    Returns:
      The state of each row's text.

    Raises:
      ValueError: a prompt begins a text and is empty, or has more tokens than the state or the
        model's positions hold.
      NotImplementedError: an attention of the model cannot decode.
    """
    given = dict(max_length=max_length, prompt_piece=prompt_piece, hash_seed=hash_seed)
    check_all(hints_of(read), given | dict(divide_caches=divide_caches))
    mesh, n_row_shards = mesh_of(mesh, len(prompts), divide_caches)
    rows = rows_of(prompts, model.vocab_size)
    texts = resumed(model, params, rows, state, 0, max_length, mesh)
    for i, row in enumerate(texts.rows):
        if not len(row):
            raise ValueError(f"prompts[{i}] is empty: expected a token, as no state is given")
    n, most = max(texts.n_each), model.max_length or np.inf
    if n > most:
        raise SettingError(f"prompts has a text of {n} tokens: the model's positions hold {most}")
    if max_length is not None and n > max_length:
        raise SettingError(f"prompts has a text of {n} tokens: max_length={max_length}, raise it")
    if max_length is None:
        endless = model.endless_from
        wanted = 2 * rounded(n) if endless is None else max(rounded(n + 1), endless)
        capacity = int(min(wanted, most))
    else:
        capacity = capacity_of(n, 0, max_length, model.max_length)
    last = np.array([row[-1] for row in texts.rows], np.int32)
    unread = texts._replace(rows=[row[:-1] for row in texts.rows])
    reading = reading_of(model, unread, capacity, hash_seed, mesh, n_row_shards, prompt_piece)
    params = devices.placed(mesh, (), params)[1]
    check_readable(model, params, unread, 0, reading)
    found = read_texts(model, params, unread, reading)[1]
    room = _room_of(model, texts, capacity, max_length)
    n_filled = -(-len(last) // n_row_shards) * n_row_shards
    filled = np.resize(last, n_filled)
    sizes = np.int32(room), np.int32(parts_of(mesh))
    return of_rows(model, TextState(found, filled, texts.drawn, *sizes), len(last))


def _room_of(model, texts: Resumed, capacity: int, max_length: int | None) -> int:
    """The most tokens of texts that go on from what was read; 0: any number."""
    if texts.model is not None:
        return texts.room  # that of their caches stays
    return 0 if max_length is None and model.is_endless(capacity) else capacity


def _blocks(
    model,
    mesh,
    params,
    start,
    draws: _Draws,
    n_prompts: int,
    n_new: int,
    every: int,
    room: int | None,
) -> Generator[np.ndarray, None, TextState | None]:
    state = start()
    return_state = room is not None
    # The next call donates the state, so copies of it are handed out.
    ready, done = jnp.copy(state.token)[:, None], jnp.copy(state.done)
    left = n_new - 1
    params = for_decoding(model, mesh, params)
    n_at_once = _steps_at_once(every, return_state)
    while left:
        n = min(every, left)
        static = model, mesh, return_state, n_at_once
        state, block = _go_on(*static, params, state, draws, jnp.int32(n))
        yield np.asarray(ready)[:n_prompts]
        if np.all(done):
            break
        ready, done, left = block[:, :n], jnp.copy(state.done), left - n
    else:
        yield np.asarray(ready)[:n_prompts]
    if not return_state:
        return None
    sizes = np.int32(room), np.int32(parts_of(mesh))
    text = TextState(state.decoding, state.token, state.count, *sizes)
    return of_rows(model, text, n_prompts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def for_decoding(model, mesh, params) -> Any:
    """The weights as a model's steps take them, on the devices of a mesh."""
    return devices.on(mesh, model.for_decoding)(params)


@jax.jit
def _first_draw(logits, decoding, n_real, draws: _Draws, drawn) -> _State:
    """The first token of each row; rows from `n_real` on have ended."""
    n_rows = len(logits)
    token = draws.sampler.draw(logits, _keys(draws.key, drawn, n_rows))
    done = draws.ended_by(token) | (jnp.arange(n_rows) >= n_real)
    return _State(decoding, token, done, drawn + 1)


def _steps_at_once(every: int, return_state: bool) -> int:
    """The steps of `_go_on` between two looks at its rows.

    The last steps may be more than were asked for. Nobody sees their tokens; a state that is
    returned must not have them.
    """
    exact = return_state or every % ROUND or jax.default_backend() == "cpu"
    return 1 if exact else ROUND


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _go_on(
    model,
    mesh,
    keep_ended: bool,
    n_at_once: int,
    params,
    state: _State,
    draws: _Draws,
    n_new: Int[Array, ""],
) -> tuple[_State, Int[Array, "B n"]]:
    """Draws `n_new` tokens of each row into the first columns; stops when all rows have ended.

    A row that has ended keeps its last token, and with `keep_ended` its state. `n_at_once` divides
    `BLOCK`: so many steps follow each look at the rows, and the last ones may go beyond `n_new`.
    """
    n_rows, step = state.token.shape[0], devices.on(mesh, model.step)

    def more(carry):
        i, state, _ = carry
        return (i < n_new) & ~jnp.all(state.done)

    def draw(_, carry):
        i, state, out = carry
        logits, decoding = step(params, state.token, state.decoding)
        if keep_ended:
            decoding = model.where_rows(state.done, state.decoding, decoding)
        token = draws.sampler.draw(logits, _keys(draws.key, state.count, n_rows))
        token = jnp.where(state.done, state.token, token)
        shown = jnp.where(state.done, draws.ends[0], token)
        state = _State(decoding, token, state.done | draws.ended_by(token), state.count + 1)
        return i + 1, state, out.at[:, i].set(shown)

    out = jnp.full((n_rows, BLOCK), draws.ends[0], jnp.int32)
    draw_some = functools.partial(jax.lax.fori_loop, 0, n_at_once, draw)
    _, state, out = jax.lax.while_loop(more, draw_some, (jnp.int32(0), state, out))
    return state, out


def _keys(key, count: Int[Array, ""], n_rows: int) -> Array:
    """The key of each row's draw number `count`."""
    key = jax.random.fold_in(key, count)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows))

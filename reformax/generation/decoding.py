"""Decoding: one forward pass reads the prompts, then one compiled step draws each token.

The compiled programs depend on the model, the number of rows and two lengths: that of the longest
prompt, rounded up to a few sizes, and the capacity of the cache. Other prompts, numbers of new
tokens, seeds and sampling settings run the same programs, of which there are two: one ranks tokens
to leave some out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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
    shown,
)
from reformax.generation.sampling import Sampler

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
    **options,
) -> list[np.ndarray]:
    """Continues prompts.

    Args:
      model: as in `stream`, and the other arguments.
      params: its weights.
      prompts: the tokens of each.
      max_new_tokens: tokens to add to each.
      end: a token that ends a row, or several.
      **options: the other arguments of `stream`.

    Returns:
      The new tokens of each row, up to and with its first `end`.

    Raises:
      ValueError: as `stream`.
      NotImplementedError: as `stream`.
    """
    blocks = stream(model, params, prompts, max_new_tokens, end=end, **options)
    rows = np.concatenate(list(blocks), axis=1)
    ends = np.isin(rows, ends_of(end))
    return [row[: np.argmax(x) + 1] if x.any() else row for row, x in zip(rows, ends, strict=True)]


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
) -> Iterator[np.ndarray]:
    """Continues prompts and hands out the tokens as they come.

    The next tokens are computed while the last are handed out.

    Args:
      model: a language model built for evaluation, with `prefill` and `step`.
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

    Yields:
      New tokens `[B, n]`; the first array has one token of each row.

    Raises:
      ValueError: an argument out of range, or more tokens than `max_length` or the model's
        positions hold.
      NotImplementedError: an attention of the model cannot decode.
    """
    mesh = devices.whole_sequences(mesh)
    shares = 1 if mesh is None else devices.n_row_shards(mesh)
    if mesh is not None and len(prompts) < shares and mesh.shape["fsdp"] == 1:
        mesh, shares = None, 1  # some devices would have no row
    tokens, lengths = _padded(prompts, model.vocab_size, shares)
    settings = dict(max_new_tokens=max_new_tokens, max_length=max_length, end=end, every=every)
    check_all(hints_of(stream), settings | dict(seed=seed, hash_seed=hash_seed))
    max_new_tokens = int(max_new_tokens)  # `rounded` takes no whole numbers of NumPy
    ends = ends_of(end)
    if max(ends, default=0) >= model.vocab_size:
        raise SettingError(f"end is {end}: expected a token below {model.vocab_size}, or None")
    sampler = Sampler(temperature, top_k, top_p).check()
    capacity = _capacity(int(lengths.max()), max_new_tokens, max_length, model.max_length)
    n_prompt = min(rounded(int(lengths.max())), capacity - 1)
    tokens = np.pad(tokens, ((0, 0), (0, n_prompt - tokens.shape[1])))
    draws = _Draws(
        sampler.arrays(),
        jax.random.PRNGKey(seed),
        jnp.array(ends or [-1], jnp.int32),
    )
    hash_rng = jax.random.fold_in(jax.random.PRNGKey(hash_seed), 0)
    (tokens, lengths), params = devices.placed(mesh, (tokens, lengths), params)
    arrays = params, tokens, lengths, np.int32(len(prompts)), draws, hash_rng
    start = functools.partial(_start, model, capacity, mesh, *arrays)
    state = _start.eval_shape(*start.args)
    memory.check(
        f"caches of {len(prompts):,} rows of {capacity:,} tokens",
        memory.size_of(state) // shares,
        "max_length, max_new_tokens or num_samples",
    )
    blocks = _blocks(model, mesh, params, start, draws, max_new_tokens, every)
    return (block[: len(prompts)] for block in blocks)


def _blocks(
    model, mesh, params, start, draws: _Draws, n_new: int, every: int
) -> Iterator[np.ndarray]:
    state = start()
    # The next call donates the state, so copies of it are handed out.
    ready, done = jnp.copy(state.token)[:, None], jnp.copy(state.done)
    left = n_new - 1
    params = for_decoding(model, mesh, params)
    while left:
        n = min(every, left)
        state, block = _go_on(model, mesh, params, state, draws, jnp.int32(n))
        yield np.asarray(ready)
        if np.all(done):
            return
        ready, done, left = block[:, :n], jnp.copy(state.done), left - n
    yield np.asarray(ready)


@functools.partial(jax.jit, static_argnums=(0, 1))
def for_decoding(model, mesh, params) -> Any:
    """The weights as a model's steps take them, on the devices of a mesh."""
    return devices.on(mesh, model.for_decoding)(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _start(model, capacity, mesh, params, tokens, lengths, n_real, draws: _Draws, hash_rng):
    """Reads the prompts and draws the first token of each row; rows from `n_real` on have ended."""
    prefill = devices.on(mesh, functools.partial(model.prefill, capacity=capacity))
    logits, decoding = prefill(params, tokens, lengths, rng=hash_rng)
    count, n_rows = jnp.int32(0), tokens.shape[0]
    token = draws.sampler.draw(logits, _keys(draws.key, count, n_rows))
    done = draws.ended_by(token) | (jnp.arange(n_rows) >= n_real)
    return _State(decoding, token, done, count + 1)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _go_on(
    model, mesh, params, state: _State, draws: _Draws, n_new: Int[Array, ""]
) -> tuple[_State, Int[Array, "B n"]]:
    """Draws `n_new` tokens of each row into the first columns; stops when all rows have ended."""
    n_rows, step = state.token.shape[0], devices.on(mesh, model.step)

    def more(carry):
        i, state, _ = carry
        return (i < n_new) & ~jnp.all(state.done)

    def draw(carry):
        i, state, out = carry
        logits, decoding = step(params, state.token, state.decoding)
        token = draws.sampler.draw(logits, _keys(draws.key, state.count, n_rows))
        token = jnp.where(state.done, draws.ends[0], token)
        state = _State(decoding, token, state.done | draws.ended_by(token), state.count + 1)
        return i + 1, state, out.at[:, i].set(token)

    out = jnp.full((n_rows, BLOCK), draws.ends[0], jnp.int32)
    _, state, out = jax.lax.while_loop(more, draw, (jnp.int32(0), state, out))
    return state, out


def _keys(key, count: Int[Array, ""], n_rows: int) -> Array:
    """The key of each row's draw number `count`."""
    key = jax.random.fold_in(key, count)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows))


def _padded(
    prompts: Sequence[Sequence[int]], vocab_size: int, shares: int
) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as an array padded on the right, and their lengths.

    Empty prompts at the end make their number a multiple of `shares`.
    """
    rows = [as_tokens(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts is empty: expected at least one prompt, which may be empty")
    for i, row in enumerate(rows):
        if row.size and not (row.min() >= 0 and row.max() < vocab_size):
            raise SettingError(
                f"prompts[{i}] has tokens from {row.min()} to {row.max()}: expected 0 to "
                f"{vocab_size - 1}, as the model's vocab_size is {vocab_size}"
            )
    lengths = np.array([len(row) for row in rows] + [0] * (-len(rows) % shares), np.int32)
    tokens = np.zeros((len(lengths), lengths.max()), np.int32)
    for row, prompt in zip(tokens, rows, strict=False):
        row[: len(prompt)] = prompt
    return tokens, lengths


def as_tokens(name: str, tokens: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Tokens as an array; raises `ValueError` for what is no sequence of whole numbers."""
    try:
        row = np.asarray(tokens)
    except ValueError:  # sequences of several lengths
        raise SettingError(f"{name} is {shown(tokens)}: expected token numbers alone") from None
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(
            f"{name} has shape {row.shape} and dtype {row.dtype}: expected a sequence of token "
            "numbers"
        )
    return row


def rounded(length: int) -> int:
    """The next of a few lengths: multiples of 64, or of an eighth of the power of two below."""
    size = max(64, 2 ** (length.bit_length() - 4))
    return -(-length // size) * size


def _capacity(n_prompt: int, n_new: int, requested: int | None, most: int | None) -> int:
    needed = n_prompt + n_new
    for name, limit in (
        ("max_length", requested),
        ("the length that the model's positions hold", most),
    ):
        if limit is not None and needed > limit:
            raise SettingError(
                f"max_new_tokens is {n_new}: with a prompt of {n_prompt} tokens that is {needed}, "
                f"above {name}, {limit}: request fewer or shorten the prompt"
            )
    if requested is not None:
        if most is not None and requested > most:
            raise SettingError(
                f"max_length is {requested}: the model's positions hold {most}, lower it to that"
            )
        return requested
    return rounded(needed) if most is None else min(rounded(needed), most)

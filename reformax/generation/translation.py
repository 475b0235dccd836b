"""Translates any number of sentences: batches of similar lengths, and text in and out.

The arithmetic of a sentence depends on its own length alone. The length decides which of a few
sizes it is padded to, and the room for its translation. In a call, all batches of one size have the
same number of rows, empty ones included. So the order of the sentences changes no translation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from reformax import devices
from reformax.declared import (
    AnySeed,
    Beams,
    Extra,
    NonNegative,
    SettingError,
    Size,
    check_all,
    hints_of,
    shown,
)
from reformax.generation import beam, decoding, prompts
from reformax.progress import Progress

# Batches dispatched before the first one's result is waited for.
_IN_FLIGHT = 2
_SHORTEST = 16


class Hypothesis(NamedTuple):
    """A translation."""

    tokens: list[int]  # up to and with its end, if it was reached
    log_p: float  # of all of them, in nats
    score: float  # with the length penalty


class Line(NamedTuple):
    """The translation of a line of text."""

    text: str
    n_tokens: int  # 0 of a blank line
    log_p: float
    score: float
    n_source: int = 0  # tokens of the line itself, 0 of a blank one


class Prepared(NamedTuple):
    """A model's weights on the device."""

    params: Any
    weights: Any  # the same as `model.for_decoding` has them
    mesh: Mesh | None  # devices that share the rows; None: one device


def prepare(model, params, mesh: Mesh | None = None) -> Prepared:
    """Puts the weights on the device, or on those of a mesh, for many calls of `translate`."""
    mesh = devices.whole_sequences(mesh)
    _, params = devices.placed(mesh, (), jax.device_put(params) if mesh is None else params)
    return Prepared(params, decoding.for_decoding(model, mesh, params), mesh)


def translate(
    model,
    params,
    sources: Sequence[Sequence[int]],
    *,
    beam_size: Beams = 4,
    length_penalty: NonNegative = 0.6,
    max_extra: Extra = 50,
    batch_tokens: Size = 4096,
    end: int = 1,
    hash_seed: AnySeed = 0,
    progress: bool = False,
    mesh: Mesh | None = None,
) -> list[Hypothesis]:
    """Translates sentences of token numbers.

    Args:
      model: an encoder-decoder built for evaluation.
      params: its weights, or what `prepare` made of them.
      sources: the tokens of each, at least one.
      beam_size: 1 decodes greedily; see `beam`.
      length_penalty: alpha of the score.
      max_extra: tokens that a translation may have more than its source.
      batch_tokens: about as many source tokens a batch, padding included; a batch has at least one
        sentence.
      end: the token that ends a translation.
      hash_seed: of the hashes of LSH attention, as `seed` in `training.evaluation.evaluate`.
      progress: whether to show a bar on stderr, or lines where that is no terminal.
      mesh: devices that share the rows; None: one device, or those that `prepare` was given.

    Returns:
      The best hypothesis of each source, in the order of the sources.

    Raises:
      ValueError: an argument out of range, or a source longer than the model's positions hold.
      NotImplementedError: an attention of the decoder cannot decode.
    """
    check_options(
        beam_size=beam_size,
        length_penalty=length_penalty,
        max_extra=max_extra,
        batch_tokens=batch_tokens,
        end=end,
        hash_seed=hash_seed,
    )
    if end >= model.vocab_size:
        raise SettingError(f"end is {end}: expected a token below {model.vocab_size}")
    sources = [_source(model, f"sources[{i}]", source) for i, source in enumerate(sources)]
    if isinstance(params, Prepared) and mesh is not None:
        raise SettingError("mesh is given and the weights are prepared already: give it to prepare")
    ready = params if isinstance(params, Prepared) else prepare(model, params, mesh)
    params, weights, mesh = ready
    n_row_shards = 1 if mesh is None else devices.n_row_shards(mesh)
    settings = jnp.float32(length_penalty), jnp.int32(end)
    rng = jax.random.fold_in(jax.random.PRNGKey(hash_seed), 0)
    results: list[Hypothesis | None] = [None] * len(sources)
    in_flight: list = []

    def fetch():
        rows, found = in_flight.pop(0)
        for i, hypothesis in zip(rows, _on_host(found), strict=False):  # the last rows are empty
            results[i] = hypothesis
        bar.advance(len(rows))

    with Progress("lines", len(sources), sys.stderr, shown=progress) as bar:
        for rows, n_rows, length in _batches([len(s) for s in sources], batch_tokens, n_row_shards):
            batch = _batch([sources[i] for i in rows], n_rows, length, max_extra, model.max_length)
            found = beam.compiled_search(
                model,
                mesh,
                params,
                weights,
                *devices.placed(mesh, (batch.tokens, batch.limits), ())[0],
                *settings,
                rng,
                beam_size=beam_size,
                capacity=batch.capacity,
            )
            in_flight.append((rows, found))
            if len(in_flight) > _IN_FLIGHT:
                fetch()
        while in_flight:
            fetch()
    return results


class _Batch(NamedTuple):
    tokens: Int[np.ndarray, "B S"]
    limits: Int[np.ndarray, " B"]  # the most tokens that each translation may have
    capacity: int


def _batch(
    sources: Sequence[np.ndarray], n_rows: int, length: int, max_extra: int, most: int | None
) -> _Batch:
    """Sources as rows of one length; `most` is what the model's positions hold."""
    capacity = length + max_extra
    if most is not None:
        length, capacity = min(length, most), min(capacity, most)
    tokens, limits = np.zeros((n_rows, length), np.int32), np.zeros(n_rows, np.int32)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = source
        limits[row] = min(len(source) + max_extra, capacity)
    return _Batch(tokens, limits, capacity)


def _on_host(found: beam.Hypotheses) -> Iterator[Hypothesis]:
    for tokens, length, log_p, score in zip(*jax.device_get(found), strict=True):
        yield Hypothesis(tokens[:length].tolist(), float(log_p), float(score))


def _source(model, name: str, source: Sequence[int]) -> Int[np.ndarray, " S"]:
    """A source as an array; raises `ValueError` for one that the model cannot read."""
    source = prompts.as_tokens(name, source)
    if not source.size or source.min() < 0 or source.max() >= model.source_vocab_size:
        raise SettingError(
            f"{name} is {shown(source.tolist())}: expected one or more tokens below the model's "
            f"vocabulary, {model.source_vocab_size}"
        )
    if model.max_length is not None and len(source) > model.max_length:
        raise SettingError(
            f"{name} has {len(source)} tokens: the model's positions hold {model.max_length}, "
            "shorten it"
        )
    return source.astype(np.int32)


def check_options(**options: float) -> None:
    """Raises `ValueError` for an option of `translate` that is out of range."""
    check_all(hints_of(translate), options)


def translate_lines(
    model, params, vocabulary, lines: Sequence[str], first_line: int = 1, **options
) -> list[Line]:
    """Translates lines of text; a blank line stays blank.

    Args:
      model: as in `translate`, and its weights.
      params: the weights, prepared or not.
      vocabulary: has `encode(line)`, the tokens of a line and its end, and `decode(tokens)`.
      lines: the text, without line ends.
      first_line: the number of the first line, for errors.
      **options: those of `translate`.
    """
    indices = [i for i, line in enumerate(lines) if line.strip()]
    sources = []
    for i in indices:
        try:
            sources.append(vocabulary.encode(lines[i]))
        except ValueError as error:
            raise ValueError(f"line {first_line + i}: {error}") from None
        _source(model, f"line {first_line + i}", sources[-1])
    results = [Line("", 0, 0.0, 0.0)] * len(lines)
    translated = translate(model, params, sources, **options)
    for i, source, found in zip(indices, sources, translated, strict=True):
        # A translation is one line, even if the model wrote several.
        text = " ".join(vocabulary.decode(found.tokens).splitlines())
        results[i] = Line(text, len(found.tokens), found.log_p, found.score, len(source))
    return results


def _batches(lengths: Sequence[int], batch_tokens: int, n_row_shards: int = 1):
    """Batches as (which sources, rows, length): similar lengths together, the shortest first.

    The number of rows is a multiple of `n_row_shards`.
    """
    padded = np.array([_padded(n) for n in lengths], int)
    for length in np.unique(padded).tolist():
        where = np.flatnonzero(padded == length)
        where = where[np.argsort(np.array(lengths)[where], kind="stable")].tolist()
        n_batches = -(-len(where) // max(1, batch_tokens // length))
        n_rows = n_row_shards * prompts.rounded(-(-len(where) // (n_batches * n_row_shards)), 1)
        for first in range(0, len(where), n_rows):
            yield where[first : first + n_rows], n_rows, length


def _padded(length: int) -> int:
    """The power of two that a source is padded to."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())

"""Log-likelihoods of continuations of any lengths, in few compiled programs.

A text longer than the model's context is read in windows, as lm-evaluation-harness does: each token
is predicted once, the first window begins with the prefix, and each later one ends with the tokens
that it predicts and begins with real ones before them.

Rows are padded to a few lengths, and only rows of one padded length are computed together. So a
request's result does not depend on the others, though LSH's hashes depend on the padded length.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from reformax import devices
from reformax.declared import Unsupported
from reformax.generation.prompts import rounded
from reformax.progress import Progress

T = TypeVar("T")
# Tokens of a batch whose number of rows is not given.
TOKENS = 2**14
# Most answers are shorter than the first: logits are then those of a row's last positions alone.
_LAST = 128, 512
# Logits in memory together.
_LOGITS = 2**26


class Likelihood(NamedTuple):
    """A continuation's."""

    log_p: float  # natural logarithm of its probability
    is_greedy: bool  # whether each of its tokens is the most probable one


class Window(NamedTuple):
    """A row: `inputs[t]` and those before it predict `targets[t]`; those from `first` on count."""

    inputs: Int[np.ndarray, " t"]
    targets: Int[np.ndarray, " t"]
    first: int


def windows(
    prefix: int, tokens: Int[np.ndarray, " T"], n_context: int, most: int
) -> Iterator[Window]:
    """Rows of at most `most` tokens in which each token after the context is predicted once.

    Args:
      prefix: the token before them.
      tokens: of the context and its continuation.
      n_context: how many of them are the context, which is cut from the left.
      most: the longest row.
    """
    inputs, done = np.concatenate([[prefix], tokens[:-1]]).astype(np.int32), n_context
    while done < len(tokens):
        end = min(done + most, len(tokens))
        begin = max(0, end - most)
        yield Window(inputs[begin:end], tokens[begin:end], done - begin)
        done = end


class LanguageScorer:
    """A language model that requests are computed with.

    Args:
      model: a `reformax.models.lm.LanguageModel` built for evaluation.
      params: its weights.
      max_length: the longest row, in tokens.
      batch_size: rows computed together; None: as many as make about `TOKENS` tokens.
      seed: of the hashes.
      mesh: devices that share the rows; None: one device.
      progress: whether to show how many requests are done on stderr.

    Raises:
      Unsupported: the model does not continue text.
    """

    def __init__(
        self,
        model,
        params,
        max_length: int,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        mesh: Mesh | None = None,
        progress: bool = False,
    ):
        if model.task_kind != "text" or not hasattr(model, "encode"):
            raise Unsupported(
                f"model {type(model).__name__} continues no text: give a run of a language model, "
                "such as lm.TransformerLM"
            )
        self.model, self.max_length, self.batch_size = model, max_length, batch_size
        self.seed, self.progress = seed, progress
        self.mesh = devices.whole_sequences(mesh)
        # Once, not for every batch.
        self.params = devices.placed(self.mesh, (), params)[1]

    def rows_of(self, length: int) -> int:
        """The rows of a batch of so long ones; a multiple of the devices'."""
        rows = self.batch_size or max(1, TOKENS // length)
        n_row_shards = 1 if self.mesh is None else devices.n_row_shards(self.mesh)
        return -(-rows // n_row_shards) * n_row_shards

    def padded(self, length: int) -> int:
        """The length that a row of so many tokens is padded to."""
        return min(rounded(length), self.max_length)

    def likelihoods(
        self,
        requests: Sequence[tuple[Sequence[int], Sequence[int]]],
        prefixes: Sequence[int] | None = None,
        least: int = 1,
    ) -> list[Likelihood]:
        """The likelihood of each continuation.

        Args:
          requests: pairs of tokens, of a context, which may be empty, and of its continuation.
          prefixes: a token before each context; None: the model's `first_token`.
          least: rows of fewer tokens are padded as those of so many, by one compiled program.
        """
        prefixes = [self.model.first_token] * len(requests) if prefixes is None else prefixes
        rows = []
        for number, (pair, prefix) in enumerate(zip(requests, prefixes, strict=True)):
            tokens = np.concatenate([np.asarray(part, np.int32) for part in pair])
            parts = windows(prefix, tokens, len(pair[0]), self.max_length)
            rows += [(number, window) for window in parts]
        of_lengths: dict[int, list] = {}
        for row in rows:
            length = self.padded(max(len(row[1].targets), least))
            of_lengths.setdefault(length, []).append(row)
        log_p, is_greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        with Progress("requests", len(rows), sys.stderr, shown=self.progress) as bar:
            for batch, scores in _one_ahead(self._batches(of_lengths)):
                for (number, window), *of_row in zip(batch, *map(np.asarray, scores), strict=False):
                    row_log_p, row_hits, index = of_row
                    counts = (index >= window.first) & (index < len(window.targets))
                    log_p[number] += row_log_p[counts].astype(np.float64).sum()
                    is_greedy[number] &= row_hits[counts].all()
                bar.advance(len(batch))
        return [Likelihood(float(x), bool(y)) for x, y in zip(log_p, is_greedy, strict=True)]

    def _batches(self, of_lengths: Mapping[int, list]) -> Iterator[tuple[list, tuple]]:
        """Batches of rows of each padded length, and their `_token_scores`, to be computed."""
        for length in sorted(of_lengths, reverse=True):  # what takes most memory first
            group, n = of_lengths[length], self.rows_of(length)
            for first in range(0, len(group), n):
                batch = group[first : first + n]
                yield batch, self._scores([window for _, window in batch], length, n)

    def _scores(self, batch: Sequence[Window], length: int, n_rows: int) -> tuple[Array, ...]:
        """`_token_scores` of rows, padded to a length and a number of rows."""
        inputs, targets = np.zeros((2, n_rows, length), np.int32)
        first, ends = np.zeros((2, n_rows), np.int32)
        for row, window in enumerate(batch):
            ends[row], first[row] = len(window.targets), window.first
            inputs[row, : ends[row]], targets[row, : ends[row]] = window.inputs, window.targets
        ends[len(batch) :] = 1  # a row without a token attends to nothing
        longest = (ends - first)[: len(batch)].max()
        n_last = next((n for n in _LAST if length > n >= longest), length)
        rng = jax.random.fold_in(jax.random.PRNGKey(self.seed), 0)
        rows, _ = devices.placed(self.mesh, (inputs, targets, ends), ())
        return _token_scores(self.model, n_last, self.mesh, self.params, rng, *rows)


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, each when the next one is made: a device computes while the host prepares."""
    before = next(items, None)
    for item in items:
        yield before
        before = item
    if before is not None:
        yield before


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _token_scores(
    model,
    n_last: int,
    mesh: Mesh | None,
    params,
    rng: Array,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    ends: Int[Array, " B"],
) -> tuple[Float[Array, "B n"], Bool[Array, "B n"], Int[Array, "B n"]]:
    """The log-probabilities of the last tokens, whether they are the likeliest, and their indices.

    A row has `ends` tokens, and padding after them.
    """

    def scored(params, rng, inputs, targets, ends):
        of_row = (jnp.arange(inputs.shape[1]) < ends[:, None]).astype(jnp.int32)
        features = model.encode(params, inputs, of_row, rng)
        index = jnp.arange(n_last) + (ends[:, None] - n_last if n_last < inputs.shape[1] else 0)
        index = jnp.broadcast_to(index, (len(inputs), n_last))
        at = jnp.maximum(index, 0)
        features = jnp.take_along_axis(features, at[..., None], axis=1)
        targets = jnp.take_along_axis(targets, at, axis=1)

        def of_part(part):
            features, targets = part
            logits = model.logits(params, features)
            picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            log_p = picked - jax.scipy.special.logsumexp(logits, axis=-1)
            return log_p, jnp.argmax(logits, axis=-1) == targets

        size = max(1, min(n_last, _LOGITS // (len(inputs) * model.vocab_size)))
        parts = jax.tree.map(functools.partial(_cut, size), (features, targets))
        log_p, hits = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(len(inputs), -1)[:, :n_last],
            jax.lax.map(of_part, parts),
        )
        return log_p, hits, index

    return devices.on(mesh, scored)(params, rng, inputs, targets, ends)


def _cut(size: int, x: Array) -> Array:
    """`[B, T, ...]` as `[parts, B, size, ...]`; zeros are after the end."""
    rest = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

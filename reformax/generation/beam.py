"""Beam search with an encoder-decoder; greedy decoding is a beam of one.

The score of a hypothesis of n tokens, its end among them, is `log p / ((5 + n) / 6)^alpha` (Wu et
al. 2016, "Google's Neural Machine Translation System", eq. 14, without coverage). The search keeps
the K most probable beginnings and, apart from them, the best hypothesis that has ended. It ends
when no beginning can become better than that hypothesis: log p only falls, and the largest length
has the largest penalty.

One of the K beginnings is the text of greedy decoding so far, however improbable, until it ends.
Where an ordinary beam search would have dropped it, it takes the place of the last of the K. In
return no search scores below greedy decoding.

Letters in the shapes: B sources, K beams, V vocabulary, L the largest length.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from reformax import devices


class Hypotheses(NamedTuple):
    """The best of each source."""

    tokens: Int[Array, "B L"]  # 0 after the end
    lengths: Int[Array, " B"]  # with the end, if it was reached
    log_p: Float[Array, " B"]
    scores: Float[Array, " B"]


class _Task(NamedTuple):
    """The part of a search that does not change; see `search`."""

    limits: Int[Array, " B"]
    alpha: Float[Array, ""]
    end: Int[Array, ""]

    def penalty(self, length) -> Float[Array, ...]:
        """The divisor of log p for hypotheses of this length."""
        return ((5 + length) / 6) ** self.alpha


class _State(NamedTuple):
    """The part of a search that each token changes."""

    count: Int[Array, ""]  # tokens of every beginning
    decoding: Any  # the model's, which has read all of their tokens but the last
    tokens: Int[Array, "B K L"]  # the beginnings
    log_p: Float[Array, "B K"]  # -inf: none
    greedy: Bool[Array, " B"]  # whether the first of the beginnings is that of greedy decoding
    best: Hypotheses
    done: Bool[Array, " B"]


def search(
    model,
    params,
    weights,
    source: Int[Array, "B S"],
    limits: Int[Array, " B"],
    alpha: Float[Array, ""],
    end: Int[Array, ""],
    rng,
    *,
    beam_size: int,
    capacity: int,
) -> Hypotheses:
    """Translates sources; the result of one depends on no other. `compiled_search` compiles it.

    Args:
      model: an encoder-decoder built for evaluation: `prefill`, `beams`, `select`, `step`.
      params: its weights.
      weights: the same as `model.for_decoding` has them.
      source: tokens, padded with 0 on the right.
      limits: the most tokens that each target may have; a beginning that has not ended there is
        scored as it is.
      alpha: of the length penalty, 0 or more; 0 for none.
      end: the token that ends a hypothesis.
      rng: the source of hashes.
      beam_size: K.
      capacity: L, at least the largest limit.
    """
    logits, decoding, memory = model.prefill(params, weights, source, capacity, rng)
    n_rows, vocab_size = logits.shape
    task = _Task(limits, alpha, end)

    def advance(state: _State) -> _State:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, axis=2, keepdims=False)
        logits, decoding = model.step(weights, last.reshape(-1), state.decoding, memory)
        state = state._replace(decoding=decoding)
        return _extend(model, task, state, logits.reshape(n_rows, beam_size, vocab_size))

    tokens = jnp.zeros((n_rows, beam_size, capacity), jnp.int32)
    nothing = jnp.full((n_rows,), -jnp.inf)
    empty = jnp.where(jnp.arange(beam_size) == 0, 0.0, -jnp.inf)  # one empty beginning
    state = _State(
        count=jnp.int32(0),
        decoding=model.beams(decoding, beam_size, capacity),
        tokens=tokens,
        log_p=jnp.broadcast_to(empty, (n_rows, beam_size)),
        greedy=jnp.ones(n_rows, bool),
        best=Hypotheses(tokens[:, 0], jnp.zeros(n_rows, jnp.int32), nothing, nothing),
        done=limits <= 0,
    )
    first = jnp.broadcast_to(logits[:, None], (n_rows, beam_size, vocab_size))
    state = _extend(model, task, state, first)
    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), advance, state).best


def _extend(model, task: _Task, state: _State, logits: Float[Array, "B K V"]) -> _State:
    """Adds a token to the beginnings, given its logits."""
    count, beam_size = state.count + 1, state.tokens.shape[1]
    token, log_p, parents = _candidates(state, logits)
    tokens = jnp.take_along_axis(state.tokens, parents[..., None], axis=1)
    tokens = tokens.at[:, :, state.count].set(token)

    ends = token == task.end
    ended = _best_of(task, tokens, jnp.where(ends, log_p, -jnp.inf), count)
    best = _better(state.best, ended, ~state.done)
    # The best K that have not ended, in their order: that of greedy decoding stays the first.
    kept = jnp.argsort(ends, axis=1, stable=True)[:, :beam_size]
    tokens = jnp.take_along_axis(tokens, kept[..., None], axis=1)
    log_p = jnp.where(ends, -jnp.inf, log_p)  # a beam of one that has ended does not go on
    log_p, parents = (jnp.take_along_axis(x, kept, axis=1) for x in (log_p, parents))
    # At a source's limit the beginnings are hypotheses as they are.
    unfinished = _best_of(task, tokens, log_p, count)
    best = _better(best, unfinished, count == task.limits)
    reachable = log_p.max(axis=1) / task.penalty(task.limits)
    return _State(
        count=count,
        decoding=model.select(state.decoding, parents),
        tokens=tokens,
        log_p=log_p,
        greedy=state.greedy & ~ends[:, 0],
        best=best,
        done=state.done | (count >= task.limits) | (reachable <= best.scores),
    )


def _candidates(
    state: _State, logits: Float[Array, "B K V"]
) -> tuple[Int[Array, "B n"], Float[Array, "B n"], Int[Array, "B n"]]:
    """The most probable beginnings with one more token: the token, log p, and which they extend."""
    n_rows, beam_size, vocab_size = logits.shape
    # K of 2K candidates have not ended. Greedy decoding takes the first and nothing else.
    n_candidates = 2 * beam_size if beam_size > 1 else 1
    n_each = min(n_candidates, vocab_size)
    # The best candidates of each beginning in order, then the best of all.
    top, token = _top(logits.reshape(-1, vocab_size), n_each)
    log_p = top.reshape(n_rows, beam_size, -1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_p = (log_p + state.log_p[..., None]).reshape(n_rows, -1)
    # Greedy decoding takes the first candidate of the first beginning.
    greedy = (jnp.arange(log_p.shape[1]) == 0)[None] & state.greedy[:, None]
    ranked = jnp.where(greedy, jnp.inf, log_p)
    _, chosen = jax.lax.top_k(ranked, min(n_candidates, log_p.shape[1]))
    log_p, token = (
        jnp.take_along_axis(x, chosen, axis=1) for x in (log_p, token.reshape(n_rows, -1))
    )
    return token, log_p, chosen // n_each


def _best_of(
    task: _Task, tokens: Int[Array, "B n L"], log_p: Float[Array, "B n"], length: Int[Array, ""]
) -> Hypotheses:
    """The best of hypotheses of one length."""
    n_rows = tokens.shape[0]
    i = jnp.argmax(log_p, axis=1)[:, None]
    best_p = jnp.take_along_axis(log_p, i, axis=1)[:, 0]
    lengths = jnp.full((n_rows,), length, jnp.int32)
    tokens = jnp.take_along_axis(tokens, i[..., None], axis=1)[:, 0]
    return Hypotheses(tokens, lengths, best_p, best_p / task.penalty(length))


def _better(best: Hypotheses, found: Hypotheses, where: Bool[Array, " B"]) -> Hypotheses:
    """`found` in those rows of `where` in which it is better, `best` in the others."""
    where = where & (found.scores > best.scores)
    return Hypotheses(
        *(
            jnp.where(where.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(found, best, strict=True)
        )
    )


def _top(x: Float[Array, "R V"], n: int) -> tuple[Float[Array, "R n"], Int[Array, "R n"]]:
    """The n largest of each row in order, and their indices; the first of equals."""
    if n > 1:
        return jax.lax.top_k(x, n)
    # On a CPU two plain reductions take a quarter of the time of `top_k`.
    top, last = x.max(axis=1, keepdims=True), x.shape[1] - 1
    indices = jnp.arange(last + 1, dtype=jnp.int32)  # as `top_k` has them
    return top, jnp.where(x == top, indices, last).min(axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("beam_size", "capacity"))
def compiled_search(
    model, mesh: Mesh | None, *arguments, beam_size: int, capacity: int
) -> Hypotheses:
    """`search`, compiled for each model, mesh of devices, beam size and capacity."""
    call = functools.partial(search, model, beam_size=beam_size, capacity=capacity)
    return devices.on(mesh, call)(*arguments)

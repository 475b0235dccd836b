"""Generates a continuation of each prompt, up to the first of several texts.

This is the request `generate_until` of lm-evaluation-harness.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from reformax.declared import SettingError
from reformax.evals.likelihood import LanguageScorer
from reformax.generation import decoding
from reformax.generation.prompts import rounded
from reformax.progress import Progress

Decode = Callable[[Sequence[int], Sequence[int]], str]


class GenerationRequest(NamedTuple):
    """A prompt to continue.

    Attributes:
      prompt: its tokens, cut from the left where it is too long.
      max_new_tokens: the most to add.
      until: texts that end the continuation, which does not contain them.
      temperature, top_k, top_p: see `reformax.generation.Sampler`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def generate_until(
    scorer: LanguageScorer,
    requests: Sequence[GenerationRequest],
    decode: Decode,
    ends: Sequence[int],
) -> list[str]:
    """Continues each prompt; a batch ends when each of its rows has ended.

    Args:
      scorer: the model.
      requests: what to continue. Draws of a temperature above 0 depend on a row's batch.
      decode: (prompt, new tokens) -> the text of the latter.
      ends: tokens each of which ends a continuation.

    Raises:
      SettingError: a request for as many tokens as the model's context has.
    """
    groups: dict[tuple, list[int]] = {}
    prompts = [_fitting(request, scorer.max_length) for request in requests]
    for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        # As in `likelihood.py`: others of the batch change neither program nor hashes.
        padded = rounded(len(prompt))
        groups.setdefault((padded, *request[1:2], *request[3:]), []).append(number)
    found = [""] * len(requests)
    with Progress("continuations", len(requests), sys.stderr, shown=scorer.progress) as bar:
        for (padded, n_new, *sampling), numbers in sorted(groups.items(), reverse=True):
            capacity = min(rounded(padded + n_new), scorer.max_length)
            n_rows = scorer.rows_of(capacity)
            for first in range(0, len(numbers), n_rows):
                batch = numbers[first : first + n_rows]
                rows = [(prompts[i], requests[i].until) for i in batch]
                options = dict(zip(("temperature", "top_k", "top_p"), sampling, strict=True))
                options |= dict(max_length=capacity, ends=ends, n_rows=n_rows)
                texts = _continued(scorer, rows, n_new, decode, **options)
                for i, one in zip(batch, texts, strict=True):
                    found[i] = one
                bar.advance(len(batch))
    return found


def _fitting(request: GenerationRequest, most: int) -> tuple[int, ...]:
    """The end of the prompt that leaves room for what is requested."""
    room = most - request.max_new_tokens
    if room < 1:
        raise SettingError(
            f"max_gen_toks is {request.max_new_tokens}: expected fewer than the context's {most} "
            "tokens, set it in the task's generation_kwargs or raise the context"
        )
    return request.prompt[-room:]


def _continued(
    scorer, rows, n_new: int, decode: Decode, *, ends, n_rows: int, **options
) -> list[str]:
    """The texts of a batch's rows, cut where they end."""
    filled = [prompt for prompt, _ in rows] + [()] * (n_rows - len(rows))  # one program for all
    new = [[] for _ in rows]
    blocks = decoding.stream(
        scorer.model,
        scorer.params,
        filled,
        n_new,
        end=ends,
        seed=scorer.seed,
        hash_seed=scorer.seed,
        mesh=scorer.mesh,
        **options,
    )
    for block in blocks:
        for tokens, more in zip(new, np.asarray(block), strict=False):
            tokens += more.tolist()
        cut = [
            _cut(decode(prompt, _before(tokens, ends)), until)
            for tokens, (prompt, until) in zip(new, rows, strict=True)
        ]
        are_done = (not set(ends).isdisjoint(tokens) for tokens in new)
        if all(done or is_cut for done, (_, is_cut) in zip(are_done, cut, strict=True)):
            break
    return [one for one, _ in cut]


def _before(tokens: list[int], ends: Sequence[int]) -> list[int]:
    return list(itertools.takewhile(lambda token: token not in ends, tokens))


def _cut(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of `until`, and whether there is one."""
    begins = [text.find(one) for one in until if one and one in text]
    return (text[: min(begins)], True) if begins else (text, False)

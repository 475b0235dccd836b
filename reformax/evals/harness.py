"""The model of lm-evaluation-harness (Gao et al. 2021), by its interface `lm_eval.api.model.LM`.

`HarnessRequests` has the three requests; a subclass of it and of `LM` is a model. A request is text
in and text out, so figures of models with other vocabularies compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reformax.declared import Count, NonNegative, SettingError, Size, TopP, check, shown
from reformax.evals.generate_until import GenerationRequest, generate_until
from reformax.evals.likelihood import LanguageScorer

MAX_NEW_TOKENS = 256  # of a task that does not say
# What a task's generation_kwargs may have.
_MOST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one thing
_GENERATION = dict.fromkeys(_MOST, Size) | {
    "until": str | Sequence[str] | None,
    "do_sample": bool | None,
    "temperature": NonNegative | None,
    "top_k": Count | None,
    "top_p": TopP | None,
}


class HarnessRequests:
    """Computes the harness's requests with a language model.

    Args:
      scorer: the model.
      encode: text -> tokens.
      decode: (prompt, new tokens) -> the text of the latter.
      ends: tokens that end a continuation, such as that of a document's end.
      prefixed: whether the model's first token precedes each context, as it begins rows of
        training. False: it precedes empty contexts alone, as the harness's own GPT-2 has it.
    """

    def __init__(
        self,
        scorer: LanguageScorer,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int], Sequence[int]], str],
        ends: Sequence[int],
        prefixed: bool = True,
    ):
        super().__init__()
        self._scorer, self._encode, self._decode = scorer, encode, decode
        self._ends, self._prefixed = ends, prefixed

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives it."""
        pairs = [self._pair(*request.args) for request in requests]
        prefixes = None
        if not self._prefixed:
            first = self._scorer.model.first_token
            prefixes = [context[0] if context else first for context, _ in pairs]
            pairs = [(context[1:], continuation) for context, continuation in pairs]
        return [tuple(one) for one in self._scorer.likelihoods(pairs, prefixes)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of each text, in windows of the model's context."""
        texts = [((), self._encode(*request.args)) for request in requests]
        return [one.log_p for one in self._scorer.likelihoods(texts)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each context, up to the first of the task's `until`."""
        if not self._prefixed:
            raise SettingError(
                "add_bos_token is False and the task generates, for which the model's first token "
                "precedes each context: leave it out"
            )
        asked = [self._continuation(*request.args) for request in requests]
        return generate_until(self._scorer, asked, self._decode, self._ends)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context and of its continuation, which gets the context's last spaces.

        The two are encoded as one text and then divided, as the harness's other models do.
        """
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        tokens = self._encode(context + continuation)
        n_context = min(len(self._encode(context)) if context else 0, max(0, len(tokens) - 1))
        return tokens[:n_context], tokens[n_context:]

    def _continuation(self, context: str, settings: Mapping[str, Any]) -> GenerationRequest:
        if unknown := settings.keys() - _GENERATION:
            name = min(unknown)
            raise SettingError(
                f"the task's generation_kwargs have {name}={shown(settings[name])}: expected "
                f"{', '.join(sorted(_GENERATION))} alone"
            )
        for name, value in settings.items():
            check(f"the task's generation_kwargs have {name}, which", value, _GENERATION[name])
        settings = {name: value for name, value in settings.items() if value is not None}
        until, temperature = settings.get("until", ()), settings.get("temperature")
        if not settings.get("do_sample", bool(temperature)):
            temperature = 0.0
        return GenerationRequest(
            tuple(self._encode(context)),
            next((settings[name] for name in _MOST if name in settings), MAX_NEW_TOKENS),
            (until,) if isinstance(until, str) else tuple(until),
            1.0 if temperature is None else float(temperature),
            settings.get("top_k", 0) if temperature != 0 else 0,
            settings.get("top_p", 1.0) if temperature != 0 else 1.0,
        )

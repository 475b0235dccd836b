"""Evaluates a run's parameters, and says which of its scores compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from reformax.training import evaluation
from reformax.training.curves import words_of
from reformax.training.evaluations import ResolvedEvaluation, data_key
from reformax.training.loss import metric_name
from reformax.training.settings import TrainSettings


class Evaluator:
    """Scores the parameters of a run by one of its evaluations.

    Attributes:
      metric: the name of the score, such as 'bits_per_dim'.
      evaluation: what is scored.
    """

    def __init__(self, model, settings: TrainSettings, mesh: Mesh, evaluation: ResolvedEvaluation):
        """Takes a model built for evaluation."""
        self._model, self._settings, self._mesh = model, settings, mesh
        self.metric, self.evaluation = evaluation.metric, evaluation

    @property
    def of_part(self) -> bool:
        """Whether the tokens to score are less than the split."""
        one = self.evaluation
        return one.tokens is not None and one.tokens < one.task.n_targets(one.split)

    def needs_all(self, last: bool) -> bool:
        """Whether an evaluation, the last one or not, scores the whole split besides a part."""
        return last and self.evaluation.whole and self.of_part

    def finished(self, score: Mapping[str, Any] | None, last: bool) -> bool:
        """Whether a score is what an evaluation, the last one or not, has to find."""
        return score is not None and ("whole_split" in score or not self.needs_all(last))

    def kind(self, data: Mapping[str, str]) -> dict[str, Any]:
        """Identifies the data and the context of the scores. Only scores of one kind compare.

        Args:
          data: the fingerprints of splits.
        """
        one = self.evaluation
        kind = {"split": one.split, "metric": self.metric}
        kind |= {name: one.sizes[name] for name in ("length", "stride")}
        if (fingerprint := data.get(data_key(one))) is not None:
            kind["data"] = fingerprint
        if self.of_part:  # whole batches of it
            kind |= {"tokens": one.tokens, "batch_size": one.batch_size}
        return kind

    def evaluate(
        self, params: Any, step: int, last: bool, should_stop: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Evaluates `params`.

        Args:
          params: to score.
          step: steps done, for the error.
          last: whether no evaluation follows.
          should_stop: True abandons it.

        Returns:
          The metric, accuracy, n_targets, `whole` and, where only the last evaluation scores the
          whole split and this is it, `whole_split`; see `evaluation.evaluate`. The metric is None
          where no target has weight in it. None if abandoned.

        Raises:
          FloatingPointError: its bits or its metric are not finite.
        """
        settings, one = self._settings, self.evaluation
        result = evaluation.evaluate(
            self._model,
            params,
            one.task,
            one.split,
            **one.sizes,
            seed=settings.seed,
            max_tokens=one.tokens,
            all_as_well=self.needs_all(last),
            loss_chunk_len=settings.loss_chunk_len,
            mesh=self._mesh,
            progress=settings.progress,
            should_stop=should_stop,
        )
        if result is None:
            return None
        bits = metric_name(one.task)
        for found in (result, result.get("whole_split", result)):
            found.setdefault(self.metric, None)  # where no target has weight in it
            for name in dict.fromkeys([bits, self.metric]):
                if (value := found[name]) is not None and not math.isfinite(value):
                    raise FloatingPointError(f"{one.label} {name} is {value} after step {step}")
        of_evaluate = ("split", "length", "stride", "n_windows", "standard_error")
        return {name: x for name, x in result.items() if name not in of_evaluate}

    def words(self, score: Mapping[str, Any]) -> str:
        """A score in a few words."""
        words = f"{self.evaluation.label} {self._bits(score)}"
        if not score["whole"]:
            words += f" of {score['n_targets']:,} targets"
        if (everything := score.get("whole_split")) is not None:
            words += f"; {self._bits(everything)} of all {everything['n_targets']:,}"
        return words

    def _bits(self, score: Mapping[str, Any]) -> str:
        words = words_of(self.metric, score)
        if (value := score[self.metric]) is None:
            return f"no {words}: no target has weight in it"
        words = f"{value:.4f} {words}"
        if self.metric not in ("bits_per_dim", "bits_per_byte") and "bits_per_byte" in score:
            words += f", {score['bits_per_byte']:.4f} bits per byte"
        is_class = self.evaluation.task.labels is not None and self.metric != "accuracy"
        return words + f", accuracy {score['accuracy']:.4f}" * is_class

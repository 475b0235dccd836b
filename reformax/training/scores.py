"""The scores of a run: what an evaluation scores, and with which others its score compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from reformax.training import evaluation
from reformax.training.curves import words_of
from reformax.training.loss import labels_of, metric_name
from reformax.training.settings import TrainSettings


class Scores:
    """Scores the parameters of a run.

    Attributes:
      metric: the name of the score, such as 'bits_per_dim'.
    """

    def __init__(self, model, settings: TrainSettings, mesh: Mesh):
        """Takes a model built for evaluation."""
        self._model, self._settings, self._mesh = model, settings, mesh
        self.metric = metric_name(settings.task)

    @property
    def of_part(self) -> bool:
        """Whether `eval_tokens` are less than the split."""
        settings = self._settings
        tokens = settings.eval_tokens
        return tokens is not None and tokens < settings.task.n_targets(settings.eval_split)

    def needs_all(self, last: bool) -> bool:
        """Whether an evaluation, the last one or not, scores the whole split besides a part."""
        return last and self._settings.eval_whole and self.of_part

    def kind(self, data: Mapping[str, str]) -> dict[str, Any]:
        """Identifies the data and the context of the scores. Only scores of one kind compare.

        Args:
          data: the fingerprints of splits.
        """
        settings, sizes = self._settings, self._settings.eval_sizes
        kind = {"split": settings.eval_split, "metric": self.metric}
        kind |= {name: sizes[name] for name in ("length", "stride")}
        if settings.eval_split in data:
            kind["data"] = data[settings.eval_split]
        if self.of_part:  # whole batches of it
            kind |= {"tokens": settings.eval_tokens, "batch_size": sizes["batch_size"]}
        return kind

    def of(
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
          whole split and this is it, `whole_split`; see `evaluation.evaluate`. None if abandoned.

        Raises:
          FloatingPointError: a score is not finite.
        """
        settings = self._settings
        result = evaluation.evaluate(
            self._model,
            params,
            settings.task,
            settings.eval_split,
            **settings.eval_sizes,
            seed=settings.seed,
            max_tokens=settings.eval_tokens,
            all_as_well=self.needs_all(last),
            loss_chunk_len=settings.loss_chunk_len,
            mesh=self._mesh,
            progress=settings.progress,
            should_stop=should_stop,
        )
        if result is None:
            return None
        for found in (result, result.get("whole_split", result)):
            if not math.isfinite(bits := found[self.metric]):
                raise FloatingPointError(f"{settings.eval_split} loss is {bits} after step {step}")
        of_evaluate = ("split", "length", "stride", "n_windows", "standard_error")
        return {name: x for name, x in result.items() if name not in of_evaluate}

    def words(self, score: Mapping[str, Any]) -> str:
        """The result of `of` in a few words."""
        words = f"{self._settings.eval_split} {self._bits(score)}"
        if not score["whole"]:
            words += f" of {score['n_targets']:,} targets"
        if (everything := score.get("whole_split")) is not None:
            words += f"; {self._bits(everything)} of all {everything['n_targets']:,}"
        return words

    def _bits(self, score: Mapping[str, Any]) -> str:
        words = f"{score[self.metric]:.4f} {words_of(self.metric, score)}"
        if self.metric != "bits_per_dim" and "bits_per_byte" in score:
            words += f", {score['bits_per_byte']:.4f} bits per byte"
        is_class = labels_of(self._settings.task) is not None
        return words + f", accuracy {score['accuracy']:.4f}" * is_class

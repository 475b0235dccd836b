"""Samples of text that a language model writes while it trains, after some of its evaluations.

A sample is printed, and is a line of the record: metrics.jsonl, TensorBoard's texts and loggers
have it. It depends on the parameters, the seed and the prompts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from reformax.declared import SettingError
from reformax.generation import decoding
from reformax.generation.tokenizers import N_BYTES, tokenizer_of
from reformax.task import TaskModel
from reformax.training import side_channels
from reformax.training.settings import TrainSettings
from reformax.training.step_log import StepLog

SPLIT = "sample"  # of its lines in the record
TEMPERATURE = 0.8


class Samples:
    """Writes samples of a run's text; where one fails, a line says so and the run goes on."""

    def __init__(self, model: TaskModel, settings: TrainSettings, mesh: Mesh):
        """Takes a model built for evaluation."""
        self._model, self._settings, self._mesh = model, settings, mesh
        self._best_effort = side_channels.BestEffort("the sample of text")
        self._writes = bool(settings.prompts)
        task = settings.task
        self._tokenizer = tokenizer_of(
            task.vocabulary, task.vocab_size - N_BYTES if task.of_bytes else None
        )

    def check(self, params: Any, note: Callable[[str], None]) -> None:
        """Says before the first step that there will be none.

        Raises:
          SettingError: `sample_every` is set, and the model cannot write, or not from these
            prompts.
        """
        every, task = self._settings.sample_every, self._settings.task
        if not self._writes:
            return
        try:
            if task.kind != "text":
                raise ValueError(f"task {task.name} is no text")
            self._blocks(params)
        except (AttributeError, NotImplementedError, ValueError) as error:
            if every is not None:
                raise SettingError(f"sample_every is {every} and {error}: leave it out") from None
            note(f"note: no samples of text: {error}")
            self._writes = False
        if self._writes and jax.process_count() > 1:
            note("note: no samples of text: one process writes text, and this run has several")
            self._writes = False

    def write(
        self, params: Any, step: int, last: bool, log: StepLog, stop: Callable[[], bool]
    ) -> None:
        """Writes the sample that is due after an evaluation, if any.

        Args:
          params: to write by.
          step: steps done.
          last: whether no evaluation follows.
          log: has the record and the bar, which get it.
          stop: asked after each block of tokens; true abandons the sample, which no save waits for.

        Raises:
          Lost: the record is another training's now.
        """
        every = self._settings.sample_every
        is_due = last or (every is not None and step % every == 0)
        if not self._writes or not is_due:
            return
        texts = None
        with self._best_effort:
            texts = self._texts(params, stop)
        if texts is None:
            return
        log.record.write(step, SPLIT, {"texts": texts}, {}, tag=SPLIT)
        if self._settings.progress:
            for text in texts:
                log.bar.say(f"step {step}: a sample: {text}")

    def _texts(self, params: Any, stop: Callable[[], bool]) -> list[str] | None:
        """The prompts with their new tokens; None if they are abandoned."""
        blocks = []
        for block in self._blocks(params):
            blocks.append(block)
            if stop():
                return None
        rows = np.concatenate(blocks, axis=1).tolist()
        return [
            _printable(self._tokenizer.stream()([*prompt, *new], True))
            for prompt, new in zip(self._prompts(), rows, strict=True)
        ]

    def _prompts(self) -> list[list[int]]:
        """The tokens of the prompts; raises `SettingError` for text that is none of the task's."""
        return [self._tokenizer.encode(prompt.encode()) for prompt in self._settings.prompts]

    def _blocks(self, params: Any) -> Iterator[np.ndarray]:
        """New tokens of each prompt; the call raises what the model or the prompts do not allow."""
        settings, prompts = self._settings, self._prompts()
        longest = max(map(len, prompts), default=0) + settings.sample_tokens
        length = settings.main_evaluation.length  # by which automatic numbers of buckets go
        return decoding.stream(
            self._model,
            params,
            prompts,
            settings.sample_tokens,
            temperature=TEMPERATURE,
            seed=settings.seed,
            hash_seed=settings.seed,
            max_length=length if longest <= length else None,
            mesh=self._mesh,
        )


def _printable(text: str) -> str:
    """The text with U+FFFD for what cannot be printed, such as what moves a cursor."""
    return "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)

"""Scores a run on tasks by their names: `reformax evaluate --tasks=needle,hellaswag`.

`text` is the run's own split, and `OWN` are of `reformax.evals`. Every other name is looked up in
lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reformax.cli import (
    compilation_cache,
    flags,
    joining,
    lm_eval,
    messages,
    report,
    results,
    saved_run,
)
from reformax.declared import SettingError
from reformax.evals import common_words, needles

TEXT = "text"
FILE = "evaluation_tasks.json"
# Flags that no task but `text` reads, and flags of other tasks.
_OF_TEXT = (
    *flags.SEARCH,
    "by_position",
    "kept_mass",
    "n_hashes",
    "stride",
    "tokens",
    "split",
    "data_dir",
)
OF_TASKS = ("include_path", "num_fewshot", "limit")
# What a model of bytes reads of its run's task.
_READ = ("task", "text.text.offset")
# Tasks of the package by name: `(scorer, encode, n=, seed=) -> figures`.
OWN: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: functools.partial(needles.score, name=name) for name in needles.TASKS},
    common_words.NAME: common_words.score,
}
# Draws that the harness makes for a standard error that has no formula.
_BOOTSTRAP = 1000


def score(args: argparse.Namespace, score_text: Callable[[], int]) -> int:
    """Scores what --tasks names, prints and writes; returns the exit code.

    Args:
      args: the flags of `reformax evaluate`.
      score_text: scores the run's own split.
    """
    names = [name.strip() for name in args.tasks.split(",")]
    if "" in names:
        raise SettingError(f"--tasks={args.tasks} has no task: give names with commas between them")
    joining.refuse(args, "one process scores --tasks, on all devices that it sees")
    others = list(dict.fromkeys(name for name in names if name != TEXT))
    if TEXT not in names:
        flags.refuse(args, _OF_TEXT, f"only the task {TEXT} reads it")
    if not others:
        flags.refuse(args, OF_TASKS, f"the task {TEXT} does not read it")
        return score_text()
    of_harness = [name for name in others if name not in OWN]
    if not of_harness:
        flags.refuse(args, ("include_path", "num_fewshot"), "only the harness's tasks read it")
    manager = _manager(args.include_path, of_harness) if of_harness else None
    files = results.ResultFiles(args.output_dir)
    compilation_cache.use()
    saved = saved_run.restore(args, args.data_dir)
    sizes = dict(max_length=args.length, batch_size=args.batch_size, seed=args.seed)
    parts = lm_eval.parts_of(args, saved, **sizes, progress=not args.quiet, length_name="--length")
    if TEXT not in names:  # which reads more, and notes the rest itself
        report.note_unused(args.config, (*saved_run.MODEL, *_READ))
    scorer, encode, *_ = parts
    found: dict[str, Any] = {}
    for name in others:
        if name in OWN:
            n = needles.N_QUESTIONS if args.limit is None else args.limit
            found[name] = OWN[name](scorer, encode, n=n, seed=args.seed)
    if of_harness:
        found |= _of_harness(parts, of_harness, manager, args)
    kept = {
        "tasks": found,
        "checkpoint_steps": saved.steps,
        "length": scorer.max_length,
        "seed": args.seed,
        "overrides": args.config,
    }
    files.write_json(FILE, _finite(kept))
    print(f"{saved_run.named(saved.steps)}, {files.named(FILE)}")
    for name, figures in found.items():
        _print(name, figures)
    return max(files.exit_code(), score_text() if TEXT in names else 0)


def _manager(include_path: str | None, names: Sequence[str]):
    """The harness's tasks: those of a folder alone, if it has all that are requested."""
    lm_eval.check_installed()
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise SettingError(
                f"--include_path={include_path} is no folder: give one with the tasks' YAML files"
            )
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(map(manager.match_tasks, ([name] for name in names))):
            return manager
    manager = TaskManager(include_path=include_path)  # seconds, for there are thousands
    for name in names:
        if not manager.match_tasks([name]):
            known = [TEXT, *OWN, *manager.all_tasks]
            raise SettingError(f"--tasks: there is no task {name}{messages.nearest(name, known)}")
    return manager


def _of_harness(parts, names: Sequence[str], manager, args) -> dict[str, Any]:
    """The figures of tasks of the harness by their names."""
    model = lm_eval.model_class().of_parts(*parts)
    if args.quiet:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model,
        tasks=manager.match_tasks(list(names)),
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        bootstrap_iters=_BOOTSTRAP,
        log_samples=False,
    )
    figures = found["results"] | found.get("groups", {})
    return {
        name: {key: value for key, value in one.items() if key != "alias"}
        for name, one in figures.items()
    }


def _print(name: str, figures: dict[str, Any]) -> None:
    """A line for each figure; the harness's have the name of a filter behind a comma."""
    for key, value in figures.items():
        metric, _, of = key.partition(",")
        if not isinstance(value, float) or metric.endswith("_stderr"):
            continue
        error = figures.get(f"{metric}_stderr,{of}")
        error = f" (standard error {error:.4f})" if isinstance(error, float) else ""
        print(f"{name} {metric}{f' ({of})' if of not in ('', 'none') else ''}: {value:.4f}{error}")
    if by_depth := figures.get("accuracy_by_depth"):
        shown = ", ".join("none" if x is None else f"{x:.2f}" for x in by_depth)
        print(f"{name} accuracy by depth, from the beginning of the text: {shown}")


def _finite(value: Any) -> Any:
    """The value with text for numbers that JSON lacks, such as an infinite perplexity."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

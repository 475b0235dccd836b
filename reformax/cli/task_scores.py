"""Scores a run on tasks by their names: `reformax evaluate --tasks=ruler,hellaswag`.

`text` is the run's own split, and `OWN` are of `reformax.evals.in_context`. Every other name is
looked up in lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reformax.cli import (
    compilation_cache,
    distributed,
    flags,
    lm_eval,
    messages,
    report,
    results,
    saved_run,
    task_tables,
)
from reformax.data.questions import KINDS, Encode, Hay
from reformax.declared import SettingError, Size
from reformax.evals import in_context
from reformax.evals.harness import HarnessRequests

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
OF_QUESTIONS = ("lengths", "depths", "texts")
OF_TASKS = ("include_path", "num_fewshot", "limit", *OF_QUESTIONS)
# What a model of bytes reads of its run's task.
_READ = ("task", "text.text.offset")
# Tasks of the package, and the name of all of them.
QUESTION_TASKS = (*KINDS, in_context.RULER)
# Draws that the harness makes for a standard error that has no formula.
_BOOTSTRAP = 1000


def score(args: argparse.Namespace, score_text: Callable[[], int]) -> int:
    """Scores what --tasks names, prints and writes; returns the exit code.

    Args:
      args: the flags of `reformax evaluate`.
      score_text: scores the run's own split.
    """
    scores_text, of_questions, of_harness = _names(args)
    if not (of_questions or of_harness):
        return score_text()
    settings = _question_settings(args)
    manager = _manager(args.include_path, of_harness) if of_harness else None
    files = results.ResultFiles(args.output_dir)
    compilation_cache.use()
    saved = saved_run.restore(args, args.data_dir)
    longest = max(settings.lengths, default=args.length)
    sizes = dict(max_length=longest, batch_size=args.batch_size, seed=args.seed)
    parts = lm_eval.parts_of(saved, **sizes, progress=not args.quiet, typed=_typed(args))
    if not scores_text:  # which reads more, and notes the rest itself
        report.note_unused(args.config, (*saved_run.MODEL, *_READ))
    scorer, encode, *_ = parts
    found: dict[str, Any] = {}
    result = {
        "tasks": found,
        "complete": False,
        "checkpoint_steps": saved.steps,
        "length": scorer.max_length,
        "seed": args.seed,
        "overrides": args.config,
    }
    if of_questions:
        result["texts"] = args.texts
        settings = settings._replace(lengths=settings.lengths or (scorer.max_length,))
        _check_lengths(args, settings, of_questions, encode)
        for name in of_questions:
            print(name, flush=True)
            for figures in in_context.score(scorer, encode, name, settings):
                found[name] = figures
                print(task_tables.last_row(figures["by_length"]), flush=True)
                files.write_result(FILE, result)  # a run that is cut off has what is done
            _print(name, found[name])
        lines = {name: found[name]["by_length"] for name in of_questions}
        result["picture"] = _picture_name(saved.steps, settings, of_questions, args)
        files.write(result["picture"], task_tables.draw(lines, saved_run.named(saved.steps)))
    if of_harness:
        found |= _of_harness(parts, of_harness, manager, args)
        for name in of_harness:
            _print(name, found[name])
    files.write_result(FILE, _finite(result | {"complete": True}))
    print(f"{saved_run.named(saved.steps)}, {files.named(FILE)}", flush=True)
    return max(files.exit_code(), score_text() if scores_text else 0)


def _names(args: argparse.Namespace) -> tuple[bool, list[str], list[str]]:
    """Whether --tasks names the run's own split, the package's tasks in it, and the harness's.

    Refuses flags that none of them reads.
    """
    given = [name.strip() for name in args.tasks.split(",")]
    names = [one for name in given for one in in_context.names_of(name)]
    if "" in names:
        raise SettingError(f"--tasks={args.tasks} has no task: give names with commas between them")
    distributed.refuse(args, "one process scores --tasks, on all devices that it sees")
    others = list(dict.fromkeys(name for name in names if name != TEXT))
    of_questions = [name for name in others if name in QUESTION_TASKS]
    of_harness = [name for name in others if name not in QUESTION_TASKS]
    if TEXT not in names:
        flags.refuse(args, _OF_TEXT, f"only the task {TEXT} reads it")
    if not others:
        flags.refuse(args, OF_TASKS, f"the task {TEXT} does not read it")
        return True, [], []
    if not of_harness:
        flags.refuse(args, ("include_path", "num_fewshot"), "only the harness's tasks read it")
    if not of_questions:
        flags.refuse(args, OF_QUESTIONS, f"only {', '.join(QUESTION_TASKS)} read it")
    return TEXT in names, of_questions, of_harness


def _picture_name(
    steps: Sequence[int], settings: in_context.QuestionSettings, names: Sequence[str], args
) -> str:
    others = dict(
        tasks=names, lengths=settings.lengths, n=settings.n_questions, n_depths=settings.n_depths
    )
    others |= dict(texts=args.texts, seed=args.seed, config=args.config)
    return results.picture_name("evaluation_tasks", steps, max(settings.lengths), **others)


def _question_settings(args: argparse.Namespace) -> in_context.QuestionSettings:
    """What the package's own tasks ask; without lengths where the flags give none."""
    lengths: list[int] = []
    if args.lengths is not None:
        flags.refuse(args, {"length"}, f"--lengths={args.lengths} has the lengths")
        lengths = flags.numbers("lengths", args.lengths, Size, "4096,16384")
    default = in_context.QuestionSettings(lengths)
    hay = default.hay if args.texts is None else _hay(args.texts)
    n_questions, n_depths = args.limit or default.n_questions, args.depths or default.n_depths
    return in_context.QuestionSettings(lengths, n_questions, n_depths, hay, args.seed)


def _typed(args: argparse.Namespace) -> str | None:
    """The flag of lengths as it was typed; None: the length is the run's."""
    given = {name: getattr(args, name) for name in ("lengths", "length")}
    return next((f"--{name}={value}" for name, value in given.items() if value is not None), None)


def _check_lengths(
    args, settings: in_context.QuestionSettings, names: Sequence[str], encode: Encode
) -> None:
    """Raises `SettingError`, before anything is scored, if a question has no room in a length."""
    least, name = max((in_context.shortest(settings, name, encode), name) for name in names)
    if least > (length := min(settings.lengths)):
        typed = _typed(args)
        fix = f"raise {length} to that or more" if typed else f"give --length={least}"
        given = typed or f"the run's length is {length}"
        raise SettingError(f"{given}: the sentences of {name} alone have {least} tokens: {fix}")


def _hay(path: str) -> Hay:
    """The text that --texts names; its errors name the flag."""
    try:
        return Hay.of_text(_held_out(path))
    except FileNotFoundError:
        raise SettingError(
            f"--texts={path} does not exist: give a file or folder of text"
        ) from None
    except SettingError as error:
        words = str(error)
        words = words if words.startswith(path) else f"{path}: {words}"
        raise SettingError(f"--texts={words}") from None


def _held_out(path: str) -> str:
    """The test split of a text, as `text.text` has it, for training may have read the rest."""
    from reformax.data import text

    task = text.text(path)
    rows = task.eval_batches("test", 1, *[min(task.n_targets("test"), 2**16)] * 2)
    tokens = [row.targets[0][row.weights[0] > 0] for row in rows]
    return bytes(np.concatenate(tokens).astype(np.uint8)).decode(errors="replace")


def _manager(include_path: str | None, names: Sequence[str]):
    """The harness's tasks: those of a folder alone, if it has all that are requested."""
    try:
        lm_eval.check_installed()
    except ImportError as error:
        of_package = [TEXT, *QUESTION_TASKS]
        if near := messages.nearest(names[0], of_package, most=0):
            raise SettingError(f"--tasks: there is no task {names[0]}{near}") from None
        raise ImportError(
            f"--tasks: {names[0]} is a task of the harness, and {error}; the package's tasks are "
            f"{', '.join(of_package)}"
        ) from None
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
            known = list(dict.fromkeys([TEXT, *QUESTION_TASKS, *manager.all_tasks]))
            raise SettingError(f"--tasks: there is no task {name}{messages.nearest(name, known)}")
    return manager


def _of_harness(parts, names: Sequence[str], manager, args) -> dict[str, Any]:
    """The figures of tasks of the harness by their names."""
    model = lm_eval.model_class(HarnessRequests)(*parts)
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
    """A line for each figure; the harness's have the name of a filter after a comma."""
    for key, value in figures.items():
        metric, _, filter_name = key.partition(",")
        if not isinstance(value, float) or metric.endswith("_stderr"):
            continue
        error = figures.get(f"{metric}_stderr,{filter_name}")
        error = f" (standard error {error:.4f})" if isinstance(error, float) else ""
        kind = f" ({filter_name})" if filter_name not in ("", "none") else ""
        print(f"{name} {metric}{kind}: {value:.4f}{error}", flush=True)


def _finite(value: Any) -> Any:
    """The value with text for numbers that JSON lacks, such as an infinite perplexity."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value

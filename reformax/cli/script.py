"""What the command-line scripts share: errors in one line, exit codes, the last lines of a run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

# What building a run's model takes of its settings.
MODEL = ("model", "batch_size", "length")
_TRACEBACK = "--traceback"


def add_traceback_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that `run` looks for."""
    parser.add_argument(_TRACEBACK, action="store_true", help="show where an error comes from")


def config_file(folder: Path) -> Path:
    """A run's config.gin, written anew from its latest checkpoint where it is missing.

    Raises:
      ValueError: the folder holds no run.
    """
    path = folder / "config.gin"
    if not path.is_file():
        from reformax.training.checkpoint import Checkpoints

        checkpoints = Checkpoints(folder)
        steps = checkpoints.steps()
        text = checkpoints.config(steps[-1]) if steps else None
        if text is None:
            raise ValueError(
                f"output_dir={folder} holds no run: train.py writes config.gin into it"
            )
        path.write_text(text)
        print(f"note: {path} was missing; it is written from the checkpoint of step {steps[-1]}")
    return path


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose a trained model: a run's folder, a checkpoint and settings."""
    parser.add_argument("--output_dir", required=True, help="a folder that train.py wrote")
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="best, latest, a step, or average:5 for the mean of the last five checkpoints",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one setting; repeatable",
    )


# The flags of `add_search_flags` and their values where they are not given.
SEARCH = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 50, "batch_tokens": 4096}


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of searching translations, None where not given."""
    flags = parser.add_argument_group("translation")
    flags.add_argument(
        "--beam_size", type=int, help=f"1 decodes greedily (default: {SEARCH['beam_size']})"
    )
    flags.add_argument(
        "--length_penalty",
        type=float,
        help="alpha: scores are log p / ((5 + tokens) / 6)^alpha "
        f"(default: {SEARCH['length_penalty']})",
    )
    flags.add_argument(
        "--max_extra",
        type=int,
        help="tokens that a translation may have more than its source "
        f"(default: {SEARCH['max_extra']})",
    )
    flags.add_argument(
        "--batch_tokens",
        type=int,
        help=f"source tokens translated together (default: {SEARCH['batch_tokens']})",
    )


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `reformax.generation.translate` that the flags give."""
    given = {name: getattr(args, name) for name in SEARCH}
    return {name: SEARCH[name] if value is None else value for name, value in given.items()}


def refuse(args: argparse.Namespace, flags: Collection[str], why: str) -> None:
    """Raises `ValueError` for a flag that is given, of those that are None where they are not."""
    for name in flags:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}={getattr(args, name)}: {why}, leave the flag out")


def parse_run(args: argparse.Namespace, data_dir: str | None = None) -> None:
    """Parses the config of the run that the flags name, and their settings."""
    from reformax.cli import config

    path = config_file(Path(args.output_dir))
    config.parse([str(path)], args.config, data_dir=data_dir)


def restore_model(args: argparse.Namespace, run: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    """The model for evaluation, its parameters, and the steps of the checkpoints they are from.

    Args:
      args: the flags of `add_run_flags`.
      run: at least those settings of the run that `MODEL` names.
    """
    import jax

    from reformax.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(args.output_dir)
    model = run["model"](mode="eval")
    shape = (run["batch_size"], run["length"])
    like = jax.eval_shape(lambda key: model.init_params(key, shape), jax.random.PRNGKey(0))
    averaged = re.fullmatch(r"average:(\d+)", args.checkpoint)
    if averaged:
        return model, *checkpoints.restore_average(int(averaged[1]), like)
    step = _checkpoint_step(checkpoints, args.checkpoint)
    return model, checkpoints.restore_params(step, like)[0], [step]


def named(steps: list[int]) -> str:
    """The checkpoints that parameters are from, in words."""
    if len(steps) == 1:
        return f"checkpoint of step {steps[0]}"
    return f"mean of the checkpoints of steps {', '.join(map(str, steps))}"


def keep_vocabulary(args: argparse.Namespace, vocabulary, step: int) -> None:
    """Makes a vocabulary of sentences the one that the run keeps.

    Args:
      args: the flags of `add_run_flags`.
      vocabulary: a `reformax.data.base.Vocabulary`.
      step: the checkpoint that it must be the one of.

    Raises:
      ValueError: the run's folder has none, or it does not fit the checkpoint.
    """
    from reformax.training.checkpoint import Checkpoints

    fingerprint = vocabulary.keep_in(args.output_dir, begun=True)
    Checkpoints(args.output_dir).check_vocabulary(step, fingerprint)


def _checkpoint_step(checkpoints, which: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"no checkpoint in {checkpoints.folder}: train.py saves one after a while")
    if which == "latest":
        return steps[-1]
    if which == "best":  # a run stopped before its first evaluation has only unscored ones
        best = checkpoints.best_step()
        return steps[-1] if best is None else best
    if not which.isdigit():
        raise ValueError(
            f"checkpoint={which} must be best, latest, average:N or one of the steps {steps}"
        )
    return int(which)


def note_unused(args: argparse.Namespace, read: Collection[str], file=None) -> None:
    """Notes on `file` the settings of `--config` that were neither used nor `read`.

    Names in `read` are those of the run's settings, or of others as module.function.argument.
    """
    from reformax.cli import config

    used = [name if "." in name else f"loop.train.{name}" for name in read]
    for override in config.unused(args.config, also_used=used):
        print(f"note: --config={override!r} set something that this did not use", file=file)


def run(main: Callable[[], int]) -> int:
    """Calls `main`; an error that the user can mend becomes one line on stderr and an exit code."""
    try:
        return main()
    except KeyboardInterrupt:  # before the first step or during an evaluation; nothing is lost
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        line = one_line(error)
        if line is None or _TRACEBACK in sys.argv:
            raise
        print(f"error: {line}", file=sys.stderr)
        from reformax.cli.config import ConfigError

        return 2 if isinstance(error, ConfigError) else 1


def one_line(error: Exception) -> str | None:
    """The error's own line, without what gin adds; None if it is a fault of the program."""
    text = str(error)
    # gin appends where the failing function was called from.
    first = text.split("\n  In call to configurable")[0].strip()
    if "RESOURCE_EXHAUSTED" in text:
        return (
            f"out of memory: lower batch_size, length or loss_chunk_len ({first.splitlines()[0]})"
        )
    if macro := re.search(r"call to configurable 'macro' .* in scope '([^']+)'", text):
        return f"the config uses %{macro[1]}, which no file and no --config sets: set {macro[1]}"
    if isinstance(error, TypeError) and "required positional argument: 'data_dir'" in text:
        return "the task reads files and is not told which: give --data_dir"
    if isinstance(error, TypeError) and "No values supplied by Gin" in text:
        return "the config leaves out an argument: " + first.splitlines()[0]
    if isinstance(error, TypeError) and "required keyword-only argument" in text:
        return "the config leaves out an argument: " + first
    mendable = (ValueError, OSError, NotImplementedError, FloatingPointError, ImportError)
    if isinstance(error, mendable):
        return " ".join(first.split()) or type(error).__name__
    return None


def report(result: dict[str, Any]) -> int:
    """Prints how a run of `loop.train` ended and what to do next; returns the exit code."""
    folder = result["output_dir"]
    if result["interrupted_by"] is not None:
        again = shlex.join(["python", *sys.argv])
        print(f"stopped by {result['interrupted_by'].name}; saved at step {result['step']}")
        print(f"to go on: {again}")
        return 128 + result["interrupted_by"]
    if result["step"] < result["steps"]:
        print(f"out of time at step {result['step']} of {result['steps']}")
    metric = result["metric"]
    print(
        f"{result['eval_split']} {metric.replace('_', ' ')}: {result[metric]:.4f} at step "
        f"{result['step']}; best {result['best_' + metric]:.4f} at step {result['best_step']}"
    )
    kept = " vocabulary.model" if (Path(folder) / "vocabulary.model").exists() else ""
    print(f"in {folder}: checkpoints/ config.gin metrics.jsonl loss.png tensorboard/{kept}")
    script = Path(sys.argv[0]).with_name("evaluate.py")
    print(f"next: {shlex.join(['python', str(script), f'--output_dir={folder}', '--split=test'])}")
    return 0

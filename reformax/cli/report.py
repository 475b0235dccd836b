"""The last lines of a script: how the run ended, what to do next, which settings went unused."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reformax.cli import prompts, terminal_curve
from reformax.declared import some_of
from reformax.shell import in_quotes


def note_unused(
    overrides: Sequence[str],
    read: Collection[str] = (),
    file=None,
    files: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Prints a note for each setting of --config, and each file, that set what nothing used.

    Args:
      overrides: the settings, NAME=VALUE.
      read: settings that were read without a call: arguments of `loop.train`, or
        module.function.argument.
      file: gets the notes; None for stdout.
      files: the user's config files, and `config.settings_of` each.
    """
    from reformax.cli import parsed

    used = [name if "." in name else f"loop.train.{name}" for name in read]
    for override in parsed.unused(overrides, also_used=used):
        print(
            f"note: --config={in_quotes(override)} sets something that this run does not use",
            file=file,
        )
    noted = {override.partition("=")[0].strip() for override in overrides}
    for config_file, names in (files or {}).items():
        others = {f"{whole} =": name for name, whole in names.items() if name not in noted}
        unused = [others[line] for line in parsed.unused(list(others), also_used=used)]
        if unused:
            names = some_of(unused)
            print(f"note: {config_file} sets {names}, which this run does not use", file=file)


def training(result: dict[str, Any], prints: bool = True, *, with_curve: bool) -> int:
    """Prints how a run of `loop.train` ended and what to do next; returns the exit code.

    Args:
      result: what it returned.
      prints: whether to print; of several processes one does.
      with_curve: whether to draw the training loss.
    """
    folder, interrupted_by = result["output_dir"], result["interrupted_by"]
    if not prints:
        return 0 if interrupted_by is None else 128 + interrupted_by
    if interrupted_by is not None:
        again = shlex.join([*_simulated_devices(), *program(), *sys.argv[1:]])
        print(f"stopped by {result['interrupted_by'].name}; saved at step {result['step']}")
        print(f"to go on: {again}")
        return 128 + result["interrupted_by"]
    if result["step"] < result["steps"]:
        print(f"out of time at step {result['step']} of {result['steps']}")
    from reformax.training import side_channels
    from reformax.training.curves import words_of

    if with_curve:
        with side_channels.BestEffort("the curve"):
            print(terminal_curve.of_run(folder, result["metric"]))

    metric = result["metric"]
    part = "" if result["whole"] else f" ({result['n_targets']:,} targets of the split)"
    best = " of a part of it" if result["whole"] and not result["best_whole"] else ""
    print(
        f"{result['eval_split']} {words_of(metric, result)}: {result[metric]:.4f} at step "
        f"{result['step']}{part}; best{best} "
        f"{result['best_' + metric]:.4f} at step {result['best_step']}"
    )
    for name, score in result.get("evaluations", {}).items():
        found = score.get("whole_split", score)
        value, whole = found[score["metric"]], found is not score or score["whole"]
        part = "" if whole else f" ({found['n_targets']:,} targets of the split)"
        words = words_of(score["metric"], found)
        print(f"{name} {words}: {'none' if value is None else f'{value:.4f}'}{part}")
    others = {"vocabulary.model": "vocabulary.model", "profile": "profile/"}
    kept = "".join(f" {shown}" for name, shown in others.items() if (Path(folder) / name).exists())
    print(f"in {folder}: checkpoints/ config.gin metrics.jsonl loss.png tensorboard/{kept}")
    run, trust = f"--output_dir={folder}", _trust(Path(folder) / "config.gin")
    if "bits_per_byte" in result:  # a text
        asked = ["--chat", "--prompt=Who are you?"] if prompts.is_of_chats() else []
        print(f"what it writes: {shlex.join([*program('generate'), run, *asked, *trust])}")
    print(f"next: {shlex.join([*program('evaluate'), run, '--split=test', *trust])}")
    return 0


def _simulated_devices() -> list[str]:
    """The variables that simulate devices, as a shell takes them before a command."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        return []
    names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


def _trust(path: Path) -> list[str]:
    """The flag that reading this config takes, if it takes one."""
    from reformax.cli import config

    if not path.is_file() or not config.needs_trust(path.read_text(), str(path)):
        return []
    return ["--trust_config"]


def counted(n: int, thing: str) -> str:
    """`n` of a thing, in words: 1 line, 2,000 lines."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def width() -> int | None:
    """The letters that a table's line has room for; None: any number, for stdout is no terminal."""
    return shutil.get_terminal_size((0, 0)).columns or None


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of figures."""
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def program(name: str | None = None) -> list[str]:
    """The words that call this command, or the one of `name`: a script, or `reformax`."""
    script = Path(sys.argv[0])
    if script.suffix != ".py":
        return ["reformax", name or script.name.split()[-1]]
    return ["python", str(script.with_name(f"{name}.py") if name else script)]

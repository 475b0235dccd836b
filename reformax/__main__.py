"""The command `reformax`; `python -m reformax` is the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from reformax import __version__
from reformax.cli import errors, messages, streams
from reformax.declared import SettingError


class Command(NamedTuple):
    """A part of the command: a module with `main(argv)`, which returns the exit code."""

    module: str
    help: str
    stdout: type[streams.Stream] = streams.Stream  # `Result` where the output is the result


COMMANDS = {
    "train": Command("reformax.cli.train", "train a model as a gin config says"),
    "evaluate": Command("reformax.cli.evaluate", "score a trained model on a split"),
    "generate": Command("reformax.cli.generate", "continue a prompt, or translate", streams.Result),
    "prepare": Command("reformax.cli.prepare", "prepare a text of any size, once"),
    "convert": Command("reformax.convert.__main__", "convert checkpoints of Trax, Hugging Face"),
    "runs": Command("reformax.cli.runs", "compare runs: a table and a plot", streams.Result),
    "sweep": Command("reformax.cli.sweep", "train a grid of settings"),
    "configs": Command("reformax.cli.configs", "list the configs, or print one", streams.Result),
}


def main() -> int:
    """Runs the command that the first argument names; returns the exit code."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ("--help", [])
    return run(name, arguments)


def run(name: str, arguments: list[str]) -> int:
    """Runs a command, its errors in one line.

    Args:
      name: the command's.
      arguments: what follows it.
    """
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"reformax {__version__}")
        return 0
    sys.argv = [f"reformax {name}", *arguments]  # what --help, --traceback and reports read
    stdout = COMMANDS[name].stdout if name in COMMANDS else streams.Stream
    return errors.exit_code(lambda: _main(name)(arguments), stdout)


def _main(name: str) -> Callable[[list[str]], int]:
    """The function of a command, imported when it is called."""
    if name not in COMMANDS:
        near = messages.nearest(name, list(COMMANDS))
        raise SettingError(f"reformax has no command {name}{near}")
    return importlib.import_module(COMMANDS[name].module).main


def _help() -> str:
    rows = [f"  {name:<10}{command.help}" for name, command in COMMANDS.items()]
    last = "reformax COMMAND --help lists its flags"
    return "\n".join(["usage: reformax COMMAND [FLAGS]", "", *rows, "", last])


if __name__ == "__main__":
    sys.exit(main())

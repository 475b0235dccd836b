"""Command-line flags that several scripts share."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, NoReturn

from reformax.declared import (
    Beams,
    Bounds,
    Extra,
    NonEmpty,
    NonNegative,
    PathName,
    SettingError,
    Size,
    check,
    expected,
    fits,
    shown,
)

TRACEBACK = "--traceback"
# The flags of `add_search` and their values where they are not given.
SEARCH = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 50, "batch_tokens": 4096}
Override = Annotated[str, NonEmpty("NAME=VALUE")]
# evaluate.py translates nothing with 0.
BeamSize = Annotated[int, Bounds(0, typing.get_args(Beams)[1].most)]


_names_in_use: list[str] = []  # of the flags of the parser that read the command line
_given: dict[str, Any] = {}  # the values that these have on it


def names_in_use() -> list[str]:
    """The names of the flags of the command in use, without dashes."""
    return list(_names_in_use)


def as_given(line: str) -> str:
    """An error's line with the flags of the command line as they were typed: --init_from=FOLDER."""
    for name, value in _given.items():
        text, words = re.escape(str(value)), re.escape(shown(value))
        with_value = rf"{name}(?=={text}(?!\w)| is (?:{text}|{words})(?!\w))"
        line = re.sub(rf"(?<![\w./@%('\"=-]){with_value}", f"--{name}", line)
    return line


# Flags of which two could mean both. Of others the last counts, as of what a wrapper adds.
_INPUTS = {"data_dir", "init_from", "prompt_file", "texts", "vocabulary"}


class _Once(argparse.Action):
    """Stores a flag's value, and refuses another input of the same flag: one would be left out."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = parser.given.setdefault(self.dest, values)
        if before != values and self.dest in _INPUTS:
            parser.error(f"{option_string} is given twice, {before} and {values}: give it once")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which checks the flags whose type is `of` a hint."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given: dict[str, Any] = {}  # the values of the flags that `_Once` has stored
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        """Raises `SettingError`, of which `errors.exit_code` makes a line and exit code 2."""
        raise SettingError(f"{message}; --help lists the flags")

    def parse_args(self, args=None, namespace=None):
        """As argparse does it; the error of an unknown flag names the nearest one."""
        args, unknown = self.parse_known_args(args, namespace)
        self.refuse_near(unknown)
        if unknown:
            set_by = "; --config='NAME=VALUE' sets one of the run" if "config" in args else ""
            self.error(f"{unknown[0]} is no flag{self.beginning_with(unknown[0]) or set_by}")
        return args

    def refuse_near(self, unknown: Sequence[str]) -> None:
        """Raises `SettingError` for what is no flag but nearly one, and for what has no name."""
        for one in unknown[:1]:
            near = difflib.get_close_matches(_name(one), self._flags, n=1, cutoff=0.8)
            if near:
                self.error(f"{one} is no flag, did you mean {near[0]}")
            if not one.startswith("--"):
                required = [x.option_strings[0] for x in self._actions if x.required]
                flag = _flag_of(one, *required)
                if flag in self._flags:
                    self.error(f"{one} is no flag, did you mean {flag}={shlex.quote(one)}")
                self.error(f"{one} is no flag: a flag is --NAME=VALUE")

    def beginning_with(self, unknown: str) -> str:
        """', did you mean --data_dir' for --data; '' unless one flag alone begins so."""
        found = [flag for flag in self._flags if flag.startswith(f"{_name(unknown)}_")]
        return f", did you mean {found[0]}" if len(found) == 1 else ""

    @property
    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does it, and then the check."""
        _names_in_use[:] = [action.dest for action in self._actions]
        given = sys.argv[1:] if args is None else args
        if (
            given
            and not given[0].startswith("-")
            and not {"-h", "--help"} & set(given)
            and all(x.option_strings for x in self._actions)
        ):
            self.refuse_near(given[:1])  # before what is missing: it has a name there
        self.given.clear()
        _given.clear()
        args, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            for flag in action.option_strings[-1:] if action.dest in self.given else ():
                _given[flag.lstrip("-")] = self.given[action.dest]
        for action in self._actions:
            value, hint = getattr(args, action.dest, None), getattr(action.type, "hint", None)
            if hint is not None and value is not None:
                name = action.option_strings[-1] if action.option_strings else action.metavar
                for one in value if isinstance(value, list) else [value]:
                    check(name.lstrip("-"), one, hint)
        return args, rest


def _flag_of(path: str, *required: str) -> str | None:
    """The flag that a path was meant for; None if it is none."""
    if path.endswith(".gin"):
        return "--config_file"
    run = "--output_dir" in required and os.path.isdir(path)
    if run or os.path.isfile(os.path.join(path, "config.gin")):
        return "--output_dir"
    return "--data_dir" if os.path.exists(path) else None


def _name(flag: str) -> str:
    """'--data_dir' of '--data-dir=FOLDER'."""
    return flag.partition("=")[0].replace("-", "_").replace("__", "--", 1)


def of(hint: Any) -> Callable[[str], Any]:
    """The type of a flag that is declared as settings are, such as `of(Size)`."""
    kind = typing.get_args(hint)[0]

    def read(text: str) -> Any:
        if kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text  # the parser's check says what it should have been

    read.hint = hint
    return read


def parser(doc: str | None, prog: str | None = None) -> Parser:
    """A parser with a module's docstring as its help; `prog` names a command that is no file."""
    return Parser(
        prog=prog,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that `errors.exit_code` looks for."""
    parser.add_argument(TRACEBACK, action="store_true", help="show where an error comes from")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet."""
    parser.add_argument(
        "--quiet", action="store_true", help="print the result and notes alone, no progress"
    )


def add_changed_data(parser: argparse.ArgumentParser) -> None:
    """Adds --allow_changed_data; see `reformax.training.fingerprints`."""
    parser.add_argument(
        "--allow_changed_data",
        action="store_true",
        help="go on, and note it, where the data is not that of the checkpoint",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds --config, which overrides one setting."""
    parser.add_argument(
        "--config",
        action="append",
        type=of(Override),
        default=[],
        metavar="NAME=VALUE",
        help="one setting; repeatable",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the flag without which a run's config may name little; see `reformax.cli.trust`."""
    parser.add_argument(
        "--trust_config",
        action="store_true",
        help="the run's config may name any module, which is code that runs",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose a trained model: a run's folder, a checkpoint and settings."""
    parser.add_argument(
        "--output_dir", required=True, type=of(PathName), help="the folder of a run"
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="best, latest, a step, or average:5 for the mean of the last five checkpoints "
        "(default: best)",
    )
    add_config(parser)
    add_trust(parser)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of beam search. A flag that is not given is None; see `search_options`."""
    flags = parser.add_argument_group("translation")
    flags.add_argument(
        "--beam_size",
        type=of(BeamSize),
        help=f"1 decodes greedily (default: {SEARCH['beam_size']})",
    )
    flags.add_argument(
        "--length_penalty",
        type=of(NonNegative),
        help="alpha: scores are log p / ((5 + tokens) / 6)^alpha "
        f"(default: {SEARCH['length_penalty']})",
    )
    flags.add_argument(
        "--max_extra",
        type=of(Extra),
        help="tokens that a translation may have more than its source "
        f"(default: {SEARCH['max_extra']})",
    )
    flags.add_argument(
        "--batch_tokens",
        type=of(Size),
        help=f"source tokens translated together (default: {SEARCH['batch_tokens']})",
    )


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `reformax.generation.translate`, defaults filled in."""
    return with_defaults(args, SEARCH)


def with_defaults(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """The values of these flags, with the default wherever one is None."""
    given = {name: getattr(args, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def numbers(name: str, text: str, hint: Any, example: str) -> list[int]:
    """The numbers of a flag such as --n_hashes=2,4, in order.

    Raises:
      SettingError: one is no number that `hint` says, or is there twice.
    """
    try:
        found = sorted(map(int, text.split(",")))
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found) or not fits(found, Sequence[hint]):
        raise SettingError(
            f"--{name}={text}: expected different numbers, each {expected(hint)}, such as "
            f"--{name}={example}"
        )
    return found


def refuse(args: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Raises `SettingError` if one of these flags, which are None by default, was given."""
    for name in names:
        if (value := getattr(args, name)) is not None:
            given = "" if value is True else f"={value}"
            raise SettingError(f"--{name}{given}: {why}, leave the flag out")


def in_place_of_settings(line: str, function: str, names: Collection[str]) -> str:
    """The line with flags for settings of a function, such as --field=body for text.text.field.

    Args:
      line: an error's, or what a run says.
      function: 'module.function'.
      names: the arguments that are flags of the command.
    """
    setting = (
        rf"""--config=(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.)+)"""
        rf"""|{re.escape(function)}\.(?P<name>{"|".join(names)})\b(?:=(?P<value>'[^']*'))?"""
    )

    def flag(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"] or ""
        if found["word"]:
            owner_and_name, _, value = shlex.split(found["word"])[0].partition("=")
            owner, _, name = owner_and_name.rpartition(".")
            if owner != function or name not in names:
                return found[0]
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a word, or none
            value = value.strip("\"'")
        alone = value is True or value == ""  # and not 1, which is equal to True
        return f"--{name}" + ("" if alone else f"={shlex.quote(str(value))}")

    return re.sub(setting, flag, line)

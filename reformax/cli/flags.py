"""Command-line flags that several scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

TRACEBACK = "--traceback"
# The flags of `add_search` and their values where they are not given.
SEARCH = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 50, "batch_tokens": 4096}


def parser(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with a module's docstring as its help; `prog` names a command that is no file."""
    return argparse.ArgumentParser(
        prog=prog,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that `errors.exit_code` looks for."""
    parser.add_argument(TRACEBACK, action="store_true", help="show where an error comes from")


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
    parser.add_argument("--output_dir", required=True, help="a folder that train.py wrote")
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="best, latest, a step, or average:5 for the mean of the last five checkpoints",
    )
    add_config(parser)
    add_trust(parser)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of beam search. A flag that is not given is None; see `search_options`."""
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
    """The options of `reformax.generation.translate`, defaults filled in."""
    return with_defaults(args, SEARCH)


def with_defaults(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """The values of these flags, with the default wherever one is None."""
    given = {name: getattr(args, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def refuse(args: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Raises `ValueError` if one of these flags, which are None by default, was given."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}={getattr(args, name)}: {why}, leave the flag out")

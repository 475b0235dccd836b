"""Trains a grid of settings, one run after the other: `reformax sweep FILE`.

FILE has lines of a config. A list gives a run for each of its values, so

    include 'quickstart.gin'
    steps = 200
    lsh.lsh.n_hashes = [1, 2, 4]
    learning_rate = [1e-3, 3e-3]

is 3 x 2 runs, in folders such as n_hashes=2,learning_rate=0.001 of --output_dir. A value that is a
list itself is put in another list: [[1, 2]]. Each run is a `reformax train`, with the included
files as --config_file and every other line as --config. Before the first run begins, the model and
the task of each are built, so a wrong value is reported at once.

The same command goes on after any interruption. A run that has finished with the same settings is
left as it is, and so is one that was out of time (`max_minutes`); one that was interrupted goes on,
one that failed is tried again. With other settings a run that has finished goes on where these have
more steps; else they are refused. A run that fails is reported, and the next one begins. The last
lines are those of `reformax runs`.

Exit code 0: all have finished; 1: some have not; 2: FILE or the command is wrong; 143, 130 or 129:
stopped by SIGTERM, SIGINT or SIGHUP, with the run in progress saved.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from reformax import durable
from reformax.cli import config, errors, flags, messages, modules, parsed, runs, typed
from reformax.cli.statements import Statements, read_file
from reformax.data.files import FINISHED, PLOT
from reformax.declared import PathName, SettingError
from reformax.training import dry_run, loop
from reformax.training.checkpoint import CheckpointReader
from reformax.training.folder import make_output_dir
from reformax.training.interrupt import Interrupt

LONGEST = 100  # letters of a run's name


class Member(NamedTuple):
    """A run of the grid."""

    name: str
    overrides: list[str]


class CheckedConfig(NamedTuple):
    """A run's config: its checksum and its steps."""

    fingerprint: str
    steps: int


def main(argv: Sequence[str] | None = None) -> int:
    """Flags, the runs, the table."""
    args = parser().parse_args(argv)
    file = Path(args.file)
    statements = _read(file)
    files = [_found(name, file) for name in statements.includes]
    members = grid(statements, args.file)
    jax.config.update("jax_platforms", "cpu")  # an accelerator is for the runs, in their processes
    checked = [_checked(member, files, args) for member in members]
    fingerprints = [one.fingerprint for one in checked]
    _check_apart(members, fingerprints)
    folder = make_output_dir(args.output_dir or Path("runs") / file.stem)
    _check_steps_left(folder, members, checked)
    ended: dict[str, int] = {}
    with Interrupt() as interrupt:  # the run in progress acknowledges the signal
        for i, (member, fingerprint) in enumerate(zip(members, fingerprints, strict=True), start=1):
            if interrupt:
                break
            title = f"[{i} of {len(members)}] {member.name}"
            if _has_finished(folder, member.name, fingerprint):
                _say(args, f"{title}: finished before")
                continue
            command = _command(args, files, member, folder)
            _say(args, f"{title}: {shlex.join(['reformax', *command])}")
            ended[member.name] = code = _run(command, interrupt)
            if code == 0:
                _note_finished(folder, member.name, fingerprint)
            elif not interrupt:
                print(f"{title}: ended with exit code {code}", file=sys.stderr, flush=True)
    _show(folder, members)
    if interrupt.signal is not None:
        return 128 + interrupt.signal
    failed = [f"{name} (exit code {code})" for name, code in ended.items() if code]
    if failed:
        print(f"error: not finished: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def parser() -> flags.Parser:
    """The flags."""
    parser = flags.parser(__doc__)
    parser.add_argument("file", metavar="FILE", type=flags.of(PathName))
    parser.add_argument(
        "--output_dir", type=flags.of(PathName), help="holds the runs (default: runs/<FILE's name>)"
    )
    flags.add_config(parser)
    parser.add_argument("--data_dir", type=flags.of(PathName), help="where the task finds its data")
    flags.add_quiet(parser)
    flags.add_traceback(parser)
    return parser


def _read(file: Path) -> Statements:
    if not file.is_file():
        raise SettingError(f"no file {file}: give a file of settings, some of them lists")
    statements = read_file(file)
    for module in statements.imports:
        if (
            module != "__gin__.dynamic_registration"
            and modules.module_of(module.rpartition(".")[2]) != module
        ):
            raise SettingError(f"{file} imports {module}: include a config that has the import")
    return statements


def _found(name: str, file: Path) -> str:
    """The path of an included file: next to FILE, or as train finds it."""
    neighbour = file.parent / name
    return str(neighbour) if neighbour.is_file() else name


def grid(statements: Statements, file: str) -> list[Member]:
    """The members of the grid, the last line's values changing first.

    Raises:
      SettingError: no line has a list, or one is empty.
    """
    values = {
        name: value if isinstance(value, list) else [value]
        for name, value in statements.values.items()
    }
    varied = [name for name, value in statements.values.items() if isinstance(value, list)]
    if not varied:
        raise SettingError(
            f"{file} has no list: write the values to try as one, such as n_layers = [2, 4]"
        )
    for name in varied:
        if not values[name]:
            raise SettingError(f"{file}: {name} is []: expected at least one value")
    short = dict(zip(varied, runs.short_names(varied), strict=True))
    members = []
    for chosen in itertools.product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        name = ",".join(f"{short[n]}={_slug(settings[n])}" for n in varied)
        members.append(Member(name, [f"{n} = {value!r}" for n, value in settings.items()]))
    return _distinctly_named(members)


def _slug(value: Any) -> str:
    """A value as a part of a folder's name: 0.001, or local.local_lsh.lsh."""
    return re.sub(r"[^\w.+-]+", "_", repr(value)).strip("_")


def _distinctly_named(members: list[Member]) -> list[Member]:
    """The members with a checksum after names that are long or the same."""
    count = Counter(member.name for member in members)
    return [
        member
        if count[member.name] == 1 and len(member.name) <= LONGEST
        else Member(f"{member.name[:LONGEST]}.{_crc(member.overrides)}", member.overrides)
        for member in members
    ]


def _crc(value: Any) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def _checked(member: Member, files: list[str], args) -> CheckedConfig:
    """What a run's config is.

    Raises:
      SettingError: a value of it is wrong; the line names the run.
    """
    read = files or ["quickstart.gin"]
    overrides = member.overrides + args.config
    try:
        config.parse(read, overrides, data_dir=args.data_dir)
        settings = parsed.bindings(loop.train)
        dry_run.check(**settings)
    except Exception as error:
        if (line := errors.one_line(error)) is None:
            raise
        if not isinstance(error, config.ConfigError):
            line = typed.typed(line, messages.owner_of(error))
        raise config.ConfigError(f"{member.name}: {line}") from None  # which stays as it is
    return CheckedConfig(_crc(parsed.text()), settings["steps"])


def _check_apart(members: list[Member], fingerprints: list[str]) -> None:
    """Raises `SettingError` for two runs with one config."""
    first: dict[str, str] = {}
    for member, fingerprint in zip(members, fingerprints, strict=True):
        if (other := first.setdefault(fingerprint, member.name)) is not member.name:
            raise SettingError(
                f"{other} and {member.name} are the same run: a list has a value twice, or "
                "--config sets what a list varies"
            )


def _check_steps_left(folder: Path, members: list[Member], checked: list[CheckedConfig]) -> None:
    """Raises `SettingError` for a run that finished by other settings and has no step for these.

    Its score would be shown as theirs.
    """
    finished = _finished(folder)
    for member, (fingerprint, steps) in zip(members, checked, strict=True):
        if finished.get(member.name, fingerprint) == fingerprint:
            continue
        done = max(CheckpointReader(folder / member.name).steps(), default=0)
        if done >= steps:
            raise SettingError(
                f"{folder / member.name} was trained to step {done} with other settings, and "
                f"steps={steps} leaves none for these: give another --output_dir, or more steps"
            )


def _finished(folder: Path) -> dict[str, str]:
    try:
        found = json.loads(durable.read(folder / FINISHED))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_finished(folder: Path, name: str, fingerprint: str) -> bool:
    there = (folder / name / "metrics.jsonl").is_file()
    return there and _finished(folder).get(name) == fingerprint


def _note_finished(folder: Path, name: str, fingerprint: str) -> None:
    found = _finished(folder) | {name: fingerprint}
    durable.write(folder / FINISHED, f"{json.dumps(found, indent=1)}\n".encode())


def _command(args, files: list[str], member: Member, folder: Path) -> list[str]:
    """`train` and its flags."""
    command = ["train", *(f"--config_file={file}" for file in files)]
    command += [f"--config={override}" for override in member.overrides + args.config]
    command.append(f"--output_dir={folder / member.name}")
    command += [f"--data_dir={args.data_dir}"] if args.data_dir else []
    return command + ["--quiet"] * args.quiet


def _run(command: list[str], interrupt: Interrupt) -> int:
    """Runs `reformax` in a process of its own, which gets the signals that this one gets."""
    passed_on = False
    with subprocess.Popen([sys.executable, "-m", "reformax", *command]) as process:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if interrupt.signal is not None and not passed_on:
                    process.send_signal(interrupt.signal)
                    passed_on = True


def _say(args, text: str) -> None:
    if not args.quiet:
        print(text, flush=True)


def _show(folder: Path, members: list[Member]) -> None:
    """The table and the plot of the runs so far."""
    folders = [folder / member.name for member in members]
    begun = [str(path) for path in folders if (path / "metrics.jsonl").is_file()]
    if begun:
        print()
        runs.main([*begun, f"--plot={folder / PLOT}"])

"""Parses gin files and overrides, once, into gin's global config; every mistake is one line.

Overrides see the imports of all files. A module of this package, or else one of the working
directory, needs no import line: `--config='loop.train.task=@text.text()'`.

The steps, each in a file and importing those before it: `statements` finds those of one text,
`reading` reads them into gin's config, `lookup` finds values by name, `parsed` builds what the
config names, `mistakes` says what is wrong, and this file parses all that a command gets.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin

from reformax.cli import (
    configs,
    lookup,
    mistakes,
    modules,
    parsed,
    reading,
    short_names,
    statements,
    trax_config,
    trust,
)
from reformax.cli.lookup import TRAIN
from reformax.cli.overrides import override_of
from reformax.cli.statements import ConfigError
from reformax.declared import shown
from reformax.shell import in_quotes, user_path

MOST = 2**20  # bytes of a config file
_TASK = f"{TRAIN}.task"


def parse(
    config_files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    data_dir: str | None = None,
    init_from: str | None = None,
    trains: bool = False,
) -> None:
    """Parses files, then overrides, into gin's global config.

    Files and what they include are found in the working directory, in the folders of these files,
    and by their names among those that come with the package.

    Args:
      config_files: gin files; later ones win.
      overrides: bindings such as 'loop.train.steps=10', or 'd_model=64' for a macro that a file
        defines or a short name.
      data_dir: bound to the `data_dir` of the config's task.
      init_from: bound to `loop.train.init_from`. A vocabulary that lies in this folder is bound to
        the `vocabulary` of the config's task, unless the config sets one.
      trains: whether a model is to be trained, of which files to be included may say nothing.

    Raises:
      ConfigError: a file, module, function, parameter or macro does not exist, or a line cannot be
        read.
    """
    _forget()
    modules.find_in_working_directory()
    folders = [Path(file).absolute().parent for file in config_files]
    new_macros: dict[str, str] = {}
    used: set[str] = set()  # macros; what follows may set their arguments to something else
    for config_file in config_files:
        path = _find(config_file)
        if configs.is_packaged(path):
            reading.read_file(path, folders)
        else:
            trax_config.refuse(config_file, statements.read_file(path))
            new_macros |= dict.fromkeys(reading.read_file(path, folders), config_file)
        used |= mistakes.macros_used()
    if not any(selector == TRAIN for _, selector in gin.config._CONFIG):
        reading.make_known("loop.train")
    try:
        _parse_overrides(overrides)
    finally:  # settings of a model that no file has are no mistakes of their own
        if trains:
            _refuse_parts_alone(config_files)
    _bind_short_names()
    mistakes.check_used(new_macros, used | mistakes.macros_used())
    if data_dir is not None:
        _bind_data_dir(data_dir)
    if init_from is not None:
        _bind_init_from(init_from)


def parse_saved(
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    *,
    trusted: bool = False,
    data_dir: str | None = None,
) -> None:
    """Parses the config that a run was saved with, then overrides, into gin's global config.

    Nothing is imported or called but what `trust` allows.

    Args:
      text: the config.
      source: the file that it is from, for errors.
      overrides: as in `parse`; they are the user's own and may hold any name.
      trusted: whether the config may name any module and include files.
      data_dir: as in `parse`.

    Raises:
      ConfigError: as `parse` does; or the config names something that could run code.
    """
    _forget(saved=True)
    if trusted:
        modules.find_in_working_directory()
    try:
        names = None if trusted else trust.Names()
        reading.read(text, source, names=names, folders=[Path(source).parent])
    except ConfigError:
        _forget(saved=True)  # nothing of it stays
        raise
    _parse_overrides(overrides)
    if data_dir is not None:
        _bind_data_dir(data_dir)


def needs_trust(text: str, source: str) -> bool:
    """Whether a run's config is read with --trust_config alone."""
    try:
        reading.read(text, source, names=trust.Names(), bind=False)
    except ConfigError:
        return True
    return False


_saved = False  # whether the parsed config is that of a run


def is_saved() -> bool:
    """Whether the parsed config is that of a run: flags of a command go before its settings."""
    return _saved


def _forget(saved: bool = False) -> None:
    """Forgets what was parsed before."""
    global _saved
    _saved = saved
    parsed.forget()


def _refuse_parts_alone(config_files: Sequence[str]) -> None:
    """Raises `ConfigError` if files to be included, such as chats.gin, follow no model's config."""
    are_parts = [configs.is_part(_find(file)) for file in config_files]
    if any(are_parts) and all(are_parts) and not lookup.is_set(f"{TRAIN}.model"):
        raise ConfigError(
            f"{config_files[-1]} is a part of configs: give the config of a model before it, such "
            f"as --config_file=transformer_text.gin --config_file={shlex.quote(config_files[-1])}"
        )


def _find(config_file: str) -> str:
    path = Path(config_file)
    if not reading.is_file(path):
        folder, path = path, configs.found(config_file)
        if path is None and folder.is_dir():
            found = [sorted(folder.glob(x)) for x in ("config.gin", "*.gin", "*/config.gin")]
            which = next((files[0] for files in found if files), "a config file")
            raise ConfigError(f"{config_file} is a folder: give {which}")
        if path is None:
            raise ConfigError(f"no config file {config_file}{configs.nearest(config_file)}")
    if (n_bytes := path.stat().st_size) > MOST:
        raise ConfigError(
            f"config file {config_file} has {n_bytes:,} bytes: expected at most {MOST:,}"
        )
    return str(path.absolute())


def settings_of(config_file: str) -> dict[str, str]:
    """The names that a user's file sets itself, and what they are without the file's aliases."""
    path = _find(config_file)
    if configs.is_packaged(path):
        return {}
    found = statements.read_file(path)
    alias = re.compile(rf"^(.*/)?({'|'.join(map(re.escape, found.aliases))})(?=\.)")

    def whole(name: str) -> str:
        if not found.aliases:
            return name
        return alias.sub(lambda match: (match[1] or "") + found.aliases[match[2]], name)

    return {name: whole(name) for name in found.values}


def _parse_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        if (found := override_of(override)) and (wrong := mistakes.of_override(found, _saved)):
            raise ConfigError(f"--config={in_quotes(override)}: {wrong}")
        # gin calls what a macro holds in a scope of its name, in which the config of a run has all
        # settings: an override without that scope would change nothing.
        reading.read(override, also_in=reading.macros() if _saved else ())


def _bind_short_names() -> None:
    """Sets arguments of training and of its models to the macros that are their short names."""
    macros = set(reading.macros())
    for selector, argument, name in short_names.in_use():
        if name in macros and not lookup.is_set(f"{selector}.{argument}"):
            macro = gin.config.ConfigurableReference(f"{name}/gin.macro", True)
            gin.bind_parameter(f"{selector}.{argument}", macro)


def _bind_init_from(init_from: str) -> None:
    """Binds the run to begin with, and its vocabulary as that of the config's task."""
    gin.bind_parameter(f"{TRAIN}.init_from", init_from)
    folder = user_path("--init_from", init_from)
    if folder.parent.name == "checkpoints":  # of one of its checkpoints
        folder = folder.parent.parent
    kept = folder / "vocabulary.model"
    if not kept.is_file() or not lookup.is_set(_TASK):
        return
    scope, selector = _task_of(_TASK)
    name = f"{scope}/{selector}.vocabulary".removeprefix("/")
    if not lookup.is_set(name) or gin.query_parameter(name) is None:
        # A task that learns none has no such parameter.
        with contextlib.suppress(ValueError):
            gin.bind_parameter((scope, selector, "vocabulary"), str(kept))


def _bind_data_dir(data_dir: str) -> None:
    """Binds the folder of the tasks of the run, its stages and its evaluations, or of their own."""
    if not lookup.is_set(_TASK):
        raise ConfigError(
            f"--data_dir={data_dir}: the config sets no loop.train.task: give one, such as "
            "--config='loop.train.task=@text.text()'"
        )
    without = [_give_folder(_TASK, data_dir)]
    without += [_give_folder(name, data_dir, scoped=False) for name in _other_tasks()]
    if all(without):
        raise ConfigError(
            f"--data_dir={data_dir}: the task {without[0]} reads no files: leave the flag out, "
            "or take a config of files, for a text of your own --config_file=reformer_text.gin"
        )


def _give_folder(parameter: str, data_dir: str, scoped: bool = True) -> str | None:
    """Binds the folder of the task that a parameter is set to; returns a task that has none.

    Not `scoped`, it is bound in all scopes, for a task is made in that of its stage and in its own;
    a folder that the config gives stays.
    """
    seen = set()
    while True:
        seen.add(parameter)
        scope, selector = _task_of(parameter)
        if not scoped and lookup.is_set(f"{selector}.data_dir"):
            return None
        try:
            gin.bind_parameter((scope if scoped else "", selector, "data_dir"), data_dir)
            return None
        except ValueError:
            parameter = f"{scope}/{selector}.task".removeprefix("/")
        if not lookup.is_set(parameter) or parameter in seen:
            return selector


def _other_tasks() -> Iterator[str]:
    """The parameters that are set to tasks of stages and of evaluations."""
    for parts, kind in (("stages", "stages.Stage"), ("evaluations", "evaluations.Evaluation")):
        argument = f"reformax.training.{kind}.task"
        for scope, _ in lookup.references_of(f"{TRAIN}.{parts}"):
            names = [f"{scope}/{argument}"] * bool(scope) + [argument]
            nearest = [name for name in names if lookup.is_set(name)][:1]
            yield from [name for name in nearest if gin.query_parameter(name) is not None]


def _task_of(parameter: str) -> tuple[str, str]:
    """The scope and the name of the task that a parameter is set to, by macros or without."""
    value = lookup.value_of(parameter)
    if not isinstance(value, gin.config.ConfigurableReference):
        name = parameter.replace("reformax.training.", "")
        raise ConfigError(f"{name} is {shown(value)}: expected a task, such as @text.text()")
    scope, selector = value.config_key
    if selector == "gin.macro":
        raise ConfigError(
            f"the config uses %{scope}, which no file and no --config sets: set {scope}"
        )
    return scope, selector

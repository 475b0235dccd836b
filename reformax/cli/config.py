"""Gin files and overrides, parsed once, and what they say; every mistake is one line.

Overrides see the imports of all files. A module of this package, or one of the working directory,
needs no import line: `--config='loop.train.task=@text.text()'`.

No module of the package but this one and `reading` imports gin.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gin

from reformax.cli import (
    configs,
    messages,
    modules,
    reading,
    short_names,
    trax_config,
    trust,
)
from reformax.cli.overrides import Override, override_of
from reformax.cli.reading import ConfigError
from reformax.declared import check_all, hints_of, shown, user_path

MOST = 2**20  # bytes of a config file
_TRAIN = "reformax.training.loop.train"


class Reference(NamedTuple):
    """A reference in a config, `@function` or `@function()`."""

    function: Callable
    arguments: dict[str, Any]  # those that the config sets


# Parsing: files, overrides, the folder of the data.


def parse(
    config_files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    data_dir: str | None = None,
    init_from: str | None = None,
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

    Raises:
      ConfigError: a file, module, function, parameter or macro does not exist, or a line cannot be
        read.
    """
    _forget()
    modules.find_in_working_directory()
    folders = [Path(file).absolute().parent for file in config_files]
    new_macros: dict[str, str] = {}
    for config_file in config_files:
        path = _find(config_file)
        if configs.is_packaged(path):
            reading.read_file(path, folders)
        else:
            trax_config.refuse(config_file, reading.statements_of(path))
            new_macros |= dict.fromkeys(reading.read_file(path, folders), config_file)
    if not any(selector == _TRAIN for _, selector in gin.config._CONFIG):
        reading.make_known("loop.train")
    _parse_overrides(overrides)
    _bind_short_names()
    _check_used(new_macros)
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


_saved = False  # whether the parsed config is that of a run


def is_saved() -> bool:
    """Whether the parsed config is that of a run: flags of a command go before its settings."""
    return _saved


def _forget(saved: bool = False) -> None:
    """Forgets what was parsed before, and what of it was read."""
    global _saved
    _saved = saved
    gin.clear_config()
    _described_macros.clear()


def _find(config_file: str) -> str:
    path = Path(config_file)
    if not reading.is_file(path):
        path = configs.found(config_file)
        if path is None:
            raise ConfigError(f"no config file {config_file}{configs.nearest(config_file)}")
        configs.note_old_name(config_file)
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
    found = reading.statements_of(path)
    alias = re.compile(rf"^(.*/)?({'|'.join(map(re.escape, found.aliases))})(?=\.)")

    def whole(name: str) -> str:
        if not found.aliases:
            return name
        return alias.sub(lambda match: (match[1] or "") + found.aliases[match[2]], name)

    return {name: whole(name) for name in found.values}


def _check_used(new_macros: dict[str, str]) -> None:
    """Raises `ConfigError` for a macro that nothing uses and that is called as a setting is.

    That is an argument to which the config gives another value, or much the name of a macro.
    """
    used = {scope for scope, selector in _named() if selector == "gin.macro"}
    arguments = {short: f"{_short(selector)}.{name}" for selector, name, short in _short_names()}
    for name, config_file in new_macros.items():
        near = messages.nearest(name, sorted(used - new_macros.keys()), most=0)
        if name in arguments:
            near = f"; did you mean {arguments[name]}?"
        if name not in used and near:
            raise ConfigError(f"{config_file} sets {name}, and nothing has %{name}{near}")


def _parse_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        if (found := override_of(override)) and (wrong := _mistake(found)):
            raise ConfigError(f"--config={override!r}: {wrong}")
        # gin calls what a macro holds in a scope of its name, in which the config of a run has all
        # settings: an override without that scope would change nothing.
        reading.read(override, also_in=reading.macros() if _saved else ())


def _mistake(override: Override) -> str | None:
    """What is wrong with an override that gin would take, or refuse without the fix."""
    function, name, value = override
    if function is None and (line := _no_macro(name)):
        return line
    if override.is_bare_word:  # neither in quotes nor after an @
        if value.title() in ("True", "False"):
            return f"expected {override.whole}={value.title()}"
        quoted = f"""write a text in quotes: --config="{override.whole}='{value}'\""""
        reference = modules.reference(value)
        with_at = f"write a function with an @: --config='{override.whole}={reference}'; "
        return with_at * bool(reference) + quoted
    if function is not None and "." not in function:
        near = f"; did you mean {whole}?" if (whole := _settings().get(name)) else ""
        return f"a setting is module.function.argument=VALUE{near}"
    return None


def _no_macro(name: str) -> str | None:
    """Gin takes any name for a new macro, so a misspelt one would silently change nothing."""
    macros = reading.macros()
    unset = set() if _saved else _unset()  # macros are bound to arguments before a run is saved
    if name in macros or name in unset:
        return None
    whole = _settings().get(name)
    near = messages.nearest(name, sorted({*macros, *unset}), most=0)
    near = near or messages.nearest(name, macros)
    return f"no config file defines {name}{f'; did you mean {whole}?' if whole else near}"


def _bind_data_dir(data_dir: str) -> None:
    """Binds the folder of the tasks of the run, its stages and its evaluations, or of their own."""
    parameter = "reformax.training.loop.train.task"
    if not _is_set(parameter):
        raise ConfigError("--data_dir is set, but the config sets no loop.train.task")
    without = [_give_folder(parameter, data_dir)]
    without += [_give_folder(name, data_dir, scoped=False) for name in _other_tasks()]
    if all(without):
        raise ConfigError(
            f"--data_dir={data_dir}: the task {without[0]} reads no files: leave the flag out, "
            "or take a config of files, for a text of your own --config_file=reformer_text.gin"
        )


def _bind_short_names() -> None:
    """Sets arguments of training and of its models to the macros that are their short names."""
    macros = set(reading.macros())
    for selector, argument, name in _short_names():
        if name in macros and not _is_set(f"{selector}.{argument}"):
            macro = gin.config.ConfigurableReference(f"{name}/gin.macro", True)
            gin.bind_parameter(f"{selector}.{argument}", macro)


def _short_names() -> Iterator[tuple[str, str, str]]:
    """(function, argument, short name) of training and of its models."""
    yield from _short_names_of(_TRAIN)
    for selector in _models():  # after those of training: `model` is one
        yield from _short_names_of(selector)


def _short_names_of(selector: str) -> Iterator[tuple[str, str, str]]:
    for argument in _parameters(selector):
        yield selector, argument, short_names.of(argument)


def _unset() -> set[str]:
    """The short names of arguments that the config does not set."""
    return {name for x, argument, name in _short_names() if not _is_set(f"{x}.{argument}")}


def _short(selector: str) -> str:
    """'lm.ReformerLM' of 'reformax.models.lm.ReformerLM'."""
    return ".".join(selector.split(".")[-2:])


def _models() -> set[str]:
    """The models of the run and of its stages."""
    scopes = [scope for scope, _ in _names_in(_value_of(f"{_TRAIN}.stages"))]
    names = [f"{_TRAIN}.model", "reformax.training.stages.Stage.model"]
    names += [f"{scope}/reformax.training.stages.Stage.model" for scope in scopes if scope]
    return {selector for name in names for _, selector in _names_in(_value_of(name))}


def _bind_init_from(init_from: str) -> None:
    """Binds the run to begin with, and its vocabulary as that of the config's task."""
    gin.bind_parameter("reformax.training.loop.train.init_from", init_from)
    folder = user_path("--init_from", init_from)
    if folder.parent.name == "checkpoints":  # of one of its checkpoints
        folder = folder.parent.parent
    kept, parameter = folder / "vocabulary.model", "reformax.training.loop.train.task"
    if not kept.is_file() or not _is_set(parameter):
        return
    scope, selector = _task_of(parameter)
    name = f"{scope}/{selector}.vocabulary".removeprefix("/")
    if not _is_set(name) or gin.query_parameter(name) is None:
        # A task that learns none has no such parameter.
        with contextlib.suppress(ValueError):
            gin.bind_parameter((scope, selector, "vocabulary"), str(kept))


def _give_folder(parameter: str, data_dir: str, scoped: bool = True) -> str | None:
    """Binds the folder of the task that a parameter is set to; returns a task that has none.

    Not `scoped`, it is bound in all scopes, for a task is made in that of its stage and in its own;
    a folder that the config gives stays.
    """
    seen = set()
    while True:
        seen.add(parameter)
        scope, selector = _task_of(parameter)
        if not scoped and _is_set(f"{selector}.data_dir"):
            return None
        try:
            gin.bind_parameter((scope if scoped else "", selector, "data_dir"), data_dir)
            return None
        except ValueError:
            parameter = f"{scope}/{selector}.task".removeprefix("/")
        if not _is_set(parameter) or parameter in seen:
            return selector


def _other_tasks() -> Iterator[str]:
    """The parameters that are set to tasks of stages and of evaluations."""
    for parts, kind in (("stages", "stages.Stage"), ("evaluations", "evaluations.Evaluation")):
        argument = f"reformax.training.{kind}.task"
        for scope, _ in _names_in(_value_of(f"{_TRAIN}.{parts}")):
            names = [f"{scope}/{argument}"] * bool(scope) + [argument]
            nearest = [name for name in names if _is_set(name)][:1]
            yield from [name for name in nearest if gin.query_parameter(name) is not None]


def name_in_evaluation(label: str, name: str) -> str | None:
    """The setting of an evaluation, 'scope/evaluations.Evaluation.NAME'; None if none is known."""
    evaluations = _value_of(f"{_TRAIN}.evaluations")
    part = evaluations.get(label) if isinstance(evaluations, dict) else None
    scope = next((scope for scope, _ in _names_in(part)), "")
    return f"{scope}/evaluations.Evaluation.{name}" if scope else None


def _names_in(value: Any) -> Iterator[tuple[str, str]]:
    """(scope, function) of each reference in a value; a macro is (its name, 'gin.macro')."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _names_in(item)
    elif isinstance(value, gin.config.ConfigurableReference):
        yield value.config_key


def _named() -> Iterator[tuple[str, str]]:
    """Those of all values of the config."""
    return _names_in([list(arguments.values()) for arguments in gin.config._CONFIG.values()])


def _value_of(parameter: str) -> Any:
    """The value of a parameter, by macros or without; None if it is not set."""
    value, seen = gin.query_parameter(parameter) if _is_set(parameter) else None, []
    while (macro := _macro_in(value)) and is_macro(macro) and macro not in seen:
        seen.append(macro)
        value = gin.query_parameter(f"{macro}/gin.macro.value")
    return value


def _macro_in(value: Any) -> str | None:
    """The macro that a value is; None if it is none."""
    if isinstance(value, gin.config.ConfigurableReference):
        scope, selector = value.config_key
        return scope if selector == "gin.macro" else None
    return None


def _is_set(parameter: str) -> bool:
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True


def _task_of(parameter: str) -> tuple[str, str]:
    """The scope and the name of the task that a parameter is set to, by macros or without."""
    value = _value_of(parameter)
    if not isinstance(value, gin.config.ConfigurableReference):
        name = parameter.replace("reformax.training.", "")
        raise ConfigError(
            f"--data_dir is set, but {name} is {shown(value)}: expected a task of files, such as "
            "@text.text()"
        )
    scope, selector = value.config_key
    if selector == "gin.macro":
        raise ConfigError(
            f"the config uses %{scope}, which no file and no --config sets: set {scope}"
        )
    return scope, selector


# What the parsed config says.


def configured(function):
    """`function` with the config's values as its arguments.

    Raises:
      ConfigError: the config sets none of its arguments, or one to a value that needs itself.
    """
    bound = _bound(function)
    _check_ends(function)
    if not bound:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        raise ConfigError(
            f"the config sets nothing of {name}: it needs {name}.model, .task and .optimizer"
        )
    return gin.get_configurable(function)


def _check_ends(function) -> None:
    """Raises `ConfigError` if building an argument of the function would never end."""
    done = set()

    def visit(function: Any, above: tuple[str, ...]) -> None:
        for scope, selector in _names_in(_bound(function)):
            name = f"%{scope}" if selector == "gin.macro" else f"@{selector}"
            if name in above:
                path = " -> ".join((*above, name))
                raise ConfigError(f"the config's {name} needs itself: {path}")
            if (scope, selector) not in done:
                # Gin gives a reference the scope of its name in place of the present one.
                with gin.config_scope(scope.split("/") if scope else gin.current_scope()):
                    visit(selector, (*above, name))
                done.add((scope, selector))

    visit(function, ())


def _bound(function) -> dict[str, Any]:
    """The arguments that the config sets, as gin has them; none if it does not name `function`."""
    try:
        return gin.get_bindings(function, resolve_references=False)
    except (KeyError, ValueError):
        return {}


def bindings(function, names: Collection[str] | None = None) -> dict:
    """The arguments that the config sets, with the objects that it names built.

    Args:
      function: a function that the config configures.
      names: only these arguments, and only their objects are built; None for all.

    Raises:
      ConfigError: one of `names` has no default, and the config does not set it.
      SettingError: a value that is not what the function declares.
    """
    configured(function)
    bound = gin.get_bindings(function, resolve_references=False)
    for name, parameter in inspect.signature(function).parameters.items():
        wanted = names is not None and name in names and parameter.default is parameter.empty
        if wanted and name not in bound:
            raise ConfigError(f"the config does not set {function.__name__}.{name}")
    # gin resolves a reference when it is copied.
    values = {name: deepcopy(x) for name, x in bound.items() if names is None or name in names}
    check_all(hints_of(function), values)
    return values


def refuse_passed(function, *names: str) -> None:
    """Raises `ConfigError` if the config sets an argument that the command itself passes."""
    for name in set(names) & set(_bound(function)):
        owner = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        raise ConfigError(f"{owner}.{name} is passed by the command: leave it out")


def described(function, argument: str):
    """The value that the config gives an argument, as data: nothing is called.

    A reference to a configurable becomes a `Reference`, whether it names the function or
    its result. A macro becomes its value.

    Raises:
      ConfigError: the config does not set the argument.
    """
    configured(function)
    bound = gin.get_bindings(function, resolve_references=False)
    if argument not in bound:
        raise ConfigError(f"the config does not set {function.__name__}.{argument}")
    return _described(bound[argument])


_described_macros: set[str] = set()  # gin does not note what is read and not called


def _described(value):
    if isinstance(value, list | tuple):
        return type(value)(_described(item) for item in value)
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if not isinstance(value, gin.config.ConfigurableReference):
        return value
    scope, selector = value.config_key
    # As in gin, what a macro or a scoped reference names is in its scope, to any depth: a run's
    # config.gin has such settings as `attention/local.local.window`.
    with gin.config_scope(scope.split("/")) if scope else contextlib.nullcontext():
        if selector == "gin.macro":
            _described_macros.add(scope)
            return _described(gin.query_parameter(f"{scope}/gin.macro.value"))
        bound = gin.get_bindings(selector, resolve_references=False)
        arguments = {name: _described(item) for name, item in bound.items()}
    return Reference(value.configurable.wrapped, arguments)


def operative() -> str:
    """The values in use, defaults included, as text that `parse` reads.

    Trax configures some of its own functions by gin. The text leaves out what no config names.
    """
    known = {selector for _, selector in (*gin.config._CONFIG, *_named())}
    for key in [key for key in gin.config._OPERATIVE_CONFIG if key[1] not in known]:
        del gin.config._OPERATIVE_CONFIG[key]
    return gin.operative_config_str()


def text() -> str:
    """The values that the files and the overrides set, as text."""
    return gin.config_str()


def unused(overrides: Sequence[str], also_used: Collection[str] = ()) -> list[str]:
    """The overrides whose function this run has not called, or whose macro nothing named.

    Args:
      overrides: bindings, as `parse` takes them.
      also_used: 'module.function.argument' names that were read without a call.
    """
    text, found, called = operative(), [], gin.config._OPERATIVE_CONFIG
    for (scope, selector), arguments in called.items():  # without aliases
        text += "".join(f"{scope}/{selector}.{x} = \n".removeprefix("/") for x in arguments)
    for override in overrides:
        target = override_of(override)
        if target is None:
            used = True
        elif target.function:
            used = target.whole in also_used or (
                _sets(text, *target[:2]) and not _is_hidden(*target[:2])
            )
        else:
            used = target.name in _described_macros or (target.name, "gin.macro") in called
        found += [override] * (not used)
    return found


def _sets(text: str, selector: str, argument: str) -> bool:
    """Whether the text binds this argument, in any scope and under any longer selector."""
    pattern = rf"^(\S+/)?(\S+\.)?{re.escape(selector)}\.{argument} = "
    return re.search(pattern, text, re.MULTILINE) is not None


def _is_hidden(function: str, argument: str) -> bool:
    """Whether all calls that a setting is for have another value, of a scope further inside."""
    outer, _, selector = function.rpartition("/")

    def hidden(scope: str, called: str) -> bool:
        own = gin.config._CONFIG.get((outer, called), {}).get(argument)
        parts = scope.split("/")
        inside = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        bound = [gin.config._CONFIG.get((x, called), {}) for x in inside if len(x) > len(outer)]
        return any(argument in values and values[argument] is not own for values in bound)

    within = f"{outer}/" if outer else ""
    calls = [
        (scope, called)
        for scope, called in gin.config._OPERATIVE_CONFIG
        if f".{called}".endswith(f".{selector}") and f"{scope}/".startswith(within)
    ]
    return bool(calls) and all(hidden(*call) for call in calls)


# Its settings by their names.


def refuse_flags(unknown: Sequence[str]) -> None:
    """Raises `ConfigError` for flags that are none: the line says which setting has such a name.

    Args:
      unknown: what `argparse` could not read, '--NAME=VALUE' or '--NAME' and a value after it.
    """
    if not unknown:
        return
    name, _, value = unknown[0].removeprefix("--").partition("=")
    if not value and len(unknown) > 1 and not unknown[1].startswith("--"):
        value = unknown[1]
    settings = _settings()
    if name in settings:
        line = f"{settings[name]}={value or 'VALUE'}"
        raise ConfigError(f"{unknown[0]} is no flag but a setting: --config='{line}'")
    near = messages.nearest(name, [*settings], most=0)
    raise ConfigError(f"{unknown[0]} is no flag and no setting{near}; --help lists the flags")


def _settings() -> dict[str, str]:
    """The settings of the parsed config by their last names; a macro comes before an argument."""
    found = {}
    for selector in sorted({selector for _, selector in gin.config._CONFIG} - {"gin.macro"}):
        for name in _parameters(selector):
            found.setdefault(name, f"{_short(selector)}.{name}")
    first = {name: f"loop.train.{name}" for name in _parameters("loop.train")}
    return found | first | {name: name for name in reading.macros()}


def is_macro(name: str) -> bool:
    """Whether the config sets a macro of this name."""
    return _is_set(f"{name}/gin.macro.value")


def is_set_beside_macros(parameter: str) -> bool:
    """Whether the config sets a parameter to a value, and not to a macro."""
    return _is_set(parameter) and macro_of(parameter) is None


def macro_of(parameter: str) -> str | None:
    """The macro that a parameter is set to; None if it is set to none."""
    return _macro_in(gin.query_parameter(parameter)) if _is_set(parameter) else None


def arguments() -> list[str]:
    """'module.function.argument' of every function that the parsed config sets or refers to."""
    named = [*gin.config._CONFIG, *_named(), ("", _TRAIN)]
    found = []
    for selector in dict.fromkeys(selector for _, selector in named if selector != "gin.macro"):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found += [f"{_short(selector)}.{name}" for name in _parameters(selector)]
    return found


def arguments_of(function) -> set[str]:
    """The arguments of a function that the config sets."""
    return set(_bound(function))


def needs_trust(text: str, source: str) -> bool:
    """Whether a run's config is read with --trust_config alone."""
    try:
        reading.read(text, source, names=trust.Names(), bind=False)
    except ConfigError:
        return True
    return False


def _parameters(selector: str) -> list[str]:
    """The arguments of a configurable."""
    return reading.parameters_of(gin.get_configurable(selector))

"""Gin files and overrides, parsed once, with every mistake told in one line.

A gin file that enables dynamic registration (`from __gin__ import dynamic_registration`) names what
it imports; those names hold in that file only. Overrides get the names of all files parsed before
them, so `--config='loop.train.steps=10'` works where the file has
`from reformax.training import loop`.

This is the only module of the package that imports gin; only the scripts and `script` import it.
"""

from __future__ import annotations

import difflib
import importlib.util  # noqa: F401  gin looks for includes with it and does not import it
import inspect
import logging
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gin


class ConfigError(ValueError):
    """A config that cannot be: one line with the name that is wrong and what would be right."""


class Reference(NamedTuple):
    """What `@function` or `@function()` stands for in a config."""

    function: Callable
    arguments: dict[str, Any]  # those that the config sets


def parse(
    config_files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    folders: Sequence[str | Path] = (),
    data_dir: str | None = None,
) -> None:
    """Parses files, then overrides, into gin's global config.

    Args:
      config_files: gin files; later ones win.
      overrides: bindings such as 'loop.train.steps=10', or 'd_model=64' for a macro that a file
        defines.
      folders: where files and their includes are looked for, besides the working directory and the
        files' own folders.
      data_dir: bound to the `data_dir` of the task that the config chose.

    Raises:
      ConfigError: a file, module, function, parameter or macro that does not exist, or a line that
        cannot be read.
    """
    gin.clear_config()
    for folder in [*(Path(f).absolute().parent for f in config_files), *folders]:
        # gin takes a relative path for a package's name.
        gin.add_config_file_search_path(str(Path(folder).absolute()))
    for config_file in config_files:
        _parsed(gin.parse_config_file, _found(config_file, folders))
    for override in overrides:
        _check_macro(override)
        # config_str begins with the imports of all files, under names that do not collide.
        _parsed(gin.parse_config, "\n".join([*_imports(gin.config_str()), override]))
    if data_dir is not None:
        _bind_data_dir(data_dir)


def configured(function):
    """`function` with the config's values as its arguments.

    Raises:
      ConfigError: the config sets none of its arguments.
    """
    try:
        bound = gin.get_bindings(function, resolve_references=False)
    except (KeyError, ValueError):  # no file names it
        bound = {}
    if not bound:
        package, _, module = function.__module__.rpartition(".")
        raise ConfigError(
            f"the config sets nothing of {module}.{function.__name__}: it needs `from {package} "
            f"import {module}` and {module}.{function.__name__}.model, .task and .optimizer"
        )
    return gin.get_configurable(function)


def bindings(function, names: Collection[str] | None = None) -> dict:
    """What the config sets of a function's arguments, with the objects it names built.

    Args:
      function: what the config configures.
      names: only these arguments, so that nothing else is built; None for all.
    """
    configured(function)
    bound = gin.get_bindings(function, resolve_references=False)
    # A copy is how gin turns a reference into what it refers to.
    return {name: deepcopy(x) for name, x in bound.items() if names is None or name in names}


def described(function, argument: str):
    """What the config sets an argument to, without calling anything.

    A reference to a configurable becomes a `Reference`, whether it stands for the function or for
    what a call of it returns; macros have their values.

    Raises:
      ConfigError: the config does not set the argument.
    """
    configured(function)
    bound = gin.get_bindings(function, resolve_references=False)
    if argument not in bound:
        raise ConfigError(f"the config does not set {function.__name__}.{argument}")
    return _described(bound[argument])


def _described(value):
    if isinstance(value, list | tuple):
        return type(value)(_described(item) for item in value)
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if not isinstance(value, gin.config.ConfigurableReference):
        return value
    scope, selector = value.config_key
    if selector == "gin.macro":
        return _described(gin.query_parameter(f"{scope}/gin.macro.value"))
    with gin.config_scope(scope or None):
        bound = gin.get_bindings(selector, resolve_references=False)
    arguments = {name: _described(item) for name, item in bound.items()}
    return Reference(value.configurable.wrapped, arguments)


def operative() -> str:
    """The values in use, defaults included, as text that `parse` reads.

    Functions of modules that no file imported are left out: Trax configures some of its own by gin,
    and they are no setting of this run.
    """
    text = gin.operative_config_str()
    asked = set(_imports(gin.config_str()))
    for line in set(_imports(text)) - asked:
        text = text.replace(line + "\n", "")
        section = rf"# Parameters for (\S+/)?{_bound_name(line)}\..*:\n(.+\n)*\n?"
        text = re.sub(section, "", text)
    return text


def unused(overrides: Sequence[str], also_used: Collection[str] = ()) -> list[str]:
    """The overrides of an argument of something that this run has not called.

    Args:
      overrides: bindings, as `parse` takes them.
      also_used: 'module.function.argument' names that were read without a call.
    """
    targets = {text: _target(text) for text in overrides}
    return [
        text
        for text, target in targets.items()
        if target and ".".join(target) not in also_used and not _is_used(*target)
    ]


def _imports(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("from ", "import "))]


def _bound_name(import_line: str) -> str:
    """`c` of 'from a.b import c', 'import a as c' and 'import c'; `a` of 'import a.b'."""
    last = import_line.split()[-1]
    return last if " as " in import_line else last.partition(".")[0]


def _target(override: str) -> tuple[str, str] | None:
    """('scope/module.function', 'argument') of a binding; None of anything else."""
    match = re.match(r"\s*([\w./]+)\.(\w+)\s*=", override)
    return match and match.groups()


def _is_used(selector: str, argument: str) -> bool:
    pattern = rf"^(\S+/)?(\S+\.)?{re.escape(selector)}\.{argument} = "
    return re.search(pattern, operative(), re.MULTILINE) is not None


def _check_macro(override: str) -> None:
    # gin takes any name for a new macro, so a misspelt one would change nothing, silently.
    match = re.match(r"\s*([\w/]+)\s*=", override)
    if match is None:
        return
    macros = [m[1] for m in re.finditer(r"^([\w/]+) = ", gin.config_str(), re.MULTILINE)]
    if match[1] not in macros:
        raise ConfigError(
            f"--config={override!r}: no config file defines {match[1]}{_nearest(match[1], macros)}"
        )


def _bind_data_dir(data_dir: str) -> None:
    try:
        reference = gin.query_parameter("reformax.training.loop.train.task")
    except ValueError:
        raise ConfigError("--data_dir is set, but the config sets no loop.train.task") from None
    while reference.config_key[1] == "gin.macro":
        reference = gin.query_parameter(f"{reference.config_key[0]}/gin.macro.value")
    scope, selector = reference.config_key
    try:
        gin.bind_parameter((scope, selector, "data_dir"), data_dir)
    except ValueError:
        raise ConfigError(
            f"--data_dir={data_dir}: the task {selector} reads no files and takes no "
            "data_dir: leave the flag out, or choose a task of files such as text.text"
        ) from None


def _found(config_file: str, folders: Sequence[str | Path]) -> str:
    for path in [Path(config_file), *(Path(folder) / config_file for folder in folders)]:
        if path.is_file():
            return str(path.absolute())
    names = sorted({path.name for folder in folders for path in Path(folder).glob("*.gin")})
    raise ConfigError(f"no config file {config_file}{_nearest(config_file, names)}")


def _parsed(parser, source: str) -> None:
    logging.disable(logging.ERROR)  # gin logs every folder in which an include is not
    try:
        parser(source)
    except (ValueError, LookupError, NameError, AttributeError, ImportError, OSError) as error:
        raise ConfigError(_explain(error)) from None
    except tokenize.TokenError as error:
        raise ConfigError(f"{error.args[0]}: {source.splitlines()[-1].strip()}") from None
    except SyntaxError as error:
        line = (error.text or source.splitlines()[-1]).strip()
        raise ConfigError(f"{str(error.msg).rstrip('.')}: {line}".strip(": ")) from None
    finally:
        logging.disable(logging.NOTSET)


def _explain(error: Exception) -> str:
    """gin's message in one line: what is wrong, where, and the nearest names."""
    text = str(error)
    first = text.strip().splitlines()[0].rstrip(".")
    place = re.search(r'In file "([^"]+)", line (\d+)', text)
    where = f" ({place[1]}, line {place[2]})" if place else ""
    quoted = re.search(r"\n  In .* line \d+\n    (.*)", text)
    source = quoted[1].strip() if quoted else ""
    near = ""
    if match := re.match(r"Configurable '(.+)' doesn't have a parameter named '(.+)'", first):
        function = gin.get_configurable(match[1])
        function = function.__init__ if inspect.isclass(function) else function
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        first, near = f"{match[1]} has no parameter {match[2]}", _nearest(match[2], names)
    elif match := re.match(r"Couldn't resolve selector (\S+);.*has no attribute (\w+)", first):
        place_of = re.search(r"<(?:module|class) '([\w.]+)'", first)
        owner = place_of[1] if place_of else match[1].rpartition(".")[0]
        first = f"{owner} has no {match[2]}"
        if owner in sys.modules:
            public = [name for name in dir(sys.modules[owner]) if name[0] != "_"]
            near = _nearest(match[2], public)
    elif match := re.match(r"'(\w+)' was not provided by an import statement", first):
        names = [_bound_name(line) for line in _imports(gin.config_str())]
        first = f"{match[1]} is not the name of an imported module"
        near = _nearest(match[1], names)
    return f"{first}{where}{': ' + source if source and source not in first else ''}{near}"


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there is {', '.join(names)}" if names else ""

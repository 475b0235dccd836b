"""Gin files and overrides, parsed once; every mistake is one line.

A gin file that enables dynamic registration (`from __gin__ import dynamic_registration`) imports
the modules that it names; no other file sees these imports. Overrides see those of all files, so
`--config='loop.train.steps=10'` works where a file has `from reformax.training import loop`. An
override may also name a module of this package, or one of the working directory, that no file
imports: `--config='loop.train.task=@text.text()'`.

No other module of the package imports gin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util  # noqa: F401  gin looks for includes with it and does not import it
import inspect
import io
import logging
import sys
import tokenize
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gin

from reformax.cli import configs, gin_text, messages, modules, short_names, trax_config, trust
from reformax.declared import SettingError, check_all, hints_of, shown, user_path

MOST = 2**20  # bytes of a config file


class ConfigError(SettingError):
    """The config is wrong. One line gives the wrong name and the nearest right ones."""


class Reference(NamedTuple):
    """A reference in a config, `@function` or `@function()`."""

    function: Callable
    arguments: dict[str, Any]  # those that the config sets


class Statements(NamedTuple):
    """The statements of a config. In values, references and macros are their text."""

    includes: list[str]
    imports: list[str]
    values: dict[str, Any]  # by 'scope/module.function.argument', or by a macro's name


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
        defines.
      data_dir: bound to the `data_dir` of the config's task.
      init_from: bound to `loop.train.init_from`. A vocabulary that lies in this folder is bound to
        the `vocabulary` of the config's task, unless the config sets one.

    Raises:
      ConfigError: a file, module, function, parameter or macro does not exist, or a line cannot be
        read.
    """
    _forget()
    modules.find_in_working_directory()
    parents = [Path(f).absolute().parent for f in config_files]
    with _includes_from(*parents):
        new_macros = {}
        for config_file in config_files:
            path = _find(config_file)
            if not configs.is_packaged(path):
                trax_config.refuse(config_file, statements_of(path))
                new_macros |= dict.fromkeys(_new_macros(path), config_file)
            _parse_with(gin.config.parse_config_file, path)
        _parse_overrides(overrides, data_dir)
        if init_from is not None:
            _bind_init_from(init_from)
    _bind_short_names()
    _check_used(new_macros)


def parse_saved(
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    *,
    trusted: bool = False,
    data_dir: str | None = None,
) -> None:
    """Parses the config that a run was saved with, then overrides, into gin's global config.

    Nothing is imported or called unless every name of the config is one that `trust` allows.

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
        with _includes_from(Path(source).parent):
            _parse_with(gin.parse_config, text, source)
            _parse_overrides(overrides, data_dir)
        return
    names = trust.BoundNames()
    _parse_with(functools.partial(_check_names, names), text, source)
    with _importing_by(names.imported):
        _parse_with(gin.parse_config, text, source)
    _parse_overrides(overrides, data_dir)


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


@contextlib.contextmanager
def _includes_from(*folders: str | Path) -> Iterator[None]:
    """Gin finds included files in these folders too. Of itself it never forgets a folder again."""
    prefixes, parse_file = gin.config._LOCATION_PREFIXES, gin.config.parse_config_file
    before, within = list(prefixes), [None]

    def parse_include(name, *args, **kwargs):
        found = _included(name, within[-1], prefixes)
        within.append(found)
        try:
            return parse_file(found, *args, **kwargs)
        finally:
            within.pop()

    # gin takes a relative path for a package's name.
    prefixes += [str(Path(folder).absolute()) for folder in folders]
    gin.config.parse_config_file = parse_include
    try:
        yield
    finally:
        prefixes[:], gin.config.parse_config_file = before, parse_file


def _included(name: str, above: str | None, prefixes: Sequence[str]) -> str:
    """The file that an include names: of ours if `above` is one of ours, and never itself."""
    candidates = [Path(prefix or ".") / name for prefix in prefixes]
    if (packaged := configs.found(name)) is not None:
        ours = above is not None and configs.is_packaged(above)
        candidates.insert(0 if ours else len(candidates), packaged)
    files = [path for path in candidates if _is_file(path)]
    others = [path for path in files if above is None or not path.samefile(above)]
    chosen = (others or files or [Path(name)])[0]
    if chosen == packaged:
        configs.note_old_name(name)
    return str(chosen.absolute()) if files else name


@contextlib.contextmanager
def _importing_by(find: Callable[..., ModuleType]) -> Iterator[None]:
    """Gin calls this function where it would import a module."""
    gin.config.__import__ = find  # Python looks a name up in the module before its builtins
    try:
        yield
    finally:
        del gin.config.__import__


def _find(config_file: str) -> str:
    path = Path(config_file)
    if not _is_file(path):
        path = configs.found(config_file)
        if path is None:
            raise ConfigError(f"no config file {config_file}{configs.nearest(config_file)}")
        configs.note_old_name(config_file)
    if (n_bytes := path.stat().st_size) > MOST:
        raise ConfigError(
            f"config file {config_file} has {n_bytes:,} bytes: expected at most {MOST:,}"
        )
    return str(path.absolute())


def settings_of(config_file: str) -> list[str]:
    """The names that a user's file sets itself; none of a file of the package."""
    path = _find(config_file)
    return [] if configs.is_packaged(path) else list(statements_of(path).values)


def _new_macros(path: str) -> list[str]:
    """The macros that a file defines, and nothing that was parsed before or that it includes."""
    statements, prefixes = statements_of(path), gin.config._LOCATION_PREFIXES
    for name in statements.includes:
        _parse_with(gin.config.parse_config_file, _included(name, path, prefixes))
    known = gin_text.macros(gin.config_str())
    return [name for name in statements.values if "." not in name and name not in known]


def _check_used(new_macros: dict[str, str]) -> None:
    """Raises `ConfigError` for a macro that nothing uses and that is called much as one in use."""
    used = gin_text.macros_used(gin.config_str())
    for name, config_file in new_macros.items():
        near = messages.nearest(name, sorted(used - new_macros.keys()), most=0)
        if name not in used and near:
            raise ConfigError(f"{config_file} sets {name}, and nothing has %{name}{near}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _parse_overrides(overrides: Sequence[str], data_dir: str | None) -> None:
    for override in overrides:
        _check_macro(override)
        _check_word(override)
        _check_dots(override)
        # config_str begins with the imports of all files, under names that do not collide.
        imports = gin_text.imports(gin.config_str())
        imports += modules.missing(override, map(gin_text.bound_name, imports))
        _parse_with(gin.parse_config, "\n".join([*imports, override]))
    if data_dir is not None:
        _bind_data_dir(data_dir)


def _check_macro(override: str) -> None:
    # gin takes any name for a new macro, so a misspelt one would silently change nothing.
    name, macros = gin_text.macro_of(override), gin_text.macros(gin.config_str())
    if name is not None and name not in macros:
        whole = _settings().get(name)
        near = f"; did you mean {whole}?" if whole else messages.nearest(name, macros)
        raise ConfigError(f"--config={override!r}: no config file defines {name}{near}")


def _check_word(override: str) -> None:
    """Raises `ConfigError` for a word that is neither in quotes nor after an @."""
    name, value = gin_text.bare_word(override) or (None, None)
    if name is None:
        return
    if value.title() in ("True", "False"):
        raise ConfigError(f"--config={override!r}: expected {name}={value.title()}")
    quoted = f"""write a text in quotes: --config="{name}='{value}'\""""
    if reference := modules.reference(value):
        quoted = f"write a function with an @: --config='{name}={reference}'; {quoted}"
    raise ConfigError(f"--config={override!r}: {quoted}")


def _check_dots(override: str) -> None:
    """Raises `ConfigError` for an argument without its function, such as 'lsh.n_hashes=2'."""
    selector, argument = gin_text.argument_of(override) or (".", "")
    if "." not in selector:
        near = f"; did you mean {whole}?" if (whole := _settings().get(argument)) else ""
        raise ConfigError(
            f"--config={override!r}: a setting is module.function.argument=VALUE{near}"
        )


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
    macros = set(gin_text.macros(gin.config_str()))
    for selector in ("reformax.training.loop.train", *_models()):
        for argument in _parameters(selector):
            name = short_names.of(argument)
            if name in macros and not _is_set(f"{selector}.{argument}"):
                macro = gin.config.ConfigurableReference(f"{name}/gin.macro", True)
                gin.bind_parameter(f"{selector}.{argument}", macro)


def _models() -> set[str]:
    """The models of the run and of its stages."""
    stages = _value_of("reformax.training.loop.train.stages")
    stages = stages if isinstance(stages, tuple | list) else ()
    scopes = [part.config_key[0] for part in stages if hasattr(part, "config_key")]
    names = ["reformax.training.loop.train.model", "reformax.training.stages.Stage.model"]
    names += [f"{scope}/reformax.training.stages.Stage.model" for scope in scopes if scope]
    models = map(_value_of, names)
    return {model.config_key[1] for model in models if hasattr(model, "config_key")}


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
    loop = "reformax.training.loop.train"
    stages, evaluations = map(_value_of, (f"{loop}.stages", f"{loop}.evaluations"))
    parts = {
        "stages.Stage": stages if isinstance(stages, tuple | list) else (),
        "evaluations.Evaluation": evaluations.values() if isinstance(evaluations, dict) else (),
    }
    for name, part in ((name, part) for name, given in parts.items() for part in given):
        argument = f"reformax.training.{name}.task"
        scope = part.config_key[0] if hasattr(part, "config_key") else ""
        names = [f"{scope}/{argument}"] * bool(scope) + [argument]
        nearest = [name for name in names if _is_set(name)][:1]
        yield from [name for name in nearest if gin.query_parameter(name) is not None]


def name_in_evaluation(label: str, name: str) -> str | None:
    """The setting of an evaluation, 'scope/evaluations.Evaluation.NAME'; None if none is known."""
    evaluations = _value_of("reformax.training.loop.train.evaluations")
    part = evaluations.get(label) if isinstance(evaluations, dict) else None
    if not isinstance(part, gin.config.ConfigurableReference) or part.config_key[0] == "":
        return None
    return f"{part.config_key[0]}/evaluations.Evaluation.{name}"


def _value_of(parameter: str) -> Any:
    """The value of a parameter, by macros or without; None if it is not set."""
    value, seen = gin.query_parameter(parameter) if _is_set(parameter) else None, []
    while isinstance(value, gin.config.ConfigurableReference) and value not in seen:
        scope, selector = value.config_key
        if selector != "gin.macro" or not _is_set(f"{scope}/gin.macro.value"):
            break
        seen.append(value)
        value = gin.query_parameter(f"{scope}/gin.macro.value")
    return value


def _is_set(parameter: str) -> bool:
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True


def _task_of(parameter: str) -> tuple[str, str]:
    """The scope and the name of the task that a parameter is set to, by macros or without."""
    value, macros = gin.query_parameter(parameter), []
    while isinstance(value, gin.config.ConfigurableReference) and value not in macros:
        scope, selector = value.config_key
        if selector != "gin.macro":
            return scope, selector
        if not _is_set(f"{scope}/gin.macro.value"):
            raise ConfigError(
                f"the config uses %{scope}, which no file and no --config sets: set {scope}"
            )
        macros.append(value)
        value = gin.query_parameter(f"{scope}/gin.macro.value")
    name = parameter.replace("reformax.training.", "")
    raise ConfigError(
        f"--data_dir is set, but {name} is {shown(value)}: expected a task of files, such as "
        "@text.text()"
    )


def _parse_with(parser, source: str, name: str | None = None) -> None:
    """Calls `parser` on a source, a text with a name or without; any error is a `ConfigError`."""
    logging.disable(logging.ERROR)  # gin logs every folder that it does not find an include in
    try:
        parser(source if name is None else _File(source, name))
    except (ValueError, LookupError, NameError, AttributeError, ImportError, OSError) as error:
        raise ConfigError(_explain(error)) from None
    except (RecursionError, MemoryError):
        last = " ".join(source.splitlines()[-1:])[-60:]
        raise ConfigError(
            f"{last}: a file includes itself, or a value is nested too deeply"
        ) from None
    except tokenize.TokenError as error:
        line = source.splitlines()[-1].strip()
        raise ConfigError(f"a bracket or a quote is open ({error.args[0]}): {line}") from None
    except SyntaxError as error:
        line = (error.text or source.splitlines()[-1]).strip()
        of_python = str(error.filename).endswith(".py")  # a module that the config imports
        found = None if of_python else messages.find(error)
        said = found.line if found else str(error.msg).rstrip(".")
        if line.startswith(("from ", "import ")) and not of_python:
            said = "expected one module in an import line"
        file = f" ({error.filename}, line {error.lineno})" if error.filename else ""
        raise ConfigError(f"{said}{file}: {line}".strip(": ")) from None
    finally:
        logging.disable(logging.NOTSET)


class _File(io.StringIO):
    """A text that gin reads as a file, with a name for its errors."""

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.name = name


def _explain(error: Exception) -> str:
    """An error of gin's parser in one line: what is wrong, where, and the nearest names."""
    first, near = str(error).strip().splitlines()[0].rstrip("."), ""
    if found := messages.find(error):
        first = found.line
        if found.choices == "modules" and (line := modules.import_line(found.names["name"])):
            lines = _missing_imports(error) or [line]
            plural = "s" if len(lines) > 1 else ""
            near = f": add the line{plural} {' and '.join(f'`{x}`' for x in lines)} above it"
        elif found.choices:
            near = messages.nearest(found.names["name"], _choices(found.choices, found.names))
    where, source = messages.place(error)
    return f"{first}{where}{': ' + source if source and source not in first else ''}{near}"


def _missing_imports(error: Exception) -> list[str]:
    """All import lines that the file which gin stopped in lacks."""
    path = messages.file_of(error)
    if path is None or not _is_file(Path(path)):
        return []
    statements = statements_of(path)
    bound = {gin_text.bound_name(f"import {x}") for x in statements.imports}
    bound |= {module.rpartition(".")[2] for module in statements.imports}
    names = [name.rpartition("/")[2].partition(".")[0] for name in statements.values if "." in name]
    names += [x.partition(".")[0] for x in gin_text.references(str(statements.values))]
    found = [modules.import_line(name) for name in sorted(set(names) - bound)]
    return [line for line in found if line]


def _choices(kind: str, names: dict[str, str]) -> list[str]:
    """The names that could have been meant; see `messages.Message.choices`."""
    if kind == "modules":
        found = [gin_text.bound_name(line) for line in gin_text.imports(gin.config_str())]
        return [name for name in found if name != "dynamic_registration"]
    if kind == "parameters":
        return _parameters(names["owner"])
    module = sys.modules.get(names["owner"])
    return [] if module is None else [name for name in dir(module) if name[0] != "_"]


# A config as data: nothing is imported or called.


def read_statements(text: str, source: str) -> Statements:
    """Reads a config as data: nothing is imported, included or called.

    Args:
      text: the config.
      source: the file that it is from, for errors.

    Raises:
      ConfigError: a line cannot be read.
    """
    found = Statements([], [], {})
    _parse_with(functools.partial(_collect, found), text, source)
    return found


def statements_of(path: str | Path) -> Statements:
    """`read_statements` of a file."""
    return read_statements(Path(path).read_text(errors="replace"), str(path))


def _collect(found: Statements, file: _File) -> None:
    parts = gin.config_parser
    for statement in parts.ConfigParser(file, _Texts()):
        match statement:
            case parts.IncludeStatement(filename=filename):
                found.includes.append(filename)
            case parts.ImportStatement(module=module):
                found.imports.append(module)
            case parts.BindingStatement(scope, selector, arg_name, value):
                name = f"{scope}/{selector}" if scope else selector
                found.values[f"{name}.{arg_name}" if arg_name else name] = value


class WrittenName(str):
    """A reference or a macro: `repr` of a value that holds it is what a config has."""

    __repr__ = str.__str__


class _Texts(gin.config_parser.ParserDelegate):
    """Makes references and macros their text."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> WrittenName:
        return WrittenName(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name: str) -> WrittenName:
        return WrittenName(f"%{macro_name}")


def _check_names(names: trust.BoundNames, file: _File) -> None:
    """Raises `trust.Untrusted` for a config that names anything that `trust` does not allow."""
    for statement in gin.config_parser.ConfigParser(file, _References(names)):
        with gin.config.utils.try_with_location(statement.location):
            _check_name(names, statement)
    names.finish()


def _check_name(names: trust.BoundNames, statement: Any) -> None:
    parts = gin.config_parser
    match statement:
        case parts.ImportStatement(module="__gin__.dynamic_registration", is_from=True):
            names.enable()
        case parts.ImportStatement(module=module, is_from=is_from, alias=alias):
            whole = module if is_from or alias else module.partition(".")[0]
            names.add_import(module, statement.bound_name(), whole)
        case parts.IncludeStatement(filename=filename):
            names.check_include(filename)
        case parts.BindingStatement(arg_name=""):  # a macro
            pass
        case parts.BindingStatement() | parts.BlockDeclaration():
            names.check(statement.selector, called=False)
        case _:
            raise trust.Untrusted(f"the config of a run has an unknown {statement}")


class _References(gin.config_parser.ParserDelegate):
    """Checks the names of references while gin's parser finds them; makes nothing of them."""

    def __init__(self, names: trust.BoundNames):
        self._names = names

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        self._names.check(scoped_configurable_name.rpartition("/")[2], called=True)
        return f"@{scoped_configurable_name}"

    def macro(self, macro_name: str) -> str:
        return f"%{macro_name}"


# What the parsed config says.


def configured(function):
    """`function` with the config's values as its arguments.

    Raises:
      ConfigError: the config sets none of its arguments, or one to a value that needs itself.
    """
    bound = _bound(function)
    _check_ends(function)
    if not bound:
        package, _, module = function.__module__.rpartition(".")
        raise ConfigError(
            f"the config sets nothing of {module}.{function.__name__}: it needs `from {package} "
            f"import {module}` and {module}.{function.__name__}.model, .task and .optimizer"
        )
    return gin.get_configurable(function)


def _check_ends(function) -> None:
    """Raises `ConfigError` if building an argument of the function would never end."""
    done = set()

    def visit(value: Any, above: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple):
            for item in value:
                visit(item, above)
        if not isinstance(value, gin.config.ConfigurableReference):
            return
        scope, selector = value.config_key
        name = f"%{scope}" if selector == "gin.macro" else f"@{selector}"
        if name in above:
            raise ConfigError(f"the config's {name} needs itself: {' -> '.join((*above, name))}")
        if value.config_key not in done:
            # Gin gives a reference the scope of its name in place of the present one.
            with gin.config_scope(scope.split("/") if scope else gin.current_scope()):
                visit(_bound(selector), (*above, name))
            done.add(value.config_key)

    visit(_bound(function), ())


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
    if selector == "gin.macro":
        _described_macros.add(scope)
        return _described(gin.query_parameter(f"{scope}/gin.macro.value"))
    with gin.config_scope(scope or None):
        bound = gin.get_bindings(selector, resolve_references=False)
    arguments = {name: _described(item) for name, item in bound.items()}
    return Reference(value.configurable.wrapped, arguments)


def operative() -> str:
    """The values in use, defaults included, as text that `parse` reads.

    Trax configures some of its own functions by gin. The text leaves them out: no config file
    imports their modules.
    """
    text = gin.operative_config_str()
    imported = set(gin_text.imports(gin.config_str()))
    return gin_text.without(text, set(gin_text.imports(text)) - imported)


def text() -> str:
    """The values that the files and the overrides set, as text."""
    return gin.config_str()


def unused(overrides: Sequence[str], also_used: Collection[str] = ()) -> list[str]:
    """The overrides whose function this run has not called, or whose macro nothing named.

    Args:
      overrides: bindings, as `parse` takes them.
      also_used: 'module.function.argument' names that were read without a call.
    """
    text, found = operative(), []
    for override in overrides:
        if target := gin_text.argument_of(override):
            used = ".".join(target) in also_used or gin_text.sets(text, *target)
        else:
            macro = gin_text.macro_of(override)
            used = macro is None or macro in _described_macros or macro in gin_text.macros(text)
        found += [override] * (not used)
    return found


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
    text, found = gin.config_str(), {}
    for selector in dict.fromkeys(gin_text.selectors(text)):
        for name in _parameters(selector):
            found.setdefault(name, f"{selector}.{name}")
    first = {name: f"loop.train.{name}" for name in _parameters("loop.train")}
    return found | first | {name: name for name in gin_text.macros(text)}


def is_macro(name: str) -> bool:
    """Whether the config sets a macro of this name."""
    return _is_set(f"{name}/gin.macro.value")


def is_set_beside_macros(parameter: str) -> bool:
    """Whether the config sets a parameter to a value, and not to a macro."""
    return _is_set(parameter) and macro_of(parameter) is None


def macro_of(parameter: str) -> str | None:
    """The macro that a parameter is set to; None if it is set to none."""
    value = gin.query_parameter(parameter) if _is_set(parameter) else None
    if not isinstance(value, gin.config.ConfigurableReference):
        return None
    scope, selector = value.config_key
    return scope if selector == "gin.macro" else None


def arguments() -> list[str]:
    """'module.function.argument' of every function that the parsed config sets or refers to."""
    text = gin.config_str()
    named = [*gin_text.selectors(text), *gin_text.references(text), "loop.train"]
    found = []
    for selector in dict.fromkeys(named):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found += [f"{selector}.{name}" for name in _parameters(selector)]
    return found


def arguments_of(function) -> set[str]:
    """The arguments of a function that the config sets."""
    return set(_bound(function))


def needs_trust(text: str, source: str) -> bool:
    """Whether a run's config is read with --trust_config alone."""
    try:
        _parse_with(functools.partial(_check_names, trust.BoundNames()), text, source)
    except ConfigError:
        return True
    return False


def _parameters(selector: str) -> list[str]:
    """The arguments of a configurable."""
    function = gin.get_configurable(selector)
    function = function.__init__ if inspect.isclass(function) else function
    return [name for name in inspect.signature(function).parameters if name != "self"]

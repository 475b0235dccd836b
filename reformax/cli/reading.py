"""Reads the text of gin configs, statement by statement, into gin's global config.

What statements name is looked up here, so that every mistake is one line with its location and the
nearest names. A module of this package, or else of the working directory, needs no import line. A
file's imports bind names for this file alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gin
from gin.config_parser import BindingStatement, ImportStatement, IncludeStatement, Location

from reformax.cli import configs, messages, modules, statements, trust
from reformax.cli.statements import ConfigError, WrittenName
from reformax.shell import in_quotes

_NOWHERE = Location(None, 0, None, "")
_DYNAMIC = ImportStatement("__gin__.dynamic_registration", True, None, _NOWHERE)


class _Missing(ValueError):
    """A name that is not there, and '; did you mean ...?'."""

    def __init__(self, line: str, near: str = ""):
        super().__init__(line)
        self.near = near


@contextlib.contextmanager
def _at(location: Location) -> Iterator[None]:
    """Any error within is a `ConfigError` with this location."""
    try:
        yield
    except ConfigError:  # of a file that is included
        raise
    except SyntaxError as error:
        raise statements.of_syntax(error, location.line_content) from None
    except (ValueError, LookupError, NameError, AttributeError, ImportError, OSError) as error:
        first = messages.first_line(error)
        where = f" ({location.filename}, line {location.line_num})" if location.filename else ""
        line = statements.printable(location.line_content)
        line = f": {line}" if line and line not in first else ""
        raise ConfigError(f"{first}{where}{line}{getattr(error, 'near', '')}") from None


def read_file(path: str, folders: Sequence[str | Path] = (), above: Sequence[str] = ()) -> set[str]:
    """Reads a file and what it includes.

    Args:
      path: the file.
      folders: where included files are looked for, after the working directory.
      above: the files that include it.

    Returns:
      The macros that it sets and that nothing set before.

    Raises:
      ConfigError: anything in it is wrong.
    """
    with _at(_NOWHERE):
        text = Path(path).read_text("utf-8-sig")
    return read(text, path, folders=folders, above=above)


def read(
    text: str,
    source: str | None = None,
    *,
    names: trust.Names | None = None,
    folders: Sequence[str | Path] = (),
    above: Sequence[str] = (),
    bind: bool = True,
    also_in: Collection[str] = (),
) -> set[str]:
    """Reads a text as `read_file` does.

    Args:
      text: the config.
      source: its file, for errors; None: an override, for which the imports of all files count.
      names: says which names the text may hold; None: any.
      folders, above: as in `read_file`.
      bind: False only looks names up, and sets nothing.
      also_in: scopes in which a setting without a scope is set too, where it is set there.
    """
    new = set()
    with gin.config._parse_scope() as context:
        if source is None:
            _with_all_imports(context)
        for statement in statements.statements_in(text, source):
            with _at(statement.location):
                match statement:
                    case IncludeStatement(filename=filename):
                        _include(filename, source, names, folders, above)
                    case ImportStatement():
                        _import(context, statement, names)
                    case BindingStatement(value=value):
                        key = _key(context, statement, names)
                        if key[1] == "gin.macro":
                            new |= {key[0]} - set(macros())
                        value = _value(context, value, names)
                        if bind:
                            gin.bind_parameter(key, value)
                            _bind_in(also_in, key, value)
                    case _:  # the head of a block
                        _configurable(context, statement.selector, names)
        if names is not None:
            with _at(_NOWHERE):
                names.finish()
        if bind:
            gin.config._IMPORTS.update(context.imports)
    return new


def make_known(selector: str) -> None:
    """Lets gin know a function, as a config does that sets an argument of it."""
    with gin.config._parse_scope() as context:
        _with_all_imports(context)
        _configurable(context, selector, None)
        gin.config._IMPORTS.update(context.imports)


def _bind_in(scopes: Collection[str], key: tuple, value: Any) -> None:
    """Sets what a key without a scope names in those of these scopes that set it."""
    key = gin.config.ParsedBindingKey.parse(key)
    for scope in scopes if not key.scope else ():
        bound = gin.config._CONFIG.get((scope, key.complete_selector), {})
        if key.arg_name in bound:
            bound[key.arg_name] = value


def _with_all_imports(context: Any) -> None:
    for statement in gin.config.ImportManager(gin.config._IMPORTS).sorted_imports:
        context.process_import(statement)


def macros() -> list[str]:
    """The macros that are set."""
    return [scope for scope, selector in gin.config._CONFIG if selector == "gin.macro"]


def _import(context: Any, statement: ImportStatement, names: trust.Names | None) -> None:
    if statement.module == _DYNAMIC.module and statement.is_from:
        if not context._dynamic_registration:
            context.process_import(statement)
    elif names is None or names.imports(statement, context._dynamic_registration):
        context.process_import(statement)


def _include(filename: str, source: str | None, names: Any, folders: Any, above: Any) -> None:
    if names is not None:
        names.check_include(filename)
    path = included(filename, source, folders)
    if path is None:
        raise _Missing(f"no config file {filename}", configs.nearest(filename))
    if path in (*above, source):
        raise _Missing(f"{filename}: a file includes itself")
    read_file(path, folders, (*above, *([source] if source else [])))


def included(name: str, above: str | None, folders: Sequence[str | Path]) -> str | None:
    """The file that an include names: of ours if `above` is one of ours, and never `above`."""
    candidates = [Path(folder, name) for folder in ("", *folders)]
    if (packaged := configs.found(name)) is not None:
        ours = above is not None and configs.is_packaged(above)
        candidates.insert(0 if ours else len(candidates), packaged)
    files = [path for path in candidates if is_file(path)]
    others = [
        path
        for path in files
        if above is None or not (is_file(Path(above)) and path.samefile(above))
    ]
    chosen = next(iter(others or files), None)
    return None if chosen is None else str(chosen.absolute())


def is_file(path: Path) -> bool:
    """Whether there is such a file."""
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _value(context: Any, value: Any, names: trust.Names | None) -> Any:
    """A value of a statement, with gin's objects for references and macros."""
    if isinstance(value, WrittenName):
        if value[0] == "%":
            return gin.config.ParserDelegate().macro(value[1:])
        name = value[1:].removesuffix("()")
        _configurable(context, name.rpartition("/")[2], names, called=True)
        return gin.config.ConfigurableReference(name, value.endswith("()"))
    if isinstance(value, dict):
        return {_value(context, k, names): _value(context, x, names) for k, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_value(context, x, names) for x in value)
    return value


def _configurable(
    context: Any, selector: str, names: trust.Names | None, called: bool = False
) -> Any:
    """What a selector names.

    Raises:
      _Missing: nothing has this name.
      trust.Untrusted: `names` does not allow it.
    """
    if names is None and not context.imports:
        context.process_import(_DYNAMIC)
    if names is None and not context._dynamic_registration:
        found = context.get_configurable(selector)
        if found is not None and found.import_source is None:  # its module registered it
            return found.wrapped
        imports = list(context.imports)
        context.imports.clear()
        for statement in (_DYNAMIC, *imports):
            context.process_import(statement)
    first, *rest = selector.split(".")
    bound = context._symbol_table
    if names is not None:
        names.check_name(selector)
    elif first not in bound and (module := modules.module_of(first)):
        context.process_import(ImportStatement(module, "." in module, None, _NOWHERE))
    if first not in bound:
        known = {*bound, *(modules.names() if names is None else ())} - {"gin"}
        near = messages.nearest(first, sorted(known), most=0)
        if not near and names is None and modules.can_import(first):
            near = f"; --config={in_quotes(f'import {first}')} makes it one"
        raise _Missing(f"{first} is not the name of an imported module", near)
    if not rest and names is None:
        functions = [f"{first}.{name}" for name in _public(bound[first])]
        same = f"{first}.{first}"
        near = f"; did you mean {same}?" if same in functions else messages.nearest(same, functions)
        raise _Missing(f"{first} is a module: name a function of it", near)
    parts = [bound[first]]
    for n, name in enumerate(rest):
        if not hasattr(parts[-1], name):
            near = messages.nearest(name, _public(parts[-1]), most=12)
            raise _Missing(f"{'.'.join([first, *rest[:n]])} has no {name}", near)
        parts.append(getattr(parts[-1], name))
    if names is not None:
        names.check(selector, parts, called)
    context.get_configurable(selector)  # registers it
    return parts[-1]


def _public(module: Any) -> list[str]:
    """The functions and classes that a module lists or defines, or else all its public names."""
    if not isinstance(module, ModuleType):
        return []
    found = {name: x for name, x in vars(module).items() if name[0] != "_"}
    defined = [x for x in found if getattr(found[x], "__module__", "") == module.__name__]
    defined += getattr(module, "__all__", [])
    return [name for name in defined if callable(found[name])] or list(found)


def _key(context: Any, statement: BindingStatement, names: trust.Names | None) -> tuple:
    """gin's (scope, selector, argument) of what a statement sets."""
    scope, selector, argument = statement[:3]
    if not argument:
        return f"{scope}/{selector}" if scope else selector, "gin.macro", "value"
    function = _configurable(context, selector, names)
    if not gin.config._might_have_parameter(function, argument):
        near = messages.nearest(argument, parameters_of(function))
        raise _Missing(f"{selector} has no parameter {argument}", near)
    return scope, selector, argument


def parameters_of(function: Any) -> list[str]:
    """The arguments of a function, or of a class."""
    function = function.__init__ if inspect.isclass(function) else function
    return [name for name in inspect.signature(function).parameters if name != "self"]

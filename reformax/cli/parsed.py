"""What the parsed config says: functions with their arguments, values as data, its text."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import gin

from reformax.cli import lookup
from reformax.cli.statements import ConfigError, override_of
from reformax.declared import check_all, hints_of

# Macros that `described` read: gin does not note what is read and not called.
_described_macros: set[str] = set()


class Reference(NamedTuple):
    """A reference in a config, `@function` or `@function()`."""

    function: Callable
    arguments: dict[str, Any]  # those that the config sets


def settings_in(value: Any, name: str) -> dict[str, str]:
    """The settings within a value of `described` as text, by name; those left out are defaults."""
    if isinstance(value, Reference):
        parameters = inspect.signature(value.function).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()}
        found, parts = f"@{value.function.__name__}", defaults | value.arguments
    elif isinstance(value, dict):
        found, parts = "a table", value
    elif isinstance(value, list | tuple):
        found, parts = f"of {len(value)}", dict(enumerate(value))
    else:
        return {name: repr(value)}
    of_parts = (settings_in(x, f"{name}.{key}") for key, x in parts.items())
    return {name: found} | {key: x for part in of_parts for key, x in part.items()}


def forget() -> None:
    """Forgets what was parsed, and what of it was read."""
    gin.clear_config()
    _described_macros.clear()


def configured(function):
    """`function` with the config's values as its arguments.

    Raises:
      ConfigError: the config sets none of its arguments, or one to a value that needs itself.
    """
    _check_ends(function)
    if not _bound(function):
        name = _name(function)
        raise ConfigError(
            f"the config sets nothing of {name}: it needs {name}.model, .task and .optimizer"
        )
    return gin.get_configurable(function)


def _name(function) -> str:
    """'loop.train' of the function."""
    return lookup.short(f"{function.__module__}.{function.__name__}")


def _check_ends(function) -> None:
    """Raises `ConfigError` if building an argument of the function would never end."""
    done = set()

    def visit(function: Any, above: tuple[str, ...]) -> None:
        for scope, selector in lookup.references_in(_bound(function)):
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
    bound = _bound(function)
    for name, parameter in inspect.signature(function).parameters.items():
        wanted = names is not None and name in names and parameter.default is parameter.empty
        if wanted and name not in bound:
            raise ConfigError(f"the config does not set {function.__name__}.{name}")
    # gin resolves a reference when it is copied.
    values = {name: deepcopy(x) for name, x in bound.items() if names is None or name in names}
    check_all(hints_of(function), values)
    return values


def arguments_of(function) -> set[str]:
    """The arguments of a function that the config sets."""
    return set(_bound(function))


def refuse_passed(function, *names: str) -> None:
    """Raises `ConfigError` if the config sets an argument that the command itself passes."""
    for name in set(names) & arguments_of(function):
        raise ConfigError(f"{_name(function)}.{name} is passed by the command: leave it out")


def described(function, argument: str):
    """The value that the config gives an argument, as data: nothing is called.

    A reference to a configurable becomes a `Reference`, whether it names the function or
    its result. A macro becomes its value.

    Raises:
      ConfigError: the config does not set the argument.
    """
    configured(function)
    bound = _bound(function)
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
    known = {selector for _, selector in (*gin.config._CONFIG, *lookup.all_references())}
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
        outer_value = gin.config._CONFIG.get((outer, called), {}).get(argument)
        parts = scope.split("/")
        inside = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        bound = [gin.config._CONFIG.get((x, called), {}) for x in inside if len(x) > len(outer)]
        return any(argument in values and values[argument] is not outer_value for values in bound)

    within = f"{outer}/" if outer else ""
    calls = [
        (scope, called)
        for scope, called in gin.config._OPERATIVE_CONFIG
        if f".{called}".endswith(f".{selector}") and f"{scope}/".startswith(within)
    ]
    return bool(calls) and all(hidden(*call) for call in calls)

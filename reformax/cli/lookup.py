"""What the parsed config holds, by name: values, references, macros and the arguments of functions.

A *selector* is gin's name of a function, 'reformax.training.loop.train'. A *parameter* is an
argument of one, in a scope or in none: 'scope/reformax.training.loop.train.task'.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import gin

from reformax.cli import reading
from reformax.declared import hints_of

TRAIN = "reformax.training.loop.train"


def is_set(parameter: str) -> bool:
    """Whether the config sets a parameter, to a value or to a macro."""
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True


def value_of(parameter: str) -> Any:
    """The value of a parameter, by macros or without; None if it is not set."""
    value, seen = gin.query_parameter(parameter) if is_set(parameter) else None, []
    while (macro := _macro_in(value)) and is_macro(macro) and macro not in seen:
        seen.append(macro)
        value = gin.query_parameter(f"{macro}/gin.macro.value")
    return value


def values_of(argument: str) -> list[Any]:
    """The values of all functions' arguments of this name, by macros or without."""
    return [
        value_of(f"{scope}/{selector}.{argument}".removeprefix("/"))
        for (scope, selector), values in gin.config._CONFIG.items()
        if argument in values
    ]


def macro_of(parameter: str) -> str | None:
    """The macro that a parameter is set to; None if it is set to none."""
    return _macro_in(gin.query_parameter(parameter)) if is_set(parameter) else None


def _macro_in(value: Any) -> str | None:
    """The macro that a value is; None if it is none."""
    if isinstance(value, gin.config.ConfigurableReference):
        scope, selector = value.config_key
        return scope if selector == "gin.macro" else None
    return None


def is_macro(name: str) -> bool:
    """Whether the config sets a macro of this name."""
    return is_set(f"{name}/gin.macro.value")


def references_in(value: Any) -> Iterator[tuple[str, str]]:
    """(scope, selector) of each reference in a value; a macro is (its name, 'gin.macro')."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from references_in(item)
    elif isinstance(value, gin.config.ConfigurableReference):
        yield value.config_key


def references_of(parameter: str) -> Iterator[tuple[str, str]]:
    """`references_in` the value of a parameter."""
    return references_in(value_of(parameter))


def all_references() -> Iterator[tuple[str, str]]:
    """`references_in` all values of the config."""
    return references_in([list(arguments.values()) for arguments in gin.config._CONFIG.values()])


def parameters(selector: str) -> list[str]:
    """The arguments of a function."""
    return reading.parameters_of(gin.get_configurable(selector))


def short(selector: str) -> str:
    """'lm.ReformerLM' of 'reformax.models.lm.ReformerLM'."""
    return ".".join(selector.split(".")[-2:])


def _functions() -> dict[str, str]:
    """The functions that the parsed config sets or refers to, 'module.function' -> selector."""
    named = [*gin.config._CONFIG, *all_references(), ("", TRAIN)]
    return {short(selector): selector for _, selector in named if selector != "gin.macro"}


def function_of(called: str) -> str:
    """'module.function' of what gin calls by its last name, 'scope/function'.

    Others of that name may be set, but only those that the config refers to are called.
    """
    scope, _, name = called.rpartition("/")
    referred = [short(selector) for _, selector in all_references()]
    found = next((x for x in [*referred, *_functions()] if x.endswith(f".{name}")), name)
    return f"{scope}/{found}" if scope and not is_macro(scope) else found


def arguments() -> list[str]:
    """'module.function.argument' of every function that the parsed config sets or refers to."""
    found = []
    for name, selector in _functions().items():
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found += [f"{name}.{argument}" for argument in parameters(selector)]
    return found


def hint_of(setting: str) -> Any:
    """The annotation of 'module.function.argument' or of a macro; None if there is none."""
    for (_, selector), values in gin.config._CONFIG.items():
        for argument, value in values.items():
            if selector != "gin.macro" and _macro_in(value) == setting:
                return _hint(selector, argument)
    function, _, argument = setting.rpartition("/")[2].rpartition(".")
    selector = _functions().get(function)
    return None if selector is None else _hint(selector, argument)


def _hint(selector: str, argument: str) -> Any:
    try:
        return hints_of(inspect.unwrap(gin.get_configurable(selector))).get(argument)
    except (NameError, TypeError):  # a user's function whose annotations nothing can read
        return None


def settings() -> dict[str, str]:
    """The settings of the parsed config by their last names; a macro comes before an argument."""
    found = {}
    for selector in sorted({selector for _, selector in gin.config._CONFIG} - {"gin.macro"}):
        for name in parameters(selector):
            found.setdefault(name, f"{short(selector)}.{name}")
    first = {name: f"loop.train.{name}" for name in parameters("loop.train")}
    return found | first | {name: name for name in reading.macros()}


def name_in_evaluation(label: str, name: str) -> str | None:
    """The setting of an evaluation, 'scope/evaluations.Evaluation.NAME'; None if none is known."""
    evaluations = value_of(f"{TRAIN}.evaluations")
    part = evaluations.get(label) if isinstance(evaluations, dict) else None
    scope = next((scope for scope, _ in references_in(part)), "")
    return f"{scope}/evaluations.Evaluation.{name}" if scope else None

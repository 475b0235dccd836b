"""Mistakes in flags, overrides and files that gin would take, or refuse without the fix."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

from reformax.cli import lookup, messages, modules, reading, short_names, statements
from reformax.cli.overrides import Override
from reformax.cli.statements import ConfigError
from reformax.declared import expected, fits
from reformax.shell import config_flag, in_quotes, user_path


def refuse_flags(unknown: Sequence[str], near_flag: Callable[[str], str]) -> None:
    """Raises `ConfigError` for flags that are none: the line says which setting has such a name.

    Args:
      unknown: what `argparse` could not read, '--NAME=VALUE' or '--NAME' and a value after it.
      near_flag: ', did you mean --FLAG' of one of them, or ''.
    """
    if not unknown:
        return
    name, _, value = unknown[0].removeprefix("--").partition("=")
    if not value and len(unknown) > 1 and not unknown[1].startswith("--"):
        value = unknown[1]
    settings = lookup.settings()
    if name in settings:
        written = _written(settings[name], value) if value else None
        line = f"--config={in_quotes(settings[name] + '=' + (written or 'VALUE'))}"
        if value and written is None:
            line += f", where VALUE is {expected(lookup.hint_of(settings[name]))}"
        raise ConfigError(f"{unknown[0]} is no flag but a setting: {line}")
    if name.startswith("resume"):
        raise ConfigError(f"{unknown[0]} is no flag: the same command goes on where a run stopped")
    near = messages.nearest(name, [*settings], most=0) or near_flag(unknown[0])
    raise ConfigError(f"{unknown[0]} is no flag and no setting{near}; --help lists the flags")


def _written(setting: str, value: str) -> str | None:
    """A flag's value as a config has it, a text in quotes; None if the setting takes none such."""
    hint = lookup.hint_of(setting)
    for text in (value, json.dumps(value, ensure_ascii=False)):
        with contextlib.suppress(ValueError):  # no statement, or several
            [statement] = statements.statements_in(f"x = {text}", None)
            # What a reference is called for is not known here.
            if hint is None or "@" in text or fits(statement.value, hint):
                return text
    return None


def check_apart(output_dir: str) -> None:
    """Raises `ConfigError` for a run in the folder of its text: no command would read it as text.

    The parsed config names the folders of texts.
    """
    folder = user_path("output_dir", output_dir).resolve()
    for data_dir in lookup.values_of("data_dir"):
        if isinstance(data_dir, str) and user_path("data_dir", data_dir).resolve() == folder:
            raise ConfigError(
                f"output_dir={output_dir} is data_dir too, and a run's folder is not read as text: "
                "give another output_dir, such as runs/mine"
            )


def macros_used() -> set[str]:
    """The macros that some value of the config refers to."""
    return {scope for scope, selector in lookup.all_references() if selector == "gin.macro"}


def check_used(new_macros: dict[str, str], used: set[str]) -> None:
    """Raises `ConfigError` for a macro that nothing uses and that is called as a setting is.

    That is an argument to which the config gives another value, or much the name of a macro.
    """
    arguments = short_names.arguments()
    for name, config_file in new_macros.items():
        near = messages.nearest(name, sorted(used - new_macros.keys()), most=0)
        if name in arguments:
            near = f"; did you mean {arguments[name]}?"
        if name not in used and near:
            raise ConfigError(f"{config_file} sets {name}, and nothing has %{name}{near}")


def of_override(override: Override, saved: bool) -> str | None:
    """What is wrong with an override of a config, which is a run's if `saved`; None: nothing."""
    function, name, value = override
    if function is None and (line := _no_macro(name, saved)):
        return line
    if override.is_bare_word:  # neither in quotes nor after an @
        if value.title() in ("True", "False"):
            return f"expected {override.whole}={value.title()}"
        reference, whole = modules.reference(value), override.whole
        hint = lookup.hint_of(whole) or lookup.hint_of(short_names.arguments().get(whole, ""))
        if reference is None and hint is not None and not fits(value, hint):
            return f"expected {expected(hint, value)}"
        quoted = f"write a text in quotes: {config_flag(whole, value)}"
        with_at = f"write a function with an @: --config={in_quotes(f'{whole}={reference}')}; "
        return with_at * bool(reference) + quoted
    if function is not None and "." not in function:
        near = f"; did you mean {whole}?" if (whole := lookup.settings().get(name)) else ""
        return f"a setting is module.function.argument=VALUE{near}"
    return None


def _no_macro(name: str, saved: bool) -> str | None:
    """Gin takes any name for a new macro, so a misspelt one would silently change nothing."""
    macros = reading.macros()
    # Macros are bound to arguments before a run is saved.
    unset = set() if saved else short_names.unset()
    if name in macros or name in unset:
        return None
    whole = lookup.settings().get(name)
    near = messages.nearest(name, sorted({*macros, *unset}), most=0)
    near = near or messages.nearest(name, macros)
    return f"no config file defines {name}{f'; did you mean {whole}?' if whole else near}"

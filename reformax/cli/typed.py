"""The names of an error as the user can type them: `warmup_steps`, `lm.ReformerLM.next_value`.

Parts of the package name their own arguments, since they know no config. The parsed config
says what each is called: the macro that it is set to, or else module.function.argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from reformax.cli import lookup

_NAME = re.compile(r"(?<![\w./@%('\"=-])([a-z_][A-Za-z_0-9.]*)(?==[^=\s])")
_FIRST = re.compile(r"^([a-z_]\w*)(?= is | \()")
_OF_EVALUATION = re.compile(r"evaluations\['([^']+)'\]\.(\w+)")
# Arguments of parts whose user knows the model's alone.
_OF_MODELS = {"d_embs": "pos_d_axial_embs", "rotary_grid": "pos_axial_shape"}
_REFERENCE = re.compile(r"such as (?=\w+\.(?:\w+\(\)|[A-Z]\w+))")
# Of a line whose fix is a call: what lacks one.
_UNCALLED = re.compile(
    r"<(?:class '(?:\w+\.)*|function )(\w+)[^<>]*>(?=.*: expected .* as @\S+\(\))"
)


def typed(line: str, owner: str = "", flags: Collection[str] = ()) -> str:
    """The line with settings, and calls of what is given instead, as --config takes them.

    Args:
      line: the error's.
      owner: the function that raised it, 'scope/function', if gin called it.
      flags: names that stay without an owner, since the command has flags of these names.
    """

    def named(match: re.Match[str]) -> str:
        # What gin calls has its arguments from the config, and none from a flag.
        stays = match[1] in flags and not owner
        return match[1] if stays else name_of(match[1], owner) or match[1]

    line = _OF_EVALUATION.sub(lambda x: lookup.name_in_evaluation(x[1], x[2]) or x[0], line)
    line = _UNCALLED.sub(_as_reference, _REFERENCE.sub("such as @", line))
    parts = re.split(
        r"(\([^()]*\)|'[^']*'|`[^`]*`|\S+=\S*,\S+=\S*)", line
    )  # settings are outside of these; a run's name is one of them
    parts[::2] = [_NAME.sub(named, part) for part in parts[::2]]
    line = _FIRST.sub(named, "".join(parts))
    return line.removesuffix(f" (of {owner})") if lookup.is_macro(owner.split("/")[0]) else line


def _as_reference(match: re.Match[str]) -> str:
    """'@flash.flash without ()' of a function or a class that the config gives as it is."""
    selectors = [x for _, x in lookup.all_references() if x.endswith(f".{match[1]}")]
    return f"@{lookup.short(selectors[0])} without ()" if selectors else match[0]


def name_of(name: str, of_function: str = "") -> str | None:
    """The name of an argument for --config, such as 'next_value'; None if it has none."""
    scope, _, function = of_function.rpartition("/")
    for full in lookup.arguments():
        if function and f".{full}".endswith(f".{function}.{_OF_MODELS.get(name, name)}"):
            # What a macro holds is called in a scope of its name, which a config need not set.
            scoped = full if lookup.is_macro(scope) else f"{scope}/{full}".removeprefix("/")
            return lookup.macro_of(full) or scoped
    *owner, argument = _OF_MODELS.get(name, name).split(".")
    wanted = ".".join([*owner, argument])
    found = [full for full in lookup.arguments() if f".{full}".endswith(f".{wanted}")]
    of_training = f"loop.train.{argument}"
    is_literal = lookup.is_set(of_training) and lookup.macro_of(of_training) is None
    if not owner and of_training in found and is_literal:
        return of_training  # a macro of its name is not what counts
    if not owner and lookup.is_macro(argument):
        return argument
    # An argument of training first, then the model's, then others where one alone has it.
    for prefix in ("loop.train.", "lm.", "seq2seq.", "encoder."):
        for full in found:
            if full.startswith(prefix):
                return lookup.macro_of(full) or full
    return (lookup.macro_of(found[0]) or found[0]) if len(found) == 1 else None

"""The modules that a config names without an import line, found by their last names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from reformax.cli import gin_text

# What configs name: modules of these packages, and these of training.
_PACKAGES = ("reformax.data", "reformax.models", "reformax.ops")
_OF_TRAINING = ("evaluations", "loop", "optimizer", "stages", "wandb_log")
_PARTS = ("evaluations", "stages")  # of which a run has several, in a list or by name


def missing(override: str, bound: Iterable[str]) -> list[str]:
    """The import lines that an override needs and that no file has.

    Args:
      override: a binding, such as 'loop.train.task=@text.text()'.
      bound: the names that imports bind.
    """
    wanted = set(gin_text.modules_of(override)) - set(bound)
    lines = [line for name in sorted(wanted) if (line := import_line(name))]
    if any(line.startswith("import ") for line in lines):
        find_in_working_directory()
    return lines


def import_line(name: str) -> str | None:
    """The line that imports a module of this package, or one of the working directory."""
    if name in (packages := _packages()):
        return f"from {packages[name]} import {name}"
    if name.isidentifier() and name not in sys.stdlib_module_names:
        folder = Path.cwd()
        if any(path.is_file() for path in (folder / f"{name}.py", folder / name / "__init__.py")):
            return f"import {name}"
    return None


def is_found(module: str) -> bool:
    """Whether a config may name what is in a module, 'reformax.ops.lsh', without its import."""
    package, _, name = module.rpartition(".")
    line = f"from {package} import {name}" if package else f"import {name}"
    return import_line(name) == line


def reference(name: str) -> str | None:
    """'@optimizer.adamw()' of 'optimizer.adamw', '@lsh.lsh()' of 'lsh', '@lm.ReformerLM'.

    None if no module of this package has that.
    """
    module, _, attribute = name.rpartition(".")
    module, attribute = module or name, attribute or name
    if module not in (packages := _packages()) or module in _PARTS:
        return None
    found = getattr(importlib.import_module(f"{packages[module]}.{module}"), attribute, None)
    if not callable(found):
        return None
    is_model = isinstance(found, type) and packages[module] != "reformax.ops"
    return f"@{module}.{attribute}{'' if is_model else '()'}"


def ops() -> dict[str, Callable]:
    """The ops' classes, by their names: 'lsh' of @lsh.lsh()."""
    found = {}
    for name, package in _packages().items():
        if package == "reformax.ops":
            module = importlib.import_module(f"{package}.{name}")
            if callable(make := getattr(module, name, None)):
                found[name] = make
    return found


def find_in_working_directory() -> None:
    """Lets imports find modules in the working directory, after all others."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


@functools.cache
def _packages() -> dict[str, str]:
    """The package of each module by its last name; names that two packages have are left out."""
    found = {name: "reformax.training" for name in _OF_TRAINING}
    twice = set()
    for package in _PACKAGES:
        folders = importlib.util.find_spec(package).submodule_search_locations
        names = [m.name for m in pkgutil.iter_modules(folders) if not m.ispkg and m.name[0] != "_"]
        twice |= found.keys() & names
        found |= dict.fromkeys(names, package)
    return {name: package for name, package in found.items() if name not in twice}

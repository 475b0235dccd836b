"""The modules that a config names without an import line, found by their last names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

# What configs name: modules of these packages, and these of others.
_PACKAGES = ("reformax.data", "reformax.models", "reformax.ops")
_OTHERS = {
    "reformax.ops.indexing": ("candidates", "indexer"),
    "reformax.training": ("evaluations", "fine_tuning", "loop", "optimizer", "stages", "wandb_log"),
}
_PARTS = ("evaluations", "stages")  # of which a run has several, in a list or by name


def module_of(name: str) -> str | None:
    """The module that a config may name without an import line: 'reformax.ops.lsh' of 'lsh'.

    It is one of this package, or else of the working directory, where imports find it from now on.
    If both have one, a note on stderr says how to take the other.
    """
    if name in (packages := _packages()):
        if file := _in_working_directory(name):
            _note_hidden(name, packages[name], file)
        return f"{packages[name]}.{name}"
    if name not in sys.stdlib_module_names and _in_working_directory(name):
        find_in_working_directory()
        return name
    return None


def _in_working_directory(name: str) -> Path | None:
    """The file of a module in the working directory, relative to that."""
    files = (Path(f"{name}.py"), Path(name, "__init__.py")) if name.isidentifier() else ()
    return next((file for file in files if file.is_file()), None)


@functools.cache  # once for each
def _note_hidden(name: str, package: str, file: Path) -> None:
    print(
        f"note: {name} is {package}.{name} and not {file} in this folder, which a line "
        f"`import {name}` in the config file takes",
        file=sys.stderr,
    )


def can_import(name: str) -> bool:
    """Whether a line `import NAME` of a config finds a module."""
    return name.isidentifier() and importlib.util.find_spec(name) is not None


def names() -> list[str]:
    """The modules of this package that a config may name without an import line."""
    return list(_packages())


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
    is_model = isinstance(found, type) and not packages[module].startswith("reformax.ops")
    return f"@{module}.{attribute}{'' if is_model else '()'}"


def find_in_working_directory() -> None:
    """Lets imports find modules in the working directory, after all others."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


@functools.cache
def _packages() -> dict[str, str]:
    """The package of each module by its last name; names that two packages have are left out."""
    found = {name: package for package, names in _OTHERS.items() for name in names}
    twice = set()
    for package in _PACKAGES:
        folders = importlib.util.find_spec(package).submodule_search_locations
        names = [m.name for m in pkgutil.iter_modules(folders) if not m.ispkg and m.name[0] != "_"]
        twice |= found.keys() & names
        found |= dict.fromkeys(names, package)
    return {name: package for name, package in found.items() if name not in twice}

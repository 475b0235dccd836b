"""The names that a config may hold where it comes with a run's folder.

gin imports every module that a config names and calls functions in them. A config of one's own is
code. A folder that is read is data: its config may name models, attentions, tasks and optimizers of
reformax, and the functions of jax.nn and optax. These compute, or read a text; tensorflow-datasets
may fetch a dataset of its own. None starts a program, unpickles or imports what an argument says.
All names are looked up before gin sees the config, and gin gets the modules that they were looked
up in: it imports nothing itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_LIBRARIES = ("jax.nn", "optax")
# Parts of reformax, and what a function there returns, or a class there is a subclass of; None: any
# class or function that is public.
_PARTS = {
    "reformax.data": ("Task",),
    "reformax.models": None,
    "reformax.ops": ("AttentionOp", "OpOption", "Pattern"),
    "reformax.training.evaluations": None,
    "reformax.training.fine_tuning": None,
    "reformax.training.optimizer": None,
    "reformax.training.stages": None,
    "reformax.training.wandb_log": None,  # makes a logger, which training alone opens
}
# Configured, but never called by a config: it writes a folder.
_CONFIGURED = ("reformax.training.loop", "train")
_FLAG = "--trust_config reads the config of a run that you trust"


class Untrusted(ValueError):
    """A name would run code. One line says which."""


class BoundNames:
    """The names that a config's imports bind, as gin resolves them: statement by statement.

    The calls come in the order of the config's statements.
    """

    def __init__(self):
        self._bound: dict[str, str] = {}  # name -> the module that it is bound to
        self._foreign: dict[str, str] = {}  # name -> a module that must not be imported
        self._imported: set[str] = set()  # those that gin may have
        self._dynamic = False

    def enable(self) -> None:
        """Notes `from __gin__ import dynamic_registration`: imports bind names from here on."""
        self._dynamic = True

    def add_import(self, module: str, name: str, bound_to: str) -> None:
        """Imports a module if a config may have it; notes it otherwise.

        Args:
          module: the module.
          name: the name that it binds.
          bound_to: the module that the name is bound to, `a` in `import a.b`.

        Raises:
          Refused: the name is bound to another module already, or nothing has enabled names.
          ImportError: there is no such module.
        """
        if not self._dynamic:  # gin would find names in its registry, which anyone may fill
            raise Untrusted(
                f"the config of a run imports {module} before `from __gin__ import "
                f"dynamic_registration`: {_FLAG}"
            )
        before = self._bound.setdefault(name, bound_to)
        if before != bound_to:
            raise Untrusted(
                f"the config of a run binds {name} to {before} and to {bound_to}: give each "
                f"import a name of its own, or {_FLAG}"
            )
        if _may_import(module):
            importlib.import_module(module)
            self._imported.add(module)
        else:
            self._foreign[name] = module

    def check(self, selector: str, called: bool) -> None:
        """Checks a function that the config configures or refers to.

        Args:
          selector: its name, such as 'lm.ReformerLM', without scopes.
          called: whether the config refers to it. gin or the program may then call it.

        Raises:
          Refused: it is none of those that a config may hold.
          NameError: no import binds the first part of its name.
          AttributeError: a module has no such name.
        """
        first, *rest = selector.split(".")
        if first in self._foreign:
            raise Untrusted(_explained(".".join([self._bound[first], *rest])))
        if first == "gin":
            raise Untrusted(_explained(selector))
        if first not in self._bound:
            raise NameError(f"'{first}' was not provided by an import statement.")
        whole = ".".join([self._bound[first], *rest])
        parent: Any = None
        found: Any = sys.modules[self._bound[first]]
        for name in rest:
            parent = found
            if name.startswith("_") or not isinstance(parent, ModuleType):
                raise Untrusted(_explained(whole))
            if not hasattr(parent, name):
                raise AttributeError(
                    f"Couldn't resolve selector {selector}; {parent} has no attribute {name}."
                )
            found = getattr(parent, name)
        if not (_is_allowed(parent, found) or (not called and _is(found, *_CONFIGURED))):
            raise Untrusted(_explained(whole))

    def check_include(self, file: str) -> None:
        """Refuses a file that the config includes: train.py writes configs that include none."""
        raise Untrusted(f"the config of a run includes {file!r}: {_FLAG}")

    def finish(self) -> None:
        """Refuses a module that the config imports and names nothing of."""
        for module in self._foreign.values():
            raise Untrusted(_explained(module))

    def imported(self, module: str, fromlist: Sequence[str] | None = None) -> ModuleType:
        """Stands for `__import__` where gin reads a config that was checked: imports nothing.

        Raises:
          Refused: the module was not checked.
        """
        if module not in self._imported:
            raise Untrusted(_explained(module))
        return sys.modules[module if fromlist else module.partition(".")[0]]


def _explained(name: str) -> str:
    return (
        f"the config of a run names {name}, which is no model, attention, task or optimizer of "
        f"reformax and no function of jax.nn or optax, and could run any code: {_FLAG}"
    )


def _may_import(module: str) -> bool:
    parts = module.split(".")
    private = any(part.startswith("_") for part in parts)
    inside = parts[0] in ("reformax", "optax") or module in ("jax", "jax.nn", "jax.nn.initializers")
    return inside and not private


def _is_allowed(parent: Any, found: Any) -> bool:
    """Whether `found`, a public name of the module `parent`, may be called with any values."""
    if not isinstance(parent, ModuleType) or isinstance(found, ModuleType) or not callable(found):
        return False
    home, where = getattr(found, "__module__", None) or "", parent.__name__
    if any(_is_in(where, library) for library in _LIBRARIES):
        # Their functions are defined in private modules of jax and optax.
        return home.partition(".")[0] == where.partition(".")[0]
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        return False
    for part, returned in _PARTS.items():
        if _is_in(where, part) and _is_in(home, part):
            return returned is None or _returns(found, *returned)
    return False


def _is_in(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def _returns(found: Any, *types: str) -> bool:
    """Whether a function says that it returns one of these, or a class is a subclass of one."""
    if inspect.isclass(found):  # an op is a dataclass; what several have in common is none
        is_whole = dataclasses.is_dataclass(found)
        return is_whole and any(base.__name__ in types for base in found.__mro__[1:])
    return getattr(found, "__annotations__", {}).get("return") in types


def _is(found: Any, module: str, name: str) -> bool:
    return (getattr(found, "__module__", ""), getattr(found, "__name__", "")) == (module, name)

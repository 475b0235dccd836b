"""The names that a config may hold where it comes with a run's folder.

gin imports every module that a config names and calls functions in them. A config of one's own is
code. A folder that is read is data: its config may name models, attentions, tasks and optimizers of
reformax, and the functions of jax.nn and optax. These compute, or read a text; tensorflow-datasets
may fetch a dataset of its own. None starts a program, unpickles or imports what an argument says.
`reading` asks for each name before it imports a module or gives gin a function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_LIBRARIES = ("jax.nn", "optax")
# Parts of reformax, and what a function there returns, or a class there is a subclass of; None: any
# class or function that is public.
_PARTS = {
    "reformax.data": ("Task",),
    "reformax.models": None,
    "reformax.ops": ("AttentionOp", "Options", "Pattern"),
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


class Names:
    """The names that a config may hold, asked statement by statement, in their order."""

    def __init__(self):
        self._bound: dict[str, str] = {}  # name -> the module that it is bound to
        self._foreign: dict[str, str] = {}  # name -> a module that must not be imported

    def imports(self, statement: Any, dynamic: bool) -> bool:
        """Whether a module may be imported. Another one is noted: `finish` refuses it.

        Args:
          statement: gin's, of the import.
          dynamic: whether `from __gin__ import dynamic_registration` came before.

        Raises:
          Untrusted: the name is bound to another module already, or nothing has enabled names.
        """
        module, name = statement.module, statement.bound_name()
        if not dynamic:  # gin would find names in its registry, which anyone may fill
            raise Untrusted(
                f"the config of a run imports {module} before `from __gin__ import "
                f"dynamic_registration`: {_FLAG}"
            )
        whole = statement.is_from or statement.alias
        bound_to = module if whole else module.partition(".")[0]
        before = "gin" if name == "gin" else self._bound.setdefault(name, bound_to)
        if before != bound_to:
            raise Untrusted(
                f"the config of a run binds {name} to {before} and to {bound_to}: give each "
                f"import a name of its own, or {_FLAG}"
            )
        if not _may_import(module):
            self._foreign[name] = module
            return False
        return True

    def check_name(self, selector: str) -> None:
        """Refuses a name of a module that is not imported, and one with a private part."""
        first, *rest = selector.split(".")
        if first in self._foreign or first == "gin" or any(x.startswith("_") for x in rest):
            raise Untrusted(self._explained(selector))

    def check(self, selector: str, parts: Sequence[Any], called: bool) -> None:
        """Refuses a function that is none of those that a config may hold.

        Args:
          selector: its name, such as 'lm.ReformerLM', without scopes.
          parts: what each part of the name stands for.
          called: whether the config refers to it. gin or the program may then call it.
        """
        *parents, found = parts
        inside = bool(parents) and all(isinstance(parent, ModuleType) for parent in parents)
        name = getattr(found, "__module__", ""), getattr(found, "__name__", "")
        configured = not called and name == _CONFIGURED
        if not inside or not (_is_allowed(parents[-1], found) or configured):
            raise Untrusted(self._explained(selector))

    def check_include(self, file: str) -> None:
        """Refuses a file that the config includes: train.py writes configs that include none."""
        raise Untrusted(f"the config of a run includes {file!r}: {_FLAG}")

    def finish(self) -> None:
        """Refuses a module that the config imports and names nothing of."""
        for module in self._foreign.values():
            raise Untrusted(_explained(module))

    def _explained(self, selector: str) -> str:
        first, dot, rest = selector.partition(".")
        return _explained(f"{self._bound.get(first, first)}{dot}{rest}")


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
    if isinstance(found, ModuleType) or not callable(found):
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

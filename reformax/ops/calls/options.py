"""Options of an op that are settings themselves."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

from reformax.declared import check_fields

T = TypeVar("T", bound="type[OpOption]")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def op_option(settings: T) -> T:
    """Makes a dataclass of an `OpOption`: its fields are given by keyword."""
    return dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(settings)


@op_option
class OpOption:
    """Settings that are one option of an op, checked by their annotations.

    Instances are equal where their class and all settings are, and so are ops that have them.
    """

    def __post_init__(self):
        check_fields(self)

    def __repr__(self) -> str:
        """The call that makes it, such as `Hashed(n_hashes=8)`."""
        settings = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        changed = (f"{name}={x!r}" for name, x, default in settings if x != default)
        return f"{type(self).__name__}({', '.join(changed)})"

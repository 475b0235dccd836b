"""Ops that may attend to the keys that an earlier layer chose, instead of choosing keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from reformax.declared import SettingError, Unsupported


class Reusing:
    """A second base class of an op that may reuse a choice.

    The op has the options `reuse` and `report_loss`, and defines `newest_choice`. `_of_choice`
    names its options that decide or learn the choice; with `reuse` the earlier layer's count.
    """

    _of_choice: ClassVar[tuple[str, ...]] = ()

    @property
    def reuses(self) -> bool:
        return self.reuse

    def may_reuse(self, other) -> bool:
        """Whether `other` makes the choice that the op is to reuse.

        An option of the choice is the default or the other's: another value would not be read.
        """
        if not isinstance(other, type(self)) or other.reuse:
            return False
        defaults = {x.name: x.default for x in dataclasses.fields(self)}
        return all(getattr(self, x) in (defaults[x], getattr(other, x)) for x in self._of_choice)

    def _choice_of(self, cache):
        return () if self.reuse else self.newest_choice(cache)

    def _check(self) -> None:
        super()._check()
        if self.reuse and self.report_loss:
            raise SettingError("reuse is True and report_loss too: it has no loss, leave one out")

    def _check_chooses(self) -> None:
        """Raises `Unsupported` where an op that reuses a choice is to make one."""
        if self.reuse:
            raise Unsupported(
                f"reuse is True: {self.name} attends by the choice of a layer before it in a "
                "stack's cycle, and makes none; set reuse=False for a layer alone"
            )

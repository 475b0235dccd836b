"""Ops whose indexer chooses keys, or that attend to those that an earlier layer chose."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array

from reformax.declared import SettingError, Unsupported

# Kernels that visit all keys index words of 32 pairs with 31 bits.
MAX_PAIRS = 2**36


class Reusing:
    """A second base class of an op whose indexer chooses keys, or which reuses a choice.

    The op has the options `reuse`, `index_loss` and `report_loss`, and defines `newest_choice`.
    `_of_choice` names its options that decide or learn the choice; with `reuse` the earlier layer's
    count.
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

    @property
    def _learns(self) -> bool:
        """Whether the op has an indexer that learns."""
        return not self.reuse and self.index_loss > 0

    def _n_bits(
        self,
        q: Array,
        k: Array,
        n_listed: int,
        n_keys: int,
        causal: bool = True,
        by_list: bool | None = None,
    ) -> int:
        """Pairs of queries and keys, or summaries, for each of which kernels make a bit.

        Args:
          q, k: queries and keys.
          n_listed: keys, or summaries, that a query sees.
          n_keys: all of them.
          causal: whether later ones are hidden.
          by_list: whether kernels read lists; None: where that pays.
        """
        n_pairs = q.shape[0] * q.shape[1] * n_keys
        if n_pairs <= MAX_PAIRS:
            return n_pairs
        from reformax.ops.kernels.triton import chosen_keys as kernel

        sizes = n_listed, n_keys, q, k
        by_list = kernel.reads_lists(*sizes, causal) if by_list is None else by_list
        return n_pairs if kernel.makes_bits(*sizes, by_list, self._learns) else 0

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

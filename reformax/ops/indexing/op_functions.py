"""The functions of an op whose indexer chooses keys, or that reuses an earlier layer's choice."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.buffers import Meter, updated
from reformax.declared import NonNegative, SettingError, Unsupported, Width
from reformax.ops.calls.call import Call
from reformax.ops.calls.obstacles import NARROW_HEAD
from reformax.ops.calls.options import Options, options
from reformax.ops.masking.visibility import is_token
from reformax.ops.sharding import queries as sharding

# Kernels that visit all keys index words of 32 pairs with 31 bits.
MAX_PAIRS = 2**36
# Queries of a row over which a reported loss is a mean, where it is computed for that alone.
MEASURED = 256


@options
class IndexedChoice(Options):
    """The functions and options of such an op: a second base class of the op.

    The op defines `newest_choice`. `_of_choice` names its options that decide or learn the choice;
    with `reuse` the earlier layer's count.
    """

    n_index_heads: Width = 4
    d_index: Width = 64
    index_loss: NonNegative = 1.0
    report_loss: bool = False
    reuse: bool = False

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

    def _above(self, n_bits: int) -> dict[str, int]:
        """Sizes that no kernel has, by name, for `obstacles.kernel_obstacles`."""
        above = {"d_index": (self.d_index, NARROW_HEAD), "pairs": (n_bits, MAX_PAIRS)}
        return {name: n for name, (n, most) in above.items() if n > most}

    # The indexer's loss.

    def _meter(self) -> dict[str, Meter]:
        """The weight that `report_loss` has."""
        return {"index_loss": Meter(jnp.zeros(()))} if self.report_loss else {}

    def _factor(self, call: Call, ids: Int[Array, "B t"], dtype: Any) -> Float[Array, ""]:
        """The factor of the sum of the divergence over queries, of which `ids` are the segments."""
        n_tokens = devices.sum_over(jnp.sum(is_token(ids)), sharding.token_axes_of(call.shard))
        factor = 0.0 if self.reuse else self.index_loss
        return factor / jnp.maximum(n_tokens, 1).astype(dtype)

    def _reported(
        self, call: Call, params, out: Array, losses: Array, ids: Int[Array, "B t"]
    ) -> Array:
        """The output, whose gradient carries what the meter becomes: the mean of the losses.

        `ids` are the segments of the queries that have losses.
        """
        sums = losses.sum(), jnp.sum(is_token(ids))
        loss, n_tokens = (devices.sum_over(x, sharding.axis_of(call.shard)) for x in sums)
        mean = loss / jnp.maximum(n_tokens, 1).astype(loss.dtype)
        meter = updated(params["index_loss"], lax.stop_gradient(mean))
        return out + (0 * meter).astype(out.dtype)

    # Reuse.

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

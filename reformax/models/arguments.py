"""What the functions of models are given, checked: tokens, weights, a number of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.declared import SettingError, shown
from reformax.ops.numerics.arrays import check_array, check_ids, check_lengths


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Capacity:
    """The most positions of a state's text, which compiled programs know; None: any number."""

    n: int | None

    def check(
        self, name: str, position: Int[Array, " B"], lengths: Int[Array, " B"] | None = None
    ) -> None:
        """Raises a `ValueError` if there is no room for `lengths` more positions, or one.

        Within `jax.jit` the numbers are not known, and none is refused.

        Args:
          name: of `position`.
          position: of the next token of each row.
          lengths: how many are read in each row; None: one.
        """
        if self.n is None:
            return
        if lengths is None:
            of = f"below the state's capacity, {self.n}: give a larger one"
            check_lengths(name, position, len(position), self.n - 1, of)
        else:
            end = position + lengths
            of = "the state's capacity: give a larger one"
            check_lengths(f"{name} + lengths", end, len(end), self.n, of)


def check_tokens(name: str, tokens: Any, segment_ids: Any = None) -> None:
    """Raises a `ValueError` unless tokens are integers `[B, T]`, and segments are theirs."""
    check_array(name, tokens, "an array of integers [batch, length]")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {tokens.shape} and dtype {tokens.dtype}: expected integers "
            "[batch, length]"
        )
    if segment_ids is not None:
        check_ids("segment_ids", segment_ids, name, tokens.shape)


def check_embedding(params, name: str, vocab_size: int, d_model: int) -> None:
    """Raises a `ValueError` for the weights of a model of other sizes, and for what is none."""
    if not isinstance(params, Mapping):
        raise ValueError(f"params is {shown(params)}: expected a dict, as of init_params")
    if params[name].shape != (vocab_size, d_model):
        raise ValueError(
            f"params[{name!r}] has shape {params[name].shape}: expected [vocab_size, d_model], "
            f"{(vocab_size, d_model)}"
        )


def check_capacity(capacity: int, max_length: int | None) -> None:
    """Raises a `ValueError` if decoding asks for more positions than the model's hold."""
    if max_length is not None and capacity > max_length:
        raise SettingError(
            f"capacity is {capacity}: expected at most {max_length}, which is what the model's "
            "positions hold"
        )

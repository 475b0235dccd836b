"""The static sizes of a call, and of the projections that a layer makes for it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Dims(NamedTuple):
    """The static sizes that an algorithm's own weights may depend on."""

    n_heads: int
    d_qk: int
    d_v: int
    length: int
    n_kv_heads: int | None = None  # G; None: N
    n_qk_heads: int | None = None  # of queries and keys, each for N / n_qk_heads of values; None: N

    @property
    def key_heads(self) -> int:
        """G, the number of heads of keys and values."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def qk_heads(self) -> int:
        """The number of heads of queries, and of keys where values have more heads."""
        return self.n_heads if self.n_qk_heads is None else self.n_qk_heads


class Projection(NamedTuple):
    """A projection of a layer's input to heads, `[B, T, n_heads, size]`."""

    n_heads: int
    size: int
    role: Literal["query", "key"] | None = None  # layers norm and rotate it, and scale queries
    rank: int | None = None  # that of its matrix, made of two thin ones; None: one whole matrix

    @property
    def of_input(self) -> Projection:
        """The first product of the layer's input; of the size of `rank` where there is one."""
        return self if self.rank is None else Projection(1, self.rank)

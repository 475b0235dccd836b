"""Packs the chunks of a position by several hashes into integers that compare them all at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int


class PackedChunks(NamedTuple):
    """The chunks of a position by several hashes, packed in one integer of 32 bits.

    Three operations then compare two positions by all of these hashes. A chunk's index has `guard`
    bits and its field two more, so that no sum reaches the next field. The last field needs only
    one more, because its carry may be lost.
    """

    guard: int  # 2^guard is above every chunk's index and every distance of visible chunks
    before: int
    after: int

    @classmethod
    def of(cls, chunks: Any) -> PackedChunks:
        last = chunks.max_chunks - 1
        near = chunks.n_chunks_before + chunks.n_chunks_after
        return cls(max(last, near, 1).bit_length(), chunks.n_chunks_before, chunks.n_chunks_after)

    @property
    def per_pack(self) -> int:
        """Hashes in a pack."""
        return 1 + (31 - self.guard) // (self.guard + 2)

    def repeated(self, value: int, n: int | None = None) -> np.int32:
        """A pack with `value` in the first `n` fields, or in all."""
        fields = range(self.per_pack if n is None else n)
        pack = sum(value << i * (self.guard + 2) for i in fields) & (2**32 - 1)
        return np.uint32(pack).view(np.int32)

    def pack(self, chunk: Int[Array, "B N R Tp"]) -> Int[Array, "B N Tp"]:
        """The chunks by up to `per_pack` hashes, the first in the lowest bits."""
        return sum(chunk[:, :, r] << r * (self.guard + 2) for r in range(chunk.shape[2]))

    def near(self, query: Array, key: Array, n: int) -> Array:
        """Whether the query's chunk sees the key's by one of the first `n` hashes of a pack."""
        # With g = 2^guard, field by field: g + d, d the distance, has its bit g if d >= 0, and
        # g + most - d has it if d <= most.
        g, most = 1 << self.guard, self.before + self.after
        up = (query + self.repeated(g + self.after)) - key
        down = self.repeated(2 * g + most) - up
        return (up & down & self.repeated(g, n)) != 0

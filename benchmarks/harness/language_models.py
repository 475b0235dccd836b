"""The language models that several benchmarks build: the quickstart's and the Reformer paper's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from reformax.ops import AttentionOp, local, lsh

VOCAB_SIZE = 256


class Sizes(NamedTuple):
    """The sizes of a model."""

    d_model: int = 128
    d_ff: int = 512
    n_heads: int = 4
    d_head: int = 32
    n_layers: int = 4
    cycle: tuple[str, ...] = ("local", "lsh")
    local_chunk_len: int = 64
    lsh_chunk_len: int = 64
    n_hashes: int = 2

    def arguments(self) -> dict[str, Any]:
        """The arguments that constructors of reformax share with Trax's."""
        return dict(
            vocab_size=VOCAB_SIZE,
            d_model=self.d_model,
            d_ff=self.d_ff,
            d_attention_key=self.d_head,
            d_attention_value=self.d_head,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
        )

    def axial(self, length: int) -> dict[str, Any]:
        """The arguments of axial positions for sequences up to this length."""
        columns = 2 ** (int(math.log2(length)) // 2)
        quarter = self.d_model // 4
        return dict(
            pos_type="axial",
            pos_axial_shape=(-(-length // columns), columns),
            pos_d_axial_embs=(quarter, self.d_model - quarter),
        )

    def attention(self, **lsh_options: Any) -> tuple[AttentionOp, ...]:
        """The cycle of attentions over the layers."""
        ops = {
            "local": local.local(chunk_len=self.local_chunk_len),
            "lsh": lsh.lsh(chunk_len=self.lsh_chunk_len, n_hashes=self.n_hashes, **lsh_options),
        }
        return tuple(ops[name] for name in self.cycle)


TINY = Sizes(16, 32, 2, 8, 2, local_chunk_len=8, lsh_chunk_len=8)
QUICKSTART = Sizes()
PAPER = Sizes(1024, 4096, 8, 128, 12, ("local", "local", "lsh", "local"), local_chunk_len=128)

"""The peers of `benchmarks.attention` by name. It needs no framework."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A peer.

    Attributes:
      of: our row, which computes the same.
      triton: how many processes compile its kernels, among whose versions Triton chooses; 0 where
        these are another peer's; None: it has none.
    """

    of: str
    triton: int | None = None

    @property
    def compilers(self) -> int:
        """Processes that compile it."""
        return 1 if self.triton is None else self.triton


# The most important first.
PEERS = {
    "fla gated_linear": Known("gated_linear", triton=9),
    "fla gated_delta": Known("gated_delta", triton=3),
    "fla linear": Known("linear", triton=4),
    "fla retention": Known("retention", triton=4),
    "fla linear, from inputs": Known("linear", triton=0),
    "fla gated_linear, from inputs": Known("gated_linear", triton=0),
    "fla gated_delta, from inputs": Known("gated_delta", triton=0),
    "fla nsa": Known("nsa, a mean a block", triton=8),
    "fla moba": Known("moba"),
    "FlexAttention, local": Known("local, chunks"),
    "FlexAttention, longformer": Known("longformer"),
    "FlexAttention, sinks": Known("sinks"),
    "FlexAttention, butterfly": Known("butterfly"),
    "FlexAttention, strided": Known("strided"),
    "FlexAttention, fixed": Known("fixed"),
    "FlexAttention, local + global": Known("local + global"),
    "transformers Longformer": Known("longformer"),
    "transformers LSH": Known("lsh"),
    "reformer_pytorch LSH": Known("lsh"),
    "performer-pytorch": Known("performer"),
    "performer-pytorch, all": Known("performer, all"),
    "linformer, PyTorch": Known("linformer"),
    "nystrom-attention, float32": Known("nystromformer"),
    "linear-attention-transformer": Known("linear"),
}

"""Decoders of Hugging Face's format beside transformers: logits, generation, memory, seconds.

    python -m benchmarks.families --peers=PYTHON

Each family's configuration is its class's default, with the depth and the width alone cut. Weights
are drawn, and stored in shards of bfloat16. PYTHON is an interpreter with PyTorch and transformers,
by default this one. Each side has a process of its own, and computes in float32 and in plain
operations of attention.

The host's memory in import is what the process grew by, the mapped files among it. The peak is what
the process grew by in all, or that of the device where that is a GPU: weights, forward pass and
generation. A column "x" is the quotient with transformers': of memory below 1 is less, of speed
above 1 is faster.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.harness import command_line
from benchmarks.harness.calls import MIB, attempt
from benchmarks.harness.output import Table
from benchmarks.harness.processes import Answer, answers_of, ask


class Shape(NamedTuple):
    """Sizes of a row."""

    length: int  # of the tokens that logits are of
    n_prompt: int
    n_new: int
    width: dict[str, int]  # of all families
    heads: dict[str, int] = {}  # sizes of heads; {}: the class's defaults
    recurrent_heads: dict[str, int] = {}


_WIDTH = dict(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_hidden_layers=4)
SHAPES = {
    "tiny": Shape(
        length=24,
        n_prompt=8,
        n_new=16,
        width=dict(
            hidden_size=48,
            intermediate_size=80,
            num_attention_heads=4,
            num_hidden_layers=4,
            vocab_size=97,
        ),
        heads=dict(head_dim=16),
        recurrent_heads=dict(
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
    ),
    "cpu": Shape(length=256, n_prompt=64, n_new=96, width=_WIDTH),
    "gpu": Shape(
        length=2048,
        n_prompt=1024,
        n_new=256,
        width=_WIDTH | dict(hidden_size=1024, intermediate_size=3072),
    ),
}
# By model_type, the class's name before "Config", and the heads of keys where a default of the
# class is no divisor of the heads of queries.
FAMILIES = {
    "llama": ("Llama", None),
    "mistral": ("Mistral", None),
    "qwen2": ("Qwen2", 2),
    "qwen3": ("Qwen3", 2),
    "qwen3_5_text": ("Qwen3_5Text", None),
    "gemma2": ("Gemma2", None),
    "gemma3_text": ("Gemma3Text", None),
    "olmo2": ("Olmo2", None),
    "olmo3": ("Olmo3", None),
    "olmo_hybrid": ("OlmoHybrid", None),
    "smollm3": ("SmolLM3", None),
    "phi3": ("Phi3", None),
}
_ALL_HEADS = "llama", "olmo2", "olmo3", "olmo_hybrid", "phi3"  # of keys as of queries, by default
_OWN_HEADS = "qwen3", "qwen3_5_text", "gemma2", "gemma3_text"  # those that have `head_dim`


def changes_of(name: str, shape: Shape) -> dict[str, Any]:
    """What differs from the defaults of a family's class."""
    kv_heads = FAMILIES[name][1]
    changes = dict(shape.width, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    changes |= {} if kv_heads is None else dict(num_key_value_heads=kv_heads)
    if "vocab_size" in changes and name not in _ALL_HEADS:
        changes["num_key_value_heads"] = 2
    changes |= shape.heads if name in _OWN_HEADS else {}
    changes |= shape.recurrent_heads if name == "qwen3_5_text" else {}
    return changes


def compared(python: str, name: str, shape: Shape) -> tuple[Answer, Answer]:
    """What both sides measured of a family.

    Raises:
      PeerError: a process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = dict(kind=FAMILIES[name][0], changes=changes_of(name, shape), length=shape.length)
        given = dict(folder=folder, n_prompt=shape.n_prompt, n_new=shape.n_new)
        *_, sizes = answers_of(ask(python, "peers.decoders_torch.make", folder=folder, **made))
        *_, theirs = answers_of(ask(python, "peers.decoders_torch.measure", **given))
        *_, ours = answers_of(ask(sys.executable, "rows.decoders.measure", **given))
    return ours, theirs | sizes


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, peers="PyTorch and transformers")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    shape = command_line.of_size(SHAPES, args.tiny)
    table = Table(
        *("model_type", "million weights", "logits apart, of the largest", "tokens alike"),
        *("import, s", "host in import, MiB / weights", "peak, MiB", "x"),
        *("forward, ms", "x", "tokens/s", "x"),
        title=f"{shape.length} tokens, {shape.n_new} new ones after {shape.n_prompt}",
    )

    def cells(known: tuple[Answer, Answer]) -> list[str]:
        ours, theirs = known
        weights = 4 * theirs["n_weights"] / MIB
        return [
            f"{theirs['n_weights'] / 1e6:,.1f}",
            f"{ours['far'] / ours['largest']:.1e}",
            f"{ours['alike']} of {shape.n_new}",
            f"{ours['imported']:.1f}",
            f"{ours['host']:,.0f} / {weights:,.0f}",
            f"{ours['peak']:,.0f}",
            f"{ours['peak'] / theirs['peak']:.2f}",
            f"{ours['forward'] * 1e3:,.1f}",
            f"{theirs['forward'] / ours['forward']:.2f}",
            f"{1 / ours['step']:,.0f}",
            f"{theirs['step'] / ours['step']:.2f}",
        ]

    for name in args.only:
        known = attempt(compared, args.peers or sys.executable, name, shape)
        table.result(name, known=known, cells=cells)


if __name__ == "__main__":
    main()

"""The parts of a text that pieces encode alone, and those that a vocabulary is learnt from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import UInt8

BORDER = b"\0"
BLOCK = 2**14  # bytes of text that are encoded as one
# Bytes that a vocabulary is learnt from, taken evenly from the whole, and of one of its sentences.
SAMPLE, SENTENCE = 10**7, 2**11


def sentences(text: UInt8[np.ndarray, " n"]) -> Iterator[str]:
    """Lines of a text, cut where they are long: blocks of it, evenly, of `SAMPLE` bytes."""
    every = max(1, -(-len(text) // SAMPLE))
    for begin in range(0, len(text), every * BLOCK):
        block = bytes(text[begin : begin + BLOCK]).decode("utf-8", "ignore")
        for line in block.replace("\0", "\n").split("\n"):
            yield from (line[i : i + SENTENCE] for i in range(0, len(line), SENTENCE))


def blocks(data: bytes) -> Iterator[tuple[int, int]]:
    """The positions of parts that are encoded alone: documents, cut where a line or a word ends."""
    begin = 0
    while begin < len(data):
        end = begin + BLOCK
        border = data.find(BORDER, begin, end)
        if border >= 0:
            end = border + 1
        elif end < len(data):
            line, word = data.rfind(b"\n", begin, end), data.rfind(b" ", begin + 1, end)
            if line >= 0:
                end = line + 1
            elif word >= 0:
                end = word
            else:
                while end > begin + 1 and data[end] >> 6 == 2:  # inside a character
                    end -= 1
        yield begin, min(end, len(data))
        begin = end


def spans(data: Any, n_bytes: int) -> Iterator[tuple[int, int]]:
    """The positions of parts of a text, of about so many bytes, which end where `blocks` do.

    Encoded alone, they have the ids that they have in the whole.
    """
    first = 0
    while first < len(data):
        part = bytes(data[first : first + n_bytes])
        last = len(part)
        if first + last < len(data):
            # A block is that of the whole text where all that decides it is in the part.
            inside = (end for begin, end in blocks(part) if begin + BLOCK < len(part))
            last = max(inside)
        yield first, first + last
        first += last


def decoded(data: bytes, first: int, last: int, before: int = 0) -> str:
    """Bytes of a text as characters; raises `ValueError` where they are not UTF-8."""
    try:
        return data[first:last].decode("utf-8")
    except UnicodeDecodeError as error:
        at = first + error.start
        raise ValueError(
            f"the text is not UTF-8: byte {data[at]:#04x} at {before + at:,} of a split: "
            "convert it, as with iconv, or train on bytes with vocab_size=256"
        ) from None

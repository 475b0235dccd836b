"""Writes rows of bytes as the pixels of a PNG: what a model of `reformax.data.images` generates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reformax.declared import SettingError


def side_of(length: int) -> int:
    """The side of a square image of `length` bytes of red, green and blue.

    Raises:
      SettingError: there is none.
    """
    side = math.isqrt(length // 3)
    if 3 * side * side != length:
        raise SettingError(
            f"--png needs a run of images and this one's length is {length}: expected 3 bytes a "
            "pixel of a square, such as 12288"
        )
    return side


def write(rows: Sequence[Sequence[int]], path: str | Path) -> None:
    """Writes images of one size side by side, in rows and columns of about as many.

    Args:
      rows: the bytes of each image.
      path: of the PNG.
    """
    from PIL import Image

    pixels = np.asarray(rows, np.uint8)
    side = side_of(pixels.shape[1])
    wide = math.ceil(math.sqrt(len(pixels)))
    high = -(-len(pixels) // wide)
    pixels = np.pad(pixels, ((0, wide * high - len(pixels)), (0, 0)))
    sheet = pixels.reshape(high, wide, side, side, 3).swapaxes(1, 2)
    picture = Image.fromarray(sheet.reshape(high * side, wide * side, 3))
    picture.save(path, format="PNG")

"""Pathfinder: do two dots lie on one dashed curve? An image, read as a row of its pixels.

Linsley, Kim, Veerabadran, Windolf, Serre 2018, "Learning long-range spatial dependencies with
horizontal gated recurrent units", section 3, with the settings that Tay et al. 2020, "Long Range
Arena", section 2.2.5, publish for images of 32, 64 and 128 pixels. Path-X is that of 128: 16,384
tokens.

Two curves of `length` dashes each grow side by side from seeds some way apart. A dash turns from
the one before it by an angle d with a probability in proportion to cos(c d)^2, c the continuity,
among those whose dash keeps away from all that is drawn. Images in which a curve finds no way are
thrown away. Shorter curves, the distractors, are then drawn where there is room. One dot marks the
beginning of a curve, the other the end of the same curve (class 1) or of the other (class 0).

Two things differ from the published program. It draws on a grid of pixels, twice as fine, and
shrinks it; here dashes are lines between real numbers, and a pixel's grey is how far a line covers
it. And a curve here does not turn to where it could only leave the image, so that few are thrown
away. Many images are drawn at once.
"""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from reformax.data.labelled import labelled_task
from reformax.data.synthetic_blocks import Block, synthetic_blocks
from reformax.declared import Bounds, Called, PathName, Seed, SettingError, Size, checked
from reformax.task import Labels, Task

Levels = Annotated[int, Bounds(2, 256)]
Lengths = Annotated[Size | Sequence[Size], Called("a number of at least 1, or a list of them")]
BLOCK = 200  # images that are drawn together
_TURNS = 32  # directions that a dash chooses from
_LIKELY_TURN = 0.8  # of the largest, at which its probability is 0
_TRIES = 5  # to find room for a distractor
_DRAWS = 50  # after which at least one image a draw must have been found


class Look(NamedTuple):
    """How images of a size are drawn; lengths are in pixels."""

    dash: float  # a dash's length
    thickness: float
    margins: Sequence[int]  # half the gaps between dashes, one of these for each image
    contrast: float
    radius: float  # of a dot
    apart: float  # the seeds of the two curves
    continuity: float
    n_distractors: int


LOOKS = {
    32: Look(2, 0.5, (1,), 1.5, 1.5, 7, 1.0, 5),
    64: Look(5, 1.0, (1,), 0.8, 2.5, 12, 1.8, 5),
    128: Look(5, 1.5, (2, 3), 0.9, 3.0, 20, 1.8, 8),
}


@checked
def pathfinder(
    size: Size = 32,
    length: Lengths = 14,
    n_train: Size = 160_000,
    n_eval: Size = 20_000,
    levels: Levels = 256,
    mirrored: bool = False,
    data_seed: Seed = 0,
    cache_dir: PathName | None = None,
) -> Task:
    """Name whether the dots of an image of `size * size` pixels are connected: class 1, or 0.

    A pixel's token is its grey from 0 to `levels - 1`, plus 1. Example i of a split is a function
    of (data_seed, split, i // 200).

    Args:
      size: pixels of an image's side, 32, 64 or 128; 128 is Path-X.
      length: dashes of a curve: 6, 9 and 14 are the paper's; 14, the hard one, is Long Range
        Arena's. Distractors have a third of them. Of several numbers image i has number i, in
        turn, so that short curves can be learnt with longer ones; one that is there twice has
        twice as many images.
      n_train: images to train on that are drawn.
      n_eval: images of 'valid' and of 'test'.
      levels: greys, evenly from black to white; the task's own are 256, and 2 are black and white.
      mirrored: whether training goes on, after these images, with their seven mirrored and turned
        copies, of the same classes: eight times as many for the time of one.
      data_seed: another one makes another set.
      cache_dir: a folder to keep images in, of 32 pixels 0.3 KB each and of 128 pixels 1.7 KB.
        Drawing takes milliseconds an image, and several processes may fill one folder. None: they
        stay in memory alone, a byte a pixel.

    Raises:
      ValueError: size is another; hardly any image has room for curves of such a length; or a
        file is damaged.
      OSError: the folder cannot be read or written.
    """
    if size not in LOOKS:
        raise SettingError(f"size is {size}: expected one of {', '.join(map(str, LOOKS))}")
    lengths = tuple(length) if isinstance(length, Sequence) else (length,)
    if not lengths:
        raise SettingError("length is (): give at least one number of dashes")

    folder = None if cache_dir is None else os.fspath(cache_dir)
    kept = {length: _images(size, length, data_seed, folder) for length in lengths}

    def examples(split: str, numbers: Int[np.ndarray, " n"]):
        copies, drawn_ones = np.divmod(numbers, n_train if split == "train" else n_eval)
        greys = np.empty((len(numbers), size * size), np.uint8)
        classes = np.empty(len(numbers), np.uint8)
        rounds, indices = np.divmod(drawn_ones, len(lengths))
        for i in np.unique(indices):
            rows, length = indices == i, lengths[i]
            number = rounds[rows] * lengths.count(length) + lengths[:i].count(length)
            greys[rows], classes[rows] = kept[length](split, number)
        images = turned(greys.reshape(-1, size, size), copies).reshape(greys.shape)
        return images.astype(np.int32) * levels // 256 + 1, classes

    numbers = ", ".join(map(str, lengths))
    made_by = f"size={size}, length={numbers}, levels={levels}, data_seed={data_seed}"
    made_by += ", mirrored=True" if mirrored else ""
    sizes = {"train": n_train * (8 if mirrored else 1), "valid": n_eval, "test": n_eval}
    return labelled_task(
        "pathfinder",
        vocab_size=levels + 1,
        labels=Labels(2),
        sizes=sizes,
        examples=examples,
        made_by=lambda split: f"{sizes[split]} images of {made_by}",
        longest=size * size,
        in_order=True,
    )


# Functions of `_images`, as long as a task has them.
_SHARED: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def _images(size: int, length: int, data_seed: int, data_dir: str | None):
    """Greys and classes by split and numbers; tasks of several stages share what is drawn."""
    key = size, length, data_seed, data_dir
    if (found := _SHARED.get(key)) is not None:
        return found

    def draw(rng: np.random.Generator) -> Block:
        lines = drawn(rng, BLOCK, size, LOOKS[size], length)
        greys = painted(lines, size, LOOKS[size]).reshape(BLOCK, -1)
        return Block(greys, lines.connected.astype(np.uint8))

    found = synthetic_blocks(draw, BLOCK, data_seed, f"pathfinder{size}_{length}", data_dir)
    _SHARED[key] = found
    return found


def turned(
    images: UInt8[np.ndarray, "n s s"], copies: Int[np.ndarray, " n"]
) -> UInt8[np.ndarray, "n s s"]:
    """Each image as one of the eight copies that turning and mirroring make; copy 0 is itself."""
    images = images.copy()
    for number in np.unique(copies[copies > 0]):
        some = copies == number
        whole = np.rot90(images[some], number % 4, axes=(1, 2))
        images[some] = np.swapaxes(whole, 1, 2) if number >= 4 else whole
    return images


class Lines(NamedTuple):
    """Images as lines; positions are (row, column) of pixels' centres."""

    dashes: Float[np.ndarray, "n d 2 2"]  # both ends of each; nan where there is none
    dots: Float[np.ndarray, "n 2 2"]
    connected: Int[np.ndarray, " n"]


def drawn(rng: np.random.Generator, n: int, size: int, look: Look, length: int) -> Lines:
    """`n` images with curves of `length` dashes.

    Raises:
      SettingError: hardly any image has room for such curves.
    """
    parts: list[Lines] = []
    for i in range(1, 10**6):
        parts.append(_attempt(rng, 2 * n, size, look, length))
        if sum(len(part.connected) for part in parts) >= n:
            break
        if i >= _DRAWS and sum(len(part.connected) for part in parts) < i:
            raise SettingError(
                f"length={length}: hardly any image of {size} pixels has room for two such curves: "
                "set it lower, or a larger size"
            )
    return Lines(*(np.concatenate(x)[:n] for x in zip(*parts, strict=True)))


def _attempt(rng: np.random.Generator, n: int, size: int, look: Look, length: int) -> Lines:
    """The images, out of `n`, in which both curves found their way."""
    canvas = _Canvas(rng, n, size, look)
    begins, angles = _seeds(rng, n, size, look)
    curves = [_Curve(begins[:, i], angles[:, i]) for i in range(2)]
    for i in range(length):
        for curve in curves:
            canvas.extend(curve, left=length - 1 - i)
        canvas.keep(curves[0].alive & curves[1].alive, curves)
    n = len(curves[0].at)
    dashes = [np.stack(curve.dashes, axis=1) for curve in curves]
    for _ in range(look.n_distractors):
        dashes.append(canvas.distractor(max(1, length // 3)))
    connected, first = rng.integers(2, size=n), rng.integers(2, size=n)
    ends = np.stack([x[:, [0, -1], [0, 1]] for x in dashes[:2]], axis=1)  # [n, curve, which, 2]
    row = np.arange(n)
    second = np.where(connected, first, 1 - first)
    dots = np.stack([ends[row, first, 0], ends[row, second, 1]], axis=1)
    return Lines(np.concatenate(dashes, axis=1).astype(np.float32), dots, connected)


def _seeds(
    rng: np.random.Generator, n: int, size: int, look: Look
) -> tuple[Float[np.ndarray, "n 2 2"], Float[np.ndarray, "n 2"]]:
    """Where curves begin, and their directions: two seeds `apart` pixels from one another."""
    border = min(2 * look.apart, size / 2 - 1)
    first = rng.uniform(border, size - 1 - border, size=(n, 2))
    angles = rng.uniform(-np.pi, np.pi, size=(n, 3))
    second = first + look.apart * _direction(angles[:, 2])
    return np.stack([first, second], axis=1), angles[:, :2]


def _direction(angle: Float[np.ndarray, "*d"]) -> Float[np.ndarray, "*d 2"]:
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1)


class _Curve:
    """A curve of each image, as far as it has grown."""

    def __init__(self, at: Float[np.ndarray, "n 2"], angle: Float[np.ndarray, " n"]):
        self.at, self.angle = at, angle  # where the next dash begins, and the last one's direction
        self.alive = np.ones(len(at), bool)
        self.dashes: list[np.ndarray] = []  # each [n, 2, 2]
        self.number = np.zeros(len(at), np.int16)  # of the last dash, 0 for none

    def keep(self, kept: np.ndarray) -> None:
        self.at, self.angle, self.alive = self.at[kept], self.angle[kept], self.alive[kept]
        self.dashes, self.number = [x[kept] for x in self.dashes], self.number[kept]


class _Canvas:
    """Which dash owns each pixel, and those around it, of images that are drawn together."""

    def __init__(self, rng: np.random.Generator, n: int, size: int, look: Look):
        self._rng, self._size, self._look = rng, size, look
        self._margin = rng.choice(np.asarray(look.margins), size=n)
        self._reach = math.ceil((look.dash + look.thickness) / 2 + 2 * max(look.margins)) + 1
        side = size + 2 * self._reach
        self._owner = np.full((n, side, side), -1, np.int16)  # the frame belongs to nobody
        inside = slice(self._reach + 1, side - self._reach - 1)
        self._owner[:, inside, inside] = 0
        self._last = 0
        self._shares = np.linspace(0, 1, math.ceil(look.dash) + 1)  # a line's points to look at

    def keep(self, kept: Bool[np.ndarray, " n"], curves: Sequence[_Curve]) -> None:
        """Goes on with some of the images."""
        self._margin, self._owner = self._margin[kept], self._owner[kept]
        for curve in curves:
            curve.keep(kept)

    def extend(self, curve: _Curve, left: int) -> None:
        """Adds a dash to each curve; one that finds no room is no longer alive.

        `left` is how many more will follow.
        """
        n, look = len(curve.at), self._look
        if curve.dashes:
            widest = min(np.pi, np.pi / 2 / look.continuity)
            drawn = np.arange(_TURNS) + self._rng.random((n, 1))
            turns = widest * (2 * drawn / _TURNS - 1)
            likely = np.cos(look.continuity * turns) ** 2
        else:
            turns, likely = np.zeros((n, 1)), np.ones((n, 1))
        ways = _direction(curve.angle[:, None] + turns)  # [n, ways, 2]
        gap = np.where(curve.number > 0, self._margin, 0)[:, None, None]
        begins = curve.at[:, None] + gap * ways
        ends = begins + look.dash * ways
        likely = likely * self._free(begins, ends, curve.number)
        if left > 1:
            likely = likely * self._can_turn(ends, ways)
        total = likely.cumsum(axis=1)
        curve.alive &= total[:, -1] > 0
        drawn = self._rng.random((n, 1)) * total[:, -1:]
        way = np.minimum((total <= drawn).sum(axis=1), turns.shape[1] - 1)
        row = np.arange(n)
        dash = np.stack([begins[row, way], ends[row, way]], axis=1)
        curve.dashes.append(dash)
        curve.angle = curve.angle + turns[row, way]
        curve.at = dash[:, 1] + self._margin[:, None] * _direction(curve.angle)
        self._last += 1
        curve.number = np.full(n, self._last, np.int16)
        self._claim(dash, curve.alive, self._last)

    def distractor(self, length: int) -> Float[np.ndarray, "n d 2 2"]:
        """A curve of `length` dashes in each image that has room; nan in others."""
        n = len(self._margin)
        found, missing = np.full((n, length, 2, 2), np.nan), np.ones(n, bool)
        for _ in range(_TRIES):
            rows = np.flatnonzero(missing)
            if not len(rows):
                break
            part = copy.copy(self)
            part._margin, part._owner = self._margin[rows], self._owner[rows]
            begin = self._rng.uniform(0, self._size - 1, size=(len(rows), 2))
            curve = _Curve(begin, self._rng.uniform(-np.pi, np.pi, size=len(rows)))
            for _ in range(length):
                part.extend(curve, left=0)
            self._last = part._last
            done = rows[curve.alive]
            found[done] = np.stack(curve.dashes, axis=1)[curve.alive]
            self._owner[done] = part._owner[curve.alive]
            missing[done] = False
        return found

    def _free(
        self,
        begins: Float[np.ndarray, "n w 2"],
        ends: Float[np.ndarray, "n w 2"],
        number: Int[np.ndarray, " n"],
    ) -> Bool[np.ndarray, "n w"]:
        """Whether no pixel of a line belongs to another dash than the curve's last one."""
        n, side = self._owner.shape[:2]
        first, number = side * side * np.arange(n)[:, None], number[:, None]
        owners, free = self._owner.reshape(-1), np.True_
        # Rows and columns apart, and one index of both: NumPy is slow along an axis of two.
        begins, ends = (np.ascontiguousarray(x.transpose(2, 0, 1)) for x in (begins, ends))
        way = ends - begins
        for share in self._shares:
            pixel = np.rint(begins + share * way).astype(int) + self._reach
            y, x = np.minimum(np.maximum(pixel, 0), side - 1)
            owner = owners[first + y * side + x]
            free = free & ((owner == 0) | (owner == number))
        return free

    def _can_turn(
        self, ends: Float[np.ndarray, "n w 2"], ways: Float[np.ndarray, "n w 2"]
    ) -> Bool[np.ndarray, "n w"]:
        """Whether a curve that goes on so can turn back before it leaves the image.

        It can if it has room for a circle of its likely turns, to one of its sides.
        """
        margin = self._margin[:, None]
        turn = min(np.pi / 2, _LIKELY_TURN * np.pi / 2 / self._look.continuity)
        radius = (self._look.dash + 2 * margin) / (2 * math.sin(turn / 2))
        begin = ends + margin[..., None] * ways
        aside = radius[..., None] * np.stack([ways[..., 1], -ways[..., 0]], axis=-1)
        room = (self._size - 1) / 2 - 1 - radius
        middle = (self._size - 1) / 2
        far = [np.abs(begin + side - middle) for side in (aside, -aside)]
        inside = [np.maximum(x[..., 0], x[..., 1]) <= room for x in far]
        return inside[0] | inside[1]

    def _claim(self, dash: Float[np.ndarray, "n 2 2"], alive: np.ndarray, number: int) -> None:
        """Gives a dash the pixels around it that nobody owns."""
        rows = np.flatnonzero(alive)
        if not len(rows):
            return
        widest = 2 * max(self._look.margins) + self._look.thickness / 2
        # The middle is rounded by half a pixel.
        y, x, distance = _around(dash[rows], math.ceil(self._look.dash / 2 + widest + 0.5))
        side = self._owner.shape[1]
        y, x = (np.clip(z + self._reach, 0, side - 1) for z in (y, x))
        near = distance <= (2 * self._margin[rows] + self._look.thickness / 2)[:, None, None]
        owners = self._owner.reshape(-1)
        pixels = (side * side * rows[:, None, None] + side * y + x)[near]
        owners[pixels[owners[pixels] == 0]] = number


def _around(dash: Float[np.ndarray, "n 2 2"], reach: int):
    """Rows `[n, r, 1]` and columns `[n, 1, r]` around each line's middle, and distances."""
    begin, end = dash[:, 0], dash[:, 1]
    centre = np.rint((begin + end) / 2).astype(int)
    steps = np.arange(-reach, reach + 1)  # pixels up to `reach` away
    y = centre[:, 0, None, None] + steps[:, None]
    x = centre[:, 1, None, None] + steps[None]
    # Rows and columns apart: NumPy is slow in sums over an axis of two.
    down, right = np.moveaxis((end - begin)[:, None, None], -1, 0)
    below, beside = y - begin[:, 0, None, None], x - begin[:, 1, None, None]
    length = np.maximum(down**2 + right**2, 1e-9)
    share = np.clip((below * down + beside * right) / length, 0, 1)
    distance = np.sqrt((below - share * down) ** 2 + (beside - share * right) ** 2)
    return y, x, distance


def painted(lines: Lines, size: int, look: Look) -> UInt8[np.ndarray, "n size size"]:
    """The images: 0 is black."""
    reach = math.ceil(max(look.dash / 2 + look.thickness, look.radius)) + 2
    side = size + 2 * reach + 2
    image = np.zeros((len(lines.dots), side, side), np.float32)

    def paint(marks: np.ndarray, half: float, contrast: float) -> None:
        rows = np.flatnonzero(~np.isnan(marks[:, 0, 0]))
        y, x, distance = _around(marks[rows], reach)
        y, x = (np.clip(z + reach, 0, side - 1) for z in (y, x))
        grey = np.minimum(contrast * np.clip(0.5 + half - distance, 0, 1), 1)
        at = rows[:, None, None], y, x
        image[at] = np.maximum(image[at], grey)

    for i in range(lines.dashes.shape[1]):
        paint(lines.dashes[:, i], look.thickness / 2, look.contrast)
    for i in range(2):
        dot = lines.dots[:, i, None]
        paint(np.concatenate([dot, dot], axis=1), look.radius, 1.0)
    inside = slice(reach, reach + size)
    return np.rint(255 * image[:, inside, inside]).astype(np.uint8)

"""Rotary positions, of a line or of a grid (Su et al. 2021)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Bounds, SettingError, Size, check_fields
from reformax.derivatives import CustomDerivatives
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.numerics.precision import accum_dtype


def angles_at(
    position: Int[Array, "*d T"], n_frequencies: int, base: float = 10_000.0
) -> Float[Array, "*d T F"]:
    """Angles t * base^(-f / F) of each position and frequency."""
    frequency = base ** (-jnp.arange(n_frequencies) / n_frequencies)
    return jnp.multiply.outer(position.astype(frequency.dtype), frequency)


def _last_of_text(position: Int[Array, "*d T"]) -> Int[Array, "*d T"]:
    """The last position of each one's text, which ends where the next is not one more."""
    ends = jnp.diff(position, axis=-1, append=position[..., -1:]) != 1
    index = jnp.where(ends, jnp.arange(position.shape[-1]), position.shape[-1])
    end = jax.lax.cummin(index, axis=position.ndim - 1, reverse=True)
    return jnp.take_along_axis(position, end, axis=-1)


# Coordinates of a grid are small numbers, so that their wavelengths are short (Heo et al. 2024).
GRID_BASE = 100.0


def _grid_angles(
    position: Int[Array, "*d T"], grid: Sequence[int], n_frequencies: int
) -> Float[Array, "*d T F"]:
    """Angles of the coordinates of each position: an equal number of frequencies an axis.

    Frequencies that are left over have the angle 0.
    """
    each = n_frequencies // len(grid)
    angles = []
    for size in grid[:0:-1]:
        position, coordinate = jnp.divmod(position, size)
        angles.append(angles_at(coordinate, each, GRID_BASE))
    angles.append(angles_at(position, each, GRID_BASE))
    angle = jnp.concatenate(angles[::-1], axis=-1)
    rest = n_frequencies - angle.shape[-1]
    return jnp.pad(angle, [(0, 0)] * (angle.ndim - 1) + [(0, rest)])


RotaryBase = Annotated[float, Bounds(1 + 1e-6, 1e12, name="a number above 1, up to 1e12")]
RotaryFraction = Annotated[float, Bounds(0, 1, above=0, name="a number above 0, up to 1")]
RotaryFactor = Annotated[float, Bounds(1, 1e6, name="a number from 1 to 1e6")]
RotaryScaling = Literal["linear", "ntk", "yarn", "llama3", "longrope"]
PairFactor = Annotated[float, Bounds(1e-6, 1e6, name="a number from 1e-6 to 1e6")]
Turns = Annotated[float, Bounds(1e-6, 1e6, name="a number from 1e-6 to 1e6")]
# Pairs that turn more often than the second number within the trained length keep their frequency,
# and those that turn less often than the first have all of it divided (Peng et al. 2023, sec. 3.2).
TURNS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryAngles:
    """The angles of rotary positions: pair i of H / 2 turns by `base^(-2 i / H)` a position.

    Args:
      base: the longest wavelength is `2 pi base`.
      fraction: the share of a head's features that are rotated, the first ones (Black et al. 2022,
        "GPT-NeoX-20B", sec. 2.1.1, which rotates a quarter).
      scaling: how positions beyond the trained length fit, by the reports of Peng et al. 2023,
        "YaRN: Efficient Context Window Extension of Large Language Models". "ntk" (sec. 3.1):
        the base is multiplied by `factor^(H / (H - 2))`. "yarn" (sec. 3.2 to 3.4): slow pairs have
        their frequency divided by the factor, fast ones keep it, those between are interpolated
        by their index as in the published code; and queries and keys are multiplied by
        `0.1 ln factor + 1`. "llama3" (Grattafiori et al. 2024, in the published code of Llama 3.1):
        as "yarn", interpolated by the number of turns, and without the multiplication. "linear"
        (Chen et al. 2023, "Extending Context Window of Large Language Models via Position
        Interpolation"): all frequencies are divided by the factor. "longrope" (Ding et al. 2024,
        "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"): each pair's frequency is
        divided by a number of its own, of `long_factors` in a text that has a position beyond the
        trained length and else of `short_factors`; queries and keys are multiplied by
        `sqrt(1 + ln factor / ln trained_length)`, as in Phi-3. None: none of these.
      factor: with `scaling`, the ratio of the longest length to the trained one.
      trained_length: with "yarn", "llama3" and "longrope", the length that the model was trained at
        before.
      slow_turns: with these, pairs that turn less often within that length are slow; None: 1.
      fast_turns: with these, pairs that turn more often are fast; None: 32 with "yarn", 4 with
        "llama3".
      short_factors, long_factors: with "longrope", a number for each rotated pair.
    """

    base: RotaryBase = 10_000.0
    fraction: RotaryFraction = 1.0
    scaling: RotaryScaling | None = None
    factor: RotaryFactor = 1.0
    trained_length: Size | None = None
    slow_turns: Turns | None = None
    fast_turns: Turns | None = None
    short_factors: Sequence[PairFactor] = ()
    long_factors: Sequence[PairFactor] = ()

    def __post_init__(self):
        check_fields(self)
        for name in ("short_factors", "long_factors"):  # tuples can be hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if (self.scaling is None) != (self.factor == 1.0):
            raise SettingError(
                f"rotary_scaling is {self.scaling!r} and rotary_factor {self.factor}: expected "
                "'linear', 'ntk', 'yarn', 'llama3' or 'longrope' with a factor above 1, or neither"
            )
        by_turns, by_pair = self.scaling in TURNS, self.scaling == "longrope"
        if (by_turns or by_pair) != (self.trained_length is not None):
            raise SettingError(
                f"rotary_scaling is {self.scaling!r} and rotary_trained_length "
                f"{self.trained_length}: expected a length with 'yarn', 'llama3' and 'longrope', "
                "and only with them"
            )
        sizes = len(self.short_factors), len(self.long_factors)
        if sizes[0] != sizes[1] or by_pair != bool(sizes[0]):
            raise SettingError(
                f"rotary_scaling is {self.scaling!r}, and rotary_short_factors and "
                f"rotary_long_factors have {sizes[0]} and {sizes[1]} numbers: expected as many of "
                "each with 'longrope', and none else"
            )
        given = self.slow_turns, self.fast_turns
        if not by_turns and given != (None, None):
            raise SettingError(
                f"rotary_scaling is {self.scaling!r}, rotary_slow_turns {given[0]} and "
                f"rotary_fast_turns {given[1]}: they go with 'yarn' and 'llama3' alone"
            )
        if by_turns and self._turns[0] >= self._turns[1]:
            raise SettingError(
                f"rotary_slow_turns is {self._turns[0]} and rotary_fast_turns {self._turns[1]}: "
                "expected fewer slow ones"
            )

    @property
    def _turns(self) -> tuple[float, float]:
        """The turns of slow and of fast pairs."""
        slow, fast = TURNS[self.scaling]
        return self.slow_turns or slow, self.fast_turns or fast

    def n_pairs(self, size: int) -> int:
        """The number of rotated pairs of a head of so many features."""
        return int(self.fraction * size) // 2

    @property
    def magnitude(self) -> float:
        """The factor of rotated features."""
        if self.scaling == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    def of(self, position: Int[Array, "*d T"], n_pairs: int) -> Float[Array, "*d T F"]:
        """The angles of positions, of so many rotated pairs."""
        if self.scaling == "ntk":
            stretched = self.factor ** (n_pairs / max(n_pairs - 1, 1))
            return angles_at(position, n_pairs, self.base * stretched)
        angles = angles_at(position, n_pairs, self.base)
        if self.scaling is None:
            return angles
        if self.scaling == "longrope":
            is_long = _last_of_text(position) >= self.trained_length
            factors = [jnp.array(x, angles.dtype) for x in (self.long_factors, self.short_factors)]
            return angles / jnp.where(is_long[..., None], *factors)
        kept = 0.0 if self.scaling == "linear" else self._kept(n_pairs)
        return angles * (kept + (1 - kept) / self.factor)

    def _kept(self, n_pairs: int) -> Float[Array, " F"]:
        """The share of each pair's frequency that "yarn" or "llama3" keeps."""
        slow, fast = self._turns
        if self.scaling == "llama3":
            turns = self.trained_length / math.tau * angles_at(jnp.ones(()), n_pairs, self.base)
            return jnp.clip((turns - slow) / (fast - slow), 0, 1)

        def index(turns: float) -> float:
            """The pair that turns so often within the trained length."""
            return n_pairs * math.log(self.trained_length / (turns * math.tau), self.base)

        low, high = max(math.floor(index(fast)), 0), min(math.ceil(index(slow)), 2 * n_pairs - 1)
        return 1 - jnp.clip((jnp.arange(n_pairs) - low) / max(high - low, 1e-3), 0, 1)


def rotary(
    x: Float[Array, "B T N H"],
    position: Int[Array, "B T"] | None = None,
    grid: Sequence[int] = (),
    angles: RotaryAngles = RotaryAngles(),
) -> Float[Array, "B T N H"]:
    """Rotates pairs of features by angles that grow with the position (Su et al. 2021, eq. 34).

    The product of two rotated vectors then depends on positions only by their distance. Feature i
    is paired with feature i + H // 2; an odd last feature is unchanged, and so are those after the
    rotated fraction. In a grid some pairs rotate by each coordinate, so that the product depends on
    the distance along each axis alone (Heo et al. 2024, "Rotary Position Embedding for Vision
    Transformer", sec. 3.2, axial frequency).

    Args:
      x: queries or keys.
      position: of each, to which no gradient goes; None: 0 to T - 1.
      grid: the axes' sizes, row-major; of the first one there is no end. (): a line.
      angles: of a line.

    Raises:
      ValueError: `x` is no array of floats, `[B, T, N, H]`, or positions are of another length.
    """
    check_floats("x", x, "batch", "length", "heads", "size")
    half = angles.n_pairs(x.shape[-1])
    position = jnp.arange(x.shape[1])[None] if position is None else position
    position = checked_positions("position", position, x)
    angle = _grid_angles(position, grid, half) if grid else angles.of(position, half)
    angle = angle[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if angles.magnitude != 1.0:
        cos, sin = cos * angles.magnitude, sin * angles.magnitude
    return _rotate(x, (cos, sin))


def checked_positions(name: str, positions: Any, x: Float[Array, "B T *d"]) -> Int[Array, "_ T"]:
    """The positions of `x`, of each row or `[1, T]`, `[T]` of all rows, as an array.

    Raises:
      ValueError: they are of another shape.
    """
    positions = jnp.asarray(positions)
    n_rows, length = x.shape[:2]
    if positions.shape not in ((n_rows, length), (1, length), (length,)):
        raise ValueError(
            f"{name} has shape {positions.shape}: expected [batch, length], {(n_rows, length)}"
        )
    return positions


@CustomDerivatives
def _rotate(
    x: Float[Array, "B T N H"], cos_sin: tuple[Float[Array, "_ T 1 F"], Float[Array, "_ T 1 F"]]
) -> Float[Array, "B T N H"]:
    """Rotates the first 2 F features, in pairs, by angles of these cosines and sines."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    y = x.astype(accum_dtype(x.dtype))
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
    return rotated.astype(x.dtype)


def _rotate_back(cos_sin, d_out):
    """Rotates the gradient by the opposite angles. XLA would pad two halves and add them up."""
    cos, sin = cos_sin
    return _rotate(d_out, (cos, -sin)), None


_rotate.define(
    lambda x, cos_sin: (_rotate(x, cos_sin), cos_sin),
    _rotate_back,
    lambda cos_sin, tangents: _rotate(tangents[0], cos_sin),
)

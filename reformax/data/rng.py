"""Random draws by (seed, step): a batch depends on nothing else."""

from __future__ import annotations

import enum

import numpy as np
from jaxtyping import Int, Int64

from reformax.declared import SettingError


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of a step: Philox keyed by (seed, step), each from 0 up to 2^63 - 1.

    A counter-based generator has independent streams for neighbouring keys and keeps no state.

    Raises:
      ValueError: seed or step out of range.
    """
    for argument, value in (("seed", seed), ("step", step)):
        if not 0 <= value < 2**63:
            raise SettingError(f"{argument}={value} must be from 0 to 2^63 - 1")
    return philox(seed, step)


def philox(high: int, low: int) -> np.random.Generator:
    """A generator keyed by two words below 2^64; `generator` takes high words below 2^63."""
    return np.random.Generator(np.random.Philox(key=np.array([high, low], np.uint64)))


class Stream(enum.IntEnum):
    """What is drawn besides rows, each from numbers of its own: tasks are made of other tasks."""

    HIDDEN_TOKENS = 1
    RANGES_OF_LENGTHS = 2
    TEXTS_OF_A_MIXTURE = 3


def apart(rng: np.random.Generator, stream: Stream) -> np.random.Generator:
    """A generator of a stream's numbers, which a new `rng` of `philox` does not draw."""
    return np.random.Generator(rng.bit_generator.jumped(stream))


def in_epochs(numbers: Int[np.ndarray, " B"], n: int, seed: int) -> Int64[np.ndarray, " B"]:
    """Which of n examples come at some numbers, since the first step: each once an epoch."""
    epochs, indices = np.divmod(numbers, n)
    found = np.zeros(len(numbers), np.int64)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        found[of_epoch] = permuted(indices[of_epoch], n, generator(seed, int(epoch)))
    return found


def permuted(indices: Int[np.ndarray, " B"], n: int, rng: np.random.Generator) -> np.ndarray:
    """Where a permutation of n takes some indices: by a key, in no memory.

    A Feistel network of four rounds permutes the numbers of 2 b bits, and is applied again to what
    is not below n (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3).
    """
    bits = max(1, (int(n - 1).bit_length() + 1) // 2)
    mask = np.uint64(2**bits - 1)
    keys = rng.integers(2**63, size=(4, 2), dtype=np.uint64)
    found = np.asarray(indices).astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(bits), found[outside] & mask
        for key, factor in keys:
            mixed = (right ^ key) * (factor | np.uint64(1))  # modulo 2^64
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32)) & mask
        found[outside] = left << np.uint64(bits) | right
        outside = found >= np.uint64(n)
    return found.astype(np.int64)

"""Dropout masks are as good as independent coins: rates, pairs, rows, columns, rank of bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.softmax import dropout

SIZE = 1024  # queries and keys of a head
SEED = (0x1234567, 0x89ABCDE, 0, 0, 0, 0)
# Standard deviations that a fair test exceeds once in three million times.
LIMIT = 5.2


def words(seed=SEED, batch=3, head=5, query=0, key=0, bits=dropout.dropout_bits):
    """The bits of a head, `[SIZE, SIZE]`, from a query and a key on."""
    seed = jnp.asarray(seed, jnp.uint32)
    position = jnp.arange(SIZE, dtype=jnp.int32)
    return np.asarray(jax.jit(bits)(seed, batch, head, position[:, None] + query, position + key))


def coins(bits, rate):
    """Independent numbers of mean 0 and variance 1, if bits are."""
    return ((bits < round(rate * 2**32)) - rate) / np.sqrt(rate * (1 - rate))


def score(x):
    """How many standard deviations a mean of independent coins, or of products, is from 0."""
    return np.sqrt(x.size) * abs(np.mean(x))


def of_rate(x):
    return score(x)


def of_neighbours(x):
    """Pairs, triples and rectangles at small distances, powers of two and Fibonacci numbers."""
    found = []
    for step in (1, 2, 3, 8, 13, 21, 64, 89, 128, 233, 256):
        found += [score(x[step:] * x[:-step]), score(x[:, step:] * x[:, :-step])]
        for more in (1, 5, 64):
            across = x[:-more, step:], x[:-more, :-step], x[more:, step:], x[more:, :-step]
            a, b, c, d = across
            found += [score(a * d), score(b * c), score(a * b * c), score(a * b * c * d)]
    return max(found)


def of_sums(x):
    """The variance of sums of rows and columns, and of products of two rows or columns."""
    found = []
    for y in (x, x.T):
        sums = y.sum(axis=1) / np.sqrt(SIZE)
        found.append(score((sums**2 - 1) / np.sqrt(2)))
        pairs = (y @ y.T / np.sqrt(SIZE))[np.triu_indices(SIZE, 1)]
        found += [score((pairs**2 - 1) / np.sqrt(2)), np.abs(pairs).max() - 1.5]
    return max(found)


def of_waves(x):
    """The largest of all frequencies, whose powers are exponentially distributed."""
    power = np.abs(np.fft.rfft2(x)) ** 2 / x.size
    return LIMIT + power.max() - np.log(x.size) - 10


def rank(bits):
    """The rank of a 64 x 64 matrix over the field of two elements."""
    rows, found = [int("".join(map(str, row)), 2) for row in bits], 0
    while rows:
        if pivot := rows.pop():
            found += 1
            rows = [row ^ pivot if row & (pivot & -pivot) else row for row in rows]
    return found


def of_ranks(x):
    """28.9% of random square matrices have full rank."""
    tiles = (x > 0).astype(int).reshape(SIZE // 64, 64, SIZE // 64, 64).swapaxes(1, 2)
    full = np.mean([rank(tile) == 64 for tile in tiles.reshape(-1, 64, 64)])
    return np.sqrt(tiles.size / 64**2) * abs(full - 0.2888) / np.sqrt(0.2888 * 0.7112)


CHECKS = of_rate, of_neighbours, of_sums, of_waves


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("query, key", [(0, 0), (2**20, 3 * 2**18)])
def test_a_head(rate, query, key):
    x = coins(words(query=query, key=key), rate)
    assert max(check(x) for check in CHECKS) < LIMIT


@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.99])
def test_rates(rate):
    assert of_rate(coins(words(), rate)) < LIMIT


def test_ranks_of_bits():
    assert of_ranks(coins(words(), 0.5)) < LIMIT


@pytest.mark.parametrize(
    "other",
    [
        dict(head=4),
        dict(batch=5, head=3),
        dict(batch=4),
        dict(query=SIZE),
        dict(key=SIZE),
        dict(key=2**16),
        dict(seed=(SEED[0] + 1, *SEED[1:])),
        dict(seed=(SEED[0], SEED[1] + 1, *SEED[2:])),
        dict(seed=(SEED[1], SEED[0], *SEED[2:])),
    ],
    ids=str,
)
def test_two_heads(other):
    """No part of one is a part of the other, moved or transposed."""
    x, y = (coins(words(**given), 0.1) for given in ({}, other))
    spectra = np.fft.rfft2(x) * np.conj(np.fft.rfft2([y, y.T]))
    moved = np.fft.irfft2(spectra, x.shape) / np.sqrt(x.size)
    assert np.abs(moved).max() < LIMIT + 1.5  # the largest of two million


@pytest.mark.parametrize("multiplied", [0, 1])
def test_a_weaker_hash_is_found(multiplied):
    """Sums of multiples of positions, and the same multiplied once more."""

    def bits(seed, batch, head, query, key):
        query, key = (x.astype(jnp.uint32) for x in (query, key))
        x = query * np.uint32(0x9E3779B1) + key * np.uint32(0x85EBCA6B) + seed[0]
        return x * np.uint32(0x7FEB352D) if multiplied else x

    x = coins(words(bits=bits), 0.1)
    assert max(check(x) for check in CHECKS) > 2 * LIMIT


def test_factors_keep_the_mean():
    """0, or one over the share that is kept; the seed's words say where the arrays begin."""
    seed = dropout.seed_words(jax.random.key(0), 2)
    draw = jax.jit(dropout.full_dropout_mask, static_argnums=(1, 2))
    mask = np.asarray(draw(seed, 0.25, (2, 3, 8, 9)))
    assert set(np.unique(mask)) == {0, np.float32(1 / 0.75)}
    moved = seed + jnp.array([0, 0, 1, 2, 3, 4], jnp.uint32)
    part = draw(moved, 0.25, (1, 1, 5, 5))
    np.testing.assert_array_equal(part[0, 0], mask[1, 2, 3:, 4:])

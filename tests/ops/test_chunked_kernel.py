"""The kernels of chunked attention, interpreted, against the array operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.hashing import sorting
from reformax.ops.kernels.triton import chunked as kernel
from reformax.ops.kernels.triton.packed_chunks import PackedChunks
from reformax.ops.softmax import chunked
from reformax.ops.softmax.dropout import seed_words
from reformax.ops.softmax.orders import Chunking, Order, UnsortedInputs
from tests.helpers import assert_trees_close, with_gradients

KEY = jax.random.key(0)
ONE_BEFORE = dict(chunk_len=16, n_chunks_before=1, n_chunks_after=0, causal=True, shared_qk=True)
AROUND = ONE_BEFORE | dict(n_chunks_after=1, causal=False)
SQUARE, TALL, WIDE = (kernel.ChunkTiles(*size, 4, 2) for size in ((16, 16), (32, 16), (16, 32)))


@pytest.mark.parametrize("length", [83, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options, n_hashes, packed, tiles",
    [
        pytest.param(ONE_BEFORE, 1, False, SQUARE, marks=pytest.mark.slow),
        pytest.param(ONE_BEFORE, 3, True, TALL, marks=pytest.mark.slow),
        pytest.param(
            *(ONE_BEFORE | dict(chunk_len=10, n_chunks_before=2), 2, False, WIDE),
            marks=pytest.mark.slow,
        ),
        (ONE_BEFORE | dict(count_once=False, dropout=0.2), 2, False, SQUARE),
        pytest.param(AROUND | dict(dropout=0.2), 3, True, WIDE, marks=pytest.mark.slow),
        pytest.param(
            *(AROUND | dict(chunk_len=1, n_chunks_before=0), 7, False, SQUARE),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(ONE_BEFORE | dict(shared_qk=False), 0, False, SQUARE), marks=pytest.mark.slow
        ),
        pytest.param(*(ONE_BEFORE | dict(chunk_len=64), 0, True, SQUARE), marks=pytest.mark.slow),
        (AROUND | dict(chunk_len=32, window=9, dropout=0.2), 0, True, TALL),
        (ONE_BEFORE | dict(chunk_len=32, window=20, shared_qk=False), 0, False, WIDE),
    ],
)
def test_many_blocks_are_one_attention(options, n_hashes, packed, tiles, length):
    """Chunks of several blocks, blocks of several chunks, and padding."""
    batch, n_heads = 2, 2
    chunks = Chunking(length=length, **options)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        rng.normal(size=(batch, length, n_heads, size)).astype(np.float32) for size in (8, 8, 5, 5)
    )
    k = None if chunks.shared_qk else k
    n_pad = -length % chunks.chunk_len
    order = segment_ids = None
    if packed:
        segment_ids = rng.integers(0, 3, (batch, length + n_pad)).astype(np.int32)
        segment_ids[:, length:] = 0
    if n_hashes:
        buckets = rng.integers(0, 6, (batch, n_heads, n_hashes, length)).astype(np.int32)
        ids = None if segment_ids is None else segment_ids[:, :length]
        order = jax.jit(lambda b: sorting.sort_by_bucket(b, 6, ids, n_pad))(buckets)

    seed = seed_words(KEY, batch) if chunks.dropout else None

    @with_gradients
    def arrays(q, k, v):
        ids = None if segment_ids is None else segment_ids[:, :length]
        return chunked.chunked_attention(q, k, v, chunks, order, ids, seed)

    @jax.jit
    def blocks(q, k, v, d_out):
        x = UnsortedInputs(q, k, v, order, segment_ids, seed)
        results = kernel.forward(chunks, x, tiles=tiles, interpret=True)
        gradients = kernel.backward(chunks, x, results, d_out, tiles=tiles, interpret=True)
        return results[0], gradients

    want, got = arrays(d_out, q, k, v), blocks(q, k, v, d_out)
    assert_trees_close(got, want)


@pytest.mark.parametrize(
    "n_chunks, before, after, per_pack",
    [(1100, 0, 0, 2), (512, 1, 0, 3), (513, 1, 0, 2), (64, 1, 1, 4), (2, 1, 1, 8), (3, 5, 0, 6)],
)
def test_near_chunks_are_found_in_packed_fields(n_chunks, before, after, per_pack):
    """Every pair of the first and last chunks, in every field of every pack."""
    n_hashes = 9
    rng = np.random.default_rng(0)
    chunks = Chunking(n_chunks * 2, 2, before, after, causal=False, shared_qk=True)
    packed = PackedChunks.of(chunks)
    assert packed.per_pack == per_pack
    ends = np.r_[np.arange(n_chunks), rng.integers(0, n_chunks, 2000), [0, n_chunks - 1] * 99]
    query, key = (
        np.stack([rng.permutation(ends) for _ in range(n_hashes)]).astype(np.int32) for _ in "qk"
    )
    distance = query - key
    for n in range(1, n_hashes + 1):
        want = ((distance[:n] <= before) & (-distance[:n] <= after)).any(axis=0)
        got = np.zeros_like(want)
        for first in range(0, n, per_pack):
            packs = (
                packed.pack(jnp.asarray(x[None, None, first : first + per_pack]))
                for x in (query, key)
            )
            got |= np.asarray(packed.near(*packs, min(n - first, per_pack)))[0, 0]
        np.testing.assert_array_equal(got, want)


def test_packed_chunks_are_in_the_order_of_each_hash():
    """Fifteen earlier hashes of eleven-bit chunk numbers take eight packs; none is lost."""
    rng = np.random.default_rng(0)
    chunks = Chunking(1100, 1, 0, 0, causal=False, shared_qk=True)
    slots = np.stack([rng.permutation(1100) for _ in range(16)]).astype(np.int32)[None, None]
    order = Order(np.argsort(slots, axis=-1).astype(np.int32), slots)
    q = jnp.zeros((1, 1100, 1, 2))
    inputs = kernel.chunk_inputs(chunks, UnsortedInputs(q, None, q, order, None, None))
    packed = PackedChunks.of(chunks)
    assert (packed.guard, packed.per_pack, len(inputs.packs)) == (11, 2, 8)
    for r in range(15):  # as the last hash sees them
        pack, field = divmod(r, packed.per_pack)
        got = (np.asarray(inputs.packs[pack, 0, 0, 15]).view(np.uint32) >> (13 * field)) & 2047
        np.testing.assert_array_equal(got, slots[0, 0, r][order.query_positions[0, 0, 15]])

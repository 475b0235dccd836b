"""A size beyond the sequence computes what one of the sequence's length does, in its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import LARGEST, SettingError
from reformax.ops import (
    block_sparse,
    dsa,
    gated_delta,
    gated_linear,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    nsa,
    nystromformer,
    performer,
    retention,
    routing,
    sinks,
)
from reformax.ops.calls.dispatch import INTERPRETED
from tests.ops import inputs
from tests.ops.test_decoding import draw, run

KEY = jax.random.key(3)
LENGTH = 11


def limitless(n, **options):
    """A window of all positions."""
    return local.local(chunk_len=n, window=n, **options)


def reaching(op, n, **options):
    """As many chunks as may be seen."""
    return op(chunk_len=4, n_chunks_before=min(n, 4096), **options)


CASES = [
    (limitless, {}, "n"),
    (functools.partial(reaching, local.local), {}, "n"),
    (functools.partial(reaching, lsh.lsh), dict(n_hashes=1), "n"),
    (longformer.longformer, dict(window=2**20), "dilation"),
    (block_sparse.block_sparse, {}, "block_size"),
    (lsh.lsh, dict(wrap=True, count_once=False), "chunk_len"),
    (long_short.long_short, dict(window=3, rank=2), "chunk_len"),
    (longformer.longformer, {}, "window"),
    (longformer.longformer, dict(dilation=3), "window"),
    (longformer.longformer, dict(window=2), "dilation"),
    (sinks.sinks, dict(window=2), "n_sinks"),
]
KERNELS = [case for case in CASES if case[0] is not long_short.long_short and "wrap" not in case[1]]


@pytest.mark.parametrize("op, options, name", CASES)
def test_a_call_and_its_gradients(op, options, name):
    check_call(op, options, name, LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("op, options, name", KERNELS)
def test_kernels(op, options, name):
    # Blocks of kernels are multiples of 16.
    check_call(op, options | dict(impl=INTERPRETED), name, LARGEST - 15, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compress_len", "block_size"])
def test_summaries_and_blocks(name):
    options = dict(compress_len=4, compress_stride=2, block_size=4, window=2, n_selected=2)
    options |= dict(compression="mean", independent_kv=False)
    check_call(nsa.nsa, options, name, LARGEST - 1, LENGTH + 1)
    check_step(nsa.nsa, options, name, LARGEST - 1, LENGTH + 1)


def check_call(op, options, name, size, enough=LENGTH):
    one, other = (op(**options | {name: n}) for n in (enough, size))
    x = draw(one, 2, LENGTH)

    def loss(x, op):
        return jnp.sum(jnp.sin(inputs.call(op, x, causal=True, rng=KEY, dropout=0.2)))

    want, got = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(x, f) for f in (one, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("op, options, name", CASES)
def test_a_step(op, options, name):
    check_step(op, options, name, LARGEST)


def check_step(op, options, name, size, enough=LENGTH):
    one, other = (op(**options | {name: n}) for n in (enough, size))
    x, lengths = draw(one, 2, LENGTH), np.array([4, 2], np.int32)
    want, got = (run(op, x, lengths, 4, LENGTH) for op in (one, other))
    for key, out in want.items():
        np.testing.assert_allclose(got[key], out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "op, near, far",
    [
        (longformer.longformer, {}, {}),
        (block_sparse.block_sparse, {}, {}),
        (block_sparse.block_sparse, dict(block_size=LENGTH), dict(block_size=LARGEST)),
    ],
)
def test_tokens_that_can_be_global(op, near, far):
    one, other = op(n_global=LENGTH, **near), op(n_global=LARGEST, **far)
    x, global_tokens = draw(one, 2, LENGTH), np.zeros((2, LENGTH), np.int32)
    global_tokens[:, [1, 5]] = 1
    want, got = (inputs.call(op, x, global_tokens=global_tokens) for op in (one, other))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "op, name",
    [
        (performer.performer, "n_features"),
        (dsa.dsa, "d_index"),
        (dsa.dsa, "n_index_heads"),
        *((op, "conv_size") for op in (linear.linear, gated_linear.gated_linear)),
        *((op, "conv_size") for op in (gated_delta.gated_delta, kda.kda, retention.retention)),
        (nystromformer.nystromformer, "conv_size"),
        (linformer.linformer, "n_projected"),
        (long_short.long_short, "rank"),
        (routing.routing, "n_clusters"),
        (nsa.nsa, "compress_len"),
        (nsa.nsa, "compress_stride"),
    ],
)
def test_weights_that_no_memory_holds_are_refused(op, name):
    with pytest.raises(SettingError, match=rf"^{name} is 2147483647: expected at .* most 65,536"):
        op(**{name: LARGEST})


def test_lengths_and_iterations_that_never_end_are_refused():
    with pytest.raises(SettingError, match="^max_length is 2147483647: .* at most 16,777,216"):
        linformer.linformer(max_length=LARGEST)
    with pytest.raises(SettingError, match="^n_iterations is 2147483647: .* at most 1,024"):
        nystromformer.nystromformer(n_iterations=LARGEST)

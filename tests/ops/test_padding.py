"""Each way to say that a row is one segment: its ids, booleans, a mask of keys, and lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import trained
from reformax.ops import asymmetric_lsh, flash, linear, local, longformer, lsh, shared_qk, sinks
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
of = functools.partial
LENGTH = 25
BEHIND = np.arange(LENGTH) < np.array([[LENGTH], [17], [1], [0]])
# Padding in front, within and behind.
ANYWHERE = np.random.default_rng(0).random((4, LENGTH)) < np.array([[1], [0.7], [0.1], [0]])


def differentiated(row, x, d_out, causal, **masks):
    """The output and the gradients of a call."""

    def attend(x):
        options = dict(causal=causal, rng=KEY, dropout=row.dropout(0.2))
        return inputs.call(row.op(), x, **options, **masks)

    @jax.jit
    def run(x, d_out):
        out, vjp = jax.vjp(attend, x)
        (gradients,) = vjp(d_out)
        return out, gradients[:4], trained(gradients.params)

    return run(x, d_out)


def at_padding(x, tokens, value):
    """Numbers `[B, T, ...]` with `value` at padding."""
    return jax.tree.map(lambda y: np.where(tokens[..., None, None], y, np.float32(value)), x)


@over(ROWS, quick=one_of_each_kind)
@pytest.mark.parametrize("tokens", [BEHIND, ANYWHERE], ids=["behind", "anywhere"])
def test_booleans_are_ids(row, tokens):
    """Padding is not read, whatever it holds."""
    x = inputs.draw(row.op(), batch=4, length=LENGTH)
    d_out = np.random.default_rng(1).normal(size=(4, LENGTH, 2, 4)).astype(np.float32)
    causal = row.causal()
    want = differentiated(row, x, at_padding(d_out, tokens, 0), causal, segment_ids=1 * tokens)
    poisoned = x.map(lambda y: at_padding(y, tokens, np.nan))
    there = at_padding(d_out, tokens, np.nan)
    got = differentiated(row, poisoned, there, causal, segment_ids=tokens)
    assert_trees_close(got, want, 1e-5)
    assert not np.any(at_padding(got[0], ~tokens, 0))


@over(ROWS, quick=one_of_each_kind)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_are_booleans(row, causal):
    x = inputs.draw(row.op(), batch=4, length=LENGTH)
    d_out = np.random.default_rng(1).normal(size=(4, LENGTH, 2, 4)).astype(np.float32)
    causal = row.causal(causal)
    want = differentiated(row, x, at_padding(d_out, BEHIND, 0), causal, segment_ids=BEHIND)
    got = differentiated(row, x, d_out, causal, lengths=BEHIND.sum(axis=1))
    assert_trees_close(got, want, 1e-5)


@pytest.mark.parametrize("op", [flash.flash(), linear.linear()])
def test_a_mask_of_keys_is_booleans(op):
    x = inputs.draw(op, batch=4, length=LENGTH)
    got, want = (
        inputs.call(op, x, causal=True, **{name: ANYWHERE}) for name in ("mask", "segment_ids")
    )
    np.testing.assert_allclose(np.asarray(got)[ANYWHERE], np.asarray(want)[ANYWHERE], atol=1e-6)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(lengths=jnp.ones(3, int)), r"lengths has shape \(3,\) and dtype int32: expected"),
        (dict(lengths=jnp.ones(4)), r"lengths has shape \(4,\) and dtype float32: expected int"),
        (dict(lengths=[3, 2, 1, 1]), r"lengths is \[3, 2, 1, 1\]: expected an array"),
        (
            dict(lengths=jnp.ones(4, int), segment_ids=BEHIND),
            "lengths and segment_ids are given: leave out lengths",
        ),
        (dict(lengths=jnp.ones(4, int), mask=BEHIND), "lengths and mask are given: leave out"),
        (
            dict(lengths=np.array([3, 26, 1, 1])),
            "lengths has 1 to 26: expected 0 to 25",
        ),
        (dict(lengths=jnp.array([3, -1, 1, 1])), "lengths has -1 to 3: expected 0 to 25"),
    ],
)
def test_lengths_that_do_not_fit(given, message):
    x = inputs.draw(flash.flash(), batch=4, length=LENGTH)
    with pytest.raises(ValueError, match=message):
        inputs.call(flash.flash(), x, **given)


def test_known_lengths_within_a_compiled_function():
    x, lengths = inputs.draw(flash.flash(), batch=2, length=9), jnp.array([9, 4])

    def attend(lengths):
        return jax.jit(lambda x: inputs.call(flash.flash(), x, lengths=lengths))(x)

    np.testing.assert_array_equal(attend(lengths), attend(np.array(lengths)))
    with pytest.raises(ValueError, match="lengths has 4 to 10: expected 0 to 9"):
        attend(lengths + jnp.array([1, 0]))


@pytest.mark.parametrize("dtype, most", [(np.uint8, 255), (np.int32, 2**31 - 1)])
def test_cudnn_gets_lengths_within_the_row(dtype, most, monkeypatch):
    """Kernels would read behind the array; numbers without a sign would wrap at `lengths - 1`."""
    lengths = []

    def instead(q, k, v, *, key_value_seq_lengths, **_):
        jax.debug.callback(lengths.append, key_value_seq_lengths)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    for make, want in ((flash.flash, [24, 1, 25]), (shared_qk.shared_qk, [23, 1, 24])):
        op = make(impl="cudnn")
        x = inputs.draw(op, batch=3, length=LENGTH, d_qk=8, d_v=8, dtype=jnp.bfloat16)
        call = jax.jit(lambda n, x=x, op=op: inputs.call(op, x, causal=True, lengths=n))
        jax.block_until_ready(call(np.array([24, 0, most], dtype)))
        jax.effects_barrier()
        assert np.asarray(lengths.pop()).tolist() == want


@pytest.mark.parametrize("impl", [INTERPRETED, "xla"])
def test_booleans_of_queries_and_ids_of_keys(impl):
    x = inputs.draw(flash.flash(), batch=4, length=LENGTH)
    got, want = (
        inputs.call(flash.flash(impl=impl), x, segment_ids=(of_queries, 1 * ANYWHERE))
        for of_queries in (BEHIND, 1 * BEHIND)
    )
    np.testing.assert_array_equal(got, want)


def test_lengths_of_two_sequences():
    x = inputs.draw(flash.flash(), batch=4, length=LENGTH)
    with pytest.raises(ValueError, match="lengths is given, and q and k have lengths 25 and 9"):
        flash.flash()(x.q, x.k[:, :9], x.v[:, :9], lengths=jnp.ones(4, int))


@pytest.mark.parametrize("given", ["segment_ids", "lengths"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_costs_linear_attention_no_sort_and_no_mask(given, causal):
    """What is not given at all takes the same temporary memory, and nothing is sorted."""
    x = inputs.draw(linear.linear(), batch=2, length=512, d_qk=32, d_v=32)

    def compiled(**masks):
        def loss(q, k, v):
            return linear.linear(impl="xla")(q, k, v, causal=causal, **masks).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x[:3]).compile()

    tokens = np.arange(512) < np.array([[512], [300]])
    padded = compiled(**{given: tokens if given == "segment_ids" else tokens.sum(axis=1)})
    used, plain = (f.memory_analysis().temp_size_in_bytes for f in (padded, compiled()))
    assert "sort(" not in padded.as_text()
    assert used < 1.1 * plain + 2**20


@pytest.mark.slow
@pytest.mark.parametrize("tokens, given", [(BEHIND, "lengths"), (ANYWHERE, "segment_ids")])
@pytest.mark.parametrize("causal, dropout", [(True, 0.0), (False, 0.2)])
@pytest.mark.parametrize(
    "make",
    [
        of(local.local, chunk_len=64, window=50, n_chunks_after=1),
        of(longformer.longformer, window=20, dilation=3),
        of(sinks.sinks, window=40, n_sinks=3),
        of(lsh.lsh, chunk_len=16, n_hashes=3),
        of(asymmetric_lsh.asymmetric_lsh, chunk_len=16, n_hashes=3),
        flash.flash,
        shared_qk.shared_qk,
    ],
)
def test_kernels_of_padded_rows(make, causal, dropout, tokens, given):
    """Rows of several tiles: what kernels compute of lengths or booleans, arrays do of ids."""
    tokens = np.repeat(tokens, 9, axis=1)
    x = inputs.draw(make(), batch=4, length=tokens.shape[1], d_qk=8, d_v=8)
    d_out = np.random.default_rng(1).normal(size=x.v.shape).astype(np.float32)
    masks = {given: tokens.sum(axis=1) if given == "lengths" else tokens}
    results = []
    for impl, mask in ((INTERPRETED, masks), ("xla", dict(segment_ids=1 * tokens))):
        op = make(impl=impl)

        def attend(x, op=op, mask=mask):
            return inputs.call(op, x, causal=causal, dropout=dropout, rng=KEY, **mask)

        y, d = x, at_padding(d_out, tokens, 0)
        if given == "segment_ids" and impl == INTERPRETED:  # padding is not read
            y, d = x.map(lambda y: at_padding(y, tokens, np.nan)), at_padding(d, tokens, np.nan)
        out, vjp = jax.vjp(jax.jit(attend), y)
        results.append((out, vjp(jnp.asarray(d))[0][:4]))
    assert_trees_close(*results, 1e-5)

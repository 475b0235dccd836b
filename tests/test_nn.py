"""`reformax.nn.dot_product_attention` against jax's own, and what it refuses."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import nn, ops
from reformax.declared import SettingError
from reformax.nn import dot_product_attention
from reformax.ops.base import AttentionOp

B, T, N, G, H = 2, 37, 4, 2, 8
LENGTHS = jnp.array([T, 29])


def inputs(n_queries=T, n_keys=T, n_kv_heads=G):
    rng = np.random.default_rng(0)
    shapes = (n_queries, N), (n_keys, n_kv_heads), (n_keys, n_kv_heads)
    return tuple(jax.device_put(rng.normal(size=(B, *s, H)).astype(jnp.float32)) for s in shapes)


def value_and_gradients(function, arrays, rows=None, **call):
    def loss(*arrays):
        out = function(*arrays, **call)
        out = out if rows is None else jnp.where(rows[:, :, None, None], out, 0)
        return jnp.sum(jnp.sin(out) * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = run(*arrays)
    return out, *gradients


def assert_as_jax(implementation, arrays, rows=None, **call):
    got, want = (
        value_and_gradients(function, arrays, rows, **call, **options)
        for function, options in (
            (dot_product_attention, dict(implementation=implementation)),
            (jax.nn.dot_product_attention, {}),
        )
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


MASK = np.random.default_rng(1).random((B, 1, T, T)) < 0.5
MASK |= np.eye(T, dtype=bool)
BIAS = np.random.default_rng(2).normal(size=(1, N, T, T)).astype(np.float32)
TOKENS = np.arange(T) < np.asarray(LENGTHS)[:, None]
CALLS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.5, is_causal=True),
    "scale as it is": dict(scale=H**-0.5),
    "key lengths": dict(key_value_seq_lengths=LENGTHS),
    "query lengths": dict(query_seq_lengths=LENGTHS, is_causal=True),
    "both lengths": dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS),
    "window": dict(local_window_size=5),
    "causal window": dict(local_window_size=(5, 3), is_causal=True),
    "window to the left": dict(local_window_size=(5, 0)),
    "window of both": dict(local_window_size=(7, 7)),
    "own position": dict(local_window_size=0),
    "wide window": dict(local_window_size=(1000, 0)),
    "uneven window": dict(local_window_size=(3, 6)),
    "window and lengths": dict(
        local_window_size=4, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS
    ),
    "window and mask": dict(local_window_size=(6, 0), mask=MASK),
    "window and a hidden key": dict(local_window_size=3, mask=np.arange(T)[None, None, None] != 5),
    "window and mask of keys": dict(local_window_size=6, mask=TOKENS[:, None, None]),
    "mask": dict(mask=MASK),
    "mask and lengths": dict(mask=MASK, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS),
    "mask of a head": dict(mask=np.repeat(MASK, N, axis=1)),
    "bias": dict(bias=BIAS, is_causal=True),
    "bias and mask": dict(bias=BIAS, mask=MASK),
}


@pytest.mark.parametrize("implementation", ["dense", "flash"])
@pytest.mark.parametrize("name", CALLS)
def test_as_jax_s_own(implementation, name):
    """Values and gradients; rows of padding are compared where lengths of queries are given."""
    call = CALLS[name]
    rows = TOKENS if "mask of keys" in name else None
    assert_as_jax(implementation, inputs(), rows, **call)


@pytest.mark.parametrize("implementation", ["dense", "flash", "memory_efficient"])
def test_of_two_sequences_and_without_a_batch(implementation):
    arrays = inputs(n_keys=50, n_kv_heads=1)
    for call in (
        {},
        dict(is_causal=True),
        dict(key_value_seq_lengths=jnp.array([50, 3])),
        dict(local_window_size=(9, 4)),
    ):
        assert_as_jax(implementation, arrays, **call)
    for call in (dict(is_causal=True), dict(mask=MASK[0]), dict(bias=BIAS[0])):
        one = [x[0] for x in inputs()]
        ours = functools.partial(dot_product_attention, implementation=implementation)
        got, want = jax.jit(
            lambda *x: [f(*x, **call) for f in (ours, jax.nn.dot_product_attention)]  # noqa: B023
        )(*one)
        assert got.shape == (T, N, H)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_signature_is_jax_s():
    """A call of jax's function may become one of ours."""
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert list(ours) == [*theirs, "rng"] or set(theirs) | {"rng"} == set(ours)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def test_jax_s_own_implementations():
    arrays = inputs()
    for implementation in (None, "xla"):
        call = dict(is_causal=True, local_window_size=5, implementation=implementation)
        want = jax.nn.dot_product_attention(*arrays, **call)
        np.testing.assert_array_equal(dot_product_attention(*arrays, **call), want)
    out, sums = dot_product_attention(*arrays, return_residual=True)
    assert out.shape == (B, T, N, H) and sums.shape == (B, T, N)


@pytest.mark.parametrize("name", nn._usable())
def test_every_algorithm_without_weights(name):
    """By its name it is the op itself, and under `jit`, `vmap` over rows, and `grad`."""
    arrays, op = inputs(), nn.op_of(name)
    causal = op.causality != "never"
    rng = jax.random.key(0) if op.plan_needs == "rng" else None
    want = op(*arrays, causal=causal, rng=rng)
    call = dict(is_causal=causal, implementation=name)
    np.testing.assert_array_equal(dot_product_attention(*arrays, **call), want)
    each = jax.jit(jax.vmap(lambda *row: dot_product_attention(*row, **call)))(*arrays)
    np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-4)
    gradients = jax.grad(lambda *x: dot_product_attention(*x, **call).sum(), (0, 1, 2))(*arrays)
    assert all(np.isfinite(x).all() and np.any(x) for x in gradients)


def test_lsh_reads_keys_and_hashes_alike_until_told():
    q, k, v = inputs(n_queries=256, n_keys=256)

    def attend(k, **call):
        return dot_product_attention(q, k, v, is_causal=True, implementation="lsh", **call)

    np.testing.assert_array_equal(attend(k), attend(k))
    np.testing.assert_array_equal(attend(k), attend(k, rng=jax.random.key(0)))
    assert np.abs(attend(k) - attend(-k)).max() > 0.1
    assert np.abs(attend(k) - attend(k, rng=jax.random.key(1))).max() > 1e-3
    np.testing.assert_array_equal(
        attend(k), ops.asymmetric_lsh.asymmetric_lsh()(q, k, v, causal=True, rng=jax.random.key(0))
    )


@pytest.mark.parametrize("implementation", ["lsh", "local", "linear", "flash"])
def test_padding_may_be_nan_and_changes_nothing(implementation):
    arrays, padding = inputs(), ~TOKENS[..., None, None]
    call = dict(is_causal=True, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS)
    call["implementation"] = implementation
    want = value_and_gradients(dot_product_attention, arrays, **call)
    got = value_and_gradients(
        dot_product_attention, [jnp.where(padding, jnp.nan, x) for x in arrays], **call
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not np.any(np.asarray(got[0])[~TOKENS])


@pytest.mark.parametrize("name", ["local", "sinks", "longformer"])
def test_an_algorithm_s_own_window(name):
    arrays = inputs()
    op = getattr(getattr(ops, name), name)
    options = dict(chunk_len=64, n_chunks_after=1) if name == "local" else {}
    for size, causal in ((5, False), ((5, 2), True)):
        got = dot_product_attention(
            *arrays, local_window_size=size, is_causal=causal, implementation=name
        )
        want = op(window=6, **options)(*arrays, causal=causal)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_flash_in_a_window_makes_no_matrix():
    """Its time and memory are linear in the length."""
    shape = jax.ShapeDtypeStruct((1, 2**16, 1, 8), jnp.float32)
    call = dict(is_causal=True, local_window_size=100, implementation="flash")
    attend = jax.jit(lambda *x: dot_product_attention(*x, **call))
    memory = attend.lower(*(shape,) * 3).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**30


def test_queries_beyond_the_keys_of_one_sequence():
    """Refused where lengths are known; NaN where they are traced."""
    arrays = inputs()
    lengths = dict(query_seq_lengths=jnp.array([T, T]), key_value_seq_lengths=LENGTHS)

    def attend(implementation):
        def of(lengths):
            call = dict(is_causal=True, implementation=implementation, **lengths)
            return dot_product_attention(*arrays, **call)

        return of

    for name in ("local", "lsh"):
        with pytest.raises(NotImplementedError, match="query_seq_lengths exceed key_value_seq_le"):
            attend(name)(lengths)
        out = np.asarray(jax.jit(attend(name))(lengths))
        np.testing.assert_array_equal(np.isnan(out).all((2, 3)), ~TOKENS)
    assert np.isfinite(attend("flash")(lengths)).all()


REFUSED = {
    "an op of another name": (dict(implementation="lsh2"), "implementation is 'lsh2': expected an"),
    "a class": (dict(implementation=ops.flash.flash), "implementation is .*flash.*: expected an"),
    "shared QK": (dict(implementation=ops.lsh.lsh()), r"is lsh\(\): it makes its keys of the quer"),
    "shared QK by name": (dict(implementation="shared_qk"), "it makes its keys of the queries"),
    "weights": (dict(implementation="linformer"), "is 'linformer': it has weights of its own"),
    "gates": (
        dict(implementation=ops.retention.retention(normalized=False), is_causal=True),
        r"is retention\(normalized=False\): it reads further projections",
    ),
    "residual": (dict(implementation="flash", return_residual=True), "return_residual is True: fl"),
    "bias": (dict(implementation="lsh", bias=BIAS), "bias is given, but asymmetric_lsh adds none"),
    "mask": (dict(implementation="local", mask=MASK), "mask has shape .*: local hides pairs only"),
    "scale": (dict(implementation="linear", is_causal=True, scale=2.0), "scale is 2.0: linear has"),
    "two scales": (
        dict(implementation=ops.flash.flash(scale=2.0), scale=2.0),
        "scale is 2.0 and implementation is flash",
    ),
    "window": (dict(implementation="lsh", local_window_size=4), "local_window_size is 4: asymmetr"),
    "uneven window": (
        dict(implementation="local", local_window_size=(4, 2)),
        r"local_window_size is \(4, 2\): local has no such window",
    ),
    "a window below 0": (
        dict(implementation="flash", local_window_size=-1),
        "is -1: expected",
    ),
    "not causal": (dict(implementation="retention_plain"), "is_causal is False"),
    "causal": (dict(implementation="nystromformer", is_causal=True), "is_causal is True: nystrom"),
    "lengths": (
        dict(implementation="flash", key_value_seq_lengths=jnp.array([3])),
        r"key_value_seq_lengths has shape \(1,\) and dtype int32: expected integers \[batch\]",
    ),
    "lengths beyond the keys": (
        dict(implementation="flash", key_value_seq_lengths=jnp.array([3, T + 1])),
        f"key_value_seq_lengths has 3 to {T + 1}: expected 0 to {T}",
    ),
    "lengths below 0": (
        dict(implementation="lsh", query_seq_lengths=jnp.array([3, -1])),
        "query_seq_lengths has -1 to 3: expected 0 to",
    ),
    "a mask of keys without axes": (
        dict(implementation="lsh", mask=TOKENS),
        r"mask has shape \(2, .*\): expected .*; a mask of keys is \[batch, 1, 1, keys\]",
    ),
    "a bias of five axes": (
        dict(implementation="flash", bias=BIAS[None]),
        r"bias has shape \(1, 1, .*\): expected axes",
    ),
    "a number as a flag": (
        dict(implementation="lsh", is_causal=1),
        "is_causal is 1: expected True",
    ),
    "float lengths": (
        dict(implementation="flash", query_seq_lengths=jnp.array([3.0, 4.0])),
        r"query_seq_lengths has shape \(2,\) and dtype float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_algorithm_cannot_do_is_refused_in_one_line(name):
    call, message = REFUSED[name]
    if call["implementation"] == "retention_plain":
        call = dict(implementation=ops.retention.retention(normalized=False, gated=False))
    with pytest.raises((SettingError, NotImplementedError, ValueError), match=message) as found:
        dot_product_attention(*inputs(), **call)
    assert "\n" not in str(found.value)


def test_a_traced_flag_is_refused():
    call = functools.partial(dot_product_attention, *inputs(), implementation="lsh")
    with pytest.raises(ValueError, match="^is_causal is .*Tracer.*: expected True or False"):
        jax.jit(lambda causal: call(is_causal=causal))(True)


def test_shapes_that_do_not_fit_are_refused_by_the_argument_s_name():
    q, k, v = inputs()
    for arrays, message in (
        ((q[0], k, v), "key has shape .*: expected .batch, length, heads, size. of all three"),
        ((q, k[..., :4], v), "key has shape .*: expected batch and size of query"),
        ((q[:, :, :3], k, v), "key has shape .*: expected batch and size of query"),
        ((q, k, v[:, :5]), "value has shape .*: expected that of key"),
        ((q.astype(int), k, v), "query has dtype int32: expected floats"),
    ):
        with pytest.raises(ValueError, match=message):
            dot_product_attention(*arrays, implementation="flash")


def test_names_are_those_of_ops():
    """An op that is added has its name here at once."""
    for name in nn._usable():
        assert isinstance(nn.op_of(name), AttentionOp)
    assert {"dense", "flash", "lsh", "smyrf", "local", "hash_sparse"} <= set(nn._usable())

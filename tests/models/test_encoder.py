"""Encoders: whole rows seen, padding never; pooling, pairs and hidden tokens by their equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.models import (
    ReformerEncoder,
    ReformerMaskedLM,
    TransformerEncoder,
    TransformerMaskedLM,
    encoder,
)
from reformax.ops import dense, flash, gated_linear, local, longformer, lsh, shared_qk
from reformax.ops.softmax import block_kernels
from tests.helpers import assert_trees_close
from tests.layers import plain
from tests.ops.cudnn import instead_of_cudnn
from tests.ops.rows import ROWS

RNG = jax.random.PRNGKey(4)
SMALL = dict(
    vocab_size=16,
    d_model=8,
    d_ff=12,
    d_attention_key=4,
    d_attention_value=4,
    n_layers=2,
    n_heads=2,
    mode="eval",
)
CLASSIFIER = SMALL | dict(n_classes=10)
CYCLE = dict(
    attention_type=(local.local(chunk_len=4), lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4))
)
LENGTHS = 11, 6
FIRST = [next(rows) for _, rows in itertools.groupby(ROWS, lambda row: row.factory)]


def some_rows(length=11, seed=0):
    """Two rows of tokens, with padding behind."""
    rows = np.random.default_rng(seed).integers(1, 16, (2, length), np.int32)
    return rows * (np.arange(length) < np.array(LENGTHS)[:, None])


def padded(rows, n=5):
    return np.pad(rows, ((0, 0), (0, n)))


def outputs(model, *inputs, params=None):
    params = plain.init(model, *[x.shape for x in inputs]) if params is None else params
    return np.asarray(jax.jit(lambda p, *x: model.apply(p, *x, rng=RNG))(params, *inputs)), params


def numpy_logits(params, x, hidden):
    if hidden:
        x = np.maximum(x @ params["hidden"]["w"] + params["hidden"]["b"], 0)
    return x @ params["logits"]["w"] + params["logits"]["b"]


def check_padding(model):
    rows = some_rows()
    params = plain.init(model, padded(rows).shape)  # weights of Linformer are of the longest
    got, _ = outputs(model, rows, params=params)
    assert got.shape == (2, 1, 10) and got.dtype == np.float32
    more, _ = outputs(model, padded(rows), params=params)
    np.testing.assert_allclose(more, got, atol=2e-6)
    other = rows.copy()
    other[0, -1] = rows[0, -1] % 15 + 1
    changed, _ = outputs(model, other, params=params)
    assert np.abs(changed[0] - got[0]).max() > 1e-6  # the last token counts
    np.testing.assert_array_equal(changed[1], got[1])


@pytest.mark.parametrize(
    "pooling",
    ["mean", "cls", *(pytest.param(x, marks=pytest.mark.slow) for x in ("first", "last"))],
)
def test_a_row_is_read_whole_and_its_padding_is_not(pooling):
    check_padding(TransformerEncoder(**CLASSIFIER, pooling=pooling))


@pytest.mark.slow
def test_a_reversible_row_too():
    check_padding(ReformerEncoder(**CLASSIFIER, **CYCLE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in FIRST if not (row.padding_counts or row.in_kernel)],
    ids=lambda row: row.name,
)
def test_with_every_attention(row):
    check_padding(
        TransformerEncoder(**CLASSIFIER, attention_type=row.op(), causal=row.causal(causal=False))
    )


@pytest.mark.parametrize("d_classifier", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_pooling_and_pairs_are_their_equations(d_classifier):
    options = dict(n_classes=3, d_classifier=d_classifier)
    first, second = some_rows(), some_rows(seed=1)
    pair = TransformerEncoder(**CLASSIFIER | options, pairs=True)
    got, params = outputs(pair, first, second)
    host = jax.tree.map(np.asarray, params)
    means = []
    for rows in (first, second):
        features, is_token = jax.jit(pair.read)(params, rows, RNG)
        np.testing.assert_array_equal(is_token, rows != 0)
        parts = zip(np.asarray(features), LENGTHS, strict=True)
        means.append(np.stack([x[:n].mean(axis=0) for x, n in parts]))
    x, y = means
    pooled = np.concatenate([x, y, x * y, x - y], axis=1)
    np.testing.assert_allclose(got[:, 0], numpy_logits(host, pooled, d_classifier), atol=2e-6)

    for pooling, at in ("first", [0, 0]), ("last", np.asarray(LENGTHS) - 1):
        single = TransformerEncoder(**CLASSIFIER | options, pooling=pooling)
        got, params = outputs(single, first)
        host = jax.tree.map(np.asarray, params)
        x = np.asarray(jax.jit(single.read)(params, first, RNG)[0])[np.arange(2), at]
        np.testing.assert_allclose(got[:, 0], numpy_logits(host, x, d_classifier), atol=2e-6)


def test_a_learnt_vector_before_a_row_is_a_token_of_its_own():
    """It has the first position, and another embedding's token there computes the same."""
    rows, options = some_rows(), dict(n_classes=3)
    model = TransformerEncoder(**CLASSIFIER | options, pooling="cls")
    _, params = outputs(model, rows)
    params["cls"] = params["embedding"][7]
    got, _ = outputs(model, rows, params=params)
    first = TransformerEncoder(**CLASSIFIER | options, pooling="first")
    params = {name: x for name, x in params.items() if name != "cls"}
    with_token = np.concatenate([np.full_like(rows[:, :1], 7), rows], axis=1)
    want, _ = outputs(first, with_token, params=params)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_vector_before_rows_that_devices_share_is_refused(monkeypatch):
    model = TransformerEncoder(**CLASSIFIER, pooling="cls")
    params = plain.init(model, some_rows().shape)
    monkeypatch.setattr(encoder.devices, "n_sequence_shards", lambda: 2)
    with pytest.raises(SettingError, match="pooling is 'cls'.* 2 devices share a row: .*context=1"):
        model.apply(params, some_rows(), rng=RNG)


def test_a_row_of_padding_alone_has_the_logits_of_zeros():
    model = TransformerEncoder(**CLASSIFIER)
    rows = some_rows() * np.array([[0], [1]], np.int32)
    got, params = outputs(model, rows)
    np.testing.assert_array_equal(got[0, 0], params["logits"]["b"])


@pytest.mark.parametrize(
    "model_fn, options",
    [
        (TransformerMaskedLM, dict(attention_type=dense.dense())),
        (TransformerMaskedLM, dict(attention_type=flash.flash(), scan_layers=False)),
        (ReformerMaskedLM, dict(attention_type=flash.flash())),
        (
            TransformerEncoder,
            dict(attention_type=flash.flash(), pooling="cls", pairs=True, n_classes=3),
        ),
    ],
    ids=["dense", "flash", "reversible", "a vector before pairs"],
)
def test_cudnn_is_asked_and_told_the_lengths_of_rows(model_fn, options, monkeypatch):
    model = model_fn(**SMALL | dict(d_attention_key=8, d_attention_value=8, n_layers=1), **options)
    inputs = [some_rows(seed=i) for i in range(model.n_inputs)]
    for rows in inputs:
        rows[:, [0, 3]] = 0  # no padding, for tokens are behind it
    real = np.arange(11) < np.array(LENGTHS)[:, None]
    params = plain.init(model, *[x.shape for x in inputs])

    def loss(params):
        out = model.apply(params, *inputs, rng=RNG)
        out = out if out.shape[1] == 1 else out * real[..., None]
        return jnp.mean(out**2), out

    def run():
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    want = run()
    calls = instead_of_cudnn(monkeypatch, block_kernels)
    got = run()
    assert calls
    assert_trees_close(got, want)


@pytest.mark.parametrize(
    "model_fn", [TransformerMaskedLM, pytest.param(ReformerMaskedLM, marks=pytest.mark.slow)]
)
def test_hidden_tokens_are_filled_in_from_both_sides(model_fn):
    model = model_fn(**SMALL, **(CYCLE if model_fn is ReformerMaskedLM else {}))
    rows = some_rows()
    got, params = outputs(model, rows)
    assert got.shape == (2, 11, 16) and got.dtype == np.float32
    more, _ = outputs(model, padded(rows), params=params)
    np.testing.assert_allclose(more[0, :11], got[0], atol=1e-5)
    np.testing.assert_allclose(more[1, :6], got[1, :6], atol=1e-5)
    for changed, read in ((10, 9), (0, 1)):  # the token behind, and the one before
        other = rows.copy()
        other[0, changed] = rows[0, changed] % 15 + 1
        logits, _ = outputs(model, other, params=params)
        assert np.abs(logits[0, read] - got[0, read]).max() > 1e-6

    host = jax.tree.map(np.asarray, params)
    x = np.asarray(model.features(params, rows, RNG), np.float64)
    x = x @ host["hidden"]["w"] + host["hidden"]["b"]
    x = np.asarray(jax.nn.gelu(jnp.asarray(x, jnp.float32), approximate=False), np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * host["head_norm"]["scale"] + host["head_norm"]["bias"]
    want = x @ host["embedding"].T + host["logits"]["b"]
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)


def test_the_first_tokens_see_all_and_are_seen():
    options = dict(attention_type=longformer.longformer(window=2, n_global=1), pooling="first")
    rows = some_rows()
    other = rows.copy()
    other[0, 8] = rows[0, 8] % 15 + 1
    for n_global, reaches in ((0, False), (1, True)):  # two windows of 2 reach 2 positions
        model = TransformerEncoder(**CLASSIFIER | options, n_global=n_global)
        got, params = outputs(model, rows)
        changed, _ = outputs(model, other, params=params)
        assert (np.abs(changed[0] - got[0]).max() > 1e-6) == reaches


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_classes=1), "n_classes is 1: expected at least 2"),
        (dict(pooling="max"), "pooling is 'max': expected"),
        (dict(pooling="first", causal=True), "sees no other: set pooling='mean' or 'last'"),
        (dict(pooling="cls", causal=True), "pooling is 'cls' and causal is True"),
        (dict(pooling="cls", pos_axial_shape=(3, 4)), "moves the others by one, and pos_axial"),
        (dict(n_global=1), "n_global is 1 and no op of attention_type reads global_tokens"),
        (
            dict(attention_type=shared_qk.shared_qk(attend_self_if_alone=False), next_value=True),
            "next_value is True and TransformerEncoder is not causal: set next_value=False",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        encoder.TransformerEncoder(**CLASSIFIER | options)
    assert "\n" not in str(caught.value)


def test_a_pair_of_other_lengths_is_refused():
    model = TransformerEncoder(**CLASSIFIER, pairs=True)
    params = plain.init(model, (2, 11), (2, 11))
    with pytest.raises(ValueError, match=r"^tokens have shapes \(2, 11\) and \(2, 16\): ") as error:
        model.apply(params, some_rows(), padded(some_rows()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [some_rows()[0], some_rows()[None], some_rows() / 1.0])
def test_tokens_of_another_kind_are_told(rows):
    one, two, masked = (
        fn(**SMALL | options, attention_type=longformer.longformer(n_global=1))
        for fn, options in (
            (TransformerEncoder, dict(n_global=1, n_classes=3)),
            (TransformerEncoder, dict(pairs=True, n_classes=3)),
            (TransformerMaskedLM, {}),
        )
    )
    for model, inputs in ((one, (rows,)), (two, (rows, rows)), (masked, (rows,))):
        params = plain.init(model, *[(2, 11)] * len(inputs))
        with pytest.raises(ValueError, match="^tokens has shape .* expected integers") as error:
            model.apply(params, *inputs)
        assert "\n" not in str(error.value)


def test_weights_of_another_size_are_told():
    sizes = CLASSIFIER | dict(attention_type=dense.dense())
    params = plain.init(TransformerEncoder(**sizes | dict(d_model=4)), (2, 11))
    with pytest.raises(ValueError, match=r"^params\['embedding'\] has shape \(16, 4\): expected "):
        TransformerEncoder(**sizes).apply(params, some_rows())


def test_an_algorithm_that_hides_the_future_is_told_to_be_causal():
    model = TransformerEncoder(**CLASSIFIER, attention_type=gated_linear.gated_linear())
    with pytest.raises(NotImplementedError, match="causal"):
        outputs(model, some_rows())


def test_gradients_reach_every_weight():
    model = TransformerEncoder(
        **CLASSIFIER, attention_type=dense.dense(), pairs=True, d_classifier=6, pos_type="axial",
        pos_axial_shape=(3, 4), pos_d_axial_embs=(3, 5),
    )  # fmt: skip
    rows = some_rows(), some_rows(seed=1)
    params = plain.init(model, rows[0].shape, rows[1].shape)

    def loss(params):
        return -jnp.mean(jax.nn.log_softmax(model.apply(params, *rows))[..., 0])

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.abs(np.asarray(gradient)).max() > 0, path

"""The share of a model's attention weight that an op's plan covers: `benchmarks.recall --run`."""

import re

import jax
import numpy as np
import pytest

from benchmarks import recall
from benchmarks.harness import coverage
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.models import TransformerLM
from reformax.ops import dense, dsa, linear, linformer, lsh, nsa, routing, shared_qk, smyrf
from reformax.ops.numerics.normalization import length_normalize
from tests.convert.test_command import random_params
from tests.layers import plain
from tests.ops.rows import ROWS, Shape, except_self

LENGTH = 40
BYTES = Spec.make(
    "TransformerLM",
    [Op("local", dict(chunk_len=4)), Op("dense", {})],
    **dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=4),
    vocab_size=256,
)


def layer_of(op, n_heads=2):
    q, k = 3 * jax.random.normal(jax.random.key(1), (2, 1, LENGTH, n_heads, 8))
    return coverage.Layer(0, op, q, None if op.shared_qk else k)


@pytest.mark.parametrize(
    "name, of_layer, n_own",
    [
        ("moba", dense.dense(), 1),
        pytest.param("smyrf", dense.dense(), 1, marks=pytest.mark.slow),
        pytest.param(
            "lsh", shared_qk.shared_qk(attend_self_if_alone=False), 0, marks=pytest.mark.slow
        ),
        pytest.param(
            "smyrf", shared_qk.shared_qk(attend_self_if_alone=False), 0, marks=pytest.mark.slow
        ),
    ],
)
def test_the_share_is_that_of_the_keys_that_the_plan_shows(name, of_layer, n_own):
    """Against the mask that the op's row states, of its plan, and weights in NumPy."""
    (row,) = (row for row in ROWS if row.name == name)
    op, layer, rng = row.op(), layer_of(of_layer), jax.random.key(2)
    q, k = coverage._vectors(op, layer)
    options = dict(segment_ids=None, causal=True, rng=rng, train=False)
    plan = op.plan((), q, k, **options)
    shape = Shape(1, LENGTH, LENGTH, 2)
    shown = row.counts(row.first, plan, shape, True, None) > 0

    keys = length_normalize(layer.q) if layer.k is None else layer.k
    logits = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, float) for x in (layer.q, keys)))
    visible = np.tril(np.ones((LENGTH, LENGTH)))[None, None]
    if not n_own:
        visible = except_self(visible, attend_self_if_alone=False)
    weights = np.exp(logits / np.sqrt(8)) * visible
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)

    of_op = coverage.found(op, layer, rng)
    share = (weights * shown).sum(axis=(0, 2, 3)) / weights.sum(axis=(0, 2, 3))
    np.testing.assert_allclose(of_op.weight, share, atol=1e-5)
    assert np.all(share < 0.999)
    np.testing.assert_allclose(of_op.keys, (visible * shown).sum(axis=(0, 2, 3)) / LENGTH)


def test_no_choice_of_so_many_keys_shows_more_than_the_largest_weights():
    layer, rng = layer_of(dense.dense()), jax.random.key(0)
    logits = np.einsum("btnh,bsnh->nts", *(np.asarray(x, float) for x in (layer.q, layer.k)))
    weight = np.exp(logits / np.sqrt(8)) * np.tril(np.ones((LENGTH, LENGTH)))
    weight = np.sort(weight / weight.sum(axis=-1, keepdims=True), axis=-1)
    of_best = coverage.found(5, layer, rng)
    np.testing.assert_allclose(
        of_best.weight, weight[..., -5:].sum(axis=(1, 2)) / LENGTH, rtol=1e-5
    )
    np.testing.assert_allclose(of_best.keys, np.minimum(np.arange(LENGTH) + 1, 5).mean())
    assert np.all(coverage.found(10 * LENGTH, layer, rng).weight > 0.99999)


def test_heads_that_share_keys_are_read_apart():
    """Attention of 4 heads of queries and 2 of keys shows each its own."""
    model = TransformerLM(
        vocab_size=16,
        d_model=16,
        d_ff=16,
        n_heads=4,
        n_kv_heads=2,
        n_layers=1,
        attention_type=dense.dense(),
        dropout=0.0,
        mode="eval",
    )
    tokens, rng = jax.random.randint(jax.random.key(1), (1, 24), 1, 16), jax.random.key(0)
    params = plain.init(model, tokens.shape)
    (layer,) = coverage.layers(model, params, tokens, rng)
    assert layer.k.shape == layer.q.shape and np.array_equal(layer.k[:, :, 0], layer.k[:, :, 1])
    of_best = coverage.found(3, layer, rng)
    assert len(set(of_best.weight.tolist())) == 4 and np.all(of_best.weight < 0.999)


def test_what_an_op_cannot_show_is_said():
    rng = jax.random.key(0)
    with pytest.raises(NotImplementedError, match="has weights of its own"):
        coverage.found(linformer.linformer(), layer_of(dense.dense()), rng)
    with pytest.raises(NotImplementedError, match="makes its keys of the queries"):
        coverage.found(shared_qk.shared_qk(), layer_of(dense.dense()), rng)
    with pytest.raises(NotImplementedError, match="has projections of its own"):
        coverage.found(nsa.nsa(compression="mean"), layer_of(dense.dense()), rng)
    with pytest.raises(NotImplementedError, match="makes no attention weights"):
        coverage.found(linear.linear(), layer_of(dense.dense()), rng)


@pytest.mark.slow
def test_what_an_op_carries_sees_the_layer_first():
    """Centroids begin at random, and become those of the layer's vectors."""
    layer, rng = layer_of(dense.dense()), jax.random.key(0)
    op = routing.routing(n_clusters=4, decay=0.5)
    began = op.init(rng, op.dims(layer.q, layer.q))["centroids"].value
    moved = coverage.own_weights(op, layer, rng)["centroids"].value
    x = np.concatenate([layer.q, layer.k], axis=1)[0]
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)

    def nearness(centroids):
        return np.einsum("tnh,nch->tnc", x, centroids).max(axis=-1).mean()

    assert nearness(moved) > nearness(began) + 0.05
    (share, _), (everything, _) = (
        coverage.found(op, layer, rng) for op in (op, routing.routing(n_clusters=1))
    )
    assert np.all(share < 0.999)
    np.testing.assert_allclose(everything, 1, rtol=1e-5)


@pytest.mark.slow
def test_nsa_shows_the_blocks_that_it_selects_and_its_window():
    sizes = dict(compress_len=4, compress_stride=2, block_size=4, n_selected=3, window=6)
    op = nsa.nsa(**sizes, compression="mean", independent_kv=False)
    layer, rng = layer_of(dense.dense()), jax.random.key(0)
    options = dict(segment_ids=None, causal=True, rng=rng, train=False)
    chosen = np.asarray(op.plan((), layer.q, layer.k, **options))
    query, key = np.ogrid[:LENGTH, :LENGTH]
    shown = (chosen[..., None] == key[0] // 4).any(axis=-2) | (query - key < 6)
    shown = shown & (key <= query)
    of_op = coverage.found(op, layer, rng)
    np.testing.assert_allclose(of_op.keys, shown.sum(axis=(0, 2, 3)) / LENGTH)
    assert np.all(of_op.weight < 0.999)


@pytest.mark.slow
def test_an_indexer_learns_from_the_layer_first(monkeypatch):
    layer, rng, shares = layer_of(dense.dense()), jax.random.key(0), []
    for n in (1, coverage.N_LEARNT):
        monkeypatch.setattr(coverage, "N_LEARNT", n)
        of_op = coverage.found(dsa.dsa(top_k=6, n_index_heads=2, d_index=8), layer, rng)
        np.testing.assert_allclose(of_op.keys, np.minimum(np.arange(LENGTH) + 1, 6).mean())
        shares.append(of_op.weight.mean())
    assert shares[1] > shares[0] + 0.02


def test_lines_between_points():
    points = [(16.0, 0.75), (4.0, 0.25)]
    assert coverage.at_equal_keys(points, [2, 4, 7, 16, 20]) == {4: 0.25, 7: 0.375, 16: 0.75}


@pytest.mark.slow
def test_recall_of_a_run(tmp_path, capsys, monkeypatch):
    """Dense attention shows all of itself; hashing shows no more than it sees."""
    run_folder.write(tmp_path / "run", BYTES, random_params(BYTES), {}, "A note.")
    (tmp_path / "text").write_text("one line of a text.\n" * 500)
    hashing = [smyrf.smyrf(chunk_len=8, n_hashes=n) for n in (1, 4)]
    ops = {"dense": [dense.dense()], "smyrf": hashing, "lsh": [lsh.lsh()]}
    monkeypatch.setattr(recall, "N_KEYS", (4, 8))
    monkeypatch.setattr(recall, "OPS", {recall.LARGEST: [4, 16]} | ops | {"left out": [None]})
    flags = [f"--run={tmp_path / 'run'}", f"--data_dir={tmp_path / 'text'}", "--length=64"]
    recall.main([*flags, "--sequences=1", "--only", recall.LARGEST, *ops])
    printed = capsys.readouterr().out
    assert re.search(r"\| 4 largest weights \| 3\.9 \| 0\.\d+ \| ", printed)
    assert "| `dense()` | 32.5 | 1.000 | 1.000 | 1.000 |" in printed
    shares = re.findall(r"`smyrf\(chunk_len=8.*\)` \| [\d.]+ \| (0\.\d+)", printed)
    assert 0 < float(shares[0]) < float(shares[1]) < 1
    assert "| `lsh()` | Unsupported: lsh() makes its keys of the queries" in printed
    equal = printed.partition("weight at equal numbers of keys")[2]
    assert re.search(r"\n\| `smyrf` \| - \| 0\.\d+ \|", equal) and "`lsh`" not in equal

"""The share of a model's attention weight that an op's plan covers: `benchmarks.recall --run`."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import recall
from benchmarks.harness import choices, coverage
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.models import TransformerLM
from reformax.ops import dense, dsa, linear, linformer, local, lsh, nsa, routing, shared_qk, smyrf
from reformax.ops.indexing.candidates import Coded, Pooled
from reformax.ops.numerics.normalization import length_normalize
from tests.convert.test_command import random_params
from tests.layers import plain
from tests.ops.rows import ROWS, Shape, except_self
from tools import described

LENGTH = 40


def spec_of(op):
    sizes = dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=4)
    ops = [Op("local", dict(chunk_len=4)), op]
    return Spec.make("TransformerLM", ops, **sizes, vocab_size=256)


BYTES = spec_of(Op("dense", {}))


def layer_of(op, n_heads=2):
    q, k = np.random.default_rng(1).normal(scale=3, size=(2, 1, LENGTH, n_heads, 8))
    q, k = q.astype(np.float32), k.astype(np.float32)
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
    plan = jax.jit(lambda q, k: op.plan((), q, k, **options))(q, k)
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


INDEXED = TransformerLM(
    vocab_size=16,
    d_model=16,
    d_ff=16,
    n_heads=4,
    n_layers=4,
    attention_type=(local.local(chunk_len=4), dsa.dsa(top_k=6, n_index_heads=2, d_index=8)),
    dropout=0.0,
    mode="eval",
)


def watched():
    """`INDEXED`, whose second and fourth layer are read."""
    near, far = INDEXED.attention_type
    return dataclasses.replace(INDEXED, attention_type=(near, coverage._watched(far, [])))


@pytest.mark.slow
def test_a_layer_has_the_weights_of_its_repeat():
    tokens, rng = jax.random.randint(jax.random.key(1), (1, 24), 1, 16), jax.random.key(0)
    params = plain.init(INDEXED, tokens.shape)
    layers = coverage.layers(INDEXED, params, tokens, rng, (dsa.dsa,))
    assert [layer.number for layer in layers] == [1, 3]
    stacked = params["stack"]["block_1"]["attention"]["op"]
    for repeat, layer in enumerate(layers):
        for name in ("query", "key", "weight"):
            assert np.array_equal(layer.params[name], stacked[name][repeat])
    assert not np.array_equal(layers[0].q, layers[1].q)


def compile_read():
    """Compiles the program that reads layers, for a GPU."""
    gpu = described.GPUS["h200"]
    (device,) = described.devices(gpu)
    with described.assumed(gpu):
        model = dataclasses.replace(watched(), scan_layers=False)
        shapes = jax.eval_shape(
            lambda: (
                model.init_params(jax.random.key(0), (1, 64)),
                jnp.zeros((1, 64), jnp.int32),
                jax.random.key(0),
            )
        )
        whole = jax.sharding.SingleDeviceSharding(device)
        params, tokens, rng = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
        )
        lowered = jax.jit(model.features).lower(params, tokens, rng=rng)
        assert "python_gpu_callback" in lowered.as_text()
        lowered.compile(compiler_options=described.OPTIONS)


@pytest.mark.slow
def test_what_reads_layers_compiles_for_a_gpu():
    """Of a callback that takes slices of a stack's weights XLA makes a fusion with a token.

    There it aborts: "Check failed: shape.IsArray() || shape.IsTuple()".
    """
    try:
        described.devices(described.GPUS["h200"])
    except NotImplementedError as error:
        pytest.skip(str(error))
    script = "from tests.test_coverage import compile_read as run; run()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_callback_takes_queries_and_keys_alone():
    """Weights are slices of a stack's, see the test above."""
    params = jax.eval_shape(lambda: INDEXED.init_params(jax.random.key(0), (1, 24)))
    shapes = params, jax.ShapeDtypeStruct((1, 24), jnp.int32)
    program = str(jax.make_jaxpr(watched().features)(*shapes, rng=jax.random.key(0)))
    taken = re.findall(r"debug_callback\[.*?\]((?: \w+)+)", program, re.DOTALL)
    assert taken and {len(names.split()) for names in taken} == {2}


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


def indexed_layer():
    op = dsa.dsa(top_k=6, n_index_heads=2, d_index=8)
    layer = layer_of(op)
    return layer._replace(params=op.init(jax.random.key(3), op.dims(layer.q, layer.q)))


def test_the_share_of_candidates_is_that_of_the_exact_choice_and_of_the_weight():
    """Against sets, and weights in NumPy; a block is the query's own, and the best other one."""
    layer, rng = indexed_layer(), jax.random.key(0)
    found = choices.choice(Pooled(block_sizes=(4,), n_blocks=1), layer, rng, repeats=1)
    assert found.times.ms > 0

    logits = np.einsum("btnh,bsnh->nts", *(np.asarray(x, float) for x in layer[2:4])) / np.sqrt(8)
    logits = np.where(np.tril(np.ones((LENGTH, LENGTH))), logits, -np.inf)
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    options = dict(segment_ids=None, causal=True, rng=rng, train=False)
    plans = [
        choices.with_candidates(layer.op, x).plan(layer.params, *layer[2:4], **options)[0]
        for x in (None, Pooled(block_sizes=(4,), n_blocks=1))
    ]
    wanted, chosen = ([set(np.asarray(row)) - {-1} for row in plan] for plan in plans)
    at = np.linspace(0, LENGTH - 1, choices.N_QUERIES).astype(int)
    recall = np.mean([len(wanted[t] & chosen[t]) / len(wanted[t]) for t in at])
    weight = np.mean([weights[:, t, list(chosen[t])].sum(axis=-1).mean() for t in at])
    np.testing.assert_allclose(
        found[1:], (recall, weight, np.mean([len(chosen[t]) for t in at])), rtol=1e-5
    )
    assert 0.4 < found.recall < 0.99


def test_all_candidates_are_the_exact_choice():
    layer, rng = indexed_layer(), jax.random.key(0)
    exact, every = (
        choices.choice(x, layer, rng, repeats=1) for x in (None, Pooled(block_sizes=(4,)))
    )
    assert exact.recall == every.recall == 1 and exact[1:] == every[1:]


@pytest.mark.parametrize(
    "flags, error",
    [
        ("--candidates exact", "--candidates is ['exact'], which is not read without --run"),
        ("--length 64", "--length is 64, which is not read without --run"),
        ("--run=x --candidates exact --only lsh", "--only is ['lsh'], which is not read with --ca"),
        ("--run=x --repeats 9", "--repeats is 9, which is not read without --candidates"),
    ],
)
def test_recall_refuses_flags_that_it_does_not_read(flags, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        recall.main(flags.split())
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_candidates_of_a_run(tmp_path, capsys, monkeypatch):
    spec = spec_of(Op("dsa", dict(top_k=8, n_index_heads=2, d_index=8)))
    run_folder.write(tmp_path / "run", spec, random_params(spec), {}, "A note.")
    (tmp_path / "text").write_text("one line of a text.\n" * 500)
    kinds = {recall.EXACT: [None], "coded": [Coded(n_bits=16, n_best=n) for n in (8, 40)]}
    monkeypatch.setattr(recall, "CANDIDATES", kinds)
    flags = [f"--run={tmp_path / 'run'}", f"--data_dir={tmp_path / 'text'}", "--length=64"]
    recall.main([*flags, "--candidates", *kinds, "--sequences=1", "--repeats=1"])
    printed = capsys.readouterr().out
    assert re.search(r"\| exact \| [\d.]+ \| - \| 1\.000 \| 0\.\d+ \| - \| 8 \|", printed)
    shares = re.findall(r"`Coded.*` \| [\d.]+ \| [\d.]+ \| (0\.\d+)", printed)
    assert 0 < float(shares[0]) < float(shares[1]) <= 1

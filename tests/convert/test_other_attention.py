"""Other attention in the place of dense layers: the weights, the bits that it costs, refusals."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

import evaluate
from reformax.convert import __main__ as command
from reformax.convert import other_attention, run_folder, trax_models
from reformax.convert.spec import Op, Spec
from reformax.models import designs
from tests.layers import plain

SIZES = dict(vocab_size=256, d_model=16, d_ff=16, n_heads=4, init_std=0.3)
SIZES |= dict(d_attention_key=4, d_attention_value=4)


# As Hugging Face's GPT-2, so that attention is what it has no format for.
GPT2 = dict(attention_bias=True, tie_embeddings=True, ff_activation="gelu_tanh", dropout=0.0)
GPT2 |= dict(pos_type="axial", pos_axial_shape=(1024,), pos_d_axial_embs=(16,), ff_dropout=0.0)


def dense_model(n_layers=4, cycle=("dense",), **options):
    cycle = [Op(name, {}) for name in cycle]
    spec = Spec.make("TransformerLM", cycle, **SIZES, n_layers=n_layers, **options)
    return spec, plain.init(spec.build(), (1, 8))


def logits(spec, params, length=96):
    tokens = np.random.default_rng(0).integers(0, 256, (1, length)).astype(np.int32)
    return np.asarray(jax.jit(spec.build().apply)(params, tokens, jax.random.key(1)))


# Each sees all keys: one chunk, or all blocks.
WHOLE = {
    "asymmetric_lsh": "asymmetric_lsh(chunk_len=128)",
    "moba": "moba(block_size=32, top_k=4)",
    "memory_efficient": "memory_efficient",
    "sinks": "sinks(window=128)",
    "dsa": "dsa(top_k=96)",
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("layers", ["0-3", "1,2", "3"])
def test_what_sees_all_keys_is_the_dense_model(name, layers):
    """Whatever layers it is in: weights move from places of the old cycle to those of the new."""
    spec, params = dense_model(n_kv_heads=2, pos_type="rotary")
    op = other_attention.op_of(WHOLE[name])
    new, changed = other_attention.replaced(
        spec, params, op, other_attention.layers_of(layers, spec, op)
    )
    numbers = other_attention.layers_of(layers, spec, op)
    names = [op.name for *_, op in new.layers()]
    assert names == [name if i in numbers else "dense" for i in range(4)]
    np.testing.assert_allclose(logits(new, changed), logits(spec, params), atol=2e-4)


@pytest.mark.slow
def test_layers_of_a_cycle_keep_their_weights():
    spec, params = dense_model(n_layers=6, cycle=("local", "dense"))
    op = other_attention.op_of(WHOLE["moba"])
    assert other_attention.layers_of(None, spec, op) == [1, 3, 5]
    new, changed = other_attention.replaced(spec, params, op, [3])
    names = [op.name for *_, op in new.layers()]
    assert names == ["local", "dense", "local", "moba", "local", "dense"]
    np.testing.assert_allclose(logits(new, changed), logits(spec, params), atol=2e-4)
    assert len(other_attention.replaced(spec, params, op, [1, 3, 5])[0].attention) == 2


def test_layers_without_rotary_positions_stay_so():
    """And those without norms of their input."""
    places = ("input", "output")
    design = designs.Design(
        rotary_layers=(True, False), norm="rms", norm_place=places, ff_gated=True
    )
    spec, params = dense_model(cycle=("dense", "dense"), pos_type="rotary", design=design)
    op = other_attention.op_of(WHOLE["moba"])
    new, _ = other_attention.replaced(spec, params, op, [0, 1, 2, 3])
    assert new.design.rotary_layers == (True, False) and new.design.norm_place == places
    new, changed = other_attention.replaced(spec, params, op, [1])
    assert new.design.rotary_layers == (True, False) * 2
    assert new.design.norm_place == places * 2
    np.testing.assert_allclose(logits(new, changed), logits(spec, params), atol=2e-4)


def test_one_place_of_norms_in_a_sequence_is_that_of_all_layers():
    """As of an OLMo Hybrid without recurrences."""
    spec, params = dense_model(design=designs.Design(norm="rms", norm_place=("output",)))
    new, changed = other_attention.replaced(spec, params, other_attention.op_of(WHOLE["moba"]), [1])
    assert new.design.norm_place == ("output",) * 4
    assert jax.tree.structure(new.shapes()) == jax.tree.structure(changed)


def test_a_shared_projection_is_the_mean_of_both():
    spec, params = dense_model(n_layers=2, attention_bias=True)
    op = other_attention.op_of("lsh(chunk_len=16)")
    _, changed = other_attention.replaced(spec, params, op, [1])
    old, new = params["stack"]["block_0"]["attention"], changed["stack"]["block_1"]["attention"]
    np.testing.assert_allclose(new["w_q"][0], (old["w_q"][1] + old["w_k"][1]) / 2, rtol=1e-6)
    assert "w_k" not in new and "b_k" not in new
    first = changed["stack"]["block_0"]["attention"]
    np.testing.assert_array_equal(first["w_k"][0], old["w_k"][0])


@pytest.mark.slow
def test_bits_are_those_of_the_models():
    """Of all layers, of each alone and by the hashes, as plain log-softmax has them."""
    spec, params = dense_model(n_layers=2)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 80)).astype(np.int32)
    lines = []

    def bits_of(op, layers):
        new = other_attention.replaced(spec, params, op, layers) if layers else (spec, params)
        model = new[0].build()
        found = [model.apply(new[1], row[None], jax.random.key(0))[0] for row in tokens]
        log_p = np.asarray(jax.nn.log_softmax(np.stack(found)))
        return -np.take_along_axis(log_p, tokens[..., None], -1).mean() / math.log(2)

    op = Op("asymmetric_lsh", {"chunk_len": 16, "n_hashes": 2})
    found = other_attention.measure(spec, params, op, [0, 1], tokens, lines.append)
    assert found["before"] == pytest.approx(bits_of(op, []), abs=1e-4)
    assert found["after"] == pytest.approx(bits_of(op, [0, 1]), abs=1e-4)
    assert found["by_layer"]["1"] == pytest.approx(bits_of(op, [1]), abs=1e-4)
    assert list(found["by_n_hashes"]) == ["1", "2", "4", "8"]
    more = Op("asymmetric_lsh", {"chunk_len": 16, "n_hashes": 8})
    assert found["by_n_hashes"]["8"] == pytest.approx(bits_of(more, [0, 1]), abs=1e-4)
    assert abs(found["after"] - found["before"]) > 1e-3
    # Keys and values in float32; hashing keeps more.
    assert found["cache_bytes"]["before"] == 2 * 2 * 80 * 4 * 4 * 4
    assert found["cache_bytes"]["after"] > found["cache_bytes"]["before"]
    assert [line.partition(":")[0] for line in lines] == [
        "bits of a token",
        "caches of a text of 80 tokens",
        "layer 0 alone",
        "layer 1 alone",
        "by n_hashes",
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `gpt2` and `grouped`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("gpt2", GPT2), ("grouped", dict(n_kv_heads=2))):
        spec, params = dense_model(n_layers=2, **options)
        run_folder.write(folder / name, spec, params, {}, "a test")
    (folder / "text.txt").write_text("a text of some words, " * 300)
    return folder


@pytest.fixture
def run(runs, tmp_path, monkeypatch, call):
    """Calls the command in a copy of that folder."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return lambda *flags: call(lambda: command.main(flags))


HASHED = "--from=gpt2", "--to=hashed", "--attention=moba(block_size=32)", "--layers=1"
SCORED = "--data_dir=text.txt", "--length=256"


def test_a_run_with_other_attention_is_scored(run, tmp_path, monkeypatch):
    monkeypatch.setattr(other_attention, "_BUDGETS", {"top_k": (2,)})
    code, out, err = run(*HASHED, *SCORED, "--tokens=5200")
    assert code == 0, err
    assert "with moba(block_size=32) in 1 layers (20 rows of 256)" in out
    assert "by top_k: 2: " in out
    read = run_folder.read(tmp_path / "hashed")
    assert [op.name for op in read.spec.attention] == ["dense", "moba"]
    assert read.source["changed"]["layers"] == [1]
    # What it is now has no format elsewhere.
    code, _, err = run("--from=hashed", "--to=hugging_face")
    assert code == 2 and "the attention is moba" in err
    with pytest.raises(ValueError, match="the attention is moba, expected one of dense, flash"):
        trax_models.table(
            Spec.make("ReformerLM", read.spec.attention, vocab_size=256, pos_type="none")
        )


@pytest.mark.slow
def test_its_score_is_that_of_an_evaluation_and_dense_layers_come_back(
    run, tmp_path, monkeypatch, call
):
    monkeypatch.setattr(other_attention, "_BUDGETS", {"top_k": (2,)})
    code, _, err = run(*HASHED, *SCORED)
    assert code == 0, err
    bits = run_folder.read(tmp_path / "hashed").source["changed"]["bits"]
    flags = "--output_dir=hashed", "--split=train", "--tokens=4096", "--quiet"
    code, _, err = call(evaluate.main, *flags, *SCORED)
    assert code == 0, err
    scored = json.loads((tmp_path / "hashed" / "evaluation_train.json").read_text())
    assert scored["bits_per_dim"] == pytest.approx(bits["after"], rel=0.02)  # other rows
    code, out, err = run("--from=hashed", "--to=back", "--attention=dense", *SCORED)
    assert code == 0 and "with dense() in 1 layers" in out, err
    back, first = run_folder.read(tmp_path / "back"), run_folder.read(tmp_path / "gpt2")
    np.testing.assert_array_equal(logits(back.spec, back.params), logits(first.spec, first.params))


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--attention=lsh"],
            "--attention=lsh shares queries and keys, and the model has 2 heads of",
        ),
        (["--attention=nsa"], "--attention=nsa: expected one of local, lsh, "),
        (["--attention=dense"], "--attention=dense needs layers of asymmetric_lsh or dsa or "),
        (
            ["--attention=flash", "--layers=1"],
            "layer 1 is dense, expected asymmetric_lsh or dsa or",
        ),
        (["--attention=moba(top=2)"], "moba has no option top, only "),
        (["--attention=moba(top_k=0)"], "top_k is 0: expected"),
        (["--attention=moba(top_k=x)"], "expected a name and options, such as 'asymm"),
        (["--attention=moba(top_k={[]:1})"], "expected a name and options, such as 'asymm"),
        (["--attention=moba(top_k=1, top_k=2)"], "expected a name and options, such as 'asymm"),
        (["--attention=moba", "--layers=0,1-0"], "--layers=0,1-0: expected 0-1 instead of 1-0"),
        (["--attention=moba", "--layers=0-9999999999"], "the model has layers 0 to 1"),
        (["--attention=moba", "--layers=2"], "--layers=2: the model has layers 0 to 1"),
        (["--attention=moba", "--layers=first"], "--layers=first: expected numbers and ranges"),
        (["--attention=moba", "--data_dir=few"], "--data_dir=few has 3 tokens: expected at least"),
        (
            ["--attention=moba", "--data_dir=text.txt", "--length=9999"],
            "--data_dir=text.txt has 6600 tokens: expected at least 9999",
        ),
        (["--from=gpt2", "--attention=moba", "--length=2048"], "the model has positions for 1024"),
        (["--layers=1"], "--layers is 1: it goes with --attention alone"),
        (["--tokens=9"], "--tokens is 9: it goes with --attention alone"),
    ],
)
def test_wrong_flags(run, tmp_path, flags, words):
    (tmp_path / "few").write_text("few")
    code, _, err = run("--from=grouped", "--to=new", *flags)
    assert code in (1, 2) and words in err, err
    assert not (tmp_path / "new").exists()


def test_an_indexer_is_drawn_and_leaves_with_its_algorithm():
    """Each layer has weights of its own, by which it already finds more than chance would."""
    spec, params = dense_model(n_kv_heads=2)
    op = other_attention.op_of("dsa(top_k=8)")
    new, changed = other_attention.replaced(spec, params, op, [1, 2])
    keys = [changed["stack"][f"block_{i}"]["attention"]["op"]["key"] for i in (1, 2)]
    assert not np.allclose(*keys)
    dense = other_attention.op_of("dense")
    assert other_attention.layers_of(None, new, dense) == [1, 2]
    back, weights = other_attention.replaced(new, changed, dense, [1, 2])
    assert back == spec
    jax.tree.map(np.testing.assert_array_equal, weights, params)


def test_an_algorithm_with_weights_of_its_own_is_refused():
    spec, params = dense_model(n_layers=1)
    op = Op("moba", {"scale_by_length": 0.1, "learn_scale_by_length": True})
    with pytest.raises(ValueError, match="moba has weights of its own, such as stack.*length_fac"):
        other_attention.replaced(spec, params, op, [0])


@pytest.mark.parametrize(
    "options", [dict(pos_type="rotary_local"), dict(design=designs.Design(rotary_local_base=5.0))]
)
def test_a_window_that_would_rotate_otherwise_is_refused(options):
    cycle = ("dense", "local")
    spec, params = dense_model(n_layers=2, cycle=cycle, **(dict(pos_type="rotary") | options))
    with pytest.raises(ValueError, match="by which layer 0 was not trained: take sinks"):
        other_attention.replaced(spec, params, other_attention.op_of("local"), [0])
    other_attention.replaced(spec, params, other_attention.op_of("sinks"), [0])


def test_what_a_dense_layer_does_to_logits_is_kept_or_refused():
    spec = Spec.make("TransformerLM", [Op("flash", {"soft_cap": 2.0})], **SIZES, n_layers=1)
    params = plain.init(spec.build(), (1, 8))
    new, changed = other_attention.replaced(spec, params, other_attention.op_of("moba"), [0])
    assert new.attention[0].options == {"soft_cap": 2.0}
    np.testing.assert_allclose(logits(new, changed), logits(spec, params), atol=2e-4)
    other = Spec.make("TransformerLM", [Op("flash", {"scale": 0.1})], **SIZES, n_layers=1)
    with pytest.raises(ValueError, match="--attention=moba has no option scale, which the dense"):
        other_attention.replaced(other, params, other_attention.op_of("moba"), [0])

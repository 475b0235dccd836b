"""Trax's gin files and run folders: read as data, by a table of Trax's names."""

import inspect
import shutil
import sys

import pytest

from reformax.cli import config, configs, parsed, train
from reformax.convert import __main__ as command
from reformax.convert import trax_files, trax_gin, trax_models
from reformax.layers import _trax
from tests.convert.test_command import random_params

# As Trax publishes them: imports, macros, comments, values over several lines.
PUBLISHED = """
import trax.layers
import trax.models
import trax.optimizers
import trax.data.inputs
import trax.supervised.trainer_lib

# Parameters that will vary between experiments:
# ==============================================================================
train.model = @trax.models.ReformerLM
attn_type = [
  @trax.layers.SelfAttention,
  @trax.layers.LSHSelfAttention,
]
n_layers = 4

# Parameters for the learning rate:
multifactor.constant = 0.5
multifactor.factors = 'constant * linear_warmup * rsqrt_decay'
Adafactor.beta1 = 0.0

# Parameters for SelfAttention:
trax.layers.SelfAttention.attention_dropout = 0.0
trax.layers.SelfAttention.chunk_len = 4
trax.layers.SelfAttention.n_chunks_before = 1
trax.layers.SelfAttention.n_parallel_heads = 1

# Parameters for LSHSelfAttention:
LSHSelfAttention.chunk_len = 8
LSHSelfAttention.n_buckets = [2, 4]
LSHSelfAttention.n_hashes = 2
LSHSelfAttention.predict_drop_len = 128

# Parameters for ReformerLM:
ReformerLM.attention_type = %attn_type
ReformerLM.d_attention_key = 4
ReformerLM.d_attention_value = 4
ReformerLM.d_model = 8
ReformerLM.d_ff = 12
ReformerLM.dropout = 0.2
ReformerLM.ff_activation = @trax.layers.Relu
ReformerLM.n_heads = 2
ReformerLM.n_layers = %n_layers
ReformerLM.max_len = 64
ReformerLM.vocab_size = 20
ReformerLM.pos_type = 'fixed'
ReformerLM.pos_axial_shape = (8, 8)
ReformerLM.pos_d_axial_embs = (3, 5)
ReformerLM.mode = 'train'
"""
# What a run of Trax leaves: gin's operative config, here without the vocabulary's size.
LEFT = """
# Parameters for ReformerLM:
# ==============================================================================
ReformerLM.attention_type = @LSHSelfAttention
ReformerLM.d_model = 8
ReformerLM.d_ff = 12
ReformerLM.d_attention_key = 4
ReformerLM.d_attention_value = 4
ReformerLM.n_layers = 1
ReformerLM.n_heads = 2
ReformerLM.max_len = 64
LSHSelfAttention.n_hashes = 2
LSHSelfAttention.n_buckets = 4
LSHSelfAttention.chunk_len = 8
train.steps = 100
"""
DENSE = """
TransformerLM.d_model = 8
TransformerLM.d_ff = 12
TransformerLM.n_layers = 2
TransformerLM.n_heads = 2
TransformerLM.max_len = 32
TransformerLM.vocab_size = 20
"""


@pytest.fixture
def answer(call, monkeypatch, tmp_path):
    """Runs a command in a folder of its own: `(exit code, stdout and stderr)`."""
    monkeypatch.chdir(tmp_path)

    def run(main, *flags):
        code, out, err = call(main, *flags)
        return code, out + err

    return run


def spec_of(folder, text, vocab_size=None):
    (folder / "config.gin").write_text(text)
    return trax_gin.read(folder / "config.gin", vocab_size)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return trax_run(tmp_path_factory.mktemp("left") / "trax", LEFT)


def trax_run(folder, text, vocab_size=20):
    """A run's folder as Trax leaves it."""
    folder.mkdir()
    spec = spec_of(folder, text, vocab_size).spec
    length = trax_models.length_of(spec)
    trax_models.write_params(folder / "model.pkl.gz", spec, random_params(spec), length)
    return folder


def test_a_published_config(tmp_path):
    spec, notes = spec_of(tmp_path, PUBLISHED)
    local, lsh = spec.attention
    assert (local.name, local.option("chunk_len")) == ("local", 4)
    assert (lsh.name, lsh.option("n_buckets"), lsh.option("n_hashes")) == ("lsh", (2, 4), 2)
    wanted = {"d_model": 8, "n_layers": 4, "dropout": 0.2, "ff_activation": "relu", "n_heads": 2}
    wanted |= {"vocab_size": 20, "pos_type": "axial", "pos_axial_shape": (8, 8)}
    assert wanted.items() <= spec.arguments.items()
    (note,) = notes
    assert "multifactor.constant" in note and "Adafactor.beta1" in note and "d_model" not in note
    assert trax_models.notes(spec) == []


@pytest.mark.parametrize("name", ["ReformerLM", "TransformerLM"])
def test_defaults_are_traxs(name, tmp_path):
    trax, tl = _trax.trax, _trax.tl
    model = getattr(trax.models, name)
    theirs = {k: p.default for k, p in inspect.signature(model).parameters.items()}
    spec = spec_of(tmp_path, f"{name}.vocab_size = 20\n").spec
    same = ["d_model", "d_ff", "n_layers", "n_heads", "dropout"]
    if name == "ReformerLM":
        same += ["d_attention_key", "d_attention_value", "ff_chunk_size"]
        assert theirs["attention_type"] is tl.SelfAttention and not theirs["pos_type"]
    assert {k: theirs[k] for k in same} == {k: spec.arguments[k] for k in same}
    assert spec.arguments["pos_axial_shape"] == (theirs["max_len"],)
    activation = {"relu": tl.Relu, "gelu_tanh": tl.FastGelu}[spec.arguments["ff_activation"]]
    assert theirs["ff_activation"] is activation and [op.name for op in spec.attention] == ["dense"]
    assert theirs.keys() <= {
        *(*trax_gin._SAME[name], *trax_gin._READ[name], *trax_gin._ONLY, *trax_gin._TRAINING)
    }


def test_defaults_of_attention_are_traxs(tmp_path):
    tl = _trax.tl
    for name in ("SelfAttention", "LSHSelfAttention"):
        theirs = inspect.signature(getattr(tl, name).__init__).parameters
        text = f"ReformerLM.vocab_size = 20\nReformerLM.attention_type = @{name}\n"
        text += "SelfAttention.chunk_len = 16\n"
        (op,) = spec_of(tmp_path, text).spec.attention
        for option in ("n_chunks_before", "n_chunks_after"):
            assert op.option(option) == theirs[option].default
        if name == "LSHSelfAttention":
            assert op.option("chunk_len") == theirs["chunk_len"].default
            assert op.option("n_hashes") == theirs["n_hashes"].default
            assert theirs["n_buckets"].default is None and op.option("n_buckets") == "auto"


@pytest.mark.parametrize("text", [LEFT, DENSE, PUBLISHED], ids=["left", "dense", "published"])
def test_a_run_of_trax_becomes_a_run_here(text, answer, tmp_path):
    trax_run(tmp_path / "trax", text)
    code, said = answer(command.main, "--from=trax", "--to=here")
    assert code == 0 and "Trax's own model" in said
    assert "left out: " in said or text == DENSE
    model = "TransformerLM" if text == DENSE else "ReformerLM"
    assert f"loop.train.model = @lm.{model}" in (tmp_path / "here/config.gin").read_text()


@pytest.mark.slow
def test_weights_beside_their_config_or_with_one_given(answer, tmp_path):
    run = trax_run(tmp_path / "trax", LEFT)
    assert answer(command.main, "--from=trax/model.pkl.gz", "--to=a")[0] == 0
    (run / "config.gin").rename(tmp_path / "mine.gin")
    code, said = answer(command.main, "--from=trax", "--to=b")
    assert code == 2 and "trax is a run of Trax's and has no config.gin: copy it" in said
    flags = ["--from=trax/model.pkl.gz", "--config_file=mine.gin", "--to=b"]
    assert answer(command.main, *flags)[0] == 0
    (run / "model.pkl.gz").unlink()
    (tmp_path / "mine.gin").rename(run / "config.gin")
    code, said = answer(command.main, "--from=trax", "--to=c")
    assert code == 2 and "trax is a run of Trax's and has no model.pkl.gz: copy it" in said


def test_without_trax_it_converts_and_names_the_extra(answer, tmp_path, monkeypatch):
    trax_run(tmp_path / "trax", LEFT)
    monkeypatch.setattr(trax_files, "HAS_TRAX", False)
    for module, name in ((trax_files, "ShapeDtype"), (trax_models, "trax"), (trax_models, "tl")):
        monkeypatch.setattr(module, name, _trax._Absent("trax"))
    monkeypatch.setattr(trax_models, "ShapeDtype", _trax._Absent("trax.shapes"))
    code, said = answer(command.main, "--from=trax", "--to=here")
    assert code == 0 and "not installed: pip install 'reformax[trax]'" in said
    code, said = answer(command.main, "--from=here", "--to=back.pkl.gz")
    assert code == 1 and said.rstrip().endswith("pip install 'reformax[trax]'"), said


@pytest.mark.parametrize(
    "line, message",
    [
        ("ReformerLM.ff_use_sru = 2", "ReformerLM.ff_use_sru is 2"),
        ("ReformerLM.ff_sparsity = 4", "ReformerLM.ff_sparsity is 4"),
        ("ReformerLM.attention_chunk_size = 8", "attention_chunk_size is 8"),
        ("ReformerLM.pos_type = 'time-bin'", "pos_type is 'time-bin'"),
        ("ReformerLM.ff_activation = @trax.layers.Tanh", "ff_activation is @trax.layers.Tanh"),
        ("ReformerLM.attention_type = @MixedLSHSelfAttention", "the attention @MixedLSH"),
        ("ReformerLM.attention_type = %none", "uses %none, which it does not set"),
        ("LSHSelfAttention.bias = True", "LSHSelfAttention.bias is True"),
        ("LSHSelfAttention.own = True", "LSHSelfAttention.own is True"),
        ("ReformerLM.n_things = 3", "ReformerLM.n_things is 3"),
        ("train.model = @trax.models.Reformer", "--config_file=reformer_wmt_ende.gin"),
        ("train.model = @trax.models.Transformer", "--config_file=transformer_wmt_ende.gin"),
        (
            "train.model = @trax.models.Reformer",
            "whose logits have a matrix of their own; here they are products with the embedding",
        ),
        ("train.model = @HourglassLM", "the model HourglassLM: expected ReformerLM or"),
        ("include 'other.gin'", "includes 'other.gin', which is not read"),
    ],
)
def test_what_has_no_counterpart_is_named(line, message, answer, left, tmp_path):
    shutil.copytree(left, tmp_path / "trax")
    with (tmp_path / "trax/config.gin").open("a") as file:
        file.write(line + "\n")
    code, said = answer(command.main, "--from=trax", "--to=here")
    assert code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "here").exists()


def test_scopes_and_nested_macros(tmp_path):
    text = LEFT.replace("@LSHSelfAttention", "[@a/LSHSelfAttention, @b/LSHSelfAttention]")
    text = text.replace("n_layers = 1", "n_layers = %depth") + "depth = %two\ntwo = 2\n"
    text += "a/LSHSelfAttention.n_hashes = 3\n"
    spec, _ = spec_of(tmp_path, text, 20)
    assert [op.option("n_hashes") for op in spec.attention] == [3, 2]
    assert spec.arguments["n_layers"] == 2


TRAINED = {
    LEFT: "whose ReformerLM is lm.ReformerLM here: train it with --config_file=reformer_enwik8.gin",
    PUBLISHED: "--config_file=reformer_enwik8.gin; `reformax convert --from=RUN_FOLDER` reads",
    DENSE: "--config_file=transformer_enwik8.gin",
    "import trax.models\ntrain.model = @trax.models.Transformer\n": "=transformer_wmt_ende.gin",
    "Reformer.d_model = 8\n": "=reformer_wmt_ende.gin",
    LEFT + "data_streams.dataset_name = 't2t_image_imagenet64'\n": "--config_file=images.gin",
    "import trax.models\ntrain.model = @MLP\n": "and has the model MLP: reformax has ReformerLM, ",
    "import trax.models\n": "and names no model: reformax has",
}


@pytest.mark.parametrize("text", TRAINED)
def test_training_one_names_what_is_here(text, answer, tmp_path, monkeypatch):
    (tmp_path / "theirs.gin").write_text(text)
    monkeypatch.setitem(sys.modules, "trax", None)  # nothing of it is imported
    code, said = answer(train.main, "--config_file=theirs.gin")
    assert code == 2 and "theirs.gin is a config of Trax" in said and TRAINED[text] in said
    assert said.count("\n") == 1


def test_every_config_that_is_named_is_here_and_none_of_ours_is_trax():
    from reformax.cli import trax_config

    for found in trax_config.MODELS.values():
        for name in (found.config, *found.by_word.values()):
            text = configs.find(name).read_text()
            config.parse([name])
            assert found.model.split(".")[1] in parsed.text(), (name, text[:80])
    for path in configs.FOLDER.rglob("*.gin"):
        assert not trax_gin.is_config(path)


def test_nothing_of_the_config_runs(answer, tmp_path):
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    trax_run(tmp_path / "trax", LEFT)
    text = (tmp_path / "trax/config.gin").read_text()
    (tmp_path / "trax/config.gin").write_text(f"import trax.models\nimport evil\n{text}")
    assert answer(command.main, "--from=trax", "--to=here")[0] == 0
    assert not (tmp_path / "ran").exists()

"""`python -m reformax.convert`, and the use of its output."""

import errno
import json
import math
import re

import jax
import numpy as np
import pytest

import evaluate
from reformax.convert import __main__ as command
from reformax.convert import check, hugging_face, run_folder, trax_files, trax_models
from reformax.convert.spec import Op, Spec
from reformax.models import designs
from reformax.training.checkpoint import Checkpoints
from reformax.training.step import TrainState

CIRCLE = dict(count_once=False, wrap=True, self_score=-1e5)
SIZES = dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=2)
ENWIK8_LIKE = Spec.make(
    "ReformerLM",
    [
        Op("local", dict(chunk_len=4)),
        Op("lsh", dict(chunk_len=8, n_hashes=2, n_buckets=4, pad_chunks=1) | CIRCLE),
    ],
    **SIZES,
    vocab_size=258,
    pos_type="axial",
    pos_axial_shape=(8, 16),
    pos_d_axial_embs=(3, 5),
    ff_activation="relu",
    norm_epsilon=1e-12,
)
GIN = """
from __gin__ import dynamic_registration
from reformax.models import lm
from reformax.ops import lsh
from reformax.training import loop
loop.train.model = @lm.ReformerLM
lm.ReformerLM.attention_type = @lsh.lsh()
lm.ReformerLM.vocab_size = 20
lm.ReformerLM.d_model = 8
lm.ReformerLM.d_ff = 12
lm.ReformerLM.d_attention_key = 4
lm.ReformerLM.d_attention_value = 4
lm.ReformerLM.n_layers = 1
lm.ReformerLM.n_heads = 2
lm.ReformerLM.pos_type = 'axial'
lm.ReformerLM.pos_axial_shape = (4, 8)
lm.ReformerLM.pos_d_axial_embs = (3, 5)
lsh.lsh.chunk_len = 4
lsh.lsh.n_hashes = 3
lsh.lsh.count_once = False
lsh.lsh.wrap = True
lsh.lsh.self_score = -1e5
lsh.lsh.rotations = None
lsh.lsh.n_hashes_eval = None
"""  # the last two as train.py writes them: the defaults of what is in use


def random_params(spec):
    model, rng = spec.build(), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    return jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), shapes)


def convert(call, source, target, *flags):
    return call(command.main, f"--from={source}", f"--to={target}", *flags)


def same_file(one, other):
    from safetensors.numpy import load_file

    one, other = (load_file(path / "model.safetensors") for path in (one, other))
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_hugging_face_to_a_run_that_is_scored_and_back(tmp_path, call):
    hugging_face.write(
        tmp_path / "hf", ENWIK8_LIKE, random_params(ENWIK8_LIKE), {"eos_token_id": 2}
    )
    code, out, err = convert(call, tmp_path / "hf", tmp_path / "run")
    assert (code, err) == (0, "") and "check: logits differ by at most 0," in out
    last = re.fullmatch(r"(\d+\.\d) s, at most ([\d,]+) MiB of the process.*", out.split("\n")[-2])
    assert 0 < float(last[1]) < 600 and 100 < int(last[2].replace(",", "")) < 100_000
    (tmp_path / "text").write_bytes(bytes(range(32, 96)) * 80)
    flags = [f"--output_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'text'}"]
    code, out, err = call(evaluate.main, *flags, "--length=32")
    result = json.loads((tmp_path / "run/evaluation_valid.json").read_text())
    assert code == 0 and "bits_per_dim: " in out and result["n_targets"] == 256
    # The model's task has the bytes at ids from 2 on.
    assert "text.text.offset = 2" in (tmp_path / "run/config.gin").read_text()
    code, out, err = convert(call, tmp_path / "run", tmp_path / "back")
    assert (code, err) == (0, "")
    same_file(tmp_path / "hf", tmp_path / "back")
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("hf", "back")]
    assert configs[0] == configs[1] and configs[0]["eos_token_id"] == 2


def test_the_length_of_a_runs_training_leaves_with_it(tmp_path, call):
    """That of a model that only came in is not one that it was trained on."""
    options = dict(pos_type="rotary", ff_dropout=0.0, vocab_size=256, design=designs.llama())
    spec = Spec.make("TransformerLM", [Op("flash", {})], **SIZES, **options)
    params = random_params(spec)
    folder = run_folder.write(tmp_path / "run", spec, params, {}, "A note.")
    assert run_folder.read(folder).length is None
    text = (folder / "config.gin").read_text().replace("length = 2048", "length = 65_536")
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, TrainState(np.int32(3), params, (), None), config=text)
    checkpoints.wait()
    code, _, err = convert(call, folder, tmp_path / "hf", "--step=3")
    assert (code, err) == (0, "")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["max_position_embeddings"] == 65_536


def test_a_run_without_its_config_has_it_in_the_checkpoint(tmp_path, call):
    run_folder.write(tmp_path / "run", ENWIK8_LIKE, random_params(ENWIK8_LIKE), {}, "A note.")
    (tmp_path / "run/config.gin").unlink()
    (tmp_path / "text").write_bytes(bytes(range(32, 96)) * 80)
    flags = [f"--output_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'text'}", "--length=32"]
    assert call(evaluate.main, *flags)[0] == 0
    assert not (tmp_path / "run/config.gin").exists()
    assert convert(call, tmp_path / "run", tmp_path / "hf")[0] == 0


@pytest.mark.slow
def test_trax_to_a_run_and_back(tmp_path, call):
    (tmp_path / "model.gin").write_text(GIN)
    from reformax.cli import config

    config.parse([str(tmp_path / "model.gin")])
    spec = Spec.of_config()
    trax_models.write_params(tmp_path / "model.pkl.gz", spec, random_params(spec), 32)
    flag = f"--config_file={tmp_path / 'model.gin'}"
    code, out, err = convert(call, tmp_path / "model.pkl.gz", tmp_path / "run", flag)
    assert (code, err) == (0, "") and "Trax's own model, 32 tokens" in out and "note" not in out
    code, out, err = convert(call, tmp_path / "run", tmp_path / "back.pkl.gz")
    assert (code, err) == (0, "") and "Trax's own model" in out
    before, after = (trax_files.read(tmp_path / x) for x in ("model.pkl.gz", "back.pkl.gz"))
    assert [w.tobytes() for w in before.weights] == [w.tobytes() for w in after.weights]


@pytest.mark.parametrize("option, value", [("wrap", False), ("count_once", True)])
@pytest.mark.parametrize("source, target", [("model.pkl.gz", "run"), ("run", "model.pkl.gz")])
def test_what_trax_lacks_is_refused_before_anything_is_written(
    source, target, option, value, tmp_path, call
):
    (tmp_path / "model.gin").write_text(GIN)
    from reformax.cli import config

    overrides = [f"lsh.lsh.{option}={value}"]
    if option == "count_once":
        overrides.append("lsh.lsh.wrap=False")
    config.parse([str(tmp_path / "model.gin")])
    spec = Spec.of_config()
    if source == "run":
        config.parse([str(tmp_path / "model.gin")], overrides)
        spec = Spec.of_config()
        run_folder.write(tmp_path / source, spec, random_params(spec), {}, "A note.")
        flags = []
    else:
        trax_models.write_params(tmp_path / source, spec, random_params(spec), 32)
        flags = [f"--config_file={tmp_path / 'model.gin'}", *(f"--config={x}" for x in overrides)]
    code, out, err = convert(call, tmp_path / source, tmp_path / target, *flags)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"Trax has no such ReformerLM: lsh's {option} is {value}, expected {not value}" in err
    assert {p.name for p in tmp_path.iterdir()} == {"model.gin", source}


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("nowhere", "run", "nowhere does not exist: download a model of Hugging Face, and give"),
        ("empty", "run", "empty holds no model: give a folder of Hugging Face with config.json"),
        ("mine.txt", "run", "mine.txt holds no model: give a folder of Hugging Face with"),
        ("model.safetensors", "run", "config.json does not exist: put it next to the tensors"),
        ("model.pkl.gz", "run", "say what model it is with --config_file=FILE.gin"),
        ("empty", "full", "full exists: give another name"),
        ("empty", "empty.pkl.gz", "empty.pkl.gz exists: give another name"),
        ("empty", "full/file/a/b", "full/file, which is no folder: give another name"),
    ],
)
def test_errors_in_one_line(source, target, message, tmp_path, call):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.pkl.gz").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for name in ("model.pkl.gz", "mine.txt", "model.safetensors"):
        (tmp_path / name).touch()
    code, out, err = convert(call, tmp_path / source, tmp_path / target)
    assert code == 2 and err.startswith("error: ") and message in err
    assert err.count("\n") == 1 and not out


@pytest.mark.parametrize("value, message", [
    (math.nan, "embedding has numbers that are not finite"),
    (3e38, "computes something else: its logits are not finite; "),
])  # fmt: skip
def test_what_is_not_finite_is_refused_and_leaves_nothing(value, message, tmp_path, call):
    params = random_params(ENWIK8_LIKE)
    part = "embedding" if math.isnan(value) else "norm"
    params[part] = jax.tree.map(lambda w: np.full_like(w, value), params[part])
    hugging_face.write(tmp_path / "hf", ENWIK8_LIKE, params)
    code, _, err = convert(call, tmp_path / "hf", tmp_path / "a/b/run")
    assert code == 1 and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "difference, scale, agrees",
    [
        (0.0, 5.0, True),
        (4e-4, 5.0, True),
        (6e-4, 5.0, False),
        (9e-5, 0.0, True),
        (math.nan, 5.0, False),
        (0.0, math.nan, False),
        (math.inf, math.inf, False),
        (0.0, math.inf, False),
    ],
)
def test_logits_agree_if_they_are_finite_and_near(difference, scale, agrees):
    assert check.Comparison(difference, scale, "").agrees(1e-4) == agrees


@pytest.mark.parametrize("name, fails", [("to", "json.dumps"), ("to.pkl.gz", "os.replace")])
def test_a_write_that_fails_leaves_nothing(name, fails, tmp_path, call, monkeypatch):
    """A full disk, after a part is written."""
    spec = ENWIK8_LIKE._replace(arguments={**ENWIK8_LIKE.arguments, "norm_epsilon": 1e-6})
    run_folder.write(tmp_path / "run", spec, random_params(spec), {}, "A note.")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fails, full)
    code, _, err = convert(call, tmp_path / "run", tmp_path / name)
    assert code == 1 and "No space left on device" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_empty_folder_is_filled_and_another_is_left_alone(tmp_path, call):
    run_folder.write(tmp_path / "run", ENWIK8_LIKE, random_params(ENWIK8_LIKE), {}, "A note.")
    (tmp_path / "to").mkdir()
    assert convert(call, tmp_path / "run", tmp_path / "to")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "to"]
    assert (tmp_path / "to/config.json").is_file()


@pytest.mark.parametrize(
    "flag", ["--trust_config", "--step=3", "--length=8", "--config=a.b=1", "--config_file=a"]
)
def test_flags_that_a_conversion_does_not_read(flag, tmp_path, call):
    hugging_face.write(tmp_path / "hf", ENWIK8_LIKE, random_params(ENWIK8_LIKE))
    code, _, err = convert(call, tmp_path / "hf", tmp_path / "run", flag)
    assert code == 2 and f"error: {flag.split('=')[0]} is " in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_task_with_more_ids_than_the_model(tmp_path, call):
    small = ENWIK8_LIKE._replace(arguments={**ENWIK8_LIKE.arguments, "vocab_size": 100})
    run_folder.write(tmp_path / "run", small, random_params(small), {}, "A note.")
    (tmp_path / "text").write_bytes(bytes(range(32, 96)) * 80)
    flags = [f"--output_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'text'}", "--length=32"]
    code, _, err = call(evaluate.main, *flags)
    assert code == 2 and "and the model vocab_size=100: set" in err


def test_an_option_that_is_an_object_survives_its_gin_file(tmp_path):
    """An indexer, whose candidates are an object too."""
    from reformax.cli import config

    config.parse(["dsa_stages.gin"])
    spec = Spec.of_config()
    indexer = spec.attention[1].option("indexer")
    assert indexer.n_local == 16 and indexer.candidates.block_sizes == (16,)
    lines = ["from __gin__ import dynamic_registration", "from reformax.training import loop"]
    lines += [spec.gin(), f"loop.train.model = @lm.{spec.model}"]
    (tmp_path / "spec.gin").write_text("\n".join(lines))
    config.parse([str(tmp_path / "spec.gin")])
    assert Spec.of_config() == spec


@pytest.mark.parametrize("spec_of", [0, 1], ids=["scopes", "default cycle"])
def test_a_spec_survives_its_gin_file(spec_of, tmp_path):
    from reformax.cli import config

    scoped = [Op("local", dict(chunk_len=4)), Op("local", dict(chunk_len=8)), Op("dense", {})]
    spec = [
        Spec.make("TransformerLM", scoped, n_layers=3, vocab_size=9, ff_activation="silu"),
        Spec.make("ReformerLM", [Op("local", {}), Op("lsh", {})], vocab_size=9),
    ][spec_of]
    lines = ["from __gin__ import dynamic_registration", "from reformax.training import loop"]
    lines += [spec.gin(), f"loop.train.model = @lm.{spec.model}"]
    text = "\n".join(lines)
    if spec_of == 1:  # a config that does not set the attention
        text = "\n".join(line for line in text.split("\n") if "attention_type" not in line)
    (tmp_path / "spec.gin").write_text(text)
    config.parse([str(tmp_path / "spec.gin")])
    assert Spec.of_config() == spec
    names = [op.name for op in spec.attention]
    assert ("lsh" in names) == (spec_of == 1)
    model = spec.build()
    default = {"ReformerLM": 2, "TransformerLM": 3}[spec.model]
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 4)))
    assert len(shapes["stack"]) == default


@pytest.mark.parametrize(
    "function, name",
    [("jax.nn.relu", "relu"), ("jax.nn.gelu", "gelu_tanh"), ("jax.nn.tanh", None)],
)
def test_an_activation_that_is_a_function_has_its_name(function, name, tmp_path):
    """The model takes any function; other formats and a written config have names."""
    from reformax.cli import config

    text = GIN + f"import jax\nlm.ReformerLM.ff_activation = @{function}\n"
    (tmp_path / "a.gin").write_text(text)
    config.parse([str(tmp_path / "a.gin")])
    if name is None:
        with pytest.raises(
            ValueError, match="ff_activation is tanh: expected one of relu, relu_squared,"
        ):
            Spec.of_config()
        return
    spec = Spec.of_config()
    assert spec.arguments["ff_activation"] == name
    assert f"ff_activation = '{name}'" in spec.gin()
    assert Spec.make("ReformerLM", [], vocab_size=9, ff_activation=jax.nn.relu) == Spec.make(
        "ReformerLM", [], vocab_size=9, ff_activation="relu"
    )


def test_sizes_of_heads_that_a_config_leaves_to_the_model(tmp_path):
    """None is d_model / n_heads, which other formats have as a number."""
    from reformax.cli import config

    sizes = "lm.ReformerLM.d_attention_key = None\nlm.ReformerLM.d_attention_value = None\n"
    (tmp_path / "a.gin").write_text(GIN + sizes)
    config.parse([str(tmp_path / "a.gin")])
    spec = Spec.of_config()
    assert [spec.arguments[f"d_attention_{x}"] for x in ("key", "value")] == [4, 4]
    assert trax_models.write_params(tmp_path / "a.pkl.gz", spec, random_params(spec), 32).exists()
    (tmp_path / "b.gin").write_text(GIN + sizes + "lm.ReformerLM.n_heads = 3\n")
    config.parse([str(tmp_path / "b.gin")])
    with pytest.raises(ValueError, match="d_model is 8: expected a multiple of n_heads, 3"):
        Spec.of_config()

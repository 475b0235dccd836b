"""Decoders of today in Hugging Face's format: logits, generation and files of both sides."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reformax.cli import errors, generate
from reformax.convert import __main__ as command
from reformax.convert import hugging_face, hugging_face_files
from tests.convert import decoders
from tests.convert.decoders import CASES, NEW, PROMPT
from tests.helpers import assert_trees_equal

FIXTURE = np.load(decoders.PATH)
# The first family that is the same function, of models that were read from joined matrices.
JOINED = {"phi 3": "llama", "phi 3, narrow": "mistral"}
each_case = pytest.mark.parametrize("name", CASES)


def config_of(name):
    return json.loads(str(FIXTURE[f"{name}/config"]))


def tensors_of(config):
    """The tensors of a config.json, by its table, which says every shape."""
    spec, _ = hugging_face.spec_of(config)
    shapes = {row.name: row.shape for row in hugging_face.table(spec, config)}
    return decoders.weights_of(shapes)


def saved(folder, config, tensors=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def logits_of(read, tokens):
    model = read.spec.build()
    run = jax.jit(lambda params, x: model.logits(params, model.encode(params, x)))
    return np.asarray(run(read.params, tokens))


def greedy_of(read, tokens):
    """The next tokens from caches; the first of a row is the model's own."""
    model, (rows, n) = read.spec.build(), tokens.shape
    assert (tokens[:, 0] == read.spec.arguments["first_token"]).all()
    lengths = np.full(rows, n - 1)
    prefill = jax.jit(lambda *x: model.prefill(*x, capacity=n + NEW, rng=jax.random.key(0)))
    logits, state = prefill(read.params, tokens[:, 1:], lengths)
    weights, step, made = model.for_decoding(read.params), jax.jit(model.step), []
    for _ in range(NEW):
        made.append(np.asarray(logits.argmax(-1), np.int32))
        logits, state = step(weights, made[-1], state)
    return np.stack(made, 1)


@each_case
def test_logits_and_greedy_tokens_are_those_of_the_fixture(name, tmp_path):
    """The config.json of `transformers`, read here: logits, and tokens made with caches."""
    read = hugging_face.read(saved(tmp_path, config_of(name)))
    tokens, want = decoders.some_tokens(), FIXTURE[f"{name}/logits"]
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(logits_of(read, tokens)[:, -4:], want, atol=3e-5)
    np.testing.assert_array_equal(greedy_of(read, tokens[:, :PROMPT]), FIXTURE[f"{name}/greedy"])


@each_case
def test_a_round_trip_gives_the_identical_arrays_and_function(name, tmp_path):
    """With the config.json that was read, and with one that is made of the model."""
    folder = saved(tmp_path / "there", config_of(name))
    read, before = hugging_face.read(folder), load_file(folder / "model.safetensors")
    for like, made in ((read.config, "kept"), (None, "fresh")):
        hugging_face.write(tmp_path / made, read.spec, read.params, like)
        again = hugging_face.read(tmp_path / made)
        assert_trees_equal(again.params, read.params)
        family = JOINED.get(name) if like is None else None
        assert again.config["model_type"] == (family or read.config["model_type"])
        if family is None:
            after = load_file(tmp_path / made / "model.safetensors")
            assert before.keys() == after.keys()
            assert all(after[key].tobytes() == x.tobytes() for key, x in before.items())
    kept = json.loads((tmp_path / "kept/config.json").read_text())
    assert {k: kept[k] for k in read.config if k != "torch_dtype"} == read.config


@pytest.mark.peers
@each_case
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """A model of theirs read here, and ours read there: with its config.json, and a new one."""
    if not all(importlib.util.find_spec(x) for x in ("torch", "transformers")):
        pytest.skip("needs torch and transformers: pip install -e '.[peers]'")
    import torch
    import transformers

    theirs = decoders.theirs_of(name)
    theirs.save_pretrained(tmp_path / "there", max_shard_size="50KB")
    read, tokens = hugging_face.read(tmp_path / "there"), decoders.some_tokens()
    want = decoders.logits_of(theirs, tokens)
    np.testing.assert_allclose(logits_of(read, tokens), want, atol=3e-5)
    prompt = tokens[:, :PROMPT]
    np.testing.assert_array_equal(greedy_of(read, prompt), decoders.greedy_of(theirs, prompt))
    for like, folder in ((read.config, "kept"), (None, "fresh")):
        hugging_face.write(tmp_path / folder, read.spec, read.params, like)
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, attn_implementation="eager"
        ).eval()
        np.testing.assert_allclose(decoders.logits_of(back, tokens), want, atol=1e-5)
        if like is None and name in JOINED:
            continue
        assert type(back) is type(theirs)
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, back.state_dict()[key]), key


def test_bfloat16_in_shards_comes_back_bit_for_bit(tmp_path):
    """Each tensor is read when its turn comes; `torch_dtype` is the name of older versions."""
    config = config_of("llama 3.1") | {"torch_dtype": "bfloat16"}
    del config["dtype"]
    tensors = {k: x.astype(jnp.bfloat16) for k, x in tensors_of(config).items()}
    folder = saved(tmp_path / "there", config, {"unused": np.zeros(1, np.float32)})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for i in range(3):
        save_file({name: tensors[name] for name in names[i::3]}, folder / f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = hugging_face.read(folder)
    assert {x.dtype.name for x in jax.tree.leaves(read.params)} == {"float32"}
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    after = load_file(tmp_path / "back/model.safetensors")
    assert all(after[name].tobytes() == x.tobytes() for name, x in tensors.items())
    kept = json.loads((tmp_path / "back/config.json").read_text())
    assert kept["dtype"] == "bfloat16" and "torch_dtype" not in kept
    trained = read.params | {"embedding": read.params["embedding"] * 1.001}
    hugging_face.write(tmp_path / "trained", read.spec, trained, read.config)
    assert json.loads((tmp_path / "trained/config.json").read_text())["dtype"] == "float32"


def test_large_models_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face_files, "_LARGEST_FILE", 50_000)
    read = hugging_face.read(saved(tmp_path / "there", config_of("qwen3")))
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert_trees_equal(hugging_face.read(tmp_path / "back").params, read.params)


@pytest.mark.parametrize("name", ["llama 3.1", "qwen3.5", "gemma 3, narrow", "smollm 3, windows"])
def test_a_folder_becomes_a_run_and_goes_back(name, tmp_path, monkeypatch, capsys):
    """By the command: the run's config.gin has the design, and its checkpoint the settings."""

    def convert(source, target):
        flags = f"--from={tmp_path / source}", f"--to={tmp_path / target}"
        monkeypatch.setattr(sys, "argv", ["script", *flags])
        code = errors.exit_code(command.main)
        return code, *capsys.readouterr()

    folder = saved(tmp_path / "there", config_of(name))
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    code, out, err = convert("there", "run")
    assert code == 0, err
    code, out, err = convert("run", "back")
    assert code == 0 and "check: logits differ by at most 0," in out, err
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("there", "back"))
    assert all(after[key].tobytes() == x.tobytes() for key, x in before.items())
    for file in ("config.json", "generation_config.json"):
        one, other = (json.loads((tmp_path / x / file).read_text()) for x in ("there", "back"))
        assert one == {key: other[key] for key in one}


@pytest.mark.parametrize("last", [4, 6])
def test_settings_of_generation_are_those_of_the_command(last, tmp_path, monkeypatch, capsys):
    """Greedy, until the first of several tokens that end a text; flags come before the settings."""

    def call(main, *flags):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, flags)])
        code = errors.exit_code(main)
        return code, *capsys.readouterr()

    made = FIXTURE["qwen2/greedy"][0].tolist()
    assert made.index(made[last]) == last
    folder = saved(tmp_path / "there", config_of("qwen2"))
    settings = {"do_sample": False, "top_k": 5, "eos_token_id": [96, made[last]]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    code, _, err = call(command.main, f"--from={folder}", f"--to={tmp_path / 'run'}")
    assert code == 0, err
    prompt = decoders.some_tokens()[0, 1:PROMPT].tolist()
    flags = [f"--output_dir={tmp_path / 'run'}", f"--prompt={' '.join(map(str, prompt))}"]
    code, out, err = call(generate.main, *flags, f"--max_new_tokens={NEW}")
    assert code == 0 and [int(x) for x in out.split()] == prompt + made[:last], err
    code, other, err = call(generate.main, *flags, "--max_new_tokens=3", "--temperature=9")
    assert code == 0 and other.split()[: len(prompt)] == out.split()[: len(prompt)] != other, err

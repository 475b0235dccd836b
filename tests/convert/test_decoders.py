"""Decoders of today in Hugging Face's format: logits, generation and files of both sides."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from reformax import generation
from reformax.cli import generate, generation_settings
from reformax.convert import __main__ as command
from reformax.convert import check, hugging_face, hugging_face_decoder, hugging_face_files
from reformax.convert.spec import Op, Spec
from reformax.models import designs
from tests.convert import decoders
from tests.convert.decoders import CASES, NEW, PROMPT
from tests.convert.hugging_face_models import in_parts, write
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
    return write(folder, config, tensors_of(config) if tensors is None else tensors)


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


@pytest.mark.parametrize(
    "known, length, said", [(None, 65_536, 65_536), (None, 8, 8), (9, 8, 9), (9, 12, 12)]
)
def test_a_config_says_the_length_that_its_model_was_trained_on(known, length, said):
    """And no less than the one that the model was read from."""
    config = config_of("qwen3") | {"max_position_embeddings": known or 32_768}
    like = {} if known is None else config
    found = hugging_face_decoder.of_length(config, length, like)
    assert found == config | {"max_position_embeddings": said}


@pytest.mark.parametrize("name", ["llama 3.1", "phi 3, longrope", "llama, dynamic"])
def test_a_length_by_which_positions_are_scaled_stays(name):
    config = config_of(name)
    assert hugging_face_decoder.of_length(config, 10**6, config) == config


@pytest.mark.parametrize("sizes", [(36, 36, 72), (48, 48, 48)])
def test_convolutions_in_three_parts_and_other_names_of_norms_are_read(sizes, tmp_path):
    """As OLMo Hybrid's files have them; transformers writes parts of one size."""
    config = config_of("olmo hybrid, still")
    tensors = tensors_of(config)
    want = hugging_face.read(saved(tmp_path / "whole", config, tensors))
    conv = tensors.pop("model.layers.0.linear_attn.conv1d.weight")
    parts = np.split(conv, np.cumsum(sizes)[:2])
    for x, part in zip("qkv", parts, strict=True):
        tensors[f"model.layers.0.linear_attn.{x}_conv1d.weight"] = part
    names = {"0.input_layernorm": "0.attention_layer_norm"}
    names |= {f"{i}.post_attention_layernorm": f"{i}.feedforward_layer_norm" for i in "01"}
    for ours, theirs in names.items():
        tensors[f"model.layers.{theirs}.weight"] = tensors.pop(f"model.layers.{ours}.weight")
    read = hugging_face.read(saved(tmp_path / "parts", config, tensors))
    assert_trees_equal(read.params, want.params)


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
    np.testing.assert_allclose(logits_of(read, tokens), want, atol=1e-4)
    longer = np.tile(tokens, (1, 4))[:, :75]  # more than a chunk of a recurrence
    far = decoders.logits_of(theirs, longer)
    # Where keys come again, a float32 delta rule is that far from its float64 one on either side,
    # and one that turns signs farther.
    turns = any(op.options.get("negative_eigenvalues") for op in read.spec.attention)
    share = 1e-4 if turns else 3e-5
    np.testing.assert_allclose(logits_of(read, longer), far, atol=share * np.abs(far).max())
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


# Models of reformax, and the family that each goes out as.


SIZES = dict(
    vocab_size=31,
    d_model=24,
    d_ff=20,
    d_attention_key=8,
    d_attention_value=8,
    n_layers=4,
    n_heads=4,
)
WINDOW = Op("local", dict(chunk_len=4, n_chunks_before=2, window=7))
FAR = Op("flash", {})
DELTA = Op("gated_delta", dict(gated=True, conv_size=4, norm_epsilon=1e-6))
QWEN3_5 = designs.Design(
    norm="rms_plus_one",
    ff_bias=False,
    logits_bias=False,
    ff_activation="silu",
    ff_gated=True,
    qk_norm=True,
    attention_gate="elementwise",
    rotary_layers=(False, True),
)
TURNING = Op("gated_delta", DELTA.options | dict(norm_epsilon=1e-5, negative_eigenvalues=True))
HYBRID = dataclasses.replace(
    QWEN3_5, norm="rms", norm_place=("input", "output"), qk_norm="joint", attention_gate=None
)
STILL = designs.llama(rotary_base=10_000.0)  # without a choice that no layer would read
OURS = {
    "plain": ("llama", [FAR], {}),
    "tied, with groups": ("llama", [Op("dense", {})], dict(tie_embeddings=True, n_kv_heads=2)),
    "all windows": ("mistral", [WINDOW], {}),
    "some windows": ("smollm3", [WINDOW, FAR], {}),
    "windows rotate": ("smollm3", [WINDOW, FAR], dict(pos_type="rotary_local")),
    "nothing rotates": ("smollm3", [FAR], dict(pos_type="none", design=STILL)),
    "odd heads": ("mistral", [FAR], dict(n_heads=5)),
    "biases": ("llama", [FAR], dict(attention_bias=True)),
    "biases of inputs": (
        "qwen2",
        [FAR, WINDOW],
        dict(design=designs.llama(attention_bias=True, attention_output_bias=False)),
    ),
    "qwen3": ("qwen3", [WINDOW, FAR], dict(design=designs.qwen3())),
    "norms that add one": ("qwen3", [FAR], dict(design=designs.qwen3(norm="rms_plus_one"))),
    "delta, norms that do not": (
        "qwen3_5_text",
        [DELTA, FAR],
        dict(design=dataclasses.replace(QWEN3_5, norm="rms")),
    ),
    "delta": ("qwen3_5_text", [DELTA, FAR], dict(design=QWEN3_5)),
    "hybrid": ("olmo_hybrid", [TURNING, FAR], dict(design=HYBRID)),
    "hybrid without positions": (
        "olmo_hybrid",
        [TURNING, FAR],
        dict(design=dataclasses.replace(HYBRID, rotary_layers=()), pos_type="none"),
    ),
    "delta of few heads": (
        "qwen3_5_text",
        [DELTA, FAR],
        dict(design=dataclasses.replace(QWEN3_5, recurrent_qk_heads=2, rotary_fraction=0.5)),
    ),
}


def ours_of(row):
    """The family, the model and weights that are far from fresh ones."""
    family, attention, changes = OURS[row]
    options = dict(design=designs.llama()) | SIZES | changes
    spec = Spec.make("TransformerLM", attention, **options)
    model, rng = spec.build(), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    drawn = jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), shapes)
    return family, spec, drawn


@pytest.mark.parametrize("row", OURS)
def test_a_model_of_ours_goes_out_as_the_first_family_that_holds_it(row, tmp_path):
    """Heads of a recurrence have scales of their own here, which go into the next matrix there."""
    family, spec, params = ours_of(row)
    hugging_face.write(tmp_path, spec, params)
    read = hugging_face.read(tmp_path)
    assert read.config["model_type"] == family
    tokens = decoders.some_tokens() % spec.arguments["vocab_size"]
    want = logits_of(read._replace(spec=spec, params=params), tokens)
    np.testing.assert_allclose(logits_of(read, tokens), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.peers
@pytest.mark.parametrize("row", OURS)
def test_a_model_of_ours_is_that_of_transformers(row, tmp_path):
    if not all(importlib.util.find_spec(x) for x in ("torch", "transformers")):
        pytest.skip("needs torch and transformers: pip install -e '.[peers]'")
    import transformers

    _, spec, params = ours_of(row)
    hugging_face.write(tmp_path, spec, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    tokens = decoders.some_tokens() % spec.arguments["vocab_size"]
    model = spec.build()
    ours = model.logits(params, model.encode(params, tokens))
    want = decoders.logits_of(theirs, tokens)
    np.testing.assert_allclose(ours, want, atol=3e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "attention, changes, message",
    [
        ([FAR], dict(design=designs.llama(norm="layer")), "norm is 'layer', expected 'rms' for"),
        (
            [FAR],
            dict(post_norm=True, design=designs.llama(norm="layer")),
            "post_norm is True, expected False; norm is 'layer', expected 'rms' for the closest",
        ),
        ([FAR], dict(d_attention_value=6), "d_attention_value is 6, expected 8"),
        ([FAR], dict(pos_type="alibi"), "pos_type is 'alibi', expected 'rotary'"),
        ([Op("local", {})], {}, "attention of layer 0 is 'local', expected 'attention'"),
        ([Op("lsh", {})], {}, "attention of layer 0 is 'lsh', expected 'attention'"),
        ([Op("flash", dict(learned_sinks=True))], {}, "learned_sinks of layer 0 is True, expected"),
        ([FAR], dict(post_norm=True), "post_norm is True, expected False"),
        ([DELTA], dict(design=designs.llama()), "the closest, Qwen3_5ForCausalLM"),
        ([FAR], dict(design=designs.llama(rotary_scaling="ntk", rotary_factor=2.0)), "ntk"),
    ],
)
def test_a_model_that_no_family_has_is_told_by_what_differs(attention, changes, message):
    options = dict(design=designs.llama()) | SIZES | changes
    spec = Spec.make("TransformerLM", attention, **options)
    with pytest.raises(ValueError, match="Hugging Face has no such model: ") as raised:
        hugging_face.config_of(spec)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, kind, text, other",
    [
        ("gemma 3, narrow", "gemma3", "language_model.model.", "vision_tower.a.weight"),
        ("gemma 3, narrow", "gemma3", "model.language_model.", "model.multi_modal_projector.b"),
        ("qwen3.5, tied", "qwen3_5", "model.language_model.", "model.visual.blocks.0.w"),
        ("qwen3.5, tied", "qwen3_5", "model.language_model.", "mtp.layers.0.w"),
    ],
)
def test_the_text_of_a_model_of_several_media_is_read(name, kind, text, other, tmp_path):
    """It goes out as the model of text alone."""
    config = config_of(name)
    alone = hugging_face.read(saved(tmp_path / "alone", config))
    tensors = tensors_of(config)
    tensors = {key.replace("model.", text, 1): x for key, x in tensors.items()}
    tensors[other] = np.zeros((3, 4), np.float32)
    wrapped = {"model_type": kind, "text_config": config, "vision_config": {"depth": 2}}
    wrapped["auto_map"] = {"AutoModelForCausalLM": "code.Model"}
    read = hugging_face.read(saved(tmp_path / "whole", wrapped, tensors))
    assert read.spec == alone.spec
    assert_trees_equal(read.params, alone.params)
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert back["model_type"] == f"{kind}_text" and "auto_map" not in back


@pytest.mark.slow
def test_a_text_that_would_pass_longropes_trained_length_is_refused(tmp_path):
    """Its keys would all rotate otherwise. Padding of a prompt makes no text a longer one."""
    table = decoders.LONGROPE | dict(original_max_position_embeddings=62)
    changes = dict(rope_parameters=table, original_max_position_embeddings=62)
    config = config_of("phi 3, longrope") | changes | dict(max_position_embeddings=124)
    read = hugging_face.read(saved(tmp_path, config))
    model = read.spec.build()
    prompt = np.random.default_rng(2).integers(3, 97, 58)
    made = generation.generate(model, read.params, [prompt], max_new_tokens=4, temperature=0)
    text = np.concatenate([prompt, np.asarray(made).reshape(-1)[-4:]]).astype(np.int32)
    logits = np.asarray(jax.jit(model.apply)(read.params, text[None]))[0]
    np.testing.assert_array_equal(logits.argmax(-1)[58:], text[58:])
    longer = np.concatenate([text, text[:9]])  # rotates otherwise from its first position on
    other = np.asarray(jax.jit(model.apply)(read.params, longer[None]))[0]
    assert np.abs(other[:62] - logits).max() > 0.01
    with pytest.raises(ValueError, match="rotary_trained_length=62, .* at most 4 can be gener"):
        generation.generate(model, read.params, [prompt], max_new_tokens=5)
    generation.generate(model, read.params, [longer], max_new_tokens=2)


def test_positions_of_dynamic_scaling_are_noted(tmp_path):
    read = hugging_face.read(saved(tmp_path, config_of("llama, dynamic")))
    assert read.notes[-1].startswith("rope_type is 'dynamic': up to max_position_embeddings=80 ")


def test_bfloat16_in_shards_comes_back_bit_for_bit(tmp_path):
    """Each tensor is read when its turn comes; `torch_dtype` is the name of older versions."""
    config = config_of("llama 3.1") | {"torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    tensors = {k: x.astype(jnp.bfloat16) for k, x in tensors_of(config).items()}
    folder = saved(tmp_path / "there", config, {"unused": np.zeros(1, np.float32)})
    in_parts(folder, tensors, 3)
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
def test_a_folder_becomes_a_run_and_goes_back(name, tmp_path, call):
    """By the command: the run's config.gin has the design, and its checkpoint the settings."""

    def convert(source, target):
        return call(command.main, f"--from={tmp_path / source}", f"--to={tmp_path / target}")

    folder = saved(tmp_path / "there", config_of(name))
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    code, out, err = convert("there", "run")
    assert code == 0, err
    code, out, err = convert("run", "back")
    assert code == 0 and "check: logits differ by at most 0," in out, err
    assert ("from transformers" in out) == check.has_transformers(), out
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("there", "back"))
    assert all(after[key].tobytes() == x.tobytes() for key, x in before.items())
    for file in ("config.json", "generation_config.json"):
        one, other = (json.loads((tmp_path / x / file).read_text()) for x in ("there", "back"))
        assert one == {key: other[key] for key in one}


@pytest.mark.parametrize(
    "source, ends",
    [
        ({"config": {"eos_token_id": 5}}, [5]),
        ({"config": {"text_config": {"eos_token_id": [5, 200]}}}, [5]),
        ({"config": {"eos_token_id": 5}, "generation": {"eos_token_id": [7, 8]}}, [7, 8]),
        ({"config": {"eos_token_id": 5}, "generation": {}}, []),
        ({"format": "trax"}, []),
    ],
)
def test_tokens_that_end_a_text_of_a_converted_run(source, ends):
    assert generation_settings.ends_of_checkpoint({"source": source}, 100) == ends


@pytest.mark.slow
@pytest.mark.parametrize("last", [4, 6])
def test_settings_of_generation_are_those_of_the_command(last, tmp_path, call):
    """Greedy, until the first of several tokens that end a text; flags come before the settings."""

    made = FIXTURE["qwen3.5/greedy"][0].tolist()
    assert made.index(made[last]) == last
    folder = saved(tmp_path / "there", config_of("qwen3.5"))
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

"""Hugging Face's Reformer: the same logits, the same tensors there and back, clear refusals."""

import importlib.util
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.convert import hugging_face, hugging_face_reformer, tables
from reformax.convert.spec import Op, Spec
from tests.convert import make_hugging_face_fixture as fixture
from tests.convert.hugging_face_models import CONFIGS, FIXTURE, PUBLISHED, saved, weights
from tests.helpers import assert_trees_equal
from tests.layers import plain

HAS_TRANSFORMERS = all(importlib.util.find_spec(x) for x in ("torch", "transformers"))


def params_of(spec, tensors):
    return tables.read(hugging_face.table(spec), tensors, "it")


def encoder(spec, params, rotations=None):
    """`(tokens, segment_ids) -> logits` without the bias that transformers 5 leaves out."""
    model = spec.build(rotations=rotations)

    def logits(tokens, segment_ids):
        features = model.encode(params, tokens, segment_ids)
        return model.logits(params, features) - params["logits"]["b"]

    return jax.jit(logits)


def difference(ours, theirs, real):
    return np.where(real[..., None], np.abs(np.asarray(ours) - theirs), 0).max()


@pytest.mark.parametrize("length", fixture.LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, length):
    """Local and LSH layers, one round and several, at every length, with padding on either side."""
    spec, _ = hugging_face_reformer.spec_of(CONFIGS[name])
    params = params_of(spec, weights(name))
    logits = encoder(spec, params, FIXTURE[f"{name}/rotations"])
    at = f"{name}/{length}"
    tokens, real = (FIXTURE[f"{at}/{part}"].astype(np.int32) for part in ("tokens", "real"))
    whole = np.ones_like(real)
    assert np.abs(FIXTURE[f"{at}/whole"]).max() > 1
    assert difference(logits(tokens, whole), FIXTURE[f"{at}/whole"], whole) < 3e-5
    assert difference(logits(tokens, real), FIXTURE[f"{at}/padded"], real) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_without_segments_and_with_other_rotations(name):
    """No mask is a mask of ones. Rotations matter, so the agreement above is no accident."""
    spec, _ = hugging_face_reformer.spec_of(CONFIGS[name])
    params, rotations = params_of(spec, weights(name)), FIXTURE[f"{name}/rotations"]
    tokens, want = FIXTURE[f"{name}/24/tokens"].astype(np.int32), FIXTURE[f"{name}/24/whole"]
    whole = np.ones_like(tokens)
    assert difference(encoder(spec, params, rotations)(tokens, None), want, whole) < 3e-5
    other = np.random.default_rng(0).normal(size=rotations.shape)
    assert difference(encoder(spec, params, other)(tokens, None), want, whole) > 1e-2


def test_shifted_logits_are_those_of_tokens_behind_a_zero():
    name = "factored"
    spec, _ = hugging_face_reformer.spec_of(CONFIGS[name])
    params = params_of(spec, weights(name))
    model = spec.build(rotations=FIXTURE[f"{name}/rotations"])
    tokens = FIXTURE[f"{name}/8/tokens"].astype(np.int32)
    behind = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    want = encoder(spec, params, FIXTURE[f"{name}/rotations"])(behind, None) + params["logits"]["b"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens), want, atol=1e-6)


# There and back


@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_gives_the_identical_arrays_and_config(name, tmp_path):
    source = saved(tmp_path / "there", name)
    read = hugging_face.read(source)
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    from safetensors.numpy import load_file

    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("there", "back"))
    copy = after.pop("lm_head.decoder.bias")  # the name that transformers 5.24 reads
    np.testing.assert_array_equal(copy, before["lm_head.bias"])
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert (after[key].dtype, after[key].shape) == (array.dtype, array.shape)
        assert after[key].tobytes() == array.tobytes(), key
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: config[key] for key in CONFIGS[name]} == CONFIGS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models(name):
    """Shapes only: there are 149 million numbers."""
    config = PUBLISHED[name]
    spec, notes = hugging_face_reformer.spec_of(config)
    table = hugging_face.table(spec)
    model = spec.build()
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))
    found = {}
    for tensor in table:
        weight = params
        for key in tensor.path:
            weight = weight[key]
        zeros = np.broadcast_to(np.float32(0), tensor.shape)
        assert tensor.read(zeros).shape == weight.shape[tensor.repeat is not None :]
        assert tensor.write(tensor.read(zeros)).size == zeros.size
        found.setdefault(tensor.path, []).append(tensor.repeat)
    assert len(found) == len(jax.tree.leaves(params))
    n_repeats = spec.arguments["n_layers"] // len(spec.attention)
    assert all(r in ([None], list(range(n_repeats))) for r in found.values())
    n_params = sum(math.prod(t.shape) for t in table)
    assert n_params == {"enwik8": 149_182_722, "crime_and_punishment": 2_748_224}[name]
    assert len(notes) == 1 and "attention dropout" in notes[0]
    back = hugging_face_reformer.config_of(spec, config)
    assert {key: back[key] for key in config} == config
    expected = {"enwik8": (4, (128, 512)), "crime_and_punishment": (2, (512, 1024))}[name]
    assert (len(spec.attention), spec.arguments["pos_axial_shape"]) == expected


def test_a_model_trained_here_goes_there(tmp_path):
    circle = dict(count_once=False, wrap=True, pad_chunks=2, self_score=-1e5)
    attention = [
        Op("lsh", dict(chunk_len=4, n_hashes=2, n_buckets=4) | circle),
        Op("local", dict(chunk_len=8)),
    ]
    spec = Spec.make(
        "ReformerLM",
        attention,
        vocab_size=7,
        d_model=6,
        d_ff=5,
        d_attention_key=3,
        d_attention_value=3,
        n_heads=2,
        n_layers=4,
        pos_type="axial",
        pos_axial_shape=(4, 4),
        pos_d_axial_embs=(2, 4),
    )
    params = plain.init(spec.build(), (1, 8))
    hugging_face.write(tmp_path, spec, params)
    read = hugging_face.read(tmp_path)
    assert_trees_equal(read.params, params)
    for op, want in zip(read.spec.attention, attention, strict=True):
        assert {name: op.option(name) for name in want.options} == want.options
    assert read.config["hidden_act"] == "gelu_new"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(pos_type="rotary"), "pos_type is 'rotary', expected 'axial'"),
        (dict(attention_bias=True), "attention_bias is True"),
        (dict(n_slots=6), "n_slots is 6, expected None"),
        (dict(n_kv_heads=1), "n_kv_heads is 1, expected None"),
        (dict(first_token=5), "first_token is 5, expected 0"),
        (dict(d_attention_value=9), "d_attention_value is 9, expected d_attention_key, 64"),
        ([Op("dense", {})], "the attention is dense"),
        ([Op("local", dict(window=3))], "local's window is 3, expected None"),
        ([Op("local", dict(soft_cap=30.0))], "local's soft_cap is 30.0, expected None"),
        ([Op("local", dict(chunk_len=4)), Op("local", {})], "the local layers have several"),
        ([Op("lsh", {})], "n_buckets is 'auto'"),
        ([Op("lsh", dict(n_buckets=4))], "lsh's count_once is True, expected False"),
    ],
)
def test_a_model_that_hugging_face_does_not_have(change, message):
    attention = change if isinstance(change, list) else [Op("local", {})]
    arguments = dict(vocab_size=7, pos_type="axial", pos_axial_shape=(4, 4), n_layers=2)
    arguments |= dict(pos_d_axial_embs=(256, 256)) | (change if isinstance(change, dict) else {})
    with pytest.raises(ValueError, match="Hugging Face's Reformer has no such model") as raised:
        hugging_face_reformer.config_of(Spec.make("ReformerLM", attention, **arguments))
    assert message in str(raised.value) and "\n" not in str(raised.value)


# Refusals


QUERY_KEY = "reformer.encoder.layers.1.attention.self_attention.query_key.weight"


def without(tensors):
    del tensors[QUERY_KEY]


def with_another(tensors):
    tensors["reformer.encoder.layers.9.extra"] = np.zeros((2, 3), np.float32)


def transposed(tensors):
    tensors[QUERY_KEY] = np.ascontiguousarray(tensors[QUERY_KEY].T)


def as_integers(tensors):
    tensors[QUERY_KEY] = tensors[QUERY_KEY].astype(np.int32)


@pytest.mark.parametrize(
    "change, message",
    [
        (without, f"{QUERY_KEY} has no such tensor there and shape (12, 16) in the config"),
        (with_another, "layers.9.extra has shape (2, 3) there and no such tensor in the config"),
        (transposed, f"{QUERY_KEY} has shape (16, 12) there and shape (12, 16) in the config"),
        (as_integers, f"{QUERY_KEY} has dtype int32: expected floating point"),
    ],
)
def test_tensors_of_another_model(change, message, tmp_path):
    tensors = weights("factored")
    change(tensors)
    saved(tmp_path, "factored", tensors=tensors)
    with pytest.raises(ValueError) as raised:
        hugging_face.read(tmp_path)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_damaged_files(tmp_path):
    path = saved(tmp_path, "factored") / "model.safetensors"
    whole = path.read_bytes()
    for end in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"model.safetensors is damaged") as raised:
            hugging_face.read(tmp_path)
        assert "\n" not in str(raised.value)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="has no model.safetensors and no pytorch_model"):
        hugging_face.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match="config.json is not JSON"):
        hugging_face.read(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(is_decoder=False), "is_decoder is false"),
        (dict(num_buckets=None), "num_buckets is null"),
        (dict(lsh_num_chunks_after=1), "lsh_num_chunks_after is 1"),
    ],
)
def test_a_config_that_has_no_model_here(change, message):
    with pytest.raises(ValueError) as raised:
        hugging_face_reformer.spec_of(CONFIGS["factored"] | change)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_what_older_versions_wrote_besides(tmp_path):
    """They hold constants as buffers and the bias under a second name."""
    tensors = weights("factored")
    name = QUERY_KEY.replace("query_key.weight", "mask_value_float32")
    more = tensors | {
        name: np.array([-1e9], np.float32),
        "lm_head.decoder.bias": tensors["lm_head.bias"] + 0,
    }
    read = hugging_face.read(saved(tmp_path, "factored", tensors=more))
    assert any("lm_head.bias is not zero" in note for note in read.notes)


def test_the_bias_of_the_decoder_counts(tmp_path):
    """transformers 5.24 trains and saves it apart from `lm_head.bias`, which it does not use."""
    tensors = weights("factored")
    tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"] + 1
    read = hugging_face.read(saved(tmp_path, "factored", tensors=tensors))
    np.testing.assert_array_equal(read.params["logits"]["b"], tensors["lm_head.decoder.bias"])


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_becomes_float32(dtype, tmp_path):
    halves = {name: array.astype(dtype) for name, array in weights("factored").items()}
    read = hugging_face.read(saved(tmp_path, "factored", tensors=halves))
    assert {x.dtype.name for x in jax.tree.leaves(read.params)} == {"float32"}
    embedding = halves["reformer.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(read.params["embedding"], embedding.astype(np.float32))


# With transformers itself, where it is installed


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs torch and transformers")
@pytest.mark.parametrize("name", fixture.CONFIGS)
def test_live(name, tmp_path):
    """A new model: both kinds of its files, its logits, and its reading of our files."""
    import torch
    import transformers

    config = fixture.CONFIGS[name]
    model = fixture.model_of(config, seed=11)
    model.save_pretrained(tmp_path / "there")
    read = hugging_face.read(tmp_path / "there")
    logits = encoder(read.spec, read.params, fixture.rotations_of(config))
    for length in (3, 21):
        tokens, real = fixture.inputs_of(config, length, seed=length)
        theirs = fixture.logits_of(model, tokens, real)
        assert difference(logits(tokens, real.astype(np.int32)), theirs, real) < 1e-4
    torch.save(model.state_dict(), tmp_path / "there/pytorch_model.bin")
    (tmp_path / "there/model.safetensors").unlink()
    from_torch = hugging_face.read(tmp_path / "there").params
    assert_trees_equal(from_torch, read.params)
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    back = transformers.ReformerModelWithLMHead.from_pretrained(tmp_path / "back").eval()
    for key, tensor in model.state_dict().items():
        if key == "lm_head.bias":  # where it is apart from the decoder's, it has no use
            tensor = model.state_dict().get("lm_head.decoder.bias", tensor)
        assert torch.equal(tensor, back.state_dict()[key]), key
    np.testing.assert_array_equal(fixture.logits_of(back, tokens, real), theirs)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
def test_a_hostile_torch_file(tmp_path):
    import os

    import torch

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/marker",)

    saved(tmp_path, "factored")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.bias": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is refused: it holds more than tensors") as raised:
        hugging_face.read(tmp_path)
    assert not (tmp_path / "marker").exists() and "\n" not in str(raised.value)


@pytest.mark.skipif(bool(importlib.util.find_spec("torch")), reason="where torch is missing")
def test_a_torch_file_where_torch_is_missing(tmp_path):
    saved(tmp_path, "factored")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ImportError, match="pip install torch"):
        hugging_face.read(tmp_path)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs torch and transformers")
@pytest.mark.parametrize("name", ["lm_head.bias", "lm_head.decoder.bias"])
def test_live_a_folder_with_one_name_of_the_bias_is_converted(name, tmp_path):
    """The check of logits passes whichever name a version of transformers reads."""
    from reformax.convert import __main__ as command

    tensors = weights("factored")
    tensors[name] = tensors.pop("lm_head.bias")
    folder = saved(tmp_path / "there", "factored", tensors=tensors)
    assert command.main([f"--from={folder}", f"--to={tmp_path / 'run'}"]) == 0

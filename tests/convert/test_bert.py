"""Hugging Face's BERT: an independent forward pass's logits, a run, refusals."""

import importlib.util
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import evaluate
from reformax.convert import __main__ as command
from reformax.convert import hugging_face
from reformax.convert.spec import Op, Spec
from reformax.models import designs
from tests.convert import hugging_face_models

CONFIG = dict(
    model_type="bert",
    vocab_size=300,
    max_position_embeddings=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    type_vocab_size=2,
)
D, D_FF, V, H = 8, 12, 300, 4


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    e, head = "bert.embeddings", "cls.predictions"
    shapes = {f"{e}.word_embeddings.weight": (V, D), f"{e}.position_embeddings.weight": (11, D)}
    shapes |= {f"{e}.token_type_embeddings.weight": (2, D), f"{head}.bias": (V,)}
    linear = {f"{head}.transform.dense": (D, D)}
    norms = [f"{e}.LayerNorm", f"{head}.transform.LayerNorm"]
    for i in range(2):
        name = f"bert.encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear[f"{name}.attention.{part}"] = (D, D)
        linear |= {f"{name}.intermediate.dense": (D_FF, D), f"{name}.output.dense": (D, D_FF)}
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
    for name, sizes in [*linear.items(), *((name, (D,)) for name in norms)]:
        shapes |= {f"{name}.weight": sizes, f"{name}.bias": sizes[:1]}
    return {n: rng.normal(0, 0.5, s).astype(np.float32) for n, s in shapes.items()}


def saved(folder, config=CONFIG, arrays=None):
    return hugging_face_models.write(folder, config, tensors() if arrays is None else arrays)


def forward(weights, tokens):
    """Devlin et al. 2018 in float64, from the tensors as they are named there, all of type 0."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def gelu(x):
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    e = "bert.embeddings"
    x = w[f"{e}.word_embeddings.weight"][tokens]
    x = x + w[f"{e}.position_embeddings.weight"][: len(tokens)]
    x = norm(x + w[f"{e}.token_type_embeddings.weight"][0], f"{e}.LayerNorm")
    for i in range(2):
        name = f"bert.encoder.layer.{i}"
        parts = (linear(x, f"{name}.attention.self.{s}") for s in ("query", "key", "value"))
        q, k, v = (part.reshape(-1, 2, H) for part in parts)
        weight = np.exp(np.einsum("tnh,snh->nts", q, k) / math.sqrt(H))
        weight /= weight.sum(-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", weight, v).reshape(-1, D)
        attended = linear(attended, f"{name}.attention.output.dense")
        x = norm(x + attended, f"{name}.attention.output.LayerNorm")
        h = linear(gelu(linear(x, f"{name}.intermediate.dense")), f"{name}.output.dense")
        x = norm(x + h, f"{name}.output.LayerNorm")
    x = gelu(linear(x, "cls.predictions.transform.dense"))
    x = norm(x, "cls.predictions.transform.LayerNorm")
    return x @ w[f"{e}.word_embeddings.weight"].T + w["cls.predictions.bias"]


def test_logits_are_those_of_the_equations(tmp_path):
    """With padding behind, which is token 0; other heads and copies in the file are left out."""
    more = tensors() | {"bert.pooler.dense.weight": np.zeros((D, D), np.float32)}
    more["cls.predictions.decoder.bias"] = more["cls.predictions.bias"] + 0
    read = hugging_face.read(saved(tmp_path, arrays=more))
    tokens = np.random.default_rng(1).integers(1, V, 11)
    rows = np.array([tokens, tokens * (np.arange(11) < 7)])
    got = jax.jit(read.spec.build().apply)(read.params, rows)
    weights = load_file(tmp_path / "model.safetensors")
    np.testing.assert_allclose(got[0], forward(weights, tokens), atol=3e-5)
    np.testing.assert_allclose(got[1, :7], forward(weights, tokens[:7]), atol=3e-5)


@pytest.mark.slow
def test_a_folder_with_its_tokenizer_becomes_a_run_that_is_scored(tmp_path, call):
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["[PAD]", "[UNK]", "[MASK]", *"abcdefgh", *(f"w{i}" for i in range(280))]
    model = models.WordLevel({x: i for i, x in enumerate(known)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(saved(tmp_path / "hf") / "tokenizer.json"))
    run = tmp_path / "run"
    code, out, err = call(command.main, f"--from={tmp_path / 'hf'}", f"--to={run}")
    assert (code, err) == (0, "") and "note: every token is of type 0" in out
    assert "masked.masked.mask_id = 2" in (run / "config.gin").read_text()
    (tmp_path / "text").write_text("a b c d e f g h " * 400)
    flags = [f"--output_dir={run}", f"--data_dir={tmp_path / 'text'}"]
    code, out, err = call(evaluate.main, *flags)
    assert code == 0 and "bits_per_token" in out, err
    code, _, err = call(command.main, f"--from={run}", f"--to={tmp_path / 'back'}")
    assert code == 0, err
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("hf", "back"))
    assert before.keys() == after.keys()
    added = (TYPES, POSITIONS)  # that of type 0 is in the positions now
    assert all(after[k].tobytes() == x.tobytes() for k, x in before.items() if k not in added)
    assert not after[TYPES].any()
    np.testing.assert_array_equal(after[POSITIONS], before[POSITIONS] + before[TYPES][0])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_attention_heads=3), "hidden_size is 8: expected a multiple of num_attention"),
        (dict(hidden_act="gelu_new"), "hidden_act is 'gelu_new': expected 'gelu', which the head"),
        (dict(is_decoder=True), "is_decoder is True: expected False"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings is False: expected True"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
    ],
)
def test_a_config_that_has_no_model_here(change, message):
    with pytest.raises(ValueError) as raised:
        hugging_face.spec_of(CONFIG | change)
    assert message in str(raised.value) and "\n" not in str(raised.value)


TYPES = "bert.embeddings.token_type_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"


@pytest.mark.parametrize(
    "name, array, message",
    [
        (TYPES, None, f"is of another model: expected {TYPES} and {POSITIONS}"),
        (TYPES, np.zeros((2, 7)), f"{TYPES} has shape (2, 7) and {POSITIONS} (11, 8)"),
        (TYPES, np.zeros((2, 8), np.int32), f"{TYPES} has dtype int32: expected floating point"),
        (POSITIONS, np.zeros((11, 8), np.int32), f"{POSITIONS} has dtype int32: expected float"),
        ("bert.encoder.layer.0.output.dense.bias", None, "no such tensor there and shape (8,)"),
        ("bert.encoder.layer.2.output.dense.bias", np.zeros(8), "and no such tensor in the config"),
        (
            "bert.embeddings.LayerNorm.gamma",
            np.zeros(8),
            "LayerNorm.weight, two names of one tensor",
        ),
        ("cls.predictions.decoder.weight", np.zeros((V, D)), "differ, and BERT's are one"),
    ],
)
def test_tensors_of_another_model(name, array, message, tmp_path):
    changed = tensors() | ({} if array is None else {name: array})
    if array is None:
        del changed[name]
    with pytest.raises(ValueError) as raised:
        hugging_face.read(saved(tmp_path, arrays=changed))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.peers
def test_logits_are_those_of_transformers(tmp_path):
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        pytest.skip("needs torch and transformers: pip install -e '.[peers]'")
    import torch
    import transformers

    config = transformers.BertConfig(**CONFIG | dict(initializer_range=0.4))
    theirs = transformers.BertForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    read, tokens = hugging_face.read(tmp_path), np.random.default_rng(1).integers(1, V, (2, 11))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(read.spec.build().apply(read.params, tokens), want, atol=1e-4)
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(torch.tensor(tokens)).logits.numpy(), want, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(pos_type="rotary"), "pos_type is 'rotary', expected 'axial'"),
        (dict(ff_activation="gelu_tanh"), "ff_activation is 'gelu_tanh', expected 'gelu'"),
        (dict(post_norm=False), "post_norm is False, expected True"),
        (dict(n_kv_heads=1), "n_kv_heads is 1, expected None"),
        (dict(d_attention_value=6), "d_attention_value is 6, expected 4"),
        (dict(design=designs.Design(norm="rms")), "norm is 'rms', expected 'layer'"),
        ([Op("local", {})], "the attention is local, expected dense or flash"),
        ([Op("flash", dict(learned_sinks=True))], "flash's learned_sinks is True, expected False"),
        ([Op("dense", dict(learned_sinks=True))], "dense's learned_sinks is True, expected False"),
    ],
)
def test_a_model_that_hugging_face_does_not_have(change, message):
    spec, _ = hugging_face.spec_of(CONFIG)
    attention = change if isinstance(change, list) else spec.attention
    arguments = {**spec.arguments, **(change if isinstance(change, dict) else {})}
    with pytest.raises(ValueError, match="Hugging Face's BERT has no such model") as raised:
        hugging_face.config_of(Spec.make("TransformerMaskedLM", attention, **arguments))
    assert message in str(raised.value) and "\n" not in str(raised.value)

"""Hugging Face's GPT-2: an independent forward pass's logits, tensors there and back, refusals."""

import importlib.util
import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import evaluate
import generate
import train
from reformax.convert import __main__ as command
from reformax.convert import hugging_face
from reformax.convert.spec import Op, Spec
from reformax.models import designs
from tests.convert import hugging_face_models

CONFIG = dict(
    model_type="gpt2",
    vocab_size=21,
    n_positions=11,
    n_embd=8,
    n_layer=2,
    n_head=2,
    bos_token_id=20,
    eos_token_id=20,
)
D, D_FF, V, H = 8, 32, 21, 4


def tensors(seed=0, prefix="transformer."):
    rng = np.random.default_rng(seed)
    shapes = {"wte.weight": (V, D), "wpe.weight": (11, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for i in range(2):
        layer = {"ln_1.weight": (D,), "ln_1.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,)}
        for name, sizes in (
            ("attn.c_attn", (D, 3 * D)),
            ("attn.c_proj", (D, D)),
            ("mlp.c_fc", (D, D_FF)),
            ("mlp.c_proj", (D_FF, D)),
        ):
            layer |= {f"{name}.weight": sizes, f"{name}.bias": sizes[1:]}
        shapes |= {f"h.{i}.{name}": shape for name, shape in layer.items()}
    return {prefix + n: rng.normal(0, 0.5, s).astype(np.float32) for n, s in shapes.items()}


def saved(folder, config=CONFIG, arrays=None):
    return hugging_face_models.write(folder, config, tensors() if arrays is None else arrays)


def forward(weights, tokens):
    """Radford et al. 2019 in float64, from the tensors as they are named there."""
    w = {name.removeprefix("transformer."): x.astype(np.float64) for name, x in weights.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for i in range(2):
        heads = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.reshape(-1, 2, H) for part in np.split(heads, 3, axis=-1))
        scores = np.einsum("tnh,snh->nts", q, k) / math.sqrt(H)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", weight, v).reshape(-1, D)
        x = x + linear(attended, f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def test_logits_are_those_of_the_equations(tmp_path):
    """Of tokens as they are, and of those that `apply` shifts behind the first token."""
    read = hugging_face.read(saved(tmp_path))
    model, tokens = read.spec.build(), np.random.default_rng(1).integers(0, V, 11)
    weights = load_file(tmp_path / "model.safetensors")

    def logits(params, tokens):
        return model.logits(params, model.encode(params, tokens))

    got = jax.jit(logits)(read.params, tokens[None])[0]
    np.testing.assert_allclose(got, forward(weights, tokens), atol=2e-5)
    behind = np.concatenate([[20], tokens[:-1]])
    got = jax.jit(model.apply)(read.params, tokens[None])[0]
    np.testing.assert_allclose(got, forward(weights, behind), atol=2e-5)


def test_a_round_trip_gives_the_identical_arrays_and_config(tmp_path):
    """Published files have no prefix, and causal masks; a copy of the embedding may be there."""
    arrays = tensors(prefix="") | {"h.0.attn.bias": np.tri(11, dtype=np.float32)}
    read = hugging_face.read(saved(tmp_path / "there", arrays=arrays))
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    after = load_file(tmp_path / "back/model.safetensors")
    assert after.keys() == tensors().keys()
    assert all(after[name].tobytes() == x.tobytes() for name, x in tensors().items())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert hugging_face.spec_of(config) == hugging_face.spec_of(CONFIG)
    tied = tensors() | {"lm_head.weight": tensors()["transformer.wte.weight"]}
    hugging_face.read(saved(tmp_path / "there", arrays=tied))
    tied["lm_head.weight"] = tied["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight and transformer.wte.weight differ"):
        hugging_face.read(saved(tmp_path / "there", arrays=tied))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n_head=3), "n_embd is 8: expected a multiple of n_head, 3"),
        (dict(n_embd="8"), "n_embd is '8': expected a whole number"),
        (dict(activation_function="mish"), "activation_function is 'mish': expected 'relu'"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings is False: expected True"),
        (dict(scale_attn_weights=False), "scale_attn_weights is False: expected True"),
        (dict(scale_attn_by_inverse_layer_idx=True), "layer_idx is True: expected False"),
        (dict(bos_token_id=21), "bos_token_id is 21: expected an id below vocab_size, 21"),
        (dict(model_type="t5"), "model_type is 't5': expected one of 'reformer', 'gpt2', 'bert'"),
    ],
)
def test_a_config_that_has_no_model_here(change, message):
    with pytest.raises(ValueError) as raised:
        hugging_face.spec_of(CONFIG | change)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, array, message",
    [
        (
            "h.1.attn.c_attn.weight",
            None,
            "has no such tensor there and shape (8, 24) in the",
        ),
        (
            "h.1.attn.c_attn.weight",
            np.zeros((24, 8)),
            "has shape (24, 8) there and shape (8, 24)",
        ),
        (
            "h.1.attn.c_attn.bias",
            np.zeros(25),
            "has shape (25,) there and shape (24,) in the",
        ),
        ("h.2.ln_1.bias", np.zeros(8), "has shape (8,) there and no such tensor in the config"),
        ("wpe.weight", np.zeros((11, 8), np.int32), "has dtype int32: expected floating point"),
    ],
)
def test_tensors_of_another_model(name, array, message, tmp_path):
    changed = tensors()
    if array is None:
        del changed[f"transformer.{name}"]
    else:
        changed[f"transformer.{name}"] = array
    with pytest.raises(ValueError) as raised:
        hugging_face.read(saved(tmp_path, arrays=changed))
    assert f"transformer.{name} {message}" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 10**5, "words", "\udcff"])
def test_a_tokenizer_that_was_half_copied(content, tmp_path):
    folder = saved(tmp_path)
    (folder / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="tokenizer.json is no object of JSON: copy it again"):
        hugging_face.read(folder)


def test_a_design_that_no_format_has_is_refused():
    """The choices that models also have as arguments are read of a design."""
    options = dict(vocab_size=V, d_model=D, n_heads=2)
    spec = Spec.make("TransformerLM", [Op("dense", {})], **options, design=designs.gpt2())
    assert spec.arguments["attention_bias"] and spec.arguments["ff_activation"] == "gelu_tanh"
    assert (spec.arguments["norm_epsilon"], spec.arguments["init_std"]) == (1e-5, 0.02)
    spec, _ = hugging_face.spec_of(CONFIG)
    other = Spec.make("TransformerLM", spec.attention, **spec.arguments, design=designs.llama())
    with pytest.raises(ValueError, match="GPT-2 has no such model: norm is 'rms', expected 'lay"):
        hugging_face.config_of(other)


def test_a_tensor_with_and_without_the_prefix(tmp_path):
    twice = tensors() | {"wte.weight": np.zeros((V, D), np.float32)}
    with pytest.raises(ValueError, match=r"transformer.wte.weight.*, two names of one tensor"):
        hugging_face.read(saved(tmp_path, arrays=twice))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(pos_type="rotary"), "pos_type is 'rotary', expected 'axial'"),
        (dict(pos_axial_shape=(2, 4)), "pos_axial_shape is (2, 4), expected one axis"),
        (dict(tie_embeddings=False), "tie_embeddings is False, expected True"),
        (dict(post_norm=True), "post_norm is True, expected False"),
        (dict(n_kv_heads=1), "n_kv_heads is 1, expected None"),
        (
            dict(n_heads=3, d_attention_key=2, d_attention_value=2),
            "d_model is 8, expected a multiple of n_heads, 3",
        ),
        ([Op("local", {})], "the attention is local, expected dense or flash"),
        ([Op("flash", dict(scale=2.0))], "flash's scale is 2.0, expected None"),
        ([Op("dense", dict(learned_sinks=True))], "dense's learned_sinks is True, expected False"),
        ([Op("dense", dict(soft_cap=30.0))], "dense's soft_cap is 30.0, expected None"),
    ],
)
def test_a_model_that_hugging_face_does_not_have(change, message):
    spec, _ = hugging_face.spec_of(CONFIG)
    attention = change if isinstance(change, list) else spec.attention
    arguments = spec.arguments | (change if isinstance(change, dict) else {})
    with pytest.raises(ValueError, match="Hugging Face's GPT-2 has no such model") as raised:
        hugging_face.config_of(Spec.make("TransformerLM", attention, **arguments))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_folder_with_its_tokenizer_becomes_a_run_that_writes_text(tmp_path, call):
    from tokenizers import Tokenizer, models

    known = {x: i for i, x in enumerate("abcdefghijklmnopqrst")} | {"<|endoftext|>": 20}
    tokenizer = Tokenizer(models.BPE(known, [], unk_token="<|endoftext|>"))
    tokenizer.save(str(saved(tmp_path / "hf") / "tokenizer.json"))
    run = tmp_path / "run"
    code, out, err = call(command.main, f"--from={tmp_path / 'hf'}", f"--to={run}")
    assert (code, err) == (0, "") and "check: logits differ by at most 0," in out
    flags = ["--prompt=abc", "--max_new_tokens=5", "--temperature=0"]
    code, out, err = call(generate.main, f"--output_dir={run}", *flags)
    # The ids of "abc" are 0 to 2, so the five next ones are those of the greedy forward pass.
    ids, weights = [20, 0, 1, 2], load_file(tmp_path / "hf/model.safetensors")
    for _ in range(5):
        ids.append(int(forward(weights, np.array(ids))[-1].argmax()))
    text = "".join("\n" if i == 20 else "abcdefghijklmnopqrst"[i] for i in ids[1:])
    assert code == 0 and text in out.replace(" ", ""), (text, out, err)  # it has no decoder
    code, _, err = call(command.main, f"--from={run}", f"--to={tmp_path / 'back'}")
    assert (code, err) == (0, "")
    for name in ("config.json", "tokenizer.json"):
        one, other = (json.loads((tmp_path / x / name).read_text()) for x in ("hf", "back"))
        assert one == {key: other[key] for key in one}


@pytest.mark.peers
def test_logits_are_those_of_transformers(tmp_path):
    """A model of theirs read here, and ours read there."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        pytest.skip("needs torch and transformers: pip install -e '.[peers]'")
    import torch
    import transformers

    given = CONFIG | dict(initializer_range=0.4, attn_pdrop=0.0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**given)).eval()
    theirs.save_pretrained(tmp_path / "there")
    read = hugging_face.read(tmp_path / "there")
    model, tokens = read.spec.build(), np.random.default_rng(1).integers(0, V, (2, 11))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got = model.logits(read.params, model.encode(read.params, tokens))
    np.testing.assert_allclose(got, want, atol=1e-4)
    hugging_face.write(tmp_path / "back", read.spec, read.params, read.config)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(back(torch.tensor(tokens)).logits.numpy(), want)


@pytest.mark.parametrize(
    "prefix, inner",
    [
        ("_orig_mod.", ""),
        ("module.", ""),
        ("module._orig_mod.", ""),
        ("model.", ""),
        ("_fsdp_wrapped_module.", "_fsdp_wrapped_module."),
        ("_forward_module.module.", "_checkpoint_wrapped_module."),
    ],
)
def test_names_of_what_is_wrapped(prefix, inner, tmp_path):
    plain = tensors()
    wrapped = {}
    for name, array in plain.items():
        head, dot, rest = name.partition(".h.0.")
        wrapped[prefix + (f"{head}.h.0.{inner}{rest}" if dot else name)] = array
    one = hugging_face.read(saved(tmp_path / "plain", arrays=plain)).params
    other = hugging_face.read(saved(tmp_path / "wrapped", arrays=wrapped)).params
    jax.tree.map(np.testing.assert_array_equal, one, other)
    with pytest.raises(ValueError, match="two names of one tensor: leave one"):
        hugging_face.read(saved(tmp_path / "both", arrays=plain | wrapped))


@pytest.mark.slow
def test_a_tokenizer_of_more_ids_than_the_model_has_rows(tmp_path, call):
    from tokenizers import Tokenizer, models

    known = {x: i for i, x in enumerate("abcdefghijklmnopqrst")} | {"<|endoftext|>": 20}
    size, arrays = 300, tensors()
    (wte,) = [name for name in arrays if name.endswith("wte.weight")]
    arrays[wte] = np.resize(arrays[wte], (size, arrays[wte].shape[1]))
    folder = saved(tmp_path / "hf", CONFIG | {"vocab_size": size}, arrays)
    tokenizer = Tokenizer(models.BPE(known, [], unk_token="<|endoftext|>"))
    tokenizer.add_tokens([f"<extra{i}>" for i in range(size - 21 + 5)])
    tokenizer.save(str(folder / "tokenizer.json"))
    run = tmp_path / "run"
    code, out, err = call(command.main, f"--from={tmp_path / 'hf'}", f"--to={run}")
    assert (code, err) == (0, "")
    assert f"note: the tokenizer has ids from {size} on, such as '<extra" in out
    (tmp_path / "text").write_text("abcdefghij" * 40)
    flags = [f"--output_dir={run}", f"--data_dir={tmp_path / 'text'}", "--length=8"]
    code, out, err = call(evaluate.main, *flags)
    assert code == 0 and "bits_per_token: " in out, err
    last = f"<extra{size - 21 + 4}>"
    (tmp_path / "text").write_text("abcdefghij" * 38 + last * 2)
    code, out, err = call(evaluate.main, *flags, "--split=test")
    assert code == 2 and f"the text has {last!r}, whose id {size + 4} is not below" in err, err
    # In training, the same, by the setting that the error names.
    (tmp_path / "text").write_text("abcdefghij" * 40)
    trains = [
        "--config_file=gpt2.gin",
        f"--data_dir={tmp_path / 'text'}",
        f"--output_dir={tmp_path / 'new'}",
        f"--config=text.text.vocabulary='{run / 'vocabulary.model'}'",
        f"--config=vocab_size={size}",
        "--config=lm.TransformerLM.first_token=20",
        *(f"--config={x}" for x in ("d_model=8", "n_heads=2", "d_head=4", "d_ff=8")),
        *(f"--config={x}" for x in ("n_layers=1", "length=8", "batch_size=2", "steps=1")),
        *(f"--config={x}" for x in ("warmup_steps=0", "dtype='float32'")),
    ]
    code, out, err = call(train.main, *trains)
    if code:
        assert f"or the task's vocab_size={size}" in err, err
        code, out, err = call(train.main, *trains, f"--config=text.text.vocab_size={size}")
    assert code == 0, err

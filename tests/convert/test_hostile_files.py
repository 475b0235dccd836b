"""Malformed files of Hugging Face and of Trax: one line that names the field and its value."""

import gzip
import io
import json
import os
import pickle
import random
import struct
import time
import tracemalloc
import zipfile

import jax
import numpy as np
import pytest

from reformax.cli import config
from reformax.convert import (
    hugging_face,
    hugging_face_reformer,
    hugging_face_tensors,
    trax_files,
)
from reformax.convert.hugging_face_families import FAMILIES
from reformax.convert.spec import Spec
from reformax.data import files
from tests.convert import decoders, test_decoders
from tests.convert.hugging_face_models import CONFIGS, in_parts, saved, weights
from tests.convert.test_command import GIN

MIB = 2**20
CONFIG = CONFIGS["factored"]
EMBEDDING = "reformer.embeddings.word_embeddings.weight"


def bounded(read, message=""):
    """`read()` raises one line, in bounded time and memory; returns the line."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises((ValueError, OSError, NotImplementedError)) as raised:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(raised.value)
    assert "\n" not in text and len(text) < 700 and message in text, text
    assert peak < 160 * MIB, f"{peak:,} bytes"
    assert time.process_time() - begin < 60


# Fields of config.json: rules besides types and bounds, which odd values try of every field.


FIELDS = [
    (
        dict(model_type=["reformer"]),
        "model_type is ['reformer']: expected one of 'reformer', 'gpt2'",
    ),
    (dict(model_type=None), "model_type is None: expected"),
    (dict(attn_layers=[]), "the number of attn_layers is 0"),
    (dict(attn_layers="lsh"), "attn_layers is 'lsh': expected a list"),
    (dict(attn_layers=["lsh"] * 10_001), "the number of attn_layers is 10001: expected"),
    (dict(is_decoder=1), "is_decoder is 1: expected True or False"),
    (dict(hidden_dropout_prob=1.5), "hidden_dropout_prob is 1.5: expected a rate in [0, 1)"),
    (dict(layer_norm_eps=-1e-5), "layer_norm_eps is -1e-05"),
    (dict(num_buckets=3), "num_buckets is 3: expected even numbers from 2"),
    (dict(num_buckets=[4, 3]), "num_buckets is [4, 3]"),
    (dict(num_buckets=[2] * 40), "num_buckets is [2, 2, 2"),
    (dict(num_buckets="auto"), "num_buckets is 'auto'"),
    (dict(num_buckets=2**40), "num_buckets is 1099511627776"),
    (dict(num_hashes=10**9), "num_hashes is 1000000000: expected at least 1 and at most 1,024"),
    (dict(local_attn_chunk_length=2**31), "local_attn_chunk_length is 2147483648"),
    (
        dict(local_attn_chunk_length=10**6 + 3, lsh_attn_chunk_length=64),
        "local_attn_chunk_length is 1000003 and lsh_attn_chunk_length 64",
    ),
    (dict(lsh_num_chunks_before=10**9), "lsh_num_chunks_before is 1000000000"),
    (dict(vocab_size=10**30), "vocab_size is 1000000000000000000000000000000: expected"),
    (dict(axial_pos_shape=[]), "axial_pos_shape has 0 axes and axial_pos_embds_dim 2"),
    (dict(axial_pos_shape=[6, 4, 2]), "axial_pos_shape has 3 axes and axial_pos_embds_dim 2"),
    (dict(axial_pos_embds_dim=[5, 12]), "axial_pos_embds_dim is [5, 12]: expected numbers that"),
    (dict(axial_pos_embds_dim=[16]), "axial_pos_embds_dim 1"),
    (
        dict(axial_pos_shape=[1] * 40, axial_pos_embds_dim=[1] * 40, hidden_size=40),
        "axial_pos_shape has 40 axes",
    ),
]


@pytest.mark.parametrize("change, message", FIELDS, ids=lambda x: str(x)[:60])
def test_a_field_is_named_with_its_value(change, message):
    bounded(lambda: hugging_face.spec_of(CONFIG | change), message)


def test_what_a_model_does_not_read_may_be_null():
    local = {"attn_layers": ["local"], "axial_pos_embds": False, "max_position_embeddings": 48}
    unread = [name for name in hugging_face_reformer.FIELDS if name.startswith("lsh_")]
    unread += ["num_buckets", "num_hashes", "axial_pos_shape", "axial_pos_embds_dim"]
    spec, _ = hugging_face.spec_of(CONFIG | local | dict.fromkeys(unread))
    assert spec.arguments["pos_axial_shape"] == (48,)


ODD = [None, True, False, 0, 1, -1, 2, 3, 1.5, 1e300, 2**31, 2**70, "", "lsh", "relu"]
ODD += [[], [0], [2], [2, 4], [1.5], [None], [[]], ["lsh"], [-1, 2], {}, {"a": 1}]
ODD += ["x" * 10**5, [1] * 1000]


@pytest.mark.parametrize("field", [*hugging_face_reformer.FIELDS, "model_type"])
def test_odd_values_of_a_field_are_told_or_make_a_model(field):
    """A config either describes a model whose tensors have shapes, or is refused in one line."""
    begin = time.process_time()
    for value in ODD:
        try:
            spec, _ = hugging_face.spec_of(CONFIG | {field: value})
        except (ValueError, OSError, NotImplementedError) as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            assert field in str(error) or "model_type" in str(error)
        else:
            model = spec.build()
            shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (1, 8)))  # noqa: B023
            assert len(hugging_face.table(spec)) >= len(jax.tree.leaves(shapes))
            spec.gin()
    assert time.process_time() - begin < 60


@pytest.mark.parametrize(
    "setting, message",
    [
        ("lm.ReformerLM.attention_type = 5", "the config's attention is 5: expected dense"),
        ("lm.ReformerLM.attention_type = 'lsh'", "the config's attention is 'lsh': expected"),
        ("lm.ReformerLM.attention_type = (@lsh.lsh(), 5)", "the config's attention is 5"),
        ("lm.ReformerLM.attention_type = {'a': 1}", "the config's attention is {'a': 1}"),
        ("lm.ReformerLM.attention_type = (@lm.TransformerLM,)", "the config's attention is Trans"),
        ("lm.ReformerLM.d_model = 'a'", "d_model is 'a': expected a whole number"),
        ("lm.ReformerLM.pos_axial_shape = 5", "pos_axial_shape is 5: expected a list"),
        ("lsh.lsh.n_buckets = 3", "n_buckets is 3: expected 'auto', or even numbers"),
        ("loop.train.model = 5", "the config's model is 5: expected ReformerLM, TransformerLM"),
        ("loop.train.model = (@lm.ReformerLM,)", "the config's model is (Reference("),
        ("loop.train.model = @lsh.lsh", "the config's model is lsh: expected ReformerLM"),
    ],
)
def test_a_config_of_no_model(setting, message, tmp_path):
    (tmp_path / "model.gin").write_text(GIN)
    config.parse([str(tmp_path / "model.gin")], [setting])
    bounded(Spec.of_config, message)


# The files of a folder


def holding(name, data):
    def change(folder):
        content = data() if callable(data) else data
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def indexed(weight_map, suffix=".safetensors"):
    """In place of the tensors, an index."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        name = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
        text = json.dumps({"weight_map": weight_map})
        (folder / f"{name}{suffix}.index.json").write_text(text)
        os.mkfifo(folder / "pipe.safetensors")

    return change


def replaced(name, make):
    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def safetensors(header, data=b"", length=None):
    """A file of this header, which may say what is not so."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(header) if length is None else length)
    return holding("model.safetensors", size + header + data)


def tensor(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def second_copy(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data)
    (folder / "b.safetensors").write_bytes(data)
    (folder / "model.safetensors").unlink()
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def deep(n=10**5):
    return "[" * n + "]" * n


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4294967296\n"
F8 = "has dtype F8_E4M3: expected one of F64, F32"
FOLDERS = {
    "config that is a list": (holding("config.json", "[]"), "config.json holds no object"),
    "config that is null": (holding("config.json", "null"), "config.json holds no object"),
    "config that is empty": (holding("config.json", ""), "config.json is not JSON"),
    "config that is no UTF-8": (holding("config.json", b"\xff\xfe{"), "config.json is not JSON"),
    "config nested deep": (
        holding("config.json", lambda: '{"a": ' + deep() + "}"),
        "config.json is nested too deep",
    ),
    "config of objects nested deep": (
        holding("config.json", lambda: '{"a": ' * 10**5),
        "config.json is nested too deep",
    ),
    "field nested deep": (
        holding("config.json", lambda: json.dumps(CONFIG)[:-1] + ', "num_hashes": ' + deep(900)),
        "config.json is not JSON",
    ),
    "number of 10,000 digits": (
        holding("config.json", '{"vocab_size": ' + "9" * 10**4 + "}"),
        "config.json is not JSON",
    ),
    "field that is given twice": (
        holding("config.json", json.dumps(CONFIG)[:-1] + ', "vocab_size": 13}'),
        "'vocab_size' is given twice",
    ),
    "not a number": (
        holding("config.json", json.dumps(CONFIG | {"layer_norm_eps": float("nan")})),
        "NaN is no number of JSON",
    ),
    "infinity": (
        holding("config.json", json.dumps(CONFIG | {"layer_norm_eps": float("inf")})),
        "Infinity is no number of JSON",
    ),
    "number that overflows": (
        holding("config.json", json.dumps(CONFIG)[:-1] + ', "layer_norm_eps": 1e999}'),
        "layer_norm_eps is inf",
    ),
    "config of 17 MB": (
        holding("config.json", lambda: " " * (2**24 + 1)),
        "bytes: expected at most 16,777,216",
    ),
    "config that is a FIFO": (replaced("config.json", os.mkfifo), "config.json is a FIFO"),
    "config that is a device": (
        replaced("config.json", lambda path: path.symlink_to("/dev/zero")),
        "config.json is a device",
    ),
    "config that is a folder": (
        replaced("config.json", lambda path: path.mkdir()),
        "config.json is a folder",
    ),
    "config that is missing": (replaced("config.json", lambda path: None), "does not exist: put"),
    "an adapter without its model": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "is an adapter without its model: merge it",
    ),
    "config that Git LFS keeps elsewhere": (
        holding("config.json", LFS),
        "config.json is a pointer",
    ),
    "tensors that Git LFS keeps elsewhere": (
        holding("model.safetensors", LFS),
        "model.safetensors is a pointer of Git LFS: run git lfs pull in its folder",
    ),
    "tokenizer that Git LFS keeps elsewhere": (holding("tokenizer.json", LFS), "json is a pointer"),
    "tokenizer that is another object": (
        holding("tokenizer.json", '{"model": null}'),
        "/tokenizer.json is no vocabulary (",
    ),
    "tokenizer of odd ids": (
        holding("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
        "/tokenizer.json is no vocabulary (",
    ),
    "absolute path": (
        indexed({EMBEDDING: "/etc/hostname.safetensors"}),
        "in '/etc/hostname.safetensors': expected a .safetensors file of that folder",
    ),
    "path upwards": (indexed({EMBEDDING: "../part.safetensors"}), "in '../part.safetensors'"),
    "path of a subfolder": (indexed({EMBEDDING: "a/part.safetensors"}), "expected a .safetensors"),
    "the folder itself": (indexed({EMBEDDING: "."}), "in '.': expected a .safetensors file"),
    "the folder above": (indexed({EMBEDDING: ".."}), "in '..': expected a .safetensors file"),
    "no name": (indexed({EMBEDDING: ""}), "in '': expected a .safetensors file"),
    "name with a zero": (indexed({EMBEDDING: "a\0.safetensors"}), "expected a .safetensors file"),
    "name of another kind": (indexed({EMBEDDING: "config.json"}), "in 'config.json': expected"),
    "a pickle among tensors": (indexed({EMBEDDING: "part.bin"}), "in 'part.bin': expected a .safe"),
    "tensors among pickles": (
        indexed({EMBEDDING: "part.safetensors"}, ".bin"),
        "in 'part.safetensors': expected a .bin file",
    ),
    "name that is a number": (indexed({EMBEDDING: 3}), "in 3: expected a .safetensors file"),
    "name that is a list": (indexed({EMBEDDING: []}), "in []: expected a .safetensors file"),
    "part that is missing": (indexed({EMBEDDING: "b.safetensors"}), "b.safetensors does not exist"),
    "part that is a FIFO": (indexed({EMBEDDING: "pipe.safetensors"}), "pipe.safetensors is a FIFO"),
    "empty weight_map": (indexed({}), "has weight_map {}"),
    "weight_map that is a list": (indexed(["part.safetensors"]), "has weight_map ['part.safe"),
    "no weight_map": (indexed(None), "has weight_map None"),
    "two files of one tensor": (second_copy, "which another file of it has too"),
    "tensors that are a FIFO": (
        replaced("model.safetensors", os.mkfifo),
        "model.safetensors is a FIFO",
    ),
    "tensors that are a device": (
        replaced("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "model.safetensors is a device",
    ),
    "float8": (safetensors({EMBEDDING: tensor("F8_E4M3", [4])}, b"abcd"), F8),
    "complex numbers": (safetensors({EMBEDDING: tensor("C64", [1], 0, 8)}, b"a" * 8), "dtype C64"),
    "a name of two lines": (safetensors({"a\nb": tensor("F8_E4M3", [4])}, b"abcd"), F8),
    "unknown dtype": (safetensors({EMBEDDING: tensor("Q7")}, b"abcd"), "is damaged"),
    "overlapping offsets": (
        safetensors({"a": tensor(), "b": tensor()}, b"abcd"),
        "is damaged or of another kind",
    ),
    "offsets behind the end": (safetensors({"a": tensor(end=400)}, b"abcd"), "is damaged"),
    "negative shape": (safetensors({"a": tensor(shape=[-1])}, b"abcd"), "is damaged"),
    "shape of nothing": (safetensors({"a": tensor(shape=[2**62, 0], end=0)}), "no such tensor"),
    "shape of 100 axes": (safetensors({"a": tensor(shape=[1] * 100)}, b"abcd"), "no such tensor"),
    "a header of 2^60 bytes": (safetensors(b"{}", length=2**60), "is damaged"),
    "a header nested deep": (safetensors(('{"a": ' + deep() + "}").encode()), "is damaged"),
    "no tensors": (safetensors({}), "has no such tensor there and shape (12, 16) in the config"),
    "a config of more layers": (
        holding("config.json", json.dumps(CONFIG | {"attn_layers": ["local"] * 1000})),
        "has no such tensor there",
    ),
    "a config of larger tensors": (
        holding("config.json", json.dumps(CONFIG | {"vocab_size": 2**31 - 1})),
        f"{EMBEDDING} has shape (12, 16) there and shape (2147483647, 16) in the config",
    ),
}


@pytest.mark.parametrize("row", FOLDERS)
def test_a_malformed_folder_is_told(row, tmp_path):
    change, message = FOLDERS[row]
    change(saved(tmp_path, "factored"))
    bounded(lambda: hugging_face.read(tmp_path), message)


# Decoders of today: what a config.json may say that they do not have, and other tensors.


def decoder_config(name, **changes):
    """The config.json of a row of `decoders`; None takes a field away."""
    found = json.loads(str(np.load(decoders.PATH)[f"{name}/config"])) | changes
    return {key: x for key, x in found.items() if x is not None}


def rope(**table):
    return dict(rope_parameters=dict(rope_theta=1e4) | table)


def longrope(**table):
    return LONGROPE | rope(**decoders.LONGROPE | table)


LLAMA3 = dict(rope_type="llama3", factor=8.0)
LONGROPE = dict(rope_parameters=decoders.LONGROPE, max_position_embeddings=64)
DECODER_FIELDS = [
    ("llama", dict(model_type="qwen3_moe"), "model_type is 'qwen3_moe': expected one of"),
    ("llama", rope(rope_type="longrope"), "rope_type is 'longrope': expected one of 'default', 'l"),
    ("phi 3", rope(type="dynamic"), "rope_type is 'dynamic': expected one of 'default', 'longr"),
    ("phi 3", LONGROPE | dict(max_position_embeddings=8), "factor of rope_parameters is 1: expec"),
    ("phi 3", longrope(long_factor=None), "long_factor of rope_parameters is None: expected"),
    ("phi 3", longrope(long_factor=[1.0] * 5), "have 6 and 5 numbers: expected as many of each"),
    ("phi 3", longrope(long_factor=["x"] * 6), "long_factor of rope_parameters is ['x', "),
    ("phi 3", longrope(attention_factor=2.0), "attention_factor of rope_parameters is 2.0: expec"),
    (
        "phi 3",
        longrope(long_factor=[1.0] * 3, short_factor=[1.0] * 3),
        "rotary_long_factors has 3 numbers: expected 6, one for each rotated pair",
    ),
    (
        "qwen3.5",
        dict(head_dim=12, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.25)),
        "head_dim is 12: 3 features of a head rotate, expected an even number",
    ),
    ("llama", dict(rope_parameters=[1]), "rope_parameters is [1]: expected a table"),
    ("llama", rope(rope_type="linear"), "factor of rope_parameters is None: expected a number"),
    ("llama", rope(**LLAMA3, low_freq_factor=9.0), "rotary_slow_turns is 9.0 and rotary_fast_turn"),
    ("llama", rope(rope_theta="ten"), "rope_theta of rope_parameters is 'ten'"),
    ("llama", rope(rope_type="yarn", factor=4.0, attention_factor=2.0), "attention_factor of rope"),
    ("llama", rope(rope_type="yarn", factor=4.0, truncate=False), "truncate of rope_parameters is"),
    ("llama", rope(partial_rotary_factor=2.0), "partial_rotary_factor of rope_parameters is 2.0"),
    ("llama", rope(full_attention={"rope_theta": 1e4}), "expected one table for all layers"),
    (
        "gemma 3",
        dict(rope_parameters={"full_attention": {}, "sliding_attention": "x"}),
        "sliding_attention of rope_parameters is 'x': expected a table",
    ),
    (
        "gemma 3",
        dict(rope_parameters={"full_attention": [1], "sliding_attention": {}}),
        "full_attention of rope_parameters is [1]: expected a table",
    ),
    ("llama", dict(num_key_value_heads=3), "num_key_value_heads is 3: expected a divisor of 4"),
    ("llama", dict(head_dim=None, hidden_size=50), "hidden_size is 50: expected a multiple of"),
    ("llama", dict(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}: expecte"),
    ("llama", dict(hidden_act="mish"), "hidden_act is 'mish': expected 'relu'"),
    ("llama", dict(bos_token_id=97), "bos_token_id is 97: expected an id below vocab_size, 97"),
    ("llama", dict(attention_bias="yes"), "attention_bias is 'yes': expected True or False"),
    ("mistral", dict(sliding_window=0), "sliding_window is 0"),
    ("mistral", dict(layer_types=["full_attention"] * 3), "layer_types is ['full_attention',"),
    (
        "qwen3",
        dict(layer_types=["full_attention"]),
        "layer_types has 1 values: expected num_hidden",
    ),
    ("qwen3", dict(layer_types=["chunked_attention"] * 3), "layer_types is ['chunked_attention',"),
    (
        "qwen3",
        dict(layer_types=["sliding_attention"] * 3),
        "sliding_window is None, or off by use_",
    ),
    ("qwen3.5", dict(attention_bias=True), "attention_bias is True: expected False"),
    ("qwen3.5", dict(attn_output_gate=False), "attn_output_gate is False: expected True"),
    ("qwen3.5", dict(linear_num_key_heads=3), "linear_num_key_heads is 3: expected a divisor of"),
    (
        "qwen3.5",
        dict(model_type="qwen3_5", text_config=[]),
        "text_config is []: expected an object",
    ),
    (
        "olmo hybrid",
        dict(linear_num_key_heads=3),
        "linear_num_key_heads is 3: expected a divisor of",
    ),
    (
        "olmo hybrid",
        dict(linear_allow_neg_eigval=2),
        "linear_allow_neg_eigval is 2: expected True",
    ),
    ("olmo hybrid", dict(layer_types=["linear_attention"]), "layer_types has 1 values: expected"),
    ("gemma 3", dict(use_bidirectional_attention=True), "use_bidirectional_attention is True: exp"),
    ("smollm 3", dict(no_rope_layers=[1]), "no_rope_layers has 1 values: expected num_hidden_laye"),
    ("phi 3", rope(rope_type="yarn", factor=2.0), "rope_type is 'yarn': expected one of 'default'"),
]


@pytest.mark.parametrize("name, change, message", DECODER_FIELDS, ids=lambda x: str(x)[:50])
def test_a_field_of_a_decoder_is_named_with_its_value(name, change, message):
    bounded(lambda: hugging_face.spec_of(decoder_config(name, **change)), message)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_odd_values_of_a_decoder_are_told_or_make_a_model(family):
    begin = time.process_time()
    sizes = dict(num_hidden_layers=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
    for field in family.all_fields:
        for value in ODD:
            config = {"model_type": family.model_type, **sizes, field: value}
            try:
                spec, _ = hugging_face.spec_of(config)
            except (ValueError, NotImplementedError) as error:
                assert "\n" not in str(error) and len(str(error)) < 500
            else:
                spec.gin()
                assert hugging_face_tensors.table(family, spec)
    assert time.process_time() - begin < 60


Q = "model.layers.0.self_attn.q_proj.weight"
DECODER_TENSORS = {
    "one that is missing": ({Q: None}, f"{Q} has no such tensor there and shape (48, 48) in the"),
    "one that is too many": (
        {"model.layers.0.mlp.experts.0.w1": np.zeros((2, 2))},
        "model.layers.0.mlp.experts.0.w1 has shape (2, 2) there and no such tensor in the config",
    ),
    "another shape": ({Q: np.zeros((48, 24))}, f"{Q} has shape (48, 24) there and shape (48, 48)"),
    "integers": ({Q: np.zeros((48, 48), np.int8)}, f"{Q} has dtype int8: expected floating point"),
    "no head": ({"lm_head.weight": None}, "lm_head.weight has no such tensor there and shape"),
    "two names of one": (
        {"model.language_model.layers.0.self_attn.q_proj.weight": np.zeros((48, 48))},
        "two names of one tensor: leave one",
    ),
}


@pytest.mark.parametrize("row", DECODER_TENSORS)
def test_other_tensors_of_a_decoder_are_told(row, tmp_path):
    changes, message = DECODER_TENSORS[row]
    config = decoder_config("llama")
    tensors = test_decoders.tensors_of(config) | changes
    tensors = {name: x for name, x in tensors.items() if x is not None}
    test_decoders.saved(tmp_path, config, tensors)
    bounded(lambda: hugging_face.read(tmp_path), message)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path):
    config = decoder_config("qwen2.5")
    tensors = test_decoders.tensors_of(config)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    test_decoders.saved(tmp_path, config, tensors | copy)
    hugging_face.read(tmp_path)
    test_decoders.saved(tmp_path, config, tensors | {"lm_head.weight": copy["lm_head.weight"] + 1})
    bounded(lambda: hugging_face.read(tmp_path), "differ, and tie_word_embeddings is True")


@pytest.mark.parametrize(
    "settings, message",
    [
        ("[]", "generation_config.json holds no object"),
        ('{"temperature": "hot"}', "temperature is 'hot': expected a number of at least 0"),
        ('{"top_k": -1}', "top_k is -1: expected at least 0"),
        ('{"top_p": 1.5}', "top_p is 1.5: expected a number above 0 and at most 1"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>': expected a whole number of at"),
        ('{"do_sample": 1}', "do_sample is 1: expected True or False"),
    ],
)
def test_settings_of_generation_are_told(settings, message, tmp_path):
    folder = test_decoders.saved(tmp_path, decoder_config("llama"))
    (folder / "generation_config.json").write_text(settings)
    bounded(lambda: hugging_face.read(folder), message)


def test_an_index_of_two_files_is_read(tmp_path):
    folder, whole = saved(tmp_path, "factored"), weights("factored")
    in_parts(folder, whole, 2)
    read = hugging_face.read(folder)
    np.testing.assert_array_equal(read.params["embedding"], whole[EMBEDDING])


def test_mutated_headers_are_told_or_harmless(tmp_path):
    """Bytes of a header changed: the same tensors, or one line."""
    path = saved(tmp_path, "factored") / "model.safetensors"
    whole, rng = path.read_bytes(), random.Random(0)
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(size)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            hugging_face.read(tmp_path)
        except ValueError as error:
            assert "\n" not in str(error)


# Trax's files


def npy(shape, data=b"", dtype="<f4", version=b"\x01\x00"):
    """An array of .npy that says this of itself."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


NO_CHECKPOINT = "is no checkpoint of Trax"
CONTENTS = {
    "a list": ([], NO_CHECKPOINT),
    "no weights": ({"step": 3}, NO_CHECKPOINT),
    "weights that are text": ({"flat_weights": "text"}, NO_CHECKPOINT),
    "weights that are objects": ({"flat_weights": [{}]}, NO_CHECKPOINT),
    "state that is a number": ({"flat_weights": [np.ones(1)], "flat_state": 3}, NO_CHECKPOINT),
    "state that is text": ({"flat_weights": [np.ones(1)], "flat_state": "3"}, NO_CHECKPOINT),
    "weights in a missing file": ({"flat_weights": 2}, "does not exist: it holds the weights"),
}
ARRAYS = {
    "an array of 4 TB": (npy((10**12,)), "does not fit the 0 bytes"),
    "a negative shape": (npy((-1,), b"abcd"), "does not fit"),
    "negative shapes": (npy((-1, -1), b"abcd"), "does not fit"),
    "a shape that overflows": (npy((2**62, 4), b"abcd"), "does not fit"),
    "objects": (npy((1,), b"abcd" * 2, "|O"), "has dtype object: expected numbers"),
    "text": (npy((1,), b"abcd", "<U1"), "expected numbers"),
    "voids of 1 GB": (npy((1,), b"abcd", "|V1000000000"), "expected numbers"),
    "no dtype": (npy((1,), b"abcd", "nonsense"), "is damaged at flat_weights[0]"),
    "a header that is code": (npy("__import__('os')"), "is damaged at flat_weights[0]"),
    "a later version": (npy((1,), b"abcd", version=b"\x09\x00"), "is damaged at flat_weights[0]"),
    "no array": (b"text", "is damaged at flat_weights[0]"),
    "nothing": (b"", "is empty"),
}


def gzipped(path, data):
    with gzip.open(path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("row", CONTENTS)
def test_a_malformed_checkpoint_of_trax_is_told(row, tmp_path):
    content, message = CONTENTS[row]
    path = gzipped(tmp_path / "model.pkl.gz", pickle.dumps(content))
    bounded(lambda: trax_files.read(path), message)


@pytest.mark.parametrize("row", ARRAYS)
def test_a_malformed_file_of_weights_is_told(row, tmp_path):
    path = gzipped(tmp_path / "model.pkl.gz", pickle.dumps({"flat_weights": 2}))
    gzipped(tmp_path / "model.weights.npy.gz", ARRAYS[row][0])
    bounded(lambda: trax_files.read(path), ARRAYS[row][1])


def test_arrays_of_every_kind_come_back(tmp_path):
    path = gzipped(tmp_path / "model.pkl.gz", pickle.dumps({"flat_weights": 2}))
    arrays = [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.float32(2)]
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    gzipped(tmp_path / "model.weights.npy.gz", file.getvalue())
    for got, want in zip(trax_files.read(path).weights, arrays, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "signature",
    [3, "text", [3, None], {"shape": (1, 2)}, (("x",),)],
)
def test_an_odd_signature_is_no_signature(signature, tmp_path):
    content = {"flat_weights": [np.ones(1)], "input_signature": signature}
    path = gzipped(tmp_path / "model.pkl.gz", pickle.dumps(content))
    found = trax_files.read(path).input_signature
    assert not jax.tree.leaves(found)


def test_a_bomb_and_what_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_UNPACKED", MIB)
    bomb = gzipped(tmp_path / "bomb.pkl.gz", bytes(64 * MIB))
    bounded(lambda: trax_files.read(bomb), "refused as a decompression bomb")
    os.mkfifo(tmp_path / "pipe.pkl.gz")
    bounded(lambda: trax_files.read(tmp_path / "pipe.pkl.gz"), "is a FIFO")
    bounded(lambda: trax_files.read(tmp_path), "is a folder")


# PyTorch's files, where it is installed


def torch_files():
    """What torch.save writes, and what is refused of it."""
    import torch

    plain = torch.ones(2, 3)
    return {
        "a list": ([plain], "holds a list: expected tensors by name"),
        "a tensor": (plain, "holds a Tensor: expected tensors by name"),
        "a number": ({"a": 3}, "has 'a', a int: expected tensors"),
        "a name that is a number": ({3: plain}, "has 3, a Tensor: expected tensors"),
        "a view of 4 TB": ({"a": torch.ones(1).expand(10**12)}, "which is no plain array"),
        "a sparse tensor": ({"a": plain.to_sparse()}, "which is no plain array"),
        "complex numbers": ({"a": plain.to(torch.complex64)}, "which is no plain array"),
        "no memory": ({"a": torch.ones(3, device="meta")}, "which is no plain array"),
        "quantized": (
            {"a": torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8)},
            "which is no plain array",
        ),
    }


ROWS_OF_TORCH = ["a list", "a tensor", "a number", "a name that is a number", "a view of 4 TB"]
ROWS_OF_TORCH += ["a sparse tensor", "complex numbers", "no memory", "quantized"]


@pytest.mark.parametrize("row", ROWS_OF_TORCH)
def test_a_file_of_pytorch_that_is_no_model(row, tmp_path):
    torch = pytest.importorskip("torch")
    content, message = torch_files()[row]
    (saved(tmp_path, "factored") / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    bounded(lambda: hugging_face.read(tmp_path), message)


def test_parameters_of_pytorch_are_read_and_integers_are_not(tmp_path):
    """A dict of `named_parameters()` asks for gradients; safetensors refuse integers too."""
    torch = pytest.importorskip("torch")
    folder = saved(tmp_path, "factored")
    want = hugging_face.read(folder).params["embedding"]
    (folder / "model.safetensors").unlink()
    tensors = {name: torch.tensor(array) for name, array in weights("factored").items()}
    torch.save(
        {k: torch.nn.Parameter(x) for k, x in tensors.items()}, tmp_path / "pytorch_model.bin"
    )
    np.testing.assert_array_equal(hugging_face.read(folder).params["embedding"], want)
    torch.save({k: x.int() for k, x in tensors.items()}, tmp_path / "pytorch_model.bin")
    bounded(lambda: hugging_face.read(folder), "has dtype int32: expected floating point")


def test_a_packed_file_of_pytorch_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    (saved(tmp_path, "factored") / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(16 * MIB)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    assert path.stat().st_size < MIB
    bounded(lambda: hugging_face.read(tmp_path), "expected no more")
    path.write_bytes(b"PK\x03\x04 and no more")
    bounded(lambda: hugging_face.read(tmp_path), "is refused: it holds more than tensors")

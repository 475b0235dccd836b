"""Hugging Face's `BertForMaskedLM` (Devlin et al. 2018), its config.json and tensors.

It is `encoder.TransformerMaskedLM` with `post_norm`, `embedding_norm`, learned positions, one axis
of axial ones, and biases in attention. Every token is of type 0: the vector of that type is
added to each position's. The pooler and the head of next sentences, which other models of the
family have, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from reformax.convert import tables
from reformax.convert.hugging_face_config import (
    ACTIVATIONS,
    ConfigField,
    activation_of,
    checked,
    learnt_positions,
    requirement,
    size_of_head,
)
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor, layer_norm, renamed
from reformax.declared import Depth, NonNegative, Positive, Rate, Size, VocabSize

FIELDS = {
    "attention_probs_dropout_prob": ConfigField(0.1, Rate),
    "hidden_act": ConfigField("gelu", Literal[*ACTIVATIONS]),
    "hidden_dropout_prob": ConfigField(0.1, Rate),
    "hidden_size": ConfigField(768, Size),
    "initializer_range": ConfigField(0.02, Positive),
    "intermediate_size": ConfigField(3072, Size),
    "is_decoder": ConfigField(False, bool),
    "layer_norm_eps": ConfigField(1e-12, NonNegative),
    "max_position_embeddings": ConfigField(512, Size),
    "num_attention_heads": ConfigField(12, Size),
    "num_hidden_layers": ConfigField(12, Depth),
    "position_embedding_type": ConfigField("absolute", Literal["absolute"]),
    "tie_word_embeddings": ConfigField(True, bool),
    "vocab_size": ConfigField(30522, VocabSize),
}
EMBEDDINGS = "bert.embeddings"
_TYPES = f"{EMBEDDINGS}.token_type_embeddings.weight"
_POSITIONS = f"{EMBEDDINGS}.position_embeddings.weight"
_N_TYPES = 2
_NOT_READ = ("bert.pooler.", "cls.seq_relationship.", f"{EMBEDDINGS}.position_ids")


def spec_of(config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on the differences.

    Raises:
      ValueError: a value is out of range in either format, or the function is another.
    """
    get = checked(config, FIELDS)
    d, d_head = get["hidden_size"], size_of_head(get, "hidden_size", "num_attention_heads")
    if get["hidden_act"] != "gelu":
        raise ValueError(
            f"hidden_act is {get['hidden_act']!r}: expected 'gelu', which the head has in reformax"
        )
    spec = Spec.make(
        "TransformerMaskedLM",
        [Op("flash", {})],
        vocab_size=get["vocab_size"],
        **learnt_positions(d, d_head, get["max_position_embeddings"]),
        d_ff=get["intermediate_size"],
        n_layers=get["num_hidden_layers"],
        n_heads=get["num_attention_heads"],
        dropout=get["hidden_dropout_prob"],
        attention_dropout=get["attention_probs_dropout_prob"],
        post_norm=True,
        embedding_norm=True,
        ff_activation=ACTIVATIONS[get["hidden_act"]],
        norm_epsilon=get["layer_norm_eps"],
        init_std=get["initializer_range"],
    )
    return spec, ["every token is of type 0, the first of two segments there"]


def config_of(spec: Spec, like: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model; values of `like` that say the same are kept.

    Raises:
      ValueError: BERT is another function; the error names the argument.
    """
    a, require = spec.arguments, requirement("Hugging Face's BERT")
    spec.require_plain(require)
    spec.require(require, pos_type="axial", ff_activation="gelu")
    shape = tuple(a["pos_axial_shape"])
    require(len(shape) == 1, f"pos_axial_shape is {shape}", "one axis")
    spec.require_dense(require)
    config = {
        **like,
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": a["attention_dropout"],
        "hidden_act": activation_of(spec, like.get("hidden_act")),
        "hidden_dropout_prob": a["dropout"],
        "hidden_size": a["d_model"],
        "intermediate_size": a["d_ff"],
        "layer_norm_eps": a["norm_epsilon"],
        "max_position_embeddings": shape[0],
        "num_attention_heads": a["n_heads"],
        "num_hidden_layers": a["n_layers"],
        "tie_word_embeddings": True,
        "type_vocab_size": _N_TYPES,
        "vocab_size": a["vocab_size"],
    }
    if a["init_std"] is not None:
        config["initializer_range"] = a["init_std"]
    there, _ = spec_of(config)
    names = "d_attention_key", "d_attention_value", "n_kv_heads", "n_qk_heads", "next_value"
    names += "attention_bias", "post_norm", "embedding_norm"
    spec.require(require, **{name: there.arguments[name] for name in names})
    return config


def completed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with the types of segments, which the positions hold already: zeros."""
    return tensors | {_TYPES: np.zeros((_N_TYPES, tensors[_POSITIONS].shape[1]), np.float32)}


def table(spec: Spec) -> list[Tensor]:
    """The tensors of `BertForMaskedLM`, and which weight each one is."""
    a = spec.arguments
    d, vocab = a["d_model"], a["vocab_size"]
    rows = [
        Tensor(f"{EMBEDDINGS}.word_embeddings.weight", ("embedding",), (vocab, d)),
        Tensor(_POSITIONS, ("positions", "axis_0"), (a["pos_axial_shape"][0], d)),
        *layer_norm(f"{EMBEDDINGS}.LayerNorm", ("embedding_norm",), d),
    ]
    for layer, block, repeat, _ in spec.layers():
        rows += tables.of_layer(_layer(a), f"bert.encoder.layer.{layer}", block, repeat)
    head = "cls.predictions"
    rows += _linear(f"{head}.transform.dense", ("hidden",), ("w", "b"), (d, d))
    rows += layer_norm(f"{head}.transform.LayerNorm", ("head_norm",), d)
    return [*rows, Tensor(f"{head}.bias", ("logits", "b"), (vocab,))]


def _layer(a: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a layer."""
    d, d_ff, n = a["d_model"], a["d_ff"], a["n_heads"]
    h, rows = d // n, []
    for x, part in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"attention.self.{part}"
        rows.append(tables.to_heads(f"{name}.weight", ("attention", f"w_{x}"), n, h, d))
        rows.append(tables.of_heads(f"{name}.bias", ("attention", f"b_{x}"), (n, h)))
    output, into = "attention.output", ("feed_forward",)
    rows.append(tables.from_heads(f"{output}.dense.weight", ("attention", "w_o"), n, h, d))
    rows.append(Tensor(f"{output}.dense.bias", ("attention", "b_o"), (d,)))
    rows += layer_norm(f"{output}.LayerNorm", ("attention_norm",), d)
    rows += _linear("intermediate.dense", into, ("w1", "b1"), (d_ff, d))
    rows += _linear("output.dense", into, ("w2", "b2"), (d, d_ff))
    return [*rows, *layer_norm("output.LayerNorm", ("feed_forward_norm",), d)]


def _linear(name: str, path: tables.Path, weights: tuple[str, str], sizes) -> list[Tensor]:
    w, b = ((*path, weight) for weight in weights)
    return [tables.linear(f"{name}.weight", w, sizes), Tensor(f"{name}.bias", b, sizes[:1])]


def without_copies(tensors: Mapping[str, Any], where: str, spec: Spec) -> dict[str, Any]:
    """The tensors by the names of `table`: with type 0 in the positions, without copies.

    Older files name a norm's weights gamma and beta.
    """
    del spec

    def new(name: str) -> str:
        return name.replace(".gamma", ".weight").replace(".beta", ".bias")

    kept = {name: array for name, array in tensors.items() if not name.startswith(_NOT_READ)}
    named = renamed(kept, new, where)
    copies = (
        ("cls.predictions.decoder.weight", f"{EMBEDDINGS}.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )
    for copy, original in copies:
        tables.remove_copy(named, copy, original, where, "BERT's are one")
    types, positions = named.pop(_TYPES, None), named.get(_POSITIONS)
    if types is None or positions is None or len(types.shape) != 2 or len(positions.shape) != 2:
        raise ValueError(f"{where} is of another model: expected {_TYPES} and {_POSITIONS}")
    if types.shape[1] != positions.shape[1] or not types.shape[0]:
        raise ValueError(
            f"{where} is of another model: {_TYPES} has shape {types.shape} and {_POSITIONS} "
            f"{positions.shape}"
        )
    tables.check_floats({_TYPES: types, _POSITIONS: positions}, where)
    types, positions = (np.asarray(x).astype(np.float32) for x in (types, positions))
    named[_POSITIONS] = positions + types[0]
    return named

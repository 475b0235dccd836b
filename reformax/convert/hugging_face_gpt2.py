"""Hugging Face's `GPT2LMHeadModel` (Radford et al. 2019), its config.json and its tensors.

It is `lm.TransformerLM` with learned positions, one axis of axial ones, biases in attention, tied
embeddings and the tanh's GELU. Its linear layer, `Conv1D`, is `x W + b` as in reformax; one of
them, `c_attn`, makes queries, keys and values. Only training differs: reformax also drops features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
from reformax.declared import Count, Depth, NonNegative, Positive, Rate, Size, VocabSize

FIELDS = {
    "activation_function": ConfigField("gelu_new", Literal[*ACTIVATIONS]),
    "add_cross_attention": ConfigField(False, bool),
    "attn_pdrop": ConfigField(0.1, Rate),
    "bos_token_id": ConfigField(50256, Count),
    "embd_pdrop": ConfigField(0.1, Rate),
    "initializer_range": ConfigField(0.02, Positive),
    "layer_norm_epsilon": ConfigField(1e-5, NonNegative),
    "n_embd": ConfigField(768, Size),
    "n_head": ConfigField(12, Size),
    "n_inner": ConfigField(None, Size | None),
    "n_layer": ConfigField(12, Depth),
    "n_positions": ConfigField(1024, Size),
    "resid_pdrop": ConfigField(0.1, Rate),
    "scale_attn_by_inverse_layer_idx": ConfigField(False, bool),
    "scale_attn_weights": ConfigField(True, bool),
    "tie_word_embeddings": ConfigField(True, bool),
    "vocab_size": ConfigField(50257, VocabSize),
}
PREFIX = "transformer."


def spec_of(config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on the differences.

    Raises:
      ValueError: a value is out of range in either format, or the function is another.
    """
    get, notes = checked(config, FIELDS), []
    d, d_head = get["n_embd"], size_of_head(get, "n_embd", "n_head")
    if get["bos_token_id"] >= get["vocab_size"]:
        raise ValueError(
            f"bos_token_id is {get['bos_token_id']}: expected an id below vocab_size, "
            f"{get['vocab_size']}"
        )
    rates = {get["embd_pdrop"], get["resid_pdrop"]}
    if len(rates) > 1:
        notes.append(
            f"dropout: embeddings and sublayers have {sorted(rates)} in GPT-2 and one rate in "
            f"reformax, {max(rates)}; only training depends on it"
        )
    spec = Spec.make(
        "TransformerLM",
        [Op("flash", {})],
        vocab_size=get["vocab_size"],
        **learnt_positions(d, d_head, get["n_positions"]),
        d_ff=4 * d if get["n_inner"] is None else get["n_inner"],
        n_layers=get["n_layer"],
        n_heads=get["n_head"],
        dropout=max(rates),
        attention_dropout=get["attn_pdrop"],
        tie_embeddings=True,
        first_token=get["bos_token_id"],
        ff_activation=ACTIVATIONS[get["activation_function"]],
        norm_epsilon=get["layer_norm_epsilon"],
        init_std=get["initializer_range"],
    )
    return spec, notes


def config_of(spec: Spec, like: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model; values of `like` that say the same are kept.

    Raises:
      ValueError: GPT-2 is another function; the error names the argument.
    """
    a, require = spec.arguments, requirement("Hugging Face's GPT-2")
    spec.require_plain(require)
    spec.require(require, pos_type="axial")
    shape = tuple(a["pos_axial_shape"])
    require(len(shape) == 1, f"pos_axial_shape is {shape}", "one axis")
    d, n_heads = a["d_model"], a["n_heads"]
    require(d % n_heads == 0, f"d_model is {d}", f"a multiple of n_heads, {n_heads}")
    spec.require(require, attention_bias=True, tie_embeddings=True, next_value=False)
    spec.require(require, n_kv_heads=None, n_qk_heads=None, post_norm=False, embedding_norm=False)
    spec.require(require, d_attention_key=d // n_heads, d_attention_value=d // n_heads)
    spec.require_dense(require)
    kept_rates = {like.get("embd_pdrop", 0.1), like.get("resid_pdrop", 0.1)}
    same_rates = bool(like) and max(kept_rates) == a["dropout"]
    rates = {} if same_rates else {"embd_pdrop": a["dropout"], "resid_pdrop": a["dropout"]}
    n_inner = (
        {} if like.get("n_inner", 0) is None and a["d_ff"] == 4 * d else {"n_inner": a["d_ff"]}
    )
    return {
        **like,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": activation_of(spec, like.get("activation_function")),
        "attn_pdrop": a["attention_dropout"],
        "bos_token_id": a["first_token"],
        "initializer_range": a["init_std"],
        "layer_norm_epsilon": a["norm_epsilon"],
        "n_embd": d,
        "n_head": a["n_heads"],
        "n_layer": a["n_layers"],
        "n_positions": shape[0],
        "tie_word_embeddings": True,
        "vocab_size": a["vocab_size"],
        **rates,
        **n_inner,
    }


def table(spec: Spec) -> list[Tensor]:
    """The tensors of `GPT2LMHeadModel`, and which weight each one is."""
    a = spec.arguments
    d = a["d_model"]
    rows = [
        Tensor(f"{PREFIX}wte.weight", ("embedding",), (a["vocab_size"], d)),
        Tensor(f"{PREFIX}wpe.weight", ("positions", "axis_0"), (a["pos_axial_shape"][0], d)),
    ]
    for layer, block, repeat, _ in spec.layers():
        rows += tables.of_layer(_layer(a), f"{PREFIX}h.{layer}", block, repeat)
    return [*rows, *layer_norm(f"{PREFIX}ln_f", ("norm",), d)]


def _layer(a: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a layer; queries, keys and values are one."""
    d, d_ff, n = a["d_model"], a["d_ff"], a["n_heads"]
    h, rows = d // n, layer_norm("ln_1", ("attention_norm",), d)
    weights = [tables.dense_to_heads("", ("attention", f"w_{x}"), n, h, d) for x in "qkv"]
    biases = [tables.of_heads("", ("attention", f"b_{x}"), (n, h)) for x in "qkv"]
    rows += tables.joined("attn.c_attn.weight", weights, axis=1)
    rows += tables.joined("attn.c_attn.bias", biases)
    rows.append(tables.dense_from_heads("attn.c_proj.weight", ("attention", "w_o"), n, h, d))
    rows.append(Tensor("attn.c_proj.bias", ("attention", "b_o"), (d,)))
    rows += layer_norm("ln_2", ("feed_forward_norm",), d)
    for i, part, sizes in ((1, "c_fc", (d, d_ff)), (2, "c_proj", (d_ff, d))):
        rows.append(Tensor(f"mlp.{part}.weight", ("feed_forward", f"w{i}"), sizes))
        rows.append(Tensor(f"mlp.{part}.bias", ("feed_forward", f"b{i}"), sizes[1:]))
    return rows


def without_copies(tensors: Mapping[str, Any], where: str, spec: Spec) -> dict[str, Any]:
    """The tensors by the names of `table`: without causal masks and the copy of the embedding.

    Files of `GPT2Model`, as the published ones, lack the prefix of names.
    """
    del spec

    def full(name: str) -> str:
        return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name

    kept = {
        name: array
        for name, array in tensors.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
    named = renamed(kept, full, where)
    embedding = f"{PREFIX}wte.weight"
    tables.remove_copy(named, "lm_head.weight", embedding, where, "GPT-2's are one")
    return named

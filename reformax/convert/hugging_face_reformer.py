"""Hugging Face's `ReformerModelWithLMHead`, its config.json and tensors.

`ReformerModelWithLMHead` of `transformers` is `lm.ReformerLM` with the arguments that `spec_of`
finds:

  * LSH layers: chunks in a circle, keys counted each time, factored buckets, the rounding of
    `self_score` where a position finds only itself. Where one chunk covers the length, attention
    is over all keys.
  * Local layers: separate queries and keys. Causality hides their circle, unless a chunk sees two
    or more before it.
  * Axial positions, or a table of positions, which is one axis.

Two things differ: rows of padding, and which weights dropout drops in training.

A Reformer's logits add `lm_head.decoder.bias`, which version 4 of `transformers` keeps as
`lm_head.bias` too. Versions 5.0 to 5.23 have the latter alone and leave it out; in 5.24 the two are
apart, and only the former counts. The logits of reformax add it; files that are written have both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np

from reformax.convert import tables
from reformax.convert.hugging_face_config import (
    ACTIVATIONS,
    ConfigField,
    activation_of,
    requirement,
)
from reformax.convert.spec import Op, Spec, cycle_of
from reformax.convert.tables import Tensor, layer_norm
from reformax.declared import (
    Count,
    Depth,
    NonNegative,
    Rate,
    Size,
    VocabSize,
    check,
    hints_of,
    shown,
)
from reformax.ops import lsh
from reformax.ops.hashing.angular import bucket_factors
from reformax.ops.hashing.circle import SELF_SCORE


class _EvenBuckets(NamedTuple):
    """The values of n_buckets that `lsh.lsh` takes, except 'auto'."""

    def hold(self, value: Any) -> bool:
        """Whether hashing has such buckets."""
        try:
            return value != "auto" and bool(bucket_factors(value))
        except ValueError:
            return False

    def words(self, value: Any) -> str:
        """The expected values, in words."""
        return "even numbers from 2 on, with a product below 2**31"


_DECODER_BIAS = "lm_head.decoder.bias"
_require = requirement("Hugging Face's Reformer")
_Kinds = Sequence[Literal["local", "lsh"]]
_LSH = hints_of(lsh.lsh)
FIELDS = {
    "attention_head_size": ConfigField(64, Size),
    "attn_layers": ConfigField(["local", "lsh"] * 3, _Kinds),
    "axial_pos_embds": ConfigField(True, bool),
    "axial_pos_embds_dim": ConfigField([64, 192], Sequence[Size], "axial"),
    "axial_pos_shape": ConfigField([64, 64], Sequence[Size], "axial"),
    "chunk_size_feed_forward": ConfigField(0, Count),
    "feed_forward_size": ConfigField(512, Size),
    "hidden_act": ConfigField("relu", Literal[*ACTIVATIONS]),
    "hidden_dropout_prob": ConfigField(0.05, Rate),
    "hidden_size": ConfigField(256, Size),
    "is_decoder": ConfigField(False, bool),
    "layer_norm_eps": ConfigField(1e-12, NonNegative),
    "local_attention_probs_dropout_prob": ConfigField(0.05, Rate, "local"),
    "local_attn_chunk_length": ConfigField(64, Size, "local"),
    "local_num_chunks_after": ConfigField(0, Count, "local"),
    "local_num_chunks_before": ConfigField(1, _LSH["n_chunks_before"], "local"),
    "lsh_attention_probs_dropout_prob": ConfigField(0.0, Rate, "lsh"),
    "lsh_attn_chunk_length": ConfigField(64, Size, "lsh"),
    "lsh_num_chunks_after": ConfigField(0, Count, "lsh"),
    "lsh_num_chunks_before": ConfigField(1, _LSH["n_chunks_before"], "lsh"),
    "max_position_embeddings": ConfigField(4096, Size),
    "num_attention_heads": ConfigField(12, Size),
    "num_buckets": ConfigField(None, Annotated[Any, _EvenBuckets()], "lsh"),
    "num_hashes": ConfigField(1, _LSH["n_hashes"], "lsh"),
    "vocab_size": ConfigField(320, VocabSize),
}
# NumPy before version 2 has 32 axes, and a tensor of positions has one besides those of the grid.
_MAX_AXES = 31
_MOST_CHUNKS = get_args(_LSH["pad_chunks"])[1].most


def spec_of(config: Mapping[str, Any]) -> tuple[Spec, list[str]]:
    """The model that computes the function of a config.json, and notes on the differences.

    Raises:
      ValueError: the model is not causal, or a value is out of range in either format.
    """
    get = _checked(config)
    layers, notes = get["attn_layers"], []
    kinds = sorted(set(layers))
    if not get["is_decoder"]:
        raise ValueError("is_decoder is false: ReformerLM is causal, set it in config.json")
    for kind in kinds:
        n_after = get[f"{kind}_num_chunks_after"]
        if n_after:
            raise ValueError(f"{kind}_num_chunks_after is {n_after}: a causal model has 0")
    whole = math.lcm(*(get[f"{kind}_attn_chunk_length"] for kind in kinds))
    rates = {get[f"{kind}_attention_probs_dropout_prob"] for kind in kinds}
    if len(rates) > 1:
        notes.append(
            f"attention dropout: local and LSH layers have {sorted(rates)} and one rate in "
            f"reformax, {max(rates)}; only training depends on it"
        )
    cycle = [_op(kind, get, whole) for kind in cycle_of(layers)]
    if get["axial_pos_embds"]:
        shape, d_embs = tuple(get["axial_pos_shape"]), tuple(get["axial_pos_embds_dim"])
    else:
        shape, d_embs = (get["max_position_embeddings"],), (get["hidden_size"],)
    spec = Spec.make(
        "ReformerLM",
        cycle,
        vocab_size=get["vocab_size"],
        d_model=get["hidden_size"],
        d_ff=get["feed_forward_size"],
        d_attention_key=get["attention_head_size"],
        d_attention_value=get["attention_head_size"],
        n_layers=len(layers),
        n_heads=get["num_attention_heads"],
        dropout=get["hidden_dropout_prob"],
        attention_dropout=max(rates),
        pos_type="axial",
        pos_axial_shape=shape,
        pos_d_axial_embs=d_embs,
        ff_activation=ACTIVATIONS[get["hidden_act"]],
        ff_chunk_size=get["chunk_size_feed_forward"],
        norm_epsilon=get["layer_norm_eps"],
    )
    return spec, notes


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, defaults filled in, once each of them is what it may be."""
    get = {name: config.get(name, field.default) for name, field in FIELDS.items()}
    for name in ("attn_layers", "axial_pos_embds"):  # they say which others are read
        check(name, get[name], FIELDS[name].hint)
    check("the number of attn_layers", len(get["attn_layers"]), Depth)
    parts = {None, *get["attn_layers"], *(["axial"] if get["axial_pos_embds"] else [])}
    if "lsh" in parts and get["num_buckets"] is None:
        raise ValueError(
            "num_buckets is null: transformers chooses it for the first sequence that it sees; "
            "write a number into config.json, such as twice the length over the chunk length"
        )
    for name, field in FIELDS.items():
        if field.part in parts:
            check(name, get[name], field.hint)
    if "axial" in parts:
        _check_axes(get["axial_pos_shape"], get["axial_pos_embds_dim"], get["hidden_size"])
    lengths = [get[f"{kind}_attn_chunk_length"] for kind in ("local", "lsh") if kind in parts]
    if math.lcm(*lengths) // min(lengths) > _MOST_CHUNKS:
        raise ValueError(
            f"local_attn_chunk_length is {lengths[0]} and lsh_attn_chunk_length {lengths[-1]}: "
            f"lengths are padded to a multiple of both, expected at most {_MOST_CHUNKS:,} chunks"
        )
    return get


def _check_axes(shape: Sequence[int], d_embs: Sequence[int], hidden_size: int) -> None:
    if not 1 <= len(shape) == len(d_embs) <= _MAX_AXES:
        raise ValueError(
            f"axial_pos_shape has {len(shape)} axes and axial_pos_embds_dim {len(d_embs)}: "
            f"expected as many, from 1 to {_MAX_AXES}"
        )
    if sum(d_embs) != hidden_size:
        raise ValueError(
            f"axial_pos_embds_dim is {shown(d_embs)}: expected numbers that add up to hidden_size, "
            f"{hidden_size}"
        )


def _op(kind: str, get: Mapping[str, Any], whole: int) -> Op:
    chunk_len, n_before = get[f"{kind}_attn_chunk_length"], get[f"{kind}_num_chunks_before"]
    circle = {"wrap": True, "pad_chunks": whole // chunk_len}
    options: dict[str, Any] = {"chunk_len": chunk_len, "n_chunks_before": n_before}
    if kind == "local":
        return Op("local", options | (circle if n_before > 1 else {}))
    n_buckets = get["num_buckets"]
    n_buckets = n_buckets if isinstance(n_buckets, int) else tuple(n_buckets)
    options |= {"n_hashes": get["num_hashes"], "n_buckets": n_buckets, "count_once": False}
    return Op("lsh", options | circle | {"self_score": SELF_SCORE})


def config_of(spec: Spec, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model; `like` is as in `hugging_face.config_of`.

    Raises:
      ValueError: Hugging Face's Reformer has no such model; the error names the argument.
    """
    arguments, like = spec.arguments, like or {}
    _require(spec.model == "ReformerLM", f"the model is {spec.model}", "ReformerLM")
    spec.require_plain(_require)
    spec.require(_require, pos_type="axial")
    shape, d_embs = list(arguments["pos_axial_shape"]), list(arguments["pos_d_axial_embs"])
    _require(len(shape) < 3, f"pos_axial_shape is {tuple(shape)}", "one or two axes")
    d_head = arguments["d_attention_key"]
    spec.require(_require, attention_bias=False, next_value=False, tie_embeddings=False)
    spec.require(_require, embedding_norm=False, n_slots=None, n_kv_heads=None, n_qk_heads=None)
    spec.require(_require, first_token=0)
    _require(
        d_head == arguments["d_attention_value"],
        f"d_attention_value is {arguments['d_attention_value']}",
        f"d_attention_key, {d_head}",
    )
    repeated = [op for *_, op in spec.layers()]
    config: dict[str, Any] = {
        "architectures": ["ReformerModelWithLMHead"],
        "model_type": "reformer",
        "is_decoder": True,
        "attn_layers": [op.name for op in repeated],
        "attention_head_size": d_head,
        "axial_pos_embds": len(shape) == 2,
        "chunk_size_feed_forward": arguments["ff_chunk_size"],
        "feed_forward_size": arguments["d_ff"],
        "hidden_act": activation_of(spec, like.get("hidden_act")),
        "hidden_dropout_prob": arguments["dropout"],
        "hidden_size": arguments["d_model"],
        "layer_norm_eps": arguments["norm_epsilon"],
        "max_position_embeddings": math.prod(shape),
        "num_attention_heads": arguments["n_heads"],
        "num_hidden_layers": len(repeated),
        "tie_word_embeddings": False,
        "vocab_size": arguments["vocab_size"],
    }
    if len(shape) == 2:
        config |= {"axial_pos_shape": shape, "axial_pos_embds_dim": d_embs}
    config |= _attention_of(spec)
    # `like` may say more, as long as it says the same.
    kept = {**like, **config}
    for kind in ("local", "lsh"):
        rate = f"{kind}_attention_probs_dropout_prob"
        if rate in like and spec_of(like)[0].arguments["attention_dropout"] == config.get(rate):
            kept[rate] = like[rate]
    if "max_position_embeddings" in like and len(shape) == 2:
        kept["max_position_embeddings"] = like["max_position_embeddings"]
    return kept


def _attention_of(spec: Spec) -> dict[str, Any]:
    """The settings of the attention layers, one for each kind of layer."""
    config: dict[str, Any] = {}
    kinds = {op.name for op in spec.attention}
    _require(kinds <= {"local", "lsh"}, f"the attention is {', '.join(kinds)}", "local and lsh")
    for kind in ("local", "lsh"):
        ops = [op for op in spec.attention if op.name == kind]
        if ops:
            same = all(op.options == ops[0].options for op in ops)
            _require(same, f"the {kind} layers have several settings", "one")
            config |= {
                f"{kind}_attn_chunk_length": ops[0].option("chunk_len"),
                f"{kind}_num_chunks_before": ops[0].option("n_chunks_before"),
                f"{kind}_num_chunks_after": 0,
                f"{kind}_attention_probs_dropout_prob": spec.arguments["attention_dropout"],
            }
    whole = math.lcm(*(config[f"{kind}_attn_chunk_length"] for kind in kinds))
    for op in spec.attention:
        _require_same_function(op, whole // op.option("chunk_len"))
        if op.name == "lsh":
            n_buckets = op.option("n_buckets")
            config["num_buckets"] = n_buckets if isinstance(n_buckets, int) else list(n_buckets)
            config["num_hashes"] = op.option("n_hashes")
    return config


def _require_same_function(op: Op, pad_chunks: int) -> None:
    wanted: dict[str, Any] = {"n_chunks_after": 0}
    if op.name == "local":
        wanted |= {"window": None, "shared_qk": False}
        if op.option("n_chunks_before") > 1:
            wanted |= {"wrap": True, "pad_chunks": pad_chunks}
    else:
        wanted |= {"count_once": False, "wrap": True, "pad_chunks": pad_chunks}
        wanted |= {"attend_self_if_alone": True, "self_score": SELF_SCORE}
        n_eval = op.option("n_hashes_eval")
        _require(n_eval in (None, op.option("n_hashes")), f"n_hashes_eval is {n_eval}", "n_hashes")
        _require(op.option("n_buckets") != "auto", "n_buckets is 'auto'", "a number")
    op.require_plain(_require, **wanted)


def table(spec: Spec) -> list[Tensor]:
    """The tensors of `ReformerModelWithLMHead`, and which weight each one is."""
    arguments = spec.arguments
    d, vocab = arguments["d_model"], arguments["vocab_size"]
    rows = [Tensor("reformer.embeddings.word_embeddings.weight", ("embedding",), (vocab, d))]
    rows += _positions(arguments["pos_axial_shape"], arguments["pos_d_axial_embs"])
    for layer, block, repeat, op in spec.layers():
        of_layer = _layer(op, arguments)
        rows += tables.of_layer(of_layer, f"reformer.encoder.layers.{layer}", block, repeat)
    rows += layer_norm("reformer.encoder.layer_norm", ("norm",), 2 * d)
    rows.append(tables.linear("lm_head.decoder.weight", ("logits", "w"), (vocab, 2 * d)))
    return [*rows, Tensor("lm_head.bias", ("logits", "b"), (vocab,))]


def _positions(shape: Sequence[int], d_embs: Sequence[int]) -> list[Tensor]:
    """The table of positions, or one for each axis."""
    name = "reformer.embeddings.position_embeddings"
    if len(shape) == 1:
        sizes = (shape[0], d_embs[0])
        return [Tensor(f"{name}.embedding.weight", ("positions", "axis_0"), sizes)]
    return tables.axial(f"{name}.weights.{{axis}}", shape, d_embs)


def _layer(op: Op, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of one layer: norm and attention, norm and feed-forward."""
    d, d_ff = arguments["d_model"], arguments["d_ff"]
    n, h = arguments["n_heads"], arguments["d_attention_key"]
    projections = {"w_q": "query_key", "w_v": "value"}
    if op.name == "local":
        projections = {"w_q": "query", "w_k": "key", "w_v": "value"}
    rows = layer_norm("attention.layer_norm", ("attention_norm",), d)
    for weight, projection in projections.items():
        name = f"attention.self_attention.{projection}.weight"
        rows.append(tables.to_heads(name, ("attention", weight), n, h, d))
    rows.append(tables.from_heads("attention.output.dense.weight", ("attention", "w_o"), n, h, d))
    rows += layer_norm("feed_forward.layer_norm", ("feed_forward_norm",), d)
    for i, part, sizes in ((1, "dense", (d_ff, d)), (2, "output", (d, d_ff))):
        name = f"feed_forward.{part}.dense"
        rows.append(tables.linear(f"{name}.weight", ("feed_forward", f"w{i}"), sizes))
        rows.append(Tensor(f"{name}.bias", ("feed_forward", f"b{i}"), sizes[:1]))
    return rows


def without_copies(tensors: Mapping[str, Any], where: str, spec: Spec) -> dict[str, Any]:
    """The tensors without constants of older versions; the bias that counts under one name."""
    del where, spec
    tensors = {
        name: array
        for name, array in tensors.items()
        if not name.endswith(("mask_value_float16", "mask_value_float32"))
    }
    bias = tensors.pop(_DECODER_BIAS, None)
    return tensors if bias is None else tensors | {"lm_head.bias": bias}


def completed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with the bias under both of its names."""
    return tensors | {_DECODER_BIAS: tensors["lm_head.bias"]}

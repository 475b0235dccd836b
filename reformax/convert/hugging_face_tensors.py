"""The tensors of decoders of today in Hugging Face's format, and which weight each one is.

PyTorch's linear layers have `[out, in]`, and those of reformax `[heads, in, size]`. Which tensors a
model has follows from its design; a family may join some of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from reformax.convert import tables
from reformax.convert.hugging_face_decoder import recurrent_sizes
from reformax.convert.hugging_face_family import Family
from reformax.convert.hugging_face_files import StoredTensor
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor, renamed
from reformax.layers.layer_norm import norm_places
from reformax.layers.multi_head import ATTENTION_GATE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Parts of models of other media, what predicts several tokens, and constants of older versions.
_NOT_READ = ("visual.", "vision_tower.", "multi_modal_projector.", "mtp.")
_CONSTANT = ".rotary_emb.inv_freq"
# What files of OLMo Hybrid call the norms.
_RENAMED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
# A sublayer's norms of its input and of its output, by the place of norms.
_NORMS = {
    "input": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "output": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


class _RecurrenceNames(NamedTuple):
    """The names of parts of the gated delta rule."""

    gate: str
    beta: str
    keep: str
    norm: str
    output: str


_JOINED = _RecurrenceNames("in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj")  # Qwen3.5
_SEPARATE = _RecurrenceNames("g_proj", "b_proj", "a_proj", "o_norm", "o_proj")  # OLMo Hybrid


def table(family: Family, spec: Spec) -> list[Tensor]:
    """The tensors of a model of a family, and which weight each one is."""
    a = spec.arguments
    d, vocab = a["d_model"], a["vocab_size"]
    rows = [Tensor(EMBEDDING, ("embedding",), (vocab, d))]
    places = norm_places(spec.design.norm_place, len(spec.attention))
    for layer, block, repeat, op in spec.layers():
        recurrent = op.name == "gated_delta"
        attention = _recurrence(family, spec, op) if recurrent else _attention(spec, family.fused)
        norms = _norms(spec, places[block])
        of_layer = [*norms, *attention, *_feed_forward(spec, family.fused)]
        rows += tables.of_layer(of_layer, f"model.layers.{layer}", block, repeat)
    rows.append(Tensor("model.norm.weight", ("norm", "scale"), (d,)))
    if not a["tie_embeddings"]:
        rows.append(tables.linear(HEAD, ("logits", "w"), (vocab, d)))
    return rows


def _norms(spec: Spec, place: str) -> Iterator[Tensor]:
    sublayers, (before, after) = ("attention", "feed_forward"), _NORMS[place]
    for sublayer, read, written in zip(sublayers, before, after, strict=True):
        norms = {read: (f"{sublayer}_norm",), written: (sublayer, "output_norm")}
        for norm, path in norms.items():
            if norm is not None:
                yield Tensor(f"{norm}.weight", (*path, "scale"), (spec.arguments["d_model"],))


def _attention(spec: Spec, fused: bool) -> Iterator[Tensor]:
    a, design = spec.arguments, spec.design
    d, n, h = a["d_model"], a["n_heads"], a["d_attention_key"]
    n_kv = a["n_kv_heads"] or n
    n_heads, name, path = {"q": n, "k": n_kv, "v": n_kv}, "self_attn", "attention"
    rows = [
        tables.to_heads(f"{name}.{x}_proj.weight", (path, f"w_{x}"), heads, h, d)
        for x, heads in n_heads.items()
    ]
    if design.attention_gate:
        rows[:1] = _with_gate(f"{name}.q_proj.weight", n, h, d)
    yield from tables.joined(f"{name}.qkv_proj.weight", rows) if fused else rows
    for x, heads in n_heads.items() if design.attention_bias else ():
        yield tables.of_heads(f"{name}.{x}_proj.bias", (path, f"b_{x}"), (heads, h))
    yield tables.from_heads(f"{name}.o_proj.weight", (path, "w_o"), n, h, d)
    if design.output_bias:
        yield Tensor(f"{name}.o_proj.bias", (path, "b_o"), (d,))
    for x in "qk" if design.qk_norm else ():
        shape = (n_heads[x], h) if design.qk_norm == "joint" else (h,)
        yield tables.of_heads(f"{name}.{x}_norm.weight", (path, f"{x}_norm"), shape)


def _with_gate(name: str, n: int, h: int, d: int) -> list[Tensor]:
    """Queries, of which each head is followed by its gate."""

    def swap(w):  # [N, H, D] -> [N, D, H], and back
        return w.transpose(0, 2, 1)

    whole = Tensor(name, (), (2 * n * h, d), None, swap, swap, view=(n, 2 * h, d))
    return [
        whole._replace(path=("attention", weight), part=(1, start, start + h))
        for weight, start in (("w_q", 0), (f"w_{ATTENTION_GATE}", h))
    ]


def _feed_forward(spec: Spec, fused: bool) -> Iterator[Tensor]:
    design, d, d_ff = spec.design, spec.arguments["d_model"], spec.arguments["d_ff"]
    names = {"1": "gate", "3": "up"} if design.ff_gated else {"1": "up"}
    path = "feed_forward"
    rows = [
        tables.linear(f"mlp.{x}_proj.weight", (path, f"w{i}"), (d_ff, d)) for i, x in names.items()
    ]
    yield from tables.joined("mlp.gate_up_proj.weight", rows) if fused else rows
    yield tables.linear("mlp.down_proj.weight", (path, "w2"), (d, d_ff))
    if design.ff_bias:
        for i, name in {**names, "2": "down"}.items():
            yield Tensor(f"mlp.{name}_proj.bias", (path, f"b{i}"), (d if i == "2" else d_ff,))


def _recurrence(family: Family, spec: Spec, op: Op) -> Iterator[Tensor]:
    """The gated delta rule; a head's decay is written with the other sign."""
    d, (n, n_qk, h, v) = spec.arguments["d_model"], recurrent_sizes(spec).values()
    name, path, of_op = "linear_attn", "attention", ("attention", "op")
    parts = {"q": (n_qk, h), "k": (n_qk, h), "v": (n, v)}
    qkv = [
        tables.to_heads(f"{name}.{x}_proj.weight", (path, f"w_{x}"), *shape, d)
        for x, shape in parts.items()
    ]
    yield from qkv if family.separate else tables.joined(f"{name}.in_proj_qkv.weight", qkv)
    theirs = _SEPARATE if family.separate else _JOINED
    size = op.option("conv_size")
    convs = [_conv((*of_op, f"conv_{x}"), *shape, size) for x, shape in parts.items()]
    yield from tables.joined(f"{name}.conv1d.weight", convs)
    yield tables.to_heads(f"{name}.{theirs.gate}.weight", (path, "w_output_gate"), n, v, d)
    yield tables.to_heads(f"{name}.{theirs.beta}.weight", (path, "w_beta"), n, 1, d)
    keep = tables.to_heads(f"{name}.{theirs.keep}.weight", (path, "w_keep"), n, 1, d)
    yield keep._replace(read=lambda w: -keep.read(w), write=lambda w: -keep.write(w))
    yield Tensor(f"{name}.A_log", (*of_op, "rate"), (n,))
    yield Tensor(f"{name}.dt_bias", (*of_op, "bias"), (n,))
    scale = Tensor(f"{name}.{theirs.norm}.weight", (*of_op, "scale"), (v,))
    # `prepared` has made the heads' scales equal.
    yield scale._replace(read=lambda w: np.broadcast_to(w, (n, v)), write=lambda w: w[0])
    yield tables.from_heads(f"{name}.{theirs.output}.weight", (path, "w_o"), n, v, d)


def _conv(path: tables.Path, n: int, size: int, width: int) -> Tensor:
    """A convolution of each feature, in PyTorch with the newest position last."""

    def read(w):  # [n size, 1, W] -> [n, size, W]
        return np.flip(w[:, 0], -1).reshape(n, size, width)

    def write(w):
        return np.flip(w, -1).reshape(n * size, 1, width)

    return Tensor("", path, (n * size, 1, width), None, read, write)


def prepared(family: Family, spec: Spec, params: Any) -> Any:
    """The weights that the table writes: norms as the family has them, scales that heads share."""
    ours, theirs = spec.design.norm == "rms_plus_one", family.plus_one
    if ours != theirs:
        params = _shifted(params, 1.0 if ours else -1.0)
    return _shared_scales(spec, params)


def _shifted(params: Any, by: float) -> Any:
    """The weights, with a number added to those of norms."""

    def of_norm(path, weight):
        names = [key.key for key in path if hasattr(key, "key")]
        norm = names[-1] in ("q_norm", "k_norm") or (
            names[-1] == "scale" and names[-2].endswith("norm")
        )
        return np.asarray(weight) + np.float32(by) if norm else weight

    return jax.tree_util.tree_map_with_path(of_norm, params)


def _shared_scales(spec: Spec, params: Any) -> Any:
    """The weights with one scale for all heads of a recurrence, where there is only one there.

    Heads of other scales have them in the output's projection instead, which is next.
    """
    stack = dict(params["stack"])
    for block, op in enumerate(spec.attention):
        name = f"block_{block}"
        if op.name != "gated_delta":
            continue
        attention = stack[name]["attention"]
        scale = np.asarray(attention["op"]["scale"])  # [repeats, N, V]
        if (scale == scale[:, :1]).all():
            continue
        weights = attention["op"] | {"scale": np.ones_like(scale)}
        w_o = np.asarray(attention["w_o"]) * scale[..., None]
        stack[name] = stack[name] | {"attention": attention | {"op": weights, "w_o": w_o}}
    return params | {"stack": stack}


def _with_whole_convs(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with one convolution of queries, keys and values, where a file has three.

    transformers cuts it into three of one size, wherever the values begin.
    """
    found = dict(tensors)
    for name in tensors:
        before, middle, after = name.partition(".q_conv1d.")
        names = [f"{before}.{x}_conv1d.{after}" for x in "qkv"]
        parts = [tensors[x] for x in names if x in tensors]
        if not middle or len(parts) < 3 or len({tuple(x.shape[1:]) for x in parts}) > 1:
            continue
        for x in names:
            del found[x]
        shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
        load = functools.partial(np.concatenate, parts)
        whole_file = any(getattr(x, "whole_file", False) for x in parts)
        whole = StoredTensor(shape, parts[0].dtype, load, whole_file)
        found[f"{before}.conv1d.{after}"] = whole
    return found


def without_copies(tensors: Mapping[str, Any], where: str, spec: Spec) -> dict[str, Any]:
    """The tensors by the names of `table`: those of the text, without copies and constants."""

    def full(name: str) -> str:
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in ("language_model", "model"):
            del parts[0]
        name = ".".join(_RENAMED.get(part, part) for part in parts)
        return name if name.startswith("lm_head.") else f"model.{name}"

    kept = {
        name: x
        for name, x in tensors.items()
        if not name.startswith(_NOT_READ) and not name.endswith(_CONSTANT)
    }
    named = _with_whole_convs(renamed(kept, full, where))
    if spec.arguments["tie_embeddings"]:
        tables.remove_copy(named, HEAD, EMBEDDING, where, "tie_word_embeddings is True")
    return named

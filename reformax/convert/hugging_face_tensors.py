"""The tensors of decoders of today in Hugging Face's format, and which weight each one is.

PyTorch's linear layers have `[out, in]`, and those of reformax `[heads, in, size]`. Which tensors a
model has follows from its design; a family may join some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from reformax.convert import tables
from reformax.convert.hugging_face_decoder import recurrent_sizes
from reformax.convert.hugging_face_families import Family
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor, renamed
from reformax.layers.multi_head import ATTENTION_GATE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Parts of models of other media, what predicts several tokens, and constants of older versions.
_NOT_READ = ("visual.", "vision_tower.", "multi_modal_projector.", "mtp.")
_CONSTANT = ".rotary_emb.inv_freq"
# A sublayer's norms of its input and of its output, by the place of norms.
_NORMS = {
    "input": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "output": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
Path = tuple[str, ...]


def table(family: Family, spec: Spec) -> list[Tensor]:
    """The tensors of a model of a family, and which weight each one is."""
    a, design = spec.arguments, spec.design
    d, vocab = a["d_model"], a["vocab_size"]
    rows = [Tensor(EMBEDDING, ("embedding",), (vocab, d))]
    before, after = _NORMS[design.norm_place]
    for layer, block, repeat, op in spec.layers():
        name, path = f"model.layers.{layer}", ("stack", f"block_{block}")
        sublayers = "attention", "feed_forward"
        for sublayer, read, written in zip(sublayers, before, after, strict=True):
            norms = {read: (*path, f"{sublayer}_norm"), written: (*path, sublayer, "output_norm")}
            rows += [
                Tensor(f"{name}.{norm}.weight", (*of, "scale"), (d,), repeat)
                for norm, of in norms.items()
                if norm is not None
            ]
        attention = _recurrence if op.name == "gated_delta" else _attention
        layer_rows = attention(family, spec, op, (*path, "attention"))
        layer_rows = [*layer_rows, *_feed_forward(family, spec, (*path, "feed_forward"))]
        rows += [row._replace(name=f"{name}.{row.name}", repeat=repeat) for row in layer_rows]
    rows.append(Tensor("model.norm.weight", ("norm", "scale"), (d,)))
    if not a["tie_embeddings"]:
        rows.append(_linear(HEAD, ("logits", "w"), (vocab, d)))
    return rows


def _linear(name: str, path: Path, shape: tuple[int, int]) -> Tensor:
    return Tensor(name, path, shape, None, np.transpose, np.transpose)


def _heads(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """A projection to n heads."""

    def read(w):  # [n size, D] -> [n, D, size]
        return w.reshape(n, size, d).transpose(0, 2, 1)

    def write(w):
        return w.transpose(0, 2, 1).reshape(n * size, d)

    return Tensor(name, path, (n * size, d), None, read, write)


def _joined(name: str, rows: list[Tensor]) -> list[Tensor]:
    """Tensors that are one, along their first axis."""
    total = sum(row.shape[0] for row in rows)
    found, start = [], 0
    for row in rows:
        stop = start + row.shape[0]
        shape = (total, *row.shape[1:])
        found.append(row._replace(name=name, shape=shape, part=(0, start, stop)))
        start = stop
    return found


def _output(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """The projection of n heads."""

    def read(w):  # [D, n size] -> [n, size, D]
        return w.T.reshape(n, size, d)

    def write(w):
        return w.reshape(n * size, d).T

    return Tensor(name, path, (d, n * size), None, read, write)


def _attention(family: Family, spec: Spec, op: Op, path: Path) -> Iterator[Tensor]:
    del op
    a, design = spec.arguments, spec.design
    d, n, h = a["d_model"], a["n_heads"], a["d_attention_key"]
    n_heads = {"q": n, "k": a["n_kv_heads"] or n, "v": a["n_kv_heads"] or n}
    rows = {}
    for x, heads in n_heads.items():
        rows[x] = _heads(f"self_attn.{x}_proj.weight", (*path, f"w_{x}"), heads, h, d)
    biases = {
        x: _of_heads(f"self_attn.{x}_proj.bias", (*path, f"b_{x}"), (k, h))
        for x, k in n_heads.items()
    }
    if design.attention_gate:
        yield from _with_gate(rows.pop("q"), path, n, h, d)
    yield from (
        _joined("self_attn.qkv_proj.weight", list(rows.values())) if family.fused else rows.values()
    )
    if design.attention_bias:
        yield from biases.values()
    yield _output("self_attn.o_proj.weight", (*path, "w_o"), n, h, d)
    if design.output_bias:
        yield Tensor("self_attn.o_proj.bias", (*path, "b_o"), (d,))
    for x in ("q", "k") if design.qk_norm else ():
        shape = (n_heads[x], h) if design.qk_norm == "joint" else (h,)
        yield _of_heads(f"self_attn.{x}_norm.weight", (*path, f"{x}_norm"), shape)


def _of_heads(name: str, path: Path, shape: tuple[int, ...]) -> Tensor:
    """A vector of all heads' features, which are apart in reformax."""
    return Tensor(name, path, (int(np.prod(shape)),), None, lambda b: b.reshape(shape), np.ravel)


def _with_gate(row: Tensor, path: Path, n: int, h: int, d: int) -> list[Tensor]:
    """Queries, of which each head is followed by its gate."""

    def read(w):  # [N, H, D] -> [N, D, H]
        return w.transpose(0, 2, 1)

    return [
        Tensor(
            row.name,
            (*path, name),
            (2 * n * h, d),
            None,
            read,
            read,  # there and back alike
            (1, start, start + h),
            (n, 2 * h, d),
        )
        for name, start in (("w_q", 0), (f"w_{ATTENTION_GATE}", h))
    ]


def _feed_forward(family: Family, spec: Spec, path: Path) -> Iterator[Tensor]:
    a, design = spec.arguments, spec.design
    d, d_ff = a["d_model"], a["d_ff"]
    names = {"1": "gate", "3": "up"} if design.ff_gated else {"1": "up"}
    rows = [_linear(f"mlp.{x}_proj.weight", (*path, f"w{i}"), (d_ff, d)) for i, x in names.items()]
    yield from _joined("mlp.gate_up_proj.weight", rows) if family.fused else rows
    yield _linear("mlp.down_proj.weight", (*path, "w2"), (d, d_ff))
    if design.ff_bias:
        for i, name in {**names, "2": "down"}.items():
            yield Tensor(f"mlp.{name}_proj.bias", (*path, f"b{i}"), (d if i == "2" else d_ff,))


def _recurrence(family: Family, spec: Spec, op: Op, path: Path) -> Iterator[Tensor]:
    """The gated delta rule of Qwen3.5; a head's decay is written with the other sign."""
    del family
    d, sizes = spec.arguments["d_model"], recurrent_sizes(spec)
    n, n_qk, h, v = sizes.values()
    own, size = (*path, "op"), op.option("conv_size")
    parts = {"q": (n_qk, h), "k": (n_qk, h), "v": (n, v)}
    qkv = [_heads("", (*path, f"w_{x}"), *shape, d) for x, shape in parts.items()]
    yield from _joined("linear_attn.in_proj_qkv.weight", qkv)
    convs = [_conv((*own, f"conv_{x}"), *shape, size) for x, shape in parts.items()]
    yield from _joined("linear_attn.conv1d.weight", convs)
    yield _heads("linear_attn.in_proj_z.weight", (*path, "w_output_gate"), n, v, d)
    yield _heads("linear_attn.in_proj_b.weight", (*path, "w_beta"), n, 1, d)
    keep = _heads("linear_attn.in_proj_a.weight", (*path, "w_keep"), n, 1, d)
    yield keep._replace(read=_negated(keep.read), write=_negated(keep.write))
    yield Tensor("linear_attn.A_log", (*own, "rate"), (n,))
    yield Tensor("linear_attn.dt_bias", (*own, "bias"), (n,))
    yield Tensor(
        "linear_attn.norm.weight",
        (*own, "scale"),
        (v,),
        None,
        lambda w: np.broadcast_to(w, (n, v)),
        lambda w: w[0],  # `prepared` has made them equal
    )
    yield _output("linear_attn.out_proj.weight", (*path, "w_o"), n, v, d)


def _negated(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda w: -function(w)


def _conv(path: Path, n: int, size: int, width: int) -> Tensor:
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
        own = attention["op"] | {"scale": np.ones_like(scale)}
        w_o = np.asarray(attention["w_o"]) * scale[..., None]
        stack[name] = stack[name] | {"attention": attention | {"op": own, "w_o": w_o}}
    return params | {"stack": stack}


def without_copies(tensors: Mapping[str, Any], where: str, spec: Spec) -> dict[str, Any]:
    """The tensors by the names of `table`: those of the text, without copies and constants."""

    def full(name: str) -> str:
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in ("language_model", "model"):
            del parts[0]
        name = ".".join(parts)
        return name if name.startswith("lm_head.") else f"model.{name}"

    kept = {
        name: x
        for name, x in tensors.items()
        if not name.startswith(_NOT_READ) and not name.endswith(_CONSTANT)
    }
    named = renamed(kept, full, where)
    if spec.arguments["tie_embeddings"]:
        copy, of = named.pop(HEAD, None), named.get(EMBEDDING)
        if copy is not None and of is not None and not tables.equal(copy, of):
            raise ValueError(
                f"{where}: {HEAD} and {EMBEDDING} differ, and tie_word_embeddings is True"
            )
    return named

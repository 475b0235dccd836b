"""`lm.ReformerLM` and `lm.TransformerLM` as the models of these names in `trax.models`.

`table` maps weights of reformax to weights of Trax's model, `notes` says where the two functions
differ, and `model_of` makes Trax's model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reformax.convert import tables, trax_files
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor
from reformax.layers._trax import ShapeDtype, tl, trax
from reformax.ops.hashing.circle import SELF_SCORE


def table(spec: Spec) -> list[Tensor]:
    """The weights of `trax.models.ReformerLM` or `TransformerLM`, in the order of their file.

    Raises:
      ValueError: Trax has no such model; the error names the argument.
    """
    _check(spec)
    a = spec.arguments
    d, vocab = a["d_model"], a["vocab_size"]
    rows = [Tensor("embedding", ("embedding",), (vocab, d))]
    rows += _positions(a["pos_axial_shape"], a["pos_d_axial_embs"])
    attention_of = _joined_heads if spec.model == "TransformerLM" else _separate_heads
    for layer, block, repeat, op in spec.layers():
        of_layer = _norm("attention_norm", d) + attention_of(op, a) + _norm("feed_forward_norm", d)
        for i, sizes in (("1", (d, a["d_ff"])), ("2", (a["d_ff"], d))):
            for x, shape in (("w", sizes), ("b", sizes[1:])):
                path = ("feed_forward", f"{x}{i}")
                of_layer.append(Tensor(".".join(path), path, shape))
        rows += tables.of_layer(of_layer, f"layer_{layer}", block, repeat)
    d_features = d if spec.model == "TransformerLM" else 2 * d
    rows += _norm("norm", d_features)
    rows.append(Tensor("logits.w", ("logits", "w"), (d_features, vocab)))
    rows.append(Tensor("logits.b", ("logits", "b"), (vocab,)))
    return [row._replace(name=f"flat_weights[{i}] {row.name}") for i, row in enumerate(rows)]


def _positions(shape: Sequence[int], d_embs: Sequence[int]) -> list[Tensor]:
    """The table of positions, or one for each axis."""
    if len(shape) == 1:
        return [Tensor("positions", ("positions", "axis_0"), (shape[0], d_embs[0]))]
    return tables.axial("positions.axis_{axis}", shape, d_embs, leading=1)


def _norm(name: str, size: int) -> list[Tensor]:
    return [Tensor(f"{name}.{x}", (name, x), (size,)) for x in ("scale", "bias")]


def _separate_heads(op: Op, a: Mapping[str, Any]) -> list[Tensor]:
    """The projections of a ReformerLM's attention, `[N, D, H]` as in reformax."""
    n, d, d_qk, d_v = a["n_heads"], a["d_model"], a["d_attention_key"], a["d_attention_value"]
    shapes = {"w_q": (n, d, d_qk), "w_k": (n, d, d_qk), "w_v": (n, d, d_v), "w_o": (n, d_v, d)}
    if _shares_qk(op):
        del shapes["w_k"]
    return [Tensor(f"attention.{x}", ("attention", x), shape) for x, shape in shapes.items()]


def _joined_heads(op: Op, a: Mapping[str, Any]) -> list[Tensor]:
    """The projections of a TransformerLM's attention: Dense layers of all heads together."""
    del op
    n, d, rows = a["n_heads"], a["d_model"], []
    h = d // n
    for x in "qkv":
        w, b = f"w_{x}", f"b_{x}"
        rows.append(tables.dense_to_heads(f"attention.{w}", ("attention", w), n, h, d))
        rows.append(tables.of_heads(f"attention.{b}", ("attention", b), (n, h)))
    rows.append(tables.dense_from_heads("attention.w_o", ("attention", "w_o"), n, h, d))
    return [*rows, Tensor("attention.b_o", ("attention", "b_o"), (d,))]


_OPS = ("dense", "flash", "local", "lsh", "shared_qk")


def _shares_qk(op: Op) -> bool:
    return op.name in ("lsh", "shared_qk") or (op.name == "local" and op.option("shared_qk"))


def _check(spec: Spec) -> None:
    a = spec.arguments

    def require(holds, what, instead):
        if not holds:
            raise ValueError(f"Trax has no such {spec.model}: {what}, expected {instead}")

    language_model = spec.model in ("ReformerLM", "TransformerLM")
    require(language_model, f"the model is {spec.model}", "ReformerLM or TransformerLM")
    spec.require_plain(require)
    pos_type = a["pos_type"]
    known = pos_type in ("axial", "sinusoidal", "none")
    require(known, f"pos_type is {pos_type!r}", "'axial', 'sinusoidal' or 'none'")
    require(a["ff_activation"] != "relu_squared", "ff_activation is 'relu_squared'", "another")
    spec.require(require, next_value=False, tie_embeddings=False, embedding_norm=False)
    spec.require(require, first_token=0, n_kv_heads=None, n_qk_heads=None, norm_epsilon=1e-6)
    for op in spec.attention:
        require(op.name in _OPS, f"the attention is {op.name}", f"one of {', '.join(_OPS)}")
        op.require_plain(require, **_wanted(op))
    length = length_of(spec)
    fits = length % _chunks(spec) == 0 and length <= (spec.max_length() or length)
    require(fits, f"positions are {spec.max_length()}", f"a multiple of chunks of {_chunks(spec)}")
    if spec.model == "ReformerLM":
        plain = all(op.name != "gated_delta" for op in spec.attention)
        require(plain, "an attention is gated_delta", "another")
        spec.require(require, n_slots=None, attention_bias=False)
        return
    spec.require(require, attention_bias=True, post_norm=False)
    kinds = {op.name for op in spec.attention}
    require(kinds <= {"dense", "flash"}, "attention_type is not dense", "dense")
    d, n_heads = a["d_model"], a["n_heads"]
    require(d % n_heads == 0, f"d_model is {d}", f"a multiple of n_heads, {n_heads}")
    size = d // n_heads
    spec.require(require, d_attention_key=size, d_attention_value=size)
    one_axis = len(a["pos_axial_shape"]) == 1
    require(one_axis, f"pos_axial_shape is {a['pos_axial_shape']}", "(max_len,), a table")


def _wanted(op: Op) -> dict[str, Any]:
    """The options that an op needs to compute what Trax computes."""
    if op.name == "lsh":
        n_eval = op.option("n_hashes_eval")
        same = {} if n_eval == op.option("n_hashes") else {"n_hashes_eval": None}
        return {"count_once": False, "wrap": True, "self_score": SELF_SCORE} | same
    if op.name != "local":
        return {"attend_self_if_alone": True} if op.name == "shared_qk" else {}
    around = op.option("n_chunks_before") > 1 or op.option("n_chunks_after") > 0
    circle = {"wrap": True} if around else {}
    alone = {"self_score": SELF_SCORE} if circle and op.option("shared_qk") else {}
    return {"window": None} | circle | alone


def notes(spec: Spec) -> list[str]:
    """The differences from Trax's function with the same weights: rounding, rows of padding."""
    found = []
    if spec.arguments["dtype"] != "float32":
        found.append(
            f"sublayers and logits compute in {spec.arguments['dtype']}; Trax's in float32"
        )
    if spec.arguments.get("exact"):
        found.append("exact=True rounds the streams to multiples of 2^-12")
    for op in spec.attention:
        n_pad = op.option("pad_chunks") if op.name in ("local", "lsh") else 1
        note = f"{op.name}.pad_chunks is {n_pad}; Trax computes 1"
        if n_pad != 1 and note not in found:
            found.append(note)
    return found


def length_of(spec: Spec) -> int:
    """A length of inputs that Trax's model reads: the grid of axial positions, or two chunks."""
    shape, chunks = spec.arguments["pos_axial_shape"], _chunks(spec)
    if len(shape) > 1:
        return math.prod(shape)
    most = spec.max_length() or math.inf
    if chunks == 1:
        return min(64, most)
    return 2 * chunks if 2 * chunks <= most else chunks


def _chunks(spec: Spec) -> int:
    """The number that lengths are multiples of."""
    ops = [op for op in spec.attention if op.name in ("local", "lsh")]
    return math.lcm(*(op.option("chunk_len") for op in ops))


def _check_length(spec: Spec, length: int) -> None:
    """Raises `ValueError` for a length of inputs that Trax's model does not read."""
    shape, chunks, most = spec.arguments["pos_axial_shape"], _chunks(spec), spec.max_length()
    if len(shape) > 1 and length != most:
        raise ValueError(f"length is {length}: expected {most}, as pos_axial_shape is {shape}")
    if most is not None and length > most:
        raise ValueError(f"length is {length}: expected at most {most}, the number of positions")
    if length % chunks:
        raise ValueError(f"length is {length}: expected a multiple of chunk_len, {chunks}")


def read_params(path: str | Path, spec: Spec) -> Any:
    """The parameters of `spec` from a checkpoint of `trax.models.ReformerLM` or `TransformerLM`.

    Raises:
      ValueError: the file is damaged, Trax has no such model, or a weight does not fit; the error
        names the first one.
    """
    rows, weights = table(spec), trax_files.read(path).weights
    for i, row in enumerate(rows[: len(weights)]):
        if row.path[0] == "positions" and weights[i].shape == (1, *row.shape):
            weights[i] = weights[i][0]  # older versions wrote a batch axis
    names = [row.name for row in rows]
    expected = {row.name: row.shape for row in rows}
    tables.check_shapes(expected, trax_files.shapes_by_name(weights, names), str(path))
    params = tables.read(rows, dict(zip(names, weights, strict=True)), str(path))
    if spec.arguments["pos_type"] == "sinusoidal":
        params["positions"] = ()
    return params


def write_params(path: str | Path, spec: Spec, params: Any, length: int) -> Path:
    """Writes a checkpoint that Trax's own model, `model_of(spec)`, loads.

    Args:
      path: a name that ends in .pkl.gz.
      spec: the model.
      params: its weights.
      length: tokens of the file's input signature, `[1, length]`.

    Raises:
      ValueError: Trax has no such model, or it does not read inputs of this length.
    """
    _check(spec)
    _check_length(spec, length)
    weights = list(tables.write(table(spec), params).values())
    signature = ShapeDtype((1, length), np.int32)
    model = model_of(spec)
    model.init(signature)
    state = tl.flatten_weights_and_state(model.weights, model.state)[1]
    return trax_files.write(path, weights, state, signature)


def model_of(spec: Spec, mode: str = "eval"):
    """Trax's model with the weights of `table`, not yet initialised."""
    _check(spec)
    a = spec.arguments
    activations = {"relu": tl.Relu, "gelu": tl.Gelu, "gelu_tanh": tl.FastGelu, "silu": tl.Swish}
    names = ("vocab_size", "d_model", "d_ff", "n_layers", "n_heads", "dropout")
    options = {name: a[name] for name in names}
    options |= {"mode": mode, "ff_activation": activations[a["ff_activation"]]}
    shape = a["pos_axial_shape"]
    if len(shape) == 1:
        options["max_len"] = shape[0]
    if spec.model == "TransformerLM":
        return trax.models.TransformerLM(**options)
    if len(shape) > 1:
        options |= {"pos_type": "axial", "pos_axial_shape": tuple(shape)}
        options["pos_d_axial_embs"] = tuple(a["pos_d_axial_embs"])
    elif not shape:
        options["pos_type"] = {"sinusoidal": "sin-cos", "none": "no"}[a["pos_type"]]
    return trax.models.ReformerLM(
        **options,
        d_attention_key=a["d_attention_key"],
        d_attention_value=a["d_attention_value"],
        ff_chunk_size=0,
        attention_type=[_attention_of(op) for op in spec.attention],
    )


def _attention_of(op: Op):
    if op.name in ("dense", "shared_qk"):
        return functools.partial(tl.SelfAttention, share_qk=op.name == "shared_qk")
    names = ("chunk_len", "n_chunks_before", "n_chunks_after")
    options = {name: op.option(name) for name in names}
    if op.name == "local":
        return functools.partial(tl.SelfAttention, share_qk=op.option("shared_qk"), **options)
    n_buckets = op.option("n_buckets")
    if not isinstance(n_buckets, int):
        n_buckets = None if n_buckets == "auto" else list(n_buckets)
    options |= {"n_hashes": op.option("n_hashes"), "n_buckets": n_buckets}
    return functools.partial(tl.LSHSelfAttention, **options)

"""Trax's model.pkl.gz: its weights in order, the models that they are of, the file.

A Trax checkpoint is a pickled dict, gzipped: `flat_weights` and `flat_state` are the arrays of
the model's tree in order, without names; `input_signature` is what the model was initialised for.
Trax's training `Loop` puts the weights into a file of their own beside it, model.weights.npy.gz.
Older ones hold objects of `trax.supervised`; those are read as records and not looked at.

`load` and `save` are for models of Trax's layers, `layers.SelfAttention` and
`layers.LSHSelfAttention` of this package among them. `table` says which weights of `lm.ReformerLM`
and `lm.TransformerLM` those of `trax.models.ReformerLM` and `TransformerLM` are, and `notes` where
the functions differ.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reformax.convert import tables
from reformax.convert.safe_pickle import Record, loads, unpacked
from reformax.convert.spec import Op, Spec
from reformax.convert.tables import Tensor
from reformax.layers._trax import ShapeDtype, tl, trax

SUFFIX = ".pkl.gz"


class Checkpoint(NamedTuple):
    """What is read of a model.pkl.gz."""

    weights: list[np.ndarray]
    state: list[Any] | None
    input_signature: Any  # ShapeDtype, or a tuple of them; None if the file has none
    step: int | None


def read(path: str | Path) -> Checkpoint:
    """Reads a checkpoint, and the file of its weights if it has one, without running either.

    Raises:
      ValueError: damaged, cut short, or a pickle of anything but arrays and containers.
      OSError: nothing is there.
    """
    path = Path(path).expanduser()
    saved = loads(unpacked(path), str(path))
    if not isinstance(saved, dict) or not {"flat_weights", "weights"} & set(saved):
        raise ValueError(f"{path} is no checkpoint of Trax: it has no flat_weights")
    weights = saved["flat_weights"] if "flat_weights" in saved else _leaves(saved["weights"])
    if isinstance(weights, int):  # the compression level of the file that has them
        weights = _read_arrays(_weights_path(path))
    if not isinstance(weights, list | tuple) or not all(_is_array(w) for w in weights):
        raise ValueError(f"{path} is no checkpoint of Trax: flat_weights is no list of arrays")
    state = saved.get("flat_state", _leaves(saved["state"]) if "state" in saved else None)
    step = saved.get("step")
    return Checkpoint(
        [np.asarray(w) for w in weights],
        None if state is None else list(state),
        _signature(saved.get("input_signature")),
        step if isinstance(step, int) else None,
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]


def _signature(saved: Any) -> Any:
    if isinstance(saved, list | tuple):
        return type(saved)(_signature(s) for s in saved)
    if not isinstance(saved, Record) or not isinstance(saved.state.get("shape"), tuple):
        return None
    return ShapeDtype(saved.state["shape"], np.dtype(saved.state.get("dtype", np.int32)))


def _weights_path(path: Path) -> Path:
    beside = path.with_name(path.name.removesuffix(SUFFIX) + ".weights.npy.gz")
    return beside if beside.exists() else path.with_name(path.name + ".npy")


def _read_arrays(path: Path) -> list[np.ndarray]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: it has the weights, copy it too")
    file, arrays = io.BytesIO(unpacked(path)), []
    size = file.getbuffer().nbytes
    while file.tell() < size:
        try:
            array = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # whatever bytes that are no array can raise
            reason = " ".join(str(error).split())
            name = f"flat_weights[{len(arrays)}]"
            raise ValueError(f"{path} is damaged at {name} ({reason}): copy it again") from None
        # Trax writes bfloat16 as its bits.
        arrays.append(array.view(jnp.bfloat16) if array.dtype == np.uint16 else array)
    return arrays


def write(
    path: str | Path,
    weights: Sequence[np.ndarray],
    state: Sequence[Any],
    input_signature: Any,
) -> Path:
    """Writes a file that `init_from_file` of a Trax model reads.

    Args:
      path: its name, which ends in .pkl.gz.
      weights: in the order of the model's tree.
      state: likewise.
      input_signature: a `ShapeDtype`, or a tuple of them, that the model is initialised for.
    """
    path = Path(path).expanduser()
    content = {
        "flat_weights": [np.asarray(w) for w in weights],
        "flat_state": [np.asarray(s) if isinstance(s, jax.Array) else s for s in state],
        "input_signature": input_signature,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with gzip.open(temporary, "wb", compresslevel=2) as file:
        pickle.dump(content, file, protocol=4)
    os.replace(temporary, path)
    return path


# Models of Trax's layers.


def load(layer, path: str | Path, input_signature: Any = None) -> None:
    """Initialises a Trax layer from a file, as its `init_from_file` does, running nothing of it.

    Args:
      layer: any Trax layer, such as `trax.models.ReformerLM(...)`.
      path: a model.pkl.gz.
      input_signature: what to initialise for; by default what the file says. With another than the
        file's the state is fresh, as it depends on the batch and the length.

    Raises:
      ValueError: a damaged or hostile file, or weights of another model; the line names the first
        that does not fit, and both shapes.
    """
    saved = read(path)
    signature = saved.input_signature if input_signature is None else input_signature
    if signature is None:
        raise ValueError(f"{path} has no input_signature: give one, such as signature(batch)")
    layer.init(signature)
    named = named_weights(layer)
    expected = {name: np.shape(weight) for name, weight in named}
    tables.check_shapes(expected, _by_name(saved.weights, list(expected)), str(path))
    same = input_signature is None or input_signature == saved.input_signature
    keep_state = same and saved.state is not None
    flat_state = tl.flatten_weights_and_state(layer.weights, layer.state)[1]
    if keep_state:
        shapes = [np.shape(s) for s in saved.state], [np.shape(s) for s in flat_state]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{path} is of another model: its state has {shapes[0]}, not {shapes[1]}"
            )
        flat_state = saved.state
    layer.weights, layer.state = tl.unflatten_weights_and_state(
        [jnp.asarray(w) for w in saved.weights],
        [jnp.asarray(s) if _is_array(s) else s for s in flat_state],
        layer.weights_and_state_signature(signature),
    )


def save(layer, path: str | Path, input_signature: Any) -> Path:
    """Writes a Trax layer's weights and state; see `write`."""
    return write(path, *tl.flatten_weights_and_state(layer.weights, layer.state), input_signature)


def named_weights(layer) -> list[tuple[str, Any]]:
    """A Trax layer's weights in the order of its file, named by the layers that own them."""
    flat, _ = tl.flatten_weights_and_state(layer.weights, ())
    names: list[str] = []

    def walk(layer, weights, name):
        parts = layer.sublayers if layer is not None else ()
        if isinstance(weights, list | tuple) and weights and len(parts) == len(weights):
            for i, (part, below) in enumerate(zip(parts, weights, strict=True)):
                walk(part, below, f"{name}{i}_{part.name}.")
        elif isinstance(weights, list | tuple):
            for i, below in enumerate(weights):
                walk(None, below, f"{name}{i}.")
        elif isinstance(weights, dict):
            for key, below in weights.items():
                if key != "__marker_for_cached_weights_":
                    walk(None, below, f"{name}{key}.")
        else:
            names.append(name.removesuffix("."))

    walk(layer, layer.weights, "")
    if len(names) != len(flat):
        names = [""] * len(flat)
    return [
        (f"flat_weights[{i}] {name}".strip(), weight)
        for i, (name, weight) in enumerate(zip(names, flat, strict=True))
    ]


def _by_name(weights: Sequence[np.ndarray], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {
        names[i] if i < len(names) else f"flat_weights[{i}]": w.shape for i, w in enumerate(weights)
    }


# trax.models.ReformerLM and TransformerLM here.


def table(spec: Spec) -> list[Tensor]:
    """The weights of `trax.models.ReformerLM` or `TransformerLM`, in order, and which are whose.

    Raises:
      ValueError: Trax has no such model; the line says what it lacks.
    """
    _check(spec)
    a = spec.arguments
    d, d_ff, vocab, n = a["d_model"], a["d_ff"], a["vocab_size"], a["n_heads"]
    d_qk, d_v = a["d_attention_key"], a["d_attention_value"]
    transformer = spec.model == "TransformerLM"
    rows: list[tuple[str, tuple[str, ...], tuple[int, ...], int | None, Any, Any]] = []

    def add(name, path, shape, repeat=None, read=tables.same, write=tables.same):
        rows.append((name, path, shape, repeat, read, write))

    def norm(name, path, size, repeat=None):
        add(f"{name}.scale", (*path, "scale"), (size,), repeat)
        add(f"{name}.bias", (*path, "bias"), (size,), repeat)

    add("embedding", ("embedding",), (vocab, d))
    shape, d_embs = a["pos_axial_shape"], a["pos_d_axial_embs"]
    if len(shape) == 1:
        add("positions", ("positions", "axis_0"), (shape[0], d))
    for axis in range(len(shape) if len(shape) > 1 else 0):
        there = [1] * (len(shape) + 1) + [d_embs[axis]]
        there[axis + 1] = shape[axis]
        here = (shape[axis], d_embs[axis])
        path = ("positions", f"axis_{axis}")
        add(f"positions.axis_{axis}", path, tuple(there), None, lambda x, s=here: x.reshape(s))
    for layer, block, repeat, op in spec.layers():
        name, path = f"layer_{layer}", ("stack", f"block_{block}")
        attention, feed_forward = (*path, "attention"), (*path, "feed_forward")
        norm(f"{name}.attention_norm", (*path, "attention_norm"), d, repeat)
        if transformer:  # Dense layers, of all heads together
            for x in "qkv":
                _add_heads(add, f"{name}.attention", attention, x, d, n, d // n, repeat)
            add(
                f"{name}.attention.w_o",
                (*attention, "w_o"),
                (d, d),
                repeat,
                lambda x: x.reshape(n, d // n, d),
                lambda x: x.reshape(d, d),
            )
            add(f"{name}.attention.b_o", (*attention, "b_o"), (d,), repeat)
        else:
            for x, size in (("q", d_qk), ("k", d_qk), ("v", d_v)):
                if x != "k" or not _shares_qk(op):
                    add(f"{name}.attention.w_{x}", (*attention, f"w_{x}"), (n, d, size), repeat)
            add(f"{name}.attention.w_o", (*attention, "w_o"), (n, d_v, d), repeat)
        norm(f"{name}.feed_forward_norm", (*path, "feed_forward_norm"), d, repeat)
        for i, sizes in (("1", (d, d_ff)), ("2", (d_ff, d))):
            for x, shape_x in (("w", sizes), ("b", sizes[1:])):
                add(f"{name}.feed_forward.{x}{i}", (*feed_forward, f"{x}{i}"), shape_x, repeat)
    d_features = d if transformer else 2 * d
    norm("norm", ("norm",), d_features)
    add("logits.w", ("logits", "w"), (d_features, vocab))
    add("logits.b", ("logits", "b"), (vocab,))
    return [Tensor(f"flat_weights[{i}] {row[0]}", *row[1:]) for i, row in enumerate(rows)]


def _add_heads(add, name, path, x, d, n, size, repeat):
    add(
        f"{name}.w_{x}",
        (*path, f"w_{x}"),
        (d, n * size),
        repeat,
        lambda w: w.reshape(d, n, size).transpose(1, 0, 2),
        lambda w: w.transpose(1, 0, 2).reshape(d, n * size),
    )
    add(
        f"{name}.b_{x}",
        (*path, f"b_{x}"),
        (n * size,),
        repeat,
        lambda b: b.reshape(n, size),
        lambda b: b.reshape(n * size),
    )


def _shares_qk(op: Op) -> bool:
    return op.name in ("lsh", "shared_qk") or (op.name == "local" and op.option("shared_qk"))


def _check(spec: Spec) -> None:
    a = spec.arguments

    def require(holds, what, instead):
        if not holds:
            raise ValueError(f"Trax has no such {spec.model}: {what}, expected {instead}")

    require(a["pos_type"] != "rotary", "pos_type is 'rotary'", "'axial', 'sinusoidal' or 'none'")
    require(a["norm_epsilon"] == 1e-6, f"norm_epsilon is {a['norm_epsilon']}", "1e-06")
    for op in spec.attention:
        if op.name == "local":
            require(op.option("window") is None, f"local's window is {op.option('window')}", "None")
    if spec.model == "ReformerLM":
        require(not a["attention_bias"], "attention_bias is True", "False")
        return
    require(a["attention_bias"], "attention_bias is False", "True")
    require({op.name for op in spec.attention} == {"dense"}, "attention_type is not dense", "dense")
    size = a["d_model"] // a["n_heads"]
    for name in ("d_attention_key", "d_attention_value"):
        require(a[name] == size, f"{name} is {a[name]}", f"d_model / n_heads, {size}")
    one_axis = len(a["pos_axial_shape"]) == 1
    require(one_axis, f"pos_axial_shape is {a['pos_axial_shape']}", "(max_len,), a table")


def notes(spec: Spec) -> list[str]:
    """Where the function of `spec` differs from that of Trax's model with the same weights."""
    found = []
    if spec.arguments["dtype"] != "float32":
        found.append(
            f"sublayers and logits compute in {spec.arguments['dtype']}; Trax's in float32"
        )
    if spec.arguments.get("exact"):
        found.append("exact=True rounds the streams to multiples of 2^-12")
    wanted = {"count_once": False, "wrap": True, "self_score": -1e5, "n_hashes_eval": None}
    wanted |= {"pad_chunks": 1}
    for op in dict.fromkeys((op.name, *op.options.items()) for op in spec.attention):
        op = Op(op[0], dict(op[1:]))
        for name, value in wanted.items() if op.name == "lsh" else ():
            if op.option(name) != value:
                found.append(f"lsh.{name} is {op.option(name)!r}; Trax computes {value!r}")
        if op.name == "local" and op.option("n_chunks_before") > 1:
            circle = {"wrap": True} | ({"self_score": -1e5} if op.option("shared_qk") else {})
            for name, value in circle.items():
                if op.option(name) != value:
                    found.append(f"local.{name} is {op.option(name)!r}; Trax computes {value!r}")
    return found


def read_params(path: str | Path, spec: Spec) -> Any:
    """The parameters of `spec` from a checkpoint of `trax.models.ReformerLM` or `TransformerLM`.

    Raises:
      ValueError: see `read` and `table`; the line names the first weight that does not fit.
    """
    rows, weights = table(spec), read(path).weights
    for i, row in enumerate(rows[: len(weights)]):
        if row.path[0] == "positions" and weights[i].shape == (1, *row.shape):
            weights[i] = weights[i][0]  # a table of positions as old versions wrote it
    names = [row.name for row in rows]
    tables.check_shapes({row.name: row.shape for row in rows}, _by_name(weights, names), str(path))
    params = tables.read(rows, dict(zip(names, weights, strict=True)), str(path))
    if spec.arguments["pos_type"] == "sinusoidal":
        params["positions"] = ()
    return params


def write_params(path: str | Path, spec: Spec, params: Any, length: int) -> Path:
    """Writes the parameters of `spec` so that the Trax model of `model_of` loads them.

    Args:
      path: ends in .pkl.gz.
      spec: the model.
      params: its weights.
      length: of the sequences that the file's input signature and state are for, one at a time.

    Raises:
      ValueError: Trax has no such model.
    """
    weights = list(tables.write(table(spec), params).values())
    signature = ShapeDtype((1, length), np.int32)
    model = model_of(spec)
    model.init(signature)
    state = tl.flatten_weights_and_state(model.weights, model.state)[1]
    return write(path, weights, state, signature)


def model_of(spec: Spec, mode: str = "eval"):
    """The model of `trax.models` whose weights `table` describes, not initialised."""
    _check(spec)
    a = spec.arguments
    activations = {"relu": tl.Relu, "gelu": tl.Gelu, "gelu_tanh": tl.FastGelu, "silu": tl.Swish}
    activation = a["ff_activation"] if isinstance(a["ff_activation"], str) else "gelu_tanh"
    names = ("vocab_size", "d_model", "d_ff", "n_layers", "n_heads", "dropout")
    options = {name: a[name] for name in names}
    options |= {"mode": mode, "ff_activation": activations[activation]}
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

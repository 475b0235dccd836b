"""Trax's model.pkl.gz: the weights of a model in order, without names.

A Trax checkpoint is a pickled dict, gzipped: `flat_weights` and `flat_state` are the arrays of the
model's tree in order, and `input_signature` is the shape that the model was initialised for. Trax's
training `Loop` puts the weights into a second file, model.weights.npy.gz. Older checkpoints hold
objects of `trax.supervised`, which are read as records and ignored.

`load` and `save` are for models of Trax's layers, such as those with `layers.LSHSelfAttention`;
`reformax.convert.trax_models` is for the models of this package.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reformax.convert import tables
from reformax.convert.safe_pickle import PickledObject, loads
from reformax.data import files
from reformax.declared import LARGEST
from reformax.layers._trax import HAS_TRAX, ShapeDtype, tl

SUFFIX = ".pkl.gz"
# A file of weights has one array for each weight of the model.
_MAX_ARRAYS = 2**16
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class TraxCheckpoint(NamedTuple):
    """The content of a model.pkl.gz."""

    weights: list[np.ndarray]
    state: list[Any] | None
    input_signature: Any  # ShapeDtype, or a tuple of them; None if the file or Trax is absent
    step: int | None


def read(path: str | Path) -> TraxCheckpoint:
    """Reads a checkpoint, and the file of its weights if it has one, and runs no code of either.

    Raises:
      ValueError: the file is damaged, or its pickle holds more than arrays and containers.
      OSError: the file does not exist.
    """
    path = Path(path).expanduser()
    saved = loads(files.read_gz(path), str(path))
    if not isinstance(saved, dict) or not {"flat_weights", "weights"} & set(saved):
        raise ValueError(f"{path} is no checkpoint of Trax: it has no flat_weights")
    weights = saved["flat_weights"] if "flat_weights" in saved else _leaves(saved["weights"])
    if isinstance(weights, int):  # the compression level of the file that has them
        weights = _read_arrays(_weights_path(path))
    if not isinstance(weights, list | tuple) or not all(_is_array(w) for w in weights):
        raise ValueError(f"{path} is no checkpoint of Trax: flat_weights is no list of arrays")
    state = saved.get("flat_state", _leaves(saved["state"]) if "state" in saved else None)
    if not isinstance(state, list | tuple | None):
        raise ValueError(f"{path} is no checkpoint of Trax: flat_state is no list")
    step = saved.get("step")
    return TraxCheckpoint(
        [np.asarray(w) for w in weights],
        None if state is None else list(state),
        _signature(saved.get("input_signature")),
        step if isinstance(step, int) else None,
    )


def n_ids(path: str | Path) -> int | None:
    """The size of a language model's vocabulary: of its first weight, the embedding."""
    weights = read(path).weights
    return weights[0].shape[0] if weights and weights[0].ndim == 2 else None


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
    if not isinstance(saved, PickledObject) or not HAS_TRAX:
        return None
    shape, dtype = saved.state.get("shape"), saved.state.get("dtype", np.dtype(np.int32))
    if not isinstance(shape, tuple) or not isinstance(dtype, np.dtype):
        return None
    sizes = all(isinstance(n, int) and 0 <= n <= LARGEST for n in shape)
    return ShapeDtype(shape, dtype) if sizes and math.prod(shape) <= LARGEST else None


def _weights_path(path: Path) -> Path:
    weights = path.with_name(path.name.removesuffix(SUFFIX) + ".weights.npy.gz")
    return weights if weights.exists() else path.with_name(path.name + ".npy")


def _read_arrays(path: Path) -> list[np.ndarray]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: it holds the weights, copy it too")
    data, arrays = files.read_gz(path), []
    file = io.BytesIO(data)
    while file.tell() < len(data):
        try:
            if len(arrays) == _MAX_ARRAYS:
                raise ValueError(f"it has more than {_MAX_ARRAYS:,} arrays")
            array = _next_array(file, data)
        except Exception as error:  # bytes that are no array may raise anything
            reason = " ".join(str(error).split())[:200]
            name = f"flat_weights[{len(arrays)}]"
            raise ValueError(f"{path} is damaged at {name} ({reason}): copy it again") from None
        # Trax writes bfloat16 as its bits.
        arrays.append(array.view(jnp.bfloat16) if array.dtype == np.uint16 else array)
    return arrays


def _next_array(file: io.BytesIO, data: bytes) -> np.ndarray:
    """The array of .npy at this position of a file; takes no memory for one that is not there."""
    version = np.lib.format.read_magic(file)
    with warnings.catch_warnings(action="ignore"):  # headers of Python 2 are read more slowly
        shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.kind not in "biufc":
        raise ValueError(f"it has dtype {dtype}: expected numbers")
    begin, size = file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size > len(data) - begin:
        raise ValueError(f"shape {shape} of {dtype} does not fit the {len(data) - begin:,} bytes")
    file.seek(size, io.SEEK_CUR)
    array = np.frombuffer(data, dtype, math.prod(shape), begin)
    return array.reshape(shape, order="F" if is_fortran else "C")


def write(
    path: str | Path, weights: Sequence[np.ndarray], state: Sequence[Any], input_signature: Any
) -> Path:
    """Writes a file that a Trax model reads by `init_from_file`.

    Args:
      path: a name that ends in .pkl.gz.
      weights: the arrays in the order of the model's tree.
      state: the states in the same order.
      input_signature: the `ShapeDtype` that the model is initialised for, or a tuple of them.
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


def load(layer, path: str | Path, input_signature: Any = None) -> None:
    """Initialises a Trax layer from a file, as its `init_from_file` does, and runs no code of it.

    Args:
      layer: any Trax layer, such as `trax.models.ReformerLM(...)`.
      path: a model.pkl.gz.
      input_signature: the shape to initialise for; None: the file's. With another shape the state
        is fresh, because it depends on the batch and the length.

    Raises:
      ValueError: the file is damaged or hostile, or its weights are of another model; the error
        names the first that does not fit and both shapes.
    """
    saved = read(path)
    signature = saved.input_signature if input_signature is None else input_signature
    if signature is None:
        raise ValueError(f"{path} has no input_signature: give one, such as signature(batch)")
    layer.init(signature)
    named = named_weights(layer)
    expected = {name: np.shape(weight) for name, weight in named}
    tables.check_shapes(expected, shapes_by_name(saved.weights, list(expected)), str(path))
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


def shapes_by_name(
    weights: Sequence[np.ndarray], names: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of weights by their names, and by their index where there are more weights."""
    return {
        names[i] if i < len(names) else f"flat_weights[{i}]": w.shape for i, w in enumerate(weights)
    }

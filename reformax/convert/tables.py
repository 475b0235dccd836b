"""Tables that map tensors of another format to weights of this package, in both directions.

Layers at the same position of the cycle are stacked, so a tensor may be a slice of a weight.
Numbers are reshaped and transposed, never computed with: a round trip gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Path = tuple[str, ...]  # keys from a model's parameters down


def same(x: np.ndarray) -> np.ndarray:
    """Leaves a tensor as it is, because it has the same shape in both formats."""
    return x


class Tensor(NamedTuple):
    """One tensor of the other format.

    Attributes:
      name: its name in that format.
      path: the keys of the weight, from the model's parameters down.
      shape: its shape in that format.
      repeat: the index of its slice in the stacked weight; None if the weight is not stacked.
      read: turns the tensor into the weight.
      write: turns the weight into the tensor.
      part: `(axis, start, stop)` says that the weight is a part of the tensor, whose other parts
        are other rows. `read` and `write` are of the part. None: it is the whole.
      view: with `part`, the shape that the tensor is brought to first; (): its own.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    repeat: int | None = None
    read: Callable[[np.ndarray], np.ndarray] = same
    write: Callable[[np.ndarray], np.ndarray] = same
    part: tuple[int, int, int] | None = None
    view: tuple[int, ...] = ()

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The row's part of a tensor."""
        if self.part is None:
            return whole
        axis, start, stop = self.part
        whole = whole.reshape(self.view or self.shape)
        return whole[(slice(None),) * axis + (slice(start, stop),)]


def layer_norm(name: str, path: Path, size: int) -> list[Tensor]:
    """The scale and the bias of a layer norm, by PyTorch's names."""
    return [
        Tensor(f"{name}.{theirs}", (*path, ours), (size,))
        for theirs, ours in (("weight", "scale"), ("bias", "bias"))
    ]


def linear(name: str, path: Path, shape: tuple[int, int]) -> Tensor:
    """The weight of a linear layer of PyTorch, `[out, in]`."""
    return Tensor(name, path, shape, None, np.transpose, np.transpose)


def to_heads(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """A linear layer of PyTorch that makes n heads of features: `[n size, D]`, `[n, D, size]`."""

    def read(w):
        return w.reshape(n, size, d).transpose(0, 2, 1)

    def write(w):
        return w.transpose(0, 2, 1).reshape(n * size, d)

    return Tensor(name, path, (n * size, d), None, read, write)


def dense_to_heads(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """The same of a layer whose weight is `[D, n size]`, as Trax's and GPT-2's."""

    def read(w):
        return w.reshape(d, n, size).transpose(1, 0, 2)

    def write(w):
        return w.transpose(1, 0, 2).reshape(d, n * size)

    return Tensor(name, path, (d, n * size), None, read, write)


def from_heads(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """A linear layer of PyTorch that makes features of n heads: `[D, n size]`, `[n, size, D]`."""

    def read(w):
        return w.T.reshape(n, size, d)

    def write(w):
        return w.reshape(n * size, d).T

    return Tensor(name, path, (d, n * size), None, read, write)


def dense_from_heads(name: str, path: Path, n: int, size: int, d: int) -> Tensor:
    """The same of a layer whose weight is `[n size, D]`."""

    def read(w):
        return w.reshape(n, size, d)

    def write(w):
        return w.reshape(n * size, d)

    return Tensor(name, path, (n * size, d), None, read, write)


def of_heads(name: str, path: Path, shape: tuple[int, ...]) -> Tensor:
    """A vector of the features of all heads, which are apart in reformax."""
    return Tensor(name, path, (math.prod(shape),), None, lambda b: b.reshape(shape), np.ravel)


def joined(name: str, rows: Sequence[Tensor], axis: int = 0) -> list[Tensor]:
    """Tensors that are one along an axis."""
    total = sum(row.shape[axis] for row in rows)
    found, start = [], 0
    for row in rows:
        stop = start + row.shape[axis]
        shape = (*row.shape[:axis], total, *row.shape[axis + 1 :])
        found.append(row._replace(name=name, shape=shape, part=(axis, start, stop)))
        start = stop
    return found


def of_layer(rows: Iterable[Tensor], name: str, block: int, repeat: int) -> list[Tensor]:
    """The rows of a layer of a stack, which have names and paths within the layer."""
    path = ("stack", f"block_{block}")
    return [
        row._replace(name=f"{name}.{row.name}", path=(*path, *row.path), repeat=repeat)
        for row in rows
    ]


def axial(name: str, shape: Sequence[int], d_embs: Sequence[int], leading: int = 0) -> list[Tensor]:
    """The tables of axial positions, one for each axis, which has length 1 along the others there.

    Args:
      name: of the table of an axis, with `{axis}` for its number.
      shape: the grid.
      d_embs: the features of each axis.
      leading: axes of length 1 in front there.
    """
    rows = []
    for axis, sizes in enumerate(zip(shape, d_embs, strict=True)):
        broadcast = [1] * (leading + len(shape)) + [d_embs[axis]]
        broadcast[leading + axis] = shape[axis]
        path = ("positions", f"axis_{axis}")
        tensor = Tensor(name.format(axis=axis), path, tuple(broadcast))
        rows.append(tensor._replace(read=lambda x, sizes=sizes: x.reshape(sizes)))
    return rows


def read(
    table: Sequence[Tensor],
    tensors: Mapping[str, Any],
    where: str,
    put: Callable[[np.ndarray], Any] = jax.device_put,
) -> Any:
    """The parameters of a model, float32, from tensors of the other format.

    Args:
      table: a row for each tensor.
      tensors: the arrays by name.
      where: the name of their source in errors.
      put: makes a weight of its array, which is given up then.

    Raises:
      ValueError: a tensor is missing, is not in the table, has another shape or is not of floating
        point; the error names it and both shapes.
    """
    check(table, tensors, where)
    n_repeats: dict[tuple[str, ...], int] = {}
    for tensor in table:
        n_repeats[tensor.path] = n_repeats.get(tensor.path, 0) + 1
    ranks = {path: i for i, path in enumerate(n_repeats)}
    files = {name: i for i, name in enumerate(tensors)}

    def order(tensor: Tensor) -> tuple[int, int]:
        whole_file = getattr(tensors[tensor.name], "whole_file", False)
        return (files[tensor.name] if whole_file else 0), ranks[tensor.path]

    # A file that is read whole is read once; of others a weight is made after the other.
    params: dict[str, Any] = {}
    begun: dict[tuple[str, ...], np.ndarray] = {}
    for tensor in sorted(table, key=order):
        array = tensor.read(tensor.of(np.asarray(tensors[tensor.name])))
        if tensor.path not in begun:
            stack = () if tensor.repeat is None else (n_repeats[tensor.path],)
            begun[tensor.path] = np.empty((*stack, *array.shape), np.float32)
        begun[tensor.path][() if tensor.repeat is None else tensor.repeat] = array
        n_repeats[tensor.path] -= 1
        if n_repeats[tensor.path] == 0:
            _put(params, tensor.path, put(begun.pop(tensor.path)))
    for block in params["stack"].values():
        for name in ("attention_norm", "feed_forward_norm"):
            block.setdefault(name, {})  # a place without a norm
        block["attention"].setdefault("op", ())  # an op without weights of its own
    return params


def _put(params: dict[str, Any], path: tuple[str, ...], weight: Any) -> None:
    """Puts a weight where its path says."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = weight


def write(table: Sequence[Tensor], params: Any) -> dict[str, np.ndarray]:
    """The tensors of the other format, by name, in the order of the table."""
    found: dict[str, np.ndarray] = {}
    for tensor in table:
        weight = params
        for key in tensor.path:
            weight = weight[key]
        weight = np.asarray(weight if tensor.repeat is None else weight[tensor.repeat])
        if tensor.part is None:
            found[tensor.name] = np.ascontiguousarray(tensor.write(weight)).reshape(tensor.shape)
            continue
        whole = found.setdefault(tensor.name, np.empty(tensor.shape, weight.dtype))
        part = tensor.of(whole)
        part[...] = np.reshape(tensor.write(weight), part.shape)
    return found


def remove_copy(tensors: dict[str, Any], copy: str, original: str, where: str, why: str) -> None:
    """Removes a tensor that a model keeps twice; a file may have it by either name.

    Args:
      tensors: by their names.
      copy, original: the name to remove, and the one to keep.
      where: the file's name in an error.
      why: why the two are one, in words.

    Raises:
      ValueError: the two differ.
    """
    found = tensors.pop(copy, None)
    if found is None:
        return
    kept = tensors.setdefault(original, found)
    same = tuple(found.shape) == tuple(kept.shape)
    if not same or not np.array_equal(np.asarray(found), np.asarray(kept)):
        raise ValueError(f"{where}: {copy} and {original} differ, and {why}")


def renamed(
    tensors: Mapping[str, np.ndarray], name_of: Callable[[str], str], where: str
) -> dict[str, np.ndarray]:
    """The tensors by other names; raises `ValueError` where two of them become one."""
    found: dict[str, str] = {}
    for name in tensors:
        if (other := found.setdefault(name_of(name), name)) != name:
            raise ValueError(f"{where} has {other} and {name}, two names of one tensor: leave one")
    return {new: tensors[name] for new, name in found.items()}


def check(table: Sequence[Tensor], tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Raises `ValueError` unless the tensors are those of the table, as `read` says."""
    expected = {tensor.name: tuple(tensor.shape) for tensor in table}
    check_shapes(expected, {name: np.shape(x) for name, x in tensors.items()}, where)
    check_floats(tensors, where)


def check_floats(tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Raises `ValueError` for the first tensor that is not of floating point."""
    for name, array in tensors.items():
        kind = array.dtype
        if kind.kind not in "fV" and kind.name != "bfloat16":
            raise ValueError(f"{where}: {name} has dtype {kind}: expected floating point")


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raises `ValueError` for the first tensor that is missing, superfluous or of another shape."""

    def described(shapes, name):
        return f"shape {tuple(shapes[name])}" if name in shapes else "no such tensor"

    for name in dict.fromkeys([*expected, *found]):
        saved, wanted = described(found, name), described(expected, name)
        if saved != wanted:
            raise ValueError(
                f"{where} is of another model: {name} has {saved} there and {wanted} in the config"
            )

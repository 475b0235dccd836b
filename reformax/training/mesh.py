"""The mesh of devices that a run, an evaluation or a search computes on.

It has the axes of `reformax.devices`. The numbers of a step are those of one device up to the order
of sums, whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
from jax.sharding import AxisType, Mesh

from reformax.declared import SettingError, shown
from reformax.devices import AXES, CONTEXT, n_row_shards, n_sequence_shards, placement
from reformax.shell import config_flag


class _Sizes:
    """The declaration of `Sizes`."""

    name = "sizes above 0 of some of data, fsdp and context, one of them -1, such as {'fsdp': 8}"

    def hold(self, value: Any) -> bool:
        """Whether axes and sizes are such."""
        sizes = list(value.values())
        numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in sizes)
        return (
            set(value) <= set(AXES)
            and numbers
            and all(x == -1 or x >= 1 for x in sizes)
            and sizes.count(-1) <= 1
        )

    def words(self, value: Any) -> str:
        """The expected values, in words."""
        return self.name


# The sizes of axes by name. Those left out are 1; -1 is as many as the devices allow, and that is
# the size of `data` where none is given.
Sizes = Annotated[Mapping, _Sizes()]


def parsed(text: str) -> dict[str, int]:
    """Sizes as a flag has them, such as "context=4,data=2".

    Raises:
      SettingError: the text says no sizes of axes.
    """
    try:
        pairs = [(name, int(size)) for name, size in (x.split("=") for x in text.split(","))]
    except ValueError:
        pairs = []
    sizes = dict(pairs)
    if len(sizes) < max(1, len(pairs)) or not _Sizes().hold(sizes):
        raise SettingError(
            f"mesh is {text!r}: expected sizes of the axes {', '.join(AXES)}, such as context=4"
        )
    return sizes


def make(
    sizes: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
    typed: str | None = None,
) -> Mesh:
    """A mesh of all `devices`, by default JAX's.

    Args:
      sizes: of the axes, as `Sizes` says.
      devices: of the mesh.
      typed: the flag that gives the sizes, as the user typed it, in errors.

    Raises:
      SettingError: the sizes do not make the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    filled = sizes_of(sizes or {}, len(devices), typed)
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(filled.values()), AXES, devices=devices, axis_types=types)


def sizes_of(sizes: Mapping[str, int], n: int, typed: str | None = None) -> dict[str, int]:
    """The size of every axis of a mesh of `n` devices; raises as `make` does."""
    sizes = dict(sizes)
    fills = "data" if -1 not in sizes.values() and "data" not in sizes else None
    given = dict.fromkeys(AXES, 1) | sizes | ({fills: -1} if fills else {})
    known = math.prod(size for size in given.values() if size != -1)
    if n % known or (n != known and -1 not in given.values()):
        is_not = "does not divide" if -1 in given.values() else "is not"
        raise SettingError(
            f"{typed or f'mesh is {shown(sizes)}'}: {known} {is_not} the number of devices, {n}: "
            f"{_sizes_that_fit(given, n)}, or {_devices_that_fit(known, n)}"
        )
    return {axis: n // known if size == -1 else size for axis, size in given.items()}


def _sizes_that_fit(given: Mapping[str, int], n: int) -> str:
    """The sizes to give instead, in words."""
    split = [axis for axis, size in given.items() if size not in (1, -1)]
    if -1 not in given.values() or len(split) > 1:
        product = "divides" if -1 in given.values() else "is"
        return f"give sizes whose product {product} {n}"
    size = max(x for x in range(1, min(given[split[0]], n) + 1) if n % x == 0)
    return f"make {split[0]} {size}" if size > 1 else f"leave {split[0]} out"


def _devices_that_fit(known: int, n: int) -> str:
    """The devices to compute on instead, in words."""
    if known < n:
        some = ",".join(map(str, range(known)))
        return f"show JAX {known} of them (CUDA_VISIBLE_DEVICES={some})"
    return f"simulate {known} on a CPU (JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={known})"


def words(mesh: Mesh) -> str:
    """The mesh, for people."""
    n = mesh.size
    device = mesh.devices.flat[0].platform
    split = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    plural = f"s ({split})" if n > 1 else ""
    return f"{n} {device} device{plural}"


def bytes_stored(tree: Any, mesh: Mesh) -> int:
    """The bytes of a tree of arrays that a device has, where they have their `placement`."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placement(tree, mesh)), strict=True)
    return sum(math.prod(p.shard_shape(x.shape)) * x.dtype.itemsize for x, p in pairs)


def check_batch_size(
    name: str, batch_size: int, mesh: Mesh, accumulate: int = 1, length: int | None = None
) -> None:
    """Raises `SettingError` unless all shards get the same number of rows in every micro-batch.

    Args:
      name: of the batch's size.
      batch_size: rows of a batch.
      mesh: the devices.
      accumulate: micro-batches of a batch.
      length: of rows, if devices may share them: the line then names the mesh that does.
    """
    n = n_row_shards(mesh)
    parts = n * accumulate
    if batch_size < 1:
        raise SettingError(f"{name}={batch_size}: expected at least 1")
    if batch_size % parts:
        over = [f"over {n} devices"] * (n > 1)
        over += [f"into accumulate={accumulate} micro-batches"] * (accumulate > 1)
        fix = ", or show JAX fewer devices (CUDA_VISIBLE_DEVICES=0)" if n > 1 else ""
        fix += ", or change accumulate" if accumulate > 1 else ""
        if length is not None and (context := _context_for(batch_size, mesh, accumulate, length)):
            fix = f", or split rows by {config_flag('loop.train.mesh', {CONTEXT: context})}{fix}"
        below = max(batch_size // parts, 1) * parts
        raise SettingError(
            f"{name}={batch_size} cannot be divided {' and '.join(over)}: make it a multiple of "
            f"{parts}, such as {below}{fix}"
        )


def _context_for(batch_size: int, mesh: Mesh, accumulate: int, length: int) -> int | None:
    """The least number of devices that share a row so that the others divide the rows."""
    if batch_size % accumulate or mesh.shape[CONTEXT] > 1:
        return None
    context = mesh.size // math.gcd(batch_size // accumulate, mesh.size)
    return None if length % context else context


def filled(n_rows: int, mesh: Mesh) -> int:
    """The least number of rows, `n_rows` or more, that the devices divide."""
    n = n_row_shards(mesh)
    return -(-n_rows // n) * n


def check_length(name: str, length: int, mesh: Mesh) -> None:
    """Raises `SettingError` unless devices that share a sequence get shards of one length."""
    n = n_sequence_shards(mesh)
    if length % n:
        above = -(-length // n) * n
        raise SettingError(
            f"{name}={length} cannot be divided over context={n}: make it a multiple of {n}, such "
            f"as {above}, or change the mesh"
        )

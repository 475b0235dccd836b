"""Arrays of the host on the devices of a mesh, of which this process may hold a part alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Rows = Callable[[np.ndarray | None], Any]


def place(tree: Any, sharding: Any) -> Any:
    """A tree of arrays that every process has whole, on the devices.

    Args:
      tree: of NumPy arrays, the same in every process, or of arrays on devices.
      sharding: of all of them, or a tree with that of each.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    if isinstance(sharding, Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(_place, tree, sharding)


def _place(array: Any, sharding: Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        return jax.jit(lambda x: x, out_shardings=sharding)(array)
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_batch(rows_of: Rows, n_rows: int, sharding: NamedSharding) -> Any:
    """A batch on the devices, of which this process makes only the rows that its devices hold.

    Args:
      rows_of: given the numbers of rows, ascending, a tree of arrays of these rows, in their
        order; given None, of all.
      n_rows: of the batch.
      sharding: of each array; its first axis is that of the rows.
    """
    if jax.process_count() == 1:
        return jax.device_put(rows_of(None), sharding)
    rows = local_rows(n_rows, sharding)
    return jax.tree.map(lambda local: _place_rows(local, rows, n_rows, sharding), rows_of(rows))


def take(batch: Any, numbers: np.ndarray | None) -> Any:
    """The rows of a batch with these numbers; None: all."""
    return batch if numbers is None else jax.tree.map(lambda x: x[numbers], batch)


def local_rows(n_rows: int, sharding: NamedSharding) -> np.ndarray:
    """The numbers, ascending, of the rows that the devices of this process hold."""
    of_rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    indices = of_rows.addressable_devices_indices_map((n_rows,)).values()
    spans = {index[0].indices(n_rows)[:2] for index in indices}
    return np.unique(np.concatenate([np.arange(*span) for span in spans]))


def _place_rows(local: np.ndarray, rows: np.ndarray, n_rows: int, sharding: Sharding) -> jax.Array:
    def part(index: tuple[slice, ...]) -> np.ndarray:
        first, end, _ = index[0].indices(n_rows)
        begin = np.searchsorted(rows, first)
        return local[begin : begin + end - first][:, *index[1:]]

    return jax.make_array_from_callback((n_rows, *local.shape[1:]), sharding, part)

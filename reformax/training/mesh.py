"""The devices: one mesh whose `data` axis runs over those of this host.

A batch is split over `data`; every device has a whole copy of everything else. XLA derives the rest
(the sum of gradients over devices) from these two placements, so the numbers of a step are those of
one device up to the order of sums. Larger meshes and several hosts begin here.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reformax.declared import SettingError


def data_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """One `data` axis over `devices`, by default all of all processes."""
    return Mesh(np.array(devices or jax.devices()), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """The first axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch_size(name: str, batch_size: int, mesh: Mesh, accumulate: int = 1) -> None:
    """Raises `ValueError` unless all devices get the same number of rows in every micro-batch."""
    n, parts = mesh.size, mesh.size * accumulate
    if batch_size < 1 or batch_size % parts:
        micro = f" in accumulate={accumulate} micro-batches" if accumulate > 1 else ""
        below = max(batch_size // parts, 1) * parts
        raise SettingError(
            f"{name}={batch_size} cannot be divided over {n} devices{micro}: make it a multiple of "
            f"{parts}, such as {below}, or show JAX fewer devices (CUDA_VISIBLE_DEVICES=0)"
        )

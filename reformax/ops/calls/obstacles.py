"""The calls that our attention kernels cannot compute, and why not."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from reformax.ops.calls import this_gpu
from reformax.ops.numerics.logits import PLAIN, Logits

# A row of an attention kernel's tile must fit on the chip; some kernels hold narrow ones alone.
MAX_HEAD_SIZE, NARROW_HEAD = 256, 128
# The most numbers of a tile of Triton.
MAX_TILE = 2**20
# The most query heads of a key head that are rows of one tile.
MAX_GROUP = 128
# Columns of a tile that products of 16-bit numbers read on Hopper.
HOPPER_COLUMNS = 64
# Bytes of a head's row of which every kernel's tiles fit on a small chip, but some kernels' alone.
SMALL_ROW = 256


class KernelObstacles(NamedTuple):
    """Why our kernels cannot compute a call: a property of it, and one that does not fit on a chip.

    The interpreter has no chip.
    """

    call: str | None
    chip: str | None


def kernel_obstacles(
    q: Array,
    k: Array | None,
    v: Array | None,
    logits: Logits = PLAIN,
    *,
    small_row: int = SMALL_ROW,
    most: int = MAX_HEAD_SIZE,
    divided_by: str | None = None,
    **options: Any,
) -> KernelObstacles:
    """The obstacles of our attention kernels.

    Args:
      q: queries.
      k: keys; None where keys are made of queries.
      v: values; None if they are not known yet.
      logits: how products become logits; no kernel has another scale than the default.
      small_row: the bytes of a head's row up to which the kernels fit `this_gpu.on_small_chip`.
      most: the largest head that the kernels hold.
      divided_by: the mesh axis that divides sequences, for kernels that read whole ones.
      **options: options that no kernel has, by name. None, False and 0 mean unset.
    """
    options.setdefault("scale", logits.scale)
    if k is not None and k.dtype != q.dtype:
        options["dtypes"] = f"{q.dtype} and {k.dtype}"
    refused = (x.dtype for x in (q, k, v) if x is not None and x.dtype == jnp.float64)
    options["dtype"] = next(refused, None)
    option = next((f"{name}={value}" for name, value in options.items() if value), None)
    if divided_by is not None:
        option = f"sequences divided over the mesh axis {divided_by!r}"
    return KernelObstacles(option, _chip_obstacle(q, v, small_row, most))


def group_obstacles(
    q: Array, k: Array, v: Array | None, logits: Logits = PLAIN, **options: Any
) -> KernelObstacles:
    """`kernel_obstacles` of kernels whose tiles have the query heads of a key head as rows."""
    sizes = dict(most=NARROW_HEAD, small_row=SMALL_ROW // 2)
    return kernel_obstacles(q, k, v, logits, **sizes, **options)


def mosaic_obstacles(
    q: Array, k: Array | None, v: Array | None, logits: Logits = PLAIN, **options: Any
) -> KernelObstacles:
    """The obstacles of our attention kernels for Hopper; arguments are as in `kernel_obstacles`."""
    found = kernel_obstacles(q, k, v, logits, most=NARROW_HEAD, **options)
    for x in (q, q if v is None else v):
        if x.dtype.itemsize != 2:
            found = found._replace(chip=f"dtype {x.dtype}")
        elif x.shape[-1] % HOPPER_COLUMNS:
            size = f"head size {x.shape[-1]}, which is no multiple of {HOPPER_COLUMNS}"
            found = found._replace(chip=size)
    return found


def _chip_obstacle(q: Array, v: Array | None, small_row: int, most: int) -> str | None:
    """The obstacle on a GPU's chip. The interpreter computes such calls."""
    for x in (q, q if v is None else v):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"dtype {x.dtype}"
        if x.shape[-1] > most:
            return f"head size {x.shape[-1]}, which is above {most}"
        if x.shape[-1] * x.dtype.itemsize > small_row and this_gpu.on_small_chip():
            return (
                f"head size {x.shape[-1]} in {x.dtype} on a GPU whose blocks share "
                f"{this_gpu.SMALL_CHIP} KiB, which is above {small_row // x.dtype.itemsize}"
            )
    return None

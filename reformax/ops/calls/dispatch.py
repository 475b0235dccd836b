"""Chooses the implementation of a call: array operations, one of our kernels, or NVIDIA's cuDNN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax.declared import SettingError, shown

# In the order in which "auto" tries them. "xla" computes every call.
IMPLEMENTATIONS = ("cudnn", "pallas", "xla", "pallas_interpret")

# Implementations that need an NVIDIA GPU of Ampere or later.
ON_GPU = ("cudnn", "pallas")

# Our kernels, compiled and interpreted.
KERNELS = ("pallas", "pallas_interpret")

# A row of an attention kernel's tile must fit on the chip.
MAX_HEAD_SIZE = 128


def check_impl(impl: str, *others: str) -> None:
    """Raises `SettingError` unless `impl` is "auto", "xla" or one of `others`."""
    known = ("auto", "xla", *others)
    if impl not in known:
        names = ", ".join(repr(name) for name in known[:-1])
        raise SettingError(f"impl is {shown(impl)}: expected {names} or {known[-1]!r}")


def choose_impl(impl: str, pays: bool = True, **obstacles: str | None) -> str:
    """The implementation that computes a call: "cudnn", "pallas", "pallas_interpret" or "xla".

    `"auto"` takes the first one without an obstacle. Any other `impl` is used, or raises.

    Args:
      impl: the user's choice, checked by `check_impl`.
      pays: whether `"auto"` may take another implementation than "xla".
      **obstacles: for each implementation but "xla", the property of the call that it cannot
        compute; None if it can. `"auto"` tries no others. This function adds the machine's
        obstacles.

    Raises:
      NotImplementedError: the chosen implementation cannot compute the call.
    """
    if impl != "auto":
        if obstacle := _machine_obstacle(impl) or obstacles.get(impl):
            raise NotImplementedError(f"impl={impl!r} with {obstacle}: use impl='auto' or 'xla'")
        return impl
    if not pays:
        return "xla"
    for name in IMPLEMENTATIONS:
        if name in ("xla", *obstacles) and not (obstacles.get(name) or _machine_obstacle(name)):
            return name
    raise AssertionError("'xla' has no obstacle")


def _machine_obstacle(impl: str) -> str | None:
    return gpu_obstacle() if impl in ON_GPU else None


def gpu_obstacle() -> str | None:
    """The reason why kernels for NVIDIA GPUs do not run on this machine; None where they run."""
    if jax.default_backend() != "gpu":
        return f"the backend {jax.default_backend()!r}"
    device = jax.local_devices()[0]
    if compute_capability(device) < 8.0:
        return f"the device {device.device_kind!r}, which is not an NVIDIA GPU of Ampere or later"
    return None


def compute_capability(device: jax.Device) -> float:
    """NVIDIA's compute capability of a device, 9.0 for Hopper; 0 for other vendors' devices."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except (TypeError, ValueError):  # AMD's are text, such as gfx942
        return 0.0


def kernel_obstacles(
    q: Array, k: Array | None, v: Array | None, **options: Any
) -> dict[str, str | None]:
    """The obstacles of our attention kernels, in the form that `choose_impl` takes.

    Args:
      q: queries.
      k: keys; None where keys are made of queries.
      v: values; None if they are not known yet.
      **options: options that no kernel has, by name. None, False and 0 mean unset.
    """
    if k is not None and k.dtype != q.dtype:
        options["dtypes"] = f"{q.dtype} and {k.dtype}"
    wide = (x.dtype for x in (q, k, v) if x is not None and x.dtype == jnp.float64)
    options["dtype"] = next(wide, None)
    option = next((f"{name}={value}" for name, value in options.items() if value), None)
    return {"pallas": option or _chip_obstacle(q, v), "pallas_interpret": option}


def _chip_obstacle(q: Array, v: Array | None) -> str | None:
    """The obstacle on a GPU's chip. The interpreter computes such calls."""
    for x in (q, q if v is None else v):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"dtype {x.dtype}"
        if x.shape[-1] > MAX_HEAD_SIZE:
            return f"head size {x.shape[-1]}, which is above {MAX_HEAD_SIZE}"
    return None

"""Chooses the implementation of a call: array operations, one of our kernels, or NVIDIA's cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax.declared import SettingError, shown
from reformax.ops.numerics.logits import PLAIN, Logits

# In the order in which "auto" tries them. "xla" computes every call. "mosaic" is taken only where
# it is asked for.
IMPLEMENTATIONS = ("cudnn", "pallas", "xla")

# Implementations that need an NVIDIA GPU of Ampere or later, and "mosaic" of Hopper.
ON_GPU = ("cudnn", "pallas", "mosaic")

# A row of an attention kernel's tile must fit on the chip; some kernels hold narrow ones alone.
MAX_HEAD_SIZE, NARROW_HEAD = 256, 128
# The most numbers of a tile of Triton.
MAX_TILE = 2**20
# The most query heads of a key head that are rows of one tile.
MAX_GROUP = 128
# Columns of a tile that products of 16-bit numbers read on Hopper.
HOPPER_COLUMNS = 64

# KiB that a block of threads may share, by compute capability: graphics cards' chips have 99.
SHARED_KIB = {
    8.0: 163,
    8.6: 99,
    8.7: 163,
    8.9: 99,
    9.0: 227,
    10.0: 227,
    10.3: 227,
    12.0: 99,
    12.1: 99,
}
# Bytes of a head's row of which every kernel's tiles fit into so much, but some kernels' alone.
SMALL_CHIP, SMALL_ROW = 99, 256
LARGE_CHIP = 227

T = TypeVar("T")


class _Interpreted(str):
    """Equal to itself alone: no text that a user types is this `impl`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Interpreted)

    def __hash__(self) -> int:
        return super().__hash__()

    def __repr__(self) -> str:
        return "INTERPRETED"


# The `impl` with which tests run our kernels on any machine, slowly.
INTERPRETED = _Interpreted("interpreted")

# Our kernels: compiled, and interpreted.
KERNELS = ("pallas", INTERPRETED)


class KernelObstacles(NamedTuple):
    """Why our kernels cannot compute a call: a property of it, and one that does not fit on a chip.

    The interpreter has no chip.
    """

    call: str | None
    chip: str | None


def check_impl(impl: str, *others: str) -> None:
    """Raises `SettingError` unless `impl` is "auto", "xla" or one of `others`."""
    known = ("auto", "xla", *others)
    if impl not in known:
        *names, last = (repr(name) for name in known if name != INTERPRETED)
        raise SettingError(f"impl is {shown(impl)}: expected {', '.join(names)} or {last}")


def compute_by(
    impl: str,
    in_arrays: Callable[[], T],
    pays: bool = True,
    **others: tuple[str | KernelObstacles | None, Callable[..., T]],
) -> T:
    """A call's result by the implementation that `choose_impl` takes.

    Args:
      impl, pays: as in `choose_impl`.
      in_arrays: computes the call in array operations, "xla".
      **others: by name, the obstacle that `choose_impl` takes and the function that computes the
        call. That of "pallas" takes whether kernels are interpreted.
    """
    chosen = choose_impl(impl, pays, **{name: obstacle for name, (obstacle, _) in others.items()})
    if chosen in KERNELS:
        return others["pallas"][1](chosen == INTERPRETED)
    return in_arrays() if chosen == "xla" else others[chosen][1]()


def choose_impl(impl: str, pays: bool = True, **obstacles: str | KernelObstacles | None) -> str:
    """The implementation of a call: "cudnn", "pallas", "mosaic", "xla" or `INTERPRETED`.

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
        if obstacle := _machine_obstacle(impl) or _obstacle(impl, obstacles):
            raise NotImplementedError(f"impl={impl!r} with {obstacle}: use impl='auto' or 'xla'")
        return impl
    if not pays:
        return "xla"
    for name in IMPLEMENTATIONS:
        tried = name in ("xla", *obstacles)
        if tried and not (_obstacle(name, obstacles) or _machine_obstacle(name)):
            return name
    raise AssertionError("'xla' has no obstacle")


def _obstacle(impl: str, obstacles: Mapping[str, str | KernelObstacles | None]) -> str | None:
    found = obstacles.get("pallas" if impl in KERNELS else impl)
    if isinstance(found, KernelObstacles):
        return found.call or (None if impl == INTERPRETED else found.chip)
    return found


def _machine_obstacle(impl: str) -> str | None:
    obstacle = gpu_obstacle() if impl in ON_GPU else None
    if impl == "mosaic" and not obstacle and not on_hopper():
        return "a GPU that is not of NVIDIA's Hopper generation"
    return obstacle


def gpu_obstacle() -> str | None:
    """The reason why kernels for NVIDIA GPUs do not run on this machine; None where they run."""
    if jax.default_backend() != "gpu":
        return f"the backend {jax.default_backend()!r}"
    device = jax.local_devices()[0]
    if compute_capability(device) < 8.0:
        return f"the device {device.device_kind!r}, which is not an NVIDIA GPU of Ampere or later"
    return None


def shared_kib() -> int:
    """KiB that a block of threads may share on this machine's GPU.

    Without a GPU, and on one that came later, as many as on the newest of a data centre.
    """
    if jax.default_backend() != "gpu":
        return LARGE_CHIP
    return SHARED_KIB.get(compute_capability(jax.local_devices()[0]), LARGE_CHIP)


def on_small_chip() -> bool:
    """Whether kernels run on a GPU whose blocks of threads share less than a data centre's do."""
    return shared_kib() <= SMALL_CHIP


def on_hopper() -> bool:
    """Whether the GPU is of NVIDIA's Hopper generation."""
    if jax.default_backend() != "gpu":
        return False
    return compute_capability(jax.local_devices()[0]) == 9.0


def compute_capability(device: jax.Device) -> float:
    """NVIDIA's compute capability of a device, 9.0 for Hopper; 0 for other vendors' devices."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except (TypeError, ValueError):  # AMD's are text, such as gfx942
        return 0.0


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
      small_row: the bytes of a head's row up to which the kernels fit `on_small_chip`.
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
        if x.shape[-1] * x.dtype.itemsize > small_row and on_small_chip():
            return (
                f"head size {x.shape[-1]} in {x.dtype} on a GPU whose blocks share {SMALL_CHIP} "
                f"KiB, which is above {small_row // x.dtype.itemsize}"
            )
    return None

"""Chooses the implementation of a call: array operations, one of our kernels, or NVIDIA's cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from reformax.declared import SettingError, shown
from reformax.ops.calls import this_gpu
from reformax.ops.calls.obstacles import KernelObstacles

# In the order in which "auto" tries them. "xla" computes every call. "mosaic" is taken only where
# it is asked for.
IMPLEMENTATIONS = ("cudnn", "pallas", "xla")

# Implementations that need an NVIDIA GPU of Ampere or later, and "mosaic" of Hopper.
ON_GPU = ("cudnn", "pallas", "mosaic")

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
    obstacle = this_gpu.obstacle() if impl in ON_GPU else None
    if impl == "mosaic" and not obstacle and not this_gpu.is_hopper():
        return "a GPU that is not of NVIDIA's Hopper generation"
    return obstacle

"""Forecasts the memory of a step.

The products of matrices in a step's program are known before it is compiled. Their largest result
is in memory at some time, whatever the compiler fuses. The compiled program states its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import jax
from jax.extend import core

from reformax import memory

_FIX = "batch_size or length, raise accumulate, or take a smaller model"


class Products(NamedTuple):
    """The products of matrices in a program; those in kernels are not seen.

    Attributes:
      largest: bytes of the largest result.
      flops: additions and multiplications of all.
    """

    largest: int = 0
    flops: int = 0

    def then(self, other: Products) -> Products:
        """The products of two programs in sequence."""
        return Products(max(self.largest, other.largest), self.flops + other.flops)

    def least(self, other: Products) -> Products:
        """A lower bound for a program that runs one of two branches."""
        return Products(min(self.largest, other.largest), min(self.flops, other.flops))


def products(program: core.Jaxpr | core.ClosedJaxpr) -> Products:
    """The products of matrices in a traced function; a loop without a known end counts once."""
    found = Products()
    for equation in getattr(program, "jaxpr", program).eqns:
        name = equation.primitive.name
        if name == "dot_general":
            result = equation.outvars[0].aval
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            size = math.prod(result.shape)
            found = found.then(Products(size * result.dtype.itemsize, 2 * size * summed))
        elif name != "pallas_call":
            inner = [products(x) for x in _programs(equation.params.values())]
            if inner:
                # One of the branches runs, and all of any other equation's programs.
                join = Products.least if name == "cond" else Products.then
                largest, flops = reduce(join, inner)
                times = equation.params["length"] if name == "scan" else 1
                # A shard is that of one device.
                n_shards = equation.params["mesh"].size if name == "shard_map" else 1
                found = found.then(Products(largest * n_shards, flops * times * n_shards))
    return found


def _programs(values: Iterable[Any]) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _programs(value)
        elif isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            yield value


def check_step(found: Products, state: int, n_devices: int) -> None:
    """Refuses a step that cannot fit, before it is compiled.

    Args:
      found: the products of matrices of a step of all devices.
      state: bytes of it that a device has.
      n_devices: a batch is split over.

    Raises:
      SettingError: the largest result and the state are more than a device has.
    """
    least = found.largest // n_devices + state
    memory.check("the state and the largest product of a step", least, _FIX)


def memory_of(compiled: jax.stages.Compiled, n_devices: int) -> int:
    """The bytes that a compiled step needs on a device, or on the host for all devices of a CPU.

    Raises:
      SettingError: they are more than there is.
    """
    stats = compiled.memory_analysis()
    if stats is None:  # not every backend says it
        return 0
    needed = bytes_of(stats)
    if jax.default_backend() == "cpu":
        needed *= n_devices
    fix = _FIX
    if jax.default_backend() == "gpu" and jax.device_count() > 1:
        fix += ", or set XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=false"
    memory.check("the state and the compiled step", needed, fix)
    return needed


def bytes_of(stats: Any) -> int:
    """The bytes that a program takes, by XLA's `memory_analysis` of it."""
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return held + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes

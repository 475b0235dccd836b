"""Triton's choice among the versions of a kernel: compiled by many processes, timed shortly.

A library may have some hundred versions of the kernels of one attention. One process compiles one
after another, for minutes; what it has compiled is on the disk, for all processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def compile_share(index: int, n: int) -> None:
    """From now on this process compiles every n-th version, from `index` on, and times none.

    The first one besides, for others may ask for more of a chip than it has.
    """
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def share(self: Any, *args: Any) -> list[Any]:
        found = prune(self, *args)
        return [*found[index::n], *([found[0]] if index else [])]

    Autotuner.prune_configs = share
    _time_by(lambda call, quantiles: (call(), [0.0] * len(quantiles))[1])


def tune_shortly() -> None:
    """From now on this process takes 12 ms for each version, a tenth of what Triton would."""
    from triton.testing import do_bench

    _time_by(functools.partial(do_bench, warmup=2, rep=10))


def _time_by(do_bench: Callable[..., list[float]]) -> None:
    from triton.runtime.autotuner import Autotuner

    bench = Autotuner._bench

    def timed(self: Any, *args: Any, **kwargs: Any) -> list[float]:
        self.__dict__["do_bench"] = do_bench  # in the place of its cached property
        return bench(self, *args, **kwargs)

    Autotuner._bench = timed

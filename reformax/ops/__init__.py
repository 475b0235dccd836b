"""Attention algorithms as pure functions: one module each, arrays in, arrays out.

    from reformax.ops import lsh
    attend = lsh.lsh(n_hashes=4)
    out = attend(qk, None, v, causal=True, rng=jax.random.key(0))

Importing this package needs JAX alone. A module is imported when it is first asked for.
"""

import importlib
import pkgutil
from types import ModuleType

from reformax.ops.base import AttentionOp
from reformax.ops.calls.dims import Dims

_OTHERS = ("base", "block_patterns")
_MODULES = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg and m.name not in _OTHERS]

__all__ = ["AttentionOp", "Dims", *_MODULES]


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__

"""Compares the facts that all processes of a run must share, before any device computes.

Other versions, other source or other settings of JAX compile another program: the processes then
wait for each other for minutes, abort, or train on with other numbers. Paths, hosts and clocks may
differ.
"""

from __future__ import annotations

import hashlib
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from reformax.training.description import version

_PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGES = (
    "reformax",
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "trax",
    "gin-config",
)
# Devices and paths of a process, by which JAX traces too.
_FREE_JAX = ("jax_default_device", "jax_hlo_source_file_canonicalization_regex")
# Besides those that JAX itself traces and compiles by.
_JAX = (
    "jax_platforms",
    "jax_default_prng_impl",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_cpu_collectives_implementation",
)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Flags of XLA that change no program: where it dumps, and devices, which are counted.
_FREE = ("--xla_dump", "--xla_force_host_platform_device_count")
_FIX = "give all processes the same command, data, environment and installation"


def facts() -> dict[str, str]:
    """The facts that must be equal, by names that users know; touches no device."""
    found = {"python": platform.python_version()}
    found |= {package: version(package, "not there") for package in _PACKAGES}
    found["the source of reformax"] = _digest(_files(_PACKAGE))
    found |= {f"the source of {name}": _digest([path]) for name, path in _own_modules().items()}
    found |= {name.upper(): str(value) for name, value in _jax_settings().items()}
    found |= {name: _flags(os.environ.get(name, "")) for name in _VARIABLES}
    found["an NVIDIA GPU"] = _sees_gpu()
    return found


def difference(of_each: Sequence[Mapping[str, str]]) -> str | None:
    """The first fact in which a process is not like process 0, in a line; None if there is none.

    Args:
      of_each: the facts of each process, in the order of their numbers.
    """
    first, *others = of_each
    for index, other in enumerate(others, start=1):
        for name in [*first, *(name for name in other if name not in first)]:
            one, two = first.get(name, "not there"), other.get(name, "not there")
            if one != two:
                one, two = _first_lines(one, two)
                return f"{name} is {one} in process 0 and {two} in process {index}: {_FIX}"
    return None


def _first_lines(one: str, other: str) -> tuple[str, str]:
    """The first line that differs, by the name of what it sets, if it sets any."""
    mine, theirs = (
        {(" = " in line) * line.partition(" = ")[0]: line for line in text.splitlines()}
        for text in (one, other)
    )
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            return mine.get(name, "not there"), theirs.get(name, "not there")
    return one, other


def _files(folder: Path) -> list[Path]:
    return sorted(path for end in ("py", "gin") for path in folder.rglob(f"*.{end}"))


def _digest(files: Sequence[Path]) -> str:
    """A digest of the contents of files, whatever their folder."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _own_modules() -> dict[str, Path]:
    """The user's own modules that are imported, which a config may name."""
    installed = {*sysconfig.get_paths().values(), *site.getsitepackages(), sys.base_prefix}
    installed |= {sys.prefix, site.getusersitepackages()}
    folders = {os.path.realpath(path) for path in installed} - {"/"}
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reformax":
            continue
        path = os.path.realpath(getattr(module, "__file__", None) or "")
        inside = any(path.startswith(folder + os.sep) for folder in folders)
        if path.endswith(".py") and not inside and os.path.isfile(path):
            found["the script" if name == "__main__" else name] = Path(path)
    return found


def _jax_settings() -> dict[str, object]:
    from jax._src import config

    traced = [name for name in config.trace_context_names() if name.startswith("jax_")]
    values = jax.config.values
    names = [name for name in (*traced, *_JAX) if name not in _FREE_JAX]
    return {name: values[name] for name in names if name in values}


def _flags(text: str) -> str:
    """The flags of a variable without those that may differ, in any order."""
    return " ".join(sorted(flag for flag in text.split() if not flag.startswith(_FREE)))


def _sees_gpu() -> str:
    try:
        from jax._src import hardware_utils

        return "there" if hardware_utils.has_visible_nvidia_gpu() else "not there"
    except (ImportError, AttributeError):  # JAX has no public name for it
        return "unknown"

"""Compilation for tests that run a program once or twice, or not at all."""

import functools
import inspect
import os

import jax


def fast_jit(function):
    """`jax.jit` without LLVM's optimisation of the loops, which takes half of the compile time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def default_jit(function):
    """`jax.jit` as in use: where what is fused with what matters, or a test computes for long."""
    options = {"xla_backend_optimization_level": 3}
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        options["xla_cpu_use_fusion_emitters"] = True
    return jax.jit(function, compiler_options=options)


def lower_for_gpu(function, *args) -> str:
    """The program that would be compiled on an NVIDIA GPU."""
    lower = functools.partial(
        lambda: jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    )
    try:
        return lower()
    except RuntimeError:  # jax 0.12 asks which GPU
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        known = inspect.signature(AbstractDevice).parameters
        device = AbstractDevice(
            device_kind="NVIDIA H200",
            num_cores=None,
            **({"platform": "cuda"} if "platform" in known else {}),
        )
        with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            return lower()

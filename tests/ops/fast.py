"""Compilation for tests that run a program once or twice."""

import jax


def fast_jit(function):
    """`jax.jit` without LLVM's optimisation of the loops, which takes half of the compile time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})

"""What tests of all parts share: compilation, gradients, comparison of trees."""

import dataclasses
import functools
import inspect
import os

import jax
import numpy as np


def default_jit(function):
    """`jax.jit` as in use, where the tests' own flags compile quickly and run slowly.

    For a test of rounding, which depends on what is fused with what, or one that computes for long.
    """
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


def with_x64():
    """A context in which JAX has 64-bit types."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()


def with_gradients(function):
    """`(cotangent, *inputs) -> (out, gradients)`, compiled."""

    @jax.jit
    def run(cotangent, *inputs):
        out, vjp = jax.vjp(function, *inputs)
        return out, vjp(cotangent.astype(out.dtype))

    return run


def assert_trees_close(got, want, tolerance=1e-5, more=0.0):
    """The same tree; each array is finite and off by at most `tolerance` times its scale.

    The scale is the largest number of the array wanted, or 1 if that is more: a gradient sums over
    the length, so its rounding grows with its largest entry. `more` is allowed besides.
    """
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, x), (_, y) in zip(got, want, strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, name
        assert np.isfinite(x).all(), f"{name} has a NaN or an infinity"
        error = np.abs(x - y).max(initial=0)
        allowed = tolerance * max(1, np.abs(y).max(initial=0)) + more
        assert error <= allowed, f"{name} is off by {error:.2g}, {allowed:.2g} is allowed"


def assert_trees_equal(got, want):
    """The same tree of the same arrays, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name, x, y = jax.tree_util.keystr(path) or "the array", np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert x.tobytes() == y.tobytes(), f"{name} differs"


def changed(op, **attributes):
    """An op of the same options, some attributes and methods of whose class are others."""
    kind = type(op.name, (type(op),), attributes)
    return kind(**{field.name: getattr(op, field.name) for field in dataclasses.fields(op)})


def table_cells(table: str, row: str) -> list[str]:
    """The cells of a row of a Markdown table, by what its first cell says."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]

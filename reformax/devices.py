"""Meshes of devices: their axes, how arrays are sharded, and functions that run on each shard.

The rows of a batch are split over the axes `data` and `fsdp`, and along `context` a sequence is.
Weights and what belongs to them are split over `fsdp` (`stored_spec`) and gathered where a layer
needs them. XLA divides array operations by these shardings. It cannot divide a kernel, or a loop
that sums up: `by_rows` runs these once on each device, for the device's rows.

JAX keeps the mesh in use: `on` sets it while a function is traced. Without a mesh, or with one of
one device, these functions do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Int

from reformax.buffers import in_parts, is_buffer

T, U = TypeVar("T"), TypeVar("U")
# Axes of a mesh.
Axes = str | tuple[str, ...] | None
AXES = ("data", "fsdp", "context")
# The axes that rows are split over.
ROWS = ("data", "fsdp")
# The axis that sequences are split over.
CONTEXT = "context"
# Arrays of fewer numbers are whole on every device: to gather them would cost more than they do.
LEAST_SPLIT = 2**16
# What may vary from shard to shard.
_ARRAYS = (jax.Array, np.ndarray, np.generic)


def on(mesh: Mesh | None, function: Callable[..., T]) -> Callable[..., T]:
    """`function`, traced with `mesh` in use; None: there is none."""
    if mesh is None or mesh.size == 1:
        return function

    @functools.wraps(function)
    def call(*args, **options) -> T:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **options)

    return call


def without_mesh() -> contextlib.AbstractContextManager:
    """A context with no mesh in use, in which constants can be computed while a shard is traced."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def current() -> AbstractMesh | None:
    """The mesh in use; None where there is none, and within a shard."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or mesh.size == 1 or mesh.manual_axes:
        return None
    return mesh


def n_shards(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """The number of shards of an array that is split over axes of a mesh."""
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[axis] for axis in axes)


def n_row_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """The number of shards that rows are split into, by default on the mesh in use."""
    mesh = current() if mesh is None else mesh
    return 1 if mesh is None else n_shards(mesh, ROWS)


def n_sequence_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """The number of shards of a sequence, by default on the mesh in use."""
    mesh = current() if mesh is None else mesh
    return 1 if mesh is None else n_shards(mesh, CONTEXT)


def whole_sequences(mesh: Mesh | None) -> Mesh | None:
    """A mesh of the same devices that splits rows over those which split a sequence."""
    if mesh is None or n_sequence_shards(mesh) == 1:
        return mesh
    n_data, n_fsdp, n_context = mesh.devices.shape
    grid = mesh.devices.transpose(0, 2, 1).reshape(n_data * n_context, n_fsdp, 1)
    return Mesh(grid, AXES, axis_types=mesh.axis_types)


def by_rows(function: Callable[..., T], rows: tuple, whole: tuple = ()) -> T:
    """`function(*rows, *whole)`, which each device computes for its rows.

    Args:
      function: reads and returns trees of arrays whose first axis is that of the rows, and treats
        rows alike; `row_axes` says which of them it has.
      rows: trees of such arrays. Their number is a multiple of the devices that they are split
        over.
      whole: trees of arrays that every device has whole.
    """
    if current() is None:
        return function(*rows, *whole)
    specs = (Spec(ROWS),) * len(rows) + (Spec(),) * len(whole)
    return per_shard(function, specs, Spec(ROWS))(*rows, *whole)


def by_positions(
    function: Callable[..., T], inputs: tuple, whole: tuple = (), *, sums: bool = False
) -> T:
    """`function(first, *inputs, *whole)`, as in `by_rows`, on a shard of each sequence.

    Args:
      function: treats positions alike, as it does rows; `first` is the index of the shard's first
        position.
      inputs: trees of arrays `[B, T, ...]`, as its results are.
      whole: trees of arrays that every device has whole.
      sums: whether `function` returns a pair, whose second part is sums over rows and positions;
        buffers among them become means, as in `per_shard`.
    """
    if current() is None:
        return function(0, *inputs, *whole)
    # A step of decoding has one position, which all devices of `context` compute.
    divided = all(x.shape[1] % n_sequence_shards() == 0 for x in jax.tree.leaves(inputs))
    spec, axes = (Spec(ROWS, CONTEXT), AXES) if divided else (Spec(ROWS), ROWS)

    def over_shards(x):
        return lax.pmean(x, axes) if is_buffer(x) else lax.psum(x, axes)

    def of_shard(*arrays):
        length = jax.tree.leaves(arrays)[0].shape[1]
        found = function(lax.axis_index(CONTEXT) * length if divided else 0, *arrays)
        return (found[0], jax.tree.map(over_shards, found[1], is_leaf=is_buffer)) if sums else found

    specs = (spec,) * len(inputs) + (Spec(),) * len(whole)
    out = (spec, Spec()) if sums else spec
    return per_shard(of_shard, specs, out)(*inputs, *whole)


def per_shard(function: Callable[..., T], in_specs: Any, out_specs: Any) -> Callable[..., T]:
    """`jax.shard_map` of `function` over all axes of the mesh in use.

    Gradients of what every device has whole are summed; a buffer becomes the mean of the devices'.
    """
    # JAX's interpreter of kernels does not pass the check, nor do gradients of layers.
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    n_devices = jax.sharding.get_abstract_mesh().size
    return lambda *args: mapped(*in_parts(args, n_devices))


def row_axes() -> Axes:
    """Within a shard, the axes whose devices have other rows; outside of one there are none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in ROWS if axis in manual)


def first_index(n: int, axes: Axes) -> Int[Array, ""] | int:
    """The index of this device's first item, if each device along `axes` has n."""
    return lax.axis_index(axes) * n if axes else 0


def sum_over(x: Array, axes: Axes) -> Array:
    """The sum of `x` over the devices along `axes`."""
    return lax.psum(x, axes) if axes else x


def varying_axes(tree: Any) -> frozenset[str]:
    """The axes of a `jax.shard_map` along which arrays vary, as JAX knows where it checks that."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, _ARRAYS))
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def varying_as(like: Any, tree: T) -> T:
    """`tree`, each array of which also varies along the `varying_axes` of `like`.

    JAX requires it of a loop's initial values, and of the inputs of a function with a custom
    gradient. An input that was alike on all shards has the sum of their gradients. Numbers stay
    as they are, and so does what is no array.
    """
    axes = varying_axes(like)

    def vary(x: Any) -> Any:
        missing = axes - varying_axes(x) if isinstance(x, _ARRAYS) else ()
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


# Weights, gradients and the optimizer's state.


def stored_spec(shape: tuple[int, ...], n_shards: int) -> Spec:
    """How an array of weights, or of numbers that belong to weights, lies on `n_shards`.

    It is split along its largest axis that they divide, the last of such; a small one is whole.
    """
    fitting = [axis for axis, n in enumerate(shape) if n % n_shards == 0]
    if n_shards == 1 or math.prod(shape) < LEAST_SPLIT or not fitting:
        return Spec()
    longest = max(fitting, key=lambda axis: (shape[axis], axis))
    return Spec(*[None] * longest, "fsdp")


def placement(tree: Any, mesh: Mesh) -> Any:
    """The `stored_spec` of each array of a tree on a mesh."""
    n_shards = mesh.shape["fsdp"]
    return jax.tree.map(lambda x: NamedSharding(mesh, stored_spec(x.shape, n_shards)), tree)


def over_batch(mesh: Mesh) -> NamedSharding:
    """The first axis split over the axes of rows."""
    return NamedSharding(mesh, Spec(ROWS))


def over_tokens(mesh: Mesh) -> NamedSharding:
    """Arrays `[B, T]`: rows as in `over_batch`, and sequences over the context axis."""
    return (
        over_batch(mesh)
        if n_sequence_shards(mesh) == 1
        else NamedSharding(mesh, Spec(ROWS, CONTEXT))
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, Spec())


def placed(mesh: Mesh | None, rows: T, weights: U) -> tuple[T, U]:
    """Trees of rows and of weights on the devices of a mesh; None: as they are."""
    if mesh is None:
        return rows, weights
    return jax.device_put(rows, over_batch(mesh)), jax.device_put(weights, placement(weights, mesh))


def stored(tree: T) -> T:
    """A tree of weights, or of their gradients, each array split as it is stored."""
    mesh = current()
    if mesh is None:
        return tree
    n_shards = mesh.shape["fsdp"]
    return jax.tree.map(
        lambda x: lax.with_sharding_constraint(x, stored_spec(x.shape, n_shards)), tree
    )


def gathered(tree: T) -> T:
    """A tree of weights, whole on every device; their gradients are split as they are stored."""
    mesh = current()
    return tree if mesh is None or mesh.shape["fsdp"] == 1 else jax.tree.map(_gathered, tree)


def over_sequence(x: Array) -> Array:
    """Activations `[B, T, D]` divided by rows, and by positions if `context` divides them."""
    n = n_sequence_shards()
    if n == 1:
        return x
    spec = Spec(ROWS, CONTEXT) if x.shape[1] % n == 0 else Spec(ROWS)
    return lax.with_sharding_constraint(x, spec)


def looked_up(table: Any, ids: Any) -> Any:
    """`table[ids]` for ids `[B, T]` and a table of weights, which is gathered.

    Each device sums up its tokens' gradients, and devices exchange sums of the table's size.
    XLA may otherwise choose to split that sum along the features, as the table is stored, which
    takes the gradients of all tokens to every device, and it warns of that.
    """
    table = jnp.asarray(table)  # NumPy's takes no ids that are traced
    return by_positions(lambda _, ids, table: table[ids], (ids,), (gathered(table),))


@jax.custom_vjp
def _gathered(x):
    # First as it is stored: otherwise XLA may gather all layers before the loop over them.
    return lax.with_sharding_constraint(stored(x), Spec())


_gathered.defvjp(lambda x: (_gathered(x), None), lambda _, gradient: (stored(gradient),))

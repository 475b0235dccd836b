"""Runs a call of arrays that are sharded along axes of `jax.sharding.AxisType.Explicit`.

`jax.make_mesh` makes such axes. JAX then asks for the sharding of each operation's result, which
loops, scatters and kernels cannot state. The call therefore becomes a `jax.shard_map`, in which
each device computes its rows, and for most algorithms its heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as Spec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.buffers import in_parts
from reformax.declared import Unsupported
from reformax.ops.calls.heads import repeat_heads, splits_head_groups
from reformax.ops.masking.masks import SegmentIds
from reformax.ops.sharding.shard import Shard


class CallArrays(NamedTuple):
    """The arrays of a call of an op."""

    params: Any
    q: Float[Array, "B T N H"]
    k: Float[Array, "B S G H"] | None
    v: Float[Array, "B S G V"]
    segment_ids: SegmentIds | None
    lengths: Int[Array, " B"] | None
    mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"] | None
    bias: Float[Array, "#B #N #T #S"] | None
    extra_projections: dict[str, Float[Array, "B T _ _"]] | None
    global_tokens: Int[Array, "B T"] | None
    rng: PRNGKeyArray | None


class Placement(NamedTuple):
    """The mesh of a call, and the axes that its queries are split over: rows and heads only."""

    mesh: AbstractMesh
    queries: Spec

    @property
    def rows(self) -> devices.Axes:
        """The axes that rows are split over."""
        return self.queries[0]

    @property
    def heads(self) -> devices.Axes:
        """The axes that heads are split over."""
        return self.queries[2]

    @property
    def n_head_shards(self) -> int:
        """The number of shards that heads are split into."""
        return devices.n_shards(self.mesh, self.heads)

    def specs(self, x: CallArrays) -> CallArrays:
        """The sharding of each array of a call."""

        def of_pairs(pairs: Array) -> Spec:
            axes = zip((self.rows, self.heads), pairs.shape[:2], strict=True)
            return Spec(*(None if n == 1 else axis for axis, n in axes))

        def each(spec: Spec, tree: Any) -> Any:
            return jax.tree.map(lambda _: spec, tree)

        return CallArrays(
            params=each(Spec(), x.params),
            q=self.queries,
            k=each(self.queries, x.k),
            v=self.queries,
            segment_ids=each(Spec(self.rows), x.segment_ids),
            lengths=each(Spec(self.rows), x.lengths),
            mask=jax.tree.map(lambda y: of_pairs(y) if y.ndim == 4 else Spec(self.rows), x.mask),
            bias=jax.tree.map(of_pairs, x.bias),
            extra_projections=each(self.queries, x.extra_projections),
            global_tokens=each(Spec(self.rows), x.global_tokens),
            rng=each(Spec(), x.rng),
        )

    def on_each(self, attend: Callable[..., Array], x: CallArrays) -> Float[Array, "B T N V"]:
        """`attend(x, shard)`, of which each device computes its rows and heads."""
        n_heads, n_kv_heads = x.q.shape[2], x.v.shape[2]
        if n_kv_heads % self.n_head_shards:  # each device needs at least one
            k, v = repeat_heads(x.q, x.k, x.v)
            x = x._replace(k=k, v=v)

        n_parts = self.n_head_shards * devices.n_shards(self.mesh, self.rows)
        x = x._replace(params=in_parts(x.params, n_parts))

        def of_device(x: CallArrays) -> Array:
            head = devices.first_index(x.q.shape[2], self.heads)
            return attend(x, Shard(head=head, n_heads=n_heads, rows=self.rows or ()))

        specs = self.specs(x)
        x = jax.tree.map(lambda y, spec: reshard(y, NamedSharding(self.mesh, spec)), x, specs)
        explicit = frozenset(self.mesh.explicit_axes)
        # An empty set means all axes but those of `jax.vmap`, which only JAX knows.
        axes = explicit if len(explicit) < len(self.mesh.axis_names) else frozenset()
        options = dict(mesh=self.mesh, axis_names=axes, in_specs=(specs,), out_specs=self.queries)
        return jax.shard_map(of_device, **options)(x)


def placement_of(op: Any, x: CallArrays) -> Placement | None:
    """The sharding of the queries' type, on the mesh of any array of the call.

    None: no array is on a mesh with explicit axes.

    Raises:
      Unsupported: positions or features are split, or heads that `op` computes together.
    """
    meshes = (jax.typeof(y).sharding.mesh for y in jax.tree.leaves(x))
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return None
    for name, y in dict(q=x.q, k=x.k, v=x.v).items():
        _, positions, _, features = (None,) * 4 if y is None else jax.typeof(y).sharding.spec
        for what, axes in dict(positions=positions, features=features).items():
            if devices.n_shards(mesh, axes) > 1:
                raise Unsupported(
                    f"{name} has its {what} split over {axes!r}: split its rows or heads, with "
                    "jax.sharding.reshard"
                )
    found = Placement(mesh, jax.typeof(x.q).sharding.spec)
    split = f"q has its heads split over {found.heads!r}"
    fix = "split its rows, with jax.sharding.reshard"
    n, n_kv_heads = found.n_head_shards, x.v.shape[2]
    if n_kv_heads > x.q.shape[2]:
        raise Unsupported(
            f"v has {n_kv_heads} heads and q has {x.q.shape[2]}, on a mesh with explicit axes: "
            "repeat the queries and keys"
        )
    if n > 1 and not op.divides_heads:
        raise Unsupported(f"{split} and op is {op}, which computes them together: {fix}")
    if "key heads" in op.shards and splits_head_groups(n, x.q.shape[2], n_kv_heads):
        raise Unsupported(
            f"{split} and op is {op}, whose heads of queries choose together for each of "
            f"{n_kv_heads} heads of keys: {fix}"
        )
    for name, y in (x.extra_projections or {}).items():
        if y.shape[2] % n:
            raise Unsupported(
                f"{split}, {n} devices, and extra_projections[{name!r}] has {y.shape[2]} of them: "
                f"{fix}"
            )
    return found

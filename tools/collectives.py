"""What devices send to each other in a training step, counted in the compiled program.

    python -m tools.collectives --mesh=data=8,context=8 --length=524288

compiles a step of the Reformer paper's model for simulated devices of a CPU, and runs nothing. It
prints, by kind, how often a step has a collective, the MiB that a device sends in it, and how many
of them leave a node. Then come the seconds that these take by the rates of the links, and with a
measured `--tokens_per_second` of one device the efficiency: the share of a step that is arithmetic
where none of the sending is hidden behind it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import command_line
from benchmarks.harness.calls import MIB
from benchmarks.harness.language_models import PAPER, TINY, Sizes
from benchmarks.harness.output import Table
from reformax import devices, models
from reformax.ops import flash
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from tools.hlo_collectives import Collective, collectives


class Rates(NamedTuple):
    """Bytes a second that a device sends."""

    within: float  # to devices of its node
    between: float  # to those of others


# NVIDIA's figures for one direction: NVLink of the fourth generation, InfiniBand NDR a GPU.
H200 = Rates(450e9, 50e9)


def compiled_step(model: Any, mesh: Any, rows: int, length: int) -> str:
    """The text of a compiled step of training with Adam."""
    adam = optax.adam(1e-3)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    state = jax.eval_shape(step_lib.init_fn(model, adam, (rows, length), ema=False), key)
    place = devices.placement(state, mesh)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, place
    )
    placed = devices.over_tokens(mesh)
    batch = tuple(
        jax.ShapeDtypeStruct((rows, length), dtype, sharding=placed)
        for dtype in (jnp.int32, jnp.int32, jnp.float32)
    )
    return (
        step_lib.step_fn(model, adam, mesh, placement=place)
        .lower(state, batch, key)
        .compile()
        .as_text()
    )


def model_of(name: str, sizes: Sizes, length: int) -> Any:
    """The Reformer of a size, or a Transformer with FlashAttention."""
    options = sizes.arguments() | dict(dtype="bfloat16", dropout=0.0, ff_chunk_size=0)
    if name == "transformer":
        return models.TransformerLM(**options, attention_type=flash.flash(), remat_policy="nothing")
    options |= sizes.axial(length)
    return models.ReformerLM(**options, attention_type=sizes.attention(), keep_ff_outputs=True)


def seconds(found: list[Collective], node_size: int, rates: Rates) -> tuple[float, float]:
    """The time of sending, within nodes and between them."""
    taken = [0.0, 0.0]
    for each in found:
        leaves = each.leaves(node_size)
        taken[leaves] += each.times * each.sent / rates[leaves]
    return taken[0], taken[1]


def print_by_kind(found: list[Collective], node_size: int) -> None:
    """A row for each kind."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for each in found:
        row = rows[each.kind]
        row[0] += each.times
        row[1] += each.times * each.sent
        row[2] += each.times * each.sent * each.leaves(node_size)
    table = Table("collective", "times", "MiB sent by a device", "of these to other nodes")
    for kind, (times, sent, leaving) in sorted(rows.items()):
        table.row(kind, f"{times:,}", f"{sent / MIB:,.1f}", f"{leaving / MIB:,.1f}")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    flags = command_line.parser(__doc__)
    flags.add_argument("--model", choices=("reformer", "transformer"), default="reformer")
    flags.add_argument("--mesh", default="", help="such as fsdp=8,context=8 (default: data alone)")
    flags.add_argument("--devices", type=command_line.positive, default=64)
    flags.add_argument("--node", type=command_line.positive, default=8, help="devices of a node")
    flags.add_argument("--length", type=command_line.positive, default=65536)
    flags.add_argument(
        "--batch_size", type=command_line.positive, help="sequences (default: one a share)"
    )
    flags.add_argument("--tokens_per_second", type=float, help="of one device, for the efficiency")
    given = flags.parse_args(argv)
    n_devices, length = (8, 64) if given.tiny else (given.devices, given.length)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", n_devices)
    pairs = (pair.split("=") for pair in given.mesh.split(",") if pair)
    mesh = mesh_lib.make({axis: int(size) for axis, size in pairs}, jax.devices()[:n_devices])
    rows = given.batch_size or devices.n_row_shards(mesh)
    print(f"{mesh_lib.words(mesh)}, {rows:,} rows of {length:,} tokens, {given.model}")
    model = model_of(given.model, TINY if given.tiny else PAPER, length)
    found = collectives(compiled_step(model, mesh, rows, length))
    print_by_kind(found, given.node)
    within, between = seconds(found, given.node, H200)
    print(f"\nsending takes {within:.3f} s within nodes and {between:.3f} s between them")
    if given.tokens_per_second:
        alone = rows * length / n_devices / given.tokens_per_second
        print(
            f"arithmetic takes {alone:.3f} s: efficiency {alone / (alone + within + between):.1%}"
        )


if __name__ == "__main__":
    main()

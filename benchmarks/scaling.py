"""Training on one device and on all: tokens a second, and memory of a device.

    python -m benchmarks.scaling --config_file=reformer_enwik8.gin
    python -m benchmarks.scaling --config_file=... --config='length = 16_384' --mesh=context

Prints a table with a row for each device alone, one for all of them alone at once, and one for each
mesh: tokens a second, how many times those of the slowest device they are, for which the others
wait, and the MiB of state and of temporary memory of a device. What devices lose that run at once
and share nothing is the machine's; the rest of what a mesh loses is sending. The tokens of a device
are those of the config's step. Over `data` and `fsdp` a step has more rows; over `context` it has
longer ones, or with `--shared` the same, as dense attention needs, whose tokens cost more in longer
rows. The meshes' steps take turns, so that other load slows all alike. The text is that of Python's
standard library, whatever the config's.

    python -m benchmarks.scaling --page --saved=FILE

runs what docs/scaling.md measures, each in a process of its own, most important first: the paper's
model, the Transformer and one long sequence. What FILE has is not measured again, so that the
command goes on where it was interrupted.

`--profile=FOLDER` writes a trace of each mesh's steps, which TensorBoard and Perfetto show, and
prints where the time of a device goes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import command_line, configured, kernels, lines
from benchmarks.harness.calls import COMPILERS, MIB, attempt_each, exit_if, medians
from benchmarks.harness.output import Table
from benchmarks.harness.processes import tell
from reformax import devices
from reformax.training import compiled_steps, evaluation
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.settings import TrainSettings, build

REFORMER = "--config_file=reformer_enwik8.gin --config=lm.ReformerLM.pos_axial_shape="
TRANSFORMER = "--config_file=transformer_enwik8.gin"
# The flags of what the page measures, and their environment. Positions suffice for 8 devices. The
# long sequence takes the options of least memory. XLA's scheduler of hidden latencies would ask for
# more than there is, and its search for the fastest products would try each of them on gigabytes.
PARTS = {
    f"{REFORMER}(4096,128) --mesh=data --mesh=fsdp --mesh=context": {},
    f"{TRANSFORMER} --mesh=data --mesh=fsdp": {},
    f"{TRANSFORMER} --config=batch_size=1 --config=length=65_536 --mesh=data --mesh=fsdp "
    "--mesh=context --shared --steps=1 --repeats=3": {},
    f"{REFORMER}(8192,1024) --config=lm.ReformerLM.keep_ff_outputs=False --config=scan_layers=True "
    "--config=lm.ReformerLM.ff_chunk_size=32_768 --config=length=1_048_576 --mesh=context "
    "--steps=1 --repeats=1": {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false "
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    },
}


class Candidate(NamedTuple):
    """A mesh, ready to train on."""

    run: Callable[[], float]  # three times n steps: seconds of a step
    tokens: int  # of a step
    state_mib: float
    temp_mib: float


def meshes(axes: Sequence[str]) -> dict[str, Mesh]:
    """Each device alone, and all along each axis, by names of rows."""
    alone = {f"device {i}": mesh_lib.make({}, [x]) for i, x in enumerate(jax.devices())}
    return alone | {f"{axis} {jax.device_count()}": mesh_lib.make({axis: -1}) for axis in axes}


def prepare(
    settings: TrainSettings, mesh: Mesh, n_steps: int, shared: bool
) -> Callable[[], Candidate]:
    """A state on the devices of a mesh; those of `context` may share one device's sequence.

    What is returned compiles the step, and runs nothing.
    """
    batch_size = settings.batch_size * devices.n_row_shards(mesh)
    length = settings.length * (1 if shared else mesh.shape["context"])
    sized = dataclasses.replace(settings, batch_size=batch_size, length=length, stages=())
    model = build(sized.model, "train")
    key = jax.device_put(jax.random.PRNGKey(0), NamedSharding(mesh, PartitionSpec()))
    init = step_lib.init_fn(model, sized.built_optimizer, (batch_size, length), sized.ema_decay > 0)
    placement = devices.placement(jax.eval_shape(init, key), mesh)
    state = step_lib.jit_once(init, out_shardings=placement)(key)
    batch = tuple(sized.task.train_batch(0, 0, batch_size, length))
    batch = jax.device_put(batch, devices.over_tokens(mesh))
    jax.block_until_ready((state, batch, key))

    def compiled() -> Candidate:
        step = compiled_steps.step_of(sized, model, mesh, state).lower(state, batch, key).compile()

        def seconds(count: int) -> float:
            nonlocal state
            start = time.perf_counter()
            for _ in range(count):
                state, metrics = step(state, batch, key)
            loss = float(metrics["nats"].mean)
            assert math.isfinite(loss), f"the loss is {loss}"
            return time.perf_counter() - start

        def run() -> float:
            # Steps begin while others run, as in training: to start the first and to wait for the
            # last takes as long for any number of steps.
            return (seconds(2 * n_steps) - seconds(n_steps)) / n_steps

        temp = step.memory_analysis().temp_size_in_bytes / MIB
        stored = mesh_lib.bytes_stored(state, mesh) / MIB
        return Candidate(run, batch_size * length, stored, temp)

    return compiled


def at_once(alone: Sequence[Candidate]) -> Candidate:
    """The steps of single devices, side by side."""

    def run() -> float:
        with ThreadPoolExecutor(len(alone)) as threads:
            return max(threads.map(lambda one: one.run(), alone))

    tokens = sum(one.tokens for one in alone)
    return Candidate(run, tokens, *(max(x) for x in zip(*(one[2:] for one in alone), strict=True)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5)
    parser.add_argument("--config_file", action="append", help="a gin file; may be repeated")
    parser.add_argument("--config", action="append", default=[], help="an override")
    parser.add_argument(
        "--mesh", action="append", choices=devices.AXES, help="an axis that takes all devices"
    )
    parser.add_argument(
        "--shared", action="store_true", help="over context, devices share one device's sequence"
    )
    parser.add_argument("--page", action="store_true", help="all that docs/scaling.md measures")
    parser.add_argument("--steps", type=command_line.positive, default=5, help="of a timed call")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="results, to add to")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="where to write traces")
    args = parser.parse_args(argv)
    if args.page:
        run_page(args)
    elif args.tiny or args.config_file:
        measure(args)
    else:
        parser.error("nothing to do: give --config_file, --page or --tiny")


def run_page(args: Any) -> None:
    """Runs the parts of the page, each in a process of its own; exits if one failed."""
    failed = []
    for number, (flags, environment) in enumerate(PARTS.items()):
        own = shlex.split(flags) + ["--tiny"] * args.tiny
        own += [f"--saved={args.saved}"] * (args.saved is not None)
        own += [f"--profile={args.profile}/{number}"] * (args.profile is not None)
        own += [f"--rows={args.rows}"] * (args.rows is not None)
        command = [sys.executable, "-m", "benchmarks.scaling", *own]
        print("$", *(f"{name}={value}" for name, value in environment.items()), shlex.join(command))
        sys.stdout.flush()
        failed += [flags] * (subprocess.run(command, env=os.environ | environment).returncode != 0)
    exit_if(failed)


def measure(args: Any) -> None:
    """Prints the table, and saves it; exits if a mesh failed."""
    given = args.config_file, args.config
    settings = configured.tiny() if args.tiny else configured.from_config(*given)
    evaluation.check_model(build(settings.model, "train"), settings.task)
    n_steps = 1 if args.tiny else args.steps
    axes = args.mesh or ("data", "fsdp")
    named = "tiny" if args.tiny else Path(args.config_file[-1]).stem
    name = f"{named} {settings.batch_size} x {settings.length:,}" + ", shared" * args.shared
    shared = dict(machine=command_line.machine(), name=name, devices=jax.device_count())
    known = {x["mesh"] for x in lines.read(args.saved) if shared.items() <= x.items()}
    if known >= set(axes):
        print(f"{args.saved} has {name} over {', '.join(axes)}")
        return
    prepared = attempt_each(
        lambda mesh: prepare(settings, mesh, n_steps, args.shared), meshes(axes)
    )
    tell("states are on the devices")
    # Nothing runs meanwhile: loading cuDNN's attention disturbs what other threads run.
    found = attempt_each(lambda compiled: compiled(), prepared, COMPILERS)
    ready = {row: x for row, x in found.items() if isinstance(x, Candidate)}
    single = [x for row, x in ready.items() if row.startswith("device")]
    if len(single) == jax.device_count() > 1:
        ready["alone, at once"] = found["alone, at once"] = at_once(single)
    tell("steps are compiled")
    seconds = medians({row: x.run for row, x in ready.items()}, args.repeats)
    tell("steps are timed")
    speeds = {row: x.tokens / seconds[row] for row, x in ready.items()}
    alone = [speed for row, speed in speeds.items() if row.startswith("device")]
    slowest = min(alone, default=math.nan)

    def cells(row: str, x: Candidate) -> list[str]:
        sizes = f"{x.state_mib:,.1f}", f"{x.temp_mib:,.1f}"
        return [f"{speeds[row]:,.0f}", f"{speeds[row] / slowest:.2f}", *sizes]

    shape = f"{settings.batch_size} x {settings.length:,} tokens a device"
    table = Table(
        *("mesh", "tokens/s", "times one device", "state, MiB", "temporary, MiB"),
        title=f"{command_line.machine()}, {jax.device_count()} devices, {shape}",
    )
    for row, candidate in found.items():
        table.result(row, known=candidate, cells=functools.partial(cells, row))
    if args.saved and alone:
        measured = {axis: f"{axis} {jax.device_count()}" for axis in axes}
        for axis, row in measured.items():
            if row in ready:
                figures = dict(
                    mesh=axis,
                    tokens_per_second=round(speeds[row]),
                    times=round(speeds[row] / slowest, 3),
                    alone=[round(x) for x in alone],
                    state_mib=round(ready[row].state_mib),
                    temp_mib=round(ready[row].temp_mib),
                )
                lines.add(args.saved, shared | figures)
    if args.profile:
        print_profile({row: x.run for row, x in ready.items()}, n_steps, args.profile)
    exit_if(row for row in found if row not in ready)


def print_profile(runs: dict[str, Callable[[], Any]], n_steps: int, folder: Path) -> None:
    """Where the time of devices goes, by traces, which are written."""
    table = Table("mesh", "device", "ms a step", "computes", "waits for others", "nothing")
    for row, run in runs.items():
        with jax.profiler.trace(folder / row):
            run()
        for device, spent in kernels.spent(folder / row).items():
            table.row(row, device, *(f"{ms / (3 * n_steps):.1f}" for ms in spent))


if __name__ == "__main__":
    main()

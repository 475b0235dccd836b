"""Training on one device and on all: tokens a second, and memory of a device.

    python -m benchmarks.scaling --config_file=configs/reformer_enwik8.gin
    python -m benchmarks.scaling --config_file=... --config='length = 16_384' --mesh=context

Prints a table with a row for one device and one for each mesh: tokens a second, how many times
those of one device they are, and the MiB of state and of temporary memory of a device. The tokens
of a device are those of the config's step. Over `data` and `fsdp` a step has more rows; over
`context` it has longer ones, or with `--shared` the same, as dense attention needs, whose tokens
cost more in longer rows. The meshes' steps take turns, so that other load slows all alike. The text
is that of Python's standard library, whatever the config's.

    python -m benchmarks.scaling --page --saved=FILE

runs what docs/scaling.md measures, most important first, each in a process of its own: paper's
model, one long sequence, and the Transformer. What FILE has is not measured again, so that the
command goes on where it was interrupted.

    python -m benchmarks.scaling --saved=docs/scaling.jsonl --plot=docs/scaling.png

draws results that earlier runs saved. With a config a run first adds its own. `--profile=FOLDER`
writes a trace of each mesh's steps, which TensorBoard and Perfetto show.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.harness import command_line
from benchmarks.harness.calls import COMPILERS, MIB, attempt_each, exit_if, in_turn
from benchmarks.harness.language_models import TINY
from benchmarks.harness.output import Table, plot
from reformax import devices
from reformax.data import stdlib
from reformax.models import ReformerLM
from reformax.training import mesh as mesh_lib
from reformax.training import opening, optimizer
from reformax.training import step as step_lib
from reformax.training.settings import Settings, build

REFORMER = "--config_file=configs/reformer_enwik8.gin --config=lm.ReformerLM.pos_axial_shape="
TRANSFORMER = "--config_file=configs/transformer_enwik8.gin"
# The flags of what the page measures, and their environment. Positions suffice for 8 devices. XLA's
# scheduler of hidden latencies would ask for more memory than the long sequence leaves.
PAGE = {
    f"{REFORMER}(4096,128) --mesh=data --mesh=fsdp --mesh=context": {},
    f"{REFORMER}(8192,1024) --config=lm.ReformerLM.keep_ff_outputs=False "
    "--config=length=1_048_576 --mesh=context --steps=1 --repeats=1": {
        "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    },
    f"{TRANSFORMER} --mesh=data --mesh=fsdp": {},
    f"{TRANSFORMER} --config=batch_size=1 --config=length=65_536 --mesh=data --mesh=fsdp "
    "--mesh=context --shared --steps=2 --repeats=3": {},
}


class Candidate(NamedTuple):
    """A mesh, ready to train on."""

    run: Callable[[], Any]  # some steps
    tokens: int  # of these
    state_mib: float
    temp_mib: float


def tiny() -> Settings:
    """Settings that take no time."""
    return Settings(
        model=lambda mode: ReformerLM(
            **TINY.arguments(), attention_type=TINY.attention(), mode=mode
        ),
        task=stdlib.stdlib(max_bytes=100_000),
        optimizer=optimizer.adafactor(1e-3),
        steps=1,
        batch_size=1,
        length=64,
    )


def from_config(files: Sequence[str], overrides: Sequence[str]) -> Settings:
    """The settings of a config, with a text that every machine has."""
    from reformax.cli import config, configs
    from reformax.training import loop

    config.parse(files, overrides, folders=configs.FOLDERS)
    names = {field.name for field in dataclasses.fields(Settings)} - {"task"}
    return Settings(**config.bindings(loop.train, names), task=stdlib.stdlib())


def prepare(
    settings: Settings, axis: str | None, n_steps: int, shared: bool
) -> Callable[[], Candidate]:
    """A state on one device, or on all along an axis; `context` may share its sequence.

    What is returned compiles the step, and runs nothing.
    """
    some = jax.devices()[:1] if axis is None else jax.devices()
    mesh = mesh_lib.make({} if axis is None else {axis: -1}, some)
    batch_size = settings.batch_size * devices.row_shares(mesh)
    length = settings.length * (1 if shared else mesh.shape["context"])
    sized = dataclasses.replace(settings, batch_size=batch_size, length=length, stages=())
    model, key = build(sized.model, "train"), jax.random.PRNGKey(0)
    init = step_lib.init_fn(model, sized.optimizer, (batch_size, length), sized.ema_decay > 0)
    placement = devices.placement(jax.eval_shape(init, key), mesh)
    state = jax.jit(init, out_shardings=placement)(key)
    batch = tuple(sized.task.train_batch(0, 0, batch_size, length))
    batch = jax.device_put(batch, devices.over_tokens(mesh))
    jax.block_until_ready((state, batch, key))

    def compiled() -> Candidate:
        step = opening.step_of(sized, model, mesh, state).lower(state, batch, key).compile()

        def run():
            nonlocal state
            for _ in range(n_steps):
                state, metrics = step(state, batch, key)
            loss = float(metrics["nats"])
            assert math.isfinite(loss), f"the loss is {loss}"

        temp = step.memory_analysis().temp_size_in_bytes
        tokens = n_steps * batch_size * length
        return Candidate(run, tokens, mesh_lib.bytes_stored(state, mesh) / MIB, temp / MIB)

    return compiled


def save(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Adds results to a file, one a line."""
    with path.open("a") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """How many times one device's speed several have, by their number; the last result counts."""
    most = max(result["devices"] for result in results)
    lines: dict[str, dict[int, float]] = {"linear": {1: 1.0, most: float(most)}}
    for result in results:
        line = lines.setdefault(f"{result['name']}, {result['mesh']}", {1: 1.0})
        line[result["devices"]] = result["times"]
    machines = ", ".join(dict.fromkeys(result["machine"] for result in results))
    styles = {"linear": dict(color="grey", linestyle="--")}
    label = "tokens a second, times one device"
    plot(path, {label: lines}, machines, "linear", styles, xlabel="devices")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=5, plot=True)
    parser.add_argument("--config_file", action="append", help="a gin file; may be repeated")
    parser.add_argument("--config", action="append", default=[], help="an override")
    parser.add_argument(
        "--mesh", action="append", choices=devices.AXES, help="an axis that takes all devices"
    )
    parser.add_argument(
        "--shared", action="store_true", help="over context, devices share one device's sequence"
    )
    parser.add_argument("--page", action="store_true", help="all that docs/scaling.md measures")
    parser.add_argument("--steps", type=command_line.positive, default=10, help="of a timed call")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="results, to add to and to draw")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="where to write traces")
    args = parser.parse_args(argv)
    if args.plot and not args.saved:
        parser.error("--plot draws what --saved names: give both")
    if args.page:
        run_page(args)
    elif args.tiny or args.config_file:
        measure(args)
    elif not args.plot:
        parser.error("nothing to do: give --config_file, or --tiny, or --saved and --plot")
    if args.plot:
        draw(args.plot, [json.loads(line) for line in args.saved.read_text().splitlines()])


def run_page(args: Any) -> None:
    """Runs the parts of `PAGE`; exits if one failed."""
    failed = []
    for number, (flags, environment) in enumerate(PAGE.items()):
        own = shlex.split(flags) + ["--tiny"] * args.tiny
        own += [f"--saved={args.saved}"] * (args.saved is not None)
        own += [f"--profile={args.profile}/{number}"] * (args.profile is not None)
        command = [sys.executable, "-m", "benchmarks.scaling", *own]
        print("$", *(f"{name}={value}" for name, value in environment.items()), shlex.join(command))
        sys.stdout.flush()
        if subprocess.run(command, env=os.environ | environment).returncode:
            failed.append(flags)
    exit_if(failed)


def measure(args: Any) -> None:
    """Prints the table, and saves it; exits if a mesh failed."""
    settings = tiny() if args.tiny else from_config(args.config_file, args.config)
    n_steps = 1 if args.tiny else args.steps
    axes = [None, *(args.mesh or ("data", "fsdp"))]
    named = "tiny" if args.tiny else Path(args.config_file[-1]).stem
    name = f"{named} {settings.batch_size} x {settings.length:,}" + ", shared" * args.shared
    shared = dict(machine=command_line.machine(), name=name, devices=len(jax.devices()))
    if args.saved and args.saved.exists():
        lines = [json.loads(line) for line in args.saved.read_text().splitlines()]
        known = {line["mesh"] for line in lines if shared.items() <= line.items()}
        if known >= set(axes[1:]):
            print(f"{args.saved} has {name} over {', '.join(axes[1:])}")
            return
    prepared = attempt_each(
        lambda axis: prepare(settings, axis, n_steps, args.shared), {axis: axis for axis in axes}
    )
    # Nothing runs meanwhile: loading cuDNN's attention disturbs what other threads run.
    found = attempt_each(lambda compiled: compiled(), prepared, COMPILERS)
    ready = {axis: x for axis, x in found.items() if isinstance(x, Candidate)}
    seconds = in_turn({axis: x.run for axis, x in ready.items()}, args.repeats)
    speeds = {axis: ready[axis].tokens / seconds[axis] for axis in ready}
    shape = f"{settings.batch_size} x {settings.length:,} tokens a device"
    table = Table(
        *("mesh", "tokens/s", "times one device", "state, MiB", "temporary, MiB"),
        title=f"{command_line.machine()}, {len(jax.devices())} devices, {shape}",
    )
    if args.profile:
        for axis, x in ready.items():
            with jax.profiler.trace(args.profile / (axis or "one")):
                x.run()
    for axis, candidate in found.items():

        def cells(x: Candidate, axis=axis) -> list[str]:
            times = speeds[axis] / speeds[None] if None in speeds else math.nan
            sizes = f"{x.state_mib:,.1f}", f"{x.temp_mib:,.1f}"
            return [f"{speeds[axis]:,.0f}", f"{times:.2f}", *sizes]

        name = "one device" if axis is None else f"{axis} {len(jax.devices())}"
        table.result(name, known=candidate, cells=cells)
    if args.saved and None in ready:
        save(
            args.saved,
            [
                shared
                | dict(
                    mesh=axis,
                    tokens_per_second=round(speeds[axis]),
                    times=round(speeds[axis] / speeds[None], 3),
                    state_mib=round(x.state_mib),
                    temp_mib=round(x.temp_mib),
                )
                for axis, x in ready.items()
                if axis is not None
            ],
        )
    exit_if(str(axis) for axis in axes if axis not in ready)


if __name__ == "__main__":
    main()

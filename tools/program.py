"""The kernels of a program as it is compiled for a GPU, and the bytes that they read and write.

    python -m tools.program --config_file=gpt2.gin
    python -m tools.program --config_file=gpt2.gin --devices=2 --mesh=data
    python -m tools.program --attention moba --length=65536 --gradient
    python -m tools.program --attention moba --length=65536 --gradient --run

compiles a training step of a config, or attention to one sequence, for an H200 or another --gpu,
and runs nothing. With --devices
the step is divided over so many, along --mesh, and what one of them runs is counted. Each has the
tokens of the config's step: over `data` and `fsdp` a step has more rows, over `context` longer
ones. --gradient is of every input, and --causal hides what comes later, as some attentions do in
any case. Needs no GPU, but JAX's compiler for one: `pip install 'jax[cuda13]'`. Prints kinds of
kernels by their bytes and, with --largest, the largest kernels with the operation that each comes
from. Bytes are bounds from above: of arrays that are not sliced by a fusion, all. Products come as
the compiler's first choice, for a GPU would choose them by trying. The text is that of Python's
standard library, whatever the config's.

With --run an attention is compiled for the GPU that there is, and its kernels' times are printed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.harness import attention_table, command_line, configured, kernels
from benchmarks.harness.calls import MIB
from benchmarks.harness.output import Table
from reformax import devices
from reformax.task import Batch, DocumentPairs, SentencePairs
from reformax.training import compiled_steps
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.settings import TrainSettings, build
from tools import described, traffic
from tools.traffic import Kernel, gigabytes

TRACED = 3  # calls


def training_step(settings: TrainSettings, mesh: Mesh) -> tuple[str, Any]:
    """A step of training, each device with the settings' tokens: in words, and lowered."""
    batch_size = settings.batch_size * devices.n_row_shards(mesh)
    size = batch_size, settings.length * mesh.shape["context"]
    whole = devices.replicated(mesh)
    model = build(settings.model, "train")
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    init = step_lib.init_fn(model, settings.built_optimizer, size, settings.ema_decay > 0)
    state = jax.eval_shape(init, key)
    state = jax.tree.map(_placed, state, devices.placement(state, mesh))
    batch = _placed(tuple(batch_of(model.task_kind, *size)), devices.over_tokens(mesh))
    step = compiled_steps.step_of(settings, model, mesh, state).lower(
        state, batch, _placed(key, whole)
    )
    on = f" on {mesh.size} devices" if mesh.size > 1 else ""
    return f"a step of {size[0]} x {size[1]:,} tokens{on}", step


def batch_of(kind: str, batch_size: int, length: int) -> Batch:
    """The shapes of a batch of a kind of tasks."""
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    inputs = {
        "translation": SentencePairs(tokens, tokens, tokens, tokens),
        "pairs": DocumentPairs(tokens, tokens),
    }.get(kind, tokens)
    labels = kind in ("labels", "pairs")
    targets = jax.ShapeDtypeStruct((batch_size, 1 if labels else length), jnp.int32)
    return Batch(inputs, targets, jax.ShapeDtypeStruct(targets.shape, jnp.float32))


class Call(NamedTuple):
    """A call of an attention without padding."""

    title: str
    function: Any  # jitted
    inputs: Callable[[], dict[str, Any]]

    def lowered(self, device: Any) -> Any:
        whole = devices.replicated(mesh_lib.make({}, [device]))
        return self.function.lower(**_placed(jax.eval_shape(self.inputs), whole))


def attention(case: attention_table.Case, gradient: bool, causal: bool) -> Call:
    """One pass, or both."""
    op = attention_table.attentions()[case.attention]
    run = attention_table.both if gradient else attention_table.forward

    def inputs() -> dict[str, Any]:
        given = attention_table.inputs_of(op, case)
        return {name: x for name, x in given.items() if gradient or name != "d_out"}

    name = case.attention + ", causal" * causal + ", gradient" * gradient
    of = f"{case.batch} x {case.length:,} tokens, {case.n_heads} heads of {case.d_head}"
    function = jax.jit(functools.partial(run, op, case.dropout, causal))
    return Call(f"{name}, {of}, {case.dtype}", function, inputs)


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def print_kernels(title: str, compiled: Any, largest: int) -> None:
    """The tables of a compiled program."""
    found = traffic.kernels(compiled.as_text())
    temp = compiled.memory_analysis().temp_size_in_bytes / MIB
    n = sum(each.times for each in found)
    print(f"\n{title}: {n:,} kernels, {gigabytes(found):,.2f} GB, {temp:,.0f} MiB temporary")
    kinds: dict[str, list[Kernel]] = defaultdict(list)
    for each in found:
        kinds[each.kind].append(each)
    table = Table("kernels", "times", "GB read and written")
    for kind, own in sorted(kinds.items(), key=lambda item: -gigabytes(item[1])):
        table.row(kind, f"{sum(each.times for each in own):,}", f"{gigabytes(own):,.3f}")
    if largest:
        table = Table("kernel", "of", "times", "MB read", "written", title="The largest")
        for each in sorted(found, key=lambda each: -each.bytes)[:largest]:
            sizes = f"{each.read / 1e6:,.1f}", f"{each.written / 1e6:,.1f}"
            table.row(each.kind, each.source[-60:], f"{each.times:,}", *sizes)


def print_times(call: Call) -> None:
    """The table of a call's kernels, means of `TRACED` calls."""
    given = call.inputs()

    def run(n: int) -> None:
        jax.block_until_ready([call.function(**given) for _ in range(n)])

    run(1)
    found = kernels.of(lambda: run(TRACED))
    total = sum(ms for ms, _ in found.values()) / TRACED
    title = f"{call.title}: {total:.3f} ms"
    table = Table("kernel", "ms", "calls", title=title)
    for name, (ms, calls) in found.items():
        table.row(name, f"{ms / TRACED:.3f}", f"{calls / TRACED:.0f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--config_file", action="append", help="a gin file; may be repeated")
    parser.add_argument("--config", action="append", default=[], help="an override")
    names = attention_table.attentions()
    parser.add_argument("--devices", type=command_line.positive, help="of the mesh (default: one)")
    axis = "the axis that they take (default: data)"
    parser.add_argument("--mesh", choices=devices.AXES, help=axis)
    parser.add_argument("--attention", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--length", type=command_line.positive, default=65536)
    parser.add_argument("--heads", type=command_line.positive, default=8)
    parser.add_argument("--head_size", type=command_line.positive, default=64)
    parser.add_argument("--gradient", action="store_true", help="of the attention, both passes")
    parser.add_argument("--gpu", choices=described.GPUS, default="h200", help="compiled for")
    parser.add_argument("--causal", action="store_true", help="also where it need not be")
    parser.add_argument("--run", action="store_true", help="an attention, on the GPU there is")
    parser.add_argument("--largest", type=int, default=0, help="print so many kernels")
    args = parser.parse_args(argv)
    if not (args.tiny or args.config_file or args.attention):
        parser.error("nothing to compile: give --config_file or --attention")
    if args.run and not args.attention:
        parser.error("--run runs an attention: give --attention")
    if args.attention and (args.devices or args.mesh):
        parser.error("--devices and --mesh divide a training step: give --config_file")
    length, dtype = (128, "float32") if args.tiny else (args.length, "bfloat16")
    gpu = described.GPUS[args.gpu]
    sizes = 1, args.heads, args.head_size, dtype, gpu.name
    if args.attention:
        case = attention_table.Case(args.attention, length, 0.0, False, *sizes)
    if args.run:
        print_times(attention(case, args.gradient, args.causal))
        return
    # Tiny programs are compiled for the machine that there is.
    try:
        n = args.devices or 1
        found = jax.devices()[:n] if args.tiny else described.devices(gpu, n)
    except NotImplementedError as error:
        parser.error(str(error))
    if len(found) < n:
        parser.error(f"--devices is {n}, and with --tiny there are {len(found)}")
    options = {} if args.tiny else described.OPTIONS
    with nullcontext() if args.tiny else described.assumed(gpu):
        if args.attention:
            call = attention(case, args.gradient, args.causal)
            title, lowered = call.title, call.lowered(found[0])
        else:
            tiny = args.tiny and not args.config_file
            given = args.config_file, args.config
            settings = configured.tiny() if tiny else configured.from_config(*given)
            mesh = mesh_lib.make({args.mesh or "data": -1}, found)
            title, lowered = training_step(settings, mesh)
        compiled = lowered.compile(compiler_options=options)
    print_kernels(title, compiled, args.largest)


if __name__ == "__main__":
    main()

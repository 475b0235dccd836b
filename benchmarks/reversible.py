"""The drift of a reversible stack's backward pass, and its cost, by depth.

    python -m benchmarks.reversible
    python -m benchmarks.reversible --data_dir=FILE_OR_FOLDER --minutes=10 --saved=FILE

The first command prints two tables. One has the error of the inputs that the backward pass
rebuilds, and of the gradient relative to that of the same forward pass with every activation kept.
Two programs may round their products differently, as a GPU's do, and then gradients differ even
without drift. The other has temporary memory and compile time of the gradient of a ReformerLM and
of a TransformerLM with the same layers. Nothing is run for it.

The second command trains deep models for equal minutes. It prints each one's most memory, speed and
bits of the whole valid split: reversible ones, Transformers that compute activations again in the
backward pass, and those that keep some in the host's memory, which needs a GPU. They are
transformer_text_64k_37m.gin and reformer_text_64k_37m.gin with 48 layers of GPT-2 small's width and
windows of 65,536 from the first step. A row first runs for a few steps, whose speed says how many
fit into the minutes, so that its learning rate falls to the end. --at_once, --gpus, --limit,
--saved and --runs are as in `benchmarks.global_layers`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import campaign, command_line
from benchmarks.harness.calls import compiled, exit_if
from benchmarks.harness.language_models import VOCAB_SIZE
from benchmarks.harness.output import Table
from benchmarks.harness.processes import Answer
from benchmarks.harness.rows import KEY
from reformax.layers import Attention, FeedForward, ReversibleStack, TransformerBlock
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import local, lsh
from reformax.shell import user_path

DROPOUT = 0.1
N_SLOTS = 7  # LSH attention is every second layer: with six, those of twelve layers would share
ERRORS = "largest error of a rebuilt input", "relative error of the gradient"


class Shape(NamedTuple):
    """The sizes of a run."""

    batch: int
    length: int
    d_model: int
    depths: tuple[int, ...] = (2, 4, 8, 12, 24)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    cost_length: int = 4096
    cost_d_model: int = 128


SHAPES = {
    "tiny": Shape(1, 32, 16, (2,), ("float32",), 128, 16),
    "cpu": Shape(1, 128, 64),
    "gpu": Shape(2, 1024, 512),
}


def attention_ops(chunk_len: int) -> tuple:
    return local.local(chunk_len=chunk_len), lsh.lsh(chunk_len=chunk_len, n_hashes=2)


def blocks(shape: Shape) -> list[TransformerBlock]:
    """A cycle of local and LSH attention."""
    d_head = min(64, shape.d_model)
    options = dict(n_heads=max(1, shape.d_model // 64), d_qk=d_head, d_v=d_head, causal=True)
    options |= dict(attention_dropout=DROPOUT, output_dropout=DROPOUT, use_rotary=True)
    feed_forward = FeedForward(4 * shape.d_model, DROPOUT, DROPOUT)
    ops = attention_ops(min(64, shape.length // 8))
    return [TransformerBlock(Attention(op, **options), feed_forward) for op in ops]


def drift(shape: Shape, n_layers: int, dtype: str, exact: bool) -> tuple[float, float]:
    """The errors of one backward pass, on inputs of unit variance.

    They are the largest difference of a rebuilt input, and the norm of the difference of gradients
    over the norm of the gradient, of all parameters together.
    """
    stack = ReversibleStack(blocks(shape), n_layers, dtype=dtype, exact=exact)
    size = shape.batch, shape.length, shape.d_model
    params = jax.jit(lambda: stack.init_params(KEY, size, size))()
    # As large as training makes them: fresh ones are scaled down by the depth.
    for block in params.values():
        block["attention"]["w_o"] *= math.sqrt(2 * n_layers)
        block["feed_forward"]["w2"] *= math.sqrt(2 * n_layers)
    x1, x2 = jax.random.normal(jax.random.fold_in(KEY, 1), (2, *size))
    direction = jax.random.normal(jax.random.fold_in(KEY, 2), (2, *size))

    def gradient(run: Callable):
        def loss(params):
            return sum(map(jnp.vdot, direction, run(params, x1, x2, rng=KEY)))

        return jax.jit(jax.grad(loss))(params)

    streams = jax.jit(functools.partial(stack.rebuild, rng=KEY))(params, x1, x2)
    rebuilt = max(float(jnp.abs(x - y).max()) for x, y in zip(*streams, strict=True))
    plainly = dataclasses.replace(stack, remat_policy="all")
    got, want = gradient(stack.apply), gradient(plainly.apply)
    difference = jax.tree.map(jnp.subtract, got, want)
    return rebuilt, float(optax.tree.norm(difference) / optax.tree.norm(want))


def cost(model, length: int) -> str:
    """Temporary memory and compile time of a gradient."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(lambda: model.init_params(KEY, tokens.shape))

    def loss(params, tokens):
        log_probabilities = jax.nn.log_softmax(model.apply(params, tokens, KEY))
        return -jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1).mean()

    program = compiled(jax.jit(jax.grad(loss)).lower(params, tokens))
    return f"{program.temp_mib:.1f} MiB ({program.seconds:.1f} s)"


def print_drifts(shape: Shape) -> None:
    """Prints the errors by stack and depth."""
    table = Table("stack", "layers", *ERRORS)
    for dtype in shape.dtypes:
        for exact in (False, True):
            stack = f"{dtype}, {'exact' if exact else 'plain'}"
            for n_layers in shape.depths:
                errors = drift(shape, n_layers, dtype, exact)
                table.row(stack, str(n_layers), *(f"{error:.2g}" for error in errors))


def print_costs(shape: Shape) -> None:
    length, d_model = shape.cost_length, shape.cost_d_model
    columns = "ReformerLM", "ReformerLM, exact", f"ReformerLM, {N_SLOTS} slots", "TransformerLM"
    table = Table("layers", *columns, title="Temporary memory of the gradient (compile time)")
    for n_layers in shape.depths:
        options = dict(vocab_size=VOCAB_SIZE, d_model=d_model, d_ff=4 * d_model, n_heads=2)
        options |= dict(n_layers=n_layers, attention_type=attention_ops(length // 64))
        of_reformers = {}, dict(exact=True), dict(n_slots=N_SLOTS)
        built = [ReformerLM(**options, **own) for own in of_reformers] + [TransformerLM(**options)]
        table.row(str(n_layers), *(cost(model, length) for model in built))


KEPT = "lm.{model}.remat_policy='attention'"
OFFLOADED = "lm.{model}.offload_activations=True"
AGAIN = "lm.{model}.remat_policy='nothing'"
# The settings of models that are trained, by group.
TRAINED = {
    "reversible": {"reversible, all again": [], "reversible, attention kept": [KEPT]},
    "rematerialized": {
        "Transformer, all again": [AGAIN],
        "Transformer, attention kept": [KEPT],
    },
    "offloaded": {
        "Transformer, all again, offloaded": [AGAIN, OFFLOADED],
        "Transformer, attention kept, offloaded": [KEPT, OFFLOADED],
    },
}
ROWS = {name: settings for rows in TRAINED.values() for name, settings in rows.items()}
N_TRIED = 12  # steps that tell a row's speed
TINY = [
    *("d_model=16", "d_ff=16", "n_heads=2", "d_head=8", "loop.train.eval_tokens=256"),
    *("loop.train.task=@stdlib.stdlib()", "stdlib.stdlib.max_bytes=100_000"),
]


def config_of(name: str, args: argparse.Namespace, steps: int) -> campaign.Part:
    """The config file of a row that is trained, and its further settings."""
    kind, model = ("transformer", "Transformer") if "Transf" in name else ("reformer", "Reformer")
    given = [f"length={args.length}", "batch_size=1", f"n_layers={args.layers}", "d_model=768"]
    given += ["d_ff=2048", "n_heads=12", "d_head=64", "scan_layers=True", "learning_rate=1e-3"]
    given += [f"steps={steps}", f"warmup_steps={steps // 10}", "loop.train.stages=()"]
    given += [f"loop.train.eval_{x}={args.length}" for x in ("length", "stride")]
    given += ["loop.train.eval_batch_size=1", f"loop.train.eval_every={steps}"]
    given += ["loop.train.log_every=1", "loop.train.checkpoint_minutes=None"]
    own = [setting.format(model=f"{model}LM") for setting in ROWS[name]]
    few = ["loop.train.eval_tokens=1", "loop.train.eval_whole=False"] if steps == N_TRIED else []
    return f"{kind}_text_64k_37m.gin", [*given, *own, *(TINY if args.tiny else []), *few]


def print_trained(args: argparse.Namespace) -> None:
    """Trains the rows for a few steps, then for the minutes, and prints what they learnt."""
    names, failed = campaign.chosen(args, TRAINED), []
    run = {"layers": args.layers, "length": args.length, "tiny": args.tiny}
    tried = dict(
        campaign.trained(
            names, lambda name: [config_of(name, args, N_TRIED)], run | {"steps": N_TRIED}, args
        )
    )
    steps = {
        name: N_TRIED + round(args.minutes * 60 * found["tokens_per_second"] / args.length)
        for name, found in tried.items()
        if not isinstance(found, Exception)
    }
    parts = {name: [config_of(name, args, n)] for name, n in steps.items()}
    columns = "most memory, GiB", "tokens/s", "steps", "minutes", "bits per byte"
    table = Table(f"{args.layers} layers, {args.length:,} tokens", *columns)
    known = dict(campaign.trained(list(steps), parts.get, run | {"minutes": args.minutes}, args))
    for name, found in (tried | known).items():
        table.result(name, known=found, cells=_cells)
        failed += [name] * isinstance(found, Exception)
    exit_if(failed)


def _cells(trained: Answer) -> list[str]:
    memory, speed = trained["peak_bytes"], trained["tokens_per_second"]
    most = "-" if memory is None else f"{memory / 2**30:.1f}"
    steps, minutes = f"{trained['steps']:,}", f"{trained['seconds'] / 60:.1f}"
    return [most, f"{speed:,.0f}", steps, minutes, f"{trained['bits']:.3f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    text = "trains models on this text: a file or a folder"
    parser.add_argument("--data_dir", type=functools.partial(user_path, "data_dir"), help=text)
    parser.add_argument("--minutes", type=command_line.seconds, help="of each model's training")
    sizes = dict(layers=(48, "of these models"), length=(65_536, "tokens of their windows"))
    for name, (default, text) in sizes.items():
        text = f"{text} (default: {default:,})"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    campaign.flags(parser, TRAINED)
    args = parser.parse_args(argv)
    if args.minutes is not None:
        if not (args.data_dir or args.tiny):
            parser.error("--data_dir is missing: give the text to train on")
        print_trained(args)
        return
    command_line.check_read(parser, args, ("tiny", "rows"), "without --minutes")
    shape = command_line.of_size(SHAPES, args.tiny)
    print_drifts(shape)
    print_costs(shape)


if __name__ == "__main__":
    main()

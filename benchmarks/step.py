"""A training step of ReformerLM against one of Trax's ReformerLM of the same shape.

    python -m benchmarks.step

prints a table for each length. A step is forward, backward and Adam, compiled as one function of a
donated state, the same function around every model. The Reformers take turns step by step, so that
other load on the machine slows all of them alike; times are medians. The Transformer's long steps
would leave the next model cold caches, so it is timed alone at the end, at most three times.

Trax computes its LSH heads one at a time (n_parallel_heads=1) or all at once (None). On a GPU Trax
has LSH chunks of 256, and so fewer buckets. There reformax's first row is as in the configs, with
layers unrolled, feed-forward layers whole and their outputs kept, and the one of least memory has a
loop over layers and feed-forward layers in chunks. Another keeps all activations, as a Transformer
does, and has feed-forward layers whole. "Attention kept" is the row of least memory with
remat_policy="attention", and "offloaded" what is kept in the host's memory. FP8 is dtype="float8"
(layers/float8.py). A model that fails, or whose first loss is not that of a uniform guess, prints
the reason.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import command_line, language_models
from benchmarks.harness.calls import COMPILERS, attempt_each, compiled, exit_if
from benchmarks.harness.language_models import PAPER, QUICKSTART, TINY, VOCAB_SIZE
from benchmarks.harness.output import Table
from reformax import models
from reformax.layers import tl
from reformax.layers._trax import signature
from reformax.ops import dense

GUESS = math.log(VOCAB_SIZE)  # nats, the loss of a model that knows nothing
REFORMER, TRAX = "reformax ReformerLM", "Trax ReformerLM"


class Shape(NamedTuple):
    """A model, and the tokens of a step."""

    batch: int
    length: int
    sizes: language_models.Sizes
    trax_lsh_chunk_len: int = 64
    dropout: float = 0.0
    ff_chunk_size: int = 0  # of reformax
    unrolled: bool = False  # whether reformax's first row has no chunks and no loops
    remat: bool = False  # whether the Transformer's rows have less than all activations
    dtypes: tuple[str, ...] = ("float32",)  # of reformax; Trax's is float32


PAPERS = dict(
    sizes=PAPER,
    trax_lsh_chunk_len=256,
    dropout=0.1,
    ff_chunk_size=32768,
    unrolled=True,
    remat=True,
    dtypes=("bfloat16", "float32"),
)
SHAPES = {
    "tiny": [Shape(2, 32, TINY, trax_lsh_chunk_len=8)],
    "cpu": [
        Shape(4, 1024, QUICKSTART, ff_chunk_size=128),
        Shape(1, 4096, QUICKSTART, ff_chunk_size=512),
    ],
    "gpu": [Shape(16, 4096, **PAPERS), Shape(1, 65536, **PAPERS)],
}


class Model(NamedTuple):
    """Fresh weights and `(weights, tokens, rng) -> logits`."""

    weights: Any
    logits: Callable[..., jax.Array]


Builder = Callable[[], Model]


def arguments(shape: Shape) -> dict[str, Any]:
    """The arguments that the constructors of Trax and of reformax share."""
    own = dict(dropout=shape.dropout, mode="train")
    return own | shape.sizes.arguments() | shape.sizes.axial(shape.length)


def reformax_model(shape: Shape, constructor: Callable, attention_type, options: dict) -> Model:
    model = constructor(**arguments(shape), attention_type=attention_type, **options)
    init = jax.jit(lambda rng: model.init_params(rng, (shape.batch, shape.length)))
    return Model(init(jax.random.PRNGKey(0)), model.apply)


def trax_model(shape: Shape, n_parallel_heads: int | None) -> Model:
    from trax.models.reformer.reformer import ReformerLM

    ops = {
        "local": functools.partial(
            tl.SelfAttention, chunk_len=shape.sizes.local_chunk_len, n_chunks_before=1
        ),
        "lsh": functools.partial(
            tl.LSHSelfAttention,
            chunk_len=shape.trax_lsh_chunk_len,
            n_chunks_before=1,
            n_hashes=shape.sizes.n_hashes,
            n_parallel_heads=n_parallel_heads,
        ),
    }
    model = ReformerLM(**arguments(shape), attention_type=[ops[name] for name in shape.sizes.cycle])
    model.init(signature(jnp.zeros((shape.batch, shape.length), jnp.int32)))
    state = model.state
    return Model(
        model.weights, lambda weights, tokens, rng: model.pure_fn(tokens, weights, state, rng)[0]
    )


def candidates(shape: Shape) -> dict[str, Builder]:
    """The constructors of the models that take turns, by name."""
    first, *others = shape.dtypes
    in_chunks = dict(dtype=first, ff_chunk_size=shape.ff_chunk_size)
    kept = dict(dtype=first, scan_layers=not shape.unrolled, remat_policy="all")
    fast = dict(dtype=first, scan_layers=False, keep_ff_outputs=True)
    options = {REFORMER: fast if shape.unrolled else in_chunks}
    options[f"{REFORMER}, activations kept"] = kept
    if shape.unrolled:
        options[f"{REFORMER}, FP8"] = fast | dict(dtype="float8")
        options[f"{REFORMER}, FP8, activations kept"] = kept | dict(dtype="float8")
        options[f"{REFORMER}, least memory"] = in_chunks
    options[f"{REFORMER}, attention kept"] = in_chunks | dict(remat_policy="attention")
    options[f"{REFORMER}, exact"] = in_chunks | dict(exact=True)
    options |= {f"{REFORMER}, {dtype}": in_chunks | dict(dtype=dtype) for dtype in others}
    build = functools.partial(reformax_model, shape, models.ReformerLM, shape.sizes.attention())
    rows = {name: functools.partial(build, some) for name, some in options.items()}
    for n in (1, None):
        rows[f"{TRAX}, n_parallel_heads={n}"] = functools.partial(trax_model, shape, n)
    return rows


def baseline(shape: Shape) -> dict[str, Builder]:
    """The constructors of the Transformers, by name."""
    name = "reformax TransformerLM, dense"
    rows = {name: dict(remat_policy="all")}
    if shape.remat:
        rows = {f"{name}, remat": dict(remat_policy="nothing")}
        rows[f"{name}, attention kept"] = dict(remat_policy="attention")
        if jax.default_backend() != "cpu":
            offloaded = dict(offload_activations=True)
            rows |= {f"{x}, offloaded": options | offloaded for x, options in rows.items()}
    build = functools.partial(reformax_model, shape, models.TransformerLM, dense.dense())
    dtype = dict(dtype=shape.dtypes[0])
    return {x: functools.partial(build, options | dtype) for x, options in rows.items()}


class Runner:
    """A training step, its state and its times."""

    def __init__(self, model: Model, shape: Shape):
        """Traces the step."""
        optimizer = optax.adam(1e-4)

        def step(weights, opt_state, tokens, rng):
            def loss(weights):
                log_p = jax.nn.log_softmax(model.logits(weights, tokens, rng).astype(jnp.float32))
                return -jnp.take_along_axis(log_p, tokens[..., None], axis=-1).mean()

            nats, gradient = jax.value_and_grad(loss)(weights)
            updates, opt_state = optimizer.update(gradient, opt_state, weights)
            return optax.apply_updates(weights, updates), opt_state, nats

        self.state = model.weights, optimizer.init(model.weights)
        self.seconds, self.losses = [], []
        rng, size = jax.random.PRNGKey(1), (shape.batch, shape.length)
        self._tokens = jax.random.randint(rng, size, 0, VOCAB_SIZE, jnp.int32)
        traced = jax.jit(step, donate_argnums=(0, 1))
        self._lowered = traced.lower(*self.state, self._tokens, rng)

    def compile(self) -> Runner:
        self.program = compiled(self._lowered)
        return self

    def warm_up(self) -> Runner:
        """Two steps; `ArithmeticError` if the first one's loss is not that of a guess."""
        first = self.step().losses[0]
        if not abs(first - GUESS) < 1:
            raise ArithmeticError(f"first loss {first:.3f}, expected about {GUESS:.3f}")
        self.step().seconds.clear()
        return self

    def step(self) -> Runner:
        """Takes a step and notes its time and loss; `ArithmeticError` if that is not finite."""
        rng = jax.block_until_ready(jax.random.PRNGKey(len(self.losses)))
        start = time.perf_counter()
        *state, nats = jax.block_until_ready(self.program.call(*self.state, self._tokens, rng))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(nats))
        self.state = tuple(state)
        if not math.isfinite(nats):
            raise ArithmeticError(f"the loss of step {len(self.losses)} is {nats}")
        return self

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Results = dict[str, Runner | Exception]  # what failed is its exception


def measure(rows: dict[str, Builder], shape: Shape, repeats: int) -> Results:
    """The rows' runners: traced one by one, compiled together, warmed up, and run in turn."""
    results = attempt_each(lambda build: Runner(build(), shape), rows)
    results = attempt_each(Runner.compile, results, COMPILERS)
    results = attempt_each(Runner.warm_up, results)
    for _ in range(repeats):
        results = attempt_each(Runner.step, results)
    return results


def print_table(results: Results, shape: Shape) -> None:
    """Prints the results, with every model's speed relative to Trax's faster one."""
    columns = "ms a step", "tokens/s", "temp MiB", "compile s", "speed / Trax's"
    table = Table("model", *columns, title=str(shape))
    peers = [r for name, r in results.items() if TRAX in name and isinstance(r, Runner)]
    fastest = min((r.median for r in peers), default=math.nan)

    def cells(runner: Runner) -> list[str]:
        return [
            f"{runner.median * 1e3:.1f}",
            f"{shape.batch * shape.length / runner.median:,.0f}",
            f"{runner.program.temp_mib:,.1f}",
            f"{runner.program.seconds:.1f}",
            f"{fastest / runner.median:.2f}",
        ]

    for name, known in results.items():
        table.result(name, known=known, cells=cells)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=10)
    parser.add_argument("--lengths", type=int, nargs="+", help="only the tables of these lengths")
    text = "models whose names have one of these in them"
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help=text)
    args = parser.parse_args(argv)
    shapes = command_line.of_size(SHAPES, args.tiny)
    lengths = {s.length for s in shapes}
    if wrong := set(args.lengths or ()) - lengths:
        parser.error(f"--lengths has {wrong}: expected some of {lengths}")
    failed = []
    for shape in shapes:
        if args.lengths and shape.length not in args.lengths:
            continue
        results = {}
        for named, repeats in ((candidates, args.repeats), (baseline, min(args.repeats, 3))):
            rows = {n: b for n, b in named(shape).items() if any(x in n for x in args.only)}
            results |= measure(rows, shape, repeats)
        print_table(results, shape)
        failed += [n for n, r in results.items() if isinstance(r, Exception) and TRAX not in n]
    exit_if(failed)


if __name__ == "__main__":
    main()

"""A training step of ReformerLM against one of Trax's ReformerLM of the same shape.

    python -m benchmarks.step

prints a table for each length. A step is forward, backward and Adam, compiled as one function of a
donated state, the same function around every model. The Reformers take turns step by step, so that
other load on the machine slows all of them alike; times are medians. The Transformer's long steps
would leave the next model cold caches, so it is timed alone at the end, at most three times. Models
are compiled at the same time, which lengthens their compile times.

All have axial positions, the same dropout, and n_layers that cycle through local and LSH attention
with the same number of hashes. The TransformerLM has dense attention instead. Trax computes its LSH
heads one at a time by default: it is timed so (n_parallel_heads=1) and with all at once (None).
reformax takes its feed-forward layers in chunks. On a GPU its first row is as in the configs, with
layers unrolled, feed-forward layers whole and their outputs kept; the row in chunks is the one of
least memory. A model that fails, or whose first loss is not that of a uniform guess, prints the
reason.

On a CPU the models are small and float32. On a GPU they are the Reformer paper's for enwik8, in
bfloat16 with float32 weights, and in float32 as Trax computes, with TF32 products. Trax has LSH
chunks of 256, and so fewer buckets.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import command_line, language_models
from benchmarks.harness.failures import attempt, reason
from benchmarks.harness.language_models import PAPER, QUICKSTART, TINY, VOCAB_SIZE
from benchmarks.harness.table import Table
from reformax import models
from reformax.layers import tl
from reformax.layers._trax import signature
from reformax.ops import dense

GUESS = math.log(VOCAB_SIZE)  # nats, the loss of a model that knows nothing
MIB = 2**20
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
    remat: bool = False  # of the Transformer
    dtypes: tuple[str, ...] = ("float32",)  # of reformax; Trax's is float32


_paper = functools.partial(
    Shape,
    sizes=PAPER,
    trax_lsh_chunk_len=256,
    dropout=0.1,
    ff_chunk_size=32768,
    unrolled=True,
    remat=True,
    dtypes=("bfloat16", "float32"),
)
SHAPES = {
    "tiny": (Shape(2, 32, TINY, trax_lsh_chunk_len=8),),
    "cpu": (
        Shape(4, 1024, QUICKSTART, ff_chunk_size=128),
        Shape(1, 4096, QUICKSTART, ff_chunk_size=512),
    ),
    "gpu": (_paper(16, 4096), _paper(1, 65536)),
}


class Model(NamedTuple):
    """Fresh weights and `(weights, tokens, rng) -> logits`."""

    weights: Any
    logits: Callable[..., jax.Array]


def arguments(shape: Shape) -> dict[str, Any]:
    """The arguments that the constructors of Trax and of reformax share."""
    sizes = shape.sizes
    return dict(dropout=shape.dropout, mode="train") | sizes.arguments() | sizes.axial(shape.length)


def reformax_model(shape: Shape, constructor: Callable, attention_type, **options) -> Model:
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


def candidates(shape: Shape, peers: bool = True) -> dict[str, Callable[[], Model]]:
    """The constructors of the models that take turns, by name."""
    build = functools.partial(reformax_model, shape, models.ReformerLM, shape.sizes.attention())
    reformer = functools.partial(build, ff_chunk_size=shape.ff_chunk_size)
    first, *others = shape.dtypes
    rows = {}
    if shape.unrolled:
        fast = dict(scan_layers=False, keep_ff_outputs=True, ff_chunk_size=0)
        rows[REFORMER] = functools.partial(reformer, dtype=first, **fast)
    rows |= {
        f"{REFORMER}, least memory" if rows else REFORMER: functools.partial(reformer, dtype=first),
        f"{REFORMER}, exact": functools.partial(reformer, dtype=first, exact=True),
        **{f"{REFORMER}, {d}": functools.partial(reformer, dtype=d) for d in others},
    }
    if peers:
        for n in (1, None):
            rows[f"{TRAX}, n_parallel_heads={n}"] = functools.partial(trax_model, shape, n)
    return rows


def baseline(shape: Shape) -> dict[str, Callable[[], Model]]:
    """The constructor of the Transformer, by name."""
    build = functools.partial(reformax_model, shape, models.TransformerLM, dense.dense())
    name = "reformax TransformerLM, dense" + (", remat" if shape.remat else "")
    return {name: functools.partial(build, dtype=shape.dtypes[0], remat=shape.remat)}


class Runner:
    """A training step, and its state."""

    def __init__(self, model: Model, shape: Shape):
        optimizer = optax.adam(1e-4)

        def step(weights, opt_state, tokens, rng):
            def loss(weights):
                log_p = jax.nn.log_softmax(model.logits(weights, tokens, rng).astype(jnp.float32))
                return -jnp.take_along_axis(log_p, tokens[..., None], axis=-1).mean()

            nats, gradient = jax.value_and_grad(loss)(weights)
            updates, opt_state = optimizer.update(gradient, opt_state, weights)
            return optax.apply_updates(weights, updates), opt_state, nats

        self.shape = shape
        self.n_weights = sum(w.size for w in jax.tree.leaves(model.weights))
        self._tokens = jax.random.randint(
            jax.random.PRNGKey(1), (shape.batch, shape.length), 0, VOCAB_SIZE, jnp.int32
        )
        self.state = model.weights, optimizer.init(model.weights)
        self._n_steps = 0
        self._lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            *self.state, self._tokens, jax.random.PRNGKey(2)
        )
        self.seconds = []

    def compile(self) -> None:
        start = time.perf_counter()
        self._step = self._lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self.temp_mib = self._step.memory_analysis().temp_size_in_bytes / MIB

    def warm_up(self) -> None:
        """Two steps; `ArithmeticError` if the first one's loss is not that of a guess."""
        first = self.step()
        if not abs(first - GUESS) < 1:
            raise ArithmeticError(f"first loss {first:.3f}, expected about {GUESS:.3f}")
        self.step()
        self.seconds.clear()

    def step(self) -> float:
        """Takes a step, notes how long it took, and returns its loss in nats.

        Raises `ArithmeticError` if that is not finite.
        """
        rng = jax.block_until_ready(jax.random.PRNGKey(self._n_steps))
        start = time.perf_counter()
        *state, nats = jax.block_until_ready(self._step(*self.state, self._tokens, rng))
        self.seconds.append(time.perf_counter() - start)
        self.state = tuple(state)
        self._n_steps += 1
        if not math.isfinite(nats):
            raise ArithmeticError(f"the loss of step {self._n_steps} is {nats}")
        return float(nats)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


Results = dict[str, Runner | Exception]  # what failed is its exception


def each(results: Results, act: Callable[[Runner], None], threads: int = 1) -> Results:
    """`act` on every runner. A runner that fails becomes its exception, and the others go on."""

    def acted(runner: Runner) -> Runner:
        act(runner)
        return runner

    def one(runner: Runner | Exception) -> Runner | Exception:
        return attempt(acted, runner) if isinstance(runner, Runner) else runner

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(results, pool.map(one, results.values()), strict=True))


def prepare(rows: dict[str, Callable[[], Model]], shape: Shape, threads: int) -> Results:
    """The rows' runners: traced one by one, compiled together and warmed up."""

    def runner(build: Callable[[], Model]) -> Runner:
        return Runner(build(), shape)

    results = {name: attempt(runner, build) for name, build in rows.items()}
    return each(each(results, Runner.compile, threads), Runner.warm_up)


def measure(results: Results, repeats: int) -> Results:
    """Steps through the rows in turn."""
    for _ in range(repeats):
        results = each(results, Runner.step)
    return results


def print_table(results: Results, shape: Shape) -> None:
    """Prints the results, with every model's speed relative to each of Trax's."""
    peers = {
        name.removeprefix(f"{TRAX}, "): r for name, r in results.items() if name.startswith(TRAX)
    }
    sizes = shape.sizes
    title = (
        f"{shape.batch} x {shape.length:,} tokens, {sizes.n_layers} layers "
        f"({', '.join(sizes.cycle)}), d_model {sizes.d_model}, d_ff {sizes.d_ff}, "
        f"{sizes.n_heads} heads of {sizes.d_head}, {sizes.n_hashes} hashes, "
        f"{shape.dtypes[0]}, dropout {shape.dropout}"
    )
    columns = ["model", "weights", "ms a step", "fastest to slowest", "tokens/s", "temp MiB"]
    columns += ["compile s", *(f"speed / Trax's, {name}" for name in peers)]
    table = Table(*columns, title=title)

    def speed(peer: Runner | Exception, runner: Runner) -> str:
        return f"{peer.median / runner.median:.2f}" if isinstance(peer, Runner) else "-"

    for name, r in results.items():
        if not isinstance(r, Runner):
            table.row(name, reason(r))
            continue
        table.row(
            name,
            f"{r.n_weights:,}",
            f"{r.median * 1e3:.1f}",
            f"{min(r.seconds) * 1e3:.1f} to {max(r.seconds) * 1e3:.1f}",
            f"{shape.batch * shape.length / r.median:,.0f}",
            f"{r.temp_mib:,.1f}",
            f"{r.compile_seconds:.1f}",
            *(speed(peer, r) for peer in peers.values()),
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, repeats=10, threads=True)
    parser.add_argument("--no_peers", action="store_true", help="leave Trax's models out")
    parser.add_argument("--lengths", type=int, nargs="+", help="only the tables of these lengths")
    args = parser.parse_args(argv)
    shapes = command_line.of_size(SHAPES, args.tiny)
    lengths = [s.length for s in shapes]
    shapes = [s for s in shapes if s.length in (args.lengths or lengths)]
    if not shapes:
        parser.error(f"--lengths is {args.lengths}: expected some of {lengths}")

    print(f"{command_line.machine()}, medians of {args.repeats} steps")
    failed = []
    for shape in shapes:
        in_turn, alone = candidates(shape, peers=not args.no_peers), baseline(shape)
        ready = prepare(in_turn | alone, shape, args.threads)
        results = measure({name: ready[name] for name in in_turn}, args.repeats)
        results |= measure({name: ready[name] for name in alone}, min(args.repeats, 3))
        print_table(results, shape)
        failed += [n for n, r in results.items() if not (isinstance(r, Runner) or TRAX in n)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

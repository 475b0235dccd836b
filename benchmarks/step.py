"""A training step of ReformerLM beside one of Trax's ReformerLM of the same shape.

    python -m benchmarks.step

prints a Markdown table for each length: a step is forward, backward and Adam, compiled as one
function of a donated state, the same function around every model. The Reformers take turns, step
by step, so that whatever else the machine does falls on all of them; times are medians. The
Transformer, whose long steps would leave the next in turn cold caches, is timed by itself at the
end, at most three times. Models are compiled beside each other, and their seconds say so.

All have axial positions, the same dropout, and n_layers that cycle through local and LSH attention
with as many buckets and hashes; the TransformerLM has full attention instead. Trax computes its LSH
heads one at a time unless told otherwise, so it is timed as it comes (n_parallel_heads=1) and with
all of them at once (None). reformax takes its feed-forward layers in chunks; on a GPU a first row
has it as the configs for one do, the layers written out, the feed-forward layers whole and their
outputs kept, and the one with chunks is that of the least memory. A model that fails, for want of
memory say, or whose first loss is not that of a guess, has the reason in its row in place of
numbers.

On a CPU the shapes are small and float32. On a GPU they are the Reformer paper's enwik8 model:
reformax computes in bfloat16 with float32 weights, and in float32 as Trax does, whose products are
TF32 there; Trax has LSH chunks of 256, with fewer buckets.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.measuring import reason
from reformax import models
from reformax.layers import tl
from reformax.layers._trax import signature
from reformax.ops import dense, local, lsh

VOCAB_SIZE = 256
GUESS = math.log(VOCAB_SIZE)  # nats, the loss of a model that knows nothing
MIB = 2**20
REFORMER, TRAX = "reformax ReformerLM", "Trax ReformerLM"


class Shape(NamedTuple):
    """A model, and the tokens of a step."""

    batch: int
    length: int
    d_model: int = 128
    d_ff: int = 512
    n_heads: int = 4
    d_head: int = 32
    n_layers: int = 4
    cycle: tuple[str, ...] = ("local", "lsh")
    local_chunk_len: int = 64
    lsh_chunk_len: int = 64
    trax_lsh_chunk_len: int = 64
    n_hashes: int = 2
    dropout: float = 0.0
    ff_chunk_size: int = 0  # of reformax
    written_out: bool = False  # whether reformax's first row has no chunks and no loops
    remat: bool = False  # of the Transformer
    dtypes: tuple[str, ...] = ("float32",)  # of reformax; Trax's is float32


_paper = functools.partial(
    Shape,
    d_model=1024,
    d_ff=4096,
    n_heads=8,
    d_head=128,
    n_layers=12,
    cycle=("local", "local", "lsh", "local"),
    local_chunk_len=128,
    trax_lsh_chunk_len=256,
    dropout=0.1,
    ff_chunk_size=32768,
    written_out=True,
    remat=True,
    dtypes=("bfloat16", "float32"),
)
SHAPES = {
    "cpu": (Shape(4, 1024, ff_chunk_size=128), Shape(1, 4096, ff_chunk_size=512)),
    "gpu": (_paper(16, 4096), _paper(1, 65536)),
}


class Model(NamedTuple):
    """Fresh weights and `(weights, tokens, rng) -> logits`."""

    weights: Any
    logits: Callable[..., jax.Array]


def arguments(shape: Shape) -> dict[str, Any]:
    """What the constructors of Trax and of reformax call by the same names."""
    columns = 2 ** (int(math.log2(shape.length)) // 2)
    return dict(
        vocab_size=VOCAB_SIZE,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        d_attention_key=shape.d_head,
        d_attention_value=shape.d_head,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        dropout=shape.dropout,
        pos_type="axial",
        pos_axial_shape=(-(-shape.length // columns), columns),
        pos_d_axial_embs=(shape.d_model // 4, shape.d_model - shape.d_model // 4),
        mode="train",
    )


def reformax_model(shape: Shape, constructor: Callable, attention_type, **options) -> Model:
    model = constructor(**arguments(shape), attention_type=attention_type, **options)
    init = jax.jit(lambda rng: model.init_params(rng, (shape.batch, shape.length)))
    return Model(init(jax.random.PRNGKey(0)), model.apply)


def trax_model(shape: Shape, n_parallel_heads: int | None) -> Model:
    from trax.models.reformer.reformer import ReformerLM

    ops = {
        "local": functools.partial(
            tl.SelfAttention, chunk_len=shape.local_chunk_len, n_chunks_before=1
        ),
        "lsh": functools.partial(
            tl.LSHSelfAttention,
            chunk_len=shape.trax_lsh_chunk_len,
            n_chunks_before=1,
            n_hashes=shape.n_hashes,
            n_parallel_heads=n_parallel_heads,
        ),
    }
    model = ReformerLM(**arguments(shape), attention_type=[ops[name] for name in shape.cycle])
    model.init(signature(jnp.zeros((shape.batch, shape.length), jnp.int32)))
    state = model.state
    return Model(
        model.weights, lambda weights, tokens, rng: model.pure_fn(tokens, weights, state, rng)[0]
    )


def candidates(shape: Shape, peers: bool = True) -> dict[str, Callable[[], Model]]:
    """The rows of a table that take turns: what makes each model, by its name."""
    ops = {
        "local": local.local(chunk_len=shape.local_chunk_len),
        "lsh": lsh.lsh(chunk_len=shape.lsh_chunk_len, n_hashes=shape.n_hashes),
    }
    cycle = tuple(ops[name] for name in shape.cycle)
    reformer = functools.partial(
        reformax_model, shape, models.ReformerLM, cycle, ff_chunk_size=shape.ff_chunk_size
    )
    first, *others = shape.dtypes
    rows = {}
    if shape.written_out:
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
    """The row of the Transformer."""
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
    """`act` on every runner; one that fails, in whatever way, leaves the others to go on."""

    def attempt(runner: Runner | Exception) -> Runner | Exception:
        try:
            if isinstance(runner, Runner):
                act(runner)
            return runner
        except Exception as error:
            return error

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(results, pool.map(attempt, results.values()), strict=True))


def prepare(rows: dict[str, Callable[[], Model]], shape: Shape, threads: int) -> Results:
    """All rows, traced one by one, compiled beside each other and warmed up."""
    results = {}
    for name, build in rows.items():
        try:
            results[name] = Runner(build(), shape)
        except Exception as error:
            results[name] = error
    return each(each(results, Runner.compile, threads), Runner.warm_up)


def measure(results: Results, repeats: int) -> Results:
    """Steps through the rows in turn."""
    for _ in range(repeats):
        results = each(results, Runner.step)
    return results


def table(results: Results, shape: Shape) -> str:
    """The results in Markdown, with every model's speed as a multiple of each of Trax's."""
    peers = {
        name.removeprefix(f"{TRAX}, "): r for name, r in results.items() if name.startswith(TRAX)
    }
    head = ["model", "weights", "ms a step", "fastest to slowest", "tokens/s", "temp MiB"]
    head += ["compile s", *(f"speed / Trax's, {name}" for name in peers)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, r in results.items():
        if not isinstance(r, Runner):
            lines.append([name, reason(r), *["-"] * (len(head) - 2)])
            continue
        lines.append(
            [
                name,
                f"{r.n_weights:,}",
                f"{r.median * 1e3:.1f}",
                f"{min(r.seconds) * 1e3:.1f} to {max(r.seconds) * 1e3:.1f}",
                f"{shape.batch * shape.length / r.median:,.0f}",
                f"{r.temp_mib:,.1f}",
                f"{r.compile_seconds:.1f}",
                *(
                    f"{p.median / r.median:.2f}" if isinstance(p, Runner) else "-"
                    for p in peers.values()
                ),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--no_peers", action="store_true", help="leave Trax's models out")
    parser.add_argument("--lengths", type=int, nargs="+", help="only the tables of these lengths")
    parser.add_argument("--repeats", type=int, default=10, help="steps timed of each model")
    parser.add_argument("--threads", type=int, default=8, help="that compile at the same time")
    args = parser.parse_args(argv)
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    shapes = [s for s in SHAPES[backend] if s.length in (args.lengths or [s.length])]
    if not shapes or min(args.repeats, args.threads) < 1:
        lengths = [s.length for s in SHAPES[backend]]
        parser.error(f"--lengths are of {lengths}, --repeats and --threads at least 1")

    device = f"{os.cpu_count()} cores" if backend == "cpu" else jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, medians of {args.repeats} steps")
    failed = []
    for shape in shapes:
        in_turn, alone = candidates(shape, peers=not args.no_peers), baseline(shape)
        ready = prepare(in_turn | alone, shape, args.threads)
        results = measure({name: ready[name] for name in in_turn}, args.repeats)
        results |= measure({name: ready[name] for name in alone}, min(args.repeats, 3))
        print(
            f"\n{shape.batch} x {shape.length:,} tokens, {shape.n_layers} layers "
            f"({', '.join(shape.cycle)}), d_model {shape.d_model}, d_ff {shape.d_ff}, "
            f"{shape.n_heads} heads of {shape.d_head}, {shape.n_hashes} hashes, "
            f"{shape.dtypes[0]}, dropout {shape.dropout}\n\n{table(results, shape)}",
            flush=True,
        )
        failed += [n for n, r in results.items() if not (isinstance(r, Runner) or TRAX in n)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

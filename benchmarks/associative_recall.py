"""Which attentions look keys up: multi-query associative recall, against the size of their state.

    python -m benchmarks.associative_recall --out recall.jsonl

trains small language models on `reformax.data.associative_recall` with each attention and prints,
for each number of pairs, the share of values that it names (Arora et al. 2023, "Zoology", section
4). The state is what decoding keeps of a row in the attention, once it has read the row; one
without a step of decoding has none. Of several learning rates a model's best counts. A training
ends before its last step, and no further rate is tried, once a model names `ENOUGH` of the values
of a stretch of steps, which it has not seen before.

To answer, a model must know of a value which key stands before it. A window of two positions, the
first layer of all models, can tell; the attention in question follows, and looks keys up. Dense
attention learns this in some hundreds of steps. The paper has a convolution over three positions
before the attention in each of two layers. As there, models have no feed-forward layers (here they
have one feature, the least) and logits are products with the embedding; other than there, the
attention has no positions, matrices begin with a deviation of `INIT_STD`, not 0.02, and rows of few
pairs are as long as those of many. All rows weigh alike in the loss: few pairs are learnt first.

With `--out` each model is a line of a file, and the same command goes on after an interruption:
what the file has is not trained again. All models see the same batches. `--threads` compiles and
trains several side by side.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import command_line
from benchmarks.harness.calls import attempt, exit_if
from benchmarks.harness.output import Table, plot
from reformax.carried import advanced, merged, trained
from reformax.data.associative_recall import associative_recall
from reformax.models import TransformerLM
from reformax.ops import (
    asymmetric_lsh,
    block_patterns,
    block_sparse,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    linear,
    local,
    long_short,
    longformer,
    lsh,
    moba,
    nsa,
    performer,
    retention,
    routing,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.base import AttentionOp
from reformax.training import loss, optimizer

N_HEADS, INIT_STD = 2, 0.05
N_PAIRS = (4, 8, 16, 32, 64)
WINDOW = 64
MIXER = local.local(window=2, chunk_len=WINDOW)
ENOUGH = 0.995
# Of figures: a state of constant size, a window; the rest grow with the length.
COLOURS = dict.fromkeys(("linear", "performer", "retention", "gated_linear", "gated_delta"), "C3")
COLOURS |= dict.fromkeys(("local", "sinks", "longformer"), "C2")
SEED = 0


def attentions() -> dict[str, tuple[AttentionOp, ...]]:
    """The layers of a model after its first one, by name.

    Linformer and Nystromformer are left out: they mix the future in. So are other algorithms for
    dense attention, which compute what flash does, and Longformer's global tokens, which no task
    without marked tokens has. Recurrences are with and without a gate of their output, and begin
    with a long memory or one as their papers have it.
    """
    window = local.local(window=WINDOW, chunk_len=WINDOW, n_chunks_before=1)
    hashes = {n: lsh.lsh(chunk_len=32, n_hashes=n) for n in (1, 4, 8)}
    blocks = functools.partial(block_sparse.block_sparse, block_size=16)
    alone = {
        "flash": flash.flash(),
        "shared-QK": shared_qk.shared_qk(),
        "shared-QK, next value": shared_qk.shared_qk(own=False),
        f"window {WINDOW}": window,
        f"window {WINDOW} and 4 sinks": sinks.sinks(window=WINDOW),
        "longformer, dilations 1 and 4": longformer.longformer(window=WINDOW, dilation=(1, 4)),
        "LSH, 1 hash": hashes[1],
        "LSH, 4 hashes": hashes[4],
        "LSH, 8 hashes": hashes[8],
        "LSH, 4 hashes, next value": lsh.lsh(chunk_len=32, n_hashes=4, own=False),
        "asymmetric LSH": asymmetric_lsh.asymmetric_lsh(chunk_len=32),
        "hash-sparse": hash_sparse.hash_sparse(),
        "smyrf": smyrf.smyrf(chunk_len=32),
        "moba": moba.moba(block_size=32),
        "nsa": nsa.nsa(
            compress_len=16, compress_stride=8, block_size=32, n_selected=4, window=WINDOW
        ),
        "dsa": dsa.dsa(top_k=32),
        "routing": routing.routing(n_clusters=16, decay=0.99),
        "bigbird": blocks(pattern=block_patterns.bigbird()),
        "sparse, fixed": blocks(pattern=block_patterns.fixed()),
        "sparse, strided": blocks(pattern=block_patterns.strided()),
        "linear": linear.linear(),
        "performer": performer.performer(n_features=128),
        "linear, convolved": linear.linear(conv_size=4),
        "retention": retention.retention(),
        "retention, no gate": retention.retention(gated=False),
        "gated_linear": gated_linear.gated_linear(),
        "gated_linear, no gate, memory 1,000": gated_linear.gated_linear(gated=False, memory=1000),
        "gated_delta": gated_delta.gated_delta(),
        "gated_delta, memory 1,000": gated_delta.gated_delta(memory=1000),
        "gated_delta, memory 1,000, convolved": gated_delta.gated_delta(memory=1000, conv_size=4),
        "gated_delta, gate": gated_delta.gated_delta(gated=True),
        "gated_delta, gate, memory 1,000": gated_delta.gated_delta(gated=True, memory=1000),
        "long_short": long_short.long_short(window=WINDOW, chunk_len=WINDOW, rank=4),
    }
    both = {
        f"window {WINDOW} and {name}": (window, alone[name])
        for name in ("LSH, 4 hashes", "linear", "gated_delta, memory 1,000")
    }
    return {name: (op,) for name, op in alone.items()} | both


class Sizes(NamedTuple):
    """What a model is trained with, beside its attention."""

    d_model: int
    length: int
    vocab_size: int
    batch_size: int
    steps: int
    stretch: int  # steps compiled as one, after which a training may end
    n_eval: int

    def n_pairs(self, of: Sequence[int] = N_PAIRS) -> tuple[int, ...]:
        """The numbers of pairs that fit in the length."""
        return tuple(n for n in of if 4 * n <= self.length)


class Rows(NamedTuple):
    """Examples, and the places of the values that are asked for, filled up with weight 0."""

    tokens: Any  # [..., B, T]
    places: Any  # [..., B, M]
    weights: Any  # [..., B, M], those of a row add up to 1


class Batches:
    """The batches of a training, drawn once for all models: a stretch of steps at a time."""

    def __init__(self, sizes: Sizes, n_pairs: Sequence[int]):
        self._sizes, self._most = sizes, max(sizes.n_pairs())
        self._task = associative_recall(
            sizes.length, n_pairs, sizes.vocab_size, n_eval=sizes.n_eval
        )
        self._drawn: dict[int, Rows] = {}
        self._lock = threading.Lock()

    def stretch(self, number: int) -> Rows:
        """`[steps, B, ...]`, for training."""
        with self._lock:
            if number not in self._drawn:
                steps, rows, length = (
                    self._sizes.stretch,
                    self._sizes.batch_size,
                    self._sizes.length,
                )
                batch = self._task.train_batch(0, number, steps * rows, length)
                drawn = self._rows(batch.inputs, batch.weights)
                parts = (x.reshape(steps, rows, *x.shape[1:]) for x in drawn)
                self._drawn[number] = Rows(*parts)
            return self._drawn[number]

    def evaluation(self) -> Rows:
        """`[n_eval, ...]`, of examples that no training draws."""
        (batch,) = self._task.eval_batches("valid", self._sizes.n_eval, *[self._sizes.length] * 2)
        return self._rows(batch.inputs, batch.weights)

    def _rows(self, tokens: np.ndarray, weights: np.ndarray) -> Rows:
        places = np.argsort(-weights, axis=-1, kind="stable")[:, : self._most]
        weights = np.take_along_axis(weights, places, axis=-1)
        weights /= weights.sum(axis=-1, keepdims=True)
        return Rows(tokens.astype(np.uint16), places.astype(np.uint16), weights)


def build(ops: Sequence[AttentionOp], sizes: Sizes, mode: str) -> TransformerLM:
    """A language model of these layers, of which `MIXER` alone has positions, rotary ones.

    A strict algorithm brings the next position's value too.
    """
    return TransformerLM(
        vocab_size=sizes.vocab_size,
        d_model=sizes.d_model,
        d_ff=1,
        n_heads=N_HEADS,
        d_attention_key=sizes.d_model // N_HEADS,
        d_attention_value=sizes.d_model // N_HEADS,
        n_layers=len(ops),
        attention_type=[op if op is MIXER else _without_positions(op) for op in ops],
        pos_type="rotary_local",
        next_value=any(op.traits.strict for op in ops),
        tie_embeddings=True,
        init_std=INIT_STD,
        dropout=0.0,
        mode=mode,
    )


def _without_positions(op: AttentionOp) -> AttentionOp:
    """The algorithm without the trait for which `pos_type="rotary_local"` turns keys."""
    return op._replace(traits=op.traits._replace(local=False))


def state_bytes(ops: Sequence[AttentionOp], sizes: Sizes) -> float | None:
    """The bytes that decoding keeps of a row in these layers, after `length - 1` tokens."""
    model, length = build(ops, sizes, "eval"), sizes.length

    def read(tokens):
        key = jax.random.key(SEED)
        params = model.init_params(key, tokens.shape)
        _, decoding = model.prefill(params, tokens, jnp.full(1, length - 1), length, key)
        return decoding.caches

    try:
        caches = jax.eval_shape(read, jnp.zeros((1, length - 1), jnp.int32))
    except NotImplementedError:
        return None
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))


def sums(model: TransformerLM, params, rows: Rows, rng) -> loss.Sums:
    """The loss of the values asked for; no logits are computed of other places."""
    tokens, places = rows.tokens.astype(jnp.int32), rows.places.astype(jnp.int32)
    features = model.features(params, tokens, rng=rng)
    features = jnp.take_along_axis(features, places[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, places, axis=1)
    return loss.cross_entropy(model.logits, params, features, targets, rows.weights)


def adamw(rate: Any, steps: int) -> optax.GradientTransformation:
    """The rate rises over a tenth of the steps, and falls as a cosine."""
    shape = optimizer.cosine(1.0, steps, steps // 10)
    return optimizer.adamw(lambda count: rate * shape(count))


def trainer(model: TransformerLM, steps: int) -> Callable[..., Any]:
    """A program (params, opt_state, first step, rate, batches) -> (params, opt_state, accuracy)."""

    def mean(params, rows, rng):
        found = sums(model, params, rows, rng)
        return found.loss / found.weight, found.correct / found.weight

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, opt_state, first, rate, batches: Rows):
        update = adamw(rate, steps).update

        def step(carry, numbered):
            (params, opt_state), (number, rows) = carry, numbered
            rng = jax.random.fold_in(jax.random.key(SEED), number)
            gradients, accuracy = jax.grad(mean, has_aux=True)(params, rows, rng)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                before = trained(params)
                updates, opt_state = update(trained(gradients), opt_state, before)
                after = optax.apply_updates(before, updates)
            params = merged(advanced(params, gradients), after)
            return (params, opt_state), accuracy

        numbers = first + jnp.arange(batches.tokens.shape[0])
        carry, accuracies = jax.lax.scan(step, (params, opt_state), (numbers, batches))
        return *carry, jnp.mean(accuracies)

    return run


@functools.cache
def programs(ops: tuple[AttentionOp, ...], sizes: Sizes) -> tuple[TransformerLM, Any, Any]:
    """The model with `MIXER` in front, its trainer, and its sums at evaluation, for all rates."""
    ops = (MIXER, *ops)
    model = build(ops, sizes, "train")
    correct = jax.jit(functools.partial(sums, build(ops, sizes, "eval")))
    return model, trainer(model, sizes.steps), correct


def accuracies(
    ops: tuple[AttentionOp, ...],
    sizes: Sizes,
    rate: float,
    batches: Batches,
    tests: Mapping[int, Rows],
) -> dict[str, Any]:
    """A trained model's accuracy by the number of pairs, its steps, and its seconds.

    `learning` is its accuracy in each stretch of steps.
    """
    start = time.perf_counter()
    model, run, correct = programs(ops, sizes)
    key, shape = jax.random.key(SEED), (sizes.batch_size, sizes.length)
    params = jax.jit(model.init_params, static_argnums=1)(key, shape)
    opt_state = adamw(rate, sizes.steps).init(trained(params))
    accuracy, step, learning = 0.0, 0, []
    while step < sizes.steps and accuracy < ENOUGH:
        rows = batches.stretch(step // sizes.stretch)
        params, opt_state, accuracy = run(params, opt_state, step, rate, rows)
        accuracy, step = float(accuracy), step + sizes.stretch
        learning.append(round(accuracy, 4))
        where = f"{ops} of {sizes.d_model} at {rate:g}: {step:,} steps"
        print(f"{where}, {accuracy:.1%}", file=sys.stderr, flush=True)
    named = {}
    for n, rows in tests.items():
        n_batches = -(-len(rows.tokens) // sizes.batch_size)
        parts = zip(*(np.array_split(x, n_batches) for x in rows), strict=True)
        totals = [correct(params, Rows(*part), key) for part in parts]
        named[n] = float(sum(x.correct for x in totals) / sum(x.weight for x in totals))
    return {
        "accuracy": named,
        "ended_after": step,
        "learning": learning,
        "seconds": time.perf_counter() - start,
    }


def recorded(path: Path | None) -> list[dict[str, Any]]:
    """The models of a file. A last line that an interruption cut is taken away."""
    if path is None or not path.exists():
        return []
    text = path.read_text()
    whole, newline, cut = text.rpartition("\n")
    if cut:
        path.write_text(whole + newline)
    return [json.loads(line) for line in whole.splitlines()]


def models(
    rows: Mapping[tuple[str, Sizes], tuple[AttentionOp, ...]],
    rates: Sequence[float],
    path: Path | None,
    threads: int,
    only_known: bool,
) -> Iterator[tuple[tuple[str, Sizes], Any]]:
    """The record of each best model, or the exception in its place, in order.

    Args:
      rows: layers after the first one, by name and sizes.
      rates: of learning, tried in this order.
      path: of the file of records, one for each rate.
      threads: models trained side by side.
      only_known: whether those that the file lacks are left out, and any number of steps will do.
    """
    drawn: dict[Sizes, tuple[Batches, dict[int, Rows]]] = {}
    lock = threading.Lock()
    before = recorded(path)

    def of_rate(name: str, sizes: Sizes, rate: float) -> dict[str, Any] | None:
        wanted = json.loads(json.dumps({"attention": name, "rate": rate} | sizes._asdict()))
        if only_known:
            del wanted["steps"]
        for record in before:
            if wanted.items() <= record.items():
                return record
        if only_known:
            return None
        same = sizes._replace(d_model=0)
        with lock:
            if same not in drawn:
                n_pairs = sizes.n_pairs()
                tests = {n: Batches(sizes, (n,)).evaluation() for n in n_pairs}
                drawn[same] = Batches(sizes, n_pairs), tests
        known = accuracies(rows[name, sizes], sizes, rate, *drawn[same])
        record = json.loads(json.dumps(wanted | {"device": command_line.machine()} | known))
        if path is not None:
            with lock, path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return record

    def best(name: str, sizes: Sizes) -> dict[str, Any] | None:
        found: list[dict[str, Any]] = []
        for rate in rates:
            if (record := of_rate(name, sizes, rate)) is not None:
                found.append(record)
                if record["ended_after"] < sizes.steps:
                    break
        return max(found, key=lambda one: sum(one["accuracy"].values()), default=None)

    with ThreadPoolExecutor(threads) as pool:
        found = {key: pool.submit(attempt, best, *key) for key in rows}
        for key, future in found.items():
            if (record := future.result()) is not None:
                yield key, record


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot=Path("docs/associative_recall.png"))
    for name, default in dict(tokens=32768, steps=1500, threads=1, vocab_size=8192).items():
        text = f"default: {default:,}"
        parser.add_argument(f"--{name}", type=command_line.positive, default=default, help=text)
    several = dict(
        length=(command_line.positive, [512], "tokens of an example"),
        d_model=(command_line.positive, [64, 128], "sizes of the model"),
        learning_rate=(float, [3e-3, 1e-3], "each is tried until one is enough"),
    )
    for name, (kind, default, text) in several.items():
        text = f"{text} (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, help=text)
    known = attentions()
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="these attentions")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON, a model each")
    text = "train nothing: show what the file has, of any number of steps"
    parser.add_argument("--only_known", action="store_true", help=text)
    args = parser.parse_args(argv)
    n_eval = 256
    if args.tiny:
        args.length, args.tokens, args.steps, args.d_model = [32], 64, 2, [8]
        args.learning_rate, n_eval = [1e-3], 4
    print(command_line.machine())
    rows = {}
    for length, d_model, name in itertools.product(args.length, args.d_model, args.only):
        sizes = Sizes(
            d_model=d_model,
            length=length,
            vocab_size=args.vocab_size,
            batch_size=max(1, args.tokens // length),
            steps=args.steps,
            stretch=min(100, args.steps),
            n_eval=n_eval,
        )
        rows[name, sizes] = known[name]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    failed = []
    for (name, sizes), one in models(
        rows, args.learning_rate, args.out, args.threads, args.only_known
    ):
        n_pairs = sizes.n_pairs()
        labels = {
            n: f"accuracy with {n} pairs in {sizes.length:,} tokens"
            for n in (n_pairs[len(n_pairs) // 2], n_pairs[-1])
        }
        if not panels.keys() & labels.values():
            pairs = (f"{n} pairs" for n in n_pairs)
            columns = "d_model", "state, KiB", *pairs, "rate", "steps", "seconds"
            table = Table("attention", *columns, title=f"{sizes.length:,} tokens")
        if isinstance(one, Exception):
            failed.append(f"{name}, d_model={sizes.d_model}, length={sizes.length}")
        else:
            one["state_bytes"] = state = state_bytes(known[name], sizes)
            if state is not None:
                kib = max(1, round(state / 1024))
                for n, label in labels.items():
                    lines = panels.setdefault(label, {}).setdefault(name, {})
                    lines[kib] = one["accuracy"][str(n)]
        table.result(name, str(sizes.d_model), known=one, cells=cells)
    axes = dict(yscale="linear", xlabel="state of the attention, KiB", ylim=(-0.02, 1.02))
    if panels:
        states = [kib for lines in panels.values() for points in lines.values() for kib in points]
        ticks = [2**i for i in range(min(states).bit_length() - 1, max(states).bit_length() + 1)]
        plot(args.plot, panels, styles=styles(known), ticks=ticks, **axes)
    exit_if(failed)


def styles(known: Mapping[str, Sequence[AttentionOp]]) -> dict[str, dict[str, Any]]:
    """Of lines: a colour for each kind of state, a marker for each of a kind."""
    found: dict[str, dict[str, Any]] = {}
    kinds: list[str] = []
    for name, ops in known.items():
        kinds.append("C1" if len(ops) > 1 else COLOURS.get(ops[0].name, "C0"))
        found[name] = dict(
            color=kinds[-1], marker="oDv^XpsP*hd<>8"[kinds.count(kinds[-1]) % 14], ms=5
        )
    return found


def cells(record: Mapping[str, Any]) -> list[str]:
    """The columns of a row from its state on."""
    state = record["state_bytes"]
    shares = (f"{100 * share:.1f}%" for share in record["accuracy"].values())
    kib = "-" if state is None else f"{state / 1024:,.1f}"
    last = f"{record['rate']:g}", f"{record['ended_after']:,}", f"{record['seconds']:.0f}"
    return [kib, *shares, *last]


if __name__ == "__main__":
    main()

"""Models that look keys up: rows of `benchmarks.associative_recall`, one after another.

A row is some models of one attention, which differ by their rate of learning and their seed. One
program trains all of them side by side, first among few tokens, then among more.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import command_line
from benchmarks.harness.calls import attempt, reason
from benchmarks.harness.processes import Answer, stage
from reformax.buffers import advanced, merged, trained
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
        "shared-QK, next value": shared_qk.shared_qk(attend_self_if_alone=False),
        f"window {WINDOW}": window,
        f"window {WINDOW} and 4 sinks": sinks.sinks(window=WINDOW),
        "longformer, dilations 1 and 4": longformer.longformer(window=WINDOW, dilation=(1, 4)),
        "LSH, 1 hash": hashes[1],
        "LSH, 4 hashes": hashes[4],
        "LSH, 8 hashes": hashes[8],
        "LSH, 4 hashes, next value": lsh.lsh(chunk_len=32, n_hashes=4, attend_self_if_alone=False),
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

    def training(self) -> list[int]:
        """What decides what the models of a longer length begin with."""
        return [self.length, self.batch_size, self.steps]


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

    def stretch(self, number: int) -> Rows:
        """`[steps, B, ...]`, for training; the last stretch may be shorter."""
        if number not in self._drawn:
            rows, length = self._sizes.batch_size, self._sizes.length
            steps = min(self._sizes.stretch, self._sizes.steps - number * self._sizes.stretch)
            batch = self._task.train_batch(0, number, steps * rows, length)
            self._drawn[number] = self._batched(batch.inputs, batch.weights)
        return self._drawn[number]

    def evaluation(self) -> Rows:
        """`[n_eval / B, B, ...]`, of examples that no training draws; B divides n_eval."""
        (batch,) = self._task.eval_batches("valid", self._sizes.n_eval, *[self._sizes.length] * 2)
        return self._batched(batch.inputs, batch.weights)

    def _batched(self, tokens: np.ndarray, weights: np.ndarray) -> Rows:
        places = np.argsort(-weights, axis=-1, kind="stable")[:, : self._most]
        weights = np.take_along_axis(weights, places, axis=-1)
        weights /= weights.sum(axis=-1, keepdims=True)
        rows = Rows(tokens, places.astype(np.int32), weights)
        size = math.gcd(self._sizes.batch_size, len(tokens))
        return Rows(*(x.reshape(-1, size, x.shape[-1]) for x in rows))


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
        next_value=any(op.never_sees_itself for op in ops),
        tie_embeddings=True,
        init_std=INIT_STD,
        dropout=0.0,
        mode=mode,
    )


def _without_positions(op: AttentionOp) -> AttentionOp:
    """The algorithm, whose keys `pos_type="rotary_local"` does not rotate."""
    everywhere = type(op.name, (type(op),), {"local": False})
    return everywhere(**{field.name: getattr(op, field.name) for field in dataclasses.fields(op)})


def sums(model: TransformerLM, params, rows: Rows, rng) -> loss.Sums:
    """The loss of the values asked for; no logits are computed of other places."""
    features = model.features(params, rows.tokens, rng=rng)
    features = jnp.take_along_axis(features, rows.places[..., None], axis=1)
    targets = jnp.take_along_axis(rows.tokens, rows.places, axis=1)
    return loss.cross_entropy(model.logits, params, features, targets, rows.weights)


def adamw(rate: Any, steps: int) -> optax.GradientTransformation:
    """The rate rises over a tenth of the steps, and falls as a cosine."""
    shape = optimizer.cosine(1.0, steps, steps // 10)
    return optimizer.adamw(lambda count: rate * shape(count))


class Members(NamedTuple):
    """The models of a row."""

    rates: Sequence[float]  # of learning
    seeds: Sequence[int]  # of the first weights, and of hashes

    def each(self) -> tuple[tuple[float, int], ...]:
        """The rate and the seed of each."""
        return tuple(itertools.product(self.rates, self.seeds))


def trainer(model: TransformerLM, steps: int) -> Callable[..., Any]:
    """A program (params, opt_state, first step, members, batches) -> (params, opt_state, accuracy).

    Params, opt_state, members (rates and seeds `[M]`) and accuracy have a first axis of models.
    """

    def mean(params, rows, rng):
        found = sums(model, params, rows, rng)
        return found.loss / found.metrics["nats"].weight, found.metrics["accuracy"].mean

    @functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
    def step(params, opt_state, member, numbered):
        (rate, seed), (number, rows) = member, numbered
        rng = jax.random.fold_in(jax.random.key(seed), number)
        gradients, accuracy = jax.grad(mean, has_aux=True)(params, rows, rng)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            before, update = trained(params), adamw(rate, steps).update
            updates, opt_state = update(trained(gradients), opt_state, before)
            after = optax.apply_updates(before, updates)
        return merged(advanced(params, gradients), after), opt_state, accuracy

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, opt_state, first, members, batches: Rows):
        def scanned(carry, numbered):
            *carry, accuracy = step(*carry, members, numbered)
            return carry, accuracy

        numbers = first + jnp.arange(batches.tokens.shape[0])
        carry, accuracies = jax.lax.scan(scanned, [params, opt_state], (numbers, batches))
        return *carry, jnp.mean(accuracies, axis=0)

    return run


def tester(model: TransformerLM) -> Callable[..., Any]:
    """A program (params, batches) -> the share of the values in them that each model names."""

    @functools.partial(jax.vmap, in_axes=(0, None))
    def correct(params, rows):
        found = sums(model, params, rows, jax.random.key(SEED))
        return found.metrics["accuracy"]

    @jax.jit
    def run(params, batches: Rows):
        found = jax.lax.map(functools.partial(correct, params), batches)
        return functools.reduce(jnp.divide, (jnp.sum(x, axis=0) for x in found))

    return run


def learn(
    ops: tuple[AttentionOp, ...],
    sizes: Sizes,
    members: Members,
    params: Any,
    batches: Batches,
    tests: Mapping[int, Rows],
) -> tuple[Any, dict[str, Any]]:
    """The weights of trained models, and the accuracy of the best one by the number of pairs.

    `learning` is the best accuracy in each stretch of steps, `of_each` the mean accuracy of each
    model.

    Args:
      ops: the layers after the first one.
      sizes: of the models and of the training.
      members: the models.
      params: the weights they begin with; None: they are drawn.
      batches: of the training.
      tests: examples by the number of pairs.
    """
    start = time.perf_counter()
    ops = (MIXER, *ops)
    model, shape = build(ops, sizes, "train"), (sizes.batch_size, sizes.length)
    rates, seeds = (jnp.asarray(x) for x in zip(*members.each(), strict=True))
    if params is None:
        init = jax.vmap(lambda seed: model.init_params(jax.random.key(seed), shape))
        params = jax.jit(init)(seeds)
    first = jax.vmap(lambda params: adamw(0.0, sizes.steps).init(trained(params)))
    opt_state = jax.jit(first)(params)
    run = trainer(model, sizes.steps)
    step, learning = 0, []
    rows = batches.stretch(0)
    while step < sizes.steps and not (learning and learning[-1] >= ENOUGH):
        params, opt_state, accuracy = run(params, opt_state, step, (rates, seeds), rows)
        step += len(rows.tokens)
        if step < sizes.steps:
            rows = batches.stretch(step // sizes.stretch)  # drawn while the device trains
        learning.append(round(float(accuracy.max()), 4))
        where = f"{ops[1:]} of {sizes.d_model} among {sizes.length}: {step:,} steps"
        print(f"{where}, {accuracy}", file=sys.stderr, flush=True)
    test = tester(build(ops, sizes, "eval"))
    named = {n: test(params, x) for n, x in tests.items()}
    of_each = jnp.mean(jnp.stack(list(named.values())), axis=0)
    best = int(of_each.argmax())
    rate, seed = members.each()[best]
    return params, {
        "rate": rate,
        "seed": seed,
        "accuracy": {n: float(x[best]) for n, x in named.items()},
        "of_each": [round(float(x), 4) for x in of_each],
        "ended_after": step,
        "learning": learning,
        "seconds": time.perf_counter() - start,
    }


def train(
    *, rows: Sequence[Any], members: Sequence[Any], claims: str, end: float | None
) -> Iterator[Answer]:
    """Trains the rows that no other process has taken: a record of each length, or an error.

    Args:
      rows: names, and the sizes of each length, which are trained one after the other.
      members: rates of learning and seeds.
      claims: the folder that has a file for each row that is taken.
      end: the time to be killed at; None: never.
    """
    ops, members = attentions(), Members(*members)
    for index, (name, stages) in enumerate(rows):
        if not _claim(Path(claims, str(index))):
            continue
        params, begun = None, []
        for sizes in (Sizes(*x) for x in stages):
            left = None if end is None else round(end - time.time(), 1)
            if left is not None and left <= 0:
                yield {"row": index, "error": "TimeoutError: no time left to begin"}
                break
            yield stage(f"{name} of {sizes.d_model} among {sizes.length}", left)
            drawn = _drawn(sizes._replace(d_model=0))
            known = attempt(learn, ops[name], sizes, members, params, *drawn)
            if isinstance(known, Exception):
                yield {"row": index, "error": reason(known)}
                break
            params, found = known
            record = {"attention": name, "begun": begun, **members._asdict()} | sizes._asdict()
            yield {"row": index, "record": record | {"device": command_line.machine()} | found}
            begun = [*begun, sizes.training()]


def _claim(file: Path) -> bool:
    """Whether this process is the first to make the file."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@functools.cache
def _drawn(sizes: Sizes) -> tuple[Batches, dict[int, Rows]]:
    """What all models are trained on, and evaluated on by the number of pairs."""
    tests = {n: Batches(sizes, (n,)).evaluation() for n in sizes.n_pairs()}
    return Batches(sizes, sizes.n_pairs()), tests

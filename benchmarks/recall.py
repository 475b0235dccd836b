"""The share of the true attention that LSH attention finds, by the number of hashes.

    python -m benchmarks.recall

prints a table. The vectors lie in clusters, as the queries of a trained
model do. Recall is the share of full shared-QK attention's weight that falls on the keys that LSH
attention shows a query.

    python -m benchmarks.recall --run=DIR

asks the same of any op, of the layers of a trained model that see every key: the share of their
weight that falls on the keys that the op would show them. It prints the mean over layers and heads,
the same at equal numbers of keys, and each head at --heads_at keys. A key that several rounds or
branches show counts once, and one of the future not at all; numbers are means over all queries of a
sequence, and lie on straight lines between the values that were tried. --op='largest weights' are
the keys of the largest weight of each query, of which no choice of as many shows more.

With --bits=TARGETS it also scores the model with the op in the place of these layers' attention,
without training: bits that are lost. What an op carries, such as centroids, first sees the layer's
vectors a few times, and an indexer first learns on them; such ops have no bits. Ops are calls, as
in --op='lsh.lsh(chunk_len=64, n_hashes={1, 2, 4})'; a set is values to try. --saved=FILE adds what
is found to a file, and does not ask again for what is there: several calls may share the ops.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from benchmarks.harness import command_line, coverage
from benchmarks.harness.calls import COMPILERS, attempt, exit_if
from benchmarks.harness.output import Table
from reformax.cli import errors
from reformax.declared import SettingError, Unsupported
from reformax.ops import AttentionOp, lsh
from reformax.ops.masking.masks import except_self, visibility
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.reference import reference_attention
from reformax.training.evaluation import evaluate
from reformax.training.loss import metric_name

LENGTH, CHUNK_LEN, N_SEEDS = 1024, 64, 8
N_HASHES = (1, 2, 4, 8, 16)
NOISES, NOISE = (0.25, 0.5, 1.0), 0.5
SIZE, N_CLUSTERS = 64, 32
# Of a trained model: numbers of keys to compare at, and what no choice of so many keys exceeds.
N_KEYS = (32, 64, 128, 256, 512, 1024)
LARGEST = "largest weights"
# Of a trained model, where a query sees chunks of 64 or blocks of 64 more and more.
OPS = (
    LARGEST,
    "lsh.lsh(chunk_len=64, attend_self_if_alone=False, n_hashes={1, 2, 4, 8, 16})",
    "smyrf.smyrf(chunk_len=64, n_hashes={2, 4, 8, 16, 32})",
    "asymmetric_lsh.asymmetric_lsh(chunk_len=64, n_hashes={1, 2, 4, 8})",
    "moba.moba(block_size=64, top_k={2, 4, 8, 16})",
    "nsa.nsa(compression='mean', own_projections=False, window=64, n_selected={2, 4, 8, 16})",
    "hash_sparse.hash_sparse(n_buckets={32, 16, 8, 4, 2})",
    "dsa.dsa(top_k={64, 256, 1024})",
    "routing.routing(decay=0.9, n_clusters={32, 16, 8, 4, 2})",
    "local.local(chunk_len={64, 128, 256, 512})",
)
# Rows that are scored together: models under several ops are on a device beside each other.
SCORED = 4
SHARPNESS = 10.0  # the length of a query; a logit is this times the cosine between two


def clustered_queries(rng: PRNGKeyArray, length: int, noise: float) -> Float[Array, "1 T 1 H"]:
    """Vectors around random centres.

    The noise's length is relative to the centre's: 1 is an angle of 45 degrees on average.
    """
    centre_rng, member_rng, noise_rng = jax.random.split(rng, 3)
    centres = jax.random.normal(centre_rng, (N_CLUSTERS, SIZE)) / math.sqrt(SIZE)
    member = jax.random.randint(member_rng, (length,), 0, N_CLUSTERS)
    x = centres[member] + noise * jax.random.normal(noise_rng, (length, SIZE)) / math.sqrt(SIZE)
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return SHARPNESS * x[None, :, None]


def mean_recall(
    n_hashes: int,
    *,
    n_seeds: int = N_SEEDS,
    length: int = LENGTH,
    chunk_len: int = CHUNK_LEN,
    noise: float = NOISE,
    causal: bool = False,
) -> tuple[float, float]:
    """The shares of full shared-QK attention's weight, and of the keys, that LSH attention shows.

    Both are averaged over queries, data and hashes. The second is the weight that a blind hash
    would find. Values that are the rows of the identity make an op's output its attention matrix;
    LSH attention shows a key where that is above 0.
    """
    attend = lsh.lsh(chunk_len=chunk_len, n_hashes=n_hashes)
    mask = except_self(visibility(length, length, causal=causal))
    names = jnp.eye(length)[None, :, None]

    @jax.jit
    def shares(
        rng: PRNGKeyArray, mask: Bool[Array, "1 1 T T"], names: Float[Array, "1 T 1 T"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        data_rng, hash_rng = jax.random.split(rng)
        q = clustered_queries(data_rng, length, noise)
        truth = reference_attention(q, length_normalize(q), names, mask)
        shown = attend(q, None, names, causal=causal, rng=hash_rng) > 0
        return jnp.mean(jnp.sum(truth, where=shown, axis=-1)), jnp.sum(shown) / jnp.sum(mask)

    # Arguments: XLA would compute for seconds with constants of this size.
    each = [shares(rng, mask, names) for rng in jax.random.split(jax.random.key(0), n_seeds)]
    weight, keys = np.mean(each, axis=0)
    return float(weight), float(keys)


class Run(NamedTuple):
    """A trained model, and where its texts are from."""

    model: Any
    params: Any
    task: Any
    settings: dict[str, Any]


class Known(NamedTuple):
    """What is known of an op, from all sequences."""

    layers: list[int]
    weight: list[list[float]]  # the share of the weight, by layer and head
    keys: list[list[float]]  # the mean number of keys that a query sees
    bits: float | None  # of the model with the op in the place of its own
    own: float | None  # of the model as it is


def of_run(args: argparse.Namespace) -> None:
    """The recall of ops on a trained model."""
    lines = {text: _ops(text) for text in args.op or OPS}
    ops = {name: op for line in lines.values() for name, op in line.items()}
    found = _saved(args.saved)
    asked = {name: op for name, op in ops.items() if name not in found}
    unscored = [
        name
        for name, op in ops.items()
        if args.bits and isinstance(op, AttentionOp) and _without_bits(found.get(name))
    ]
    finder = _finder(args) if asked or unscored else None
    table = Table("op", "keys", "weight", "lowest head", "highest head", "bits", "lost")
    with ThreadPoolExecutor(COMPILERS) as pool:
        waiting = {
            name: pool.submit(_find, args, name, finder.weight, op) for name, op in asked.items()
        }
        for name in ops:
            if name in waiting:
                found[name] = waiting[name].result()
            if not unscored:
                table.result(f"`{name}`", known=found[name], cells=_cells)
    # One after the other: loading a program with cuDNN's attention captures the stream on which
    # other threads' programs run, which then do not.
    for name in ops if unscored else ():
        if name in unscored and isinstance(found[name], Known):
            found[name] = _find(args, name, finder.bits, ops[name], found[name])
        table.result(f"`{name}`", known=found[name], cells=_cells)
    own = next((x.own for x in found.values() if isinstance(x, Known) and x.own), None)
    print("" if own is None else f"\nbits of the run as it is: {own:.4f}")
    points = {
        text: [
            (float(np.mean(one.keys)), float(np.mean(one.weight)))
            for one in map(found.get, line)
            if isinstance(one, Known)
        ]
        for text, line in lines.items()
    }
    points = {text: line for text, line in points.items() if line}
    _print_equal(points)
    _print_heads(lines, found, args.heads_at)
    exit_if(name for name in ops if _is_failure(found[name]))


def _without_bits(known: Known | Unsupported | None) -> bool:
    return known is None or (isinstance(known, Known) and known.bits is None)


def _find(args: argparse.Namespace, name: str, find: Callable, *asked: Any) -> Any:
    """What is found of an op, kept as soon as it is known."""
    found = attempt(find, *asked)
    _save(args.saved, name, found)
    return found


def _ops(text: str) -> dict[str, AttentionOp | int]:
    """The ops that a line names, and for `LARGEST` numbers of keys."""
    return {f"{n} {text}": n for n in N_KEYS} if text == LARGEST else coverage.ops_of(text)


class Finder(NamedTuple):
    """What finds out what is asked of an op, on the layers of a run."""

    weight: Callable[[AttentionOp | int], Known | Unsupported]
    bits: Callable[[AttentionOp, Known], Known]


def _finder(args: argparse.Namespace) -> Finder:
    run = _open(args)
    length = args.length or run.settings["length"]
    batches = run.task.eval_batches("valid", 1, length, length)
    batches = itertools.islice((x for x in batches if x.weights.all()), args.sequences)
    rng = jax.random.key(0)
    layers = [
        layer
        for i, batch in enumerate(batches)
        for layer in coverage.layers(
            run.model, run.params, jnp.asarray(batch.inputs), jax.random.fold_in(rng, i)
        )
    ]
    if not layers:
        raise SettingError(f"length is {length}: the valid split has no text so long")
    print(f"{args.run}, {args.sequences} sequences of {length:,}, {command_line.machine()}")
    truths = [coverage.truth(layer, rng) for layer in layers]
    numbers = sorted({layer.number for layer in layers})

    def of_layer(op, i: int) -> coverage.Found:
        if isinstance(op, int):
            return coverage.largest(truths[i], op)
        return coverage.found(op, layers[i], truths[i], jax.random.fold_in(rng, i))

    def weight(op: AttentionOp | int) -> Known | Unsupported:
        try:
            each = [of_layer(op, i) for i in range(len(layers))]
        except Unsupported as error:  # it is a row of the table, and no failure
            return error
        shares, keys = (
            np.array(x, float).reshape(-1, len(numbers), len(x[0])).mean(axis=0).tolist()
            for x in zip(*each, strict=True)
        )
        return Known(numbers, shares, keys, None, None)

    @functools.cache
    def own() -> float | None:
        return _bits(run, None, args, length)

    def bits(op: AttentionOp, known: Known) -> Known:
        return known._replace(bits=_bits(run, op, args, length), own=own())

    return Finder(weight, bits)


def _saved(path: Path | None) -> dict[str, Known | Unsupported]:
    """What earlier calls found, by op."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    each = map(json.loads, lines)
    return {x["op"]: Unsupported(x["not"]) if "not" in x else Known(**x["found"]) for x in each}


def _save(path: Path | None, name: str, found: Known | Exception) -> None:
    if path and not _is_failure(found):
        known = isinstance(found, Known)
        line = {"found": found._asdict()} if known else {"not": str(found)}
        with path.open("a") as file:
            file.write(json.dumps({"op": name} | line) + "\n")


def _open(args: argparse.Namespace) -> Run:
    from reformax.cli import compilation_cache, config, saved_run
    from reformax.training import loop

    compilation_cache.use()
    saved = saved_run.load(args.run, args.checkpoint, data_dir=args.data_dir)
    task = config.bindings(loop.train, ("task",))["task"]
    if task.translation is not None:
        raise SettingError(f"run is {args.run}, a model of translation: expected a language model")
    vocabulary = task.kept_vocabulary
    if vocabulary is not None:
        vocabulary.keep_in(args.run, begun=True)
    return Run(saved.model, saved.params, task, saved.run)


def _bits(run: Run, op: AttentionOp | None, args: argparse.Namespace, length: int) -> float | None:
    """Bits of the valid split with `op` in the dense layers; None if not asked or no fit."""
    if not args.bits:
        return None
    try:
        model = run.model if op is None else coverage.instead(run.model, op)
    except Unsupported:
        return None
    sizes = dict(batch_size=min(SCORED, run.settings["batch_size"]), length=length)
    result = evaluate(model, run.params, run.task, "valid", max_tokens=args.bits, **sizes)
    return result[metric_name(run.task)]


def _is_failure(known: Any) -> bool:
    """Whether it is an error that says more than that an op does not fit the run."""
    return isinstance(known, Exception) and not isinstance(known, Unsupported)


def _cells(known: Known) -> list[str]:
    figures = [f"{np.mean(known.keys):.1f}"]
    figures += [f"{f(known.weight):.3f}" for f in (np.mean, np.min, np.max)]
    if known.bits is not None:
        figures += [f"{known.bits:.4f}", f"{known.bits - known.own:+.4f}"]
    return figures


def _print_equal(points: dict[str, list[tuple[float, float]]]) -> None:
    rows = {text: coverage.at_equal_keys(line, N_KEYS) for text, line in points.items()}
    n_keys = [n for n in N_KEYS if any(n in row for row in rows.values())]
    if not n_keys:
        return
    table = Table("weight at equal numbers of keys", *map(str, n_keys))
    for text, row in rows.items():
        table.row(f"`{text}`", *(f"{row[n]:.3f}" if n in row else "-" for n in n_keys))


def _print_heads(lines, found: dict[str, Any], n_keys: int) -> None:
    """Each head of each layer at one number of keys, on lines between an op's values."""
    known = {
        text: [one for one in map(found.get, line) if isinstance(one, Known)]
        for text, line in lines.items()
    }
    each = next((one for line in known.values() for one in line), None)
    if each is None:
        return
    rows = []
    for text, line in known.items():
        for i, number in enumerate(each.layers if line else ()):
            heads = [
                coverage.at_equal_keys([(x.keys[i][n], x.weight[i][n]) for x in line], [n_keys])
                for n in range(len(each.weight[0]))
            ]
            if any(heads):
                cells = (f"{x[n_keys]:.3f}" if x else "-" for x in heads)
                rows.append((f"`{text}`", str(number), *cells))
    if rows:
        heads = (f"head {i}" for i in range(len(each.weight[0])))
        table = Table(f"at {n_keys} keys", "layer", *heads)
        for row in rows:
            table.row(*row)


def _flags() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__)
    parser.add_argument("--run", metavar="DIR", help="the folder of a trained language model")
    parser.add_argument("--op", action="append", help=f"with --run (default: {', '.join(OPS)})")
    parser.add_argument("--checkpoint", default="best", help="of --run (default: best)")
    parser.add_argument(
        "--saved", type=Path, metavar="FILE", help="with --run: what is known already"
    )
    parser.add_argument("--data_dir", help="of --run: where its task finds its data")
    positive = dict(type=command_line.positive)
    parser.add_argument("--length", **positive, help="with --run (default: the run's)")
    parser.add_argument("--sequences", **positive, default=2, help="with --run (default: 2)")
    parser.add_argument(
        "--heads_at", **positive, default=256, help="keys of the table of heads (default: 256)"
    )
    parser.add_argument(
        "--bits", **positive, help="with --run: targets of the valid split to score"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _flags().parse_args(argv)
    of_run(args) if args.run else of_clusters(args)
    return 0


def of_clusters(args: argparse.Namespace) -> None:
    """The recall of LSH attention on vectors in clusters."""
    n_hashes = N_HASHES[:2] if args.tiny else N_HASHES
    sizes = (1, 64, 8) if args.tiny else (N_SEEDS, LENGTH, CHUNK_LEN)
    options = dict(zip(("n_seeds", "length", "chunk_len"), sizes, strict=True))
    lines: dict[str, dict[int, float]] = {}
    for noise in NOISES:
        found = [mean_recall(n, noise=noise, **options) for n in n_hashes]
        weight, keys = (
            dict(zip(n_hashes, share, strict=True)) for share in zip(*found, strict=True)
        )
        lines[f"weight, noise {noise:g}"] = weight
    lines[f"keys, noise {noise:g}"] = keys
    table = Table("n_hashes", *map(str, n_hashes))
    for name, shares in lines.items():
        table.row(name, *(f"{share:.3f}" for share in shares.values()))


if __name__ == "__main__":
    sys.exit(errors.exit_code(main))

"""The share of the true attention that LSH attention finds, by the number of hashes.

    python -m benchmarks.recall

prints a table. The vectors lie in clusters, as the queries of a trained
model do. Recall is the share of full shared-QK attention's weight that falls on the keys that LSH
attention shows a query.

    python -m benchmarks.recall --run=DIR

asks the same of other attentions, of the layers of a trained model that see every key. It prints
the mean over layers and heads, and the same at equal numbers of keys. A key that several rounds or
branches show counts once, and one of the future not at all; numbers are means over all queries of a
sequence, and lie on straight lines between the values that were tried. Of as many keys as the
largest weights no choice shows more. What an op carries, such as centroids, first sees the layer's
vectors a few times, and an indexer first learns on them.

    python -m benchmarks.recall --run=DIR --candidates exact hashed pooled --length=131072

asks of the layers of `dsa` what their trained indexers choose among candidates: the milliseconds of
the choice, the share of the exact choice that is found, and that of attention's weight.

`reformax evaluate --kept_mass` has the share of a model's own choice of keys, in a sample.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from benchmarks.harness import choices, command_line, coverage
from benchmarks.harness.calls import COMPILERS, attempt, exit_if
from benchmarks.harness.output import Table
from reformax.cli import errors
from reformax.declared import SettingError, Unsupported
from reformax.ops import (
    AttentionOp,
    asymmetric_lsh,
    dsa,
    hash_sparse,
    local,
    lsh,
    moba,
    nsa,
    routing,
    shared_qk,
    smyrf,
)
from reformax.ops.indexing.candidates import Clustered, Coded, Hashed, Pooled
from reformax.ops.indexing.candidates.base import Candidates

LENGTH, CHUNK_LEN, N_SEEDS = 1024, 64, 8
N_HASHES = (1, 2, 4, 8, 16)
NOISES, NOISE = (0.25, 0.5, 1.0), 0.5
SIZE, N_CLUSTERS = 64, 32
# Of a trained model: numbers of keys to compare at, and what no choice of so many keys exceeds.
N_KEYS = (32, 64, 128, 256, 512, 1024)
LARGEST = "largest weights"
# A query sees chunks of 64 or blocks of 64 more and more.
OPS: dict[str, list[AttentionOp | int]] = {
    LARGEST: list(N_KEYS),
    "lsh": [
        lsh.lsh(chunk_len=64, attend_self_if_alone=False, n_hashes=n) for n in (1, 2, 4, 8, 16)
    ],
    "smyrf": [smyrf.smyrf(chunk_len=64, n_hashes=n) for n in (2, 4, 8, 16, 32)],
    "asymmetric_lsh": [
        asymmetric_lsh.asymmetric_lsh(chunk_len=64, n_hashes=n) for n in (1, 2, 4, 8)
    ],
    "moba": [moba.moba(block_size=64, top_k=n) for n in (2, 4, 8, 16)],
    "nsa": [
        nsa.nsa(compression="mean", independent_kv=False, window=64, n_selected=n)
        for n in (2, 4, 8, 16)
    ],
    "hash_sparse": [hash_sparse.hash_sparse(n_buckets=n) for n in (32, 16, 8, 4, 2)],
    "dsa": [dsa.dsa(top_k=n) for n in (64, 256, 1024)],
    "routing": [routing.routing(decay=0.9, n_clusters=n) for n in (32, 16, 8, 4, 2)],
    "local": [local.local(chunk_len=n) for n in (64, 128, 256, 512)],
}
# What an indexer scores: everything, or candidates of four kinds, more and more of them.
EXACT = "exact"
CANDIDATES: dict[str, list[Candidates | None]] = {
    EXACT: [None],
    "pooled": [Pooled(n_blocks=n) for n in (8, 16, 32, 64)],
    "clustered": [Clustered(n_clusters=n) for n in (2, 4, 8, 16)],
    "hashed": [Hashed(n_hashes=n) for n in (2, 4, 8, 16)],
    "coded": [Coded(n_best=n) for n in (1024, 4096)],
}
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
    would find.
    """
    attend = lsh.lsh(chunk_len=chunk_len, n_hashes=n_hashes)
    exact = shared_qk.shared_qk(attend_self_if_alone=False)
    each = []
    for rng in jax.random.split(jax.random.key(0), n_seeds):
        data_rng, hash_rng = jax.random.split(rng)
        layer = coverage.Layer(0, exact, clustered_queries(data_rng, length, noise), None)
        each.append(coverage.found(attend, layer, hash_rng, causal=causal))
    weight, keys = np.mean(each, axis=(0, 2))
    return float(weight), float(keys / (length - 1) * (2 if causal else 1))


def of_run(args: argparse.Namespace) -> None:
    """What attentions show of a trained model's, at several settings each."""
    layers = _layers(args)
    numbers, rng = len({layer.number for layer in layers}), jax.random.key(0)

    def find(op: AttentionOp | int) -> coverage.Found | Unsupported:
        try:
            each = [
                coverage.found(op, layer, jax.random.fold_in(rng, i))
                for i, layer in enumerate(layers)
            ]
        except Unsupported as error:  # it is a row of the table, and no failure
            return error
        # By layer and head, of all sequences.
        by_head = (np.reshape(x, (-1, numbers, len(x[0]))) for x in zip(*each, strict=True))
        return coverage.Found(*(x.mean(axis=0) for x in by_head))

    table = Table("op", "keys", "weight", "lowest head", "highest head")
    tried = [(name, op) for name in args.only or OPS for op in OPS[name]]
    points: dict[str, list[tuple[float, float]]] = {}
    failed = []
    with ThreadPoolExecutor(COMPILERS) as pool:
        each = pool.map(functools.partial(attempt, find), (op for _, op in tried))
        for (name, op), known in zip(tried, each, strict=True):
            row = f"{op} {LARGEST}" if isinstance(op, int) else f"`{op}`"
            table.result(row, known=known, cells=_cells)
            if isinstance(known, coverage.Found):
                points.setdefault(name, []).append((known.keys.mean(), known.weight.mean()))
            elif not isinstance(known, Unsupported):
                failed.append(row)
    _print_equal(points)
    exit_if(failed)


def of_candidates(args: argparse.Namespace) -> None:
    """What a run's indexers choose among candidates, against all keys."""
    layers, rng = _layers(args, (dsa.dsa,)), jax.random.key(0)
    columns = "ms", "ms / exact", "recall", "weight", "weight / exact", "keys"
    table = Table("candidates", *columns)
    exact: list[float] = []

    def find(candidates: Candidates | None) -> list[float]:
        each = [
            choices.choice(candidates, layer, jax.random.fold_in(rng, i), args.repeats)
            for i, layer in enumerate(layers)
        ]
        return [*map(float, np.mean([(x.times.queued_ms, *x[1:]) for x in each], axis=0))]

    def cells(known: list[float]) -> list[str]:
        ms, recall, weight, keys = known
        time, held = (f"{x:.3f}" for x in np.divide((ms, weight), exact)) if exact else "--"
        return [f"{ms:.3f}", time, f"{recall:.3f}", f"{weight:.3f}", held, f"{keys:.0f}"]

    failed = []
    for name in args.candidates:
        for candidates in CANDIDATES[name]:
            known = attempt(find, candidates)
            row = f"`{candidates}`" if candidates else EXACT
            table.result(row, known=known, cells=cells)
            if candidates is None and not isinstance(known, Exception):
                exact = [known[0], known[2]]
            failed += [row] if isinstance(known, Exception) else []
    exit_if(failed)


def _layers(
    args: argparse.Namespace, kinds: tuple[type[AttentionOp], ...] = coverage.EXACT
) -> list[coverage.Layer]:
    """The layers of the run of these kinds, of each sequence."""
    from reformax.cli import compilation_cache, parsed, saved_run
    from reformax.training import loop

    compilation_cache.use()
    saved = saved_run.load(args.run, args.checkpoint, data_dir=args.data_dir)
    task = parsed.bindings(loop.train, ("task",))["task"]
    if task.translation is not None:
        raise SettingError(f"run is {args.run}, a model of translation: expected a language model")
    vocabulary = task.kept_vocabulary
    if vocabulary is not None:
        vocabulary.keep_in(args.run, begun=True)
    length = args.length or saved.run["length"]
    batches = task.eval_batches("valid", 1, length, length)
    batches = itertools.islice((x for x in batches if x.weights.all()), args.sequences)
    rng = jax.random.key(0)
    layers = [
        layer
        for i, batch in enumerate(batches)
        for layer in coverage.layers(
            saved.model, saved.params, jnp.asarray(batch.inputs), jax.random.fold_in(rng, i), kinds
        )
    ]
    if not layers:
        raise SettingError(f"length is {length}: the valid split has no text so long")
    print(f"{args.run}, {args.sequences} sequences of {length:,}, {command_line.machine()}")
    return layers


def _cells(known: coverage.Found) -> list[str]:
    shares = (f"{f(known.weight):.3f}" for f in (np.mean, np.min, np.max))
    return [f"{np.mean(known.keys):.1f}", *shares]


def _print_equal(points: dict[str, list[tuple[float, float]]]) -> None:
    rows = {text: coverage.at_equal_keys(line, N_KEYS) for text, line in points.items()}
    n_keys = [n for n in N_KEYS if any(n in row for row in rows.values())]
    if not n_keys:
        return
    table = Table("weight at equal numbers of keys", *map(str, n_keys))
    for text, row in rows.items():
        table.row(f"`{text}`", *(f"{row[n]:.3f}" if n in row else "-" for n in n_keys))


def _flags() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__, repeats=3)
    parser.add_argument("--run", metavar="DIR", help="the folder of a trained language model")
    parser.add_argument("--only", nargs="+", choices=OPS, help="with --run: these attentions")
    text = "with --run: what its indexers choose among such candidates"
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, help=text)
    parser.add_argument("--checkpoint", default="best", help="of --run (default: best)")
    parser.add_argument("--data_dir", help="of --run: where its task finds its data")
    positive = dict(type=command_line.positive)
    parser.add_argument("--length", **positive, help="with --run (default: the run's)")
    parser.add_argument("--sequences", **positive, default=2, help="with --run (default: 2)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = _flags()
    args = flags.parse_args(argv)
    of_text = "run", "rows", "checkpoint", "data_dir", "length", "sequences"
    if not args.run:
        command_line.check_read(flags, args, ("tiny", "rows"), "without --run")
        of_clusters(args)
    elif args.candidates:
        command_line.check_read(
            flags, args, (*of_text, "candidates", "repeats"), "with --candidates"
        )
        of_candidates(args)
    else:
        command_line.check_read(flags, args, (*of_text, "only"), "without --candidates")
        of_run(args)
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

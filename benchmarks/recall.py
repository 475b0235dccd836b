"""The share of the true attention that LSH attention finds, by the number of hashes.

    python -m benchmarks.recall

prints a table and draws docs/recall.png. The vectors lie in clusters, as the queries of a trained
model do. Recall is the share of full shared-QK attention's weight that falls on the keys that LSH
attention shows a query.

    python -m benchmarks.recall --run=DIR

asks the same of any op, of the layers of a trained model that see every key: the share of their
weight that falls on the keys that the op would show them. It prints the mean over layers and heads,
the same at equal numbers of keys that a query sees, and each head. With --bits=TARGETS it also
scores the model with the op in the place of these layers' attention, without training: bits that
are lost. What an op carries, such as centroids, first sees the layer's vectors a few times, and
an indexer first learns on them; such ops have no bits. Ops are calls, as in
--op='lsh.lsh(chunk_len=64, n_hashes={1, 2, 4})'; a set is values to try. The figure is
DIR/recall.png.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from benchmarks.harness import command_line, coverage
from benchmarks.harness.calls import COMPILERS, attempt_each, exit_if
from benchmarks.harness.output import Table, plot
from reformax.declared import SettingError, Unsupported
from reformax.ops import AttentionOp, lsh
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention
from reformax.training.evaluation import evaluate
from reformax.training.loss import metric_name

LENGTH, CHUNK_LEN, N_SEEDS = 1024, 64, 8
N_HASHES = (1, 2, 4, 8, 16)
NOISES = (0.25, 0.5, 1.0)
SIZE, N_CLUSTERS = 64, 32
PLOT = Path("docs/recall.png")
# Of a trained model, where a query sees chunks of 64 or blocks of 64 more and more.
OPS = (
    "lsh.lsh(chunk_len=64, own=False, n_hashes={1, 2, 4, 8, 16})",
    "asymmetric_lsh.asymmetric_lsh(chunk_len=64, n_hashes={1, 2, 4, 8, 16})",
    "smyrf.smyrf(chunk_len=64, n_hashes={1, 2, 4, 8, 16})",
    "moba.moba(block_size=64, top_k={2, 4, 8, 16})",
    "nsa.nsa(compression='mean', own_projections=False, window=64, n_selected={2, 4, 8, 16})",
    "hash_sparse.hash_sparse(n_buckets={64, 32, 16, 8, 4})",
    "dsa.dsa(top_k={64, 128, 256, 512})",
    "routing.routing(decay=0.9, n_clusters={64, 32, 16, 8, 4})",
    "local.local(chunk_len={64, 128, 256, 512})",
)
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
    noise: float = 0.5,
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


def of_run(args: argparse.Namespace) -> None:
    """The recall of ops on a trained model."""
    lines = {text: coverage.ops_of(text) for text in args.op or OPS}
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

    def find(op):
        try:
            each = [
                coverage.found(op, layer, jax.random.fold_in(rng, i))
                for i, layer in enumerate(layers)
            ]
        except Unsupported as error:  # it is a row of the table, and no failure
            return error
        weight, keys = map(np.array, zip(*each, strict=True))
        return (weight, keys), _bits(run, op, args, length) if args.bits else None

    ops = {name: op for line in lines.values() for name, op in line.items()}
    own = _bits(run, None, args, length) if args.bits else None
    found = attempt_each(find, ops, COMPILERS)
    _print_ops(found, own)
    points = {
        text: [
            (float(np.mean(found[name][0][1])), float(np.mean(found[name][0][0])))
            for name in line
            if not isinstance(found[name], Exception)
        ]
        for text, line in lines.items()
    }
    points = {text: line for text, line in points.items() if line}
    _print_equal(points, length)
    _print_heads(lines, found, [layer.number for layer in layers])
    label, title = "share of the attention weight", f"{args.run}, length {length:,}"
    axes = dict(yscale="linear", xlabel="keys that a query sees", ylim=(0, 1.02))
    path = Path(args.run, "recall.png") if args.plot == PLOT else args.plot
    plot(path, {label: {t: dict(sorted(x)) for t, x in points.items()}}, title, **axes)
    exit_if(name for name, x in found.items() if _is_failure(x))


def _open(args: argparse.Namespace) -> Run:
    from reformax.cli import compilation_cache, config, saved_run
    from reformax.training import loop, loss

    compilation_cache.use()
    saved = saved_run.load(args.run, args.checkpoint, data_dir=args.data_dir)
    task = config.bindings(loop.train, ("task",))["task"]
    if task.translation is not None:
        raise SettingError(f"run is {args.run}, a model of translation: expected a language model")
    vocabulary = loss.vocabulary_of(task)
    if vocabulary is not None:
        vocabulary.keep_in(args.run, begun=True)
    return Run(saved.model, saved.params, task, saved.run)


def _bits(run: Run, op: AttentionOp | None, args: argparse.Namespace, length: int) -> float | None:
    """Bits of the valid split with `op` in the dense layers; None where it does not fit them."""
    try:
        model = run.model if op is None else coverage.instead(run.model, op)
    except Unsupported:
        return None
    sizes = dict(batch_size=run.settings["batch_size"], length=length)
    result = evaluate(model, run.params, run.task, "valid", max_tokens=args.bits, **sizes)
    return result[metric_name(run.task)]


def _is_failure(known: Any) -> bool:
    """Whether it is an error that says more than that an op does not fit the run."""
    return isinstance(known, Exception) and not isinstance(known, Unsupported)


def _print_ops(found: dict[str, Any], own: float | None) -> None:
    names = ["op", "keys", "weight", "lowest head", "highest head"]
    table = Table(*names, *([] if own is None else ["bits", "lost"]))

    def cells(known):
        (weight, keys), bits = known
        figures = [f"{np.mean(keys):.1f}"]
        figures += [f"{f(weight):.3f}" for f in (np.mean, np.min, np.max)]
        if bits is not None:
            figures += [f"{bits:.4f}", f"{bits - own:+.4f}"]
        return figures

    if own is not None:
        table.row("the run's own", "", "1", "1", "1", f"{own:.4f}", "")
    for name, known in found.items():
        table.result(f"`{name}`", known=known, cells=cells)


def _print_equal(points: dict[str, list[tuple[float, float]]], length: int) -> None:
    n_keys = [2**i for i in range(3, length.bit_length())]
    rows = {text: coverage.at_equal_keys(line, n_keys) for text, line in points.items()}
    n_keys = [n for n in n_keys if any(n in row for row in rows.values())]
    table = Table("weight at equal numbers of keys", *map(str, n_keys))
    for text, row in rows.items():
        table.row(f"`{text}`", *(f"{row[n]:.3f}" if n in row else "-" for n in n_keys))


def _print_heads(lines, found: dict[str, Any], numbers: list[int]) -> None:
    """Each head of each layer, for the op of a line that shows the most keys."""
    known = {
        name: found[name][0]
        for names in map(list, lines.values())
        for name in names[-1:]
        if not isinstance(found[name], Exception)
    }
    n_heads = max((weight.shape[1] for weight, _ in known.values()), default=0)
    table = Table("op", "layer", *(f"head {i}" for i in range(n_heads)))
    for name, (weight, _) in known.items():
        for number in sorted(set(numbers)):
            mean = weight[[n == number for n in numbers]].mean(axis=0)
            table.row(f"`{name}`", str(number), *(f"{x:.3f}" for x in mean))


def _flags() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__, plot=PLOT)
    parser.add_argument("--run", metavar="DIR", help="the folder of a trained language model")
    parser.add_argument("--op", action="append", help=f"with --run (default: {', '.join(OPS)})")
    parser.add_argument("--checkpoint", default="best", help="of --run (default: best)")
    parser.add_argument("--data_dir", help="of --run: where its task finds its data")
    positive = dict(type=command_line.positive)
    parser.add_argument("--length", **positive, help="with --run (default: the run's)")
    parser.add_argument("--sequences", **positive, default=2, help="with --run (default: 2)")
    parser.add_argument(
        "--bits", **positive, help="with --run: targets of the valid split to score"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = _flags().parse_args(argv)
    of_run(args) if args.run else of_clusters(args)


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
    blind = f"keys, noise {noise:g}"
    lines[blind] = keys
    table = Table("n_hashes", *map(str, n_hashes))
    for name, shares in lines.items():
        table.row(name, *(f"{share:.3f}" for share in shares.values()))
    label = "share that LSH attention shows"
    title = (
        f"{options['length']:,} vectors in {N_CLUSTERS} clusters, chunks of "
        f"{options['chunk_len']}, {options['n_seeds']} draws"
    )
    styles = {blind: dict(color="k", ls="--")}
    axes = dict(yscale="linear", xlabel="n_hashes", ylim=(0, 1.02))
    plot(args.plot, {label: lines}, title, styles=styles, **axes)


if __name__ == "__main__":
    main()

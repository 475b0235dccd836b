"""The share of the true attention that LSH attention finds, by the number of hashes.

    python -m benchmarks.recall

prints a table and draws docs/recall.png. The vectors lie in clusters, as the queries of a trained
model do. Recall is the share of full shared-QK attention's weight that falls on the keys that LSH
attention shows a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from benchmarks.harness import command_line
from benchmarks.harness.output import Table, plot
from reformax.ops import lsh
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention

LENGTH, CHUNK_LEN, N_SEEDS = 1024, 64, 8
N_HASHES = (1, 2, 4, 8, 16)
NOISES = (0.25, 0.5, 1.0)
SIZE, N_CLUSTERS = 64, 32
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
    def shares(rng: PRNGKeyArray) -> tuple[Float[Array, ""], Float[Array, ""]]:
        data_rng, hash_rng = jax.random.split(rng)
        q = clustered_queries(data_rng, length, noise)
        truth = reference_attention(q, length_normalize(q), names, mask)
        shown = attend(q, None, names, causal=causal, rng=hash_rng) > 0
        return jnp.mean(jnp.sum(truth, where=shown, axis=-1)), jnp.sum(shown) / jnp.sum(mask)

    each = [shares(rng) for rng in jax.random.split(jax.random.key(0), n_seeds)]
    weight, keys = np.mean(each, axis=0)
    return float(weight), float(keys)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot=Path("docs/recall.png"))
    args = parser.parse_args(argv)
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

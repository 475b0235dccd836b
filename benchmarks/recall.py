"""The share of the true attention that LSH attention finds, by the number of hashes.

    python -m benchmarks.recall

prints a table and draws docs/recall.png. The vectors lie in clusters, as the queries of a trained
model do. Recall is the share of full shared-QK attention's weight that falls on the keys that LSH
attention shows a query.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from benchmarks.harness import command_line, plot
from benchmarks.harness.processes import ROOT
from benchmarks.harness.table import Table
from reformax.ops import lsh
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention

N_HASHES = (1, 2, 4, 8, 16)
NOISES = (0.25, 0.5, 1.0)
LENGTH, SIZE, CHUNK_LEN, N_CLUSTERS, N_SEEDS = 1024, 64, 64, 32, 8


def clustered_queries(
    rng: PRNGKeyArray,
    length: int,
    size: int,
    *,
    n_clusters: int = N_CLUSTERS,
    noise: float = 0.5,
    sharpness: float = 10.0,
) -> Float[Array, "1 T 1 H"]:
    """Unit vectors around random centres, times `sharpness`.

    Args:
      rng: draws the centres, the members of the clusters and the noise.
      length: the number of vectors, T.
      size: H.
      n_clusters: the number of centres.
      noise: the noise's length relative to the centre's: 1 is an angle of 45 degrees on average.
      sharpness: the length of a query. With shared queries and keys a logit is this times the
        cosine between them.
    """
    centre_rng, member_rng, noise_rng = jax.random.split(rng, 3)
    centres = jax.random.normal(centre_rng, (n_clusters, size)) / math.sqrt(size)
    member = jax.random.randint(member_rng, (length,), 0, n_clusters)
    x = centres[member] + noise * jax.random.normal(noise_rng, (length, size)) / math.sqrt(size)
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return sharpness * x[None, :, None]


def recall(
    rng: PRNGKeyArray,
    n_hashes: int,
    *,
    length: int = LENGTH,
    size: int = SIZE,
    chunk_len: int = CHUNK_LEN,
    noise: float = 0.5,
    causal: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The shares of full shared-QK attention's weight, and of the keys, that LSH attention shows.

    Both are averaged over queries. The second is the weight that a blind hash would find. Values
    that are the rows of the identity make an op's output its attention matrix; LSH attention shows
    a key where that is above 0.
    """
    data_rng, hash_rng = jax.random.split(rng)
    q = clustered_queries(data_rng, length, size, noise=noise)
    mask = except_self(visibility(length, length, causal=causal))
    names = jnp.eye(length)[None, :, None]
    truth = reference_attention(q, length_normalize(q), names, mask)
    attend = lsh.lsh(chunk_len=chunk_len, n_hashes=n_hashes)
    shown = attend(q, None, names, causal=causal, rng=hash_rng) > 0
    return jnp.mean(jnp.sum(truth, where=shown, axis=-1)), jnp.sum(shown) / jnp.sum(mask)


def mean_recall(n_hashes: int, *, n_seeds: int = N_SEEDS, **kwargs) -> tuple[float, float]:
    """`recall`, averaged over data and hashes."""
    one = jax.jit(functools.partial(recall, n_hashes=n_hashes, **kwargs))
    each = [one(rng) for rng in jax.random.split(jax.random.key(0), n_seeds)]
    weight, keys = np.mean(each, axis=0)
    return float(weight), float(keys)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__, plot="where to draw recall by the number of hashes")
    parser.set_defaults(plot=ROOT / "docs" / "recall.png")
    args = parser.parse_args(argv)
    n_hashes = N_HASHES[:2] if args.tiny else N_HASHES
    options = dict(n_seeds=1, length=64, chunk_len=8) if args.tiny else dict(n_seeds=N_SEEDS)
    print(
        f"LSH attention's share of full attention's weight: {options.get('length', LENGTH)} tokens "
        f"in {N_CLUSTERS} clusters, mean of {options['n_seeds']} draws"
    )
    table = Table("n_hashes", *map(str, n_hashes))
    with plot.figure(args.plot, figsize=(5, 3.5)) as (_, axes):
        for noise in NOISES:
            shares = [mean_recall(n, noise=noise, **options) for n in n_hashes]
            for i, (name, style) in enumerate((("weight", "o-"), ("keys", "k--"))):
                if name == "weight" or noise == NOISES[-1]:
                    ys = [share[i] for share in shares]
                    table.row(f"{name}, noise {noise:g}", *(f"{y:.3f}" for y in ys))
                    axes.plot(n_hashes, ys, style, label=f"{name}, noise {noise:g}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(n_hashes, [str(n) for n in n_hashes])
        axes.set(xlabel="n_hashes", ylabel="share that LSH attention shows", ylim=(0, 1.02))
        axes.legend()
    print(f"\nThe figure is in {args.plot}.")


if __name__ == "__main__":
    main()

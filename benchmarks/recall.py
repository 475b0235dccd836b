"""How much of the true attention LSH attention finds, by its number of hashes.

    python -m benchmarks.recall

prints a table and draws docs/recall.png. The vectors lie in clusters, as the queries of a trained
model do; the true attention is full shared-QK attention, and what is counted is the share of its
weight that falls on keys which LSH shows the query.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from reformax.ops import lsh
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention

matplotlib.use("Agg")
from matplotlib import pyplot as plt

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
      rng: the source of the centres, of who belongs where and of the noise.
      length: the number of vectors, T.
      size: H.
      n_clusters: how many centres there are.
      noise: the noise's length beside its centre's: 1 is an angle of 45 degrees on average.
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
    """What LSH shows: the share of full shared-QK attention's weight, and that of the keys.

    Both are averaged over queries, and the second is what the first would be if hashing were blind.
    They are measured through the ops alone. Values that name their positions, the rows of the
    identity, make an op's output its attention matrix, and LSH shows what has weight there.
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


def main() -> None:
    print(
        f"What LSH attention shows of full attention: {LENGTH} tokens in {N_CLUSTERS} clusters, "
        f"chunks of {CHUNK_LEN}, mean of {N_SEEDS} draws\n"
    )
    print("n_hashes".ljust(20) + "".join(f"{n:8d}" for n in N_HASHES))
    _, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for noise in NOISES:
        shares = [mean_recall(n, noise=noise) for n in N_HASHES]
        lines = [("weight", "o-")] + ([("keys", "k--")] if noise == NOISES[-1] else [])
        for what, style in lines:
            ys = [share[what == "keys"] for share in shares]
            name = f"{what}, noise {noise:g}"
            print(name.ljust(20) + "".join(f"{y:8.3f}" for y in ys))
            axes.plot(N_HASHES, ys, style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(N_HASHES, [str(n) for n in N_HASHES])
    axes.set(xlabel="n_hashes", ylabel="share that LSH attention shows", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(__file__).parent.parent / "docs" / "recall.png"
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path, dpi=150)
    print(f"\nThe figure is in {path}.")


if __name__ == "__main__":
    main()

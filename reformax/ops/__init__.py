"""Attention algorithms as pure functions: one module each, arrays in, arrays out.

    from reformax.ops import lsh
    attend = lsh.lsh(n_hashes=4)
    out = attend(qk, None, v, causal=True, rng=jax.random.key(0))

Importing this package needs JAX alone.
"""

from reformax.ops import (
    asymmetric_lsh,
    block_sparse,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    moba,
    nsa,
    nystromformer,
    performer,
    retention,
    routing,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.base import AttentionOp
from reformax.ops.calls.dims import Dims

__all__ = [
    "asymmetric_lsh",
    "AttentionOp",
    "Dims",
    "block_sparse",
    "dense",
    "dsa",
    "flash",
    "gated_delta",
    "gated_linear",
    "hash_sparse",
    "kda",
    "linear",
    "linformer",
    "local",
    "long_short",
    "longformer",
    "lsh",
    "memory_efficient",
    "moba",
    "nsa",
    "nystromformer",
    "performer",
    "retention",
    "routing",
    "shared_qk",
    "sinks",
    "smyrf",
]

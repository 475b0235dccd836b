"""What a row's op has to compute, in float64: by the oracle, or by the row's own reference."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from reformax.ops.softmax.dropout import dropout_mask
from tests.helpers import with_x64
from tests.ops import oracle
from tests.ops.inputs import Inputs
from tests.ops.rows import LONGEST, Row, Shape, visible

# Of dropout, a query: those of positions, and from the end on those of keys at no position.
ADDRESSES = 2 * LONGEST


def kept_weights(seed: np.ndarray, rate: float, n_rows: int, n_heads: int, n_queries: int):
    """`Asked.keep` of dropout that is drawn by a seed."""
    batch, head, query, _ = np.ogrid[:n_rows, :n_heads, :n_queries, :1]
    addresses = np.concatenate([np.arange(LONGEST), np.arange(-LONGEST, 0)])
    return dropout_mask(seed, rate, batch, head, query, addresses)


class Asked(NamedTuple):
    """A call of a row's op."""

    row: Row
    options: dict[str, Any]
    plan: Any
    shape: Shape
    causal: bool
    segment_ids: Any
    keep: np.ndarray  # [B, N, T, ADDRESSES]: the factor of dropout at each address

    def counts(self) -> np.ndarray:
        """How many times each query counts each key."""
        return self.row.counts(self.options, self.plan, self.shape, self.causal, self.segment_ids)


def expected(asked: Asked, x: Inputs, bias, d_out):
    """The output, and the gradients of the inputs, which hold the op's weights, and of the bias."""
    if "scale_by_length" not in asked.options:
        return _expected(asked, x, bias, d_out)
    n_keys = visible(asked.shape, asked.causal, asked.segment_ids).sum(axis=-1)  # [B, N, T]
    factor = asked.options["scale_by_length"] * np.log(np.maximum(n_keys, 2))
    factor = np.swapaxes(factor, 1, 2)[..., None]
    out, (gradients, d_bias) = _expected(asked, x._replace(q=x.q * factor), bias, d_out)
    return out, (gradients._replace(q=gradients.q * factor), d_bias)


def _expected(asked: Asked, x: Inputs, bias, d_out):
    """`expected` without `scale_by_length`."""
    if asked.row.reference is None:
        added = 0.0 if bias is None else bias.astype(np.float64)
        keep = asked.keep[..., : asked.shape.n_keys]
        cap = asked.options.get("soft_cap")
        out, gradients = oracle.attention(*x[:3], asked.counts(), keep, d_out, added, cap)
        *d_qkv, d_bias = gradients
        return out, (Inputs(*d_qkv), d_bias)
    options = asked.options | {"causal": asked.causal}
    mask = visible(asked.shape, asked.causal, asked.segment_ids)
    with with_x64():
        wide = jax.tree.map(lambda y: np.asarray(y, np.float64), x)
        run = _compiled(asked.row.reference, tuple(options.items()))
        out, gradients = run(asked.plan, mask, asked.keep, wide, d_out)
    return np.asarray(out), (gradients, None)


@functools.lru_cache(maxsize=64)
def _compiled(reference, options):
    """`(plan, mask, keep, x, d_out) -> (out, gradients)`: compiled once for the same sizes.

    The plan is an argument, for the calls differ by it.
    """

    @jax.jit
    def run(plan, mask, keep, x, d_out):
        def attend(x):
            return reference(dict(options), x.params, plan, x[:3], x.extra_projections, mask, keep)

        out, vjp = jax.vjp(attend, x)
        return out, *vjp(d_out)

    return run

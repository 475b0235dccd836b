"""What a row's op has to compute, in float64: by the oracle, or by the row's own reference."""

from typing import Any, NamedTuple

import jax
import numpy as np

from tests.helpers import with_x64
from tests.ops import oracle
from tests.ops.inputs import Inputs
from tests.ops.rows import LONGEST, Row, Shape, visible

# Of dropout, a query. An op may have other keys besides the positions'.
ADDRESSES = 2 * LONGEST


class Asked(NamedTuple):
    """A call of a row's op."""

    row: Row
    options: dict[str, Any]
    plan: Any
    shape: Shape
    causal: bool
    segments: Any
    keep: np.ndarray  # [B, N, T, ADDRESSES]: the factor of dropout at each address

    def counts(self) -> np.ndarray:
        """How many times each query counts each key."""
        return self.row.counts(self.options, self.plan, self.shape, self.causal, self.segments)


def expected(asked: Asked, x: Inputs, bias, d_out):
    """The output, and the gradients of the inputs, which hold the op's weights, and of the bias."""
    if asked.row.reference is None:
        added = 0.0 if bias is None else bias.astype(np.float64)
        keep = asked.keep[..., : asked.shape.n_keys]
        out, gradients = oracle.attention(*x[:3], asked.counts(), keep, d_out, added)
        *d_qkv, d_bias = gradients
        return out, (Inputs(*d_qkv), d_bias)
    mask = visible(asked.shape, asked.causal, asked.segments)
    with with_x64():
        wide = jax.tree.map(lambda y: np.asarray(y, np.float64), x)

        @jax.jit
        def run(x, d_out):
            def attend(x):
                more = x.extras, mask, asked.keep
                options = asked.options | {"causal": asked.causal}
                return asked.row.reference(options, x.params, asked.plan, x[:3], *more)

            out, vjp = jax.vjp(attend, x)
            return out, *vjp(d_out)

        out, gradients = run(wide, d_out)
    return np.asarray(out), (gradients, None)

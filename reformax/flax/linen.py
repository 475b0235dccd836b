"""`Attention` for `flax.linen`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from reformax.flax import heads_of, nan_unless_mask, seen, source_of
from reformax.ops.base import AttentionOp
from reformax.ops.masking.masks import SegmentIds


class Attention(nn.Module):
    """Multi-head attention around any algorithm: projections, heads, dropout on the weights.

    Weights have the names of flax's own module: `query`, `key`, `value`, `out`. There is no `key`
    where the algorithm makes its keys of the queries. Hashes and dropout are drawn from the rng
    named "attention". Without one, an algorithm that draws no hashes drops by the rng "dropout".

    Attributes:
      op: the algorithm, such as `lsh.lsh()`.
      num_heads: number of heads.
      qkv_features: the size of all heads together; None: that of the input.
      out_features: the size of the output; None: that of the input.
      causal: whether a position sees only itself and what came before it.
      dropout_rate: the rate at which attention weights are dropped.
      use_bias: whether the projections have biases.
      dtype: of the arithmetic; None: that of the input and weights.
      param_dtype: of the weights.
    """

    op: AttentionOp
    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    causal: bool = False
    dropout_rate: float = 0.0
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "B T D"],
        inputs_kv: Float[Array, "B S E"] | None = None,
        *,
        mask: ArrayLike | None = None,
        segment_ids: SegmentIds | None = None,
        deterministic: bool = False,
    ) -> Float[Array, "B T F"]:
        """Attention to `inputs_kv`, or to `inputs_q` itself.

        Args:
          inputs_q: what queries are made of.
          inputs_kv: what keys and values are made of, for an algorithm that attends across.
          mask: True or 1 where a key may be seen, False or 0 elsewhere.
          segment_ids: ids of the tokens, as in `reformax.ops`.
          deterministic: whether nothing is dropped, and the algorithm uses its settings for
            evaluation.

        Raises:
          ValueError: a shape does not fit.
          SettingError: a mask of other numbers than 0 and 1.
          NotImplementedError: the algorithm cannot honour the mask, or attend across.
        """
        heads = heads_of(self.op, self.num_heads, self.qkv_features or inputs_q.shape[-1])
        options = dict(use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype)

        def project(name, x):
            return nn.DenseGeneral(heads, name=name, **options)(x)

        across = source_of(self.op, inputs_q, inputs_kv)
        rate = 0.0 if deterministic else self.dropout_rate
        hashes = self.op.plans == "draws"
        stream = "attention" if hashes or self.has_rng("attention") else "dropout"
        attended = self.op(
            project("query", inputs_q),
            None if self.op.shared_qk else project("key", across),
            project("value", across),
            causal=self.causal,
            segment_ids=segment_ids,
            mask=seen(mask),
            dropout=rate,
            rng=self.make_rng(stream) if hashes or rate > 0.0 else None,
            train=not deterministic,
        )
        features = self.out_features or inputs_q.shape[-1]
        return nn.DenseGeneral(features, axis=(-2, -1), name="out", **options)(
            nan_unless_mask(attended, mask)
        )

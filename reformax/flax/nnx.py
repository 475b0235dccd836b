"""`Attention` for `flax.nnx`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike, Float

from reformax.flax import heads_of, nan_unless_mask, seen, source_of
from reformax.ops.base import AttentionOp
from reformax.ops.masking.masks import SegmentIds


class Attention(nnx.Module):
    """Multi-head attention around any algorithm: projections, heads, dropout on the weights.

    Weights have the names of flax's own module: `query`, `key`, `value`, `out`. `key` is None where
    the algorithm makes its keys of the queries. `eval()` and `train()` of a model, and `nnx.view`,
    set `deterministic`: nothing is dropped, and the algorithm uses its settings for evaluation.

    Args:
      op: the algorithm, such as `lsh.lsh()`.
      num_heads: number of heads.
      in_features: the size of the input.
      qkv_features: the size of all heads together; None: that of the input.
      out_features: the size of the output; None: that of the input.
      in_kv_features: the size of the input of keys and values; None: that of the input.
      causal: whether a position sees only itself and what came before it.
      dropout_rate: the rate at which attention weights are dropped.
      deterministic: as `eval()` sets it.
      use_bias: whether the projections have biases.
      dtype: of the arithmetic; None: that of the input and weights.
      param_dtype: of the weights.
      rngs: of the weights; hashes and dropout are drawn from its stream "attention". Without one,
        an algorithm that draws no hashes drops by the stream "dropout".
    """

    def __init__(
        self,
        op: AttentionOp,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        in_kv_features: int | None = None,
        *,
        causal: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        heads = heads_of(op, num_heads, qkv_features or in_features)
        options = dict(use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        across = in_kv_features or in_features
        self.op = op
        self.causal, self.dropout_rate, self.deterministic = causal, dropout_rate, deterministic
        self.query = nnx.LinearGeneral(in_features, heads, **options)
        self.key = None if op.shared_qk else nnx.LinearGeneral(across, heads, **options)
        self.value = nnx.LinearGeneral(across, heads, **options)
        features = out_features or in_features
        self.out = nnx.LinearGeneral(heads, features, axis=(-2, -1), **options)
        hashes = op.plans == "draws"
        stream = "attention" if hashes or "attention" in rngs else "dropout"
        self.rngs = getattr(rngs, stream).fork() if hashes or dropout_rate > 0.0 else None

    def __call__(
        self,
        inputs_q: Float[Array, "B T D"],
        inputs_kv: Float[Array, "B S E"] | None = None,
        *,
        mask: ArrayLike | None = None,
        segment_ids: SegmentIds | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T F"]:
        """Attention to `inputs_kv`, or to `inputs_q` itself.

        Args:
          inputs_q: what queries are made of.
          inputs_kv: what keys and values are made of, for an algorithm that attends across.
          mask: True or 1 where a key may be seen, False or 0 elsewhere.
          segment_ids: ids of the tokens, as in `reformax.ops`.
          deterministic: overrides the module's; None: the module's.

        Raises:
          ValueError: a shape does not fit.
          SettingError: a mask of other numbers than 0 and 1.
          NotImplementedError: the algorithm cannot honour the mask, or attend across.
        """
        across = source_of(self.op, inputs_q, inputs_kv)
        deterministic = self.deterministic if deterministic is None else deterministic
        rate = 0.0 if deterministic else self.dropout_rate
        draws = rate > 0.0 or self.op.plans == "draws"
        attended = self.op(
            self.query(inputs_q),
            None if self.key is None else self.key(across),
            self.value(across),
            causal=self.causal,
            segment_ids=segment_ids,
            mask=seen(mask),
            dropout=rate,
            rng=self.rngs() if draws else None,
            train=not deterministic,
        )
        return self.out(nan_unless_mask(attended, mask))

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `nnx.view(model, deterministic=...)` calls.

        Args:
          deterministic: whether nothing is dropped; None: as before.
        """
        if deterministic is not None:
            self.deterministic = deterministic

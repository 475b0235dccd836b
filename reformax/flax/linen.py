"""`Attention` for `flax.linen`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from reformax.declared import SettingError
from reformax.flax.heads import (
    attend,
    check_decodes,
    decode,
    projection_options,
    projections_of,
    refuse_in_decoding,
    shapes_of_weights,
    sizes_of,
    source_of,
)
from reformax.ops.base import AttentionOp, Dims
from reformax.ops.calls.dims import Projection
from reformax.ops.masking.masks import SegmentIds


class Attention(nn.Module):
    """Multi-head attention around any algorithm: projections, heads, dropout on the weights.

    Weights have the names of flax's own module: `query`, `key`, `value`, `out`. There is no `key`
    where the algorithm makes its keys of the queries. Further projections that an algorithm reads,
    such as gates, have their own names, and its own weights are `op`. Hashes and dropout are drawn
    from the rng named "attention". Without one, an algorithm that draws no hashes drops by the rng
    "dropout".

    With `max_decode_length` the module decodes, and the collection "cache" must be mutable: without
    a cache a call reads a prompt, and each later call reads one more token of each row, or several
    if the algorithm carries a state.

    Attributes:
      op: the algorithm, such as `lsh.lsh()`.
      num_heads: number of heads.
      qkv_features: the size of `num_heads` heads of queries; None: that of the input.
      out_features: the size of the output; None: that of the input.
      num_kv_heads: heads of keys and values, each for `num_heads / num_kv_heads` heads of queries
        (Ainslie et al. 2023); None: `num_heads`.
      num_qk_heads: heads of queries and keys, each for `num_heads / num_qk_heads` heads of values,
        as in Mamba 2 and Qwen3-Next; None: `num_heads`.
      causal: whether a position sees only itself and what came before it.
      use_rotary: whether queries and keys are rotated by their position (Su et al. 2021).
      rotary_base: the longest wavelength of these rotations is `2 pi rotary_base`.
      max_decode_length: how many positions the cache has room for; None: the module does not
        decode.
      dropout_rate: the rate at which attention weights are dropped.
      use_bias: whether the projections have biases.
      dtype: of the arithmetic; None: that of the input and weights.
      param_dtype: of the projections' weights; the algorithm's own are float32.
    """

    op: AttentionOp
    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    num_qk_heads: int | None = None
    causal: bool = False
    use_rotary: bool = False
    rotary_base: float = 10_000.0
    max_decode_length: int | None = None
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
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        deterministic: bool = False,
    ) -> Float[Array, "B T F"]:
        """Attention to `inputs_kv`, or to `inputs_q` itself.

        Args:
          inputs_q: what queries are made of.
          inputs_kv: what keys and values are made of, for an algorithm that attends across.
          mask: True or 1 where a key may be seen, False or 0 elsewhere: of keys, `[B, S]`, or
            `[B, N, T, S]` with axes of 1 that are shared, see `reformax.flax`.
          segment_ids: ids of the tokens `[B, T]`, or a pair, as in `reformax.ops`.
          positions: by which `use_rotary` rotates; None: 0 to T - 1.
          lengths: in decoding, the number of tokens of each row that are read; None: all.
          deterministic: whether nothing is dropped, and the algorithm uses its settings for
            evaluation. Decoding is deterministic.

        Raises:
          ValueError: a shape does not fit.
          SettingError: a mask of other numbers than 0 and 1.
          NotImplementedError: the algorithm cannot honour the mask, attend across, or decode.
        """
        decodes = self.max_decode_length is not None and not self.is_initializing()
        across = source_of(self.op, inputs_q, inputs_kv, self.use_rotary, decodes)
        names = "num_heads", "qkv_features", "out_features", "num_kv_heads", "num_qk_heads"
        names += "use_rotary", "rotary_base", "dropout_rate"
        given = {name: getattr(self, name) for name in names}
        _, length, d_model = inputs_q.shape
        sizes = sizes_of(self.op, in_features=d_model, length=length, **given)
        options = projection_options(self.use_bias, self.dtype, self.param_dtype)
        projections = projections_of(self.op, sizes)
        projected = {
            name: _projected(across if name in ("key", "value") else inputs_q, name, to, options)
            for name, to in projections.items()
        }
        params = self._op_params(sizes)
        features = d_model if self.out_features is None else self.out_features
        out = nn.DenseGeneral(features, axis=(-2, -1), name="out", **options)
        if self.max_decode_length is not None:
            check_decodes(self.op, self.causal, self.max_decode_length)
        arrays, call = (self, params, projected, projections), dict(mask=mask)
        call |= dict(segment_ids=segment_ids, positions=positions)
        if not decodes:
            return out(attend(*arrays, **call, lengths=lengths, deterministic=deterministic))
        refuse_in_decoding(call)
        attended, cache = decode(*arrays, self.get_variable("cache", "state"), lengths)
        self.put_variable("cache", "state", cache)
        return out(attended)

    def _op_params(self, sizes: Dims) -> Any:
        """The algorithm's own weights."""
        if not jax.tree.leaves(shapes_of_weights(self.op, sizes)):
            return ()
        if self.has_variable("params", "op"):  # which may be of a longer sequence
            return self.get_variable("params", "op")
        return self.param("op", self.op.init, sizes)

    def draw(self, rate: float) -> Array | None:
        """The source of hashes and dropout.

        Raises:
          SettingError: the call has none.
        """
        hashes = self.op.plan_needs == "rng"
        if not hashes and rate <= 0.0:
            return None
        stream = "attention" if hashes or self.has_rng("attention") else "dropout"
        if not self.has_rng(stream) and not self.has_rng("params"):  # by which flax initialises
            why = f"{self.op.name} draws hashes" if hashes else f"dropout_rate is {rate}"
            raise SettingError(
                f"rngs has no stream {stream!r}, and {why}: give one, as in rngs={{{stream!r}: "
                "jax.random.key(0)}"
            )
        return self.make_rng(stream)


def _projected(
    x: Float[Array, "B T D"], name: str, to: Projection, options: dict[str, Any]
) -> Float[Array, "B T N H"]:
    """A projection of `x`, of a low rank by two matrices."""
    first = to.of_input
    y = nn.DenseGeneral((first.n_heads, first.size), name=name, **options)(x)
    if to.rank is None:
        return y
    without_bias = options | {"use_bias": False}
    up = nn.DenseGeneral((to.n_heads, to.size), axis=(-2, -1), name=f"{name}_up", **without_bias)
    return up(y)

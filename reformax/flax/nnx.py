"""`Attention` for `flax.nnx`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

from reformax.declared import SettingError, Size, Unsupported, check
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


class Attention(nnx.Module):
    """Multi-head attention around any algorithm: projections, heads, dropout on the weights.

    Weights have the names of flax's own module: `query`, `key`, `value`, `out`. `key` is None where
    the algorithm makes its keys of the queries. Further projections that an algorithm reads, such
    as gates, are in `extra_projections`, and its own weights in `op_params`. `eval()` and `train()`
    of a model, and `nnx.view`, set `deterministic`: nothing is dropped, and the algorithm uses its
    settings for evaluation.

    Args:
      op: the algorithm, such as `lsh.lsh()`.
      num_heads: number of heads.
      in_features: the size of the input.
      qkv_features: the size of `num_heads` heads of queries; None: that of the input.
      out_features: the size of the output; None: that of the input.
      in_kv_features: the size of the input of keys and values; None: that of the input.
      num_kv_heads: heads of keys and values, each for `num_heads / num_kv_heads` heads of queries
        (Ainslie et al. 2023); None: `num_heads`.
      num_qk_heads: heads of queries and keys, each for `num_heads / num_qk_heads` heads of values,
        as in Mamba 2 and Qwen3-Next; None: `num_heads`.
      causal: whether a position sees only itself and what came before it.
      use_rotary: whether queries and keys are rotated by their position (Su et al. 2021).
      rotary_base: the longest wavelength of these rotations is `2 pi rotary_base`.
      max_length: the longest sequence, for an algorithm whose own weights depend on it, such as
        `linformer`; others do not read it.
      dropout_rate: the rate at which attention weights are dropped.
      deterministic: as `eval()` sets it.
      use_bias: whether the projections have biases.
      dtype: of the arithmetic; None: that of the input and weights.
      param_dtype: of the projections' weights; the algorithm's own are float32.
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
        num_kv_heads: int | None = None,
        num_qk_heads: int | None = None,
        causal: bool = False,
        use_rotary: bool = False,
        rotary_base: float = 10_000.0,
        max_length: int | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = sizes_of(
            op,
            num_heads=num_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            out_features=out_features,
            num_kv_heads=num_kv_heads,
            num_qk_heads=num_qk_heads,
            use_rotary=use_rotary,
            rotary_base=rotary_base,
            dropout_rate=dropout_rate,
            length=check("max_length", max_length, Size | None) or 1,
        )
        options = projection_options(use_bias, dtype, param_dtype) | {"rngs": rngs}
        across = _size_of_memory(op, in_features, in_kv_features)
        self._features = in_features, across
        self.op, self.causal = op, causal
        self.use_rotary, self.rotary_base = use_rotary, rotary_base
        self.dropout_rate, self.deterministic = dropout_rate, deterministic
        self._sizes = sizes
        layers = {
            name: _projection(across if name in ("key", "value") else in_features, to, options)
            for name, to in projections_of(op, sizes).items()
        }
        self.query, self.value = layers.pop("query"), layers.pop("value")
        self.key = layers.pop("key", None)
        self.extra_projections = nnx.Dict(layers)
        heads = sizes.n_heads, sizes.d_v
        to = in_features if out_features is None else out_features
        self.out = nnx.LinearGeneral(heads, to, axis=(-2, -1), **options)
        self.op_params = _own_weights(op, sizes, max_length, rngs)
        self.rngs = _stream(op, dropout_rate, rngs)
        self.cache, self.max_decode_length = nnx.data(None), None

    def __call__(
        self,
        inputs_q: Float[Array, "B T D"],
        inputs_kv: Float[Array, "B S E"] | None = None,
        *,
        mask: ArrayLike | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        deterministic: bool | None = None,
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
          deterministic: overrides the module's; None: the module's. Decoding is deterministic.

        Raises:
          ValueError: a shape does not fit.
          SettingError: a mask of other numbers than 0 and 1.
          NotImplementedError: the algorithm cannot honour the mask, attend across, or decode.
        """
        decodes = self.cache is not None
        both = self.op, inputs_q, inputs_kv
        across = source_of(*both, self.use_rotary, decodes, self._features)
        layers = dict(query=self.query, key=self.key, value=self.value, **self.extra_projections)
        projections = projections_of(self.op, self._sizes)
        projected = {
            name: layers[name](across if name in ("key", "value") else inputs_q)
            for name in projections
        }
        params = jax.tree.map(lambda x: x[...], self.op_params, is_leaf=_is_param)
        arrays, call = (self, params, projected, projections), dict(mask=mask)
        call |= dict(segment_ids=segment_ids, positions=positions)
        if not decodes:
            deterministic = self.deterministic if deterministic is None else deterministic
            attended = attend(*arrays, **call, lengths=lengths, deterministic=deterministic)
            return self.out(attended)
        refuse_in_decoding(call)
        attended, cache = decode(*arrays, self.cache.get_value(), lengths)
        self.cache.set_value(cache)
        return self.out(attended)

    def init_cache(self, max_decode_length: int | None) -> None:
        """From now on calls decode: the first one reads a prompt, each other one more token.

        An algorithm that carries a state also reads several more at once.

        Args:
          max_decode_length: how many positions the cache has room for; None: calls do not decode.

        Raises:
          SettingError: the module is not causal.
          NotImplementedError: the algorithm has no step.
        """
        if max_decode_length is not None:
            check_decodes(self.op, self.causal, max_decode_length)
        self.max_decode_length = max_decode_length
        self.cache = nnx.data(None if max_decode_length is None else nnx.Cache(None))

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `nnx.view(model, deterministic=...)` calls.

        Args:
          deterministic: whether nothing is dropped; None: as before.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def draw(self, rate: float) -> Array | None:
        """The source of hashes and dropout.

        Raises:
          SettingError: dropout was set after the module was made without.
        """
        if rate <= 0.0 and self.op.plan_needs != "rng":
            return None
        if self.rngs is None:
            raise SettingError(
                f"dropout_rate is {rate} and the module was made without dropout, so it has no "
                "rngs: give the rate to Attention(...)"
            )
        return self.rngs()


def _projection(n_features: int, to: Projection, options: dict[str, Any]) -> nnx.Module:
    """The layer of a projection, of a low rank by two matrices."""
    first = to.of_input.n_heads, to.of_input.size
    layer = nnx.LinearGeneral(n_features, first, **options)
    if to.rank is None:
        return layer
    heads, without_bias = (to.n_heads, to.size), options | {"use_bias": False}
    return nnx.Sequential(layer, nnx.LinearGeneral(first, heads, axis=(-2, -1), **without_bias))


def _stream(op: AttentionOp, dropout_rate: float, rngs: nnx.Rngs) -> nnx.RngStream | None:
    """The source of hashes and dropout; None: nothing is drawn.

    Raises:
      SettingError: there is none in `rngs`.
    """
    hashes = op.plan_needs == "rng"
    if not hashes and dropout_rate <= 0.0:
        return None
    stream = "attention" if hashes or "attention" in rngs else "dropout"
    if stream not in rngs and "default" not in rngs:
        why = f"{op.name} draws hashes" if hashes else f"dropout_rate is {dropout_rate}"
        raise SettingError(
            f"rngs has no stream {stream!r}, and {why}: give one, as in nnx.Rngs(params=0, "
            f"{stream}=1)"
        )
    return getattr(rngs, stream).fork()


def _size_of_memory(op: AttentionOp, in_features: int, in_kv_features: int | None) -> int:
    """The size of the input of keys and values.

    Raises:
      SettingError: it is out of range, or the algorithm reads no other input.
    """
    if in_kv_features is None:
        return in_features
    if not op.cross:
        raise Unsupported(
            f"in_kv_features is {in_kv_features}, but {op.name} attends within one sequence: use "
            "an op whose cross is True"
        )
    return check("in_kv_features", in_kv_features, Size)


def _own_weights(op: AttentionOp, sizes: Dims, max_length: int | None, rngs: nnx.Rngs) -> Any:
    """The algorithm's own weights, `()` if it has none.

    Raises:
      SettingError: weights that depend on the length, which is not given.
    """
    shapes = jax.tree.leaves(shapes_of_weights(op, sizes))
    longer = jax.tree.leaves(shapes_of_weights(op, sizes._replace(length=4 * sizes.length + 64)))
    if max_length is None and longer != shapes:
        raise SettingError(
            f"max_length is None: {op.name} has weights of each position, give the longest length"
        )
    if not shapes:
        return ()
    return nnx.data(jax.tree.map(nnx.Param, op.init(rngs.params(), sizes)))


def _is_param(x: Any) -> bool:
    return isinstance(x, nnx.Variable)

"""Options of every algorithm that makes attention weights: a cap of logits, a factor by length."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from reformax.declared import Bounds, SettingError, Unsupported
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.options import Options, options
from reformax.ops.masking.masks import keys_seen
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.sharding import queries as sharding
from reformax.ops.sharding.shard import Shard, of_heads

SoftCap = Annotated[float, Bounds(1e-2, 1e6, name="a number from 0.01 to 1e6")]
LengthScale = Annotated[float, Bounds(1e-3, 1e3, name="a number from 0.001 to 1000")]


@options
class LogitOptions(Options):
    """Options of logits. Every algorithm has them; one that makes no weights refuses them.

    Args:
      soft_cap: a bound c of the logits x, which become `c tanh(x / c)`, before a bias is added
        (Gemma Team 2024, "Gemma 2", sec. 2). None: no bound. cuDNN has none.
      scale_by_length: a factor s: logits are multiplied by `s ln n`, where n is the number of keys
        that causality, segments and padding leave a query, at least 2 (Nakanishi 2025,
        "Scalable-Softmax Is Superior for Attention"). Each `impl` has it, because the queries are
        multiplied, for hashes and choices too. With `1 / ln L` the factor is 1 at length L. None:
        no such factor.
      learn_scale_by_length: whether s is a weight of each head of queries, `length_factor`, that
        begins as `scale_by_length`.
    """

    soft_cap: SoftCap | None = None
    scale_by_length: LengthScale | None = None
    learn_scale_by_length: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("soft_cap", "scale_by_length"):
            value = getattr(self, name)
            if value is not None and not self.dropout:
                raise SettingError(
                    f"{name} is {value}: {self.name} makes no attention weights, leave it out"
                )
        if self.learn_scale_by_length and self.scale_by_length is None:
            raise SettingError(
                "learn_scale_by_length is True and scale_by_length is None: set what it begins as"
            )

    def _init_length_factor(self, dims: Dims) -> dict[str, Float[Array, " N"]]:
        return {"length_factor": jnp.full(dims.qk_heads, self.scale_by_length, jnp.float32)}

    def _scaled_by_length(self, call: Call, params, q, k) -> Float[Array, "B T N H"]:
        """The queries times `scale_by_length ln n`, for n keys that they see."""
        if self.scale_by_length is None:
            return q
        shard = call.shard or Shard()
        counted = call.position is not None
        if not counted and not isinstance(shard.position, int):
            raise Unsupported(
                f"scale_by_length is {self.scale_by_length}, but no device sees the whole sequence "
                "to count keys: use context=1"
            )
        if counted:  # from the newest keys' positions
            n_keys = call.position[:, None] + 1 + jnp.arange(q.shape[1])[None]
        else:
            n_devices = 1 if shard.axis is None else lax.axis_size(shard.axis)
            lengths = (n_devices * x.shape[1] for x in (q, q if k is None else k))
            ids = sharding.of_all(shard, call.segment_ids)
            n_keys = keys_seen(*lengths, causal=call.causal, segment_ids=ids)
            n_keys = sharding.of_shard(shard, n_keys, q.shape[1])
        dtype = accum_dtype(q.dtype)
        factor = self.scale_by_length
        if self.learn_scale_by_length:
            factor = of_heads(params["length_factor"], call.shard, q.shape[2]).astype(dtype)
        factor = factor * jnp.log(jnp.maximum(n_keys, 2).astype(dtype))[..., None]
        return (q * factor[..., None]).astype(q.dtype)

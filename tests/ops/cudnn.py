"""Array operations in place of cuDNN, for tests without a GPU."""

import jax.numpy as jnp

from reformax.ops import dense
from reformax.ops.calls import dispatch


def instead_of_cudnn(monkeypatch, module) -> list:
    """Makes a module choose cuDNN for any dtype, and replaces cuDNN by dense attention.

    Returns:
      A list to which each traced call appends its lengths.
    """
    traced, obstacle = [], module.cudnn_obstacle

    def of_bfloat16(call, q, k, v):
        return obstacle(call, *(x.astype(jnp.bfloat16) for x in (q, k, v)))

    def in_array_operations(q, k, v, *, causal, lengths, scale=None):
        assert scale is None
        traced.append(lengths)
        segment_ids = jnp.arange(q.shape[1])[None] < lengths[:, None]
        return dense.dense(impl="xla")(q, k, v, causal=causal, segment_ids=segment_ids)

    def choose_impl(impl, pays=True, cudnn="a ring", **_):
        return "xla" if cudnn else "cudnn"

    monkeypatch.setattr(module, "cudnn_obstacle", of_bfloat16)
    monkeypatch.setattr(module, "cudnn_attention", in_array_operations)
    monkeypatch.setattr(dispatch, "choose_impl", choose_impl)
    return traced

"""cuDNN's place, taken by array operations where there is no GPU."""

import jax.numpy as jnp

from reformax.ops import dense


def instead_of_cudnn(monkeypatch, module) -> list:
    """An op's module asks for cuDNN whatever the dtype, and gets dense attention by the lengths.

    Returns:
      What will be told: the lengths of each call that is traced.
    """
    told, obstacle = [], module.cudnn_obstacle

    def of_bfloat16(q, k, v, *others):
        return obstacle(*(x.astype(jnp.bfloat16) for x in (q, k, v)), *others)

    def in_array_operations(q, k, v, *, causal, lengths, scale=None):
        assert scale is None
        told.append(lengths)
        segment_ids = jnp.arange(q.shape[1])[None] < lengths[:, None]
        return dense.dense(impl="xla")(q, k, v, causal=causal, segment_ids=segment_ids)

    def choose_impl(impl, cudnn="a ring", **_):
        return "xla" if cudnn else "cudnn"

    monkeypatch.setattr(module, "cudnn_obstacle", of_bfloat16)
    monkeypatch.setattr(module, "cudnn_attention", in_array_operations)
    monkeypatch.setattr(module, "choose", choose_impl)
    return told

"""Dense softmax attention: every visible key, O(T * S) time (Vaswani et al. 2017, eq. 1)."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.calls.dispatch import check_impl, choose_impl
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.decoding.cache import full_decoding
from reformax.ops.masking.masks import visibility
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.softmax.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.softmax.reference import reference_attention


@named
def dense(*, impl: str = "auto") -> AttentionOp:
    """Attention of each query to every visible key.

    Args:
      impl: `"xla"` runs everywhere. Its gradient computes the logits again, so that no T x S array
        is kept between the passes. `"cudnn"` is NVIDIA's fused kernel, for float16 and bfloat16
        without bias, dropout and segments, except for padding behind rows, with the `lengths` of a
        layer (`Tokens.right_padded`). `"auto"` takes it where it computes the same function.

    Raises:
      ValueError: an unknown `impl`.
      NotImplementedError: at the call, when `impl="cudnn"` is asked for what it cannot do.
    """
    check_impl(impl, "cudnn")
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=functools.partial(_apply, impl=impl),
        traits=Traits(
            cross=True,
            bias=True,
            exact=True,
            beams=True,
            keeps_padding_out=True,
            lengths=True,
            grouped=True,
            head_shards=True,
        ),
        **full_decoding(impl),
    )


def _apply(
    params, q, k, v, *, plan, segment_ids, causal, dropout, rng, impl, bias=None, lengths=None
):
    del params, plan
    if (
        choose_impl(impl, cudnn=cudnn_obstacle(q, k, v, segment_ids, dropout, bias, lengths))
        == "cudnn"
    ):
        return cudnn_attention(q, k, v, causal=causal, lengths=lengths)
    k, v = repeat_heads(q, k, v)

    @jax.checkpoint
    def attend(bias, q, k, v) -> Float[Array, "B T N V"]:
        mask = visibility(q.shape[1], k.shape[1], causal=causal, segment_ids=segment_ids)
        return reference_attention(q, k, v, mask, bias=bias, dropout=dropout, rng=rng)

    return attend_to_tokens(functools.partial(attend, bias), q, k, v, segment_ids)

"""The reference: softmax attention over an explicit mask, in O(T * S) time and memory."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from reformax.ops.calls.call import Call
from reformax.ops.softmax.dropout import full_dropout_mask
from reformax.ops.softmax.online import softmax_over

_PLAIN = Call()


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    mask: Bool[Array, "#B #N T S"],
    call: Call = _PLAIN,
) -> Float[Array, "B T N V"]:
    """`softmax(q k^T / sqrt(H) + bias) v` over the keys that are visible in a mask.

    Logits and weights are float32 or wider. A row without visible keys is zeros. Bias, sinks
    and dropout are the call's.
    """
    logits = call.logits.of("btnh,bsnh->bnts", q, k, call.bias)
    dropped = None
    if call.dropout > 0.0:
        dropped = full_dropout_mask(call.seed, call.dropout, logits.shape)
    whole = softmax_over(logits, mask, "bnts,bsnv->bntv", v, dropped)
    if call.sinks is not None:
        whole = whole.with_sinks(call.sinks[None, :, None])
    return whole.results(v.dtype)[0]

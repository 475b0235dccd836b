"""Attention and its gradient in NumPy float64, written from the papers' equations.

Nothing here is shared with `reformax`. Shapes: q `[B, T, N, H]`, k `[B, S, N, H]`,
v `[B, S, N, V]`, and `[B, N, T, S]` for what is said of a query and a key.
"""

import numpy as np


def length_normalize(x):
    """Unit root mean square over the last axis, as Trax has it (Reformer, sec. 2)."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _length_normalize_vjp(x, d_out):
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return d_out / rms - x * np.mean(d_out * x, axis=-1, keepdims=True) / rms**3


def capped_logits(q, keys, soft_cap=None):
    """`c tanh(s / c)` of the cap c, and its derivative by s; s and 1 without a cap."""
    logits = np.einsum("btnh,bsnh->bnts", q, keys) / np.sqrt(q.shape[-1])
    if soft_cap is None:
        return logits, 1.0
    bounded = np.tanh(logits / soft_cap)
    return soft_cap * bounded, 1 - bounded**2


def attention_weights(q, k, counts, bias=0.0, soft_cap=None):
    """`c_ij exp(s_ij) / sum_j c_ij exp(s_ij)`, with arguments and s as in `attention`."""
    keys = length_normalize(q) if k is None else k
    logits = capped_logits(q, keys, soft_cap)[0] + bias
    top = np.where(counts > 0, logits, -np.inf).max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.where(counts > 0, counts * np.exp(np.where(counts > 0, logits - top, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def attention(q, k, v, counts, dropout_mask, d_out, bias=0.0, soft_cap=None):
    """`sum_j c_ij exp(s_ij) mask_ij v_j / sum_j c_ij exp(s_ij)`, with `s = q k^T / sqrt(H) + b`.

    Args:
      q, k, v: float64 arrays; k None makes the keys of the queries.
      counts: integers, how many times a query counts a key; 0 hides it.
      dropout_mask: the factor of each weight.
      d_out: the cotangent of the output.
      bias: b, whose axes of size 1 are shared.
      soft_cap: c, with which `q k^T / sqrt(H)` is `c tanh(q k^T / sqrt(H) / c)`.

    Returns:
      `(out, (dq, dk, dv, db))`, with `dk` None where the keys are made of the queries.
    """
    keys = length_normalize(q) if k is None else k
    weights = attention_weights(q, k, counts, bias, soft_cap)
    out = np.einsum("bnts,bsnv->btnv", weights * dropout_mask, v)

    dv = np.einsum("bnts,btnv->bsnv", weights * dropout_mask, d_out)
    d_weights = np.einsum("btnv,bsnv->bnts", d_out, v) * dropout_mask
    d_logits = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True))
    shared = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
    db = d_logits.sum(axis=shared, keepdims=True) if np.ndim(bias) else d_logits.sum()
    d_logits = d_logits * capped_logits(q, keys, soft_cap)[1] / np.sqrt(q.shape[-1])
    dq = np.einsum("bnts,bsnh->btnh", d_logits, keys)
    dk = np.einsum("bnts,btnh->bsnh", d_logits, q)
    if k is None:
        return out, (dq + _length_normalize_vjp(q, dk), None, dv, db)
    return out, (dq, dk, dv, db)

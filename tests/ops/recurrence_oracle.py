"""Linear recurrences and their gradients in NumPy float64, a position at a time.

It uses no code of `reformax`.
"""

import numpy as np


def recurrence(q, k, v, log_decay, beta, segment_ids, d_out):
    """`S_t = a_t (1 - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T`, `out_t = S_t^T q_t`.

    Args:
      q, k: `[B, T, N, H]`.
      v: `[B, T, N, V]`.
      log_decay: log a, `[B, T, N, 1]` or `[B, T, N, H]`; None is 0.
      beta: b, `[B, T, N, 1]`; None is the recurrence without `b_t` and the product by `1 - ...`.
      segment_ids: ids; each segment has its own state. None: one segment.
      d_out: the cotangent of the output.

    Returns:
      `(out, (dq, dk, dv, d_log_decay, d_beta))`, the last two None where these are.
    """
    out = np.zeros_like(v)
    gradients = [None if x is None else np.zeros_like(x) for x in (q, k, v, log_decay, beta)]
    for b in range(q.shape[0]):
        ids = np.ones(q.shape[1], int) if segment_ids is None else segment_ids[b]
        for i in np.unique(ids):
            for n in range(q.shape[2]):
                at = b, np.flatnonzero(ids == i), n
                _head(*(None if x is None else x[at] for x in (q, k, v, log_decay, beta)),
                      d_out[at], out, gradients, at)  # fmt: skip
    return out, tuple(gradients)


def _head(q, k, v, log_decay, beta, d_out, out, gradients, at):
    """One head of one segment, `[T, ...]`."""
    length, size = k.shape
    a = np.ones((length, 1)) if log_decay is None else np.exp(log_decay)
    states = [np.zeros((size, v.shape[1]))]
    values = np.zeros_like(v)
    for t in range(length):
        kept = a[t][:, None] * states[-1]
        values[t] = v[t] if beta is None else beta[t] * (v[t] - k[t] @ kept)
        states.append(kept + np.outer(k[t], values[t]))
    out[at] = [q[t] @ states[t + 1] for t in range(length)]

    dq, dk, dv, dg, db = (None if g is None else g[at] for g in gradients)
    d_state = np.zeros_like(states[0])
    for t in reversed(range(length)):
        dq[t] = states[t + 1] @ d_out[t]
        d_state = d_state + np.outer(q[t], d_out[t])
        kept = a[t][:, None] * states[t]
        d_value = k[t] @ d_state
        dk[t] = d_state @ values[t]
        d_kept = d_state
        if beta is None:
            dv[t] = d_value
        else:
            dv[t] = beta[t] * d_value
            db[t] = d_value @ (v[t] - k[t] @ kept)
            dk[t] -= kept @ (beta[t] * d_value)
            d_kept = d_kept - np.outer(k[t], beta[t] * d_value)
        if log_decay is not None:
            d_log = (d_kept * kept).sum(axis=1)
            dg[t] = d_log if dg.shape[1] > 1 else d_log.sum()
        d_state = a[t][:, None] * d_kept
    for whole, part in zip(gradients, (dq, dk, dv, dg, db), strict=True):
        if whole is not None:
            whole[at] = part

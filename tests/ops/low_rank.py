"""What attention by projections and landmarks computes, from the papers' equations: references.

Each is a `Row.reference`, in arrays of JAX, of the whole T x S matrices.
"""

import jax
import jax.numpy as jnp

from reformax.ops import performer as performer_op


def tokens_of(mask):
    """Which keys are tokens, and which queries, `[B, T]`, where a row has one segment."""
    return mask.any(axis=(1, 2)), mask.any(axis=(1, 3))


def softmax(logits, mask):
    """The weights of the keys that the mask shows; zeros where it shows none."""
    top = jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
    top = jax.lax.stop_gradient(top)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - top, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def logits(q, k, soft_cap=None):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


def linformer(options, params, plan, qkv, extra_projections, mask, keep):
    """Eq. 7: `softmax(Q (E K)^T / sqrt(d)) F V`."""
    q, k, v = qkv
    keys, queries = tokens_of(mask)

    def mixed(x, weights):
        weights = jnp.broadcast_to(weights, (x.shape[2], *weights.shape[-2:]))[:, : x.shape[1]]
        return jnp.einsum("btnh,ntk->bknh", jnp.where(keys[..., None, None], x, 0), weights)

    scores = logits(q, mixed(k, params["e"]), options.get("soft_cap"))
    weights = softmax(scores, jnp.ones_like(scores, bool)) * keep[..., : scores.shape[-1]]
    out = jnp.einsum("bntk,bknv->btnv", weights, mixed(v, params.get("f", params["e"])))
    return jnp.where(queries[..., None, None], out, 0)


def nystromformer(options, params, plan, qkv, extra_projections, mask, keep):
    """The product of three softmaxes, the middle one inverted by the iteration."""
    q, k, v = qkv
    real = tokens_of(mask)[0]
    n_landmarks = min(options["n_landmarks"], q.shape[1])
    rank, n_tokens = jnp.cumsum(real, axis=1) - 1, real.sum(axis=1, keepdims=True)
    group = rank * n_landmarks // jnp.maximum(n_tokens, 1)
    member = (group[..., None] == jnp.arange(n_landmarks)) & real[..., None]
    shares = member / jnp.maximum(member.sum(axis=1, keepdims=True), 1)
    queries, keys = (jnp.einsum("btm,btnh->bmnh", shares, x) for x in (q, k))
    some = member.any(axis=1)

    def pairs(rows, columns):
        return rows[:, None, :, None] & columns[:, None, None, :]

    first = softmax(logits(q, keys), pairs(real, some))
    middle = softmax(logits(queries, keys), pairs(some, some))
    last = softmax(logits(queries, k), pairs(some, real))
    norm = middle.sum(axis=-1).max(axis=-1) * middle.sum(axis=-2).max(axis=-1)
    inverse = jnp.swapaxes(middle, -1, -2) / jnp.where(norm == 0, 1, norm)[..., None, None]
    for _ in range(options["n_iterations"]):
        x = middle @ inverse
        inverse = inverse @ (13 * jnp.eye(n_landmarks) - 15 * x + 7 * x @ x - x @ x @ x) / 4
    out = jnp.einsum("bnts,bsnv->btnv", first @ inverse @ last, v)
    if "conv" in params:
        size, length = params["conv"].shape[1], v.shape[1]
        v = jnp.where(real[..., None, None], v, 0)
        v = jnp.pad(v, ((0, 0), (size // 2, size // 2), (0, 0), (0, 0)))
        for i in range(size):
            out = out + params["conv"][:, i, None] * v[:, i : i + length]
    return jnp.where(real[..., None, None], out, 0)


def long_short(options, params, plan, qkv, extra_projections, mask, keep):
    """Sec. 3.2, and in causal attention 3.3."""
    q, k, v = qkv
    length, rank, causal = q.shape[1], options["rank"], options["causal"]
    real = tokens_of(mask)[0]

    def normed(x, name):
        if not options["dual_norm"]:
            return x
        scale, bias = params[name]
        x = x - x.mean(axis=-1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale + bias

    query, key = jnp.ogrid[:length, :length]
    seen = mask.astype(bool) & (abs(query - key) < options["window"])
    cap, values = options.get("soft_cap"), normed(v, "near_values_norm")
    scores = logits(q, normed(k, "near_keys_norm"), cap)
    keep = jnp.concatenate([keep[..., :length], keep[..., ::-1]], axis=-1)
    if rank:
        chunk_len = options["chunk_len"] if causal else length
        n_chunks = -(-length // chunk_len)
        own = key[0] // chunk_len == jnp.arange(n_chunks)[:, None]
        own = own[None, None, :, None] & real[:, None, None, None]
        to = jnp.einsum("bsnh,nhr->bnrs", k, params["projection"])[:, :, None]
        shares = softmax(to, jnp.broadcast_to(own, (*to.shape[:2], n_chunks, rank, length)))
        shares = shares.reshape(*to.shape[:2], -1, length)
        far_keys, far_values = (jnp.einsum("bncs,bsnh->bcnh", shares, x) for x in (k, v))
        far_keys, far_values = (
            normed(far_keys, "far_keys_norm"),
            normed(far_values, "far_values_norm"),
        )
        chunk = jnp.arange(n_chunks * rank) // rank
        visible = own.any(axis=-1)[:, 0, :, 0][:, chunk][:, None, None]
        visible = visible & ((chunk < query // chunk_len) | (not causal))
        visible = visible & real[:, None, :, None]
        scores = jnp.concatenate([scores, logits(q, far_keys, cap)], axis=-1)
        values = jnp.concatenate([values, far_values], axis=1)
        visible = jnp.broadcast_to(visible, (*scores.shape[:3], visible.shape[-1]))
        seen = jnp.concatenate([seen, visible], axis=-1)
    weights = softmax(scores, seen) * keep[..., : scores.shape[-1]]
    return jnp.where(real[..., None, None], jnp.einsum("bnts,bsnv->btnv", weights, values), 0)


def performer(options, params, plan, qkv, extra_projections, mask, keep):
    """Lemma 1 and sec. 2.2: weights `phi(q) . phi(k)`, of the op's own directions."""
    q, k, v = qkv
    op = performer_op.performer(n_features=options["n_features"], seed=options["seed"])
    directions = op.directions(plan, q.shape[-1]).astype(q.dtype)

    def features(x):
        x = x / x.shape[-1] ** 0.25
        exponents = (
            jnp.einsum("btnh,mh->btnm", x, directions) - jnp.sum(x**2, -1, keepdims=True) / 2
        )
        y = jnp.exp(exponents)
        largest = jnp.take_along_axis(y, jnp.argmax(y, axis=-1, keepdims=True), axis=-1)
        return y + options["epsilon"] * largest

    weights = jnp.einsum("btnm,bsnm->bnts", features(q), features(k)) * mask
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total == 0, 1, total), v)

"""What linear attention and its relatives compute, as attention with weights of all pairs."""

import jax
import jax.numpy as jnp
import numpy as np


def convolved(options, params, qkv, mask):
    """Each feature's weighted sum over the last positions of its segment, through silu."""
    if options.get("conv_size") is None:
        return qkv
    n_between = mask @ mask  # positions that one sees and that see the other, both included
    taps = [mask * (n_between == j + 1) for j in range(options["conv_size"])]

    def one(x, weights):
        parts = (jnp.einsum("bnts,bsnh,nh->btnh", tap, x, weights[..., j])
                 for j, tap in enumerate(taps))  # fmt: skip
        return jax.nn.silu(sum(parts))

    return [one(x, params[f"conv_{name}"]) for name, x in zip("qkv", qkv, strict=True)]


def linear(options, params, plan, qkv, extra_projections, mask, keep):
    q, k, v = convolved(options, params, qkv, mask)
    q, k = (jax.nn.elu(x) + 1 for x in (q, k))
    weights = mask * jnp.einsum("btnh,bsnh->bnts", q, k)
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total > 0, total, 1), v)


def retention(options, params, plan, qkv, extra_projections, mask, keep):
    q, k, v = convolved(options, params, qkv, mask)
    rates = 1 - 2.0 ** (-5 - np.arange(q.shape[2]))
    return _summed(mask, q, k, v, jnp.broadcast_to(jnp.log(rates)[:, None], q.shape))


def gated_linear(options, params, plan, qkv, extra_projections, mask, keep):
    gate = jax.nn.sigmoid(extra_projections["gate"] + params["bias"]) ** (1 / 16)
    return _summed(mask, *convolved(options, params, qkv, mask), jnp.log(gate))


def gated_delta(options, params, plan, qkv, extra_projections, mask, keep):
    step = jnp.log1p(jnp.exp(params["bias"][:, None] - extra_projections["keep"]))
    most = 2 if options.get("negative_eigenvalues") else 1
    beta = most * jax.nn.sigmoid(extra_projections["beta"])
    return _delta_rule(options, params, qkv, beta, mask, step)


def kda(options, params, plan, qkv, extra_projections, mask, keep):
    step = jnp.log1p(jnp.exp(extra_projections["forget"] + params["bias"]))
    beta = jax.nn.sigmoid(extra_projections["beta"])
    return _delta_rule(options, params, qkv, beta, mask, step)


def _delta_rule(options, params, qkv, beta, mask, step):
    """Each value is less what the state holds for its key: a system of equations for them all."""
    q, k, v = convolved(options, params, qkv, mask)
    q, k = (x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    decay = jnp.broadcast_to(-jnp.exp(params["rate"])[:, None] * step, k.shape)
    beta = jnp.swapaxes(beta, 1, 2)
    before = mask * np.tril(np.ones(mask.shape[2:]), -1)
    system = jnp.eye(k.shape[1]) + beta * _weights(before, k, k, decay)
    v = jnp.linalg.solve(system, beta * jnp.swapaxes(v, 1, 2))
    return _summed(mask, q, k, jnp.swapaxes(v, 1, 2), decay)


def _summed(mask, q, k, v, log_decay):
    weights = _weights(mask, q, k, log_decay) / np.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnv->btnv", weights, v)


def _weights(mask, q, k, log_decay):
    """`sum_h q_th k_sh exp(log_decay_s+1 + ... + log_decay_t)` over the positions of a segment."""
    seen = mask > 0
    # Of padding, which sees nothing, the position alone.
    so_far = jnp.maximum(mask, np.eye(mask.shape[-1]))
    sums = jnp.einsum("bnts,bsnh->bnth", so_far, log_decay)
    between = jnp.where(seen[..., None], sums[:, :, :, None] - sums[:, :, None], 0)
    weights = jnp.einsum("btnh,bsnh,bntsh->bnts", q, k, jnp.exp(between))
    return jnp.where(seen, weights, 0)

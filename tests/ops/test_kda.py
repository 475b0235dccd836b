"""Kimi Delta Attention against a loop over positions in float64, and against transformers'."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import kda
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.recurrence import recurrence_from
from tests.helpers import assert_trees_close, with_x64
from tests.ops import inputs

PLAIN = dict(normalized=False, gated=False)
HAS_TRANSFORMERS = all(importlib.util.find_spec(x) for x in ("torch", "transformers"))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def loop(x, ids=None):
    """The op's output by eq. 1 of the paper, a position at a time, with matrices as printed."""
    batch, length, n_heads, size = x.q.shape
    out = np.zeros(x.v.shape)
    unit = [y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (x.q, x.k)]
    beta = 1 / (1 + np.exp(-x.extra_projections["beta"]))
    forget = softplus(x.extra_projections["forget"] + np.asarray(x.params["bias"], np.float64))
    decay = np.exp(-np.exp(np.asarray(x.params["rate"], np.float64))[:, None] * forget)
    for b, n in np.ndindex(batch, n_heads):
        state = np.zeros((size, x.v.shape[-1]))
        for t in range(length):
            if ids is not None and ids[b, t] == 0:
                continue
            if ids is not None and t and ids[b, t] != ids[b, t - 1]:
                state = np.zeros_like(state)
            q, k, rate = unit[0][b, t, n], unit[1][b, t, n], beta[b, t, n, 0]
            forgotten = (np.eye(size) - rate * np.outer(k, k)) @ np.diag(decay[b, t, n])
            state = forgotten @ state + rate * np.outer(k, x.v[b, t, n])
            out[b, t, n] = state.T @ q / np.sqrt(size)
    return out


@pytest.mark.parametrize("strength", [0.0, 4.0, 40.0], ids=["weak", "strong", "all"])
def test_the_loop_over_positions(strength):
    """Decays of e^-640 a position too, of which a product of two inverses would be infinite."""
    op = kda.kda(**PLAIN, chunk_len=32)
    x = inputs.draw(op, length=75, d_qk=8, d_v=6)
    forget = x.extra_projections["forget"] * (1 + strength) + strength
    x = x._replace(extra_projections=x.extra_projections | {"forget": forget})
    ids = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], [21, 19, 30, 5], axis=1)
    got = inputs.call(op, x, causal=True, segment_ids=ids)
    want = loop(x.map(np.float64), ids)
    # Cumulative decays of thousands have so many digits less.
    np.testing.assert_allclose(got, want, atol=5e-5 if strength else 2e-6)
    assert np.abs(want).max() > 0.1


@pytest.mark.slow
def test_gradients_are_differences_of_the_loop():
    op = kda.kda(**PLAIN, chunk_len=4)
    with with_x64():
        x = inputs.draw(op, length=11, batch=1, dtype=np.float64)
        rng = np.random.default_rng(0)
        d_out = rng.normal(size=x.v.shape)
        change = jax.tree.map(lambda y: rng.normal(size=y.shape), x[:4])

        def total(arrays):
            return jnp.sum(d_out * inputs.call(op, inputs.Inputs(*arrays, x.params), causal=True))

        gradients = jax.jit(jax.grad(total))(x[:4])
        got = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), gradients, change)))
        ends = (
            np.sum(d_out * loop(inputs.Inputs(*moved, x.params)))
            for moved in (
                jax.tree.map(lambda y, d, s=sign: y + s * 1e-6 * d, x[:4], change)
                for sign in (1, -1)
            )
        )
        np.testing.assert_allclose(got, (next(ends) - next(ends)) / 2e-6, rtol=1e-6)


def test_a_feature_forgets_alone():
    """With one decay for each head both features would be alike."""
    op = kda.kda(**PLAIN)
    x = inputs.draw(op, length=2, batch=1, n_heads=1, d_qk=2, d_v=1)
    one = np.ones_like(x.v)
    gates = {"beta": 9 * one, "forget": np.array([[[[-99.0, 99.0]]]] * 2).reshape(1, 2, 1, 2)}
    x = x._replace(q=np.ones_like(x.q), k=np.ones_like(x.k), v=one, extra_projections=gates)
    first = np.eye(2, dtype=np.float32)[None, :, None]  # the first position's key: feature 0
    kept, lost = (
        inputs.call(op, x._replace(k=np.stack([k, 0 * k], axis=1)), causal=True)[0, 1, 0, 0]
        for k in (first[:, 0], first[:, 1])
    )
    assert kept > 0.4 and lost == 0


def transformers_layer(d_model, n_heads, size):
    """Transformers' layer with random weights, and its weights as those of our layer."""
    import torch
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=d_model,
        linear_num_heads=n_heads,
        linear_head_dim=size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = theirs.KimiLinearDeltaAttention(config, 0).float()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    w = {name: x.detach().numpy() for name, x in layer.named_parameters()}

    def heads(name):  # [N * H, D] -> [N, D, H]
        return w[name].reshape(n_heads, -1, w[name].shape[1]).swapaxes(1, 2)

    taps = w["conv1d.weight"][:, 0, ::-1].reshape(3, n_heads, size, -1)
    op = {f"conv_{x}": taps[i] for i, x in enumerate("qkv")} | {
        "rate": w["forget_gate.A_log"].ravel(),
        "bias": w["forget_gate.dt_bias"].reshape(n_heads, size),
        "scale": np.broadcast_to(w["o_norm.weight"], (n_heads, size)),
    }
    params = {f"w_{x}": heads(f"{x}_proj.weight") for x in "qkv"} | {
        "w_o": w["o_proj.weight"].T.reshape(n_heads, size, d_model),
        "w_beta": heads("b_proj.weight"),
        "w_forget": w["forget_gate.f_a_proj.weight"].T[None],
        "up_forget": heads("forget_gate.f_b_proj.weight"),
        "w_output_gate": w["g_a_proj.weight"].T[None],
        "up_output_gate": heads("g_b_proj.weight"),
        "op": op,
    }
    return layer, config, jax.tree.map(jnp.asarray, params)


def needs_transformers(test):
    reason = "needs torch and transformers: pip install -e '.[peers]'"
    return pytest.mark.peers(pytest.mark.skipif(not HAS_TRANSFORMERS, reason=reason)(test))


@needs_transformers
def test_the_layer_is_transformers():
    """Convolutions, low-rank gates, the recurrence, the norm and the gate of the output."""
    import torch

    d_model, n_heads, size = 24, 2, 8
    theirs, config, params = transformers_layer(d_model, n_heads, size)
    rng = np.random.default_rng(0)
    x, d_out = rng.normal(size=(2, 2, 70, d_model)).astype(np.float32)
    given = torch.tensor(x, requires_grad=True)
    want = theirs(given)
    want.backward(torch.tensor(d_out))
    op = kda.kda(conv_size=config.linear_conv_kernel_dim, chunk_len=32)
    layer = layers.Attention(op, n_heads=n_heads, d_qk=size, d_v=size, causal=True)

    @jax.jit
    def run(params, x):
        out, vjp = jax.vjp(layer.apply, params, x)
        return out, vjp(jnp.asarray(d_out))

    out, (d_params, d_x) = run(params, x)
    assert_trees_close(out, want.detach().numpy(), 1e-4)
    assert_trees_close(d_x, given.grad.numpy(), 1e-3)
    of_decay = theirs.forget_gate.dt_bias.grad.numpy().reshape(n_heads, size)
    assert_trees_close(d_params["op"]["bias"], of_decay, 1e-3)
    up = theirs.forget_gate.f_b_proj.weight.grad.numpy().reshape(n_heads, size, size)
    assert_trees_close(d_params["up_forget"], up.swapaxes(1, 2), 1e-3)


@needs_transformers
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_the_recurrence_is_transformers(name):
    """From a state to a state, with all gradients."""
    import torch
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    rng, (batch, length, n_heads, size, d_v) = np.random.default_rng(0), (2, 70, 2, 8, 6)
    q, k = (rng.normal(size=(batch, length, n_heads, size)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, d_out = (rng.normal(size=(batch, length, n_heads, d_v)) for _ in range(2))
    log_decay = -3 * rng.random(q.shape) ** 2
    beta = rng.random((batch, length, n_heads, 1))
    state, d_state = rng.normal(size=(2, batch, n_heads, size, d_v))
    given = [np.float32(x) for x in (q, k, v, log_decay, beta, state)]
    tensors = [torch.tensor(x, requires_grad=True) for x in given]
    *arrays, rates, first = tensors
    options = dict(initial_state=first, output_final_state=True)
    out, after = getattr(theirs, name)(*arrays, rates[..., 0], **options)
    total = (out * torch.tensor(np.float32(d_out))).sum()
    (total + (after * torch.tensor(np.float32(d_state))).sum()).backward()

    @jax.jit
    def run(*given):
        def attend(q, k, v, log_decay, beta, state):
            x = RecurrenceInputs(q * size**-0.5, k, v, log_decay, beta)
            return recurrence_from(x, state, chunk_len=32)

        found, vjp = jax.vjp(attend, *given)
        return found, vjp((jnp.float32(d_out), jnp.float32(d_state)))

    found, gradients = run(*given)
    assert_trees_close(found, tuple(x.detach().numpy() for x in (out, after)), 1e-5)
    assert_trees_close(gradients, tuple(x.grad.numpy() for x in tensors), 1e-4)

"""Linear attention and gated recurrences: what they are equal to, and their gated output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, gated_delta, gated_linear, kda, linear, performer, retention
from reformax.ops.base import Dims
from reformax.ops.calls.dispatch import INTERPRETED
from tests.layers import test_attention as layer_tests
from tests.ops import inputs
from tests.ops.rows import Row

GATED = (retention.retention, gated_linear.gated_linear, gated_delta.gated_delta, kda.kda)
gated = pytest.mark.parametrize("factory", GATED, ids=lambda x: x.__name__)
KERNELS = (linear.linear, *GATED, performer.performer)
MUCH = 1e3
PLAIN = dict(normalized=False, gated=False)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_dense_attention_to_other_logits(causal):
    """Those whose exponentials are the products of features."""
    op = linear.linear(chunk_len=4)
    x = inputs.draw(op, length=21)
    q, k = (np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (x.q, x.k))
    logits = np.log(np.einsum("btnh,bsnh->bnts", q, k))
    want = dense.dense()(0 * x.q, x.k, x.v, bias=logits, causal=causal)
    np.testing.assert_allclose(op(*x[:3], causal=causal), want, atol=1e-5)


def test_gates_that_forget_nothing():
    """Gated linear attention then sums all products; the delta rule as well if keys are apart."""
    x = inputs.draw(gated_linear.gated_linear(**PLAIN), length=16, d_qk=16)
    k = np.broadcast_to(np.eye(16, dtype=np.float32)[:, None], x.q.shape)
    q = x.q / np.linalg.norm(x.q, axis=-1, keepdims=True)
    x = x._replace(q=q, k=k)
    want = np.einsum("bnts,bsnv->btnv", np.tril(np.einsum("btnh,bsnh->bnts", q, k)) / 4, x.v)
    kept = x._replace(extra_projections={"gate": 0 * x.q + MUCH})
    op = gated_linear.gated_linear(**PLAIN, chunk_len=8)
    np.testing.assert_allclose(inputs.call(op, kept, causal=True), want, atol=1e-5)
    op = gated_delta.gated_delta(**PLAIN, chunk_len=8)
    own = inputs.draw(op, length=16, d_qk=16)
    much = np.full_like(own.extra_projections["beta"], MUCH)
    whole = x._replace(extra_projections={"beta": much, "keep": much}, params=own.params)
    np.testing.assert_allclose(inputs.call(op, whole, causal=True), want, atol=1e-5)


def test_the_delta_rule_replaces_the_value_of_a_key():
    op = gated_delta.gated_delta(**PLAIN)
    x = inputs.draw(op, length=9)
    one = np.broadcast_to(x.k[:, :1], x.k.shape)
    much = np.full_like(x.extra_projections["beta"], MUCH)
    x = x._replace(q=one, k=one, extra_projections={"beta": much, "keep": much})
    out = inputs.call(op, x, causal=True)
    np.testing.assert_allclose(out, x.v / 2, atol=1e-5)  # over the square root of 4


def test_with_negative_eigenvalues_a_value_may_change_its_sign():
    """Of one key and no decay the state becomes `2 v_t - S`, whose eigenvalue is -1."""
    op = gated_delta.gated_delta(**PLAIN, negative_eigenvalues=True)
    x = inputs.draw(op, length=9)
    one = np.broadcast_to(x.k[:, :1], x.k.shape)
    much = np.full_like(x.extra_projections["beta"], MUCH)
    x = x._replace(q=one, k=one, extra_projections={"beta": much, "keep": much})
    state, want = 0, []
    for t in range(9):
        state = 2 * x.v[:, t] - state
        want.append(state / 2)  # over the square root of 4
    np.testing.assert_allclose(inputs.call(op, x, causal=True), np.stack(want, 1), atol=1e-4)


@pytest.mark.parametrize("factory", [gated_linear.gated_linear, gated_delta.gated_delta, kda.kda])
@pytest.mark.parametrize("memory", [0.5, 12.0, 3000.0])
def test_the_memory_that_a_training_begins_with(factory, memory):
    """Without a gate a value is there by `exp(-1 / memory)` in the next position."""
    op = factory(**PLAIN, memory=memory)
    dims = Dims(2, 4, 1, 2, 2)
    first = np.zeros((1, 2, 2, 4), np.float32)
    first[:, 0] = 1
    extra_projections = {
        name: jnp.zeros((1, 2, *to[:2])) for name, to in op.extra_projections(dims).items()
    }
    options = dict(
        plan=None,
        segment_ids=None,
        causal=True,
        dropout=0.0,
        rng=None,
        extra_projections=extra_projections,
    )

    @jax.jit
    def attend(q, k, v):
        return op.apply(op.init(jax.random.key(0), dims), q, k, v, **options)

    out = attend(np.ones_like(first), first, first[..., :1])
    np.testing.assert_allclose(out[0, 1] / out[0, 0], np.exp(-1 / memory), rtol=1e-5)


@gated
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_gated_output(factory, packed):
    """The recurrence's output over its root mean square, scaled, by silu of its gate, or either.

    Kimi Delta Attention has the sigmoid instead.
    """
    plain, op = (factory(**options, chunk_len=4) for options in (PLAIN, {"gated": True}))
    normalized = factory(gated=False, chunk_len=4)
    gated = factory(normalized=False, gated=True, chunk_len=4)
    x = inputs.draw(op, length=11)
    x.params["scale"] = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    gate = x.extra_projections["output_gate"]
    rest = {name: y for name, y in x.extra_projections.items() if name != "output_gate"}
    masks = dict(
        causal=True, segment_ids=np.repeat([[1, 2, 0]], [5, 4, 2], axis=1).repeat(2, axis=0)
    )
    masks = masks if packed else dict(causal=True)
    apart = x._replace(extra_projections=rest or None)
    own = {name: w for name, w in x.params.items() if name != "scale"}
    out = inputs.call(plain, apart._replace(params=own), **masks)
    norm = x.params["scale"] / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-5)
    factor = (1 if factory is kda.kda else gate) / (1 + np.exp(-gate))
    for got, want in (
        (inputs.call(op, x, **masks), norm * factor),
        (inputs.call(normalized, apart, **masks), norm),
        (inputs.call(gated, x._replace(params=own), **masks), factor),
    ):
        np.testing.assert_allclose(got, out * want, atol=1e-5)


@pytest.mark.slow
@gated
def test_layers_with_a_gated_output_decode(factory):
    layer_tests.test_prefill_and_steps_are_apply(
        Row(factory.__name__, factory, {"chunk_len": (4,), "gated": (True,)}, holds_keys=False)
    )


@pytest.mark.slow  # `test_recurrence_kernel.py` has gradients too
@pytest.mark.parametrize(
    "factory",
    [pytest.param(x, marks=[pytest.mark.slow] * (x is not retention.retention)) for x in KERNELS],
    ids=lambda x: x.__name__,
)
def test_kernels_compute_the_same(factory):
    """`test_recurrence_kernel.py` has their gradients."""
    op = factory(impl=INTERPRETED)
    x = inputs.draw(op, length=70, batch=1)
    masks = dict(causal=True, segment_ids=np.repeat([[1, 2, 0]], [30, 35, 5], axis=1))
    want = inputs.call(factory(impl="xla"), x, **masks)
    np.testing.assert_allclose(inputs.call(op, x, **masks), want, atol=1e-5)


@pytest.mark.parametrize("factory", KERNELS[:3], ids=lambda x: x.__name__)
def test_a_kernel_that_cannot_run_is_refused(factory):
    op = factory(impl=INTERPRETED)
    x = inputs.draw(op, length=3, dtype=jnp.bfloat16)
    mixed = x._replace(k=x.k.astype(np.float32))
    with pytest.raises(NotImplementedError, match="^impl=INTERPRETED with dtypes="):
        inputs.call(op, mixed, causal=True)


SEGMENTS = dict(segment_ids=np.repeat([[1, 2], [3, 3]], 60, axis=1))


@pytest.mark.parametrize(
    "call",
    [
        dict(causal=True),
        SEGMENTS,
        SEGMENTS | dict(causal=True),
        dict(causal=True, return_state=True),
    ],
    ids=["causal", "packed", "packed, causal", "with its state"],
)
def test_sums_that_float16_does_not_hold(call):
    op = linear.linear(chunk_len=8, impl="xla")
    x = inputs.draw(op, length=120, dtype=np.float16).map(lambda y: 60 * abs(y))
    want = inputs.call(op, x.map(np.float32), **call)
    got = inputs.call(op, x, **call)
    if "return_state" in call:
        got, want = got[0], want[0]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want, rtol=2e-3)

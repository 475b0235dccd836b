"""States of recurrences that come in and go out: parts compute what the whole sequence does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from reformax.declared import Unsupported
from reformax.ops import dense, gated_delta, gated_linear, kda, linear, performer, retention
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, with_x64
from tests.ops import inputs

GATES = dict(gated=True, conv_size=3, chunk_len=4)
OPS = {
    "linear": linear.linear(conv_size=3, chunk_len=4),
    "retention": retention.retention(**GATES),
    "gated_linear": gated_linear.gated_linear(**GATES),
    "gated_delta": gated_delta.gated_delta(**GATES),
    "kda": kda.kda(**GATES),
    "linear, no convolution": linear.linear(chunk_len=4),
    "performer": performer.performer(n_features=16, epsilon=1e-2, chunk_len=4),
}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
# Padding between, behind and in front; a segment that ends with a part, and one within a part.
PACKED = np.array([[1] * 9 + [2] * 3 + [3] * 8 + [0] * 3, [0] * 2 + [1] * 14 + [0] * 4 + [2] * 3])


@functools.partial(jax.jit, static_argnums=0)
def call(op, x, **options):
    """The output and the last state."""
    return inputs.call(op, x, causal=True, return_state=True, **options)


def in_parts(op, x, ids, lengths):
    """The outputs of parts of these lengths, and the last state."""
    outs, state, start = [], None, 0
    for n in lengths:
        part = slice(start, start + n)
        masks = {} if ids is None else dict(segment_ids=ids[:, part])
        if state is not None and ids is not None:  # whose segment has ended is begun anew
            before = np.array([row[:start][row[:start] != 0][-1:] for row in ids]).reshape(-1, 1)
            now = np.array([row[part][row[part] != 0][:1] for row in ids]).reshape(-1, 1)
            same = (before == now)[:, 0]
            state = jax.tree.map(
                lambda s, m=same: np.where(m.reshape(-1, *[1] * (s.ndim - 1)), s, 0), state
            )
        out, state = call(op, x.at(slice(None), part), initial_state=state, **masks)
        outs.append(out)
        start += n
    return np.concatenate(outs, axis=1), state


@every_op
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_parts_are_the_whole(op, packed):
    ids = PACKED if packed else None
    x = inputs.draw(op, length=23)
    want, last = call(op, x, segment_ids=ids)
    plain = jax.jit(lambda x: inputs.call(op, x, causal=True, segment_ids=ids))(x)
    np.testing.assert_allclose(want, plain, atol=2e-6)
    for lengths in ((9, 14), (5, 4, 8, 6)) if not packed else ((9, 14),):
        got, state = in_parts(op, x, ids, lengths)
        np.testing.assert_allclose(got, want, atol=5e-6)
        assert_trees_close(state, last, 5e-6)


@every_op
def test_the_last_state_is_that_of_decoding(op):
    x, lengths = inputs.draw(op, length=11), np.array([10, 10])
    _, state = call(op, x.at(slice(None), slice(0, 10)))
    cache = jax.jit(lambda x: inputs.init_cache(op, x, plan=(), lengths=lengths, capacity=11))(x)
    assert_trees_close(state, cache, 2e-6)
    step = jax.jit(functools.partial(inputs.step, op))
    got, _ = step(x.at(slice(None), slice(10, 11)), state, position=lengths)
    np.testing.assert_allclose(got[:, 0], call(op, x)[0][:, 10], atol=5e-6)


@every_op
def test_gradients_go_through_the_state(op):
    x = inputs.draw(op, length=13)
    d_out = np.random.default_rng(3).normal(size=x.v.shape).astype(np.float32)

    def loss(arrays, params, cut):
        y = inputs.Inputs(*arrays, params)
        outs, state, start = [], None, 0
        for end in cut:
            part = y.at(slice(None), slice(start, end))
            out, state = inputs.call(op, part, causal=True, initial_state=state, return_state=True)
            outs.append(out)
            start = end
        total = sum(jnp.sum(jnp.sin(s)) for s in jax.tree.leaves(state))
        return jnp.sum(jnp.concatenate(outs, axis=1) * d_out) + total

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, cut=cut), (0, 1)))(x[:4], x.params)
        for cut in ((6, 13), (13,))
    )
    assert_trees_close(got, want, 2e-5)


def test_the_gradient_of_a_state_is_a_difference():
    op = kda.kda(normalized=False, gated=False, chunk_len=4)
    with with_x64():
        x = inputs.draw(op, length=9, dtype=np.float64)
        rng = np.random.default_rng(0)
        begin, change = rng.normal(size=(2, *op.first_state(2, op.dims(x.q, x.v)).state.shape))

        @jax.jit
        def loss(state):
            given = op.first_state(2, op.dims(x.q, x.v), np.float64)._replace(state=state)
            out, after = inputs.call(op, x, causal=True, initial_state=given, return_state=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(after.state))

        gradient = jax.grad(loss)(begin)
        ends = [loss(begin + h * change) for h in (1e-6, -1e-6)]
        np.testing.assert_allclose(np.sum(gradient * change), (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_kernels_compute_the_same(name):
    """Interpreted, with packed rows, from a state that is not zeros."""
    op, kernel = (dataclasses.replace(OPS[name], impl=impl) for impl in ("xla", INTERPRETED))
    x = inputs.draw(op, length=70, batch=2)
    ids = np.repeat([[1, 2, 0], [3, 3, 4]], [30, 35, 5], axis=1)
    rng = np.random.default_rng(4)
    first = op.first_state(2, op.dims(x.q, x.v))
    state = jax.tree.map(lambda s: np.abs(rng.normal(size=s.shape)).astype(np.float32), first)

    def loss(op, state, arrays):
        y = inputs.Inputs(*arrays, x.params)
        found = inputs.call(
            op, y, causal=True, segment_ids=ids, initial_state=state, return_state=True
        )
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(found)), found

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, o), (0, 1), has_aux=True))(state, x[:4])
        for o in (kernel, op)
    )
    assert_trees_close(got, want, 3e-5)


def test_refusals():
    op, x = kda.kda(), inputs.draw(kda.kda(), length=5)
    _, state = inputs.call(op, x, causal=True, return_state=True)
    for options, message in (
        (dict(causal=False, return_state=True), "^causal=False: kda.* is causal only"),
        (dict(mask=np.ones((2, 5), bool), return_state=True), "^mask is given, but a state is of"),
        (dict(initial_state=state._replace(state=state.state[:1])), "^initial_state has shapes"),
        (dict(initial_state=state.state), "^initial_state has shapes"),
        (
            dict(segment_ids=np.array([[1, 2, 1, 1, 1]] * 2), return_state=True),
            r"^segment_ids has a row \[1, 2, 1, 1, 1\]: with a state, a segment's",
        ),
        (dict(return_state=1), "^return_state is 1: expected True or False"),
    ):
        with pytest.raises((ValueError, Unsupported), match=message):
            inputs.call(op, x, **(dict(causal=True) | options))
    q = inputs.draw(dense.dense(), length=5)
    with pytest.raises(Unsupported, match="^op is dense: it carries no state, use an op"):
        inputs.call(dense.dense(), q, causal=True, return_state=True)
    for drawn in (performer.performer(seed=None), performer.performer(redraw=10)):
        message = re.escape(f"op is {drawn}: it carries no state from features that may be drawn")
        with pytest.raises(Unsupported, match=f"^{message}"):
            x = inputs.draw(drawn, length=5)
            inputs.call(drawn, x, causal=True, return_state=True, rng=jax.random.key(0))
        assert not drawn.carries_state and performer.performer().carries_state


def test_sums_of_zeros_are_of_no_position():
    """A performer's state of zeros begins anew, whatever it was relative to; in a step too."""
    op = OPS["performer"]
    x = inputs.draw(op, length=6)
    x = x._replace(k=9 * x.k)  # features of long keys are far below 1
    want, last = call(op, x)
    step = jax.jit(functools.partial(inputs.step, op))
    for scale in (-80.0, 0.0, 80.0):
        first = op.first_state(2, op.dims(x.q, x.v))
        first = first._replace(scale=first.scale + scale)
        assert_trees_close(call(op, x, initial_state=first), (want, last), 1e-5)
        out, _ = step(x.at(slice(None), slice(0, 1)), first, position=jnp.zeros(2, jnp.int32))
        np.testing.assert_allclose(out[:, 0], want[:, 0], atol=1e-5)


def test_apply_from_checks_its_arguments():
    op = kda.kda(conv_size=3)
    x = inputs.draw(op, length=5)
    _, state = inputs.call(op, x, causal=True, return_state=True)

    def run(state, **options):
        gates = dict(extra_projections=x.extra_projections)
        return op.apply_from(x.params, x.q, x.k, x.v, state, **(gates | options))

    for name, value in dict(lengths=np.array([3, 3]), dropout=0.5, causal=False).items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            run(state, **{name: value})
    for other in (None, state.state, jax.tree.map(lambda s: s[:1], state)):
        for compiled in (run, jax.jit(run)):
            with pytest.raises(ValueError, match="^state has shapes .*expected .*first_state"):
                compiled(other)
    with pytest.raises(ValueError, match=r"^segment_ids has a row \[1, 2, 1, 1, 1\]"):
        run(state, segment_ids=np.array([[1] * 5, [1, 2, 1, 1, 1]]))


def test_traced_ids_of_broken_segments_make_nan():
    op = linear.linear(conv_size=4)
    x = inputs.draw(op, length=8, batch=4)
    # Segments in any order, padding within one, a broken one, padding alone.
    ids = np.array(
        [[3, 3, 1, 1, 1, 2, 2, 2], [1, 0, 1, 2, 0, 2, 0, 3], [1, 2, 1, 2, 1, 1, 2, 2], [0] * 8]
    )

    @jax.jit
    def run(ids):
        return inputs.call(op, x, causal=True, segment_ids=ids, return_state=True)

    out, state = run(ids)
    right = np.array([0, 1, 3])
    want = inputs.call(op, x, causal=True, segment_ids=ids)
    np.testing.assert_allclose(out[right], want[right], atol=2e-6)
    for a in jax.tree.leaves((out, state)):
        assert np.isnan(a[2]).all() and not np.isnan(a[right]).any()


def test_a_mesh_with_explicit_axes():
    """Rows may be split; where JAX cannot type the call, the error says so in one line."""
    mesh = jax.make_mesh((1,), ("axis",), axis_types=(AxisType.Explicit,))
    op = kda.kda()
    x = inputs.draw(op, length=5)

    def lie(tree, *axes):
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))

    def run(x, **options):
        return inputs.call(op, x, causal=True, initial_state=state, **options)

    _, state = inputs.call(op, x, causal=True, return_state=True)
    want, state = run(x), lie(state, "axis")
    params = lie(x.params)
    np.testing.assert_allclose(run(lie(x, "axis")._replace(params=params)), want, atol=2e-6)
    heads = inputs.Inputs(*lie(x[:4], None, None, "axis"), params)
    for options, given in (({}, "initial_state"), (dict(return_state=True), "return_state=True")):
        call = functools.partial(run, **options)
        for one in (call, jax.jit(call)):
            with pytest.raises(Unsupported, match=f"^{given} on a mesh with explicit axes, over"):
                one(heads)

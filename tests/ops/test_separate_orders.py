"""The plans of Smyrf and of LSH attention with separate queries and keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import asymmetric_lsh, smyrf
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.hashing import asymmetric

KEY = jax.random.key(0)
OPS = {
    "smyrf": functools.partial(smyrf.smyrf, chunk_len=8),
    "asymmetric_lsh": functools.partial(asymmetric_lsh.asymmetric_lsh, chunk_len=8, n_buckets=8),
}
over_ops = pytest.mark.parametrize("make", OPS.values(), ids=OPS)


def draw(*shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for _ in range(3)]


def make_plan(op, q, k, segment_ids=None):
    masks = dict(segment_ids=segment_ids, causal=True, rng=KEY, train=True)
    return jax.jit(lambda q, k: op.plan((), q, k, **masks))(q, k)


def test_hashes_are_in_the_order_of_the_transformed_products():
    """Up to the bits that they have not; M is of one vector, far longer than the others."""
    q, k, _ = draw(2, 300, 3, 8)
    q[0, 5] = 40 * q[0, 5]
    directions = asymmetric.draw_directions(3, 8, 4, KEY)

    @jax.jit
    def run(k):
        (_, squares), most = asymmetric.lengths(q, k, None)
        part = asymmetric.on_directions(k, directions)
        return asymmetric.hashes(part, squares, most, directions[:, -2])

    found = np.asarray(run(k))
    assert found.min() >= 0 and found.max() < asymmetric.N_CODES
    squares = [(x.astype(np.float64) ** 2).sum(axis=-1) for x in (q, k)]
    most = sum(x.max(axis=1, keepdims=True) for x in squares)
    rest = np.sqrt(most - squares[1])[..., None]
    long = np.concatenate([k, rest, 0 * rest], axis=-1)
    product = np.einsum("bthc,hcr->bhrt", long, np.asarray(directions, np.float64))
    for row in np.ndindex(2, 3, 4):
        order = np.argsort(found[row], kind="stable")
        steps = np.diff(product[row][order])
        assert steps.min() > -4e-3 * np.std(product[row])
        assert np.median(np.unique(found[row], return_counts=True)[1]) == 1


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("packed", [False, True])
@over_ops
def test_a_row_alone_has_the_order_that_it_has_among_others(make, packed, backend, monkeypatch):
    """Of more rows than numbers of 32 bits can tell apart, besides hashes, too."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    q, k, _ = draw(41, 20, 1, 4)
    ids = np.random.default_rng(0).integers(0, 3, (41, 20)) if packed else None
    op = make(n_hashes=100)
    among = make_plan(op, q, k, ids)
    for row in (0, 40):
        rows = slice(row, row + 1)
        alone = make_plan(op, q[rows], k[rows], ids if ids is None else ids[rows])
        np.testing.assert_array_equal(alone.query_positions, among.query_positions[rows])
        np.testing.assert_array_equal(alone.key_positions, among.key_positions[rows])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_kernel_hashes_as_array_operations_do(dtype):
    q, k, _ = draw(2, 200, 2, 16, dtype=dtype)
    make = functools.partial(OPS["asymmetric_lsh"], n_hashes=3, n_buckets=(4, 6))
    want, got = (make_plan(make(impl=impl), q, k + 1) for impl in ("xla", INTERPRETED))
    np.testing.assert_array_equal(got.query_positions, want.query_positions)
    np.testing.assert_array_equal(got.key_positions, want.key_positions)


@over_ops
def test_a_plan_made_for_the_kernel_serves_array_operations(make):
    """The kernel may take queries and keys and not the values, and its plan has no slots."""
    q, k, v = draw(2, 40, 2, 8)
    options = dict(n_hashes=2, count_once=False)
    plan = make_plan(make(**options, impl=INTERPRETED), q, k)
    assert plan.query_slots is None and plan.key_slots is None
    op = make(**options, impl="xla")
    masks = dict(segment_ids=None, causal=True, dropout=0.0, rng=None)
    outs = [
        jax.jit(lambda plan: op.apply((), q, k, v, plan=plan, **masks))(plan)
        for plan in (plan, make_plan(op, q, k))
    ]
    np.testing.assert_allclose(*outs, atol=1e-6)

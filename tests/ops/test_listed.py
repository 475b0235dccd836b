"""Attention by lists, and the gradients of listed keys, against array operations of one plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dsa
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import listed
from tests.helpers import assert_trees_close

OPTIONS = dict(n_index_heads=2, d_index=4)


def both_passes(impl, plan, params, arrays, d_out, **call):
    """The output of `dsa` and its gradients by a plan."""
    op = dsa.dsa(top_k=plan.shape[2], soft_cap=2.0, **OPTIONS, impl=impl)

    @jax.jit
    def run(*inputs):
        out, vjp = jax.vjp(lambda *x: op.apply(*x, plan=plan, **call), *inputs)
        return out, vjp(d_out.astype(out.dtype))

    return run(params, *arrays)


# Query heads, key heads, keys of a list, whether lists name the future, dropout, and whether rows
# are packed.
CASES = {
    "a group": (4, 1, 5, True, 0.0, False),
    "packed": (6, 2, 12, True, 0.2, True),
    "a key head each": (3, 3, 70, False, 0.0, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("by_list", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_kernels_attend_to_listed_keys_as_array_operations_do(name, by_list, monkeypatch):
    """In several chunks of queries, with several programs for a group of heads."""
    n_heads, n_kv, n_listed, causal, dropout, packed = CASES[name]
    monkeypatch.setattr(listed, "pays", lambda *x: by_list)
    monkeypatch.setattr(listed, "MAX_BYTES", 20_000)
    monkeypatch.setattr(listed, "MAX_ROW_BYTES", 2 * 16 * 4)
    rng, length = np.random.default_rng(0), 53
    shapes = [(n_heads, 8), (n_kv, 8), (n_kv, 6), (n_heads, 6)]
    *arrays, d_out = (
        jax.device_put(rng.normal(size=(2, length, *x)).astype(jnp.float32)) for x in shapes
    )
    ids = jnp.asarray(np.repeat([[1, 2, 0], [3, 3, 1]], [20, 26, 7], axis=1)) if packed else None
    op = dsa.dsa(top_k=n_listed, **OPTIONS)
    params = op.init(jax.random.key(1), op.dims(arrays[0], arrays[2]))
    # A query sees less than its list names.
    plan = np.stack([rng.permutation(length) for _ in range(2 * length)])[:, :n_listed]
    plan = np.pad(plan, ((0, 0), (0, n_listed - plan.shape[1])), constant_values=-1)
    plan = jnp.asarray(np.where(rng.random(plan.shape) < 0.2, -1, plan), jnp.int32)
    call = dict(segment_ids=ids, causal=causal, dropout=dropout, rng=jax.random.key(2))
    arguments = plan.reshape(2, length, n_listed), params, arrays, d_out
    got, want = (both_passes(impl, *arguments, **call) for impl in (INTERPRETED, "xla"))
    assert_trees_close(got, want, 2e-5)


def test_pairs_are_in_the_order_of_keys_and_then_of_queries():
    rng, n_keys = np.random.default_rng(0), 9
    lists = rng.integers(-1, n_keys, (2, 7, 4))
    pair, bounds = listed.queries_of_keys(jnp.asarray(lists, jnp.int32), n_keys)
    for row, key in np.ndindex(2, n_keys):
        found = pair[bounds[row, key] : bounds[row, key + 1]]
        np.testing.assert_array_equal(
            found, np.flatnonzero(lists == key)[np.flatnonzero(lists == key) // 28 == row]
        )


@pytest.mark.parametrize(
    "n_listed, n_keys, group, itemsize, by_list",
    [
        (2048, 65_536, 32, 2, True),
        (512, 65_536, 4, 2, True),
        (512, 65_536, 1, 2, True),
        (2048, 65_536, 1, 2, False),
        (512, 16_384, 1, 2, False),
        (2048, 4096, 32, 2, False),
        (256, 16_384, 1, 4, False),
    ],
)
def test_lists_pay_for_few_keys_or_many_heads_of_a_key_head(
    n_listed, n_keys, group, itemsize, by_list
):
    assert listed.pays(n_listed, n_keys, group, itemsize) == by_list

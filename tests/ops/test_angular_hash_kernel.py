"""The kernel of angular hashing, interpreted, against array operations; which ops use it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import asymmetric_lsh, hash_sparse, lsh
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.hashing import angular as hashing
from tests.helpers import assert_trees_equal, lower_for_gpu
from tests.ops import inputs


@pytest.mark.parametrize(
    "length, size, factors, n_hashes",
    [(37, 8, (4,), 3), (150, 20, (6, 10), 2), (20, 64, (300,), 1)],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_same_buckets(length, size, factors, n_hashes, dtype):
    """More vectors and directions than a program has at a time, and a vector of zeros."""
    vectors = np.random.default_rng(0).normal(size=(2, length, 3, size)).astype(dtype)
    vectors[0, 3] = 0

    @jax.jit
    def buckets(vectors):
        rotations = hashing.draw_rotations(vectors, factors, n_hashes, jax.random.key(0))
        args = rotations, vectors, factors
        return [hashing.hash_by(*args, impl) for impl in ("xla", INTERPRETED)]

    np.testing.assert_array_equal(*buckets(vectors))


def test_one_vector_is_hashed_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    x, rotations = jnp.zeros((2, 1, 3, 8)), jnp.zeros((3, 8, 2, 5))
    hashed = functools.partial(hashing.hash_by, factors=(4, 6), impl="pallas")
    assert "angular_hash" in lower_for_gpu(hashed, rotations, x)


KEY = jax.random.key(1)
HASHING = dict(
    lsh=lambda **options: lsh.lsh(chunk_len=4, n_hashes=2, **options),
    lsh_strict=lambda **options: lsh.lsh(chunk_len=4, n_hashes=2, strictly_causal=True, **options),
    asymmetric_lsh=lambda **options: asymmetric_lsh.asymmetric_lsh(
        chunk_len=4, n_hashes=2, **options
    ),
    hash_sparse=lambda **options: hash_sparse.hash_sparse(n_buckets=4, **options),
    hash_sparse_shared=lambda **options: hash_sparse.hash_sparse(
        n_buckets=4, shared_qk=True, **options
    ),
)


def functions_of(op):
    """The op's functions that hash, called with a prompt, a new position, and a cache."""
    lengths = np.array([9, 5])

    def plan(prompt, new, cache):
        return inputs.plan(op, prompt, causal=True, rng=KEY, train=False)

    def init_cache(prompt, new, cache):
        return inputs.init_cache(op, prompt, plan=None, lengths=lengths, capacity=12, rng=KEY)

    def step(prompt, new, cache):
        return inputs.step(op, new, cache, position=lengths)[1]

    return dict(plan=plan, init_cache=init_cache, step=step)


@pytest.mark.parametrize("function", ["plan", "init_cache", "step"])
@pytest.mark.parametrize("factory", HASHING.values(), ids=HASHING)
def test_the_impl_of_an_op_decides_how_it_hashes(factory, function, monkeypatch):
    """The hashes are equal; a step with "auto" uses array operations, but in LSH attention."""
    plain = factory(impl="xla")
    inserts = function == "step" and isinstance(plain, lsh.lsh)  # in the kernel that hashes
    name = "insert_newest" if inserts else "angular_hash"
    x = inputs.draw(plain, 2, 10)
    prompt, new = x.at(slice(None), slice(0, 9)), x.at(slice(None), slice(9, 10))
    args = prompt, new, functions_of(plain)["init_cache"](prompt, None, None)

    def of(impl):
        return functions_of(factory(impl=impl))[function]

    def hashes_in_a_kernel(impl):
        return f"name={name}" in str(jax.make_jaxpr(of(impl))(*args))

    assert not hashes_in_a_kernel("xla")
    assert hashes_in_a_kernel(INTERPRETED)
    with pytest.raises(NotImplementedError, match="impl='pallas' with the backend 'cpu'"):
        of("pallas")(*args)
    if function != "plan":  # plans of kernels and of array operations may differ
        found = [jax.jit(of(impl))(*args) for impl in (INTERPRETED, "xla")]
        assert_trees_equal(*([x.buckets for x in found] if inserts else found))
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    assert hashes_in_a_kernel("auto") == (inserts or function != "step")


@pytest.mark.parametrize("chunk_len, fits", [(2**19, True), (2**19 + 1, False)])
def test_a_reach_that_no_tile_holds_is_not_inserted_by_the_kernel(chunk_len, fits, monkeypatch):
    """A query sees two chunks. Triton's tiles hold 2**20 numbers."""
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    q = jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.bfloat16)

    def impl_of_insert(impl):
        return lsh.lsh(chunk_len=chunk_len, impl=impl)._impl_of_insert(q, q, 2**22)

    assert impl_of_insert("xla") == "xla" and impl_of_insert(INTERPRETED) == INTERPRETED
    assert impl_of_insert("auto") == ("pallas" if fits else "xla")
    if fits:
        assert impl_of_insert("pallas") == "pallas"
    else:
        with pytest.raises(
            NotImplementedError, match="^impl='pallas' with 1,048,578 slots in reac"
        ):
            impl_of_insert("pallas")

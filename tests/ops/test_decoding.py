"""Decoding: a step of every op is the last row of its attention over the tokens so far."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reformax.ops import asymmetric_lsh, dense, flash, local, lsh
from reformax.ops.calls import this_gpu
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.decoding import cache
from reformax.ops.kernels.triton import sorted_order
from reformax.ops.numerics.logits import PLAIN, Logits
from tests.helpers import with_x64
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over, the_others

KEY = jax.random.key(3)
# In a circle of chunks padding counts: another test has it.
DECODING = [row for row in ROWS if row.decodes]


@over(ROWS)
def test_every_op_decodes_or_says_why_not(row):
    op = row.op()
    assert (op.decoding == "no") == bool(row.no_step)


def draw(op, batch, length, **options):
    """Inputs of 2 heads whose values are smaller than their keys."""
    return inputs.draw(op, batch, length, d_v=3, **options)


def run(op, x, lengths, n_prompt, capacity):
    """Every row's prompt of `lengths`, padded to `n_prompt`, then as many steps as fit.

    Returns:
      `{(row, position): output}` of the steps.
    """
    n_rows = len(lengths)
    total = x.q.shape[1]
    prompt = x.at(slice(None), slice(0, n_prompt))
    segment_ids = (np.arange(n_prompt) < lengths[:, None]).astype(np.int32)

    @jax.jit
    def start(prompt, lengths):
        masks = dict(segment_ids=segment_ids, causal=True, rng=KEY, train=False, length=capacity)
        plan = inputs.plan(op, prompt, **masks)
        options = dict(lengths=lengths, capacity=capacity, rng=KEY)
        return inputs.init_cache(op, prompt, plan=plan, **options)

    @jax.jit
    def step(new, cache, position):
        return inputs.step(op, new, cache, position=position)

    outs, position, held = {}, lengths.copy(), start(prompt, lengths)
    shapes = jax.tree.map(jnp.shape, held)
    for _ in range(total - lengths.max()):
        new = x.map(lambda y, at=position: y[np.arange(n_rows), at][:, None])
        out, held = step(new, held, position)
        assert out.dtype == x.v.dtype
        assert jax.tree.map(jnp.shape, held) == shapes
        outs |= {(b, t): np.asarray(out)[b, 0] for b, t in enumerate(position)}
        position = position + 1
    return outs


def forward(op, length):
    """Attention of arrays of `length` whose first n positions are tokens and the rest padding."""

    @jax.jit
    def run(x, n):
        segment_ids = jnp.broadcast_to(jnp.arange(length) < n, x.q.shape[:2])
        return inputs.call(op, x, causal=True, segment_ids=segment_ids, rng=KEY, train=False)

    return run


def alone_in_this(row):
    """Quick where `test_all_steps_are_one_forward` does not say much the same."""
    return one_of_each_kind(row) or not row.plans_ahead


@over(DECODING, quick=alone_in_this)
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_a_step_is_the_last_row(row, data):
    """Rows of different lengths, none of them a multiple of anything."""
    options = {name: data.draw(st.sampled_from(values)) for name, values in row.options.items()}
    op = row.op(**options)
    total = data.draw(st.sampled_from((19, 26)))
    n_prompt = data.draw(st.sampled_from((1, 7, 13)))
    lengths = np.array([n_prompt, data.draw(st.integers(1, n_prompt))], np.int32)
    x = draw(op, 2, total, seed=data.draw(st.integers(0, 2**31)))
    attend = forward(op, total)
    for (b, t), out in run(op, x, lengths, n_prompt, capacity=total).items():
        want = np.asarray(attend(x, t + 1))[b, t]
        np.testing.assert_allclose(out, want, atol=1e-5 * max(1, np.abs(want).max()))


@over(DECODING, quick=one_of_each_kind)
def test_arrays_without_padding(row):
    """The row over exactly the tokens so far, whatever the capacity."""
    op, lengths = row.op(), np.array([5, 3], np.int32)
    x = draw(op, 2, 24)
    outs = run(op, x, lengths, n_prompt=5, capacity=40)
    now = x.at(slice(0, 1), slice(0, 17))
    want = jax.jit(lambda x: inputs.call(op, x, causal=True, rng=KEY, train=False))(now)[0, -1]
    np.testing.assert_allclose(outs[0, 16], want, atol=1e-5)


@over(DECODING)
def test_positions_of_64_bits_leave_a_cache_as_it_is(row):
    op, lengths = row.op(), np.array([5, 3])
    with with_x64():
        x = draw(op, 2, 5, dtype=jnp.float32)

        def start():
            plan = inputs.plan(op, x, causal=True, rng=KEY, train=False, length=8)
            return inputs.init_cache(op, x, plan=plan, lengths=lengths, capacity=8, rng=KEY)

        def step(held):
            new = x.at(slice(None), slice(0, 1))
            return inputs.step(op, new, held, position=jnp.asarray(lengths))[1]

        held = jax.eval_shape(start)
        assert jax.eval_shape(step, held) == held


@over(DECODING[1::2])
def test_bfloat16(row):
    op, lengths = row.op(), np.array([5], np.int32)
    x = draw(op, 1, 20, dtype=jnp.bfloat16)
    attend = forward(op, 20)
    for (b, t), out in run(op, x, lengths, n_prompt=5, capacity=20).items():
        want = np.asarray(attend(x, t + 1), np.float32)[b, t]
        np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=2e-2, atol=2e-2 * 3)


@over((row for row in DECODING if row.plans_ahead), quick=the_others)
def test_all_steps_are_one_forward(row):
    """Where nothing later decides what a position sees: one call over all tokens has every step."""
    op, lengths = row.op(), np.array([9, 4], np.int32)
    x = draw(op, 2, 37)
    whole = jax.jit(lambda x: inputs.call(op, x, causal=True, rng=KEY, train=False))(x)
    whole = np.asarray(whole)
    for (b, t), out in run(op, x, lengths, n_prompt=9, capacity=37).items():
        np.testing.assert_allclose(out, whole[b, t], atol=1e-5)


def test_ordinary_lsh_at_once_is_another_function():
    """What `strictly_causal` is for: a later token moves a border, and an earlier row changes."""
    op, lengths = lsh.lsh(chunk_len=4, n_hashes=1, n_buckets=4), np.array([1], np.int32)
    x = draw(op, 1, 37)
    whole = np.asarray(jax.jit(lambda x: inputs.call(op, x, causal=True, rng=KEY))(x))
    outs = run(op, x, lengths, n_prompt=1, capacity=37)
    errors = [np.abs(out - whole[b, t]).max() for (b, t), out in outs.items()]
    assert max(errors) > 1e-2


@over(row for row in DECODING if row.holds_keys)
def test_the_cache_holds_what_a_step_may_see(row):
    op, capacity = row.op(), 40
    prompt = draw(op, 1, 11)
    options = dict(plan=None, lengths=np.array([11]), capacity=capacity, rng=KEY)
    held = jax.eval_shape(lambda x: inputs.init_cache(op, x, **options), prompt)
    keys = [x for x in jax.tree.leaves(held) if x.ndim == 4 and x.shape[-1] == 4]
    assert keys[0].shape == (1, 2, row.n_held or capacity, 4)


def make_plan(op, x):
    return inputs.plan(op, x, causal=True, rng=KEY, train=False)


@pytest.mark.parametrize(
    "op, near, far",
    [
        (local.local, dict(n_chunks_before=3), dict(chunk_len=2**30, n_chunks_before=3)),
        (lsh.lsh, dict(n_chunks_before=3), dict(n_chunks_before=4096)),
        (lsh.lsh, dict(chunk_len=16), dict(chunk_len=2**30)),
        (asymmetric_lsh.asymmetric_lsh, dict(n_chunks_before=3), dict(n_chunks_before=4096)),
        (
            functools.partial(lsh.lsh, strictly_causal=True, n_buckets=4),
            dict(chunk_len=16),
            dict(chunk_len=2**30, n_chunks_before=4096),
        ),
    ],
    ids=["local", "chunks before", "chunk", "asymmetric", "strict"],
)
def test_a_step_sees_no_further_than_the_sequence(op, near, far):
    """Sizes of which a product would not fit into 32 bits are those that suffice."""
    small = dict(chunk_len=4, n_chunks_before=1)
    x = draw(op(**small | near), 2, 11)
    one = np.ones(2, np.int32)
    near, far = (run(op(**small | sizes), x, one, 1, 11) for sizes in (near, far))
    for key, out in near.items():
        np.testing.assert_allclose(far[key], out, rtol=1e-5, atol=1e-6)


@over(row for row in DECODING if not row.holds_keys)
def test_the_cache_does_not_grow(row):
    assert size_of_cache(row.op(), 40) == size_of_cache(row.op(), 4000)


def size_of_cache(op, capacity):
    """The shapes of the arrays after a prompt."""
    prompt = draw(op, 1, 11)
    options = dict(plan=make_plan(op, prompt), lengths=np.array([11]), capacity=capacity, rng=KEY)
    held = jax.eval_shape(lambda: inputs.init_cache(op, prompt, **options))
    return tuple(x.shape for x in jax.tree.leaves(held))


@over(DECODING, quick=one_of_each_kind)
def test_a_cache_of_one_size_goes_on_without_end(row):
    op = row.op()
    sizes = {size_of_cache(op, capacity) for capacity in (40, 4000)}
    assert (op.endless_from is not None) == (len(sizes) == 1)
    if op.endless_from is not None:
        x = draw(op, 2, 3 * max(op.endless_from, 5))
        lengths, capacity = np.array([3, 2]), max(op.endless_from, 4)
        near, far = (run(op, x, lengths, 3, n) for n in (capacity, x.q.shape[1]))
        for key, out in far.items():
            np.testing.assert_allclose(near[key], out, rtol=1e-5, atol=1e-6)


def test_a_ring_holds_the_last_positions():
    k = np.arange(11, dtype=np.float32).reshape(1, 11, 1, 1).repeat(3, axis=0)
    ring = cache.fill_ring(k, k, np.array([11, 5, 0]), n_slots=4)
    assert sorted(np.ravel(ring.keys[0])) == [7, 8, 9, 10]
    assert sorted(np.ravel(ring.keys[1])) == [1, 2, 3, 4]
    held = np.asarray(cache.positions_by_slot(jnp.array([10, 4, -1]), 4))
    np.testing.assert_array_equal(np.ravel(ring.keys[:2]), held[:2].ravel())
    assert np.all(held[2] < 0)
    ring = cache.add_to_ring(ring, k[:, :1] + 99, k[:, :1], np.array([11, 5, 0]))
    assert sorted(np.ravel(ring.keys[0])) == [8, 9, 10, 99]
    assert sorted(np.ravel(ring.keys[1])) == [2, 3, 4, 99]


@pytest.mark.parametrize("pad_chunks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("n_chunks_before", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_in_a_circle_of_chunks(pad_chunks, n_chunks_before):
    """The last row of attention over the tokens so far and no padding but that to whole chunks."""
    op = lsh.lsh(
        chunk_len=4,
        n_hashes=3,
        n_buckets=4,
        n_chunks_before=n_chunks_before,
        count_once=False,
        wrap=True,
        pad_chunks=pad_chunks,
    )
    x = draw(op, 2, 19)
    outs = run(op, x, np.array([3, 6]), 6, 25)
    for n in (4, 8, 13):
        so_far = x.at(slice(None), slice(0, n))
        want = jax.jit(lambda x: inputs.call(op, x, causal=True, rng=KEY, train=False))(so_far)
        want = np.asarray(want)
        for b in range(2):
            if (b, n - 1) in outs:
                np.testing.assert_allclose(outs[b, n - 1], want[b, n - 1], atol=1e-5)


@over(row for row in DECODING if row.op().decoding == "beams")
def test_beams_share_their_past(row):
    """Where beams leave some of theirs and go on from others, none of the cache is copied."""
    check_beams(row.op(), dict(n_heads=2))


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_beams_of_grouped_heads(n_kv_heads):
    check_beams(dense.dense(), dict(n_heads=4, n_kv_heads=n_kv_heads))


def check_beams(op, heads):
    n_groups, n_beams, capacity = 2, 3, 9
    n_rows = n_groups * n_beams
    rng = np.random.default_rng(0)
    prompt = draw(op, n_groups, 2, **heads)
    lengths = np.full(n_groups, 2)

    @jax.jit
    def start(prompt):
        masks = dict(plan=make_plan(op, prompt), lengths=lengths, capacity=capacity, rng=KEY)
        held = inputs.init_cache(op, prompt, **masks)
        return cache.take_rows(held, np.arange(n_rows) // n_beams)

    @jax.jit
    def steps(new, copied, shared, origins, position):
        beam = jnp.arange(n_beams)[:, None]
        origins = jnp.where(jnp.arange(capacity) == position[0], beam, origins)
        want, copied = inputs.step(op, new, copied, position=position)
        got, shared = inputs.step(op, new, shared, position=position, origins=origins)
        return want, got, copied, shared, origins

    copied = shared = start(prompt)
    take_rows = jax.jit(cache.take_rows)
    origins = np.zeros((n_groups, n_beams, capacity), np.int32)
    for t in range(2, capacity):
        new = draw(op, n_rows, 1, seed=t, **heads)._replace(params=prompt.params)
        position = np.full(n_rows, t)
        want, got, copied, shared, origins = steps(new, copied, shared, origins, position)
        np.testing.assert_allclose(got, want, atol=1e-6)
        parents = rng.integers(n_beams, size=(n_groups, n_beams))
        copied = take_rows(copied, (parents + n_beams * np.arange(n_groups)[:, None]).reshape(-1))
        origins = np.take_along_axis(np.asarray(origins), parents[..., None], axis=1)


@pytest.mark.parametrize(
    "n_groups, n_places, sizes, dtype, given",
    [
        (4, 70, (8, 8), "float32", ()),
        (2, 20, (20, 12), "float32", ("alone", "bias")),
        (2, 20, (8, 8), "float32", ("bias", "logits")),
        (4, 130, (16, 16), "bfloat16", ("alone", "index")),
    ],
)
def test_the_kernel_of_one_query(n_groups, n_places, sizes, dtype, given):
    """Heads in groups, keys that tiles do not divide, rows that see nothing, NaN that is hidden."""
    rng, n_heads, n_keys = np.random.default_rng(0), 4, 90 if "index" in given else n_places

    def numbers(*shape):
        return jax.device_put(rng.normal(size=shape).astype(dtype))

    q, alone = numbers(2, 1, n_heads, sizes[0]), numbers(2, 1, n_heads, sizes[1])
    keys, values = (numbers(2, n_groups, n_keys, size) for size in sizes)
    mask = rng.random((2, n_heads, n_places)) < 0.5
    mask[:, 0] = False
    options = dict(
        alone=alone,
        bias=numbers(1, n_heads, n_places),
        index=jax.device_put(rng.integers(0, n_keys, mask.shape).astype(jnp.int32)),
    )
    call = Call(logits=Logits(scale=0.5, soft_cap=0.7) if "logits" in given else PLAIN)
    options = {name: options[name] for name in given if name in options}

    def run(impl, keys, values):
        return jax.jit(lambda: cache.attend_to(call, q, keys, values, mask, impl, **options))()

    want = run("xla", keys, values)
    if "index" not in given:
        hidden = ~mask.reshape(2, n_groups, -1, n_places).any(axis=2)[..., None]
        keys, values = (jnp.where(hidden, jnp.nan, x) for x in (keys, values))
    got = run(INTERPRETED, keys, values)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("n_heads, n_groups, sizes", [(4, 2, (8, 8)), (3, 3, (20, 12))])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_kernel_of_one_query_adds_a_key(n_heads, n_groups, sizes, indexed):
    """The slot of a position is taken again, NaN that lay there is gone, others stay."""
    rng, n_slots = np.random.default_rng(0), 70

    def numbers(*shape):
        return jax.device_put(rng.normal(size=shape).astype(jnp.float32))

    q, position = numbers(2, 1, n_heads, sizes[0]), jnp.asarray([5, n_slots + 66], jnp.int32)
    ring = cache.KeyValues(*(numbers(2, n_groups, n_slots, size) for size in sizes))
    new = cache.KeyValues(*(numbers(2, 1, n_groups, size) for size in sizes))
    ring = jax.tree.map(lambda x: x.at[0, :, 5].set(jnp.nan), ring)
    n_places = 90 if indexed and n_heads == n_groups else n_slots
    mask, options = jnp.asarray(rng.random((2, n_heads, n_places)) < 0.7), {}
    if n_places != n_slots:
        options["index"] = jax.device_put(rng.integers(0, n_slots, mask.shape).astype(jnp.int32))
    call = Call(position=position, logits=Logits(soft_cap=0.7) if indexed else PLAIN)
    (out, after), (want, held) = (
        jax.jit(lambda r, i=i: cache.add_and_attend(call, q, r, new, mask, i, **options))(ring)
        for i in (INTERPRETED, "xla")
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, held)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(
    "options", [{}, dict(count_once=False, n_chunks_after=1), dict(strictly_causal=True)]
)
def test_the_kernel_that_inserts_the_newest(options, tile, monkeypatch):
    """Orders of several tiles and of one; what the text fills of caches is as in arrays."""
    monkeypatch.setattr(sorted_order, "TILE", tile)
    n_tokens, lengths = 32, np.array([9, 1], np.int32)
    ops = [lsh.lsh(chunk_len=4, n_buckets=(6, 2), **options, impl=i) for i in (INTERPRETED, "xla")]
    x = draw(ops[1], 2, n_tokens)
    prompt = x.at(slice(None), slice(0, 9))

    @jax.jit
    def start():
        plan = inputs.plan(ops[1], prompt, causal=True, rng=KEY, train=False, length=50)
        given = dict(plan=plan, lengths=lengths, capacity=50, rng=KEY)
        return inputs.init_cache(ops[1], prompt, **given)

    @jax.jit
    def both(new, held, position):
        return [inputs.step(op, new, held, position=position) for op in ops]

    def filled(held):
        many = jnp.arange(50) <= position[:, None, None, None]
        return held.memory, held.buckets, jnp.where(many, held.order, 0)

    held, position = start(), lengths
    for _ in range(20):
        new = x.map(lambda y, at=position: y[np.arange(2), at][:, None])
        (out, after), (want, held) = both(new, held, position)
        np.testing.assert_allclose(out, want, atol=1e-5)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-6), *map(filled, (after, held))
        )
        position = position + 1
    # A row that has ended may be stepped on past its end. It stays within its part of the cache.
    (_, after), (_, want) = both(new, held, np.array([53, 20], np.int32))
    assert after.order.min() >= 0 and after.order.max() < 50
    jax.tree.map(np.testing.assert_array_equal, after.buckets[1], want.buckets[1])


@pytest.mark.parametrize(
    "n_rows, n_keys, kernels",
    [
        (cache.MAX_KERNEL_ROWS, 5, 1),
        (cache.MAX_KERNEL_ROWS + 1, 5, 0),
        (1, cache.MAX_KERNEL_KEYS + 1, 0),
    ],
)
def test_auto_takes_the_kernel_of_one_query_for_few_rows(n_rows, n_keys, kernels, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    q, keys = jnp.zeros((n_rows, 1, 2, 8)), jnp.zeros((n_rows, 2, n_keys, 8))
    attend = functools.partial(cache.attend_to, Call(), impl="auto")
    program = str(jax.make_jaxpr(attend)(q, keys, keys, jnp.ones((1, 1, n_keys), bool)))
    assert program.count("pallas_call[") == kernels


def has_a_step_in_kernels(row):
    return row.holds_keys and "impl" in inspect.signature(row.factory).parameters


def first_step(row, impl, n_rows):
    """The step behind a prompt of 5 tokens as a function of their cache, and what makes that."""
    op, plain = row.op(impl=impl), row.op(impl="xla")
    x, lengths = draw(op, n_rows, 6), np.full(n_rows, 5)
    prompt, new = x.at(slice(None), slice(0, 5)), x.at(slice(None), slice(5, 6))

    @jax.jit
    def start():
        plan = inputs.plan(plain, prompt, causal=True, rng=KEY, train=False, length=8)
        return inputs.init_cache(plain, prompt, plan=plan, lengths=lengths, capacity=8, rng=KEY)

    return lambda cache: inputs.step(op, new, cache, position=lengths)[0], start


def n_kernels(row, impl, n_rows):
    step, start = first_step(row, impl, n_rows)
    return str(jax.make_jaxpr(step)(jax.eval_shape(start))).count("pallas_call[")


WITHOUT_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has the kernels")


@WITHOUT_GPU
@over(filter(has_a_step_in_kernels, DECODING))
def test_the_impl_of_an_op_decides_its_step(row, monkeypatch):
    """Of few rows "auto" takes the kernel of one query, of many it does not."""
    if row.factory is not dense.dense:  # which has no kernel of ours
        (step, start), (interpreted, _) = (
            first_step(row, impl, 2) for impl in ("xla", INTERPRETED)
        )
        held = start()
        assert n_kernels(row, INTERPRETED, 2)
        np.testing.assert_allclose(jax.jit(interpreted)(held), jax.jit(step)(held), atol=1e-5)
        with pytest.raises(NotImplementedError, match="impl='pallas' with the backend 'cpu'"):
            n_kernels(row, "pallas", 1)
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    few, many = n_kernels(row, "auto", 1), n_kernels(row, "auto", cache.MAX_KERNEL_ROWS + 1)
    inserts = row.factory is lsh.lsh and not row.op().wrap  # in a kernel, of any number of rows
    assert many == inserts < few
    assert not n_kernels(row, "xla", 1)


KERNELS_OF_OURS = [row for row in DECODING if row.factory is not dense.dense]


@WITHOUT_GPU
@over(filter(has_a_step_in_kernels, KERNELS_OF_OURS), quick=one_of_each_kind)
def test_a_step_outside_of_jit_compiles_its_kernels_once(row):
    compiled, (step, start) = [], first_step(row, INTERPRETED, 1)
    of_equal_op, _ = first_step(row, INTERPRETED, 1)
    held = start()

    def listen(name, seconds, fun_name="", **_):
        if "backend_compile" in name and "cond" not in fun_name:  # which JAX compiles every time
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        want = step(held)
        compiled.clear()
        np.testing.assert_array_equal(step(held), want)
        np.testing.assert_array_equal(of_equal_op(held), want)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


CUDNN = [row for row in DECODING if row.factory in (dense.dense, flash.flash, local.local)]


@WITHOUT_GPU
@over(CUDNN)
def test_a_step_chooses_by_itself_for_cudnn(row, monkeypatch):
    """cuDNN has no kernel for one query."""
    assert not n_kernels(row, "cudnn", 1)
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    assert n_kernels(row, "cudnn", 1)
    assert not n_kernels(row, "cudnn", cache.MAX_KERNEL_ROWS + 1)

"""Schedules are the formulas they cite; every option of an optimizer changes its updates."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reformax.declared import SettingError
from reformax.models import TransformerLM
from reformax.training import muon_matrices, optimizer
from reformax.training.named_tensors import name_of
from tests.helpers import assert_trees_close
from tests.ops.rows import ROWS

# Large enough for Adafactor to factor, with the names of a model's parameters.
PARAMS = {
    "embedding": np.linspace(-1, 1, 64).reshape(8, 8),
    "stack": {
        "attention": {"w_q": np.linspace(1, 2, 128).reshape(2, 8, 8), "b_q": np.ones((2, 8))},
        "feed_forward": {"w1": np.linspace(-2, 1, 64).reshape(8, 8), "b1": np.ones((2, 8))},
        "norm": {"scale": np.ones((2, 8)), "bias": np.ones((2, 8))},
    },
    "logits": {"w": np.linspace(0, 1, 64).reshape(8, 8), "b": np.ones(8)},
    "positions": {"axis_0": np.ones((4, 8))},
}
PARAMS = jax.tree.map(np.float32, PARAMS)


RNG = np.random.default_rng(0)
GRADIENTS = [jax.tree.map(lambda p: RNG.normal(size=p.shape), PARAMS) for _ in range(4)]


def after(tx, n=4, scale=1.0):
    """PARAMS after n updates by gradients that change from step to step."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: scale * g, grads), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, jax.jit(tx.init)(PARAMS)
    for grads in GRADIENTS[:n]:
        params, state = step(params, state, grads)
    return params


@functools.cache
def plainly(factory, base):
    """PARAMS after updates without the option in question."""
    return after(factory(**dict(base)))


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in pairs)


def test_rsqrt_is_the_formula_of_the_paper():
    schedule = optimizer.rsqrt(constant=0.5, warmup_steps=10)
    for step in [1, 5, 10, 11, 1000]:
        expected = 0.5 * min(step**-0.5, step * 10**-1.5)
        assert float(schedule(step - 1)) == pytest.approx(expected, rel=1e-5)


def test_cosine_rises_falls_and_stays():
    schedule = optimizer.cosine(max_value=2.0, steps=110, warmup_steps=10, final_fraction=0.25)
    assert float(schedule(0)) == pytest.approx(0.2)
    assert float(schedule(9)) == pytest.approx(2.0)
    assert float(schedule(59)) == pytest.approx(2 * (0.25 + 0.75 * 0.5))
    quarter = 0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi / 4))
    assert float(schedule(34)) == pytest.approx(2 * quarter, rel=1e-5)
    assert float(schedule(109)) == float(schedule(5000)) == pytest.approx(0.5)
    assert float(optimizer.cosine(1.0, 10, 0)(0)) > 0.9


def test_trapezoid_rises_stays_and_falls():
    schedule = optimizer.trapezoid(2.0, steps=100, warmup_steps=10, final_fraction=0.1)
    assert float(schedule(0)) == pytest.approx(0.2)
    for count in (9, 40, 74):
        assert float(schedule(count)) == 2.0
    for count in (75, 87, 99):  # the last update, too, has a rate
        assert float(schedule(count)) == pytest.approx(2 * (0.1 + 0.9 * (100 - count) / 26))
    assert float(schedule(100)) == float(schedule(5000)) == pytest.approx(0.2)
    exact = optimizer.trapezoid(1.0, 100, 0, decay_fraction=0.29)  # 0.29 * 100 is below 29
    assert exact(70) == 1 and exact(71) < 1
    optimizer.trapezoid(1.0, 10, 8, decay_fraction=0.2)  # nothing lies between the two
    flat = optimizer.trapezoid(1.0, 10, 0, decay_fraction=0)
    assert {float(flat(count)) for count in (0, 8, 9, 10, 99)} == {1.0}


@pytest.mark.parametrize(
    "factory", [optimizer.adam, optimizer.adamw, optimizer.muon, optimizer.adafactor]
)
def test_a_schedule_is_a_learning_rate(factory):
    dropped = optax.piecewise_constant_schedule(0.1, {2: 0.0})
    assert largest_difference(after(factory(dropped), 2), after(factory(0.1), 2)) < 1e-6
    assert largest_difference(after(factory(dropped), 4), after(factory(0.1), 4)) > 1e-3
    rate = factory(dropped).learning_rate
    assert rate is dropped or (rate(1), rate(3)) == (dropped(1), dropped(3))
    assert [factory(0.1, clip=1.0).learning_rate(step) for step in (0, 99)] == [0.1, 0.1]


OPTIONS = [
    (optimizer.adam, dict(learning_rate=0.1), {}),
    (optimizer.adam, dict(b1=0.5), {}),
    (optimizer.adam, dict(b2=0.5), {}),
    (optimizer.adam, dict(eps=1.0), {}),
    (optimizer.adam, dict(clip=1e-9), {}),
    (optimizer.adamw, dict(learning_rate=0.1), {}),
    (optimizer.adamw, dict(b1=0.5), {}),
    (optimizer.adamw, dict(b2=0.5), {}),
    (optimizer.adamw, dict(eps=1.0), {}),
    (optimizer.adamw, dict(weight_decay=0.5), {}),
    (optimizer.adamw, dict(clip=1e-8), {}),
    (optimizer.adamw, dict(no_decay="w1"), {}),
    (optimizer.muon, dict(learning_rate=0.1), {}),
    (optimizer.muon, dict(adam_learning_rate=0.1), {}),
    (optimizer.muon, dict(momentum=0.5), {}),
    (optimizer.muon, dict(n_iterations=2), {}),
    (optimizer.muon, dict(rms=None), {}),
    (optimizer.muon, dict(weight_decay=0.5), {}),
    (optimizer.muon, dict(b1=0.5), {}),
    (optimizer.muon, dict(b2=0.5), {}),
    (optimizer.muon, dict(eps=1.0), {}),
    (optimizer.muon, dict(momentum_dtype="bfloat16"), {}),
    (optimizer.muon, dict(clip=1e-8), {}),
    (optimizer.muon, dict(matrices="w_q"), {}),
    (optimizer.muon, dict(no_decay="logits"), {}),
    (optimizer.muon, dict(width=32, base_width=16), {}),
    (optimizer.adafactor, dict(learning_rate=0.1), {}),
    (optimizer.adafactor, dict(decay_rate=0.3), {}),
    (optimizer.adafactor, dict(momentum=0.9), {}),
    (optimizer.adafactor, dict(multiply_by_parameter_scale=False), {}),
    (optimizer.adafactor, dict(clipping_threshold=0.1), {}),
    (optimizer.adafactor, dict(min_dim_size_to_factor=4), {}),
    (optimizer.adafactor, dict(weight_decay=0.1), {}),
    (optimizer.adafactor, dict(clip=1e-15), {}),
    (optimizer.adafactor, dict(no_decay="w1"), dict(weight_decay=0.1)),
]


@pytest.mark.parametrize(
    "factory, option, base",
    [pytest.param(*x, id="-".join([x[0].__name__, *x[1], *x[2]])) for x in OPTIONS],
)
def test_every_option_changes_the_updates(factory, option, base):
    plain = plainly(factory, tuple(base.items()))
    assert largest_difference(plain, after(factory(**base, **option))) > 1e-6


# A stack of two layers, as a model has it: heads of attention, a hidden layer, and what is AdamW's.
def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


STACK = {
    "embedding": drawn(7, 6),
    "stack": {
        "block_0": {
            "attention": {
                "w_q": drawn(2, 3, 6, 4),
                "w_o": drawn(2, 3, 4, 6),
                "b_q": drawn(2, 3, 4),
            },
            "feed_forward": {"w1": drawn(2, 6, 9), "b1": drawn(2, 9)},
            "attention_norm": {"scale": drawn(2, 6)},
        }
    },
    "logits": {"w": drawn(6, 7), "b": drawn(7)},
}
STACK = jax.tree.map(np.float32, STACK)
STACK_GRADIENTS = [jax.tree.map(lambda p, i=i: drawn(i, *p.shape)[0], STACK) for i in (1, 2, 3)]


def updated(tx, gradients):
    """STACK after updates by the gradients."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = STACK, jax.jit(tx.init)(STACK)
    for grads in gradients:
        params, state = step(params, state, grads)
    return jax.device_get((params, state))


def orthogonal(x, n_iterations):
    """Jordan et al. 2024: the quintic iteration, by its published coefficients."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / np.linalg.norm(x)
    for _ in range(n_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


def muon_of_one(matrix, gradients, rate, decay, rms, n_iterations=5, momentum=0.95):
    """Muon in float64, of one matrix [inputs, outputs]."""
    mean = np.zeros_like(matrix)
    for t, g in enumerate(gradients, 1):
        mean = momentum * mean + (1 - momentum) * g
        ahead = momentum * mean / (1 - momentum ** (t + 1)) + (1 - momentum) * g / (1 - momentum**t)
        step = orthogonal(ahead, n_iterations)
        n_in, n_out = matrix.shape
        size = math.sqrt(max(1, n_out / n_in)) if rms is None else rms * math.sqrt(max(n_in, n_out))
        matrix = matrix - rate * (size * step + decay * matrix)
    return matrix


AS_MATRIX = {  # [inputs, outputs] of one layer
    "w_q": lambda w: np.moveaxis(w, 0, 1).reshape(6, 12),
    "w_o": lambda w: w.reshape(12, 6),
    "w1": lambda w: w,
}


@pytest.mark.parametrize("rms, n_iterations", [(0.2, 5), (None, 3)])
def test_muon_is_its_iteration_for_the_matrices_and_adamw_for_the_rest(rms, n_iterations):
    tx = optimizer.muon(0.05, 0.03, rms=rms, n_iterations=n_iterations, clip=None)
    got, state = updated(tx, STACK_GRADIENTS)
    want, _ = updated(optimizer.adamw(0.03, clip=None), STACK_GRADIENTS)
    block, of_adam = (x["stack"].pop("block_0") for x in (got, want))
    np.testing.assert_allclose(*(np.concatenate([x.ravel() for x in jax.tree.leaves(y)])
                                 for y in (got, want)), rtol=1e-6)  # fmt: skip
    first = STACK["stack"]["block_0"]
    for layer, name in (("attention", "w_q"), ("attention", "w_o"), ("feed_forward", "w1")):
        for i in range(2):
            matrix, found = (AS_MATRIX[name](np.float64(x[layer][name][i])) for x in (first, block))
            gradients = [
                AS_MATRIX[name](np.float64(g["stack"]["block_0"][layer][name][i]))
                for g in STACK_GRADIENTS
            ]
            expected = muon_of_one(matrix, gradients, 0.05, 0.1, rms, n_iterations)
            np.testing.assert_allclose(found, expected, atol=2e-5)
    for layer, name in (("attention", "b_q"), ("feed_forward", "b1"), ("attention_norm", "scale")):
        np.testing.assert_allclose(block[layer][name], of_adam[layer][name], rtol=1e-6)
    sizes = sorted(x.size for x in jax.tree.leaves(state) if x.ndim > 1)
    others = [7 * 6, 2 * 12, 2 * 9, 2 * 6, 6 * 7]  # mean and square; a bias of one axis aside
    assert sizes == sorted([144, 144, 108, *others, *others])


@pytest.mark.parametrize("name, kept", [("w_q", {"w_q"}), ("logits", {"logits"})])
def test_muon_shrinks_no_matrix_that_no_decay_names(name, kept):
    """Its own matrices are named as those of AdamW are; without gradients they only shrink."""
    tx = optimizer.muon(0.1, no_decay=rf"{name}|embed|norm|(^|\.)b(_\w+|\d)?$", weight_decay=0.5)
    params, _ = updated(tx, [jax.tree.map(np.zeros_like, STACK)])
    block, before = (x["stack"]["block_0"] for x in (params, STACK))
    pairs = {x: (block["attention"][x], before["attention"][x]) for x in ("w_q", "w_o")}
    pairs |= {"w1": (block["feed_forward"]["w1"], before["feed_forward"]["w1"])}
    pairs |= {"logits": (params["logits"]["w"], STACK["logits"]["w"])}
    for which, (found, first) in pairs.items():
        np.testing.assert_allclose(found, first * (1 if which in kept else 0.95), rtol=1e-5)


@pytest.mark.slow
def test_muons_two_schedules_are_as_long_as_the_run():
    cosines = (optimizer.cosine(x, warmup_steps=0) for x in (0.05, 0.03))
    tx = optimizer.build(optimizer.muon(*cosines), 3)
    fixed = optimizer.muon(*(optimizer.cosine(x, 3, 0) for x in (0.05, 0.03)))
    assert tx.learning_rate.steps == 3
    assert_trees_close(updated(tx, STACK_GRADIENTS)[0], updated(fixed, STACK_GRADIENTS)[0], 0)
    number = optimizer.build(optimizer.muon(0.05, optimizer.cosine(0.03, warmup_steps=0)), 3)
    mixed = optimizer.muon(0.05, optimizer.cosine(0.03, 3, 0))
    assert_trees_close(updated(number, STACK_GRADIENTS)[0], updated(mixed, STACK_GRADIENTS)[0], 0)


def test_each_of_muons_schedules_has_its_own_length():
    rates = dict(learning_rate=optimizer.cosine(steps=100, warmup_steps=0))
    rates["adam_learning_rate"] = optimizer.cosine(warmup_steps=500)
    built = optimizer.build(optimizer.muon(**rates), 1000)
    assert [x.steps for x in built.schedules] == [100, 1000]
    rates["learning_rate"] = 0.02
    assert optimizer.schedule_steps(optimizer.build(optimizer.muon(**rates), 1000)) == 1000
    assert "warmup_steps=500 is not below" in optimizer.unfinished_warmup(
        optimizer.muon(**rates), 400
    )


def test_muons_momentum_may_be_bfloat16():
    state = optimizer.muon(momentum_dtype="bfloat16").init(STACK)
    shapes = {x.shape for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16}
    assert shapes == {(2, 3, 6, 4), (2, 3, 4, 6), (2, 6, 9)}


def of_width(width, tied):
    """Parameters of a model of a width and the same logits, and gradients of rank one."""
    rng = np.random.default_rng(0)
    features = rng.choice([-1.0, 1.0], width)  # of root mean square 1
    signs = rng.choice([-1.0, 1.0], 8)
    block = {"attention_norm": {"scale": jnp.ones(width)}}
    block["feed_forward"] = {"w1": jnp.zeros((width, 2 * width))}
    params = {"embedding": jnp.zeros((8, width)), "stack": block}
    up = np.outer(features, rng.choice([-1.0, 1.0], 2 * width))
    grads = {"embedding": jnp.outer(signs, features)}
    grads["stack"] = {"attention_norm": {"scale": features}, "feed_forward": {"w1": jnp.array(up)}}
    if not tied:
        params["logits"] = {"w": jnp.zeros((width, 8))}
        grads["logits"] = {"w": jnp.outer(features, signs)}
    return params, grads, features


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rms", [0.2, None])
def test_a_step_changes_the_features_of_a_wider_model_as_much(rms, tied):
    """Each change along the features that the gradients are of."""

    def changes(width, base_width):
        params, grads, features = of_width(width, tied)
        rate = optax.constant_schedule(0.1) if tied else 0.1
        tx = optimizer.muon(rate, rms=rms, width=width, base_width=base_width, clip=None)
        found, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        hidden = features @ found["stack"]["feed_forward"]["w1"]
        table = found["embedding"] if tied else found["logits"]["w"].T
        logits, scale = table @ features, found["stack"]["attention_norm"]["scale"]
        others = [scale] if tied else [scale, found["embedding"]]
        return [float(jnp.sqrt(jnp.mean(x**2))) for x in (hidden, logits, *others)]

    small = changes(16, 16)
    assert min(small) > 1e-3
    np.testing.assert_allclose(changes(64, 16), small, rtol=1e-3)
    wider = np.divide(changes(64, 64), small)
    np.testing.assert_allclose(wider[:2], [2 if rms else 1, 4], rtol=1e-3)


@pytest.mark.parametrize("tied, readout", [(False, "logits.w"), (True, "embedding")])
def test_the_readout_of_a_model_is_its_matrix_of_logits_or_the_tied_embedding(tied, readout):
    sizes = dict(vocab_size=16, d_model=8, d_ff=8, n_heads=2, n_layers=1)
    model = TransformerLM(**sizes, tie_embeddings=tied, init_std=0.02)
    params = jax.eval_shape(lambda key: model.init_params(key, (1, 4)), jax.random.key(0))
    groups = muon_matrices.groups(muon_matrices.MATRICES, muon_matrices.READOUTS, params)
    found = {name_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(groups)}
    assert [name for name, x in found.items() if x == "readout"] == [readout]


@pytest.mark.parametrize("widths, n_groups", [({}, 2), (dict(width=16, base_width=16), 3)])
def test_only_a_width_gives_the_readout_a_group_in_checkpoints(widths, n_groups):
    params, _, _ = of_width(16, tied=False)
    state = optimizer.muon(**widths).init(params)
    is_partition = lambda x: isinstance(x, optax.transforms.PartitionState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_partition) if is_partition(x)]
    assert [len(x.inner_states) for x in found] == [n_groups]


def test_one_of_two_widths_is_refused():
    with pytest.raises(SettingError, match="width is 64 and base_width is None: give both") as e:
        optimizer.muon(width=64)
    assert "\n" not in str(e.value)


def test_muon_refuses_a_model_without_matrices():
    with pytest.raises(SettingError, match="muon.matrices is 'kernel', which no trained para") as e:
        optimizer.muon(matrices="kernel").init(STACK)
    assert "\n" not in str(e.value)


def test_clipping_scales_the_whole_gradient_to_its_norm():
    tx = optimizer._optimizer(1.0, 0.5, lambda rate: optax.identity())
    grads = {"a": jnp.full((3,), 4.0), "b": jnp.full((2, 2), -2.0)}
    clipped, _ = tx.update(grads, tx.init(grads), grads)
    norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in clipped.values()))
    assert norm == pytest.approx(0.5)
    np.testing.assert_allclose(clipped["a"] / clipped["b"][0, 0], -2.0, rtol=1e-6)


@pytest.mark.parametrize("factory", [optimizer.adamw, optimizer.adafactor])
def test_decay_shrinks_matrices_and_nothing_else(factory):
    decayed = after(factory(1e-2, weight_decay=0.5), 1, scale=0.0)
    plain = after(factory(1e-2, weight_decay=0.0), 1, scale=0.0)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), decayed, plain)
    names = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, changed in jax.tree_util.tree_leaves_with_path(moved)
        if changed
    }
    assert names == {"stack.attention.w_q", "stack.feed_forward.w1", "logits.w"}


def test_the_depth_of_a_stack_is_no_axis_of_a_matrix():
    """A temperature for each head of each layer does not decay; a matrix for each layer does."""
    layers = {"attention": {"op": {"temperature": jnp.ones((2, 8))}, "w_q": jnp.ones((2, 8, 8))}}
    params = {"encoder": {"stack": {"block_0": layers}}}
    tx = optimizer.adamw(1e-2, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    updates = updates["encoder"]["stack"]["block_0"]["attention"]
    assert not np.any(updates["op"]["temperature"])
    assert np.all(updates["w_q"] < 0)


def test_own_weights_that_begin_constant_do_not_decay():
    """Scales, biases and tables of positions begin so."""
    tx = optimizer.adamw(1e-2, weight_decay=0.5)

    @jax.jit
    def still(params):
        """The update of a gradient of 0."""
        return tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0]

    @jax.jit
    def own_weights(rng):
        """Of one row of each op, by its name, as in a layer of a model."""
        found = {}
        for row in {row.factory: row for row in ROWS}.values():
            op = row.op()
            own = op.init(rng, op.dims(*2 * [np.zeros((1, 9, 2, 4), np.float32)]))
            found[row.name] = {"attention": {"op": own}}
        return found

    found, weights = set(), jax.device_get(own_weights(jax.random.key(0)))
    updates = jax.tree.leaves(still(weights))
    for (path, x), update in zip(
        jax.tree_util.tree_leaves_with_path(weights), updates, strict=True
    ):
        if np.all(np.atleast_1d(x)[..., :1] == x):
            assert not np.any(update), path
            found.add(path[-1].key)
    assert {"bias", "near_keys_norm", "far_values_norm"} <= found


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optimizer.rsqrt(warmup_steps=0), "warmup_steps is 0"),
        (lambda: optimizer.cosine(steps=10, warmup_steps=10), "warmup_steps=10"),
        (lambda: optimizer.cosine(max_value=-1), "max_value is -1"),
        (lambda: optimizer.trapezoid(steps=10, warmup_steps=9), "decay_fraction=0.25 overlap"),
        (lambda: optimizer.adam(clip=0), "clip is 0"),
    ],
)
def test_bad_values_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [optimizer.cosine, optimizer.trapezoid])
def test_a_schedule_is_as_long_as_its_run(make):
    of_run, own = (make(1.0, steps, warmup_steps=10) for steps in (None, 50))
    for adam in (optimizer.adam, optimizer.adamw, optimizer.adafactor):
        found = {n: optimizer.build(adam(of_run), n).learning_rate for n in (50, 100)}
        assert [float(found[50](k)) for k in range(60)] == [float(own(k)) for k in range(60)]
        assert float(found[100](49)) > 2 * float(found[50](49))
        assert optimizer.build(optimizer.build(adam(of_run), 50), 100).learning_rate.steps == 50
        assert optimizer.build(adam(own), 100).learning_rate is own
        plain = adam(0.1)
        assert optimizer.build(plain, 100) is plain
    params = {"w": np.ones((4, 4), np.float32)}
    updates = []
    for tx in (optimizer.build(optimizer.adamw(of_run), 50), optimizer.adamw(own)):
        state, step = jax.jit(tx.init)(params), jax.jit(tx.update)
        for _ in range(45):
            update, state = step(params, state, params)
        updates.append(update["w"])
    np.testing.assert_array_equal(*updates)
    unbuilt = optimizer.adamw(of_run)
    with pytest.raises(ValueError, match=r"as long as its run.* call optimizer.build"):
        unbuilt.update(params, unbuilt.init(params), params)


@pytest.mark.parametrize(
    "schedule, steps, line",
    [
        (optimizer.cosine(warmup_steps=10), 11, None),
        (optimizer.cosine(warmup_steps=10), 10, "cosine.warmup_steps=10 is not below steps=10"),
        (optimizer.cosine(steps=99, warmup_steps=10), 10, "cosine.warmup_steps=10 is not below"),
        (optimizer.rsqrt(warmup_steps=10), 11, None),
        (optimizer.rsqrt(warmup_steps=10), 9, "set rsqrt.warmup_steps=0"),
        (optimizer.trapezoid(warmup_steps=10), 16, None),
        (optimizer.trapezoid(warmup_steps=10), 12, "not below the first 9 of steps=12"),
        (optimizer.trapezoid(steps=99, warmup_steps=10), 12, None),
    ],
)
def test_a_peak_that_a_run_does_not_reach_is_told(schedule, steps, line):
    found = schedule.unfinished_warmup(steps)
    assert found is None if line is None else line in found
    # Until then the rate is that of a longer run.
    longer = schedule.build(1000)
    assert [float(schedule.build(steps)(k)) for k in range(min(steps, 9))] == [
        float(longer(k)) for k in range(min(steps, 9))
    ]

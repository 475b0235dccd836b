"""Language models: causality, options, precision, and life inside Trax."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from reformax.cli import config, parsed
from reformax.layers import ReversibleStack, _trax, tl
from reformax.models import ReformerLM, TransformerLM, designs
from reformax.ops import dense, local, lsh, shared_qk
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, with_gradients
from tests.layers import plain
from tests.ops.rows import EXACT, ROWS, over

RNG = jax.random.PRNGKey(4)
LENGTH = 12
SMALL = dict(
    vocab_size=16,
    d_model=8,
    d_ff=20,
    d_attention_key=4,
    d_attention_value=4,
    n_layers=2,
    n_heads=2,
    dropout=0.0,
)
OPS = {
    "dense": dense.dense(),
    "shared_qk": shared_qk.shared_qk(),
    "local": local.local(chunk_len=4),
    "lsh": lsh.lsh(chunk_len=4, n_hashes=2),
}
STRICT = shared_qk.shared_qk(attend_self_if_alone=False)
SLOTS, KEEPS = dict(n_slots=3), dict(remat_policy="all")
AXIAL = dict(pos_type="axial", pos_axial_shape=(4, 5), pos_d_axial_embs=(2, 6))
both_models = pytest.mark.parametrize("model_fn", [ReformerLM, TransformerLM])
models_and_ops = pytest.mark.parametrize(
    "model_fn, name", [(model_fn, name) for model_fn in (ReformerLM, TransformerLM) for name in OPS]
)


def init(model):
    return plain.init(model, (2, LENGTH))


def some_tokens(length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, 16, (2, length), np.int32)


def logits_of(model, tokens=None, rng=RNG):
    tokens = some_tokens() if tokens is None else tokens
    return np.asarray(jax.jit(model.apply)(init(model), tokens, rng))


def loss_of(model, params, tokens, rng=RNG):
    logits = model.apply(params, tokens, rng)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@models_and_ops
def test_position_t_depends_on_all_tokens_before_it_and_on_no_other(model_fn, name):
    """The gradient of each position's logits with respect to each token's embedding.

    At the plan that was made, which for LSH may itself have read the whole sequence: which of the
    earlier tokens a position sees can depend on later ones, what it reads of them cannot.
    """
    model = model_fn(**SMALL | dict(vocab_size=LENGTH + 1, attention_type=OPS[name]))
    params = init(model)
    tokens = jnp.arange(1, LENGTH + 1)[None]  # token t + 1 is at t alone; 0 only before all

    def by_position(embedding):
        return model.apply(params | {"embedding": embedding}, tokens, RNG).sum(axis=(0, 2))

    # [T, V, D] -> whether position t's logits depend on the embedding of a token.
    gradient = np.asarray(jax.jit(jax.jacrev(by_position))(params["embedding"]))
    depends = np.abs(gradient).max(axis=-1) > 0
    start, others = depends[:, 0], depends[:, 1:]
    assert not np.any(np.triu(others))
    assert np.all(np.diagonal(others, -1))
    if isinstance(OPS[name], EXACT):
        assert np.all(start) and np.all(others == np.tri(LENGTH, k=-1, dtype=bool))


@pytest.mark.parametrize(
    "op",
    [STRICT, lsh.lsh(chunk_len=4, n_hashes=2, attend_self_if_alone=False)],
    ids=["shared_qk", "lsh"],
)
def test_the_next_value_is_never_one_of_the_future(op):
    """No logits have a gradient to a later token: exactly 0, though keys bring the next value."""
    cycle = (OPS["local"], op)
    options = SMALL | dict(vocab_size=LENGTH + 1, attention_type=cycle, pos_type="rotary_local")
    model = ReformerLM(**options, n_slots=3, next_value=True)
    params, tokens = init(model), jnp.arange(1, LENGTH + 1)[None]

    def by_position(embedding):
        return model.apply(params | {"embedding": embedding}, tokens, RNG).sum(axis=(0, 2))

    gradient = np.asarray(jax.jit(jax.jacrev(by_position))(params["embedding"]))[:, 1:]
    depends = np.abs(gradient).max(axis=-1) > 0
    assert not np.any(np.triu(depends))
    assert np.all(np.diagonal(depends, -1))
    assert np.all(depends == np.tri(LENGTH, k=-1, dtype=bool)) or not isinstance(op, EXACT)


@pytest.mark.parametrize(
    "model_fn, op, tolerance",
    [
        (TransformerLM, OPS["dense"], 0),
        (ReformerLM, (OPS["local"], OPS["shared_qk"]), 0),
        # One chunk has all keys, in an order that depends on all: sums round differently.
        (ReformerLM, lsh.lsh(chunk_len=LENGTH), 1e-5),
    ],
    ids=["dense", "local_and_shared_qk", "lsh_one_chunk"],
)
def test_the_future_changes_nothing(model_fn, op, tolerance):
    """If no plan chooses among the keys."""
    model = model_fn(**SMALL, attention_type=op)
    params, apply = init(model), jax.jit(model.apply)
    tokens, now = some_tokens(), 7
    other = tokens.copy()
    other[:, now:] = (tokens[:, now:] + 5) % 16
    before, after = apply(params, tokens, RNG), apply(params, other, RNG)
    np.testing.assert_allclose(after[:, : now + 1], before[:, : now + 1], atol=tolerance, rtol=0)
    assert np.all(np.abs(after - before)[:, now + 1 :].max(axis=-1) > 0)


WRITTEN = [row for row in ROWS if row.first.get("impl") is not INTERPRETED]  # a file has no such


@over([row for row in WRITTEN if row.op().cross and row.exact])
def test_another_attention_is_one_gin_line(row, tmp_path):
    """Its options are a line each."""
    op = row.factory.__name__
    options = "".join(f"{op}.{op}.{name} = {value!r}\n" for name, value in row.first.items())
    path = tmp_path / "run.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        f"from reformax.models import lm\nfrom reformax.ops import {op}\n"
        f"lm.TransformerLM.attention_type = @{op}.{op}()\n{options}"
    )
    config.parse([str(path)])
    got = logits_of(parsed.configured(TransformerLM)(**SMALL))
    want = logits_of(TransformerLM(**SMALL, attention_type=OPS["dense"]))
    np.testing.assert_allclose(got, want, atol=1e-5)


@both_models
def test_the_first_position_reads_no_token(model_fn):
    logits = logits_of(model_fn(**SMALL, attention_type=OPS["dense"]))
    np.testing.assert_array_equal(logits[0, 0], logits[1, 0])


@both_models
def test_apply_is_logits_of_features(model_fn):
    model = model_fn(**SMALL | dict(dropout=0.1))
    params, tokens = init(model), some_tokens()
    features = jax.jit(model.features)(params, tokens, RNG)
    assert features.shape == (2, LENGTH, 8 * (2 if model_fn is ReformerLM else 1))
    project = jax.jit(model.logits)
    logits = project(params, features)
    assert logits.shape == (2, LENGTH, model.vocab_size) and logits.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens, RNG), logits, atol=1e-5)
    # A loss may take the logits in pieces.
    np.testing.assert_allclose(project(params, features[:, 3:5]), logits[:, 3:5], atol=1e-5)


def test_positions_tell_where_a_token_stands():
    """Attention that sees everything knows a bag of tokens; with positions it knows an order."""
    tokens = some_tokens()
    swapped = tokens.copy()
    swapped[:, [2, 3]] = tokens[:, [3, 2]]
    differences = {}
    for pos_type in ("none", "rotary", "sinusoidal", "alibi", "t5", "axial"):
        axial = AXIAL if pos_type == "axial" else {}
        options = SMALL | dict(pos_type=pos_type, attention_type=OPS["dense"], n_layers=1) | axial
        model = ReformerLM(**options)
        params, apply = init(model), jax.jit(model.apply)
        difference = apply(params, tokens, RNG) - apply(params, swapped, RNG)
        differences[pos_type] = np.abs(difference)[:, -1].max()
    assert differences.pop("none") < 1e-5
    assert all(difference > 1e-3 for difference in differences.values()), differences


@both_models
def test_features_are_of_the_tokens_shifted_right(model_fn):
    model = model_fn(**SMALL, attention_type=OPS["local"])
    params, tokens = init(model), some_tokens()
    shifted = np.concatenate([np.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)
    np.testing.assert_array_equal(
        jax.jit(model.features)(params, tokens), jax.jit(model.encode)(params, shifted)
    )


@models_and_ops
def test_padding_changes_no_token(model_fn, name):
    model = model_fn(**SMALL, attention_type=OPS[name], pos_type="none")
    params, tokens = init(model), some_tokens()
    segment_ids = (np.arange(LENGTH) < 9).astype(np.int32)[None].repeat(2, axis=0)
    junk = np.where(segment_ids, tokens, 3)
    encode = jax.jit(lambda t, s: model.encode(params, t, s, rng=RNG))
    one, other = encode(tokens, segment_ids), encode(junk, segment_ids)
    np.testing.assert_array_equal(one[:, :9], other[:, :9])
    assert np.abs(one[:, 9:] - other[:, 9:]).max() > 0.1


def test_activations_by_name():
    x = np.linspace(-3, 3, 13)
    erf = np.vectorize(math.erf)
    want = {
        "relu": np.maximum(x, 0),
        "relu_squared": np.maximum(x, 0) ** 2,
        "gelu": x / 2 * (1 + erf(x / math.sqrt(2))),
        "gelu_tanh": x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x / (1 + np.exp(-x)),
    }
    assert set(designs.ACTIVATIONS) == set(want)
    for name, y in want.items():
        np.testing.assert_allclose(designs.ACTIVATIONS[name](x), y, atol=1e-6)
    with pytest.raises(
        ValueError, match="ff_activation is 'gleu': expected one of relu, relu_squared"
    ):
        ReformerLM(**SMALL, ff_activation="gleu")


@pytest.mark.parametrize("positions", [dict(pos_type="rotary"), AXIAL], ids=["rotary", "axial"])
def test_one_models_weights_serve_every_length(positions):
    model = ReformerLM(**SMALL, attention_type=OPS["local"], **positions)
    params, tokens = init(model), some_tokens(19)
    short, long = (jax.jit(model.apply)(params, tokens[:, :n], RNG) for n in (1, 19))
    np.testing.assert_allclose(short, long[:, :1], atol=1e-5)


# Each option changes the shapes of the parameters or else the program.
CHANGES_SHAPES = [
    dict(vocab_size=17),
    dict(d_model=10),
    dict(d_ff=21),
    dict(d_attention_key=6),
    dict(d_attention_value=6),
    dict(n_layers=4),
    dict(n_heads=3),
    dict(n_kv_heads=1),
    dict(attention_type=OPS["lsh"]),
    dict(attention_type=(OPS["local"], OPS["local"])),
    dict(attention_bias=True),
    dict(attention_type=STRICT, next_value=True),
    dict(attention_type=OPS["dense"], pos_type="t5"),
    dict(embedding_norm=True),
    dict(dtype="float8", amax_history=2),
    AXIAL,
]
CHANGES_PROGRAM = [
    dict(dropout=0.5, ff_dropout=0.0),
    dict(dropout=0.5, ff_dropout=0.25),
    dict(ff_dropout=0.5),
    dict(attention_dropout=0.5),
    dict(attention_type=local.local(chunk_len=2)),
    dict(pos_type="none"),
    dict(pos_type="sinusoidal"),
    dict(pos_type="rotary_local", attention_type=OPS["dense"]),
    dict(pos_type="alibi", attention_type=OPS["dense"]),
    dict(ff_activation=jnp.tanh),
    dict(ff_activation="relu"),
    dict(ff_chunk_size=5),
    dict(norm_epsilon=1e-2),
    dict(dtype="bfloat16"),
    dict(dtype="float8"),
    dict(scan_layers=False),
    dict(first_token=3),
]
TIED = dict(tie_embeddings=True, init_std=0.02)
OWN_SHAPES = {ReformerLM: [SLOTS | TIED], TransformerLM: [TIED, dict(post_norm=True)]}
OWN_OPTIONS = {
    ReformerLM: [dict(exact=True), dict(keep_ff_outputs=True), KEEPS, SLOTS],
    TransformerLM: [dict(remat_policy="nothing"), dict(remat_policy="attention")],
}


@both_models
def test_every_option_is_tested(model_fn):
    options = [*CHANGES_SHAPES, *CHANGES_PROGRAM, {"mode": "below", "init_std": "below"}]
    options += [{"offload_activations": "in tests/layers/test_remat.py"}]
    options += [{"design": "in test_designs.py", "n_qk_heads": "in tests/ops/test_value_heads.py"}]
    options += [*OWN_SHAPES[model_fn], *OWN_OPTIONS[model_fn]]
    assert set(inspect.signature(model_fn).parameters) == {name for o in options for name in o}


def shapes(model):
    return shapes_of(jax.eval_shape(lambda: model.init_params(RNG, (2, LENGTH))))


def shapes_of(params):
    return {
        jax.tree_util.keystr(path): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }


def traced(model):
    """The shapes of a model's weights, and all that it computes as text."""
    params = jax.eval_shape(lambda: model.init_params(RNG, (2, LENGTH)))
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    text = str(jax.make_jaxpr(lambda p, t: model.apply(p, t, RNG))(params, tokens))
    return shapes_of(params), re.sub(r"0x[0-9a-f]+", "", text)


@both_models
def test_no_option_is_ignored(model_fn):
    base = SMALL | dict(attention_type=OPS["local"], n_layers=2)
    base_shapes, base_program = traced(model_fn(**base))
    assert traced(model_fn(**base))[1] == base_program
    for options in [*CHANGES_SHAPES, *OWN_SHAPES[model_fn]]:
        assert shapes(model_fn(**base | options)) != base_shapes
    exclude_self = base | dict(attention_type=STRICT)
    assert shapes(model_fn(**exclude_self, next_value=True)) != shapes(model_fn(**exclude_self))
    seen = {base_program}
    for options in [*CHANGES_PROGRAM, *OWN_OPTIONS[model_fn]]:
        own_shapes, program = traced(model_fn(**base | options))
        # The norm and the logits of one stream instead of two are narrower.
        assert (own_shapes == base_shapes) == (options != SLOTS)
        assert program not in seen, options
        seen.add(program)


@pytest.mark.slow
@both_models
def test_fresh_weights_have_the_deviation_asked_for(model_fn):
    """Matrices and embeddings, the last ones of pre-norm layers scaled by the depth."""
    sizes = dict(vocab_size=64, d_model=32, d_ff=64, n_layers=8, attention_type=OPS["dense"])
    axial = dict(pos_type="axial", pos_axial_shape=(64,), pos_d_axial_embs=(32,))
    model = model_fn(**SMALL | sizes | axial, init_std=0.02)
    params = jax.jit(lambda rng: model.init_params(rng, (2, LENGTH)))(RNG)
    block = params["stack"]["block_0"]
    matrices = {name: block["attention"][f"w_{name}"] for name in "qkvo"}
    matrices |= {name: block["feed_forward"][name] for name in ("w1", "w2")}
    matrices |= {"embedding": params["embedding"], "positions": params["positions"]["axis_0"]}
    matrices["logits"] = params["logits"]["w"]
    for name, matrix in matrices.items():
        want = 0.02 / 4 if name in ("o", "w2") else 0.02
        np.testing.assert_allclose(np.std(matrix), want, rtol=0.06, err_msg=name)


@pytest.mark.parametrize(
    "model_fn, options, message",
    [
        (ReformerLM, TIED, "tie_embeddings is True and features have size 16, not d_model, 8"),
        (TransformerLM, dict(tie_embeddings=True), "init_std None, whose embeddings would make"),
        (TransformerLM, dict(first_token=16), "first_token is 16: expected a token below vocab_s"),
    ],
)
def test_tied_embeddings_and_first_tokens_that_do_not_fit(model_fn, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_fn(**SMALL, **options)


@both_models
def test_evaluation_has_no_dropout_and_its_own_hashes(model_fn):
    rates = dict(dropout=0.3, ff_dropout=0.3, attention_dropout=0.3)

    def program_with(n_hashes, n_hashes_eval, **options):
        op = lsh.lsh(chunk_len=4, n_hashes=n_hashes, n_hashes_eval=n_hashes_eval)
        return traced(model_fn(**SMALL | options, attention_type=op))[1]

    three = program_with(3, 3)
    assert program_with(2, 3, **rates, mode="eval") == three
    assert program_with(2, 3, mode="train") == program_with(2, 2) != three
    assert program_with(3, 3, **rates) != three


@both_models
def test_chunks_of_the_feed_forward_layers(model_fn):
    """No array of all positions by all hidden features, 20 of them, is left in the program."""
    whole, chunked = (traced(model_fn(**SMALL, ff_chunk_size=n))[1] for n in (0, 5))
    assert f"f32[2,{LENGTH},20]" in whole
    assert f"f32[2,{LENGTH},20]" not in chunked
    assert "f32[2,5,20]" in chunked


def test_exact_rounds_the_streams():
    """To 2^-12, so the logits differ from the plain stack's by about as much."""
    options = SMALL | dict(attention_type=OPS["local"])
    usual, exact = (logits_of(ReformerLM(**options, exact=exact)) for exact in (False, True))
    assert 1e-6 < np.abs(exact - usual).max() < 2e-2


@pytest.mark.slow
@both_models
def test_bfloat16_is_near_float32(model_fn):
    options = SMALL | dict(dropout=0.1, attention_type=OPS["local"])
    models = [model_fn(**options, dtype=dtype) for dtype in ("bfloat16", "float32")]
    params, tokens = init(models[1]), some_tokens()

    def gradient(model):
        gradient = jax.jit(jax.grad(lambda p: loss_of(model, p, tokens)))(params)
        return ravel_pytree(gradient)[0]

    narrow, wide = map(gradient, models)
    assert narrow.dtype == jnp.float32
    assert 0 < np.linalg.norm(narrow - wide) < 0.05 * np.linalg.norm(wide)


@pytest.mark.parametrize(
    "model_fn", [pytest.param(ReformerLM, marks=pytest.mark.slow), TransformerLM]
)
def test_gradients_of_float16_logits_may_be_small_or_large(model_fn):
    """A mean over many targets has both: it is a large sum, divided."""
    options = SMALL | dict(n_layers=1, attention_type=OPS["local"])
    params, tokens = init(model_fn(**options)), some_tokens()
    gradients = [
        jax.jit(jax.grad(lambda p, factor, m=model: factor * loss_of(m, p, tokens)))
        for model in (model_fn(**options, dtype=dtype) for dtype in ("float16", "float32"))
    ]
    for factor in (2.0**-22, 2.0**22):
        got, want = (
            [jax.tree.map(lambda x, by=factor: x / by, g[name]) for name in ("logits", "norm")]
            for g in (gradient(params, factor) for gradient in gradients)
        )
        assert_trees_close(got, want, 1e-3)


@both_models
def test_the_cycle_runs_in_the_order_given(model_fn):
    cycle = (OPS["local"], OPS["lsh"], OPS["lsh"])
    model = model_fn(**SMALL | dict(n_layers=6), attention_type=cycle)
    stack = jax.eval_shape(lambda: model.init_params(RNG, (2, LENGTH)))["stack"]
    assert sorted(stack) == ["block_0", "block_1", "block_2"]
    # Local attention projects keys; a repeat of the cycle is a row of each array.
    has_keys = ["w_k" in stack[f"block_{i}"]["attention"] for i in range(3)]
    assert has_keys == [True, False, False]
    assert all(x.shape[0] == 2 for x in jax.tree.leaves(stack))


@both_models
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(n_layers=3, attention_type=(OPS["dense"],) * 2), "n_layers is 3: expected a mult"),
        (dict(attention_type=()), "attention_type is (): expected an op, or several"),
        (dict(vocab_size=None), "vocab_size is None: expected a whole number of at least 2"),
        (dict(d_model=0), "d_model is 0: expected at least 1"),
        (dict(pos_type="learned"), "pos_type is 'learned': expected 'rotary', 'rotary_local', "),
        (
            dict(next_value=True),
            "next_value is True and no op of attention_type hides a position from itself: set "
            "next_value=False, or give one that does, such as lsh.lsh(attend_self_if_alone=False)",
        ),
        (
            dict(
                next_value=True,
                attention_type=(local.local(chunk_len=4, shared_qk=True), OPS["shared_qk"]),
            ),
            "next_value is True and no op of attention_type hides a position from itself: set "
            "next_value=False, or give one that does, such as shared_qk.shared_qk("
            "attend_self_if_alone=False)",
        ),
        (
            dict(pos_type="none", pos_axial_shape=(4, 4)),
            "pos_type is 'none', pos_axial_shape (4, 4), pos_d_axial_embs (): 'axial' needs both",
        ),
        (dict(pos_d_axial_embs=(4, 4)), "pos_type is 'rotary', pos_axial_shape (), pos_d_axial"),
        (dict(pos_type="axial"), "pos_type is 'axial', pos_axial_shape (), pos_d_axial_embs (): "),
        (
            dict(
                pos_type="rotary_local", pos_axial_shape=(4, 4), attention_type=(OPS["dense"],) * 2
            ),
            "pos_type is 'rotary_local' with pos_axial_shape (4, 4) and no op of attention_type",
        ),
        (dict(pos_axial_shape=(2,) * 5), "rotary_grid has 5 axes and d_qk is "),
        (AXIAL | dict(pos_d_axial_embs=()), "shape (4, 5) and d_embs (): expected as many"),
        (dict(mode="predict"), "mode is 'predict': expected 'train' or 'eval'"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_errors_of_construction(model_fn, options, message):
    with pytest.raises(ValueError) as error:
        model_fn(**SMALL | dict(attention_type=OPS["dense"]) | options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([1, 2], "lengths is [1, 2]: expected an array"),
        (np.array([1]), "lengths has shape (1,) and dtype int64: expected integers [batch], (2,)"),
        (np.array([1.0, 2]), "lengths has shape (2,) and dtype float64: expected integers"),
        (np.array([-1, 13]), "lengths has -1 to 13: expected 0 to 12"),
    ],
    ids=["list", "short", "floats", "range"],
)
def test_lengths_of_prompts_that_do_not_fit(lengths, message):
    model = TransformerLM(**SMALL, mode="eval")
    with pytest.raises(ValueError) as error:
        model.prefill(init(model), some_tokens(), lengths, 20)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (some_tokens()[0], "tokens has shape (12,) and dtype int32: expected integers [batch, len"),
        (some_tokens()[None], "tokens has shape (1, 2, 12) and dtype int32: expected integers [ba"),
        (some_tokens() / 1.0, "tokens has shape (2, 12) and dtype float64: expected integers [bat"),
        ([[1, 2]], "tokens is [[1, 2]]: expected an array of integers [batch, length]"),
        (
            (some_tokens(), some_tokens(7)),
            "segment_ids has shape (2, 7): expected [batch, length] of tokens, (2",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
@both_models
def test_tokens_of_another_kind_are_told(model_fn, tokens, message):
    model = model_fn(**SMALL, attention_type=OPS["dense"], mode="eval")
    params = init(model)
    pair = isinstance(tokens, tuple)
    calls = [lambda: model.apply(params, *tokens[:1], segment_ids=tokens[1])] if pair else [
        lambda: model.apply(params, tokens),
        lambda: model.features(params, tokens),
        lambda: model.prefill(params, tokens, np.array([1, 1]), 20),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "other, message",
    [
        (
            dict(d_model=4),
            r"params['embedding'] has shape (16, 4): expected [vocab_size, d_model], ",
        ),
        (dict(vocab_size=9), r"params['embedding'] has shape (9, 8): expected [vocab_size, d_mod"),
        (dict(n_heads=1), "params['w_q'] has shape (1, 8, 4): expected [heads, d_model, size], (2"),
        (dict(d_attention_key=3), "params['w_q'] has shape (2, 8, 3): expected [heads, d_model, "),
        (dict(d_ff=12), "params['w1'] has shape (8, 12): expected [d_model, d_ff], (8, 20)"),
    ],
    ids=lambda case: "" if isinstance(case, str) else next(iter(case)),
)
@both_models
def test_weights_of_another_size_are_told(model_fn, other, message):
    sizes = SMALL | dict(attention_type=OPS["dense"], mode="eval")
    params = init(model_fn(**sizes | other))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        model_fn(**sizes).apply(params, some_tokens())
    with pytest.raises(ValueError, match="^params is None: expected a dict, as of init_params"):
        model_fn(**sizes).apply(None, some_tokens())
    assert "\n" not in str(error.value)


def test_errors_of_axial_positions():
    too_small = ReformerLM(**SMALL, **AXIAL | dict(pos_axial_shape=(2, 4)))
    params = plain.init(too_small, (2, 8))
    with pytest.raises(ValueError, match=r"^axial positions of shape \(2, 4\) hold 8 .*, not 12:"):
        jax.eval_shape(too_small.apply, params, some_tokens(), RNG)
    uneven = ReformerLM(**SMALL, **AXIAL | dict(pos_d_axial_embs=(4, 5)))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda: uneven.init_params(RNG, (2, 8)))
    assert str(error.value) == "d_embs (4, 5) add up to 9: expected 8"


def test_in_trax():
    """Built, run and differentiated as a layer among Trax's own."""
    model = ReformerLM(**SMALL)
    tokens = some_tokens()
    net = tl.Serial(model, tl.LogSoftmax())
    weights, state = net.init(_trax.signature(tokens), rng=RNG)
    assert jax.tree.leaves(state) == []

    def nats(weights, rng):
        log_probabilities, _ = net.pure_fn(tokens, weights, state, rng)
        return -jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(nats))(weights, RNG)
    # Trax gives each layer of a Serial a part of the rng.
    layer_rng = jax.random.split(RNG, 2)[0]
    params = weights[0]
    want_value, want = jax.jit(jax.value_and_grad(lambda p: loss_of(model, p, tokens, layer_rng)))(
        params
    )
    np.testing.assert_allclose(value, want_value, atol=1e-6)
    assert_trees_close(gradient[0], want, 1e-6)
    assert all(np.any(g) for g in jax.tree.leaves(jax.device_get(gradient)))
    assert net(tokens).shape == (2, LENGTH, 16)


@pytest.mark.slow
def test_the_stack_among_traxs_layers():
    """Trax makes two streams and concatenates them."""
    stack = ReversibleStack(plain.blocks([OPS["local"]]), 2)
    net = tl.Serial(tl.Embedding(16, 8), tl.Dup(), stack, tl.Concatenate(), tl.Dense(5))
    tokens = some_tokens()
    weights, state = net.init(_trax.signature(tokens), rng=RNG)

    def outputs(weights):
        return net.pure_fn(tokens, weights, state, RNG)[0]

    def by_hand(weights):
        table, _, params, _, (w, b) = weights
        x, rng = table[tokens], jax.random.split(RNG, 5)[2]
        return jnp.concatenate(stack.apply(params, x, x, rng=rng), axis=-1) @ w + b

    got, want = (
        jax.jit(jax.value_and_grad(lambda w, f=f: jnp.sum(jnp.sin(f(w)))))(weights)
        for f in (outputs, by_hand)
    )
    assert outputs(weights).shape == (2, LENGTH, 5)
    assert_trees_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_fn, options",
    [
        (ReformerLM, dict(attention_type=OPS["lsh"], exact=True, dtype="bfloat16")),
        (TransformerLM, dict(attention_type=OPS["dense"])),
    ],
    ids=["reformer", "transformer"],
)
def test_learns_a_batch_by_heart(model_fn, options):
    model = model_fn(**SMALL | dict(dropout=0.05), **options)
    tokens, optimizer = some_tokens(), optax.adam(0.02)
    params = model.init_params(RNG, (2, LENGTH))
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, rng):
        loss, gradient = jax.value_and_grad(lambda p: loss_of(model, p, tokens, rng))(params)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for i in range(60):
        params, opt_state, loss = step(params, opt_state, jax.random.fold_in(RNG, i))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.4 * losses[0]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_may_be_in_bfloat16(tied):
    """For a loss that reads them so: rounded, with biases twice. Gradients are as of float32."""
    model = TransformerLM(**SMALL, init_std=0.5, tie_embeddings=tied, dtype="bfloat16")
    rng = np.random.default_rng(0)
    x, d = (rng.normal(size=(3, 5, size)).astype(np.float32) for size in (8, 16))
    d = d.astype("bfloat16")
    params = plain.init(model, (1, 4))
    (narrow, back), (wide, wide_back) = (
        with_gradients(lambda p, x, to=to: model.logits(p, x, to))(d, params, x)
        for to in ("bfloat16", "float32")
    )
    assert narrow.dtype == "bfloat16"
    once = np.asarray(wide).astype("bfloat16").astype(np.float32)
    twice = 0 if tied else 2**-7 * np.abs(wide).max()
    np.testing.assert_allclose(np.float32(narrow), once, rtol=0, atol=twice)
    jax.tree.map(np.testing.assert_array_equal, back, wide_back)

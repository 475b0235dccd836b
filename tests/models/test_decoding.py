"""Decoding a language model: prefill and steps give the logits of one forward over all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import reversible
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import csa, dense, dsa, linear, local, lsh, shared_qk
from reformax.ops.indexing.indexer import Indexer
from tests.helpers import changed
from tests.layers import plain
from tests.ops.rows import ROWS, one_of_each_kind, over

RNG = jax.random.PRNGKey(4)
LENGTH = 23
SMALL = dict(
    vocab_size=16,
    d_model=8,
    d_ff=20,
    d_attention_key=4,
    d_attention_value=4,
    n_layers=2,
    n_heads=2,
    mode="eval",
)
CYCLE = (
    local.local(chunk_len=4),
    lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True),
)
AXIAL = dict(pos_type="axial", pos_axial_shape=(5, 6), pos_d_axial_embs=(2, 6))
STRICT_CYCLE = (
    CYCLE[0],
    lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True, attend_self_if_alone=False),
)
SLOTS = dict(
    attention_type=(CYCLE[0], shared_qk.shared_qk(attend_self_if_alone=False)),
    n_slots=3,
    n_layers=4,
    next_value=True,
    pos_type="rotary_local",
)
INDEXER = dict(top_k=3, n_index_heads=2, d_index=4)
SUMMARIES = dict(block_size=2, window=4, share_kv=True, rotary_features=2)
REUSED = (
    dsa.dsa(**INDEXER),
    csa.csa(**INDEXER, **SUMMARIES),
    dsa.dsa(reuse=True),
    csa.csa(reuse=True, **SUMMARIES),
    dsa.dsa(**INDEXER, indexer=Indexer(n_local=2, group=2)),
    dsa.dsa(reuse=True),
)
# Summaries rotate by themselves.
CHOICES = dict(attention_type=REUSED, n_layers=6, pos_type="rotary_local")
MODELS = {
    "transformer, rotary": (TransformerLM, {}),
    "transformer, axial": (TransformerLM, AXIAL),
    "transformer, alibi": (TransformerLM, dict(pos_type="alibi", n_kv_heads=1)),
    "transformer, as GPT-2 and BERT": (
        TransformerLM,
        AXIAL
        | dict(tie_embeddings=True, init_std=0.3, first_token=5, attention_bias=True)
        | dict(post_norm=True, embedding_norm=True),
    ),
    "reformer, t5": (ReformerLM, dict(attention_type=dense.dense(), pos_type="t5")),
    "transformer, one head of keys": (TransformerLM, dict(n_kv_heads=1)),
    "reformer, rotary": (ReformerLM, dict(attention_type=CYCLE, n_layers=4)),
    "reformer, rotary in a grid": (
        ReformerLM,
        dict(attention_type=CYCLE, pos_axial_shape=(5, 6)),
    ),
    "reformer, axial": (ReformerLM, dict(attention_type=CYCLE, ff_chunk_size=5) | AXIAL),
    "reformer, sinusoidal": (ReformerLM, dict(attention_type=CYCLE, pos_type="sinusoidal")),
    "reformer, none": (ReformerLM, dict(attention_type=CYCLE, pos_type="none")),
    "reformer, one head of local keys": (ReformerLM, dict(attention_type=CYCLE, n_kv_heads=1)),
    "transformer, a choice reused": (TransformerLM, CHOICES),
    "reformer, a choice reused": (ReformerLM, CHOICES),
    "reformer, slots": (ReformerLM, SLOTS),
    "reformer, next values by hashing": (ReformerLM, SLOTS | dict(attention_type=STRICT_CYCLE)),
}


def make(name, **options):
    constructor, settings = MODELS[name]
    model = constructor(**SMALL | settings | options)
    return model, plain.init(model, (2, LENGTH))


def some_tokens(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, 16, (batch, length), np.int32)


@functools.cache
def programs(model, capacity):
    start = jax.jit(lambda params, t, n: model.prefill(params, t, n, capacity, RNG))
    return start, jax.jit(model.step)


def decode(model, params, tokens, lengths, capacity=LENGTH, n_prompt=None):
    """`{(row, t): logits of token t}`, from prompts of `lengths` and then token by token."""
    lengths = np.array(lengths, np.int32)
    n_prompt = lengths.max() if n_prompt is None else n_prompt
    prompt = np.where(np.arange(n_prompt) < lengths[:, None], tokens[:, :n_prompt], 7)
    start, step = programs(model, capacity)
    logits, decoding = start(params, prompt, lengths)
    params = jax.jit(model.for_decoding)(params)
    found, rows = {}, np.arange(len(lengths))
    for n in range(tokens.shape[1] - lengths.max() + 1):
        found |= {(b, lengths[b] + n): np.asarray(logits)[b] for b in rows}
        if lengths.max() + n < tokens.shape[1]:
            logits, decoding = step(params, tokens[rows, lengths + n], decoding)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_position_is_that_of_the_forward(name, monkeypatch):
    # The grid of slots would turn a difference in the last bit into one of its steps.
    monkeypatch.setattr(reversible, "to_grid", lambda x: x)
    check_every_position(*make(name))


@over((row for row in ROWS if row.decodes and row.plans_ahead), quick=one_of_each_kind)
def test_every_op_decodes_in_a_model(row):
    model = ReformerLM(**SMALL | dict(n_layers=1), attention_type=row.op())
    check_every_position(model, plain.init(model, (2, LENGTH)))


def check_every_position(model, params):
    """Rows of different lengths, an empty one among them, padded further than the longest."""
    tokens = some_tokens(3)
    whole = jax.jit(model.apply)(params, np.pad(tokens, ((0, 0), (0, 1))), RNG)
    found = decode(model, params, tokens, [9, 0, 4], capacity=LENGTH + 1, n_prompt=11)
    assert {t for b, t in found if b == 1} == set(range(LENGTH - 9 + 1))
    for (b, t), logits in found.items():
        np.testing.assert_allclose(logits, whole[b, t], atol=1e-5 * max(1, np.abs(whole).max()))


@pytest.mark.slow
def test_ordinary_lsh_in_one_layer_is_the_last_row_of_each_forward():
    """Evaluation reads the tokens so far, padded to the capacity."""
    op = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4)
    model = ReformerLM(**SMALL | dict(n_layers=1), attention_type=op)
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    found = decode(model, params, tokens, [6, 6])
    for n in (6, 7, 13, 22):
        # The prediction of the token at n does not read it, but its position is hashed.
        logits = jax.jit(model.apply)(params, tokens[:, : n + 1], RNG)
        np.testing.assert_allclose(found[0, n], logits[0, n], atol=1e-5)
        np.testing.assert_allclose(found[1, n], logits[1, n], atol=1e-5)


# `ops/test_decoding.py` has the prefill of each.
@pytest.mark.slow
def test_a_prompt_is_the_forward_whatever_the_algorithm():
    """Deep stacks of ordinary LSH too: prefill is the evaluation of the prompt."""
    op = lsh.lsh(chunk_len=4, n_hashes=2, n_hashes_eval=3, n_buckets=4)
    model = ReformerLM(**SMALL, attention_type=(CYCLE[0], op))
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    logits = jax.jit(model.apply)(params, tokens, RNG)
    found = decode(model, params, tokens[:, :-1], [LENGTH - 1] * 2)
    np.testing.assert_allclose(found[0, LENGTH - 1], logits[0, -1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reformer, rotary", "transformer, rotary"])
def test_a_row_is_the_same_alone(name):
    model, params = make(name)
    tokens, lengths = some_tokens(3), [9, 2, 6]
    together = decode(model, params, tokens, lengths)
    for b, n in enumerate(lengths):
        alone = decode(model, params, tokens[b : b + 1, :14], [n], n_prompt=9)
        for t in range(n, n + 6):
            np.testing.assert_allclose(together[b, t], alone[0, t], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options", [("reformer, rotary", dict(exact=True)), ("reformer, slots", {})]
)
def test_streams_on_the_grid(name, options):
    """Rounding to 2^-12 turns a difference in the last bit into one step of the grid, not more."""
    model, params = make(name, **options)
    tokens = some_tokens()
    whole = jax.jit(model.apply)(params, tokens, RNG)
    for (b, t), logits in decode(model, params, tokens[:, :-1], [9, 9]).items():
        np.testing.assert_allclose(logits, whole[b, t], atol=5e-3)


@pytest.mark.parametrize("name", ["reformer, rotary", "transformer, rotary"])
def test_bfloat16(name):
    model, params = make(name, dtype="bfloat16")
    tokens = some_tokens()
    whole = np.asarray(jax.jit(model.apply)(params, tokens, RNG))
    found = decode(model, params, tokens[:, :-1], [9, 9])
    errors = [np.abs(logits - whole[b, t]).max() for (b, t), logits in found.items()]
    assert np.median(errors) < 0.02 * np.abs(whole).max()
    weights = model.for_decoding(params)
    assert weights["logits"]["w"].dtype == jnp.bfloat16
    weights = weights["stack"]
    assert len(weights) == 2  # repeats of the cycle
    for name, block in weights[0].items():
        assert all(w.dtype == jnp.bfloat16 for w in jax.tree.leaves(block["attention"])), name
        assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(block["attention_norm"])), name


def test_hashes_are_those_of_the_rng():
    op = lsh.lsh(chunk_len=4, n_hashes=1, n_buckets=8, strictly_causal=True)
    model = ReformerLM(**SMALL, attention_type=op)
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    lengths = np.array([22, 22])
    start = jax.jit(lambda rng: model.prefill(params, tokens[:, :22], lengths, LENGTH, rng)[0])
    one, other = start(RNG), start(jax.random.PRNGKey(9))
    np.testing.assert_array_equal(one, start(RNG))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("attention", [dense.dense(), CYCLE], ids=["dense", "hashed"])
def test_no_position_is_beyond_the_capacity(attention):
    """A cache without room gives numbers of another text; a compiled program does not know."""
    model = TransformerLM(**SMALL, attention_type=attention)
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    lengths = np.array([4, 6])
    start, step = programs(model, 8)
    _, state = start(params, tokens[:, :6], lengths)
    weights = jax.jit(model.for_decoding)(params)
    _, full = step(weights, tokens[:, 7], state)  # 8 positions of the second row
    match = "^state.position has 6 to 8: expected 0 to 7, below .* capacity, 8: give a larger one$"
    with pytest.raises(ValueError, match=match):
        model.step(weights, tokens[:, 7], full)
    one = jax.device_get(jax.jit(model.take_rows)(full, np.array([0])))
    jax.eval_shape(lambda new: model.step(weights, new, one), tokens[:1, 7])  # the state is known
    step(weights, tokens[:, 7], full)
    more = np.array([3, 2])
    match = r"^state.position \+ lengths has 8 to 9: expected 0 to 8, .*: give a larger one$"
    with pytest.raises(ValueError, match=match):
        model.prefill(params, tokens[:, :3], more, 0, state=state)
    fewer, known = np.array([3, 1]), state._replace(position=np.asarray(state.position))
    jax.eval_shape(lambda new: model.prefill(params, new, fewer, 0, state=known), tokens[:, :3])
    first = jax.jit(model.first_state, static_argnums=(1, 2))(params, 2, 2, RNG)
    with pytest.raises(ValueError, match="has 3 to 3: expected 0 to 2, the state's capacity"):
        model.prefill(params, tokens[:, :3], np.array([3, 3]), 0, state=first)


def test_a_state_of_one_size_goes_on_as_far_as_positions_are_held():
    linear_lm = functools.partial(TransformerLM, **SMALL, attention_type=linear.linear())
    for options, most in (({}, None), (AXIAL, 30)):
        model = linear_lm(**options)
        params = plain.init(model, (1, LENGTH))
        first = jax.jit(model.first_state, static_argnums=(1, 2))(params, 1, 1, RNG)
        state = jax.device_get(first)._replace(position=np.array([30]))
        weights, token = jax.jit(model.for_decoding)(params), np.array([1])
        if most is None:
            step = functools.partial(model.step, weights, state=state)
            jax.eval_shape(step, token)
        else:
            with pytest.raises(ValueError, match="^state.position has 30 to 30: expected 0 to 29"):
                model.step(weights, token, state)


WINDOWS = (local.local(chunk_len=4), local.local(window=3), linear.linear())


@pytest.mark.slow
def test_windows_and_recurrences_go_on_without_end():
    """Where the capacity holds what a window shows."""
    model = TransformerLM(**SMALL | dict(n_layers=3), attention_type=WINDOWS, pos_type="rotary")
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    assert model.endless_from == 8
    whole = np.asarray(jax.jit(model.apply)(params, tokens, RNG))
    weights = model.for_decoding(params)
    for capacity in (8, 7):
        _, state = model.prefill(params, tokens[:, :6], np.array([6, 5]), capacity, RNG)
        if capacity < 8:
            with pytest.raises(ValueError, match="expected 0 to 7, the state's capacity"):
                model.prefill(params, tokens[:, 5:], np.array([9, 4]), 0, state=state)
            continue
        rows = np.stack([tokens[0, 6:15], tokens[1, 5:14]])
        _, state = model.prefill(params, rows, np.array([9, 4]), 0, state=state)
        logits, _ = model.step(weights, tokens[[0, 1], [15, 9]], state)
        np.testing.assert_allclose(logits, whole[[0, 1], [16, 10]], atol=1e-5)
    one = TransformerLM(**SMALL, attention_type=(WINDOWS[0], dense.dense()))
    assert one.endless_from is None


def test_errors():
    model, params = make("reformer, axial")
    tokens, lengths = some_tokens(), np.array([LENGTH] * 2)
    with pytest.raises(ValueError, match="^capacity is 31: expected at most 30, which"):
        model.prefill(params, tokens, lengths, 31, RNG)
    with pytest.raises(ValueError, match="^capacity is 23: expected more than 23, the prompts'"):
        model.prefill(params, tokens, lengths, LENGTH, RNG)
    with pytest.raises(ValueError, match="^rng is None"):
        model.prefill(params, tokens, lengths, 30)
    model, params = make("reformer, rotary", mode="train")
    with pytest.raises(ValueError, match="^causal=True and mode='train': decoding needs"):
        model.prefill(params, tokens, lengths, 30, RNG)
    op = changed(dense.dense(), decoding="no")
    model = TransformerLM(**SMALL, attention_type=op)
    with pytest.raises(NotImplementedError, match="it has no step to decode with"):
        model.prefill(plain.init(model, (2, LENGTH)), tokens, lengths, 30, RNG)

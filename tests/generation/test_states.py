"""Texts that go on from a state: what one call over the whole text reads and draws."""

import pickle

import jax
import numpy as np
import pytest

from reformax import generation
from reformax.declared import SettingError, Unsupported
from reformax.models import TransformerLM
from reformax.ops import (
    dense,
    gated_delta,
    gated_linear,
    kda,
    linear,
    local,
    performer,
    retention,
    sinks,
)
from tests.helpers import assert_trees_close
from tests.layers import plain

CONV = dict(conv_size=3, chunk_len=4)
OPS = {
    "linear": linear.linear(**CONV),
    "retention": retention.retention(**CONV),
    "gated_linear": gated_linear.gated_linear(**CONV),
    "gated_delta": gated_delta.gated_delta(**CONV),
    "kda": kda.kda(**CONV),
    "performer": performer.performer(n_features=16, chunk_len=4),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [8], [6, 5]]


def build(op, kind=TransformerLM, **options):
    sizes = dict(vocab_size=16, d_model=8, d_ff=16, n_layers=2, n_heads=2, mode="eval")
    heads = dict(d_attention_key=4, d_attention_value=4)
    model = kind(**sizes | heads | dict(pos_type="rotary") | options, attention_type=op)
    params = plain.init(model, (1, 8))
    params["logits"]["w"] = params["logits"]["w"] * 8
    return model, params


@pytest.fixture(scope="module")
def both():
    return build((OPS["kda"], OPS["linear"]))


@pytest.mark.slow
def test_a_state_of_one_row_is_shared(both):
    """And is a tree of arrays that can be kept in a file."""
    model, params = both
    long = np.random.default_rng(0).integers(0, 16, 40).tolist()
    state = pickle.loads(pickle.dumps(jax.device_get(generation.read(model, params, [long]))))
    got = generation.generate(model, params, PROMPTS, 6, temperature=0, state=state)
    whole = [long + row for row in PROMPTS]
    np.testing.assert_array_equal(got, generation.generate(model, params, whole, 6, temperature=0))
    same = generation.read(model, params, [[]], state=state)
    assert_trees_close(same, state, 0)
    grown = generation.read(model, params, PROMPTS, state=state)
    at_once = generation.read(model, params, whole)
    assert_trees_close(grown, at_once, 1e-4)
    assert grown.model.position.tolist() == [len(row) for row in whole]


def test_windows_go_on_without_end():
    """Their ring holds what a step sees, also of a prompt that is longer than it."""
    model, params = build((local.local(chunk_len=4), OPS["linear"]))
    prompt, got = [5] * 11, []
    state = generation.read(model, params, [prompt])
    assert not state.room
    for _ in range(3):
        options = dict(temperature=0, state=state, return_state=True)
        (row,), state = generation.generate(model, params, [[]], 20, **options)
        got += row.tolist()
    (want,) = generation.generate(model, params, [prompt], 60, temperature=0)
    assert got == want.tolist()


@pytest.mark.parametrize("max_length", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_a_short_text_of_wide_windows_stays_without_end(max_length):
    """A call's cache would be smaller than the window, but the state's is as large."""
    model, params = build(sinks.sinks(window=80))
    state, got = generation.read(model, params, [[3, 1]]), []
    for _ in range(2):
        options = dict(temperature=0, state=state, return_state=True, max_length=max_length)
        (row,), state = generation.generate(model, params, [[]], 5, **options)
        got += row.tolist()
        assert not state.room
    (want,) = generation.generate(model, params, [[3, 1]], 10, temperature=0)
    assert got == want.tolist()


def test_a_row_that_has_ended_stays_at_its_end(both):
    model, params = both
    options = dict(seed=5, return_state=True)
    rows, _ = generation.generate(model, params, PROMPTS, 20, **options)
    end = int(rows[0][3])
    ended, state = generation.generate(model, params, PROMPTS, 20, **options, end=end)
    assert len(ended[0]) < max(map(len, ended))
    texts = [prompt + row.tolist() for prompt, row in zip(PROMPTS, ended, strict=True)]
    want = generation.read(model, params, texts)
    assert state.token.tolist() == want.token.tolist()
    assert_trees_close(state.model, want.model, 1e-4)


def test_a_row_keeps_the_end_that_it_drew_of_several(both):
    """Others go on meanwhile, and its later tokens are shown as the first end."""
    model, params = both
    options = dict(seed=5, return_state=True)
    rows, _ = generation.generate(model, params, PROMPTS, 20, **options)
    drawn = int(rows[0][3])
    other = next(x for x in range(16) if all(x not in row[:6] for row in rows))
    ended, state = generation.generate(model, params, PROMPTS, 20, **options, end=(other, drawn))
    assert len(ended[0]) < max(map(len, ended)) and ended[0][-1] == drawn
    assert state.token.tolist() == [row[-1] for row in ended]


@pytest.mark.slow
def test_further_lengths_compile_nothing(both):
    model, params = both
    start, go_on = generation.reading.read_piece, generation.decoding._go_on
    state = generation.read(model, params, [[1, 2]])
    generation.generate(model, params, [[3]], 2, state=state)
    before = start._cache_size(), go_on._cache_size()
    for prompt, n in (([], 1), ([1] * 40, 30), ([2], 500)):
        generation.generate(model, params, [prompt], n, state=state)
    assert (start._cache_size(), go_on._cache_size()) == before


def test_lengths_of_texts_without_end_share_a_program():
    """Whether prompts are read in pieces or, as with sinks, whole."""
    for op in (OPS["linear"], sinks.sinks(window=3)):
        model, params = build(op, n_layers=1)
        caches, sizes = (generation.reading.prefill, generation.texts.compiled_first_state), []
        for n in (5, 6, 40):
            generation.read(model, params, [[1] * n])
            sizes.append([x._cache_size() for x in caches])
        assert sizes[0] == sizes[1] == sizes[2], op


@pytest.mark.slow
def test_errors(both):
    model, params = both
    state = generation.read(model, params, PROMPTS)
    circle, its = build(local.local(chunk_len=4, wrap=True))
    axial = dict(pos_type="axial", pos_axial_shape=(4, 5), pos_d_axial_embs=(4, 4))
    short, of_short = build(OPS["linear"], **axial)
    few, of_few = build((OPS["kda"], OPS["linear"]), vocab_size=8)

    def generate(model=model, params=params, prompts=PROMPTS, n=2, **options):
        return generation.generate(model, params, prompts, n, **options)

    for error, message, call in (
        (ValueError, "^state has 3 rows and prompts 2: expected as many, or one row$",
         lambda: generate(prompts=PROMPTS[:2], state=state)),
        (ValueError, "^state is of type LMState: expected one from generation.read or of a call",
         lambda: generate(state=state.model)),
        (ValueError, "^state is of another model: read its text again, by generation.read$",
         lambda: generate(short, of_short, state=state)),
        (ValueError, "^state is of another model: read its text again, by generation.read$",
         lambda: generate(few, of_few, [[1]] * 3, state=state)),
        (ValueError, "^state is of another model: read its text again, by generation.read$",
         lambda: generate(*build(dense.dense()), state=state)),
        (Unsupported, "^op is local.*: it has no step to decode with",
         lambda: generate(circle, its, return_state=True)),
        (Unsupported, "^op is local.*: it has no", lambda: generation.read(circle, its, PROMPTS)),
        (ValueError, "^prompts.1. is empty: expected a token, as no state is given$",
         lambda: generation.read(model, params, [[1], []])),
        (SettingError, "^prompts has a text of 21 tokens: the model's positions hold 20$",
         lambda: generation.read(short, of_short, [[1] * 21])),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()

"""Prompts in pieces, and texts that go on from the caches of attention: what steps compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import generation
from reformax.declared import SettingError
from reformax.generation import reading, texts
from reformax.models import ReformerLM, TransformerLM
from reformax.models.designs import Design
from reformax.ops import base, csa, dense, dsa, flash, hca, kda, local, lsh, moba, nsa, shared_qk
from tests.generation.test_states import OPS, PROMPTS, build

KEY = jax.random.PRNGKey(4)
LONG = np.random.default_rng(0).integers(0, 16, 37).tolist()
WINDOWS = local.local(chunk_len=4, window=4)
STRICT = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True)
NSA = nsa.nsa(block_size=4, compress_len=4, compress_stride=2, window=4, n_selected=3)
ALONE = shared_qk.shared_qk(attend_self_if_alone=False)
# Cycles whose plans no later token changes: a whole prompt is then its steps.
CYCLES = {
    "dense": dict(op=(dense.dense(learned_sinks=True), flash.flash()), n_kv_heads=1),
    "windows": dict(op=(WINDOWS, ALONE), next_value=True),
    "hybrid": dict(op=(OPS["kda"], dense.dense(), OPS["performer"], STRICT), n_layers=4),
    "slots": dict(op=(OPS["linear"], ALONE), kind=ReformerLM, n_slots=3, next_value=True),
    "chosen": dict(op=(moba.moba(block_size=4), NSA), design=Design(key_conv=3)),
    "reused": dict(op=(dsa.dsa(top_k=5), dsa.dsa(top_k=5, reuse=True))),
    "recurrences": dict(op=tuple(OPS.values()), n_layers=6),
    "bias": dict(op=(dense.dense(), dense.dense()), pos_type="alibi"),
    "post": dict(op=(kda.kda(chunk_len=4), dense.dense()), post_norm=True, pos_type="sinusoidal"),
    "summaries": dict(op=(csa.csa(block_size=2, window=4), dense.dense())),
}
QUICK = ("windows",)


def cycles(names=tuple(CYCLES)):
    marks = {name: () if name in QUICK else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


def built(name):
    options = dict(CYCLES[name])
    return build(options.pop("op"), options.pop("kind", TransformerLM), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", cycles())
def test_a_prompt_in_pieces_is_the_whole_prompt(name):
    """Logits of three rows, and the step behind them."""
    model, params = built(name)
    rows = [LONG, LONG[:5], LONG[5:29]]
    tokens, lengths = np.zeros((3, 37), np.int32), np.array([len(row) for row in rows])
    for row, prompt in zip(tokens, rows, strict=True):
        row[: len(prompt)] = prompt
    want, whole = jax.jit(model.prefill, static_argnames="capacity")(
        params, tokens, lengths, capacity=40, rng=KEY
    )
    given = texts.Resumed([np.array(row) for row in rows], None, jnp.int32(0), [0] * 3, 0)
    pieces = reading.Reading(40, KEY, None, 1, 7)
    got, state = reading.read_texts(model, params, given, pieces)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    step, weights, new = jax.jit(model.step), model.for_decoding(params), np.array([3, 1, 2])
    want, got = (step(weights, new, held)[0] for held in (whole, state))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert state.position.tolist() == [38, 6, 25]


@pytest.mark.parametrize("name", cycles())
def test_a_text_goes_on_from_its_caches(name):
    """In three calls, with a prompt in pieces, as in one; rows have several lengths."""
    model, params = built(name)
    options = dict(seed=3, max_length=64)
    want = generation.generate(model, params, PROMPTS, 12, prompt_piece=3, **options)
    first = [row[: len(row) // 2 + 1] for row in PROMPTS]
    state = generation.read(model, params, first, max_length=64)
    assert int(state.room) == 64
    rest = [row[len(row) // 2 + 1 :] for row in PROMPTS]  # of the second row nothing
    options = dict(seed=3, return_state=True)
    one, state = generation.generate(model, params, rest, 5, state=state, **options)
    two, state = generation.generate(model, params, [[]] * 3, 7, state=state, **options)
    np.testing.assert_array_equal(np.concatenate([one, two], axis=1), want)
    assert state.model.position.tolist() == [len(row) + 12 for row in PROMPTS]


@pytest.mark.slow
def test_ordinary_lsh_reads_by_its_steps():
    """A whole prompt is another function: later tokens move borders. Pieces of any size are one."""
    op = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4)
    model, params = build((op, op), ReformerLM)
    given = texts.Resumed([np.array(LONG)], None, jnp.int32(0), [0], 0)
    whole, few, more = (
        reading.read_texts(model, params, given, reading.Reading(40, KEY, None, 1, piece))[0]
        for piece in (None, 5, 16)
    )
    state, weights = model.first_state(params, 1, 40, KEY), model.for_decoding(params)
    step = jax.jit(model.step)
    for token in [model.first_token, *LONG]:
        steps, state = step(weights, np.array([token]), state)
    for got in (few, more):
        np.testing.assert_allclose(got, steps, atol=1e-5 * np.abs(steps).max())
    assert np.abs(whole - steps).max() > 1e-2
    assert not model.reads_ahead


SUMMARIES = csa.csa(block_size=2, window=4), hca.hca(block_size=4, window=4)


@pytest.mark.parametrize(
    "op", [*SUMMARIES, dense.dense(learned_sinks=True), ALONE, WINDOWS], ids=str
)
def test_no_prompt_is_read_step_by_step_unasked(op, monkeypatch):
    """A piece of 65,536 tokens would be as many steps."""
    stepped, by_steps = [], base.reading.by_steps
    monkeypatch.setattr(
        base.reading, "by_steps", lambda *args: stepped.append(True) or by_steps(*args)
    )
    model, params = build((op,), n_layers=1)
    state = texts.compiled_first_state.eval_shape(
        model, 40, None, params, KEY, np.zeros(1, np.int32)
    )
    piece = np.zeros((1, 7), np.int32), np.array([7])
    jax.eval_shape(functools.partial(model.prefill, capacity=0), params, *piece, state=state)
    assert model.reads_ahead == (not stepped)


@pytest.mark.parametrize("name", cycles(("windows", "dense")))
def test_memory_does_not_grow_with_the_prompt(name):
    """The program that reads a piece works in the caches' memory, and beside them in as much."""
    options = dict(CYCLES[name])
    model, params = build(options.pop("op"), **options)

    def memory(capacity):
        given = None, params, KEY, np.zeros(1, np.int32)
        state = texts.compiled_first_state.eval_shape(model, capacity, *given)
        piece = jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        found = reading.read_piece.lower(model, None, params, *piece, state).compile()
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        return found.memory_analysis(), held

    (short, _), (long, held) = memory(4096), memory(32_768)
    assert long.temp_size_in_bytes == short.temp_size_in_bytes < 2**23
    assert long.alias_size_in_bytes == held
    assert long.output_size_in_bytes - held < 2**12


@pytest.mark.slow
def test_long_prompts_are_read_in_pieces(monkeypatch):
    """By themselves where that computes the same, and never in a piece longer than set."""
    monkeypatch.setattr(reading, "PIECE", 64)
    sizes = []
    read = reading.read_piece

    def spy(model, mesh, params, tokens, *others):
        sizes.append(tokens.shape[1])
        return read(model, mesh, params, tokens, *others)

    monkeypatch.setattr(reading, "read_piece", spy)
    model, params = build((WINDOWS, dense.dense()))
    long = np.random.default_rng(1).integers(0, 16, 150).tolist()
    options = dict(temperature=0, max_length=160)
    found = generation.generate(model, params, [long, [1]], 6, **options)
    assert sizes == [64] * 3
    assert found[1].tolist() == generation.generate(model, params, [[1]], 6, **options)[0].tolist()
    hashing, its = build((WINDOWS, STRICT))  # whose steps one after the other would be slow
    given = texts.resumed(hashing, its, [np.array(long)], None, 1)
    of_piece = functools.partial(reading.reading_of, hashing, given, 160, 0, None, 1)
    assert [of_piece(piece).piece for piece in (None, 4)] == [None, 4]


def test_errors():
    model, params = build(dense.dense(), n_layers=1)
    state = generation.read(model, params, [[1, 2, 3]], max_length=9)
    for message, call in (
        ("^state has room for texts of 9 tokens, and prompts and new tokens make 10: read the text",
         lambda: generation.generate(model, params, [[4, 5]], 5, state=state)),
        ("^max_length is 12: state has room for texts of 9 tokens, which stays: leave",
         lambda: generation.generate(model, params, [[4]], 1, state=state, max_length=12)),
        ("^prompts has a text of 3 tokens: max_length=2, raise it$",
         lambda: generation.read(model, params, [[1, 2, 3]], max_length=2)),
        ("^divide_caches is True and the mesh has no axis context of several devices: give one",
         lambda: generation.generate(model, params, [[4, 5]], 5, divide_caches=True)),
        ("^prompt_piece is 0: expected",
         lambda: generation.generate(model, params, [[4, 5]], 5, prompt_piece=0)),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=message):
            call()
    (row,) = generation.generate(model, params, [[4, 5]], 4, state=state)  # all room is filled
    assert len(row) == 4


def test_angles_that_change_are_refused_in_pieces():
    rotary = dict(
        rotary_scaling="longrope",
        rotary_factor=2.0,
        rotary_trained_length=20,
        rotary_short_factors=(1.0, 1.0),
        rotary_long_factors=(1.0, 2.0),
    )
    model, params = build(dense.dense(), n_layers=1, design=Design(**rotary))
    refusal = "and not all are read at once: it would pass rotary_trained_length=20"
    with pytest.raises(SettingError, match=f"^prompts has a text of 37 tokens, {refusal}"):
        generation.generate(model, params, [LONG], 2, prompt_piece=8)
    state = generation.read(model, params, [LONG[:10]], max_length=40)
    with pytest.raises(SettingError, match=f"^prompts has a text of 21 tokens, {refusal}"):
        generation.generate(model, params, [LONG[10:21]], 1, state=state)
    generation.generate(model, params, [LONG[10:14]], 2, state=state)
    state = generation.read(model, params, [LONG[:18], LONG], max_length=50)  # on both sides of it
    with pytest.raises(SettingError, match=f"^prompts has a text of 22 tokens, {refusal}"):
        generation.generate(model, params, [LONG[18:22], [1]], 2, state=state)
    with pytest.raises(SettingError, match="^max_new_tokens is 4: after a prompt of 18 tokens"):
        generation.generate(model, params, [[], [1]], 4, state=state)

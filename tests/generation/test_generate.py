"""Generation: greedy text is the argmax of the forward pass, seeds repeat, programs are few."""

import jax
import numpy as np
import pytest

from reformax import generation
from reformax.generation import decoding, prompts, reading
from reformax.models import ReformerLM
from reformax.ops import local, lsh
from tests.layers import plain

CYCLE = (
    local.local(chunk_len=4),
    lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True),
)
OPTIONS = dict(
    vocab_size=16,
    d_model=8,
    d_ff=16,
    d_attention_key=4,
    d_attention_value=4,
    n_layers=2,
    n_heads=2,
    attention_type=CYCLE,
    mode="eval",
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [], [6, 5]]
HASHES = jax.random.fold_in(jax.random.PRNGKey(0), 0)


@pytest.fixture(scope="module")
def model():
    return ReformerLM(**OPTIONS)


@pytest.fixture(scope="module")
def params(model):
    params = plain.init(model, (1, 8))
    # Far from even logits, or the argmax would hang on rounding.
    params["logits"]["w"] = params["logits"]["w"] * 8
    return params


def test_greedy_is_the_argmax_of_the_forward(model, params):
    rows = generation.generate(model, params, PROMPTS, 30, temperature=0, max_length=64)
    apply = jax.jit(model.apply)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row.shape == (30,) and row.dtype == np.int32
        text = np.concatenate([np.array(prompt, int), row])
        logits = np.asarray(apply(params, np.pad(text, (0, 64 - len(text)))[None], HASHES))[0]
        chosen = logits[np.arange(len(prompt), len(text)), row]
        best = logits[len(prompt) : len(text)].max(axis=-1)
        np.testing.assert_allclose(chosen, best, atol=1e-4)
    assert len({tuple(row) for row in rows}) == 3
    assert len(set(np.concatenate(rows))) > 3


@pytest.mark.slow
def test_draws_follow_the_models_probabilities(model, params):
    """The first token of many rows, and the second given the first."""
    n = 3000
    rows = np.array(generation.generate(model, params, [[3, 1]] * n, 2, temperature=0.8, top_k=6))
    apply = jax.jit(model.apply)

    def compare(drawn, text):
        logits = apply(params, np.pad(text, (0, 9 - len(text)))[None], HASHES)[0, len(text)]
        p = np.asarray(jax.nn.softmax(generation.Sampler(0.8, 6).logits(logits[None])))[0]
        share = np.bincount(drawn, minlength=16) / len(drawn)
        assert np.all(np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / len(drawn)) + 1e-3)
        return share

    common = int(np.argmax(compare(rows[:, 0], [3, 1])))
    compare(rows[rows[:, 0] == common, 1], [3, 1, common])


def test_a_seed_reproduces_the_text(model, params):
    def text(seed, **options):
        options = dict(seed=seed, max_length=64) | options
        return np.array(generation.generate(model, params, PROMPTS, 20, **options))

    np.testing.assert_array_equal(text(1), text(1))
    assert np.mean(text(1) == text(2)) < 0.5
    # Rows of one prompt differ, and so do draws of a row; and handing tokens out
    # one by one changes nothing.
    options = dict(temperature=1e4, max_length=64)
    same = np.array(generation.generate(model, params, [[3]] * 3, 20, **options))
    assert len({tuple(row) for row in same}) == 3 and min(len(set(row)) for row in same) > 5
    blocks = list(generation.stream(model, params, PROMPTS, 20, seed=1, every=3, max_length=64))
    assert [block.shape[1] for block in blocks] == [1, 3, 3, 3, 3, 3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), text(1))


def test_new_lengths_seeds_and_settings_compile_nothing(model, params):
    options = dict(max_length=64)
    for top_k in (0, 2):  # without tokens left out, and with
        generation.generate(model, params, PROMPTS, 2, **options, top_k=top_k)
    before = reading.prefill._cache_size(), decoding._go_on._cache_size()
    assert min(before) > 0
    for given, n, more in [
        (PROMPTS, 1, {}),
        (PROMPTS, 57, dict(temperature=0)),
        ([[1] * 20, [2], [3] * 7], 44, dict(seed=9, end=3, top_k=4)),
        ([[1] * 33, [], []], 5, dict(hash_seed=3, top_p=0.5, temperature=1)),
    ]:
        generation.generate(model, params, given, n, **options, **more)
    generation.generate(model, params, PROMPTS, 9)  # 16 tokens have room for 64
    assert (reading.prefill._cache_size(), decoding._go_on._cache_size()) == before


def test_steps_at_once_draw_the_same_tokens(model, params, monkeypatch):
    """As on a GPU: lengths that rounds do not divide, up to the cache's end, and rows that end."""
    options = dict(seed=3, max_length=64)
    whole = generation.generate(model, params, PROMPTS, 40, **options)
    end = int(whole[0][4])

    def texts():
        for n in (2, 40, 64 - max(map(len, PROMPTS))):
            yield generation.generate(model, params, PROMPTS, n, **options)
        yield generation.generate(model, params, PROMPTS, 40, **options, end=end)

    one_by_one = list(texts())
    with monkeypatch.context() as patch:
        patch.setattr(decoding.jax, "default_backend", lambda: "gpu")
        calls = (64, False), (64, True), (8, False)
        at_once = [decoding._steps_at_once(*call) for call in calls]
    assert at_once == [16, 1, 1], "a state and a short block have as many tokens as asked"
    monkeypatch.setattr(decoding, "_steps_at_once", lambda *_: 16)
    before = decoding._go_on._cache_size()
    for rows, want in zip(texts(), one_by_one, strict=True):
        assert [x.tolist() for x in rows] == [x.tolist() for x in want]
    assert decoding._go_on._cache_size() == before + 1, "rounds are a program of their own"


def test_a_row_ends(model, params):
    rows = generation.generate(model, params, PROMPTS, 40, seed=3, max_length=64)
    end = int(rows[0][4])
    ended = generation.generate(model, params, PROMPTS, 40, seed=3, max_length=64, end=end)
    for row, whole in zip(ended, rows, strict=True):
        n = list(whole).index(end) + 1 if end in whole else 40
        np.testing.assert_array_equal(row, whole[:n])
    # A row that has ended repeats its end for as long as another goes on.
    options = dict(seed=3, max_length=64, end=end)
    blocks = list(generation.stream(model, params, PROMPTS, 40, **options))
    assert max(map(len, ended)) > len(ended[0])
    assert np.all(np.concatenate(blocks, axis=1)[0, len(ended[0]) :] == end)
    # The first of several ends a row.
    ends = [end, int(rows[0][2])]
    ended = generation.generate(model, params, PROMPTS, 40, seed=3, max_length=64, end=ends)
    for row, whole in zip(ended, rows, strict=True):
        n = next((i + 1 for i, token in enumerate(whole) if token in ends), 40)
        np.testing.assert_array_equal(row, whole[:n])
    # When all have ended, no more is computed.
    same, options = [PROMPTS[0]] * 3, dict(temperature=0, max_length=64)
    first = int(generation.generate(model, params, same, 1, **options)[0][0])
    blocks = list(generation.stream(model, params, same, 40, **options, end=first))
    assert [block.tolist() for block in blocks] == [[[first]] * 3]


def test_hashes_are_those_of_their_seed(params):
    op = lsh.lsh(chunk_len=4, n_hashes=1, n_buckets=8, strictly_causal=True)
    model = ReformerLM(**OPTIONS | dict(attention_type=op))
    params = plain.init(model, (1, 8))
    prompt = [np.random.default_rng(0).integers(0, 16, 60)]
    rows = [generation.generate(model, params, prompt, 30, hash_seed=s)[0] for s in (0, 0, 1)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.any(rows[0] != rows[2])


def test_lengths_are_rounded_to_a_few():
    sizes = sorted({prompts.rounded(n) for n in range(1, 20_000)})
    assert all(prompts.rounded(n) >= n and prompts.rounded(n) <= max(64, 1.25 * n) for n in sizes)
    assert len(sizes) < 64
    assert prompts.rounded(0) == 0 and prompts.rounded(64) == 64 and prompts.rounded(65) == 128


def test_errors(model, params):
    def message(error=ValueError, prompts=PROMPTS, n=5, model=model, **options):
        with pytest.raises(error) as raised:
            generation.generate(model, params, prompts, n, **options)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert message(n=0) == "max_new_tokens is 0: expected at least 1"
    assert message(prompts=[]).startswith("prompts is empty")
    assert message(prompts=[[1], [16]]).startswith("prompts[1] has tokens from 16 to 16: expected")
    assert message(prompts=[[-1]]).startswith("prompts[0] has tokens from -1 to -1: expected")
    assert message(prompts=[[0.5]]).startswith("prompts[0] has shape (1,) and dtype float64")
    assert message(prompts=["text"]).startswith("prompts[0] has shape () and dtype <U4")
    assert message(end=16).startswith("end is 16: expected a token below 16")
    assert message(prompts=[[[1], [2, 3]]]) == (
        "prompts[0] is [[1], [2, 3]]: expected token numbers alone"
    )
    each = "a whole number of at least 0"
    assert message(end=1.5) == f"end is 1.5: expected {each}, or a list, each {each}, or None"
    assert message(end=[3, 16]).startswith("end is [3, 16]: expected a token below 16")
    assert (
        message(every=2.5) == "every is 2.5: expected a whole number of at least 1 and at most 64"
    )
    assert message(every=65) == "every is 65: expected at least 1 and at most 64"
    assert message(max_length="64") == (
        "max_length is '64': expected a whole number of at least 1, or None"
    )
    assert message(temperature=-1).startswith("temperature is -1")
    assert message(max_length=11) == (
        "max_new_tokens is 5: with a prompt of 7 tokens that is 12, above max_length, 11: request "
        "fewer or shorten the prompt"
    )
    axial = dict(pos_type="axial", pos_axial_shape=(4, 5), pos_d_axial_embs=(4, 4))
    short = ReformerLM(**OPTIONS | axial)
    assert "is 21, above the length that the model's positions hold, 20:" in message(
        n=14, model=short
    )
    assert message(model=short, max_length=30) == (
        "max_length is 30: the model's positions hold 20, lower it to that"
    )
    training = ReformerLM(**OPTIONS | dict(mode="train"))
    assert "decoding needs causal=True and mode='eval'" in message(model=training)


def test_numbers_of_numpy_are_numbers(model, params):
    numbers = dict(end=np.int64(15), every=np.int32(2), seed=np.uint8(3))
    rows = generation.generate(model, params, PROMPTS, np.int64(5), **numbers)
    want = generation.generate(
        model, params, PROMPTS, 5, **{name: int(x) for name, x in numbers.items()}
    )
    assert [row.tolist() for row in rows] == [row.tolist() for row in want]


@pytest.mark.slow
def test_all_of_axial_positions_can_be_filled():
    axial = dict(pos_type="axial", pos_axial_shape=(4, 5), pos_d_axial_embs=(4, 4))
    model = ReformerLM(**OPTIONS | axial | dict(attention_type=CYCLE[0]))
    params = plain.init(model, (1, 8))
    (row,) = generation.generate(model, params, PROMPTS[:1], 13)
    assert len(row) == 13

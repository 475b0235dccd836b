"""Likelihoods and continuations against plain computations, a request at a time."""

import functools

import jax
import numpy as np
import pytest

from reformax.evals.generate_until import GenerationRequest, generate_until
from reformax.evals.likelihood import LanguageScorer, windows
from reformax.models import encoder, lm
from reformax.ops import dense, local, lsh
from tests.layers import plain

V = 40


def built(*ops, **options):
    sizes = dict(d_model=16, d_ff=16, n_heads=2, n_layers=len(ops), init_std=0.3)
    model = lm.TransformerLM(V, attention_type=ops, mode="eval", first_token=3, **sizes | options)
    return model, plain.init(model, (1, 8), seed=1)


@pytest.fixture(scope="module")
def of_dense():
    return built(dense.dense(), local.local(chunk_len=16))


def request(seed, n_context, n):
    tokens = np.random.default_rng(seed).integers(0, V, n_context + n).tolist()
    return tokens[:n_context], tokens[n_context:]


def logits_of(model, params, inputs):
    """The logits of a row, of inputs that are not shifted; padding is behind them."""
    row = np.pad(np.array([inputs], np.int32), ((0, 0), (0, 160 - len(inputs))))
    return np.asarray(_logits(model, params, row), np.float64)[0, : len(inputs)]


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, row):
    return model.logits(params, model.encode(params, row))


def by_rows(model, params, inputs, targets):
    """`log p` of each target and whether it is the likeliest, a row at a time."""
    logits = logits_of(model, params, inputs)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    index = np.arange(len(targets))
    return log_p[index, targets], logits.argmax(axis=1) == targets


SIZES = [(0, 1), (5, 3), (0, 90), (80, 9), (63, 1), (64, 70), (1, 2), (70, 4)]


@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_a_likelihood_is_that_of_the_request_by_itself(of_dense, batch_size):
    model, params = of_dense
    requests = [request(i, *sizes) for i, sizes in enumerate(SIZES)]
    found = LanguageScorer(model, params, 200, batch_size=batch_size).likelihoods(requests)
    for (context, continuation), one in zip(requests, found, strict=True):
        tokens = [*context, *continuation]
        log_p, hits = by_rows(model, params, [3, *tokens[:-1]], tokens)
        np.testing.assert_allclose(one.log_p, log_p[len(context) :].sum(), rtol=1e-4)
        assert one.is_greedy == hits[len(context) :].all()


def test_the_likeliest_continuation_is_greedy_and_another_is_not(of_dense):
    model, params = of_dense
    context = request(0, 70, 0)[0]
    tokens = greedy(model, params, context, 3)
    scorer = LanguageScorer(model, params, 200)
    other = [*tokens[:-1], (tokens[-1] + 1) % V]
    first, second = scorer.likelihoods([(context, tokens), (context, other)])
    assert first.is_greedy and not second.is_greedy and first.log_p > second.log_p


def test_a_prefix_is_what_the_first_token_of_a_row_is_predicted_from(of_dense):
    model, params = of_dense
    context, continuation = request(0, 4, 5)
    (one,) = LanguageScorer(model, params, 64).likelihoods([(context, continuation)], [7])
    log_p, _ = by_rows(model, params, [7, *context, *continuation[:-1]], [*context, *continuation])
    np.testing.assert_allclose(one.log_p, log_p[4:].sum(), rtol=1e-4)


def of_ten(n_context):
    """The windows of four tokens of ten behind a -1."""
    found = windows(-1, np.arange(10), n_context, 4)
    return [(one.inputs.tolist(), one.targets.tolist(), one.first) for one in found]


def test_windows_are_those_of_the_harness():
    """The example in the docstring of `lm_eval.api.model.LM.loglikelihood_rolling`."""
    assert of_ten(0) == [
        ([-1, 0, 1, 2], [0, 1, 2, 3], 0),
        ([3, 4, 5, 6], [4, 5, 6, 7], 0),
        ([5, 6, 7, 8], [6, 7, 8, 9], 2),
    ]
    # A context is cut from the left.
    assert of_ten(8) == [([5, 6, 7, 8], [6, 7, 8, 9], 2)]


def test_a_long_text_is_the_sum_of_its_windows(of_dense):
    model, params = of_dense
    tokens = request(2, 0, 75)[1]
    (one,) = LanguageScorer(model, params, 30).likelihoods([((), tokens)])
    parts = [(0, 30, 0), (30, 60, 0), (45, 75, 15)]
    inputs = [3, *tokens[:-1]]
    total = sum(
        by_rows(model, params, inputs[i:j], tokens[i:j])[0][first:].sum() for i, j, first in parts
    )
    np.testing.assert_allclose(one.log_p, total, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("op", [lsh.lsh(chunk_len=8), lsh.lsh(chunk_len=8, n_buckets=4)])
def test_hashes_depend_on_the_request_alone(op):
    """Whatever else is in the batch, though rows are padded and later tokens move hashes."""
    model, params = built(op, n_kv_heads=None)
    requests = [request(i, *sizes) for i, sizes in enumerate(SIZES)]
    scorer = LanguageScorer(model, params, 200, batch_size=4)
    together = [one.log_p for one in scorer.likelihoods(requests)]
    alone = [scorer.likelihoods([one])[0].log_p for one in requests]
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def written(prompt, new):
    """Letters for tokens."""
    del prompt
    return "".join(chr(48 + token) for token in new)


def greedy(model, params, prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        logits = logits_of(model, params, [model.first_token, *tokens])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_continuation_ends_before_the_first_of_its_stops_or_the_end(of_dense):
    model, params = of_dense
    prompts = [tuple(request(i, n, 0)[0]) for i, n in enumerate((0, 3, 5, 20))]
    plainly = [greedy(model, params, prompt, 8) for prompt in prompts]
    scorer = LanguageScorer(model, params, 200, batch_size=2)
    whole = [written((), tokens) for tokens in plainly]
    asked = [GenerationRequest(prompt, 8) for prompt in prompts]
    assert generate_until(scorer, asked, written, ()) == whole
    stops = [(text[5:7], text[3:5], "") for text in whole]
    cut = [
        text[: min(text.index(one) for one in of[:2])]
        for text, of in zip(whole, stops, strict=True)
    ]
    asked = [GenerationRequest(prompt, 8, of) for prompt, of in zip(prompts, stops, strict=True)]
    assert generate_until(scorer, asked, written, ()) == cut
    end = plainly[2][4]
    ended = [text.partition(written((), [end]))[0] for text in whole]
    asked = [GenerationRequest(prompt, 8) for prompt in prompts]
    assert generate_until(scorer, asked, written, [V - 1, end]) == ended


def test_a_long_prompt_loses_its_beginning(of_dense):
    model, params = of_dense
    prompt = tuple(request(0, 90, 0)[0])
    scorer = LanguageScorer(model, params, 64)
    (text,) = generate_until(scorer, [GenerationRequest(prompt, 8)], written, ())
    assert text == written((), greedy(model, params, prompt[-56:], 8))
    with pytest.raises(ValueError, match="max_gen_toks is 64: expected fewer than the context"):
        generate_until(scorer, [GenerationRequest(prompt, 64)], written, ())


def test_a_model_that_continues_no_text_is_refused():
    model = encoder.TransformerMaskedLM(V, d_model=8, d_ff=8, n_heads=1, n_layers=1, mode="eval")
    with pytest.raises(ValueError, match="TransformerMaskedLM continues no text"):
        LanguageScorer(model, {}, 8)

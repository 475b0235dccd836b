"""Beam search against one in plain Python over full forward passes; batches; lines; scores."""

import functools
import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import generation
from reformax.generation import beam, scores, translation
from reformax.models import Reformer, Transformer
from reformax.ops import dense, local, lsh
from tests.layers import plain

RNG = jax.random.fold_in(jax.random.PRNGKey(0), 0)  # that of hash_seed=0
EXTRA = 5
SMALL = dict(
    input_vocab_size=11,
    d_model=8,
    d_ff=12,
    n_encoder_layers=1,
    n_decoder_layers=2,
    n_heads=2,
    mode="eval",
)
STRICT = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, strictly_causal=True)
MOVED = type("dense", (dense.dense,), {"decoding": "rows"})()
# With seeds of weights whose texts end here and there.
MODELS = {
    "transformer": (Transformer, dict(post_norm=True, n_decoder_layers=1), 3),
    "reformer": (Reformer, dict(pos_type="rotary"), 1),
    "moved caches": (Reformer, dict(pos_type="rotary", decoder_attention_type=MOVED), 1),
    "local and LSH": (
        Reformer,
        dict(decoder_attention_type=(local.local(chunk_len=4), STRICT)),
        3,
    ),
}


@functools.cache
def make(name):
    """A model, and weights that make it depend on its input."""
    constructor, options, seed = MODELS[name]
    model = constructor(**SMALL | options)
    params = plain.init(model, (2, 12), seed=seed)
    strong = jax.tree.map(lambda w: 3 * w, params)
    return model, strong | {"embedding": params["embedding"]}


@functools.cache
def end_of(name):
    """A token that ends half of a model's texts."""
    endless = [greedy(name, source, end=-1)[0] for source in sources()]
    late = [{t for t in tokens if tokens.index(t) > 1} for tokens in endless]
    return max(range(3, 11), key=lambda t: -abs(sum(t in x for x in late) - 4))


def sources(lengths=(3, 7, 1, 12, 5, 9, 2, 4), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 11, n).tolist() for n in lengths]


def translated(name, some, **options):
    options |= dict(max_extra=EXTRA, end=end_of(name))
    return generation.translate(*make(name), some, **options)


@functools.cache
def forward(name):
    model, params = make(name)
    # Token 0 is a token like others among those that are read.
    return jax.jit(lambda *x: jax.nn.log_softmax(model.apply(params, *x, rng=RNG)))


def next_log_p(name, source, tokens):
    """log p of every next token, by a forward pass over the whole beginning."""
    pad = np.zeros((1, 16 + EXTRA), np.int32)
    source_row, target = pad[:, :16].copy(), pad.copy()
    source_row[0, : len(source)] = source
    target[0, : len(tokens)] = tokens
    target[0, len(tokens)] = 3  # the token looked for, which its own prediction does not read
    segment_ids = (np.arange(target.shape[1]) <= len(tokens)).astype(np.int32)[None]
    log_p = forward(name)(source_row, target, (source_row > 0).astype(np.int32), segment_ids)
    return np.asarray(log_p, np.float64)[0, len(tokens)]


def penalty(n, alpha):
    return ((5 + n) / 6) ** alpha


def greedy(name, source, end):
    tokens, log_p = [], 0.0
    while len(tokens) < len(source) + EXTRA and tokens[-1:] != [end]:
        p = next_log_p(name, source, tokens)
        tokens, log_p = [*tokens, int(p.argmax())], log_p + p.max()
    return tokens, log_p


def searched(log_p_after, limit, end, n_beams, alpha):
    """The search as `beam` describes it, up to the limit, without stopping early."""
    beams, found, path = [([], 0.0)], [], []
    for n in range(1, limit + 1):
        candidates = []
        for tokens, log_p in beams:
            p = log_p_after(tokens)
            candidates += [([*tokens, v], log_p + p[v]) for v in range(len(p))]
            if path is not None and tokens == path:
                follow = [*path, int(p.argmax())]
        # That of greedy decoding goes before all.
        candidates.sort(key=lambda c: (path is None or c[0] != follow, -c[1]))
        candidates = candidates[: 2 * n_beams]
        path = None if path is None or follow[-1] == end else follow
        found += [(lp / penalty(n, alpha), lp, t) for t, lp in candidates if t[-1] == end]
        beams = [c for c in candidates if c[0][-1] != end][:n_beams]
    found += [(lp / penalty(limit, alpha), lp, t) for t, lp in beams]
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_beam_of_one_is_greedy_decoding_by_whole_forwards(name):
    """At every step the token of the cached steps is the argmax of the forward pass."""
    some, end = sources(), end_of(name)
    found = translated(name, some, beam_size=1)
    for source, got in zip(some, found, strict=True):
        tokens, log_p = greedy(name, source, end)
        assert got.tokens == tokens
        assert got.log_p == pytest.approx(log_p, abs=1e-4)
        assert got.score == pytest.approx(log_p / penalty(len(tokens), 0.6), abs=1e-4)
    ended = [got.tokens[-1] == end for got in found]
    assert any(ended) and not all(ended), "both ways to end are there"


@pytest.mark.parametrize(
    "name, alpha",
    [
        ("reformer", 0.6),
        ("reformer", 0.0),
        ("reformer", 2.0),
        pytest.param("moved caches", 0.6, marks=pytest.mark.slow),
    ],
)
def test_the_search_is_the_one_written_out(name, alpha):
    some = sources((3, 6, 9))
    found = translated(name, some, beam_size=3, length_penalty=alpha)
    for source, got in zip(some, found, strict=True):
        after, limit = functools.partial(next_log_p, name, source), len(source) + EXTRA
        score, log_p, tokens = searched(after, limit, end_of(name), 3, alpha)
        assert got.tokens == tokens
        assert (got.score, got.log_p) == pytest.approx((score, log_p), abs=1e-4)


class Chain:
    """A model of which each row has logits of its own, by the last token alone."""

    def prefill(self, params, tables, source, capacity, rng):
        return tables[:, 0], (), ()

    def beams(self, decoding, beam_size, capacity):
        return decoding

    def select(self, decoding, parents):
        return decoding

    def step(self, tables, last, decoding, memory):
        row = jnp.arange(len(last)) // (len(last) // len(tables))
        return tables[row, last], decoding


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_search_is_the_one_written_out_where_any_token_may_end(alpha):
    n_rows, n_tokens, limit, end = 300, 6, 6, 1
    tables = 2 * np.random.default_rng(0).normal(size=(n_rows, n_tokens, n_tokens))
    log_p = np.asarray(jax.nn.log_softmax(tables))
    limits, options = np.full(n_rows, limit), dict(beam_size=3, capacity=limit)
    arrays = log_p, np.ones((n_rows, 1), int), limits, np.float32(alpha), end, RNG
    found = beam.compiled_search(Chain(), None, None, *arrays, **options)
    for i, table in enumerate(log_p.astype(np.float64)):
        score, *_ = searched(lambda x, t=table: t[x[-1] if x else 0], limit, end, 3, alpha)
        tokens = [0, *found.tokens[i, : found.lengths[i]].tolist()]  # equals may differ in order
        total = sum(table[last, token] for last, token in pairwise(tokens))
        want = score, total / penalty(len(tokens) - 1, alpha)
        assert (found.scores[i], found.scores[i]) == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "local and LSH"])
def test_no_search_scores_below_greedy_decoding(name):
    some = sources(tuple(range(1, 15)) * 4, seed=3)
    one, four = (translated(name, some, beam_size=n) for n in (1, 4))
    gain = [b.score - a.score for a, b in zip(one, four, strict=True)]
    assert min(gain) > -1e-5 and max(gain) > 0.1
    # The scores are the model's, of these tokens.
    for source, got in list(zip(some, four, strict=True))[5:8]:
        total = sum(
            next_log_p(name, source, got.tokens[:t])[token] for t, token in enumerate(got.tokens)
        )
        assert got.log_p == pytest.approx(total, abs=1e-4)


@pytest.mark.slow
def test_a_sentence_does_not_depend_on_its_batch():
    """Bit for bit in another order; up to rounding in batches of other sizes."""
    some = sources(tuple(range(1, 25)), seed=4)
    run = functools.partial(translated, "reformer")
    whole = run(some, batch_tokens=128)
    order = np.random.default_rng(0).permutation(len(some))
    shuffled = run([some[i] for i in order], batch_tokens=128)
    assert [whole[i] for i in order] == shuffled
    for one, other in zip(whole[::3], run(some[::3], batch_tokens=32), strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=1e-5)


def test_weights_may_be_prepared_once():
    model, params = make("transformer")
    some, ready = sources((3, 7), seed=5), generation.prepare(model, params)
    want = generation.translate(model, params, some, max_extra=EXTRA)
    for _ in range(2):
        assert generation.translate(model, ready, some, max_extra=EXTRA) == want
    with pytest.raises(ValueError, match="mesh is given and the weights are prepared already"):
        generation.translate(model, ready, some, mesh=jax.make_mesh((1,), ("data",)))


class Letters:
    """A vocabulary of the letters a to h."""

    def encode(self, line):
        if not set(line) <= set("abcdefgh"):
            raise ValueError(f"{line!r} has other letters")
        return [ord(c) - ord("a") + 3 for c in line] + [1]

    def decode(self, tokens):
        return "".join("\n" if t == 2 else chr(t - 3 + ord("a")) for t in tokens if t >= 2)


def test_lines():
    model, params = make("transformer")
    run = functools.partial(generation.translate_lines, model, params, Letters(), max_extra=EXTRA)
    one, blank, other, spaces = run(["abc", "", "h", " "])
    assert blank == spaces == translation.Line("", 0, 0.0, 0.0)
    want, _ = generation.translate(model, params, [[3, 4, 5, 1], [10, 1]], max_extra=EXTRA)
    assert one.text == " ".join(Letters().decode(want.tokens).splitlines())
    assert one.n_tokens == len(want.tokens)
    assert (one.log_p, one.score) == pytest.approx((want.log_p, want.score), abs=1e-5)
    assert "\n" not in one.text + other.text and other.n_tokens > 0
    assert run([]) == []
    with pytest.raises(ValueError, match="^line 2: 'xyz' has other letters"):
        run(["a", "xyz"])


def test_batches_hold_every_source_once():
    lengths = np.random.default_rng(0).integers(1, 200, 300).tolist()
    seen = []
    shapes = {}
    for rows, n_rows, length in translation._batches(lengths, 1024):
        assert 0 < len(rows) <= n_rows and max(lengths[i] for i in rows) <= length
        assert n_rows * length <= 1.25 * 1024
        assert shapes.setdefault(length, n_rows) == n_rows
        seen += rows
    assert sorted(seen) == list(range(300))
    ((rows, n_rows, length),) = translation._batches([5000], 1024)
    assert (rows, n_rows, length) == ([0], 1, 8192)


def test_scores():
    references = ["Ein Hund läuft über die Wiese .", "Zwei Männer stehen vor dem Haus ."]
    got = scores.score([references[0].lower(), references[1]], references)
    assert got["bleu_uncased"] == pytest.approx(100)
    assert 20 < got["bleu"] < 90 and got["exact"] == 0.5
    assert "case:mixed" in got["bleu_signature"] and "case:lc" in got["bleu_uncased_signature"]
    assert "tok:13a" in got["bleu_signature"] and "version:" in got["bleu_signature"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beam_size=0), "beam_size is 0: expected at least 1"),
        (dict(length_penalty=-1.0), "length_penalty is -1.0: expected a number of at least 0"),
        (dict(length_penalty=math.nan), "length_penalty is nan"),
        (dict(max_extra=0), "max_extra is 0"),
        (dict(batch_tokens=0), "batch_tokens is 0"),
        (dict(sources=[[3], []]), r"sources\[1\] is \[\]: expected one or more tokens"),
        (dict(end=99), "end is 99: expected a token below 11"),
        (dict(end=1.5), "end is 1.5: expected a whole number"),
        (dict(hash_seed="a"), "hash_seed is 'a': expected a whole number of 64 bits"),
        (dict(sources=[[3.7]]), r"sources\[0\] has shape \(1,\) and dtype float64: expected a seq"),
        (dict(sources=[[True]]), r"sources\[0\] has shape \(1,\) and dtype bool: expected a seq"),
        (dict(sources=[[[3], [4]]]), r"sources\[0\] has shape \(2, 1\) and dtype int64: expected"),
        (dict(sources=["ab"]), r"sources\[0\] has shape \(\) and dtype <U2: expected a sequence"),
        (dict(sources=[np.array([2**32 + 3])]), r"sources\[0\] is \[4294967299\]: expected one"),
        (dict(sources=[[11]]), r"sources\[0\] is \[11\]: .* vocabulary, 11"),
    ],
)
def test_a_mistake_is_told(options, message):
    model, params = make("transformer")
    with pytest.raises(ValueError, match=message):
        generation.translate(model, params, **dict(sources=[[3]]) | options)

"""Designs: each choice is the equation of its paper, in both stacks, in decoding, by gin."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.cli import config, parsed
from reformax.declared import SettingError
from reformax.models import ReformerLM, Transformer, TransformerLM, TransformerMaskedLM, designs
from reformax.ops import dense, dsa, flash, gated_delta, local, lsh, moba, shared_qk
from tests.helpers import assert_trees_close
from tests.layers import plain

RNG = jax.random.PRNGKey(4)
LENGTH = 13
SMALL = dict(
    vocab_size=16,
    d_model=8,
    d_ff=20,
    d_attention_key=8,
    d_attention_value=4,
    n_layers=2,
    n_heads=4,
    dropout=0.0,
)
YARN = dict(rotary_scaling="yarn", rotary_factor=4.0, rotary_trained_length=40, rotary_base=100.0)
CHOICES = {
    "rms": dict(norm="rms"),
    "no biases": dict(ff_bias=False, logits_bias=False),
    "swiglu": dict(ff_gated=True, ff_activation="silu"),
    "swiglu without biases": dict(ff_gated=True, ff_activation="silu", ff_bias=False),
    "relu squared": dict(ff_activation="relu_squared"),
    "qk_norm": dict(qk_norm=True, norm_epsilon=1e-3),
    "headwise": dict(attention_gate="headwise"),
    "elementwise": dict(attention_gate="elementwise", attention_bias=True),
    "key_conv": dict(key_conv=3),
    "key_conv, normed": dict(key_conv=3, qk_norm=True),
    "scaled": dict(scale_by_length=0.4),
    "scaled, learnt": dict(scale_by_length=0.4, learn_scale_by_length=True),
    "soft cap": dict(soft_cap=0.3),
    "capped logits": dict(logits_soft_cap=0.5),
    "base": dict(rotary_base=50.0),
    "partial": dict(rotary_fraction=0.5),
    "ntk": dict(rotary_scaling="ntk", rotary_factor=4.0),
    "yarn": YARN,
    "partial yarn": YARN | dict(rotary_fraction=0.75),
    "linear": dict(rotary_scaling="linear", rotary_factor=4.0),
    "llama3": YARN | dict(rotary_scaling="llama3"),
    "turns": YARN | dict(rotary_slow_turns=0.5, rotary_fast_turns=3.0),
    "longrope": dict(
        rotary_scaling="longrope",
        rotary_factor=4.0,
        rotary_trained_length=6,
        rotary_short_factors=(1.0, 1.1, 1.3, 1.6),
        rotary_long_factors=(1.5, 2.0, 3.0, 4.0),
    ),
    "rms plus one": dict(norm="rms_plus_one", qk_norm=True),
    "norms of outputs": dict(norm="rms", norm_place="output", qk_norm="joint"),
    "norms of both": dict(norm_place="both", embedding_scale=3.0),
    "scale": dict(attention_scale=0.9),
    "bias of inputs": dict(attention_bias=True, attention_output_bias=False),
    "bias of outputs": dict(attention_output_bias=True),
}
DESIGNS = {name: designs.Design(**choice) for name, choice in CHOICES.items()} | {
    "gpt2": designs.gpt2(),
    "llama": designs.llama(),
    "qwen3": designs.qwen3(attention_gate="headwise"),
}
each_design = pytest.mark.parametrize("name", DESIGNS)


def some_tokens(length=LENGTH):
    return np.random.default_rng(0).integers(0, 16, (2, length), np.int32)


# The reference: a decoder of dense attention in float64 NumPy, written from the papers.


def normed(x, params, design):
    if design.norm != "layer":
        scale = params["scale"] + (design.norm == "rms_plus_one")
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + design.norm_epsilon) * scale
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + design.norm_epsilon)
    return x * params["scale"] + params["bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def activated(x, name):
    if name == "relu_squared":
        return np.where(x > 0, x, 0) ** 2
    if name == "silu":
        return x * sigmoid(x)
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def frequencies(design, n_rotated, n_positions):
    """Of each pair: Su et al. 2021, and the published code of Peng et al. 2023."""
    base, s = design.rotary_base, design.rotary_factor
    slow, fast = design.rotary_slow_turns or 1, design.rotary_fast_turns or 32
    if design.rotary_scaling == "ntk":
        base = base * s ** (n_rotated / (n_rotated - 2))
    theta = base ** (-np.arange(0, n_rotated, 2) / n_rotated)
    length = design.rotary_trained_length
    if design.rotary_scaling == "linear":
        return theta / s, 1.0
    if design.rotary_scaling == "longrope":
        is_long = n_positions > length
        factors = design.rotary_long_factors if is_long else design.rotary_short_factors
        return theta / factors, math.sqrt(1 + math.log(s) / math.log(length))
    if design.rotary_scaling == "llama3":  # the published code of Llama 3.1, pair by pair
        wavelengths = [2 * math.pi / x for x in theta]
        smooth = [(length / w - 1) / (4 - 1) for w in wavelengths]
        between = [(1 - x) * f / s + x * f for x, f in zip(smooth, theta, strict=True)]
        kept = [w < length / 4 for w in wavelengths]
        divided = [w > length for w in wavelengths]
        return np.where(kept, theta, np.where(divided, theta / s, between)), 1.0
    if design.rotary_scaling != "yarn":
        return theta, 1.0

    def dimension(turns):
        return n_rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), n_rotated - 1)
    ramp = np.clip((np.arange(n_rotated // 2) - low) / max(high - low, 0.001), 0, 1)
    return theta / s * ramp + theta * (1 - ramp), 0.1 * math.log(s) + 1


def rotated(x, design):
    n_rotated = int(design.rotary_fraction * x.shape[-1])
    theta, magnitude = frequencies(design, n_rotated, x.shape[1])
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * theta)[None, :, None]
    half = n_rotated // 2
    z = (x[..., :half] + 1j * x[..., half:n_rotated]) * turn * magnitude
    return np.concatenate([z.real, z.imag, x[..., n_rotated:]], -1)


def attention(x, p, design):
    heads = {}
    for name in ("q", "k", "v", "attention_gate"):
        if f"w_{name}" in p:
            heads[name] = np.einsum("btd,ndh->btnh", x, p[f"w_{name}"]) + p.get(f"b_{name}", 0)
    q, k = heads["q"], heads["k"]
    if design.key_conv:
        delayed = [np.pad(k, ((0, 0), (j, 0), (0, 0), (0, 0)))[:, : k.shape[1]] for j in range(3)]
        total = sum(x * p["key_conv"][..., j] for j, x in enumerate(delayed))
        k = k + total * sigmoid(total)
    if design.qk_norm:
        axes = (-2, -1) if design.qk_norm == "joint" else -1
        plus = design.norm == "rms_plus_one"
        q, k = (
            y
            / np.sqrt((y**2).mean(axes, keepdims=True) + design.norm_epsilon)
            * (p[f"{which}_norm"] + plus)
            for which, y in (("q", q), ("k", k))
        )
    q, k = rotated(q, design), rotated(k, design)
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(y, group, axis=2) for y in (k, heads["v"]))
    factor = design.attention_scale or 1 / math.sqrt(q.shape[-1])
    logits = np.einsum("btnh,bsnh->bnts", q, k) * factor
    if design.scale_by_length is not None:
        n_keys = np.maximum(np.arange(x.shape[1]) + 1, 2)
        learnt = design.learn_scale_by_length
        factor = p["op"]["length_factor"] if learnt else np.array([design.scale_by_length])
        logits = logits * (factor[:, None] * np.log(n_keys))[:, :, None]
    if design.soft_cap is not None:
        logits = design.soft_cap * np.tanh(logits / design.soft_cap)
    logits = np.where(np.tri(x.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnv->btnv", weights, v)
    if design.attention_gate:
        out = out * sigmoid(heads["attention_gate"])
    return np.einsum("btnv,nvd->btd", out, p["w_o"]) + p.get("b_o", 0)


def feed_forward(x, p, design):
    hidden = activated(x @ p["w1"] + p.get("b1", 0), design.ff_activation)
    if design.ff_gated:
        hidden = hidden * (x @ p["w3"] + p.get("b3", 0))
    return hidden @ p["w2"] + p.get("b2", 0)


def reference(params, tokens, design):
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = params["embedding"][np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]]
    x = x * (design.embedding_scale or 1)
    period, places = len(params["stack"]), design.norm_place
    for i in range(2):
        repeat, block = divmod(i, period)
        p = jax.tree.map(lambda w, i=repeat: w[i], params["stack"][f"block_{block}"])
        for name, sublayer in (("attention", attention), ("feed_forward", feed_forward)):
            place, h = places if isinstance(places, str) else places[block], x
            h = h if place == "output" else normed(h, p[f"{name}_norm"], design)
            h = sublayer(h, p[name], design)
            x = x + (h if place == "input" else normed(h, p[name]["output_norm"], design))
    x = normed(x, params["norm"], design)
    logits = x @ params["logits"]["w"] + params["logits"].get("b", 0)
    cap = design.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


@each_design
def test_a_transformer_is_that_of_the_papers(name):
    design = DESIGNS[name]
    model = TransformerLM(**SMALL, n_kv_heads=2, design=design)
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    want = reference(params, tokens, design)
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens, RNG), want, atol=2e-4)


@pytest.mark.parametrize("places", [("input", "output"), ["output", "both"]])
def test_layers_differ_in_the_places_of_norms(places):
    """As in OLMo Hybrid, whose recurrences norm their input and whose attention its output."""
    design = designs.Design(norm="rms", norm_place=places)
    cycle = (flash.flash(), dense.dense())
    model = TransformerLM(**SMALL, n_kv_heads=2, design=design, attention_type=cycle, mode="eval")
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    want = reference(params, tokens, design)
    np.testing.assert_allclose(jax.jit(model.apply)(params, tokens, RNG), want, atol=2e-4)
    prefill = jax.jit(model.prefill, static_argnums=3)
    logits, state = prefill(params, tokens[:, :5], np.array([5, 5]), LENGTH, RNG)
    decoding, step = model.for_decoding(params), jax.jit(model.step)
    for i in range(5, LENGTH):
        np.testing.assert_allclose(logits, want[:, i], atol=2e-4)
        logits, state = step(decoding, tokens[:, i], state)


def test_layers_differ_in_angles_and_a_recurrence_in_heads():
    """Local layers have their own base, the third none, and a recurrence more and smaller heads."""
    design = designs.Design(
        rotary_base=50.0,
        rotary_scaling="linear",
        rotary_factor=2.0,
        rotary_local_base=7.0,
        rotary_layers=(True, True, False),
        attention_gate="headwise",
        recurrent_heads=6,
        recurrent_qk_heads=3,
        recurrent_d_key=5,
        recurrent_d_value=7,
    )
    cycle = dense.dense(), local.local(chunk_len=4), gated_delta.gated_delta(gated=True)
    model = TransformerLM(
        **SMALL | dict(n_layers=3), n_kv_heads=2, attention_type=cycle, design=design, mode="eval"
    )
    far, near, last = (block.attention for block in model._layers.blocks)
    assert (far.rotary.base, far.rotary.factor, near.rotary.base) == (50.0, 2.0, 7.0)
    assert near.rotary.scaling is None and (near.use_rotary, last.use_rotary) == (True, False)
    assert (far.gate, last.gate) == ("headwise", None)
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    weights = jax.tree.map(lambda w: w.shape[1:], params["stack"]["block_2"]["attention"])
    assert (weights["w_q"], weights["w_v"], weights["w_o"]) == ((3, 8, 5), (6, 8, 7), (6, 7, 8))
    want = np.asarray(jax.jit(model.apply)(params, tokens, RNG))
    prefill = jax.jit(model.prefill, static_argnums=3)
    logits, state = prefill(params, tokens[:, :5], np.array([5, 5]), LENGTH, RNG)
    decoding, step = jax.jit(model.for_decoding)(params), jax.jit(model.step)
    for i in range(5, 8):
        np.testing.assert_allclose(logits, want[:, i], atol=2e-4)
        logits, state = step(decoding, tokens[:, i], state)


@each_design
def test_every_choice_changes_the_model(name):
    """The reference of the default design gives other logits, or has other weights."""
    design = DESIGNS[name]
    params = plain.init(TransformerLM(**SMALL, n_kv_heads=2, design=design), (2, LENGTH))
    usual = plain.init(TransformerLM(**SMALL, n_kv_heads=2), (2, LENGTH))
    if jax.tree.structure(params) == jax.tree.structure(usual):
        one, other = (reference(params, some_tokens(), x) for x in (design, designs.Design()))
        assert np.abs(one - other).max() > 1e-3


CYCLES = {
    "two streams": (ReformerLM, dict(attention_type=(local.local(chunk_len=4), dense.dense()))),
    "slots": (
        ReformerLM,
        dict(
            attention_type=(
                local.local(chunk_len=4),
                lsh.lsh(chunk_len=4, n_hashes=2, strictly_causal=True, attend_self_if_alone=False),
            ),
            n_slots=3,
            next_value=True,
        ),
    ),
    "transformer": (TransformerLM, dict(attention_type=shared_qk.shared_qk())),
    "groups": (TransformerLM, dict(n_kv_heads=2)),
    "moba": (TransformerLM, dict(attention_type=moba.moba(block_size=3, top_k=2))),
    "dsa": (ReformerLM, dict(attention_type=dsa.dsa(top_k=4, d_index=4, n_index_heads=2))),
}
STACKED = [
    ("qwen3", "two streams"),
    ("qwen3", "slots"),
    ("qwen3", "transformer"),
    ("scaled, learnt", "slots"),
    ("scaled, learnt", "groups"),
    ("elementwise", "two streams"),
    ("elementwise", "groups"),
    ("swiglu", "groups"),
    ("partial yarn", "slots"),
    ("rms", "groups"),
    ("capped logits", "groups"),
    ("key_conv", "slots"),
    ("key_conv, normed", "moba"),
    ("key_conv, normed", "dsa"),
    ("rms plus one", "groups"),
    ("norms of outputs", "groups"),
    ("norms of outputs", "slots"),
    ("norms of both", "two streams"),
    ("norms of both", "groups"),
    ("scale", "transformer"),
    ("bias of outputs", "groups"),
    ("llama3", "two streams"),
]


@pytest.mark.parametrize("name, stack", STACKED)
def test_steps_of_decoding_are_rows_of_the_whole(name, stack):
    constructor, options = CYCLES[stack]
    model = constructor(**SMALL | options, design=DESIGNS[name], mode="eval")
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    want = np.asarray(jax.jit(model.apply)(params, tokens, RNG))
    n = 5
    lengths = np.array([n, n - 2])
    weights = jax.jit(model.for_decoding)(params)
    prefill = functools.partial(model.prefill, capacity=LENGTH)
    logits, state = jax.jit(prefill)(params, tokens[:, :n], lengths, rng=RNG)
    step = jax.jit(model.step)
    for i in range(4):
        rows = want[np.arange(2), lengths + i]
        np.testing.assert_allclose(logits, rows, atol=2e-4)
        logits, state = step(weights, tokens[np.arange(2), lengths + i], state)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("remat_policy", ["nothing", "attention"])
def test_a_reversible_stack_has_the_gradient_of_autodiff(remat_policy, exact):
    """With a gate and a gated feed-forward layer in chunks; exact ones rebuild every bit."""
    design = designs.qwen3(attention_gate="elementwise", scale_by_length=0.3, key_conv=3)
    constructor, options = CYCLES["slots"]
    options = SMALL | options | dict(design=design, ff_chunk_size=5, exact=exact)
    tokens = some_tokens()

    def gradient(remat_policy):
        model = constructor(**options, remat_policy=remat_policy)
        params = plain.init(model, (2, LENGTH))
        loss = lambda params: jnp.sum(jnp.sin(model.apply(params, tokens, RNG)))  # noqa: E731
        return jax.jit(jax.grad(loss))(params), model, params

    (got, model, params), (want, *_) = gradient(remat_policy), gradient("all")
    assert_trees_close(got, want, 1e-4)
    names = ("w_attention_gate", "q_norm", "key_conv")
    assert all(np.any(got["stack"]["block_1"]["attention"][name]) for name in names)
    if exact:
        stack = model._layers
        x = jax.device_put(np.random.default_rng(1).normal(size=(2, LENGTH, 8)).astype(jnp.float32))
        before, after = jax.jit(lambda p, x: stack.rebuild(p, x, rng=RNG))(params["stack"], x)
        assert_trees_close(after, before, 0)


@pytest.mark.parametrize("op", [moba.moba(block_size=3, top_k=2), dsa.dsa(top_k=3)])
def test_an_algorithm_chooses_by_convolved_keys(op):
    model = TransformerLM(**SMALL, attention_type=op, design=DESIGNS["key_conv"])
    (block,) = model._layers.blocks
    layer, rng = block.attention, np.random.default_rng(0)
    x = rng.normal(size=(1, 36, 8)).astype(np.float32)
    params = plain.init(layer, x.shape)

    @jax.jit
    def chosen(weights):
        changed = params | {"key_conv": weights}
        return layer.plan(changed, layer.project(changed, x)[0])

    weights = jax.device_put(rng.normal(size=params["key_conv"].shape).astype(jnp.float32))
    assert np.any(np.asarray(chosen(weights)) != np.asarray(chosen(0 * weights)))


@pytest.mark.parametrize("name", ["qwen3", "scaled, learnt", "elementwise", "key_conv", "longrope"])
def test_packed_rows_compute_what_single_ones_do(name):
    model = TransformerLM(**SMALL, n_kv_heads=2, design=DESIGNS[name])
    params, tokens = plain.init(model, (2, LENGTH)), some_tokens()
    segment_ids = np.repeat([1, 2], [5, LENGTH - 5])[None].repeat(2, 0)
    apply = jax.jit(model.apply)
    packed = apply(params, tokens, RNG, segment_ids)
    for part in (slice(0, 5), slice(5, None)):
        alone = apply(params, tokens[:, part], RNG)
        np.testing.assert_allclose(packed[:, part], alone, atol=2e-5)


def test_padding_makes_no_row_a_long_one():
    """By "longrope" the positions of a text go by its own length, in a padded row too."""
    options = SMALL | dict(design=DESIGNS["longrope"], mode="eval")
    model, decoder = TransformerMaskedLM(**options, pos_type="rotary"), TransformerLM(**options)
    params, of_decoder = (plain.init(x, (2, LENGTH)) for x in (model, decoder))
    tokens, rng = np.maximum(some_tokens(5), 1), jax.random.PRNGKey(0)
    padded, mask = np.pad(tokens, ((0, 0), (0, 8))), np.arange(LENGTH)[None] < np.full((2, 1), 5)
    for apply in (
        lambda tokens, mask: model.features(params, tokens),
        lambda tokens, mask: decoder.encode(of_decoder, tokens, mask.astype(np.int32), rng),
    ):
        got, want = jax.jit(apply)(padded, mask), jax.jit(apply)(tokens, mask[:, :5])
        np.testing.assert_allclose(got[:, :5], want, atol=2e-5)


def test_products_of_every_matrix_are_fp8_in_training():
    """The gate's and the third one of a gated feed-forward layer too."""
    design = designs.qwen3(attention_gate="headwise")
    options = SMALL | dict(n_layers=1, design=design)
    narrow, wide = (TransformerLM(**options, dtype=x) for x in ("float8", "bfloat16"))
    params, tokens = plain.init(wide, (2, LENGTH)), some_tokens()
    forward = str(jax.make_jaxpr(lambda p: narrow.apply(p, tokens, RNG))(params))
    rounded = set(re.findall(r"(\w+):f8_e4m3fn\[([\d,]+)\]", forward))
    matrices = {shape for _, shape in rounded if shape.count(",") == 1}
    by_rows = {"8,32", "8,16", "8,4", "16,8", "8,20", "20,8"}
    assert matrices == by_rows | {",".join(reversed(x.split(","))) for x in by_rows}
    got, want = (jax.jit(m.apply)(params, tokens, RNG) for m in (narrow, wide))
    assert 0 < np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)


def test_an_encoder_decoder_has_the_design_in_all_its_attentions():
    design = designs.qwen3(attention_gate="headwise", logits_soft_cap=2.0)
    sizes = {n: x for n, x in SMALL.items() if n not in ("vocab_size", "n_layers")}
    model = Transformer(
        16, **sizes, n_encoder_layers=1, n_decoder_layers=1, design=design, mode="eval",
        pos_type="rotary",
    )  # fmt: skip
    source, target = some_tokens(7) + 1, some_tokens(6) % 15 + 1
    params = plain.init(model, source.shape, target.shape)
    block = params["decoder"]["stack"]["block_0"]
    assert {"q_norm", "k_norm", "w_attention_gate"} <= block["cross_attention"].keys()
    assert block["feed_forward"].keys() == {"w1", "w2", "w3"}
    want = np.asarray(jax.jit(model.apply)(params, source, target, rng=RNG))
    assert np.abs(want).max() < 2.0
    weights = jax.jit(model.for_decoding)(params)
    prefill, step = jax.jit(model.prefill, static_argnums=3), jax.jit(model.step)
    logits, state, memory = prefill(params, weights, source, 6, RNG)
    for i in range(5):
        np.testing.assert_allclose(logits, want[:, i], atol=2e-4)
        logits, state = step(weights, target[:, i], state, memory)


def test_a_masked_model_without_bias_has_no_weights_for_one():
    design = designs.llama(rotary_base=10_000.0)
    model = TransformerMaskedLM(**SMALL, design=design)
    params = plain.init(model, (2, LENGTH))
    assert params["logits"] == {} and params["head_norm"].keys() == {"scale"}
    assert jax.jit(model.apply)(params, some_tokens(), RNG).shape == (2, LENGTH, 16)


def test_the_default_design_has_the_weights_of_old_checkpoints():
    params = plain.init(TransformerLM(**SMALL), (2, LENGTH))
    block = jax.tree.map(lambda w: w.shape[1:], params["stack"]["block_0"])
    assert params.keys() == {"embedding", "stack", "norm", "logits"}
    assert params["logits"].keys() == {"w", "b"} and params["norm"].keys() == {"scale", "bias"}
    assert block["attention"].keys() == {"w_q", "w_k", "w_v", "w_o", "op"}
    assert block["feed_forward"] == {"w1": (8, 20), "b1": (20,), "w2": (20, 8), "b2": (8,)}


@pytest.mark.parametrize("preset", ["gpt2", "llama", "qwen3"])
def test_a_preset_is_two_lines_of_gin_and_a_choice_a_third(preset, tmp_path):
    path = tmp_path / "run.gin"
    path.write_text(
        "from __gin__ import dynamic_registration\nfrom reformax.models import lm\n"
        f"from reformax.models import designs\nlm.TransformerLM.design = @designs.{preset}()\n"
        f"designs.{preset}.attention_gate = 'headwise'\n"
    )
    config.parse([str(path)])
    found = parsed.configured(TransformerLM)(**SMALL).design
    assert found == getattr(designs, preset)(attention_gate="headwise")


def test_a_models_own_argument_is_another_value_of_its_design():
    model = TransformerLM(**SMALL, design=designs.llama(), norm_epsilon=0.5, attention_bias=True)
    want = designs.llama(norm_epsilon=0.5, attention_bias=True)
    assert model.design == want and dataclasses.replace(model).design == want


WINDOWS = local.local(chunk_len=4)


@pytest.mark.parametrize(
    "choice, options, message",
    [
        (dict(norm="batch"), {}, "norm is 'batch'"),
        (dict(ff_activation="tan"), {}, "ff_activation is 'tan': expected one of relu"),
        (dict(learn_scale_by_length=True), {}, "scale_by_length None: set it"),
        (dict(rotary_factor=2.0), {}, "rotary_scaling is None and rotary_factor 2.0"),
        (dict(rotary_scaling="ntk"), {}, "rotary_scaling is 'ntk' and rotary_factor 1.0"),
        (dict(rotary_scaling="yarn", rotary_factor=2.0), {}, "trained_length None: expected a len"),
        (
            dict(rotary_scaling="longrope", rotary_factor=2.0, rotary_trained_length=8),
            {},
            "rotary_long_factors have 0 and 0 numbers: expected as many of each with 'longrope'",
        ),
        (dict(rotary_long_factors=(1.0,)), {}, "have 0 and 1 numbers: expected as many of each"),
        (dict(rotary_slow_turns=2.0), {}, "rotary_slow_turns 2.0 and rotary_fast_turns None: they"),
        (
            YARN | dict(rotary_slow_turns=40.0),
            {},
            "rotary_slow_turns is 40.0 and rotary_fast",
        ),
        (
            dict(rotary_layers=(False,)),
            dict(pos_type="sinusoidal"),
            r"rotary_layers is \(False,\) and pos_type is 'sinusoidal', by which no layer has",
        ),
        (
            dict(rotary_local_base=5.0),
            dict(pos_type="none", attention_type=WINDOWS),
            "rotary_local_base is 5.0 and pos_type is 'none', by which no layer has",
        ),
        (dict(rotary_layers=(True, False)), {}, "rotary_layers has 2 values and attention_type 1"),
        (
            dict(rotary_local_base=5.0),
            {},
            "rotary_local_base is 5.0 and no op of attention_type",
        ),
        (
            dict(recurrent_heads=5),
            {},
            "recurrent_heads is 5 and no op of attention_type is",
        ),
        (dict(norm_place="both"), dict(post_norm=True), "post_norm is True and norm_place 'both'"),
        (
            dict(norm_place=["both", "input"]),
            {},
            "norm_place is .'both', 'input'. and the cycle has 1 layers: give one place for each",
        ),
        (dict(norm_place=["both", "in"]), {}, "norm_place is .'both', 'in'.: expected 'input'"),
        (
            dict(attention_gate="headwise"),
            dict(attention_type=gated_delta.gated_delta(gated=True)),
            "attention_gate is 'headwise' and no op of attention_type lacks a gate of its own",
        ),
        (
            dict(attention_scale=0.5),
            dict(attention_type=flash.flash(scale=2.0)),
            "design's attention_scale is 0.5 and the scale of flash",
        ),
        (dict(rotary_base=5.0), dict(pos_type="sinusoidal"), "set pos_type='rotary'"),
        (dict(rotary_fraction=0.1), {}, "rotary_fraction is 0.1 and heads have 8 features"),
        (dict(rotary_base=5.0), dict(pos_axial_shape=(3, 5)), "for the positions of a line"),
        (
            dict(scale_by_length=0.1),
            dict(attention_type=WINDOWS),
            "scale_by_length is 0.1 and no op of attention_type makes",
        ),
        (dict(key_conv=3), dict(attention_type=WINDOWS), "key_conv is 3 and no op of attention_ty"),
        (dict(soft_cap=5.0), dict(attention_type=gated_delta.gated_delta()), "no op of attention"),
        (dict(qk_norm=True), dict(attention_type=gated_delta.gated_delta()), "qk_norm is True and"),
        (
            dict(soft_cap=5.0),
            dict(attention_type=dense.dense(soft_cap=4.0)),
            r"design's soft_cap is 5.0 and that of dense\(soft_cap=4.0\) 4.0: set one",
        ),
    ],
)
def test_a_choice_that_nothing_reads_is_refused_in_one_line(choice, options, message):
    with pytest.raises(SettingError, match=message) as error:
        TransformerLM(**SMALL | options, design=designs.Design(**choice))
    assert "\n" not in str(error.value)


def test_a_choice_that_one_side_reads_is_not_refused():
    sides = dict(encoder_attention_type=local.local(chunk_len=4, n_chunks_after=1))
    sizes = {name: SMALL[name] for name in ("d_model", "d_ff", "n_heads")}
    model = Transformer(17, **sizes, **sides, design=designs.Design(scale_by_length=0.2))
    assert model.decoder_attention_type == dense.dense()
    sides |= dict(decoder_attention_type=WINDOWS, cross_attention_type=dense.dense())
    Transformer(17, **sizes, **sides, design=designs.Design(scale_by_length=0.2))

"""An op in models that others wrote, by the recipes of docs/own_jax_model.md and own_flax_model.md.

Each model computes with an exact op what it computes with its library's own attention: outputs, and
gradients of its weights. With hashing it trains too. What needs Levanter or MaxText is skipped
where these are not installed; they need Python 3.12, and other versions of what CI has.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs/own_jax_model.md"
VOCAB, LENGTH = 11, 40
TOKENS = jax.random.randint(jax.random.key(3), (2, LENGTH), 0, VOCAB)


def recipe(heading: str) -> str:
    """The Python of a section of the page."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"{heading}\n")]
    (block,) = blocks(text)
    return block.text


def run(code: str) -> dict:
    """The names that a recipe defines."""
    names = {"__name__": "recipe"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def next_token_loss(logits):
    """Nats of each token after the first."""
    log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, TOKENS[:, 1:, None], -1))


def assert_trees_close(got, want, atol=2e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) > 3
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-3)


def assert_all_train(gradients):
    """Every array of weights has a gradient."""
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def _linen(**attention):
    """The loss of a small language model of linen, as a function of weights, and its weights."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, 16)(tokens)
            y = nn.MultiHeadDotProductAttention(2, use_bias=False, **attention)
            x += y(nn.LayerNorm()(x), mask=None if attention else nn.make_causal_mask(tokens))
            return nn.Dense(VOCAB)(x)

    params = Model().init(jax.random.key(0), TOKENS)
    return lambda params: next_token_loss(Model().apply(params, TOKENS)), params


def _nnx(**attention):
    """The same in nnx."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.norm = nnx.Embed(VOCAB, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
            options = dict(decode=False, use_bias=False, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, **options, **attention)
            self.head = nnx.Linear(16, VOCAB, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            options = dict(is_causal=True) if attention else dict(mask=nnx.make_causal_mask(tokens))
            return self.head(x + self.attention(self.norm(x), **options))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    return lambda params: next_token_loss(nnx.merge(graph, params, rest)(TOKENS)), params


@pytest.mark.parametrize("model", [_linen, _nnx])
def test_a_model_of_flax_trains_with_an_op(model):
    own_flax = pytest.importorskip("reformax.flax")
    their_loss, params = model()
    want = jax.jit(jax.value_and_grad(their_loss))(params)
    for name, exact in (("flash", True), ("lsh", False)):
        loss, _ = model(attention_fn=own_flax.attention_fn(name, causal=True))
        got = jax.jit(jax.value_and_grad(loss))(params)
        if exact:
            assert_trees_close(got, want)
        else:
            assert_all_train(got[1])


def test_the_recipe_for_equinox_computes_what_equinox_s_module_does():
    eqx = pytest.importorskip("equinox")
    ours = run(recipe("equinox").replace('implementation="lsh"', 'implementation="flash"'))
    attention = ours["Attention"](32, 4, key=jax.random.key(0))
    theirs = eqx.nn.MultiheadAttention(
        4, 32, **dict.fromkeys(("use_query_bias", "use_key_bias"), True), use_value_bias=True,
        use_output_bias=True, key=jax.random.key(1),
    )  # fmt: skip
    names = {"q": "query_proj", "k": "key_proj", "v": "value_proj", "o": "output_proj"}

    def copied(attention):
        return eqx.tree_at(
            lambda module: [getattr(module, name) for name in names.values()],
            theirs,
            [attention.projections[name] for name in names],
        )

    x, mask = ours["x"][0], jnp.tril(jnp.ones((300, 300), bool))

    def differentiated(function, attention):
        return eqx.filter_jit(eqx.filter_value_and_grad(function))(attention)

    want = differentiated(lambda a: jnp.sum(copied(a)(x, x, x, mask) ** 2), attention)
    got = differentiated(lambda a: jnp.sum(a(x) ** 2), attention)
    assert_trees_close(got, want, atol=1e-3)
    hashed = run(recipe("equinox"))["Attention"](32, 4, key=jax.random.key(0))
    assert_all_train(differentiated(lambda a: jnp.sum(a(x) ** 2), hashed)[1].projections)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_the_recipe_for_levanter_in_its_llama(sliding_window, monkeypatch):
    """Grouped keys and rotary positions are Levanter's own."""
    module = pytest.importorskip("levanter.layers.attention")
    import equinox as eqx
    import haliax
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    sizes = dict(hidden_dim=32, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
    config = LlamaConfig(max_seq_len=LENGTH, **sizes)
    model = LlamaLMHeadModel.init(haliax.Axis("vocab", VOCAB), config, key=jax.random.key(0))
    tokens = haliax.named(TOKENS, ("batch", "position"))
    mask = module.AttentionMask.causal(sliding_window=sliding_window)

    @eqx.filter_value_and_grad
    def value_and_grad(model):
        return next_token_loss(model(tokens, attn_mask=mask).array)

    want = value_and_grad(model)
    monkeypatch.setattr(module, "dot_product_attention", module.dot_product_attention)  # restored
    calls = []
    attend = run(recipe("Levanter"))["attend"]
    assert module.dot_product_attention is attend
    monkeypatch.setattr(
        module, "dot_product_attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    assert_trees_close(value_and_grad(model), want, atol=1e-4)
    assert calls
    packed = mask.with_segment_ids(haliax.named(jnp.ones((2, LENGTH), int), ("batch", "position")))
    with pytest.raises(NotImplementedError, match=r"\['segment_ids'\]: this attention does not"):
        model(tokens, attn_mask=packed)
    if sliding_window is None:
        run(recipe("Levanter").replace('implementation="flash"', 'implementation="lsh"'))
        assert_all_train(value_and_grad(model)[1])


@pytest.fixture
def maxtext_attention():
    """Builds MaxText's operator of attention with some settings of its config."""
    maxtext = pytest.importorskip("maxtext")
    from maxtext.configs import pyconfig
    from maxtext.layers.attention_op import AttentionOp

    base = Path(maxtext.__file__).parent / "configs/base.yml"
    options = "run_name=x", "enable_checkpointing=false", "skip_jax_distributed_system=true"
    config = pyconfig.initialize(["", str(base), *options, "hardware=cpu", "attention=dot_product"])
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    heads = dict(max_target_length=LENGTH, num_query_heads=4, num_kv_heads=2)
    with jax.set_mesh(mesh):
        yield lambda **more: AttentionOp(config, mesh, "dot_product", **heads, **more)


def test_the_recipe_for_maxtext_in_its_attention(maxtext_attention, monkeypatch):
    from maxtext.layers.attention_op import AttentionOp

    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(k, (2, LENGTH, n, 8)) for k, n in zip(keys, (4, 2, 2), strict=True)]
    packed = jnp.ones((2, LENGTH), int).at[:, 25:].set(2)

    def value_and_grad(attention):
        def loss(qkv):
            q, k, v = qkv
            return jnp.sum(attention(q * 8**-0.5, k, v, packed, None, "train") ** 2)

        return jax.value_and_grad(loss)(qkv)

    attention = maxtext_attention()
    want = value_and_grad(attention)
    monkeypatch.setattr(AttentionOp, "apply_attention", AttentionOp.apply_attention)  # restored
    names = run(recipe("MaxText"))
    assert AttentionOp.apply_attention is names["apply_attention"]
    assert_trees_close(value_and_grad(attention), want, atol=1e-4)
    einsums = dict.fromkeys(("qk_product_einsum", "wv_product_einsum"))
    with pytest.raises(NotImplementedError, match="'prefill', 'GLOBAL'.*: only causal training"):
        attention.apply_attention(*qkv, packed, None, None, "prefill", **einsums)
    with pytest.raises(NotImplementedError, match="only causal training"):
        value_and_grad(maxtext_attention(attn_logits_soft_cap=30.0))
    run(recipe("MaxText").replace('"flash"', '"lsh"'))
    assert_all_train(value_and_grad(attention)[1])

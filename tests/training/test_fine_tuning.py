"""Fine-tuning against plain descent on what is trained, and through a run."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import evaluate
import train
from reformax.convert import __main__ as convert
from reformax.convert import check, hugging_face, run_folder
from reformax.convert.spec import Op, Spec
from reformax.declared import SettingError
from reformax.models import designs, lm
from reformax.ops import dense, dsa, local
from reformax.training import loop, optimizer, stages
from reformax.training.checkpoint import Checkpoints
from reformax.training.fine_tuning import FineTuning, Lora
from reformax.training.step import TrainState
from tests.layers import plain
from tests.training import worker
from tests.training.tiny import TinyLM, counting

SIZES = dict(d_model=12, d_ff=20, n_heads=3, d_attention_key=4, d_attention_value=5, n_layers=2)
RATE = 0.05


@pytest.fixture(scope="module")
def model():
    return lm.TransformerLM(
        16, attention_type=local.local(chunk_len=4), mode="eval", attention_bias=True, **SIZES
    )


@pytest.fixture(scope="module")
def params(model):
    return plain.init(model, (1, 8))


TOKENS = np.random.default_rng(0).integers(0, 16, (3, 2, 8)).astype(np.int32)


def loss_of(model):
    def loss(params, tokens):
        logits = jax.nn.log_softmax(model.apply(params, tokens))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    return loss


def descended(model, params, transformation, n=3):
    """The weights after some steps, and the last state."""

    @jax.jit
    def descend(params, state, tokens):
        gradient = jax.grad(loss_of(model))(params, tokens)
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transformation.init)(params)
    for tokens in TOKENS[:n]:
        params, state = descend(params, state, tokens)
    return params, state


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def plainly(model, trained, merged, rule):
    """The weights after descent on `trained` alone, of which `merged` makes the model's."""
    state = jax.jit(rule.init)(trained)

    @jax.jit
    def descend(trained, state, tokens):
        gradient = jax.grad(lambda x: loss_of(model)(merged(x), tokens))(trained)
        updates, state = rule.update(gradient, state)
        return optax.apply_updates(trained, updates), state

    for tokens in TOKENS:
        trained, state = descend(trained, state, tokens)
    return flat(jax.jit(merged)(trained))


# How a change of each kind of weight is made of its factors, as sums over letters.
PRODUCTS = {
    "w_q": "ldr,lrnh->lndh",
    "w_k": "ldr,lrnh->lndh",
    "w_v": "ldr,lrnh->lndh",
    "w_o": "lnvr,lrd->lnvd",
    "w1": "ldr,lrf->ldf",
    "w2": "lfr,lrd->lfd",
}


def test_low_rank_changes_are_those_of_descent_on_their_factors(model, params):
    """The reference differentiates `w + alpha / rank * down @ up` itself."""
    chosen = FineTuning(lora=Lora(rank=2, alpha=6.0))
    found, state = descended(model, params, chosen.of(optimizer.adam(RATE)))
    begin = jax.jit(chosen.of(optimizer.adam(RATE)).init)
    first = begin(params).inner_states["trained"].inner_state.factors
    named = {name: x for name, x in flat(params).items() if name.rpartition(".")[2] in PRODUCTS}
    assert first.keys() == named.keys()

    def shaped(name, x):  # the reference's factors have the weight's own axes
        size = named[name].shape
        if name.endswith("w_o"):
            return {"down": x["down"].reshape(*size[:3], -1), "up": x["up"]}
        if "attention" in name:
            return {"down": x["down"], "up": x["up"].reshape(size[0], -1, size[1], size[3])}
        return x

    factors = {name: shaped(name, x) for name, x in first.items()}

    def merged(factors):
        def one(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if name not in factors:
                return x
            product = PRODUCTS[name.rpartition(".")[2]]
            return x + 3.0 * jnp.einsum(product, factors[name]["down"], factors[name]["up"])

        return jax.tree_util.tree_map_with_path(one, params)

    expected = plainly(model, factors, merged, optax.adam(RATE, b2=0.98, eps=1e-9))
    for name, x in flat(found).items():
        np.testing.assert_allclose(x, expected[name], atol=2e-5, err_msg=name)
        assert (name in named) != np.array_equal(x, flat(params)[name]), name


def test_only_what_is_named_is_trained(model, params):
    chosen = FineTuning(only=(r"block_0\.attention\.w_q", "^embedding$"))
    found, _ = descended(model, params, chosen.of(optax.adam(RATE)))
    named = ("stack.block_0.attention.w_q", "embedding")
    some = {name: flat(params)[name] for name in named}

    def merged(some):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: some.get(jax.tree_util.keystr(path, simple=True, separator="."), x),
            params,
        )

    expected = plainly(model, some, merged, optax.adam(RATE))
    for name, x in flat(found).items():
        np.testing.assert_allclose(x, expected[name], atol=2e-5, err_msg=name)
        if name not in named:
            np.testing.assert_array_equal(x, flat(params)[name])


def test_the_optimizer_has_a_state_for_what_is_trained_alone(model, params):
    def size(tree):
        return sum(x.size for x in jax.tree.leaves(tree) if x.ndim)

    def state_of(chosen):
        return jax.eval_shape(chosen.of(optimizer.adamw()).init, params)

    chosen = FineTuning(only=("norm",))
    n_norms = sum(x.size for name, x in flat(params).items() if "norm" in name)
    assert size(state_of(chosen)) == 2 * n_norms
    both = FineTuning(only=("norm",), lora=Lora(rank=2))
    n_matrices = 0
    for name, x in flat(params).items():
        if name.rpartition(".")[2] in PRODUCTS:
            size_in = 12 if name[-1] in "qkv1" else 20 if name.endswith("w2") else 15
            n_matrices += 2 * 2 * (size_in + x.size // 2 // size_in)
    assert size(state_of(both)) == 3 * n_matrices + 2 * n_norms


def test_weight_decay_and_clipping_are_of_what_is_trained(params):
    """A clip by the norm of all gradients would be smaller."""
    chosen = FineTuning(only=(r"feed_forward\.b2",))
    transformation = chosen.of(optimizer.adamw(1.0, eps=1e3, clip=1e-3, weight_decay=0.5))
    gradients = jax.tree.map(np.ones_like, params)
    begin = jax.jit(transformation.init)(params)
    updates, _ = jax.jit(transformation.update)(gradients, begin, params)
    for name, x in flat(updates).items():
        norm = np.linalg.norm(x)
        if name.endswith("feed_forward.b2"):
            np.testing.assert_allclose(norm, 1e-3 / 1e3, rtol=1e-3)
        else:
            assert norm == 0


def test_the_norm_of_gradients_is_of_what_is_trained(params):
    chosen = FineTuning(only=("w_q",), lora=Lora(matrices="w_o"))
    read = chosen.of(optimizer.adamw()).reads(params)
    assert set(flat(read)) == {"stack.block_0.attention.w_q", "stack.block_0.attention.w_o"}


def test_weights_that_both_name_are_trained_whole(params):
    chosen = FineTuning(only=(r"block_0\.attention\.w_q",), lora=Lora(rank=2, matrices="w_[qk]"))
    transformation = chosen.of(optax.sgd(1.0))
    state = jax.jit(transformation.init)(params)
    factors = state.inner_states["trained"].inner_state.factors
    assert {name.rpartition(".")[2] for name in factors} == {"w_k"}
    gradients = jax.tree.map(np.ones_like, params)
    updates, _ = jax.jit(transformation.update)(gradients, state, params)
    assert (flat(updates)["stack.block_0.attention.w_q"] == -1).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: FineTuning(), "neither only nor lora"),
        (lambda: Lora(rank=0), "rank is 0: expected"),
        (lambda: FineTuning(only=("(",)), "only"),
        (lambda: of(FineTuning(only=("w_z",))), "FineTuning.only has 'w_z', which no weight's"),
        (lambda: of(FineTuning(lora=Lora(matrices="b_q"))), "Lora.matrices is 'b_q', which no ma"),
        (
            lambda: of(FineTuning(only=("w_q",), lora=Lora(matrices="w_q")), "w_q"),
            "Lora.matrices is 'w_q', which no matrix's name has besides those of FineTuning.only",
        ),
        (
            lambda: of(FineTuning(lora=Lora()), "w_q", optimizer.muon()),
            "which no trained parameter's name has: expected that of matrices, or another optim",
        ),
    ],
)
def test_wrong_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def of(chosen, name="b_q", transformation=None):
    params = {"stack": {"block_0": {"attention": {name: np.ones((2, 3, 4, 5), np.float32)}}}}
    chosen.of(transformation or optimizer.adam()).init(params)


def trained(folder, steps, chosen, **options):
    options = dict(batch_size=8, length=8, eval_tokens=None, progress=False) | options
    return loop.train(
        str(folder),
        model=TinyLM,
        task=counting(),
        optimizer=optimizer.adamw(0.02),
        steps=steps,
        fine_tuning=chosen,
        **options,
    )


def test_a_run_begins_with_weights_and_goes_on_with_those_it_tuned(tmp_path):
    """A checkpoint holds the model's own weights, in which the changes are."""
    full = trained(tmp_path / "full", 10, None)
    chosen = FineTuning(only=("bias",), lora=Lora(rank=2, matrices="head|kernel"))
    begin = dict(init_from=str(tmp_path / "full"))
    trained(tmp_path / "tuned", 20, chosen, max_minutes=1e-9, **begin)
    tuned = trained(tmp_path / "tuned", 20, chosen, **begin)
    assert tuned["bits_per_dim"] < full["bits_per_dim"]
    before, after = worker.params(tmp_path / "full"), worker.params(tmp_path / "tuned")
    np.testing.assert_array_equal(before["embedding"], after["embedding"])
    assert np.linalg.matrix_rank(after["head"] - before["head"], tol=1e-4) == 2
    with pytest.raises(ValueError, match="another model|optimizer|damaged"):
        trained(tmp_path / "tuned", 30, FineTuning(lora=Lora(rank=3, matrices="head")))


def test_a_run_that_tunes_drawn_weights_notes_it(tmp_path, capsys):
    trained(tmp_path, 1, FineTuning(only=("bias",)))
    note = "note: fine_tuning is set and init_from is not: all other weights stay as drawn\n"
    assert note in capsys.readouterr().err


@pytest.mark.slow
def test_a_converted_model_is_tuned_scored_and_given_back(tmp_path, monkeypatch, call):
    """By lora.gin behind its config, as the commands have it; nothing asks to be trusted."""
    monkeypatch.chdir(tmp_path)
    gpt2 = dict(attention_bias=True, tie_embeddings=True, ff_activation="gelu_tanh")
    gpt2 |= dict(pos_type="axial", pos_axial_shape=(64,), pos_d_axial_embs=(16,), ff_dropout=0.0)
    sizes = dict(vocab_size=256, d_model=16, d_ff=16, n_heads=2, n_layers=2, init_std=0.02)
    sizes |= dict(d_attention_key=8, d_attention_value=8)
    spec = Spec.make("TransformerLM", [Op("dense", {})], **sizes, **gpt2)
    params = plain.init(spec.build(), (1, 8))
    generation = {"eos_token_id": [7, 9]}
    like = hugging_face.config_of(spec) | {"eos_token_id": 7}
    details = {"format": "hugging_face", "config": like, "generation": generation}
    run_folder.write("base", spec, params, details, "a test")
    (tmp_path / "text.txt").write_text("a text of some words, " * 300)
    flags = ["--config_file=base/config.gin", "--config_file=lora.gin", "--init_from=base"]
    flags += ["--data_dir=text.txt", "--output_dir=tuned", "--config=steps=3", "--quiet"]
    flags += ["--config=warmup_steps=1", "--config=fine_tuning.Lora.rank=2"]

    def called(main, *flags):
        code, _, err = call(lambda: main(flags))
        assert code == 0, err

    called(train.main, *flags)
    called(evaluate.main, "--output_dir=tuned", "--data_dir=text.txt", "--quiet")
    called(convert.main, "--from=tuned", "--to=for_hugging_face")
    read = hugging_face.read("for_hugging_face")
    assert read.generation == generation and read.config["eos_token_id"] == 7
    after = read.params
    for name, x in flat(after).items():
        before = flat(params)[name]
        if name.rpartition(".")[2] in PRODUCTS:
            change = np.asarray(x - before)[0]
            if change.ndim == 3:  # [N, D, H], or [N, V, D] of outputs
                order = (0, 1, 2) if name.endswith("w_o") else (1, 0, 2)
                change = change.transpose(order).reshape(16, 16)
            assert np.linalg.matrix_rank(change, tol=1e-6) == 2, name
        else:
            np.testing.assert_array_equal(x, before)


@pytest.mark.slow
def test_an_imported_decoder_learns_answers_and_is_given_back(tmp_path, monkeypatch, call):
    """The page's commands: a folder comes in, learns prompts with answers, is scored, goes out."""
    monkeypatch.chdir(tmp_path)
    sizes = dict(vocab_size=256, d_model=16, d_ff=32, n_heads=2, n_kv_heads=1, n_layers=2)
    sizes |= dict(d_attention_key=8, d_attention_value=8, dropout=0.0, ff_dropout=0.0)
    spec = Spec.make("TransformerLM", [Op("flash", {})], **sizes, design=designs.llama())
    params = plain.init(spec.build(), (1, 8))
    hugging_face.write(tmp_path / "llama", spec, params)
    rows = [{"prompt": f"{i} red or blue?", "completion": "blue, red"} for i in range(60)]
    lines = (json.dumps(row) + "\n" for row in rows)
    (tmp_path / "chats.jsonl").write_text("".join(lines))

    def called(main, *flags):
        code, out, err = call(lambda: main(flags))
        assert code == 0, err
        return out

    called(convert.main, "--from=llama", "--to=base")
    flags = [f"--config_file={x}" for x in ("base/config.gin", "chats.gin", "lora.gin")]
    flags += ["--init_from=base", "--config=loop.train.fine_tuning=None"]
    flags += ["--data_dir=chats.jsonl", "--output_dir=tuned", "--quiet", "--config=steps=60"]
    flags += ["--config=loop.train.length=64", "--config=loop.train.batch_size=8"]
    called(train.main, *flags, "--config=learning_rate=0.03")
    called(evaluate.main, "--output_dir=tuned", "--split=test", "--quiet")
    scored = json.loads((tmp_path / "tuned/evaluation_test.json").read_text())
    assert scored["bits_per_dim"] < 2.0 and scored["n_targets"] == 60
    out = called(convert.main, "--from=tuned", "--to=back")
    assert ("from transformers" in out) == check.has_transformers(), out
    read = hugging_face.read("back")
    assert read.config["model_type"] == "llama"
    tuned = run_folder.read("tuned").params
    jax.tree.map(np.testing.assert_array_equal, read.params, tuned)


@pytest.mark.slow
def test_a_dense_model_begins_one_whose_indexer_learns_first(tmp_path):
    """Its weights are taken, the indexer's are drawn, and in the first stage it learns alone."""
    sizes = SIZES | dict(attention_type=(local.local(chunk_len=4), dense.dense()))
    other = lm.TransformerLM(16, **sizes).init_params(jax.random.key(3), (1, 8))
    source = Checkpoints(tmp_path / "dense")
    source.save(0, TrainState(np.int32(0), other, (), None))
    source.wait()

    def built(top_k):
        cycle = local.local(chunk_len=4), dsa.dsa(top_k=top_k, d_index=4, report_loss=True)
        return partial(lm.TransformerLM, 16, **SIZES | dict(attention_type=cycle))

    arguments = worker.arguments(steps=6, eval_every=3, length=8, keep=2, checkpoint_minutes=None)
    arguments |= dict(model=built(3), init_from=tmp_path / "dense", task=counting())
    only = FineTuning(only=(r"attention\.op\.",))
    arguments["stages"] = (stages.Stage(until=3, model=built(1000), fine_tuning=only),)
    with pytest.raises(ValueError, match="fresh_ops=True begins the own weights of attentions"):
        loop.train(tmp_path / "refused", **arguments)
    loop.train(tmp_path / "a", **arguments, fresh_ops=True)

    like, found = jax.eval_shape(lambda: built(3)().init_params(jax.random.key(0), (1, 8))), []
    for step in (3, 6):
        found.append(flat(Checkpoints(tmp_path / "a").restore_params(step, like)[0]))
    for name, x in flat(other).items():
        np.testing.assert_array_equal(found[0][name], x)
        assert np.any(found[1][name] != x), name
    of_op = set(found[0]) - set(flat(other))
    own = {"index_loss.value", "key", "query", "weight"}
    assert {name.rpartition(".op.")[2] for name in of_op} == own
    lines = [x for x in worker.record(tmp_path / "a") if x["split"] == "train"]
    assert lines and all(x["index_loss"] > 0 for x in lines)


def test_low_rank_changes_are_no_stages_own():
    with pytest.raises(ValueError, match="fine_tuning of a stage has lora"):
        stages.Stage(until=3, fine_tuning=FineTuning(lora=Lora()))


def test_a_run_and_its_stage_do_not_both_say_what_is_trained(tmp_path):
    arguments = worker.arguments(steps=6)
    arguments["fine_tuning"] = FineTuning(only=("norm",))
    arguments["stages"] = (stages.Stage(until=3, fine_tuning=FineTuning(only=("block",))),)
    with pytest.raises(ValueError, match=r"stages\[0\].fine_tuning and the run's fine_tuning"):
        loop.train(tmp_path / "a", **arguments)


def test_a_stage_that_trains_no_weight_is_refused(tmp_path):
    given = (
        stages.Stage(until=2),
        stages.Stage(until=4, fine_tuning=FineTuning(only=("attnetion",))),
    )
    with pytest.raises(SettingError, match=r"^stages\[1\]: fine_tuning.FineTuning.only has 'attn"):
        loop.train(tmp_path, **worker.arguments(steps=6, stages=given))

"""lm-evaluation-harness on a model of pieces, and beside its own model of the same files."""

import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from reformax.cli import lm_eval as command
from reformax.convert import hugging_face, run_folder
from reformax.convert.spec import Op, Spec
from reformax.data import pieces
from tests.layers import plain

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'reformax[evals]'")

TEXT = "the cat sat on the mat, and the dog ran after it. grün ist das Gras. " * 5
SIZE = 300
GPT2 = dict(attention_bias=True, tie_embeddings=True, ff_activation="gelu_tanh", ff_dropout=0.0)
GPT2 |= dict(pos_type="axial", pos_axial_shape=(32,), pos_d_axial_embs=(16,), norm_epsilon=1e-5)
SIZES = dict(d_model=16, d_ff=64, n_heads=2, d_attention_key=8, d_attention_value=8, n_layers=2)
SIZES |= dict(init_std=0.02)
PAIRS = [
    ("the cat sat", " on the mat"),
    ("the dog ran ", "after it"),  # the space goes to the continuation
    ("", "grün"),
    ("the cat sat on the mat, and the dog ran after it. grün ist das Gras. " * 2, " the cat"),
]


class Request:
    def __init__(self, *args):
        self.args, self.arguments = args, args


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 with a tokenizer, `hf` of Hugging Face and the run `run`."""
    folder = tmp_path_factory.mktemp("pieces")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    spec = Spec.make("TransformerLM", [Op("flash", {})], vocab_size=SIZE, **SIZES, **GPT2)
    params = plain.init(spec.build(), (1, 8))
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    serialised = tokenizer.to_str().encode()
    hugging_face.write(folder / "hf", spec, params, None, serialised)
    run_folder.write(folder / "run", spec, params, {}, "a test", serialised)
    return folder


def vocabulary(folder):
    return pieces.PieceVocabulary.of((folder / "hf/tokenizer.json").read_bytes(), SIZE)


def row_of(tokens):
    """One row as long as the context: causal, so padding behind it changes nothing."""
    return np.pad(np.array([tokens], np.int32), ((0, 0), (0, 32 - len(tokens))))


def test_a_pair_is_divided_behind_the_tokens_of_its_context(folder):
    encode = vocabulary(folder).encode
    model = command.model_class()(run=folder / "run")
    assert model._pair("the cat sat", " on") == (encode("the cat sat"), encode(" on"))
    assert model._pair("the dog ran ", "after") == (encode("the dog ran"), encode(" after"))
    # A piece over the border leaves the continuation one token at least.
    assert model._pair("the d", "og") == (encode("the dog")[:-1], encode("the dog")[-1:])
    assert model._pair("", "grün") == ([], encode("grün"))


def test_likelihoods_of_pieces_are_plain_sums(folder):
    spec, params, *_ = run_folder.read(folder / "run")
    model = command.model_class()(run=folder / "run")
    apply = jax.jit(spec.build().apply)
    for pair, (log_p, is_greedy) in zip(
        PAIRS[:3], model.loglikelihood([Request(*pair) for pair in PAIRS[:3]]), strict=True
    ):
        context, continuation = model._pair(*pair)
        tokens = [*context, *continuation]
        logits = np.asarray(apply(params, row_of(tokens)))[0, len(context) : len(tokens)]
        found = jax.nn.log_softmax(logits)[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(log_p, found.sum(), rtol=1e-4)
        assert is_greedy == (logits.argmax(axis=1) == continuation).all()


def test_a_continuation_is_the_text_behind_the_prompt(folder):
    spec, params, *_ = run_folder.read(folder / "run")
    known, apply = vocabulary(folder), jax.jit(spec.build().apply)
    model = command.model_class()(run=folder / "run")
    prompt = known.encode("the cat sat")
    tokens = list(prompt)
    for _ in range(6):
        logits = np.asarray(apply(params, row_of(tokens)))[0, len(tokens)]
        tokens.append(int(logits.argmax()))
    expected = known.decode(tokens)[len("the cat sat") :]
    end = known.end[0]
    assert end not in tokens and expected
    options = {"until": ["nowhere"], "max_gen_toks": 6}
    assert model.generate_until([Request("the cat sat", options)]) == [expected]
    stop = expected[2:4]
    options = {"until": [stop], "max_gen_toks": 6}
    (text,) = model.generate_until([Request("the cat sat", options)])
    assert text == expected[: expected.index(stop)]


@pytest.mark.peers
def test_figures_are_those_of_the_harness_s_own_model(folder):
    """HFLM of the same GPT-2, over PyTorch: pairs, and texts longer than its context."""
    transformers = pytest.importorskip("transformers")
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm_eval[hf]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "hf/tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    theirs = harness.HFLM(
        pretrained=str(folder / "hf"), tokenizer=tokenizer, device="cpu", dtype="float32"
    )
    ours = command.model_class()(run=folder / "run", add_bos_token=False)
    first = json.loads((folder / "hf/config.json").read_text())["bos_token_id"]
    assert first == theirs.prefix_token_id == 0 and theirs.max_length == 32
    pairs = [Request(*pair) for pair in PAIRS]
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-4)
        assert one[1] == other[1]
    texts = [Request(TEXT), Request("the cat")]
    found = ours.loglikelihood_rolling(texts)
    np.testing.assert_allclose(found, theirs.loglikelihood_rolling(texts), rtol=1e-4)
    asked = [Request("the cat sat", {"until": ["."], "max_gen_toks": 8, "do_sample": False})]
    with_first = command.model_class()(run=folder / "run").generate_until(asked)
    asked = [Request("<|endoftext|>the cat sat", asked[0].args[1])]
    assert with_first == theirs.generate_until(asked)

"""generate.py end to end: a byte model and a model of numbers, all sources of prompts, UTF-8."""

import inspect
import io
import re
import sys

import jax
import numpy as np
import pytest

import generate
import train
from reformax import generation
from reformax.cli import errors, saved_run
from reformax.cli.flags import SEARCH
from reformax.cli.generate import CONTINUE
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from reformax.generation import decoding, tokenizers, translation

RUN = """
from __gin__ import dynamic_registration
from reformax.data import text
from reformax.models import lm
from reformax.ops import local
from reformax.training import loop
from reformax.training import optimizer

loop.train.model = @lm.TransformerLM
loop.train.task = @text.text()
text.text.data_dir = 'corpus.txt'
loop.train.optimizer = @optimizer.adamw()
optimizer.adamw.learning_rate = 1e-2
loop.train.steps = 3
loop.train.batch_size = 8
loop.train.length = 32
lm.TransformerLM.vocab_size = 256
lm.TransformerLM.d_model = 8
lm.TransformerLM.d_ff = 16
lm.TransformerLM.d_attention_key = 4
lm.TransformerLM.d_attention_value = 4
lm.TransformerLM.n_layers = 1
lm.TransformerLM.n_heads = 2
lm.TransformerLM.dropout = 0.0
lm.TransformerLM.attention_type = @local.local()
local.local.chunk_len = 8
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `bytes` and, untrained, `numbers`, and no data."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "corpus.txt").write_text("grün ist das Gras, " * 60)
        (folder / "run.gin").write_text(RUN)
        patch.setattr(sys, "argv", ["train.py", "--config_file=run.gin", "--output_dir=bytes"])
        assert errors.exit_code(train.main) == 0
        (folder / "corpus.txt").unlink()
    write_run(folder / "numbers", 128)
    return folder


def write_run(folder, vocab_size, change=lambda params: params):
    """A run of an untrained model, whose parameters `change` changes."""
    spec = Spec.make("ReformerLM", [Op("local", dict(chunk_len=4))], **SIZES, vocab_size=vocab_size)
    shapes = jax.eval_shape(lambda: spec.build().init_params(jax.random.key(0), (1, 8)))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    run_folder.write(folder, spec, change(params), {}, "a test")


@pytest.fixture
def run(runs, monkeypatch, call):
    """`(exit code, stdout, stderr)` of generate.py with a standard input."""
    monkeypatch.chdir(runs)

    def run(*flags, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return call(generate.main, *flags)

    return run


SIZES = dict(d_model=8, d_ff=12, d_attention_key=4, d_attention_value=4, n_heads=2, n_layers=1)
FLAGS = ["--output_dir=bytes", "--max_new_tokens=24"]


@pytest.mark.slow
def test_the_text_is_that_of_the_function(run):
    code, out, err = run(*FLAGS, "--prompt=grü", "--seed=4", "--temperature=0.9", "--top_k=40")
    assert code == 0
    speed = r"24 tokens in [\d.]+ s: [\d.]+ s with compilation, then [\d,.]+ tokens/s\n"
    assert re.fullmatch(speed, err)
    # In Python: the same config, the same checkpoint.
    args = type(
        "Args", (), dict(output_dir="bytes", checkpoint="best", config=[], trust_config=False)
    )
    model, params, *_ = saved_run.restore(args)
    prompt = list("grü".encode())
    (row,) = generation.generate(
        model, params, [prompt], 24, seed=4, temperature=0.9, top_k=40, max_length=32
    )
    assert out == bytes([*prompt, *row]).decode(errors="replace") + "\n"


def test_prompts_come_from_everywhere(run, runs, monkeypatch):
    asked = []

    def stream(model, params, prompts, *_, **__):
        asked.append([bytes(prompt).decode() for prompt in prompts])
        yield np.array([[97]])

    monkeypatch.setattr("reformax.generation.decoding.stream", stream)
    (runs / "prompt.txt").write_bytes("für ".encode())
    for flags, given in [
        (["--prompt=für "], ""),
        (["--prompt_file=prompt.txt"], ""),
        (["--prompt_file=-"], "für "),
        ([], "für "),
    ]:
        assert run(*FLAGS, *flags, stdin=given.encode())[:2] == (0, "für a\n")
    for flags in ([], ["--prompt="]):
        assert run(*FLAGS, *flags)[:2] == (0, "a\n")
    assert asked == 4 * [["für "]] + 2 * [[""]]


def test_several_rows(run):
    """Of a run whose data is gone."""
    code, out, err = run(*FLAGS, "--prompt=a", "--prompt=bc", "--num_samples=2")
    assert code == 0 and err.startswith("96 tokens in ")
    assert run(*FLAGS, "--max_new_tokens=1")[2].startswith("1 token in ")
    parts = out.split("--- ")[1:]
    assert [part.splitlines()[0] for part in parts] == [f"{i} of 4" for i in (1, 2, 3, 4)]
    texts = [part.split("\n", 1)[1] for part in parts]
    assert [text[0] for text in texts] == ["a", "a", "b", "b"]
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_flags_are_heeded(run):
    def text(*more):
        code, out, err = run(*FLAGS, "--prompt=das ", *more)
        assert code == 0, err
        return out

    base = text()
    assert text("--checkpoint=3") == base
    assert text("--mesh=data=1") == base
    assert text("--temperature=0") == text("--top_k=1", "--seed=5")
    for more in ("--seed=1", "--temperature=0.1", "--top_p=0.01", "--max_new_tokens=25"):
        assert text(more) != base, more
    assert text("--config=lm.TransformerLM.dtype='bfloat16'")
    _, _, err = run(*FLAGS, "--prompt=das ", "--config=loop.train.steps=9")
    assert "note: --config='loop.train.steps=9' sets something" in err


def test_a_model_of_numbers(run):
    flags = ["--output_dir=numbers", "--max_new_tokens=5", "--prompt=0 17 99"]
    code, out, err = run(*flags, "--quiet")
    assert err == ""
    words = [int(word) for word in out.split()]
    assert code == 0 and words[:3] == [0, 17, 99] and len(words) == 8
    assert all(0 <= word < 128 for word in words)


@pytest.mark.slow
def test_a_model_of_bytes_behind_reserved_ids(runs, run):
    folder = runs / "reserved"

    def writes_z(params):
        params["logits"]["b"][ord("z") + 2] = 9.0
        return params

    write_run(folder, 258, writes_z)
    flags = [f"--output_dir={folder}", "--prompt=ü", "--max_new_tokens=3", "--temperature=0"]
    assert run(*flags)[:2] == (0, "üzzz\n")
    assert "note" not in run(*flags, "--config=text.text.offset=2")[2]


def test_utf8_is_valid_at_every_moment():
    text = tokenizers.ByteTokenizer(0).stream()
    parts = [text([byte], False) for byte in "ü€".encode()]
    parts += [text([0xFF, 0xC3], False), text([], True)]
    assert parts == ["", "ü", "", "", "€", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]


def test_an_interrupt_keeps_what_was_written(run, monkeypatch):
    def stream(*_, **__):
        yield np.array([[97]])
        yield np.array([[98]])
        raise KeyboardInterrupt

    monkeypatch.setattr("reformax.generation.decoding.stream", stream)
    code, out, err = run(*FLAGS, "--prompt=>")
    assert (code, out) == (130, ">ab\n") and err.startswith("2 tokens in")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output_dir=nowhere"], "output_dir=nowhere holds no run"),
        (["--checkpoint=9"], "no checkpoint of step 9"),
        (["--max_new_tokens=0"], "max_new_tokens is 0: expected at least 1"),
        ([f"--seed={2**63}"], "seed is 9223372036854775808: expected"),
        (["--mesh=rows=2"], "mesh is 'rows=2': expected sizes of the axes data, fsdp, context"),
        (
            ["--mesh=context=3"],
            "--mesh=context=3: 3 does not divide the number of devices, 1: leave",
        ),
        (["--mesh="], "mesh is '': expected sizes of axes, such as context=4"),
        (["--max_length=9"], "max_new_tokens is 24: with a prompt of 0 tokens that is 24, above"),
        (["--prompt_file=nothing.txt"], "No such file"),
        (["--output_dir=numbers", "--prompt=text"], "prompt is 'text': this is no model of bytes"),
        (["--output_dir=numbers", "--prompt=128"], "prompts[0] has tokens from 128 to 128"),
        (["--config=lm.TransformerLM.d_modle=4"], "did you mean d_model"),
        (["--png=a.png", "--chat"], "--chat: --png draws images, which answer nobody"),
    ],
)
def test_a_mistake_is_one_line(run, flags, message):
    code, out, err = run(*FLAGS, *flags)
    assert code in (1, 2) and out == ""
    assert err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "flag_defaults, function",
    [(SEARCH, translation.translate), (CONTINUE, decoding.stream)],
)
def test_flags_have_the_defaults_of_the_function_that_they_set(flag_defaults, function):
    parameters = inspect.signature(function).parameters
    defaults = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    shared = flag_defaults.keys() & defaults.keys()
    assert len(shared) >= 4
    assert {name: flag_defaults[name] for name in shared} == {
        name: defaults[name] for name in shared
    }

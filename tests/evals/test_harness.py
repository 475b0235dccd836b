"""lm-evaluation-harness on a run: its figures against plain computations of the same text."""

import json
import math
import sys

import jax
import numpy as np
import pytest

import evaluate
from reformax.cli import lm_eval as command
from reformax.convert import run_folder
from reformax.convert.spec import Op, Spec
from tests.layers import plain

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'reformax[evals]'")

SIZES = dict(vocab_size=256, d_model=16, d_ff=16, n_heads=2, n_layers=1, init_std=0.3)
DOCS = [
    {"question": "The sky is", "choices": [" blue", " a hat", "!"], "answer": 1, "text": "so blue"},
    {"question": "Two", "choices": [" and", " und", " et"], "answer": 0, "text": "ab " * 40},
    {"question": "", "choices": ["a", "bc", "def"], "answer": 2, "text": "grün"},
]
COMMON = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/docs.json}}
  cache_dir: {folder}/cache
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "of_choices": """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "of_targets": """output_type: loglikelihood
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
metric_list: [{metric: perplexity, aggregation: perplexity}]
""",
    "of_texts": """output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "of_continuations": """output_type: generate_until
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run `run`, documents, and a task for each kind of request."""
    folder = tmp_path_factory.mktemp("harness")
    spec = Spec.make("TransformerLM", [Op("dense", {})], **SIZES)
    params = plain.init(spec.build(), (1, 8), seed=3)
    run_folder.write(folder / "run", spec, params, {}, "a test")
    docs = [dict(doc) for doc in DOCS]
    docs[0]["text"] = continued(spec, params, DOCS[0]["question"], 8)
    (folder / "docs.json").write_text("\n".join(map(json.dumps, docs)))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        common = COMMON.format(name=name, folder=folder)
        (folder / "tasks" / f"{name}.yaml").write_text(common + text)
    (folder / "expected.json").write_text(json.dumps(expected(spec, params, docs)))
    return folder


def log_p_of(spec, params):
    """(text, number of its last bytes) -> the log-likelihood of these, one request at a time."""
    model = spec.build()
    logits_of = jax.jit(model.apply)

    def log_p(text, n):
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        row = np.pad(tokens, (0, 128 - len(tokens)))[None]
        logits = np.asarray(logits_of(params, row), np.float64)[0, : len(tokens)]
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits[np.arange(len(tokens)), tokens][len(tokens) - n :].sum()

    return log_p


def continued(spec, params, prompt, n):
    """The prompt's greedy continuation by so many bytes, up to byte 0."""
    model, tokens = spec.build(), list(prompt.encode())
    logits_of = jax.jit(model.apply)
    for _ in range(n):
        row = np.pad(np.array(tokens, np.int32), (0, 128 - len(tokens)))[None]
        tokens.append(int(np.asarray(logits_of(params, row))[0, len(tokens)].argmax()))
    new = bytes(tokens[len(prompt.encode()) :]).partition(b"\0")[0].decode(errors="replace")
    return new.partition("\n\n")[0]


def expected(spec, params, docs):
    """The figures of the tasks."""
    log_p = log_p_of(spec, params)
    of_choices = [
        [log_p(doc["question"] + one, len(one)) for one in doc["choices"]] for doc in docs
    ]
    right = [np.argmax(row) == doc["answer"] for row, doc in zip(of_choices, docs, strict=True)]
    of_targets = [row[doc["answer"]] for row, doc in zip(of_choices, docs, strict=True)]
    of_texts = []
    for doc in docs:
        text = doc["text"]
        of_texts.append(log_p(text, len(text.encode())))
    n_bytes = sum(len(doc["text"].encode()) for doc in docs)
    same = [continued(spec, params, doc["question"], 8) == doc["text"] for doc in docs]
    return {
        "of_choices": {"acc,none": np.mean(right)},
        "of_targets": {"perplexity,none": math.exp(-np.mean(of_targets))},
        "of_texts": {"bits_per_byte,none": -sum(of_texts) / n_bytes / math.log(2)},
        "of_continuations": {"exact_match,none": np.mean(same)},
    }


def check(results, folder):
    wanted = json.loads((folder / "expected.json").read_text())
    for name, figures in wanted.items():
        for figure, value in figures.items():
            np.testing.assert_allclose(results[name][figure], value, rtol=1e-4, err_msg=name)
    assert 0 < wanted["of_continuations"]["exact_match,none"] < 1


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_the_harness_finds_the_figures_of_plain_computations(here, monkeypatch, capsys):
    flags = ["--model", "reformax", "--model_args", "run=run,max_length=144"]
    flags += ["--tasks", ",".join(TASKS), "--include_path", "tasks", "--output_path", "out.json"]
    monkeypatch.setattr(sys, "argv", ["reformax lm_eval", *flags])
    assert command.main(flags) == 0
    (written,) = here.glob("out*.json")
    check(json.loads(written.read_text())["results"], here)
    assert "of_choices" in capsys.readouterr().out


def test_evaluate_finds_them_too(here, call):
    flags = ["--output_dir=run", f"--tasks={','.join(TASKS)}", "--include_path=tasks"]
    code, out, err = call(evaluate.main, *flags, "--length=144", "--quiet")
    assert code == 0, err
    kept = json.loads((here / "run" / "evaluation_tasks.json").read_text())
    check(kept["tasks"], here)
    assert f"of_choices acc: {kept['tasks']['of_choices']['acc,none']:.4f}" in out


def test_an_override_that_no_task_reads_is_noted(here, call):
    flags = ["--output_dir=run", "--tasks=needle", "--limit=1", "--length=144", "--quiet"]
    others = ["--config=loop.train.eval_length=9", "--config=loop.train.length=128"]
    code, out, err = call(evaluate.main, *flags, *others)
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("note: ")] == [
        "note: --config='loop.train.eval_length=9' sets something that this run does not use"
    ]


def test_evaluate_takes_own_tasks_and_the_text_together(here, call):
    (here / "text").mkdir(exist_ok=True)
    (here / "text" / "a.txt").write_text("a text of a few words. " * 200)
    flags = ["--output_dir=run", "--tasks=text,needle", "--limit=3", "--length=144", "--quiet"]
    code, out, err = call(evaluate.main, *flags, "--data_dir=text")
    assert code == 0, err
    assert "needle accuracy: 0.0000" in out and "bits_per_dim: " in out
    found = json.loads((here / "run" / "evaluation_tasks.json").read_text())
    assert found["tasks"]["needle"]["n_questions"] == 3 and found["length"] == 144


def test_a_context_may_be_without_the_first_token(here):
    """As in the harness's GPT-2: the first token of a context is predicted from nothing."""
    spec, params, *_ = run_folder.read("run")
    model = command.model_class()(run="run", add_bos_token=False, batch_size=2)
    request = type("Request", (), {"args": ("Two", " und")})
    ((log_p, _),) = model.loglikelihood([request])
    tokens = np.frombuffer(b"Two und", np.uint8).astype(np.int32)
    logits = spec.build().logits(params, spec.build().encode(params, tokens[None, :-1]))
    log_ps = jax.nn.log_softmax(logits)[0]
    np.testing.assert_allclose(
        log_p, sum(log_ps[i, tokens[i + 1]] for i in (2, 3, 4, 5)), rtol=1e-4
    )
    empty = type("Request", (), {"args": ("", "Two")})
    found = model.loglikelihood([empty, request])
    np.testing.assert_allclose(found[0][0], log_p_of(spec, params)("Two", 3), rtol=1e-4)
    np.testing.assert_allclose(found[1][0], log_p, rtol=1e-4)
    with pytest.raises(ValueError, match="add_bos_token is False and the task generates"):
        model.generate_until([])


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "model_args has no run: give the folder of a run, as run=DIR"),
        ({"run": "run", "pretrained": "x"}, "model_args has pretrained='x': expected run, "),
        ({"run": "run", "device": "cuda"}, "device is 'cuda': reformax computes on all devices"),
        ({"run": "run", "max_batch_size": 8}, "max_batch_size is 8: give batch_size as a number"),
        ({"run": "run", "batch_size": "auto:4"}, "batch_size is 'auto:4': expected"),
        ({"run": "run", "max_length": 0}, "max_length is 0: expected"),
        ({"run": "run", "add_bos_token": "no"}, "add_bos_token is 'no': expected True or False"),
        ({"run": "run", "trust_config": "no"}, "trust_config is 'no': expected True or False"),
        ({"run": "elsewhere"}, "output_dir=elsewhere holds no run"),
    ],
)
def test_wrong_arguments(here, options, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        command.model_class()(**options)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"num_beams": 4}, "num_beams=4: expected do_sample"),
        ({"max_gen_toks": "9"}, "max_gen_toks, which is '9': expected a whole number"),
        ({"max_gen_toks": -1}, "max_gen_toks, which is -1: expected at least 1"),
        ({"until": [1]}, r"until, which is \[1\]: expected"),
        ({"do_sample": "False"}, "do_sample, which is 'False': expected"),
    ],
)
def test_wrong_settings_of_generation(here, settings, words):
    model = command.model_class()(run="run")
    request = type("Request", (), {"args": ("Two", settings)})
    with pytest.raises(ValueError, match=f"^the task's generation_kwargs have {words}"):
        model.generate_until([request])


def test_each_end_of_a_converted_model_ends_a_continuation(here):
    spec, params, *_ = run_folder.read("run")
    settings = {"until": None, "max_gen_toks": 8, "top_k": None}
    request = type("Request", (), {"args": ("Two", settings)})
    (whole,) = command.model_class()(run="run").generate_until([request])
    one = next(character for character in whole[1:] if character.isascii())
    generation = {"eos_token_id": [255, ord(one)]}
    run_folder.write(here / "ends", spec, params, {"generation": generation}, "a test")
    assert command.model_class()(run="ends").generate_until([request]) == [whole.partition(one)[0]]


@pytest.mark.parametrize(
    "flags, words",
    [
        pytest.param(
            ["--tasks=of_choice", "--include_path=tasks"],
            "no task of_choice; did you mean of_choices",
            marks=pytest.mark.slow,  # the harness looks through its thousands
        ),
        (["--tasks="], "--tasks= has no task"),
        (["--tasks=of_texts", "--stride=3"], "--stride=3: only the task text reads it"),
        (["--include_path=tasks"], "--include_path=tasks: only --tasks reads it"),
        (["--tasks=of_texts", "--include_path=nowhere"], "--include_path=nowhere is no folder"),
    ],
)
def test_wrong_flags(here, flags, words, call):
    code, _, err = call(evaluate.main, "--output_dir=run", *flags)
    assert code == 2
    assert words in err

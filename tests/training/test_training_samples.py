"""Samples of text while a run trains: when, where they go, and what never ends a run."""

import signal
from functools import partial

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event

from reformax.data import text
from reformax.generation import tokenizers
from reformax.models import TransformerEncoder, TransformerLM
from reformax.ops import local
from reformax.training import callbacks, lock, loop, samples, wandb_log
from tests.training import tiny, worker

MODEL = partial(TransformerLM, 256, d_model=8, d_ff=8, n_heads=1, n_layers=1)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the cat sat on the mat. " * 60)
    return text.text(folder)


@pytest.fixture
def arguments(task):
    given = dict(steps=6, eval_every=2, length=16, sample_every=4, sample_tokens=5, eval_tokens=32)
    given |= dict(batch_size=jax.device_count(), sample_prompts=("the ", "é"))
    return worker.arguments(**given) | {"model": MODEL, "task": task}


def sampled(folder):
    return [line for line in worker.record(folder) if line["tag"] == "sample"]


@pytest.mark.slow
def test_samples_follow_their_evaluations_and_go_wherever_lines_go(
    arguments, tmp_path, monkeypatch, capsys
):
    """Stopped in the middle and gone on, the run has the samples of one that was not."""
    got = []

    class Logger:
        def open(self, folder, step, config):
            pass

        def write(self, step, split, values, timing):
            got.append((step, split, values))

        def close(self):
            pass

    arguments |= {"progress": True, "loggers": [Logger()]}
    loop.train(tmp_path / "whole", **arguments)
    lines = sampled(tmp_path / "whole")
    assert [line["step"] for line in lines] == [4, 6]  # of evaluations at 2, 4 and 6
    assert [(x["step"], "sample", {"texts": x["texts"]}) for x in lines] == [
        x for x in got if x[1] == "sample"
    ]
    for line in lines:
        one, two = line["texts"]
        assert one.startswith("the ") and two.startswith("é")
        assert len(one) <= len("the ") + 5
    out = capsys.readouterr().out
    assert out.count("a sample: the ") == 2 and f"step 4: a sample: {lines[0]['texts'][0]}" in out
    assert [step for step, _ in shown(tmp_path / "whole")] == [4, 6]
    assert shown(tmp_path / "whole")[0][1] == [
        "    " + x.replace("\n", "\n    ") for x in lines[0]["texts"]
    ]

    evaluate, stopped = loop.evaluate, []

    def stopping(run, state, label, last):
        evaluate(run, state, label, last)
        if state.step == 4 and not stopped:
            stopped.append(signal.raise_signal(signal.SIGTERM))

    monkeypatch.setattr(loop, "evaluate", stopping)
    for _ in range(2):
        loop.train(tmp_path / "stopped", **arguments)
    assert stopped and worker.record(tmp_path / "stopped") == worker.record(tmp_path / "whole")
    path = tmp_path / "stopped/metrics.jsonl"  # damaged: the lines of checkpoint 6 are told apart
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    loop.train(tmp_path / "stopped", **arguments)
    assert [line["step"] for line in sampled(tmp_path / "stopped")] == [4, 6]


@pytest.mark.slow
def test_prompts_alone_ask_for_a_sample_at_the_end(arguments, tmp_path):
    loop.train(tmp_path, **arguments | {"sample_every": None, "eval_every": 2})
    (line,) = sampled(tmp_path)
    assert line["step"] == 6 and line["texts"][0].startswith("the ")
    loop.train(tmp_path / "none", **arguments | {"sample_every": None, "sample_prompts": ()})
    assert not sampled(tmp_path / "none")


@pytest.mark.slow
def test_a_model_that_cannot_write_ends_without_a_sample(arguments, tmp_path, capsys):
    model = partial(MODEL, attention_type=local.local(wrap=True, chunk_len=4))
    loop.train(tmp_path, **arguments | {"sample_every": None, "model": model})
    assert not sampled(tmp_path)
    assert capsys.readouterr().err.count("note: no samples of text: ") == 1


@pytest.mark.slow
def test_samples_without_prompts_have_an_empty_one(arguments, tmp_path):
    loop.train(tmp_path, **arguments | {"steps": 4, "sample_prompts": ()})
    (line,) = sampled(tmp_path)
    assert len(line["texts"]) == 1


def shown(folder):
    """(step, texts) of TensorBoard's samples."""
    found = []
    (path,) = folder.glob("tensorboard/*")
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            if value.tag == "sample/texts":
                assert value.metadata.plugin_data.plugin_name == "text"
                found.append((event.step, [x.decode() for x in value.tensor.string_val]))
        data = data[16 + size :]
    return found


@pytest.mark.slow
def test_a_sample_that_fails_is_told_and_the_run_goes_on(arguments, tmp_path, monkeypatch, capsys):
    def fails(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(samples, "_printable", fails)
    result = loop.train(tmp_path, **arguments)
    assert result["step"] == 6 and not sampled(tmp_path)
    err = capsys.readouterr().err
    assert err.count("note: the sample of text failed, and the work goes on") == 1


def test_a_folder_lost_during_a_sample_ends_the_run(arguments, tmp_path, monkeypatch, capsys):
    printable, steps = samples._printable, []

    class Steps(callbacks.Callback):
        def on_step(self, step, metrics):
            steps.append(step)

    def disturbed(text):
        (tmp_path / ".lock").unlink(missing_ok=True)
        return printable(text)

    monkeypatch.setattr(samples, "_printable", disturbed)
    more = dict(log_every=100, checkpoint_every=None, callbacks=[Steps()])
    with pytest.raises(lock.Lost, match=r"\.lock was deleted"):
        loop.train(tmp_path, **arguments | more)
    assert steps == [1, 2, 3, 4] and "the work goes on" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_abandons_a_sample_and_the_run_is_saved(arguments, tmp_path, monkeypatch):
    blocks = samples.Samples._blocks

    def interrupted(self, params):
        signal.raise_signal(signal.SIGTERM)
        yield from blocks(self, params)

    loop.train(tmp_path / "whole", **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(samples.Samples, "check", lambda *args: None)
        patch.setattr(samples.Samples, "_blocks", interrupted)
        result = loop.train(tmp_path / "run", **arguments)
    assert (result["step"], result["interrupted_by"]) == (4, signal.SIGTERM)
    assert not sampled(tmp_path / "run")
    assert loop.train(tmp_path / "run", **arguments)["step"] == 6
    assert [x["step"] for x in sampled(tmp_path / "run")] == [6]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sample_every": 3}, "sample_every=3 must be a multiple of eval_every=2"),
        ({"eval_every": None}, "sample_every=4 must be a multiple of eval_every=None"),
        ({"sample_tokens": 0}, "sample_tokens is 0: expected"),
        ({"sample_prompts": "the"}, "sample_prompts is 'the': expected a list"),
        (
            {"model": tiny.TinyLM, "task": tiny.counting(), "sample_prompts": ("1 2",)},
            "sample_every is 4 and .*TinyLM.* has no attribute 'prefill': leave it out",
        ),
        (
            {"model": tiny.TinyLM, "task": tiny.counting()},
            "sample_every is 4 and prompt is 'the ': this is no model of bytes, give numbers",
        ),
        (
            {"task": tiny.counting().replace(masked=True), "model": TransformerEncoder},
            "sample_every is 4 and task counting is no text: leave it out",
        ),
        (
            {"model": partial(MODEL, attention_type=local.local(wrap=True, chunk_len=4))},
            "sample_every is 4 and ",
        ),
    ],
)
def test_what_cannot_be_sampled_is_told_before_the_first_step(
    changes, message, arguments, tmp_path
):
    with pytest.raises(ValueError, match=f"^{message}"):
        loop.train(tmp_path / "run", **arguments | changes)
    assert not (tmp_path / "run").exists()


def test_nothing_that_moves_a_cursor_is_in_a_sample():
    assert samples._printable("\n\x1b\ta") == "\n\ufffd\ta"


def test_tokens_and_texts_of_every_kind_of_model():
    for offset, written, tokens in (
        (0, "a é", list("a é".encode())),
        (2, "ab", [99, 100]),  # bytes behind two reserved ids
        (None, "1 2 3 ", [1, 2, 3]),
    ):
        tokenizer = tokenizers.tokenizer_of(offset=offset)
        assert tokenizer.encode(written.encode()) == tokens
        assert tokenizer.stream()(tokens, True) == written
    assert tokenizers.tokenizer_of(offset=1).stream()([0, 98, 1], True) == "a\n"


def test_weights_and_biases_gets_a_page(monkeypatch):
    logged = []

    class Wandb:
        Html = staticmethod(lambda page: ("page", page))

    logger = wandb_log.WandbLogger(Wandb, {})
    logger._run = type("Run", (), {"log": lambda self, x, step: logged.append((step, x))})()
    logger.write(4, "sample", {"texts": ["a<b", "c"]}, {})
    page = "<pre>a&lt;b</pre><hr><pre>c</pre>"
    assert logged == [(4, {"sample/texts": ("page", page)})]
    assert isinstance(logger, callbacks.Logger)

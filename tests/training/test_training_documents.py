"""Training and evaluation with a document mask: windows hide other documents."""

import jax
import numpy as np
import pytest

import evaluate as evaluate_script
import train
from reformax.data.base import WindowSettings, byte_language_model
from reformax.data.mixture import mixture
from reformax.models import ReformerLM
from reformax.ops import local, lsh
from reformax.training import by_position, dry_run, evaluation, optimizer
from tests.layers import plain

SIZES = dict(d_model=8, d_ff=8, n_heads=1, d_attention_key=8, d_attention_value=8, n_layers=2)
CYCLE = local.local(chunk_len=4, window=3), lsh.lsh(chunk_len=64)


def model_of(mode="train"):
    axial = dict(pos_type="axial", pos_axial_shape=(8, 8), pos_d_axial_embs=(4, 4))
    return ReformerLM(256, **SIZES, **axial, attention_type=CYCLE, dropout=0.0, mode=mode)


def task_of(sizes):
    text = np.random.default_rng(0).integers(97, 123, sum(sizes), np.uint8)
    borders = np.cumsum([0, *sizes[:-1]])
    splits = ("train", "valid", "test")
    both = dict.fromkeys(splits, text), 0, dict.fromkeys(splits, borders)
    task = byte_language_model("bytes", *both, windows=WindowSettings(document_mask=True))
    return task, np.split(text, borders[1:])


def test_an_evaluation_scores_documents_alone():
    """Each without segments, and all in one window, with padding and a row that fills the batch."""
    task, documents = task_of([5, 9, 5, 21])
    model = model_of("eval")
    params = plain.init(model, (2, 64))
    rng, nats = jax.random.PRNGKey(0), 0.0
    log_p_of = jax.jit(lambda tokens: jax.nn.log_softmax(model.apply(params, tokens, rng)))
    for document in documents:
        tokens = document[None].astype(np.int32)
        log_p = np.asarray(log_p_of(tokens))
        nats -= np.take_along_axis(log_p, tokens[..., None], -1).sum()
    sizes = dict(batch_size=2, length=64)
    found = evaluation.evaluate(model, params, task, **sizes)
    assert found["n_targets"] == 40
    assert found["bits_per_dim"] == pytest.approx(nats / 40 / np.log(2.0), rel=1e-5)
    (band,) = by_position.by_position(model, params, task, **sizes).documents
    assert band.n_targets == 40 and band.bits == pytest.approx(found["bits_per_dim"], rel=1e-5)


def test_no_position_in_a_document_is_told_where_a_mixture_has_windows():
    """They may begin within one, which the segments of a window do not say."""
    tasks = [task_of([5, 70, 5, 21])[0], task_of([30, 60])[0]]
    task = mixture(tasks, (1.0, 1.0))
    batches = task.eval_batches("valid", 2, 16, 16)
    for *_, positions in by_position._with_positions(batches, task, "valid", lambda index: True):
        assert (positions == -1).all()


@pytest.mark.slow
def test_a_dry_run_has_segments(no_search):
    task, _ = task_of([30, 40, 50])
    settings = dict(steps=1, batch_size=2, length=32, optimizer=optimizer.adam())
    _, line = dry_run.report(model=model_of, task=task, **settings)
    assert "to step 1, 2 x 32 tokens: MiB of a device" in line


RUN = """
from __gin__ import dynamic_registration
from reformax.data import text
from reformax.models import lm
from reformax.ops import dense
from reformax.ops import sinks
from reformax.training import loop
from reformax.training import optimizer

steps = 2
loop.train.steps = %steps
loop.train.batch_size = 4
loop.train.length = 16
loop.train.accumulate = 2
loop.train.optimizer = @optimizer.adam()
loop.train.model = @lm.TransformerLM
lm.TransformerLM.vocab_size = 256
lm.TransformerLM.d_model = 8
lm.TransformerLM.d_ff = 8
lm.TransformerLM.n_heads = 1
lm.TransformerLM.n_layers = 1
lm.TransformerLM.attention_type = @dense.dense()
loop.train.task = @text.text()
text.text.document_mask = True
"""
OFF, SINKS = (
    f"--config={name}"
    for name in ("text.text.document_mask=False", "lm.TransformerLM.attention_type=@sinks.sinks()")
)


# An evaluation and a dry run have the mask too.
@pytest.mark.slow
def test_a_run_keeps_its_mask(tmp_path, call):
    (tmp_path / "run.gin").write_text(RUN)
    (tmp_path / "data").mkdir()
    for name in "abcd":
        (tmp_path / f"data/{name}.txt").write_text(f"{name} text of its own\n" * 30)
    own = [f"--output_dir={tmp_path}/run", f"--data_dir={tmp_path}/data"]
    flags = [f"--config_file={tmp_path}/run.gin", *own]

    def run(main, *arguments):
        return call(main, *arguments)

    code, _, err = run(train.main, *flags, SINKS)
    assert (code, err.count("\n")) == (2, 1) and "op is sinks() and rows are packed" in err
    code, _, err = run(train.main, *flags)
    assert code == 0, err
    code, _, err = run(train.main, *flags, "--config=steps=3", OFF)
    assert (code, err.count("\n")) == (1, 1) and ", document_mask=True and is " in err
    code, out, _ = run(evaluate_script.main, *own, "--by_position", "--split=train")
    assert code == 0 and "it of its own document in windows of 16 (stride 16)" in out
    bits = out.partition("bits_per_dim: ")[2].split()[0]
    code, out, err = run(evaluate_script.main, *own, OFF, "--split=train", "--allow_changed_data")
    assert code == 0 and "the tokens before it in windows of 16 (stride 16)" in out
    assert out.partition("bits_per_dim: ")[2].split()[0] != bits

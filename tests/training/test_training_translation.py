"""Training on packed sentence pairs: the vocabulary stays with the run, and averages are means."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import evaluate
from reformax.data import vocabulary
from reformax.data.reverse import reverse
from reformax.data.text_pairs import text_pairs
from reformax.training import checkpoint, loop, optimizer
from reformax.training.evaluation import evaluate as score
from tests.training import tiny, worker


class TinyTranslator(tiny.TinyLM):
    """The tiny language model of the target, given the mean of its source's embeddings."""

    task_kind = "translation"

    @property
    def source_vocab_size(self):
        return self.vocab_size

    def features(self, params, inputs, rng=None):
        source, target, source_segment_ids, target_segment_ids = inputs
        embedded = params["embedding"][source]
        same = (target_segment_ids[:, :, None] == source_segment_ids[:, None, :]) * 1.0
        mean = same @ embedded / jnp.maximum(same.sum(-1, keepdims=True), 1)
        return super().features(params, target, rng) + mean


def write(folder, n=80):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, size in (("train", n), ("val", 9), ("test", 5)):
        words = [" ".join(rng.choice(list("abcdefg"), rng.integers(1, 9))) for _ in range(size)]
        (folder / f"{split}.en").write_text("\n".join(words) + "\n")
        (folder / f"{split}.de").write_text("\n".join(w.upper()[::-1] for w in words) + "\n")
    return str(folder)


def arguments(folder, **others):
    task = text_pairs(folder, vocab_size=20, model_type="char")
    model = partial(TinyTranslator, vocab_size=20, max_length=10**6)
    settings = {"task": task, "model": model, "steps": 12, "batch_size": 8, "length": 32}
    settings |= {"optimizer": optimizer.adam(1e-2), "label_smoothing": 0.1}
    return worker.arguments() | settings | others


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of the data, folder of the run, result)"""
    data = write(tmp_path_factory.mktemp("translation") / "data")
    folder = tmp_path_factory.mktemp("translation") / "run"
    return data, folder, loop.train(folder, **arguments(data, checkpoint_every=4, keep=3))


def leaves(folder, step):
    like = jax.eval_shape(TinyTranslator(vocab_size=20).init_params, jax.random.PRNGKey(0), (1, 1))
    params, _ = checkpoint.Checkpoints(folder).restore_params(step, like)
    return np.concatenate([x.ravel() for x in jax.tree.leaves(params)])


def test_a_run_learns_and_names_its_metric(run):
    _, folder, result = run
    assert result["metric"] == "bits_per_token" and "bits_per_dim" not in result
    lines = worker.record(folder)
    assert all("bits_per_dim" not in line for line in lines)
    train = [line["bits_per_token"] for line in lines if line["split"] == "train"]
    assert train[-1] < train[0]
    assert lines[-1]["bits_per_token"] == result["bits_per_token"] == result["best_bits_per_token"]
    assert (folder / "loss.png").stat().st_size > 0


def test_the_metric_is_the_mean_over_the_sentences_one_by_one(run):
    """Without smoothing, packed or not, for any length of the rows."""
    data, folder, result = run
    task = arguments(data)["task"]
    words = task.translation.vocabulary
    model = TinyTranslator(vocab_size=20, max_length=10**6, mode="eval")
    like = jax.eval_shape(model.init_params, jax.random.PRNGKey(0), (1, 1))
    params = jax.device_put(checkpoint.Checkpoints(folder).restore_params(12, like)[0])

    @jax.jit
    def log_p(*inputs):
        return jax.nn.log_softmax(model.logits(params, model.features(params, inputs)))

    nats = n = 0
    for pair in zip(*task.translation.sentences("valid"), strict=True):
        ids = [words.encode(sentence) for sentence in pair]
        rows = [np.pad(side, (0, 32 - len(side)))[None] for side in ids]
        scores = log_p(*rows, *(np.where(row > 0, 1, 0) for row in rows))[0]
        nats -= sum(float(scores[t, target]) for t, target in enumerate(ids[1]))
        n += len(ids[1])
    # Rows of one pair each: the tiny model reads the two tokens before, of any segment.
    alone = score(model, params, task, "valid", batch_size=3, length=1)
    assert alone["n_targets"] == n == task.n_targets("valid")
    assert alone["bits_per_token"] == pytest.approx(nats / np.log(2) / n, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_goes_on_reads_its_vocabulary_and_computes_the_same(run, tmp_path, monkeypatch):
    data, folder, _ = run
    loop.train(tmp_path, **arguments(data, steps=6))
    kept = (tmp_path / "vocabulary.model").read_bytes()
    monkeypatch.setattr(vocabulary.SentencePieces, "_trained", lambda self: pytest.fail("trained"))
    loop.train(tmp_path, **arguments(data))
    assert (tmp_path / "vocabulary.model").read_bytes() == kept
    np.testing.assert_array_equal(leaves(tmp_path, 12), leaves(folder, 12))


def test_a_vocabulary_that_does_not_fit_is_told(run, tmp_path, monkeypatch):
    data, _, _ = run
    with pytest.raises(ValueError, match="label_smoothing is 1: expected a rate in"):
        loop.train(tmp_path, **arguments(data, label_smoothing=1))
    with pytest.raises(ValueError, match="ids below 20 and the model vocab_size=19"):
        loop.train(tmp_path, **arguments(data, model=partial(TinyTranslator, vocab_size=19)))
    monkeypatch.setattr(TinyTranslator, "source_vocab_size", 18)
    with pytest.raises(ValueError, match="the model input_vocab_size=18: set the model's input_v"):
        loop.train(tmp_path, **arguments(data))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    loop.train(tmp_path, **arguments(data, steps=2))
    path = tmp_path / "vocabulary.model"
    lines = ["a b c d e f g A B C D E F G h i j k"] * 5 + ["x"]
    path.write_bytes(vocabulary.SentencePieces(22, lambda: lines, "char").serialised)
    with pytest.raises(ValueError, match="has 22 pieces and the config vocab_size=20"):
        loop.train(tmp_path, **arguments(data))
    path.write_bytes(vocabulary.SentencePieces(20, lambda: lines, "char").serialised)
    with pytest.raises(ValueError, match="and that of checkpoint 2 is .* copy the run's own") as e:
        loop.train(tmp_path, **arguments(data))
    assert "\n" not in str(e.value)
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "extra", lambda self, step: {"vocabulary": None})
        with pytest.raises(ValueError, match="without a vocabulary of pieces, and the config's"):
            loop.train(tmp_path, **arguments(data))
    with pytest.raises(ValueError, match="vocabulary.model is missing: the model's ids mean"):
        loop.train(tmp_path, **arguments(data))
    checkpoints = checkpoint.Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="has no vocabulary.model, and checkpoint 2 was trained"):
        checkpoints.check_vocabulary(2, checkpoints.extra(2)["vocabulary"], None)
    (tmp_path / "checkpoints/2/checkpoint.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged .* no other is whole"):
        checkpoints.extra(2)


def test_a_pair_that_the_positions_do_not_hold_fails_before_the_first_step(tmp_path):
    """Evaluation puts it in a longer row than those of training."""
    data = write(tmp_path / "data")
    for language in ("en", "de"):
        with (tmp_path / f"data/val.{language}").open("a") as file:
            file.write("a" * 50 + "\n")
    short = partial(TinyTranslator, vocab_size=20, max_length=32)
    with pytest.raises(ValueError, match="length=64 is above max_length=32"):
        loop.train(tmp_path / "run", **arguments(str(tmp_path / "data"), model=short))
    assert data and not (tmp_path / "run/checkpoints").exists()


def test_a_task_without_files_trains(tmp_path):
    settings = {"task": reverse(7, 12), "model": partial(TinyTranslator, vocab_size=12)}
    result = loop.train(tmp_path, **worker.arguments(steps=2, length=8) | settings)
    assert result["bits_per_token"] > 0 and not (tmp_path / "vocabulary.model").exists()


CONFIG = """
from __gin__ import dynamic_registration
from reformax.data import text_pairs
from reformax.training import loop
from reformax.training import optimizer
from tests.training import test_training_translation as tests

loop.train.model = @tests.TinyTranslator
tests.TinyTranslator.vocab_size = 20
loop.train.task = @text_pairs.text_pairs()
text_pairs.text_pairs.data_dir = '{data}'
text_pairs.text_pairs.vocab_size = 20
text_pairs.text_pairs.model_type = 'char'
loop.train.optimizer = @optimizer.adam()
loop.train.steps = 12
loop.train.batch_size = 8
loop.train.length = 32
"""


def test_evaluate_scores_with_the_runs_vocabulary(run, tmp_path, call):
    data, folder, _ = run
    (folder / "config.gin").write_text(CONFIG.format(data=data))
    flags = [f"--output_dir={folder}", "--split=test", f"--data_dir={data}", "--beam_size=0"]
    flags.append("--trust_config")
    code, out, err = call(evaluate.main, *flags, "--checkpoint=average:3")
    assert code == 0, err
    result = json.loads((folder / "evaluation_test.json").read_text())
    assert result["checkpoint_steps"] == [8, 10, 12] and "mean of the checkpoints" in out
    assert f"bits_per_token: {result['bits_per_token']:.4f}" in out
    (folder / "vocabulary.model").rename(tmp_path / "kept")
    code, _, err = call(evaluate.main, *flags)
    (tmp_path / "kept").rename(folder / "vocabulary.model")
    assert code == 1 and "vocabulary.model is missing" in err and err.count("\n") == 1

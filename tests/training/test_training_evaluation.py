"""Every target is scored once in any batch; the record and the prefetching thread."""

import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import progress
from reformax.cli import errors
from reformax.data.reverse import reverse
from reformax.data.text import text
from reformax.models import Transformer
from reformax.ops import linformer
from reformax.task import Batch, Task
from reformax.training import by_position, evaluation
from reformax.training import record as record_lib
from reformax.training.evaluation import check_positions, evaluate, in_budget
from reformax.training.prefetch import prefetch
from reformax.training.record_lines import RecordLines
from tests.training import tiny

MODEL = tiny.TinyLM(mode="eval")
PARAMS = jax.jit(lambda rng: MODEL.init_params(rng, (1, 1)))(jax.random.PRNGKey(1))
TASK = tiny.counting(n_valid=53)


def score(task=TASK, params=PARAMS, split="valid", batch_size=2, length=10, **options):
    return evaluate(MODEL, params, task, split, batch_size=batch_size, length=length, **options)


@jax.jit
def _log_p(tokens):
    return jax.nn.log_softmax(MODEL.logits(PARAMS, MODEL.features(PARAMS, tokens)))


def log_p_of(tokens):
    return np.asarray(_log_p(tokens))


def test_one_window_is_the_mean_over_its_targets():
    tokens = np.arange(53)[None] % 16
    log_p = log_p_of(tokens)
    bits = -np.take_along_axis(log_p, tokens[..., None], -1).mean() / np.log(2.0)
    result = score(length=53)
    assert result["bits_per_dim"] == pytest.approx(float(bits), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((log_p.argmax(-1) == tokens).mean()))
    assert (result["n_targets"], result["length"], result["stride"]) == (53, 53, 53)
    assert result["split"] == "valid"


def test_a_score_names_its_windows_and_its_standard_error():
    result = score(batch_size=1, length=10)
    assert result["n_windows"] == 6  # the last has three targets of its own
    windows = list(TASK.eval_batches("valid", 1, 10, 10))
    nats, weights = [], []
    for _, targets, weight in windows:
        of_targets = -np.take_along_axis(log_p_of(targets), targets[..., None], -1)[..., 0]
        nats.append(float((of_targets * weight).sum()))
        weights.append(float(weight.sum()))
    nats, weights = np.array(nats), np.array(weights)
    residual = nats - weights * nats.sum() / weights.sum()
    error = np.sqrt(6 / 5 * (residual**2).sum()) / weights.sum() / np.log(2)
    assert result["standard_error"] == pytest.approx(error, rel=1e-3) and error > 0
    assert score(batch_size=4)["n_windows"] == 6
    assert score(length=53)["standard_error"] is None  # of one batch


def test_an_encoder_that_refuses_packed_rows_is_checked_with_rows_as_the_task_has_them():
    encoder = linformer.linformer(n_projected=2)
    sizes = dict(d_model=4, d_ff=4, n_heads=1, n_encoder_layers=1, n_decoder_layers=1)
    model = Transformer(input_vocab_size=8, **sizes, encoder_attention_type=encoder, mode="eval")
    shapes = jax.eval_shape(
        lambda rng: model.init_params(rng, (2, 8), (2, 8)), jax.random.PRNGKey(0)
    )
    task, sizes = reverse(max_symbols=7, vocab_size=8), dict(batch_size=2, length=8, stride=8)
    assert check_positions(model, shapes, task, "valid", **sizes) == 4
    packed = np.ones((2, 8), np.int32)
    packed = Batch((packed,) * 4, packed, packed)
    task = task.replace(eval_batches=lambda *_: iter([packed]))
    with pytest.raises(NotImplementedError, match="but linformer does not tell them apart"):
        check_positions(model, shapes, task, "valid", **sizes)


def test_batch_and_chunk_sizes_change_nothing_and_the_stride_does():
    base = score()["bits_per_dim"]
    assert score(batch_size=5)["bits_per_dim"] == pytest.approx(base, rel=1e-6)
    assert score(loss_chunk_len=3)["bits_per_dim"] == pytest.approx(base, rel=1e-6)
    assert score(stride=10)["bits_per_dim"] == base
    moved = score(stride=4)
    assert moved["stride"] == 4 and moved["n_targets"] == 53
    # Two tokens of context are all that the model uses: a stride of 8 or less gives them to all.
    whole = score(length=53)["bits_per_dim"]
    assert moved["bits_per_dim"] == pytest.approx(whole, rel=1e-5)
    assert abs(base - whole) > 1e-3


def test_a_budget_is_spread_over_the_split_and_is_part_of_the_whole():
    task, seen = tiny.counting(n_valid=1000), []

    class Noisy(tiny.TinyLM):
        """Features depend on the key of a batch."""

        def features(self, params, tokens, rng=None):
            jax.debug.callback(lambda first: seen.append(int(first)), rng[1])
            return super().features(params, tokens) + jax.random.normal(rng, (self.d_model,))

    def scored(**options):
        return evaluate(Noisy("eval"), PARAMS, task, "valid", batch_size=2, length=10, **options)

    part = scored(max_tokens=200)  # 10 of 50 batches
    assert part["n_targets"] == 200 and not part["whole"] and "whole_split" not in part
    assert len(set(seen)) == 10
    whole = scored()
    assert whole["n_targets"] == 1000 and whole["whole"]
    both = scored(max_tokens=200, all_as_well=True)
    names = "bits_per_dim", "accuracy", "n_targets"
    assert both.pop("whole_split") == {name: whole[name] for name in names} and both == part
    assert scored(max_tokens=1000, all_as_well=True) == whole == scored(max_tokens=10**9)
    assert scored(max_tokens=1)["n_targets"] == 20  # a batch at least
    with pytest.raises(ValueError, match="max_tokens=0"):
        scored(max_tokens=0)


@pytest.mark.parametrize("budget, n", [(1, 7), (3, 7), (7, 7), (50, 1000), (333, 1000)])
def test_what_is_chosen_lies_evenly(budget, n):
    chosen = [i for i in range(n) if in_budget(i, budget, n)]
    assert len(chosen) == budget and chosen[0] == 0
    gaps = np.diff([*chosen, n])
    assert gaps.max() - gaps.min() <= 1


def test_bits_by_position_are_those_of_each_position():
    """Bands of 64, 64 and the rest, by hand and as `evaluate` has them together."""
    task, sizes = tiny.counting(n_valid=600), dict(batch_size=2, length=150)
    found = by_position.by_position(MODEL, PARAMS, task, **sizes, loss_chunk_len=7)
    bands = found.windows
    assert not found.documents  # none ends
    assert [band[:2] for band in bands] == [(0, 64), (64, 128), (128, 150)]
    tokens = (jnp.arange(600) % 16).reshape(4, 150)
    logits = jax.jit(lambda p, x: MODEL.logits(p, MODEL.features(p, x)))(PARAMS, tokens)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    bits = -np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0] / np.log(2.0)
    for band in bands:
        assert band.n_targets == 4 * (band.end - band.first)
        assert band.bits == pytest.approx(float(bits[:, band.first : band.end].mean()), rel=1e-5)
    together = sum(band.bits * band.n_targets for band in bands) / 600
    whole = evaluate(MODEL, PARAMS, task, **sizes)["bits_per_dim"]
    assert together == pytest.approx(whole, rel=1e-5)
    part = by_position.by_position(MODEL, PARAMS, task, **sizes, max_tokens=300)
    assert sum(band.n_targets for band in part.windows) == 300
    lines = by_position.table(found, "bits_per_dim").splitlines()
    assert lines[1].split() == ["0-63", f"{bands[0].bits:.4f}", "256"]
    assert by_position.draw(found, "bits_per_dim", "windows of 150").startswith(b"\x89PNG")
    assert by_position.bands_of(64) == (0, 64) and by_position.bands_of(3) == (0, 3)


def test_bits_by_position_in_the_document_are_those_of_documents_that_begin_in_their_window():
    """By hand; documents of 90 tokens in windows of 150, the first of which begins with one."""
    tokens = np.arange(590) % 15
    begins = np.arange(0, 590, 90)
    windows = np.pad(tokens, (0, 10)).reshape(4, 150)
    windows[-1] = tokens[-150:]
    whole = np.pad(np.ones(590), (0, 10)).reshape(4, 150)
    whole[-1] = np.arange(150) >= 10  # the last window is moved back
    batches = [Batch(*2 * (windows[i : i + 2],), whole[i : i + 2]) for i in (0, 2)]
    batches = [Batch(*(x.astype(np.int32) for x in b[:2]), np.float32(b[2])) for b in batches]
    task = Task("", 16, None, lambda *_: iter(batches), lambda _: 590, borders=lambda split: begins)
    found = by_position.by_position(MODEL, PARAMS, task, batch_size=2, length=150)
    logits = jax.jit(lambda p, x: MODEL.logits(p, MODEL.features(p, x)))(PARAMS, windows)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    bits = -np.take_along_axis(log_p, windows[..., None], -1)[..., 0] / np.log(2.0)
    place = np.full((4, 150), -1)
    for row, start in enumerate([0, 150, 300, 440]):
        for t in range(150):
            here = begins[(start <= begins) & (begins <= start + t)]
            place[row, t] = start + t - here[-1] if len(here) else -1
    assert [band[:2] for band in found.documents] == [(0, 64), (64, 128)]
    for band in found.documents:
        here = (band.first <= place) & (place < band.end) & (whole == 1)
        assert band.n_targets == here.sum()
        assert band.bits == pytest.approx(float(bits[here].mean()), rel=1e-5)
    assert sum(band.n_targets for band in found.windows) == 590
    assert "\n    in document  bits per dim" in by_position.table(found, "bits_per_dim")
    written = by_position.as_json(found, "bits_per_dim")
    assert list(written) == ["by_position", "in_document"]
    assert written["in_document"][0]["first"] == 0
    assert by_position.draw(found, "bits_per_dim", "windows").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "batch_size, length, says",
    [
        (
            8,
            2**20,
            "100.0% .* padding: valid has 53 tokens, .* 8,388,608: set eval_length=6 or less",
        ),
        (2**20, 10, "100.0% .* padding: .* windows of 10 .*: set eval_batch_size=6"),
        (1, 2**19, None),  # no wait
    ],
)
def test_windows_of_padding_are_noted(batch_size, length, says):
    note = evaluation.padding_note(TASK, "valid", batch_size, length, "eval_")
    assert (note is None) == (says is None) and (says is None or re.search(says, note)), note
    for n_valid, is_noted in ((2**19, True), (2**19 + 1, False)):
        task = tiny.counting(n_valid=n_valid)
        assert bool(evaluation.padding_note(task, "valid", 1, 2**20)) == is_noted


def test_rows_that_no_memory_holds_are_told_by_the_names_of_the_call(monkeypatch):
    fixes = []
    monkeypatch.setattr(evaluation, "_LARGE", 1)
    monkeypatch.setattr(evaluation.memory, "check", lambda what, n, fix: fixes.append(fix))
    score()
    assert fixes == ["batch_size or length"] * 2


def test_should_stop_abandons():
    asked = []
    assert score(should_stop=lambda: asked.append(1) or len(asked) == 2) is None
    assert len(asked) == 2


def test_the_seed_reaches_the_model():
    class Noisy(tiny.TinyLM):
        def features(self, params, tokens, rng=None):
            return super().features(params, tokens) + jax.random.normal(rng, (self.d_model,))

    def bits(seed):
        arguments = {"batch_size": 2, "length": 10, "seed": seed}
        return evaluate(noisy, PARAMS, TASK, "valid", **arguments)["bits_per_dim"]

    noisy = Noisy(mode="eval")
    assert bits(0) == bits(0) != bits(1)
    # The bits by position are of the same numbers.
    sizes = dict(batch_size=2, length=9)  # which divides the split
    (band,) = by_position.by_position(noisy, PARAMS, TASK, **sizes, seed=1).windows
    whole = evaluate(noisy, PARAMS, TASK, **sizes, seed=1)["bits_per_dim"]
    assert band.bits == pytest.approx(whole, rel=1e-5)


def test_a_task_that_forgets_targets_is_told():
    with pytest.raises(ValueError, match="53 targets and the split 54"):
        score(TASK.replace(n_targets=lambda split: 54))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stride": 11}, "stride=11"),
        ({"stride": 0}, "stride=0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_sizes_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        score(**options)


@pytest.mark.parametrize("of_bytes, unit", [(True, "bits/byte"), (False, "bits/dim")])
def test_progress_names_the_bits_of_bytes(of_bytes, unit, capsys, monkeypatch):
    """As the bar of training does."""
    monkeypatch.setattr(progress, "INTERVAL", 0)
    monkeypatch.setattr(evaluation, "_IN_FLIGHT", 0)
    score()
    assert capsys.readouterr().err == ""
    score(TASK.replace(of_bytes=of_bytes), progress=True)
    err = capsys.readouterr().err
    assert f" {unit}" in err and "valid: 3 of 3, " in err


def test_prefetch_gives_all_in_order_and_runs_ahead_no_further_than_told():
    made = []

    def values():
        for i in range(20):
            made.append(i)
            yield i

    with prefetch(values(), ahead=3) as ready:
        first = next(ready)
        assert len(made) <= first + 1 + 3  # read, and ahead
        assert [first, *ready] == list(range(20))


def test_prefetch_raises_where_the_value_would_have_come_and_ends_its_thread():
    def values():
        yield 1
        raise ValueError("no more data")

    with prefetch(values()) as ready:
        assert next(ready) == 1
        with pytest.raises(ValueError, match="no more data"):
            next(ready)

    def endless():
        while True:
            yield 0

    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "prefetch"]

    with prefetch(endless()) as ready:
        next(ready)
        (thread,) = threads()
        assert thread.daemon  # others are waited for, a second interrupt or not
    assert not threads()


def test_the_record_is_cut_back_and_a_torn_line_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def opened(step):
        return record_lib.Record(tmp_path, RecordLines(path, step), step)

    record = opened(0)
    for step in (10, 20, 30):
        record.write(step, "train", {"bits_per_dim": float(step)}, {"seconds": 1.0}, tag="train")
        assert json.loads(path.read_text().splitlines()[-1])["step"] == step  # flushed
    record.close()
    with open(path, "a") as file:
        file.write('{"step": 4')
    record = opened(20)
    record.write(25, "valid", {"bits_per_dim": 1.0}, {}, tag="eval")
    record.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 25]
    assert lines[0]["timing"] == {"seconds": 1.0}
    events = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"train/bits_per_dim" in events and b"valid/bits_per_dim" in events


def test_progress_shows_loss_and_speed(capsys):
    bar = record_lib.Bar(5, 10)
    for _ in range(5):
        bar.advance(2.5, 1234.0)
    bar.say("a line")
    bar.close()
    captured = capsys.readouterr()
    assert captured.err == "train: 10 of 10, 2.500 bits/dim, 1,234 tokens/s\n"
    assert captured.out == "a line\n"


def test_an_error_of_the_user_is_a_line_and_a_fault_of_the_program_is_not():
    assert errors.one_line(ValueError("a=1\n  In call to configurable 'f' (<f>)")) == "a=1"
    assert errors.one_line(FileNotFoundError("no data")) == "no data"
    with pytest.raises(TypeError) as left_out:
        text()
    assert "give --data_dir" in errors.one_line(left_out.value)
    assert "out of memory" in errors.one_line(RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"))
    full = "RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']"
    assert errors.one_line(ValueError(full)) == full
    assert errors.one_line(RuntimeError("broken")) is None
    assert errors.one_line(TypeError("'int' object is not callable")) is None
    assert np.isscalar(errors.one_line(NotImplementedError("cross attention")))

"""The loop: its options, its endings, and that no interruption changes what it computes."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reformax.data.base import SPLITS, byte_language_model
from reformax.declared import SettingError
from reformax.training import checkpoint, dry_run, interrupt, loop, mesh, optimizer, stages
from reformax.training.evaluations import Evaluation
from reformax.training.settings import TrainSettings
from tests.training import tiny, worker

ROOT = Path(__file__).resolve().parents[2]


def run(folder, **settings):
    """(result, record) of a run of the tiny model."""
    result = loop.train(folder, **worker.arguments(**settings))
    return result, worker.record(folder)


@pytest.mark.slow
def test_z_loss_is_in_the_gradient_and_not_in_the_record(tmp_path):
    settings = dict(steps=2, log_every=1, eval_every=2)
    (_, plain), (_, with_z) = (
        run(tmp_path / name, **settings, z_loss=z) for name, z in (("plain", 0.0), ("z", 0.5))
    )
    bits = [
        [x["bits_per_dim"] for x in record if x["split"] == "train"] for record in (plain, with_z)
    ]
    norms = [
        [x["grad_norm"] for x in record if x["split"] == "train"] for record in (plain, with_z)
    ]
    assert bits[0][0] == bits[1][0] and bits[0][1] != bits[1][1]
    assert norms[0][0] != norms[1][0]


def test_examples_in_turn_go_on_behind_other_batches():
    """No example comes again before all have come; batches of one size count the steps."""

    def numbers(*sizes, in_order=True):
        task = tiny.counting().replace(in_order=in_order)
        given = [stages.Stage(until=4 * (i + 1), batch_size=n) for i, n in enumerate(sizes)]
        arguments = worker.arguments(steps=4 * len(sizes) + 4, batch_size=8, stages=given)
        settings = TrainSettings(**arguments | {"task": task})
        sizes = [settings.all_stages[settings.stage_after(n)].batch_size for n in range(12)]
        return [settings.batch_number(step) for step in range(12)], sizes

    assert numbers(8, 8)[0] == numbers(32, 4, in_order=False)[0] == list(range(12))
    for sizes in ((32, 4), (3, 32), (10, 6), (8, 16)):
        found, batch_sizes = numbers(*sizes)
        places = [
            range(n * size, (n + 1) * size) for n, size in zip(found, batch_sizes, strict=True)
        ]
        read = [place for part in places for place in part]
        assert len(set(read)) == len(read) and found == sorted(found)


def test_examples_in_turn_go_on_behind_drawn_ones():
    """A stage that draws its examples, in smaller batches, makes no earlier ones come again."""
    task = tiny.counting().replace(in_order=True)
    drawn = stages.Stage(until=6, batch_size=1, task=task.replace(in_order=False))
    given = [stages.Stage(until=4, batch_size=6), drawn]
    arguments = worker.arguments(steps=9, batch_size=2, stages=given)
    settings = TrainSettings(**arguments | {"task": task})
    found = [settings.batch_number(step) for step in range(9)]
    assert found == [0, 1, 2, 3, 4, 5, 12, 13, 14]  # from example 24 on


def test_what_an_evaluation_cannot_do_is_told_before_the_first_step(tmp_path):
    def refuse(split, batch_size, length, stride):
        raise SettingError(f"stride={stride} must be 16")

    settings = worker.arguments(eval_stride=8)
    settings["task"] = settings["task"].replace(eval_batches=refuse)
    for begin in (dry_run.check, dry_run.report, partial(loop.train, tmp_path / "run")):
        with pytest.raises(SettingError, match="stride=8 must be 16"):
            begin(**settings)
    assert not (tmp_path / "run").exists()


def start(folder, **settings):
    """The same in a process of its own; returns its exit code."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.training.worker", str(folder), json.dumps(settings)]
    process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


def params(folder, step):
    """The parameters of a checkpoint, as one vector."""
    return np.concatenate([x.ravel() for x in jax.tree.leaves(worker.params(folder, step))])


SLOW = pytest.mark.slow
# Interruptions and dropout are where a resumed run could differ.
LONG = {"steps": 40, "model": {"dropout": 0.2}, "checkpoint_every": 7}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    result, record = run(folder, **LONG)
    return result, record, params(folder, 40)


def test_a_run_learns_and_leaves_its_record(uninterrupted):
    result, record, _ = uninterrupted
    bits = {(line["split"], line["step"]): line["bits_per_dim"] for line in record}
    assert [s for split, s in bits if split == "train"] == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert [s for split, s in bits if split == "valid"] == [10, 20, 30, 40]
    assert bits["valid", 40] < 0.7 * bits["valid", 10]
    assert result["bits_per_dim"] == bits["valid", 40]
    assert (result["step"], result["steps"], result["interrupted_by"]) == (40, 40, None)
    assert result["best_step"] == 40 and result["best_bits_per_dim"] == bits["valid", 40]
    assert result["n_params"] == 16 * 8 + 8 * 8 + 8 + 8 * 16


@pytest.mark.slow
def test_killed_anywhere_a_rerun_computes_the_same_bits(uninterrupted, tmp_path):
    _, record, vector = uninterrupted
    # In the middle of training, of writing a checkpoint, and once it has its name.
    kill = {"signal_step": 17, "number": int(signal.SIGKILL)}
    assert start(tmp_path, **LONG, task=kill) == -signal.SIGKILL
    assert start(tmp_path, **LONG, die="manifest.write") == -signal.SIGKILL
    assert start(tmp_path, **LONG, die="Checkpoints._prune") == -signal.SIGKILL
    assert 0 < checkpoint.Checkpoints(tmp_path).steps()[-1] < 40
    assert start(tmp_path, **LONG) == 0
    assert worker.record(tmp_path) == record
    np.testing.assert_array_equal(params(tmp_path, 40), vector)
    assert not list((tmp_path / "checkpoints").glob("tmp*"))


@pytest.mark.parametrize("step, number", [(13, signal.SIGTERM), (21, signal.SIGHUP)])
def test_a_signal_saves_and_a_rerun_computes_the_same_bits(uninterrupted, tmp_path, step, number):
    _, record, vector = uninterrupted
    handler = signal.getsignal(number)
    result, _ = run(tmp_path, **LONG, task={"signal_step": step, "number": int(number)})
    assert result["interrupted_by"] == number and 0 < result["step"] <= step + 1
    assert checkpoint.Checkpoints(tmp_path).steps()[-1] == result["step"]
    assert signal.getsignal(number) == handler
    result, again = run(tmp_path, **LONG)
    assert result["step"] == 40 and again == record
    np.testing.assert_array_equal(params(tmp_path, 40), vector)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_leaves_it_to_the_rerun(uninterrupted, tmp_path):
    _, record, _ = uninterrupted
    task = tiny.counting()
    evaluations = []

    def interrupted(*args):
        evaluations.append(1)
        if len(evaluations) == 2:
            signal.raise_signal(signal.SIGTERM)  # in the prefetching thread: Python's main one acts
        yield from task.eval_batches(*args)

    arguments = worker.arguments(**LONG) | {"task": task.replace(eval_batches=interrupted)}
    result = loop.train(tmp_path, **arguments)
    assert (result["step"], result["bits_per_dim"]) == (20, None)
    assert checkpoint.Checkpoints(tmp_path).score(20) is None
    result, again = run(tmp_path, **LONG)
    assert again == record and result["best_step"] == 40


@pytest.fixture
def python_sigint():
    """SIGINT as Python has it; a shell's background job inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for(what, seconds=30):
    end = time.perf_counter() + seconds
    while not what() and time.perf_counter() < end:
        time.sleep(0.005)
    return what()


def test_a_signal_is_acknowledged_while_the_main_thread_cannot(python_sigint):
    """As while XLA compiles: a handler of Python waits until the call is over."""
    said = []

    def say(text):
        said.append((text, time.perf_counter()))

    def send():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: said)
        said.append(("later", time.perf_counter()))

    sender = threading.Thread(target=send)
    with interrupt.Interrupt(say) as stop:
        sender.start()
        while not stop:
            begin = time.perf_counter()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # in C, without Python's lock
        end = time.perf_counter()
    sender.join()
    assert stop.signal is signal.SIGINT
    assert [text.split(":")[0] for text, _ in said] == ["SIGINT", "later"]
    assert begin < said[0][1] < said[1][1] < end, "it was not said before the call returned"
    assert "signals" not in {thread.name for thread in threading.enumerate()}


def test_another_users_wakeup_descriptor_stays(python_sigint):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    said = []
    assert signal.set_wakeup_fd(writer) == -1
    try:
        with interrupt.Interrupt(said.append) as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop and len(said) == 1
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(writer)
        os.close(reader)


@pytest.mark.parametrize("lag", [0, 0.02])
def test_a_second_signal_is_the_same_request_for_a_second(python_sigint, monkeypatch, lag):
    said, now = [], [100.0]

    def monotonic():
        if threading.current_thread().name == "signals":
            time.sleep(lag)  # it notes a signal long after the handler has run
        return now[0]

    monkeypatch.setattr(interrupt.time, "monotonic", monotonic)
    with interrupt.Interrupt(said.append) as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop and stop.signal is signal.SIGINT
        wait_for(lambda: said)  # a thread may have said it
        assert len(said) == 1 and said[0].startswith("SIGINT: ") and "\n" not in said[0]
        now[0] += 0.9  # a launcher's copies
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop.signal is signal.SIGINT and len(said) == 1
        time.sleep(2.5 * lag)
        now[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_is_noted_where_saying_so_fails():
    def broken(text):
        raise OSError("no terminal")

    with interrupt.Interrupt(broken) as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal is signal.SIGTERM


@pytest.mark.slow
def test_a_second_signal_that_waits_for_the_main_thread_is_the_same_request():
    script = """
import hashlib, os, signal, threading, time
from reformax.training.interrupt import Interrupt
with Interrupt() as interrupt:
    os.kill(os.getpid(), signal.SIGHUP)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGHUP]).start()
    begun, n = time.monotonic(), 10**6
    while time.monotonic() - begun < 1.5:  # in C, without the lock of the interpreter
        hashlib.pbkdf2_hmac("sha256", b"", b"", n)
        n *= 4
print("here", bool(interrupt))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "here True\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_sent_twice_at_once_save(tmp_path, number):
    task = tiny.counting()

    def twice(seed, step, *sizes):
        if step == 15:  # long after the step was compiled: handlers run at once
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        return task.train_batch(seed, step, *sizes)

    before = signal.getsignal(number)
    result = loop.train(tmp_path, **worker.arguments() | {"task": task.replace(train_batch=twice)})
    assert result["interrupted_by"] is number and 0 < result["step"] < 24
    assert checkpoint.Checkpoints(tmp_path).steps()[-1] == result["step"]
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_nohup_stays_in_force(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result, _ = run(tmp_path, task={"signal_step": 5, "number": int(signal.SIGHUP)})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result["step"], result["interrupted_by"]) == (24, None)


def test_a_request_to_stop_is_acknowledged(tmp_path, capsys):
    signals = {"signal_step": 5, "number": int(signal.SIGTERM)}
    run(tmp_path / "silent", task=signals)
    assert capsys.readouterr().err == ""
    run(tmp_path / "loud", task=signals, progress=True)
    assert "\nSIGTERM: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [5, 17, 33])
def test_checkpoints_by_time_change_no_bit(uninterrupted, tmp_path, killed_at):
    """One after every step that takes longer than nothing, and a run that a fault ends."""
    _, record, vector = uninterrupted
    timed = LONG | {"checkpoint_minutes": 1e-9, "checkpoint_every": None}
    task = tiny.counting()

    def dies(seed, step, *sizes):
        if step == killed_at:
            raise OSError("the data is gone")
        return task.train_batch(seed, step, *sizes)

    with pytest.raises(OSError, match="gone"):
        loop.train(tmp_path, **worker.arguments(**timed) | {"task": task.replace(train_batch=dies)})
    assert killed_at - 4 < checkpoint.Checkpoints(tmp_path).steps()[-1] <= killed_at
    result, again = run(tmp_path, **timed)
    assert again == record and result["step"] == 40
    np.testing.assert_array_equal(params(tmp_path, 40), vector)
    assert checkpoint.Checkpoints(tmp_path).steps() == [30, 40]


@pytest.mark.slow
def test_a_finished_run_is_told_without_a_step(uninterrupted, tmp_path):
    first, record = run(tmp_path, steps=10)
    poisoned = {"poison_step": 0}  # no batch is looked at
    again, record_again = run(tmp_path, steps=10, task=poisoned)
    assert again == first and record_again == record
    longer, record_longer = run(tmp_path, steps=12)
    assert longer["step"] == 12 and record_longer[: len(record)] == record


def test_a_batch_that_devices_cannot_share_is_told(tmp_path):
    with pytest.raises(ValueError, match="batch_size=8 cannot be divided .* accumulate=3"):
        run(tmp_path, accumulate=3)
    mesh_of_1 = mesh.make(devices=jax.devices()[:1])
    mesh_of_8 = type("Mesh", (), {"shape": {"data": 2, "fsdp": 4, "context": 2}})
    mesh.check_batch_size("batch_size", 5, mesh_of_1)
    with pytest.raises(ValueError, match="batch_size=12 cannot .* multiple of 8, such as 8"):
        mesh.check_batch_size("batch_size", 12, mesh_of_8)
    mesh_of_4 = type("Mesh", (), {"shape": {"data": 4, "fsdp": 1, "context": 1}, "size": 4})
    for rows, length, context in [(1, 64, 4), (2, 64, 2), (6, 6, 2), (1, 6, None), (1, None, None)]:
        with pytest.raises(ValueError, match="cannot be divided over 4 devices") as told:
            mesh.check_batch_size("batch_size", rows, mesh_of_4, length=length)
        named = f"""--config='loop.train.mesh={{"context": {context}}}'"""
        assert (named in str(told.value)) == (context is not None)
        if context is not None:
            mesh.check_batch_size(
                "batch_size",
                rows,
                type("Mesh", (), {"shape": mesh.sizes_of({"context": context}, 4)}),
                length=length,
            )


def test_loss_that_is_no_number_stops_the_run_and_is_never_saved(tmp_path):
    settings = {"steps": 40, "checkpoint_every": 5, "log_every": 1}
    with pytest.raises(FloatingPointError) as error:
        run(tmp_path, **settings, task={"poison_step": 17})
    message = str(error.value)
    assert "\n" not in message and "at step 18" in message
    assert f"step 15 is the last good checkpoint in {tmp_path}" in message
    assert max(line["step"] for line in worker.record(tmp_path)) == 17
    assert np.isfinite(params(tmp_path, 15)).all()
    assert run(tmp_path, **settings)[0]["step"] == 40


def test_parameters_that_are_no_numbers_are_never_saved(tmp_path):
    # The loss of step 5 is finite, and so is its gradient: only the update is not.
    dropped = optimizer.adam(lambda count: jnp.where(count == 4, jnp.inf, 1e-3))
    with pytest.raises(FloatingPointError, match="parameters are not finite after step 5"):
        run(tmp_path, optimizer=dropped, checkpoint_every=5)
    assert checkpoint.Checkpoints(tmp_path).steps() == []


@pytest.mark.slow
def test_the_moving_average_is_what_evaluations_score(tmp_path):
    _, off = run(tmp_path / "off", steps=10)
    result, on = run(tmp_path / "on", steps=10, ema_decay=0.9)
    assert [x for x in on if x["split"] == "train"] == [x for x in off if x["split"] == "train"]
    assert on[-1]["bits_per_dim"] != off[-1]["bits_per_dim"]
    assert not np.array_equal(params(tmp_path / "on", 10), params(tmp_path / "off", 10))
    # It is the average: a shorter memory is nearer to the parameters themselves.
    run(tmp_path / "short", steps=10, ema_decay=0.1)
    plain = params(tmp_path / "off", 10)
    distance = [np.abs(params(tmp_path / f, 10) - plain).max() for f in ("on", "short")]
    assert 0 < distance[1] < distance[0]
    # And it goes on over an interruption as everything does.
    run(tmp_path / "two", steps=6, ema_decay=0.9)
    run(tmp_path / "two", steps=10, ema_decay=0.9)
    np.testing.assert_array_equal(params(tmp_path / "two", 10), params(tmp_path / "on", 10))


def test_evaluations_take_their_own_sizes(tmp_path):
    seen = []
    task = tiny.counting()

    def spied(*args):
        for batch in task.eval_batches(*args):
            seen.append((*args, batch.inputs.shape))
            yield batch

    sizes = {"eval_batch_size": 2, "eval_length": 20, "eval_stride": 5, "eval_split": "test"}
    arguments = worker.arguments(steps=1) | {"task": task.replace(eval_batches=spied)} | sizes
    loop.train(tmp_path, **arguments, eval_tokens=25, eval_whole=False)
    assert set(seen) == {("test", 2, 20, 5, (2, 20))}
    # An eighth of the 19 batches of 25, 10, 10, ... targets.
    line = worker.record(tmp_path)[-1]
    assert (line["split"], line["n_targets"], line["whole"]) == ("test", 45, False)


@pytest.mark.slow
def test_scores_of_one_budget_are_compared_and_the_last_is_whole(tmp_path):
    budget = {"steps": 20, "eval_every": 5, "eval_tokens": 40, "eval_batch_size": 2, "keep": 9}
    result, record = run(tmp_path, **budget)
    lines = {x["step"]: x for x in record if x["split"] == "valid"}
    assert [(x["n_targets"], x["whole"]) for x in lines.values()] == [(64, False)] * 4
    assert [step for step, x in lines.items() if "whole_split" in x] == [20]
    whole = lines[20]["whole_split"]
    assert whole["n_targets"] == result["n_targets"] == 200 and result["whole"]
    assert result["bits_per_dim"] == whole["bits_per_dim"] != lines[20]["bits_per_dim"]
    assert result["best_bits_per_dim"] == min(x["bits_per_dim"] for x in lines.values())
    assert not result["best_whole"]
    assert (result, record) == run(tmp_path, **budget)
    # Another budget is another score; the best is the best of it alone.
    more, record = run(tmp_path, **budget | {"eval_tokens": 80})
    assert more["best_step"] == 20 and more["best_bits_per_dim"] == record[-1]["bits_per_dim"]
    assert more["bits_per_dim"] == result["bits_per_dim"]
    # What was the last evaluation of a run is not that of a longer one, and the other way round.
    longer, _ = run(tmp_path, **budget | {"steps": 25})
    assert longer["whole"] and longer["step"] == 25
    part, _ = run(tmp_path, **budget | {"steps": 25, "eval_whole": False})
    assert part["whole"]  # it is there


@pytest.mark.slow
def test_train_lines_have_tokens_and_the_time_of_all_resumptions(tmp_path):
    run(tmp_path, steps=8, max_minutes=None)
    run(tmp_path, steps=16, batch_size=16)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens = {x["step"]: x["tokens"] for x in lines if x["split"] == "train"}
    assert tokens == {4: 512, 8: 1024, 12: 2048, 16: 3072}
    seconds = [x["timing"]["seconds"] for x in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_split_compares_its_scores_alone(tmp_path):
    run(tmp_path, steps=20)
    checkpoints = checkpoint.Checkpoints(tmp_path)
    # The last step has no score of the other split, and is evaluated again.
    result, record = run(tmp_path, steps=20, eval_split="test", eval_length=12)
    lines = [(x["step"], x["split"]) for x in record if x["split"] != "train"]
    assert lines == [(10, "valid"), (20, "valid"), (20, "test")]
    assert checkpoints.steps() == [10, 20] and result["best_step"] == 20
    assert result["best_bits_per_dim"] == result["bits_per_dim"] == record[-1]["bits_per_dim"]
    described = json.loads((tmp_path / "checkpoints/20/checkpoint.json").read_text())
    of = {"split": "test", "metric": "bits_per_dim", "length": 12, "stride": 12}
    assert described["extra"]["scored"] == of
    # The same once more computes nothing; a part of the split is a score of its own.
    assert run(tmp_path, steps=20, eval_split="test", eval_length=12) == (result, record)
    part = {"eval_split": "test", "eval_length": 12, "eval_tokens": 1, "eval_whole": False}
    assert run(tmp_path, steps=20, **part)[0]["bits_per_dim"] != result["bits_per_dim"]


@pytest.mark.parametrize(
    "option, train_lines, valid_lines, checkpoints",
    [
        ({"checkpoint_every": 3, "keep": 3}, [4, 8, 12], [10, 12], [9, 10, 12]),
        ({"eval_every": None, "log_every": 5, "keep": 1}, [5, 10, 12], [12], [12]),
    ],
)
def test_when_it_logs_evaluates_and_saves(tmp_path, option, train_lines, valid_lines, checkpoints):
    _, record = run(tmp_path, **{"steps": 12} | option)
    assert [x["step"] for x in record if x["split"] == "train"] == train_lines
    assert [x["step"] for x in record if x["split"] == "valid"] == valid_lines
    assert checkpoint.Checkpoints(tmp_path).steps() == checkpoints


@pytest.mark.slow
def test_the_learning_rate_of_each_lines_step_is_in_the_record(tmp_path):
    """Over an interruption too, and only if the optimizer has a schedule."""
    schedule = optimizer.cosine(max_value=3e-2, steps=12, warmup_steps=6)
    settings = {"optimizer": optimizer.adamw(schedule), "batch_size": 16, "accumulate": 2}
    run(tmp_path / "known", steps=6, **settings)
    _, lines = run(tmp_path / "known", steps=12, **settings)
    rates = {x["step"]: x.pop("learning_rate") for x in lines if x["split"] == "train"}
    wanted = {step: float(schedule(step - 1)) for step in (4, 6, 8, 12)}
    assert rates == pytest.approx(wanted, rel=1e-5)
    assert rates[4] == pytest.approx(2e-2) and not any("learning_rate" in x for x in lines)
    events = [p.read_bytes() for p in (tmp_path / "known" / "tensorboard").iterdir()]
    assert b"train/learning_rate" in b"".join(events)
    _, lines = run(tmp_path / "unknown", steps=4, optimizer=optax.sgd(schedule))
    assert not any("learning_rate" in x for x in lines)


@pytest.mark.slow
def test_the_seed_the_batch_and_the_length_matter(tmp_path):
    variants = [{}, {"seed": 1}, {"batch_size": 16}, {"length": 8}]
    bits = [
        run(tmp_path / str(i), steps=4, **v)[1][0]["bits_per_dim"] for i, v in enumerate(variants)
    ]
    assert len(set(bits)) == len(variants)


@pytest.mark.slow
def test_stages_are_runs_that_go_on_from_one_another(tmp_path):
    """Other batches and another model, and one optimizer; evaluations are the run's own."""
    first = dict(batch_size=16, length=8, eval_length=16, eval_batch_size=8, model={"dropout": 0.5})
    run(tmp_path / "parts", steps=10, **first)
    run(tmp_path / "parts", steps=20)
    stage = stages.Stage(until=10, batch_size=16, length=8, model=partial(tiny.TinyLM, dropout=0.5))
    _, record = run(tmp_path / "whole", steps=20, stages=(stage,))
    np.testing.assert_array_equal(params(tmp_path / "whole", 20), params(tmp_path / "parts", 20))
    # A part's last line is of its last steps.
    lines, wanted = (
        [line for line in record if line["step"] not in (10, 12)]
        for record in (record, worker.record(tmp_path / "parts"))
    )
    assert lines == wanted


def known(name, **options):
    """The tiny task with a fingerprint."""
    return tiny.counting(**options).replace(fingerprint=lambda split: f"{name} {split}")


@pytest.mark.slow
def test_a_stage_has_data_of_its_own(tmp_path):
    """`until` is a share of the steps, and the run's own task scores."""
    easy = known("easy", noise=0.0)
    data = {"allow_changed_data": True}  # for the parts alone
    run(tmp_path / "parts", steps=12, **data | {"task": {"noise": 0.0}})
    run(tmp_path / "parts", steps=24, **data)
    empty, half = stages.Stage(until=0.01, length=8), stages.Stage(until=0.5, task=easy)
    _, record = run(tmp_path / "whole", stages=(empty, half))
    np.testing.assert_array_equal(params(tmp_path / "whole", 24), params(tmp_path / "parts", 24))
    assert record[-1] == worker.record(tmp_path / "parts")[-1]


def test_a_stage_of_other_symbols_has_no_bits_per_byte(tmp_path):
    of_bytes = byte_language_model("it", dict.fromkeys(SPLITS, np.arange(99, dtype=np.uint8)))
    given = dict(model={"vocab_size": 256}, steps=4, log_every=2, length=4, batch_size=1)
    given["stages"] = [stages.Stage(until=2, task=known("symbols"))]
    loop.train(tmp_path / "run", **worker.arguments(**given) | {"task": of_bytes})
    lines = [line for line in worker.record(tmp_path / "run") if line["tag"] == "train"]
    assert ["bits_per_byte" in line for line in lines] == [False, True]


@pytest.mark.slow
def test_a_run_goes_on_within_stages(tmp_path):
    """One step at a time it sees what it sees at once, and no other data of a stage to come."""
    easy, hard = known("easy", noise=0.0), known("hard", noise=0.2)
    given = dict(steps=6, stages=[stages.Stage(until=2, task=easy)])
    given["stages"].append(stages.Stage(until=4, task=hard, length=8))
    run(tmp_path / "whole", **given)
    for _ in range(3):
        run(tmp_path / "cut", **given, max_minutes=1e-9)
    over, now = given["stages"]
    for changed in (now.task.replace(fingerprint=lambda split: "other"), None):
        told = r"train of stages\[1\] was hard train and is"
        task = known("own") if changed is None else tiny.counting()
        with pytest.raises(ValueError, match=told):
            other = replace(now, task=changed, until=5)  # a later end is no other stage
            loop.train(
                tmp_path / "cut",
                **worker.arguments(**given) | {"stages": (over, other), "task": task},
            )
    other = stages.Stage(until=5, task=known("easier"))
    with pytest.raises(ValueError, match=r"train of stages\[2\] was none and is easier train"):
        loop.train(tmp_path / "cut", **worker.arguments(**given) | {"stages": (over, now, other)})
    run(tmp_path / "cut", **given | {"stages": [now]}, max_minutes=1e-9)  # of another number
    given["stages"][0] = replace(over, task=known("over"))  # which no step will read
    for _ in range(3):
        run(tmp_path / "cut", **given, max_minutes=1e-9)
    np.testing.assert_array_equal(params(tmp_path / "whole", 6), params(tmp_path / "cut", 6))


def test_a_dry_run_has_a_line_for_each_program(no_search):
    """Stages that differ in their data alone share theirs, and one without a step has none."""
    given = [stages.Stage(until=n, task=known(str(n))) for n in (1, 2)]
    given += [stages.Stage(until=4, length=8), stages.Stage(until=0.17, length=4)]
    _, *lines = dry_run.report(**worker.arguments(stages=given))
    sizes = [line.split(" tokens")[0] for line in lines]
    assert sizes == ["to step 2, 8 x 16", "to step 4, 8 x 8", "to step 24, 8 x 16"]


@pytest.mark.slow
def test_a_schedule_of_another_length_than_the_checkpoints_is_noted(tmp_path, capsys):
    def run(steps, length=None):
        schedule = optimizer.cosine(steps=length, warmup_steps=1)
        options = worker.arguments(steps=steps, optimizer=optimizer.adamw(schedule))
        loop.train(tmp_path, **options)
        return [line for line in capsys.readouterr().err.splitlines() if "schedule" in line]

    assert run(4) == run(6, 4) == []
    note = "note: the learning rate's schedule is 8 steps long, and was 4 until step 6"
    assert run(8) == [note] and run(8) == []
    assert checkpoint.Checkpoints(tmp_path).extra(8)["schedule_steps"] == 8


def test_examples_in_turn_that_go_on_elsewhere_are_noted(tmp_path, capsys):
    """A step finds its examples by its number and its batch's size."""

    def run(**settings):
        given = worker.arguments(**{"length": 8, "batch_size": 4} | settings)
        task = given["task"].replace(in_order=settings.get("steps") != 6)
        loop.train(tmp_path, **given | {"task": task})
        return [line for line in capsys.readouterr().err.splitlines() if "in turn" in line]

    first = stages.Stage(until=2, batch_size=8)
    assert run(steps=3, stages=[first]) == run(steps=4, stages=[first]) == []
    (note,) = run(steps=5)
    assert "so far had 192 tokens, and would have 128 by this config: examples that" in note
    assert run(steps=6) == []  # which are drawn


def test_a_dry_run_notes_a_warm_up_that_the_run_does_not_finish(no_search):
    options = worker.arguments(named=lambda line: line.replace("cosine.warmup_steps", "mine"))
    for warmup_steps, notes in ((24, 1), (23, 0)):
        options["optimizer"] = optimizer.adamw(optimizer.cosine(warmup_steps=warmup_steps))
        found = [line for line in dry_run.report(**options) if "does not reach its peak" in line]
        assert len(found) == notes
        assert all(line.startswith("note: mine=24 is not below steps=24") for line in found)


def test_a_dry_run_refuses_what_a_run_would(tmp_path, no_search):
    wider = stages.Stage(until=4, model=partial(tiny.TinyLM, d_model=9))
    uneven = stages.Stage(until=4, batch_size=3)
    nothing = tmp_path / "checkpoints/5"
    run(tmp_path, steps=10)
    for given, told in (
        ({"stages": [wider]}, r"^stages\[0\].model has other parameters than model"),
        ({"stages": [uneven], "accumulate": 2}, r"^stages\[0\]: batch_size=3 cannot be divided in"),
        ({"init_from": "nowhere"}, "init_from=nowhere holds no checkpoint"),
        ({"init_from": nothing}, f"init_from={nothing} is no checkpoint: {tmp_path} has 10"),
    ):
        with pytest.raises(SettingError, match=told):
            dry_run.report(**worker.arguments(**given))


@pytest.mark.parametrize("share, steps, end", [(0.29, 100, 29), (0.7, 2600, 1820), (0.5, 3, 1)])
def test_a_share_of_the_steps(share, steps, end):
    assert stages.end_of(stages.Stage(until=share), steps) == end


@pytest.mark.parametrize(
    "given, message",
    [
        ([dict(until=24)], r"stages end at steps \[24\]: expected growing numbers below steps=24"),
        ([dict(until=9), dict(until=9)], r"stages end at steps \[9, 9\]: expected growing"),
        ([dict(until=9, length=0)], "length is 0: expected"),
        ([dict(until=0.5), dict(until=0.4)], r"stages end at steps \[12, 9\]: expected growing"),
        (
            [dict(until=1.5)],
            "until is 1.5: expected a whole number of at least 1, or a share of .*s above 0 and",
        ),
        (
            [dict(until=9, task=tiny.counting(vocab_size=99))],
            r"stages\[0\]: task counting has ids below 99 and .*, or give the stage another task",
        ),
        (
            [dict(until=9, task=tiny.counting().replace(vocabulary="pieces"))],
            r"stages\[0\].task is counting, whose vocabulary is not the run's: leave it out",
        ),
        (
            [dict(until=9, model=partial(tiny.TinyLM, d_model=4))],
            r"stages\[0\].model has other",
        ),
    ],
)
def test_bad_stages_are_told_before_the_first_step(tmp_path, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        run(tmp_path, stages=[stages.Stage(**stage) for stage in given])
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("where", ["stages[0]", "evaluations['other']"])
def test_bytes_that_have_other_ids_are_told(where):
    splits = dict.fromkeys(("train", "valid", "test"), np.arange(99, dtype=np.uint8))
    own, other = (byte_language_model("bytes", splits, offset) for offset in (0, 3))
    given = {"stages": [stages.Stage(until=9, task=other)]}
    if "stages" not in where:
        given = {"evaluations": {"other": Evaluation(task=other)}}
    message = f"{where}.task is bytes, whose bytes are the last of 259 ids, and the run's of 256: s"
    with pytest.raises(SettingError, match=f"^{re.escape(message)}"):
        TrainSettings(**worker.arguments() | {"task": own} | given)


@pytest.mark.slow
def test_loss_chunks_change_rounding_alone(tmp_path):
    _, whole = run(tmp_path / "whole", steps=8)
    chunks = []
    logits = tiny.TinyLM.logits

    class Spy(tiny.TinyLM):
        def logits(self, params, features):
            chunks.append(features.shape[1])
            return logits(self, params, features)

    arguments = worker.arguments(steps=8, loss_chunk_len=5) | {"model": Spy}
    loop.train(tmp_path / "chunks", **arguments)
    # Even chunks of at most five positions; one position tells the number of logits.
    assert set(chunks) - {1} == {max(chunks)} and 1 < max(chunks) <= 5
    bits = [
        [x["bits_per_dim"] for x in lines] for lines in (whole, worker.record(tmp_path / "chunks"))
    ]
    np.testing.assert_allclose(*bits, atol=1e-5)


@pytest.mark.slow
def test_out_of_time_it_evaluates_saves_and_can_go_on(tmp_path):
    result, record = run(tmp_path, steps=3, max_minutes=1e-9)
    assert result["step"] == 1 and result["bits_per_dim"] is not None
    assert [x["split"] for x in record] == ["valid"]
    assert run(tmp_path, steps=3, max_minutes=1e-9)[0]["step"] == 2
    assert run(tmp_path, steps=3, max_minutes=100)[0]["step"] == 3


@pytest.mark.slow
def test_the_config_is_written_and_changes_are_told(tmp_path, capsys):
    settings = {"steps": 2, "progress": True}
    run(tmp_path, **settings, config_text=lambda: "a = 1\nb = 2\n")
    assert "settings changed" not in capsys.readouterr().out
    # What no step is trained with is told, and not kept.
    run(tmp_path, **settings, config_text=lambda: "a = 1\nb = 3\n")
    assert "no step is left to train with" in capsys.readouterr().out
    assert (tmp_path / "config.gin").read_text() == "a = 1\nb = 2\n"
    settings["steps"] = 3
    run(tmp_path, **settings, config_text=lambda: "a = 1\nb = 3\n")
    out = capsys.readouterr().out
    assert "- b = 2\n+ b = 3" in out and "a = 1" not in out
    assert (tmp_path / "config.gin").read_text() == "a = 1\nb = 3\n"
    # Whether progress is shown is no setting of what is trained.
    run(tmp_path, **settings, config_text=lambda: "a = 1\nb = 3\nloop.train.progress = True\n")
    assert "settings changed" not in capsys.readouterr().out


def test_another_model_is_told_and_nothing_is_lost(tmp_path):
    run(tmp_path, steps=2, config_text=lambda: "first")
    leftover = tmp_path / "checkpoints" / "tmp.9"
    leftover.mkdir()
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(ValueError, match=r"params.embedding has shape \(16, 8\) there and"):
        run(tmp_path, steps=4, model={"d_model": 9}, config_text=lambda: "second")
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before and leftover.exists()
    assert (tmp_path / "config.gin").read_text() == "first"


@pytest.mark.slow
def test_progress_shows_on_request(tmp_path, capsys):
    run(tmp_path / "silent", steps=2)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    run(tmp_path / "loud", steps=4, progress=True)
    captured = capsys.readouterr()
    assert "328 parameters" in captured.out and "step 4: valid" in captured.out
    assert "bits/dim" in captured.err and "tokens/s" in captured.err and "4 of 4" in captured.err


BAD = [
    ({"steps": 0}, "steps is 0: expected"),
    ({"steps": "many"}, "steps is 'many': expected"),
    ({"report_kept_mass_every": 2}, "report_kept_mass_every is 2: no attention of model TinyLM"),
    ({"checkpoint_every": -1}, "checkpoint_every is -1: expected"),
    ({"checkpoint_minutes": 0}, "checkpoint_minutes is 0: expected"),
    ({"keep": 0}, "keep is 0: expected"),
    ({"max_minutes": 0}, "max_minutes is 0: expected"),
    ({"ema_decay": 1.0}, "ema_decay is 1.0: expected"),
    ({"z_loss": -1.0}, "z_loss is -1.0: expected"),
    ({"backprop_len": 5}, "backprop_len is 5: expected a divisor of length, 16"),
    ({"backprop_len": 4}, "backprop_len is 4, but TinyLM carries no states: train a lm.Transf"),
    ({"mesh": {"model": 2}}, "mesh is {'model': 2}: expected sizes above 0 of some of data, fsdp"),
    ({"mesh": {"fsdp": 9}}, "mesh is {'fsdp': 9}: 9 does not divide the number of devices, .: "),
    ({"eval_stride": 17}, "eval_stride=17 must not be above eval_length=16"),
    ({"model": {"vocab_size": 2}}, "vocab_size=2"),
    (
        {"optimizer": optimizer.muon(matrices="hidden.kernel", width=9, base_width=4)},
        "width is 9: expected that of the model, d_model=8",
    ),
    ({"model": {"max_length": 20}, "eval_length": 21}, "length=21 is above max_length=20"),
]


@pytest.mark.parametrize("settings, message", BAD)
def test_bad_values_are_told_before_the_first_step(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        run(tmp_path / "runs/new", **settings)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_start_leaves_what_was_there(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for name in ("empty", "mine", "mine/new"):
        with pytest.raises(ValueError, match="vocab_size=2"):
            run(tmp_path / name, model={"vocab_size": 2})
        (tmp_path / name / ".lock").unlink(missing_ok=True)
    assert sorted(tmp_path.rglob("*")) == [
        tmp_path / name for name in ("empty", "mine", "mine/notes.txt")
    ]


def test_a_split_that_does_not_exist_fails_before_the_first_step(tmp_path):
    with pytest.raises(KeyError, match="validation"):  # as this task says it
        run(tmp_path, eval_split="validation")
    assert not (tmp_path / "metrics.jsonl").exists()

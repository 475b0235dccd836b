"""What benchmarks share: calls, processes, lengths and lines of figures."""

import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import attention
from benchmarks.harness import by_length, calls, lines, processes
from benchmarks.harness.calls import reason


@pytest.mark.parametrize("lengths, at_once", [([64, 1024], [None]), ([64, 128, 2**20], [None, 1])])
def test_long_rows_are_compiled_one_after_another(lengths, at_once, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(attention, "measure", lambda *given: found.append(given[-1]))
    shape = attention.SHAPES["tiny"]._replace(lengths=tuple(lengths))
    figures = attention.Figures(shape, None)
    run = attention.Run(shape, figures, 1, 9.0, tmp_path, True, None)
    attention.measure_all(run, ["sinks"], None, [])
    assert found == at_once


def test_a_row_that_was_late_is_missing_where_the_limit_is_longer(tmp_path):
    shape, path = attention.SHAPES["tiny"], tmp_path / "saved.jsonl"
    figures, length = attention.Figures(shape, path), shape.lengths[0]
    (late,) = processes.ask(sys.executable, "rows.attention.numbers", patience=0.01)
    figures.add("late", None, length, late)
    figures.add("failed", None, length, {"error": "RESOURCE_EXHAUSTED"})
    figures.add(
        "left out", None, length, {"error": "TimeoutError: left out: about 2.9 s and 1 GiB"}
    )
    for limit, missing in ((0.01, False), (9, True)):
        figures = attention.Figures(shape, path, limit)
        assert (length in figures.missing("late")) == missing, late
        assert length not in figures.missing("failed") + figures.missing("left out")


def test_rows_are_tried_at_the_same_time_and_stay_failed():
    """As many as `threads` says: each waits here until as many others run too."""
    barrier = threading.Barrier(3)
    rows = dict(a=1, b=2, c=3, failed=ValueError("before"))
    results = calls.attempt_each(lambda row: row / (barrier.wait(timeout=30) >= 0), rows, 4)
    assert results == rows


def test_what_takes_too_long_is_left_out_and_keeps_nothing_waiting():
    """One thread for many rows: what has not begun is not late."""
    over = threading.Event()
    rows = [("a", 0.0), ("stuck", 60.0), ("b", 0.0), ("failed", ValueError("before")), ("c", 0.1)]
    found = calls.attempt_within(0.3, lambda row: over.wait(row) or row, rows, 1)
    over.set()
    assert found == {name: row for name, row in rows if name != "stuck"}

    def rows_that_fail():
        yield "a", 0.0
        raise KeyError("no such row")

    with pytest.raises(KeyError, match="no such row"):
        calls.attempt_within(9, time.sleep, rows_that_fail(), 2)
    many = dict.fromkeys(range(30), 0.02)
    assert calls.attempt_within(0.3, lambda row: time.sleep(row) or row, many.items(), 1) == many


def test_calls_take_turns():
    order = []
    times = calls.in_turn({n: lambda n=n: order.append(n) for n in "ab"}, repeats=3)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"} and all(t >= 0 for t in times.values())


def test_a_process_of_peers_that_fails_is_an_error(tmp_path):
    (answer,) = processes.ask(sys.executable, "no_module.no_function")
    assert answer["error"].startswith("ModuleNotFoundError: ")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"name": "x"}\'\nexit 3\n')
    python.chmod(0o755)
    assert list(processes.ask(str(python), "")) == [
        {"name": "x"},
        {"error": "ended with status 3"},
    ]


@pytest.mark.parametrize(
    "seconds, most, n_calls, figures",
    [
        (1, 1000, 2 + 5 + 2 + 20, (1000, 1000)),
        (1, 12, 2 + 5 + 2 + 5, (1000, 1000)),
        (7, 12, 2, (7000, 7000)),
    ],
)
def test_of_slow_calls_fewer_are_timed(monkeypatch, seconds, most, n_calls, figures):
    clock, made = [0.0], []

    def call():
        made.append(0)
        clock[0] += seconds

    monkeypatch.setattr(calls.time, "perf_counter", lambda: clock[0])
    assert calls.time_calls(call, lambda result: None, 5, most) == figures
    assert len(made) == n_calls


def test_one_process_at_a_time_holds_a_lock(tmp_path):
    lock, order = tmp_path / "lock", []

    def later():
        with processes.alone(lock):
            order.append("second")

    with processes.alone(lock):
        waiting = threading.Thread(target=later)
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


SAVES = """#!{python}
import signal, time
from pathlib import Path

def save(*_):
    time.sleep(0.1)
    Path("{path}").write_text("saved")
    print('{{"error": "ended by a signal"}}')
    raise SystemExit({status})

signal.signal(signal.SIGTERM, save)
print('{{"stage": "trains", "limit": 0.2}}', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("status", [0, 143])
def test_a_process_that_is_late_saves_what_it_has(status, tmp_path):
    python, saved = tmp_path / "python", tmp_path / "saved"
    python.write_text(SAVES.format(python=sys.executable, path=saved, status=status))
    python.chmod(0o755)
    answers = list(processes.ask(str(python), "", patience=30))
    assert answers == [{"error": "TimeoutError: more than 0.2 s: trains"}]
    assert saved.read_text() == "saved"


def test_what_would_be_too_much_is_left_out():
    quadratic = {1024: (1.0, 1.0), 2048: (4.0, 4.0), 65536: (1e6, 1e6)}
    assert by_length.left_out(quadratic, 16384, 1e3) is None
    assert "1 s and 1 GiB" in str(by_length.left_out(quadratic, 32768, 1e3))
    assert "64 s" in str(by_length.left_out({1024: (1e3, 1.0)}, 65536, 1e3))
    assert by_length.left_out({}, 1024, 1e3) is None


def test_a_row_does_not_wait_for_numbers_that_failed(tmp_path):
    (tmp_path / "linear.failed").write_text("MemoryError: no")
    with pytest.raises(RuntimeError, match="MemoryError: no"):
        processes.wait_for(tmp_path, "linear")
    by_length.save(tmp_path / "retention.npz", {"q": np.ones(2)})
    with np.load(processes.wait_for(tmp_path, "retention")) as arrays:
        assert arrays["q"].shape == (2,)


def test_a_line_that_was_cut_is_left_out_and_others_go_on(tmp_path):
    file = tmp_path / "a/b.jsonl"
    assert lines.read(None) == lines.read(file) == []
    lines.add(file, {"row": {"a": 1}})
    file.write_text(file.read_text() + '{"row": {"a": 2}')
    assert lines.read(file) == [{"row": {"a": 1}}]
    lines.add(file, [3, None])
    lines.add(file, [4])
    assert lines.read(file) == [{"row": {"a": 1}}, [3, None], [4]]
    assert file.read_text().count("\n") == 4


def test_a_reason_fits_a_cell():
    text = reason(ValueError("a | b\n" + 200 * "x" + " the end"))
    assert text.startswith("ValueError: a / b x") and text.endswith("the end") and len(text) < 161

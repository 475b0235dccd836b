"""How far work is: on a terminal of 80 columns, and where there is none."""

import io
import os
import select
import termios

import pytest

from reformax import progress
from reformax.training import record


class Clock:
    """The time, which passes when it is told to."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


@pytest.fixture
def terminal():
    """(a terminal of 80 columns, a function that reads what was written to it)."""
    outside, inside = os.openpty()
    termios.tcsetwinsize(inside, (24, 80))

    def read():
        written = b""
        while select.select([outside], [], [], 0.1)[0]:  # it comes in parts
            written += os.read(outside, 2**16)
        return written.decode()

    with open(inside, "w") as stream:
        yield stream, read
    os.close(outside)


@pytest.mark.parametrize("title", ["train", "valid"])
def test_without_a_terminal_a_line_comes_at_a_stated_interval(title, clock):
    stream = io.StringIO()
    with progress.Progress(title, 2_000, stream, done=800) as bar:
        for _ in range(95):
            clock.now += 1
            bar.advance(10, "2.500 bits/dim")
    assert stream.getvalue().splitlines() == [
        f"{title}: 1,100 of 2,000, 01:30 left, 2.500 bits/dim",
        f"{title}: 1,400 of 2,000, 01:00 left, 2.500 bits/dim",
        f"{title}: 1,700 of 2,000, 00:30 left, 2.500 bits/dim",
    ]


def test_the_time_left_counts_a_pause_over_all_that_was_done(clock):
    """The first advance compiles; an evaluation, long beside a step, comes again now and then."""
    stream = io.StringIO()
    bar = progress.Progress("train", 400, stream)
    for seconds in (25, *199 * [1], 101, *99 * [1]):
        clock.now += seconds
        bar.advance(1)
    left = {line[7:10]: line.split(", ")[1] for line in stream.getvalue().splitlines()}
    assert left["201"] == "04:58 left"  # as long as the 200 steps after the first, and the pause
    assert left["6 o"] == "06:34 left"  # a second each


def test_the_end_has_a_line_where_the_bar_stays(clock):
    stream = io.StringIO()
    bar = progress.Progress("train", 2, stream, stays=True)
    for _ in range(2):
        bar.advance(1)
    bar.close()
    assert stream.getvalue() == "train: 2 of 2\n"


def test_what_is_not_shown_writes_nothing(terminal, clock):
    for stream in (io.StringIO(), terminal[0]):
        with progress.Progress("train", 2, stream, shown=False) as bar:
            clock.now += 100
            bar.advance(2)
        stream.write("end")
        stream.flush()
    assert terminal[1]() == "end"


def test_a_terminal_without_columns_gets_lines(terminal, clock):
    stream, read = terminal
    termios.tcsetwinsize(stream, (0, 0))
    with progress.Progress("train", 20, stream) as bar:
        for _ in range(2):
            clock.now += 40
            bar.advance(2)
    assert read().splitlines() == ["train: 2 of 20", "train: 4 of 20, 05:20 left"]


def test_80_columns_keep_the_figures(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setattr("sys.stderr", stream)
    bar = record.Bar(199_990, 300_000, unit="bits/token")
    for _ in range(3):
        bar.advance(12.345, 1_016_000.0)
    bar.close()
    last = read().strip().rpartition("\r")[2]
    assert len(last) <= 80
    assert last.startswith("train  67%|") and "199993/300000" in last and " left, " in last
    assert last.endswith("12.345 bits/token, 1,016k tokens/s")


@pytest.mark.parametrize(
    "number, text", [(8123.4, "8,123"), (16_940, "16.9k"), (406_321, "406k"), (1_016_000, "1,016k")]
)
def test_a_speed_has_about_three_digits(number, text):
    assert record.short(number) == text

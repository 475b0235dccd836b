"""The longest sequence and the largest batch that fit: the search, and the sizes that it prints."""

import re
from functools import partial

import pytest

from reformax.models import ReformerLM, TransformerLM
from reformax.ops import flash, local
from reformax.training import capacity, dry_run
from tests.training import tiny, worker

LIMIT = 10**9
CURVES = {
    "line": lambda n: 1e8 + 1000 * n,
    "square": lambda n: 1e8 + 1000 * n + 0.5 * n * n,
    "steep": lambda n: 1e8 + 50 * n * n,
    "steps": lambda n: 1e8 + 1000 * (-(-n // 1024) * 1024) + min(5000 * n, 3e8),
    "few": lambda n: 1e8 + 1e7 * n,
    "three": lambda n: 1e8 + 3e8 * n,
}


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("begin", [8, 512, 2**21])
@pytest.mark.parametrize("name", CURVES)
def test_the_search_ends_near_the_largest_size(name, begin, unit):
    calls = []

    def bytes_at(size):
        calls.append(size)
        return int(CURVES[name](size))

    given = (begin, int(CURVES[name](begin)))
    found = capacity.search(bytes_at, given, 5 * 10**7, LIMIT, unit, 2**31 - 1)
    assert found.is_close and not found.refused and found.n_programs == len(calls) <= 8
    assert len(set(calls)) == len(calls) and all(size % unit == 0 for size in calls)
    assert found.fits == 0 or CURVES[name](found.fits) <= LIMIT
    assert CURVES[name](max(1.1 * found.fits, found.fits + unit)) > LIMIT


def test_a_size_that_is_refused_ends_the_search():
    def bytes_at(size):
        if size > 5000:
            raise ValueError("no more")
        return 10**8 + 1000 * size

    found = capacity.search(bytes_at, (8, 10**8), 5 * 10**7, LIMIT, 1, 2**31 - 1)
    assert 4500 <= found.fits <= 5000 and found.refused == "no more"
    found = capacity.search(bytes_at, (8, 10**8), 5 * 10**7, LIMIT, 1, 4096)
    assert found.fits == 4096 and not found.refused and found.is_close


def sizes_in(lines):
    """The largest length and batch that lines of a dry run have."""
    text = "\n".join(lines)
    length = re.search(r"longest sequence that fits: [\d,]+ x ([\d,]+) tokens", text)[1]
    batch_size = re.search(r"largest batch that fits: ([\d,]+) x [\d,]+ tokens", text)[1]
    return [int(x.replace(",", "")) for x in (length, batch_size)]


def check(monkeypatch, model, mib, **sizes):
    """What is printed fits by the line on the run's own size, and 15% more does not."""
    arguments = worker.arguments(model=None, **sizes) | {"model": model}
    length, batch_size = sizes_in(dry_run.report(**arguments, device_memory=mib / 1024))
    monkeypatch.setattr(dry_run, "_capacities", lambda *args: [])
    for name, size in (("length", length), ("batch_size", batch_size)):
        for n, over in ((size, False), (int(1.15 * size) + 1, True)):
            *_, last = dry_run.report(**arguments | {name: n}, device_memory=mib / 1024)
            assert last.endswith("more than there is") == over, (name, n, last)


def test_the_size_that_is_printed_fits_and_more_does_not(monkeypatch):
    check(monkeypatch, partial(tiny.TinyLM, d_model=64, max_length=2**20), 16, length=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_fn, op", [(TransformerLM, flash.flash()), (ReformerLM, local.local())]
)
def test_the_size_that_is_printed_fits_a_real_model(model_fn, op, monkeypatch):
    sizes = dict(vocab_size=16, d_model=32, d_ff=64, n_heads=2, n_layers=2, attention_type=op)
    check(monkeypatch, partial(model_fn, **sizes), 100, batch_size=4, length=256)


@pytest.mark.slow
def test_positions_end_the_length_and_a_model_too_large_fits_nowhere():
    lines = list(dry_run.report(**worker.arguments(model=dict(max_length=100))))
    assert "longest sequence that fits: 8 x 100 tokens" in lines
    lines = list(dry_run.report(**worker.arguments(model=dict(d_model=512)), device_memory=2**-9))
    assert "longest sequence that fits: none fits" in lines
    assert "largest batch that fits: none fits" in lines


def test_a_task_of_one_length_is_asked_for_no_other(monkeypatch):
    monkeypatch.setattr(capacity, "_MOST_PROGRAMS", 1)
    arguments = worker.arguments()
    task, length = arguments["task"], arguments["length"]

    def train_batch(seed, step, batch_size, n):
        if n != length:
            raise ValueError(f"length={n}: expected {length}")
        return task.train_batch(seed, step, batch_size, n)

    lines = list(dry_run.report(**arguments | {"task": task.replace(train_batch=train_batch)}))
    refused = f"the task has no longer ones: length={2 * length}: expected {length}"
    assert f"longest sequence that fits: not sought, {refused}" in lines
    assert any(line.startswith("largest batch that fits: ") for line in lines)


def test_a_search_that_fails_leaves_the_lines_before_it(monkeypatch):
    def search(*args):
        raise MemoryError("of the host")

    monkeypatch.setattr(capacity, "search", search)
    *others, last = dry_run.report(**worker.arguments())
    assert last == "note: the sizes that fit are not known: MemoryError: of the host"
    assert any("MiB of a device" in line for line in others)

"""Associative recall."""

import functools
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import associative_recall
from benchmarks.harness import lines
from benchmarks.rows import recall as recall_rows
from reformax.ops import flash, lsh
from tests import pages


def test_recall_goes_on_where_a_file_ends(tmp_path, capsys, monkeypatch):
    """What the file has whole is not trained again; a line that an interruption cut is."""
    flags = ["--tiny", f"--out={tmp_path / 'out'}", "--only"]
    trained = learning(monkeypatch)
    associative_recall.main([*flags, "flash"])
    out = tmp_path / "out"
    assert trained == [(None, 16), (16, 32)]  # a length begins with the weights of the one before
    with out.open("a") as file:
        file.write('{"attention": "linear"')
    associative_recall.main([*flags, "flash", "linear", "--only_known"])
    assert len(trained) == 2 and "| linear |" not in capsys.readouterr().out
    associative_recall.main([*flags, "flash", "linear"])
    assert trained[2:] == [(None, 16), (16, 32)]
    assert "| linear | 8 | 0.2 | 50.0% | 25.0% | 0.001 | 2 | 1 |" in capsys.readouterr().out
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    associative_recall.main([*flags, "flash", "linear"])
    assert trained[4:] == [(None, 16), (16, 32)]


def test_recall_goes_on_with_rows_that_began_alike_alone(tmp_path, monkeypatch):
    """A length that other steps of a shorter one came before is another row."""
    trained, out = learning(monkeypatch), tmp_path / "out"
    first, second = SIZES, SIZES._replace(length=32)
    list(associative_recall.models([("flash", (first, second))], MEMBERS, out))
    more = ("flash", (first._replace(steps=4), second))
    whole = out.read_text()
    list(associative_recall.models([more], MEMBERS, out))
    cut = out.read_text().splitlines(keepends=True)[:-1]  # `more` ended after its first length
    out.write_text("".join(cut))
    assert whole in out.read_text() and len(trained) == 4
    list(associative_recall.models([more], MEMBERS, out))
    assert len(trained) == 6


def test_recall_trains_as_many_steps_as_it_was_asked_for(monkeypatch):
    trained = []

    def run(params, opt_state, first, members, rows):
        trained.append((first, len(rows.tokens)))
        return params, opt_state, np.zeros(1)

    monkeypatch.setattr(recall_rows, "trainer", lambda *_: run)
    monkeypatch.setattr(recall_rows, "tester", lambda model: lambda params, rows: np.zeros(1))
    sizes = SIZES._replace(steps=5, stretch=2)
    record = recall_rows.learn((flash.flash(),), sizes, MEMBERS, None, *recall_rows._drawn(sizes))
    assert trained == [(0, 2), (2, 2), (4, 1)] and record[1]["ended_after"] == 5


def test_recall_names_any_symbol():
    sizes = SIZES._replace(vocab_size=200_000)
    drawn = recall_rows.Batches(sizes, (4,))
    inputs = drawn._task.train_batch(0, 0, 4, 16).inputs
    assert inputs.max() > 2**16
    np.testing.assert_array_equal(drawn.stretch(0).tokens[0], inputs)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--steps=1000"], "give as many of each, such as --length 512 --tokens 32768 --steps 600"),
        (["--length", "8", "512", "4096"], "--length is 8: expected at least 16, for 4 pairs"),
    ],
)
def test_recall_refuses_what_it_cannot_train(flags, error, capsys):
    for small in ([], ["--tiny"]):
        with pytest.raises(SystemExit, match="2"):
            associative_recall.main([*flags, *small])
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [flags for name, flags in pages.benchmarks() if name == "associative_recall"]
)
def test_recall_trains_what_a_page_says(flags, monkeypatch):
    asked = []
    monkeypatch.setattr(associative_recall, "models", lambda rows, *_: asked.append(rows) or rows)
    monkeypatch.setattr(associative_recall, "show", lambda *_: None)
    monkeypatch.setattr(associative_recall, "exit_if", lambda _: None)
    associative_recall.main(flags.split())
    assert all(len(stages) == 1 for _, stages in asked[0])  # figures are of one length alone


def learning(monkeypatch) -> list:
    """Recall's models learn at once: where each began, its weights being a length, and ended."""
    trained = []

    def learn(ops, sizes, members, params, batches, tests):
        trained.append((params, sizes.length))
        found = {"rate": 1e-3, "seed": 0, "accuracy": {"4": 0.5, "8": 0.25}}
        return sizes.length, found | {"ended_after": 2, "seconds": 1.0}

    monkeypatch.setattr(associative_recall, "ask", ask_here)
    monkeypatch.setattr(recall_rows, "learn", learn)
    return trained


SIZES = recall_rows.Sizes(8, 16, 64, 4, steps=2, stretch=1, n_eval=4)


MEMBERS = recall_rows.Members([1e-3], [0])


# A process trains a row, and rows that a file has are not trained again, in two other tests.
@pytest.mark.slow
@pytest.mark.parametrize(
    "op", [flash.flash(), pytest.param(lsh.lsh(chunk_len=4), marks=pytest.mark.slow)]
)
def test_models_of_recall_side_by_side_are_those_alone(op, monkeypatch):
    """The best one counts, and a stretch that it names enough of is the last one."""
    for name in ("build", "trainer", "tester"):  # models of the same sizes share their programs
        monkeypatch.setattr(recall_rows, name, functools.cache(getattr(recall_rows, name)))
    sizes, members = SIZES._replace(steps=4, stretch=2), recall_rows.Members([1e-3, 1e-1], [0, 1])
    batches, tests = recall_rows._drawn(sizes)
    params, record = recall_rows.learn((op,), sizes, members, None, batches, tests)
    # Of the four, the two that would change places if seeds came before rates.
    for n, (rate, seed) in list(enumerate(members.each()))[1:3]:
        one = recall_rows.Members([rate], [seed])
        alone, _ = recall_rows.learn((op,), sizes, one, None, batches, tests)
        for x, y in zip(*map(jax.tree.leaves, (params, alone)), strict=True):
            np.testing.assert_allclose(x[n], y[0], rtol=2e-3, atol=2e-4)
    assert record["ended_after"] == 4 and len(record["of_each"]) == 4
    monkeypatch.setattr(recall_rows, "ENOUGH", 0.0)
    assert recall_rows.learn((op,), sizes, members, None, batches, tests)[1]["ended_after"] == 2


def ask_here(python, peer, *, patience, env, **request):
    """The answers of a peer of recall in this process."""
    answers = recall_rows.train(**json.loads(json.dumps(request)))
    return (json.loads(json.dumps(x)) for x in answers if "stage" not in x)


@pytest.mark.parametrize("limit, n", [(None, 3), (1e-9, 0)])
def test_recall_trains_a_row_in_one_process(limit, n, monkeypatch):
    """Without time left none is begun."""
    trained = learning(monkeypatch)
    rows = [(name, (SIZES,)) for name in ("flash", "linear", "routing")]
    found = dict(associative_recall.models(rows, MEMBERS, None, at_once=2, limit=limit))
    assert len(trained) == n and list(found) == rows
    assert [isinstance(x, dict) for (x,) in found.values()] == 3 * [n == 3]


def test_recall_keeps_the_claims_until_all_processes_have_ended(monkeypatch):
    there = []

    def ask(python, peer, *, claims, **request):
        yield {"row": 0, "error": "RuntimeError: no"}
        time.sleep(0.2)  # the row is known by now, and a process may still make a claim
        there.append(Path(claims).is_dir())

    monkeypatch.setattr(associative_recall, "ask", ask)
    assert len(dict(associative_recall.models([("flash", (SIZES,))], MEMBERS, None))) == 1
    assert there == [True]


def test_recall_keeps_what_is_known_of_a_process_that_is_killed(tmp_path, monkeypatch):
    def ask(python, peer, *, rows, **request):
        name, stages = rows[0]
        yield {
            "row": 0,
            "record": {"attention": name, "accuracy": {"4": 0.5}} | stages[0]._asdict(),
        }
        yield {"error": "TimeoutError: more than 3 s"}

    monkeypatch.setattr(associative_recall, "ask", ask)
    longer = SIZES._replace(length=32)
    rows, out = [("flash", (SIZES, longer)), ("linear", (SIZES, longer))], tmp_path / "out"
    found = dict(associative_recall.models(rows, MEMBERS, out, limit=3.0))
    assert found[rows[0]][0]["accuracy"] == {"4": 0.5}
    assert str(found[rows[0]][1]) == str(found[rows[1]][0]) == "TimeoutError: more than 3 s"
    assert [x["attention"] for x in lines.read(out)] == ["flash"]

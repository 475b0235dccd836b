"""Steps of training, against Trax."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import step
from tests.helpers import table_cells

(TINY,) = step.SHAPES["tiny"]


OURS, TRAX = step.REFORMER, f"{step.TRAX}, n_parallel_heads=1"


def measured(rows, repeats):
    return step.measure(rows, TINY, repeats)


@pytest.fixture(scope="module")
def results():
    rows = step.candidates(TINY)
    return measured({name: rows[name] for name in (OURS, TRAX)}, repeats=2)


@pytest.mark.slow
def test_both_train_and_are_of_one_size(results):
    ours, trax = results[OURS], results[TRAX]
    assert len(ours.seconds) == len(trax.seconds) == 2
    sizes = [sum(w.size for w in jax.tree.leaves(x.state[0])) for x in (ours, trax)]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_the_table_compares_with_trax_where_it_ran(results, capsys):
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    ratio = results[TRAX].median / results[OURS].median
    assert table_cells(table, OURS)[-1] == f"{ratio:.2f}"
    assert table_cells(table, TRAX)[-1] == "1.00"


def constant_model(logit: float) -> step.Model:
    """Predicts byte 0 with `logit`, and the rest evenly."""
    return step.Model(
        {"w": jnp.full((), logit)},
        lambda weights, tokens, rng: (
            jnp.zeros((*tokens.shape, step.VOCAB_SIZE)).at[..., 0].set(weights["w"])
        ),
    )


def test_every_step_starts_from_the_weights_of_the_last():
    runner = measured({"row": lambda: constant_model(0.5)}, repeats=3)["row"]
    # Adam moves a weight whose gradient keeps its sign by its learning rate, here in 2 + 3 steps.
    assert float(runner.state[0]["w"]) == pytest.approx(0.5 - 5 * 1e-4, abs=2e-5)


@pytest.mark.parametrize(
    "logit, reason", [(100.0, "first loss"), (math.nan, "the loss of step 1 is nan")]
)
def test_a_model_whose_loss_is_wrong_gets_no_time(logit, reason, capsys):
    rows = {"right": lambda: constant_model(0.0), "wrong": lambda: constant_model(logit)}
    results = measured(rows, repeats=1)
    step.print_table(results, TINY)
    table = capsys.readouterr().out
    assert results["right"].seconds
    assert isinstance(results["wrong"], ArithmeticError)
    assert reason in table_cells(table, "wrong")[1]
    assert set(table_cells(table, "wrong")[2:]) == {"-"}


def test_a_peer_that_fails_is_a_row_and_no_error(monkeypatch, capsys):
    def fail():
        raise MemoryError("out of memory")

    rows = {OURS: lambda: constant_model(0.0), TRAX: fail}
    monkeypatch.setattr(step, "candidates", lambda shape: rows)
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": rows[OURS]})
    step.main(["--tiny", "--repeats=1"])
    printed = capsys.readouterr().out
    assert table_cells(printed, TRAX)[1] == "MemoryError: out of memory"
    assert table_cells(printed, OURS)[-1] == "nan"

    rows[OURS] = fail
    with pytest.raises(SystemExit, match=f"failed: {OURS}, Transformer"):
        step.main(["--tiny", "--repeats=1"])

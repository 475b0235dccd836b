"""The benchmarks of a training step and of generation, on shapes that take no time."""

import math

import jax.numpy as jnp
import pytest

from benchmarks import generation, step

TINY = step.Shape(
    batch=2,
    length=32,
    d_model=16,
    d_ff=32,
    n_heads=2,
    d_head=8,
    n_layers=2,
    local_chunk_len=8,
    lsh_chunk_len=8,
    trax_lsh_chunk_len=8,
)
OURS, TRAX = step.REFORMER, f"{step.TRAX}, n_parallel_heads=1"


@pytest.fixture(scope="module")
def results():
    rows = step.candidates(TINY)
    return step.measure({name: rows[name] for name in (OURS, TRAX)}, TINY, repeats=2)


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_both_train_and_are_of_one_size(results):
    ours, trax = results[OURS], results[TRAX]
    assert len(ours.seconds) == len(trax.seconds) == 2
    assert ours.n_weights == trax.n_weights


def test_the_table_compares_with_trax_where_it_ran(results):
    table = step.table(results, TINY)
    assert cells(table, "model")[-1] == "speed / Trax's, n_parallel_heads=1"
    ratio = results[TRAX].median / results[OURS].median
    assert cells(table, OURS)[-1] == f"{ratio:.2f}"
    assert cells(table, TRAX)[-1] == "1.00"
    alone = step.table({OURS: results[OURS]}, TINY)
    assert "Trax" not in alone
    assert len(cells(alone, OURS)) == len(cells(alone, "model"))


def test_rows_without_peers_are_reformax_alone():
    rows = step.candidates(TINY, peers=False)
    assert rows and not any(step.TRAX in name for name in rows)
    assert any(step.TRAX in name for name in step.candidates(TINY))


def constant_model(logit: float) -> step.Model:
    """Predicts byte 0 with `logit`, and the rest evenly."""
    return step.Model(
        {"w": jnp.full((), logit)},
        lambda weights, tokens, rng: (
            jnp.zeros((*tokens.shape, step.VOCAB_SIZE)).at[..., 0].set(weights["w"])
        ),
    )


def test_every_step_starts_from_the_weights_of_the_last():
    runner = step.measure({"row": lambda: constant_model(0.5)}, TINY, repeats=3)["row"]
    # Adam moves a weight whose gradient keeps its sign by its learning rate, here in 2 + 3 steps.
    assert float(runner.state[0]["w"]) == pytest.approx(0.5 - 5 * 1e-4, abs=2e-5)


@pytest.mark.parametrize(
    "logit, reason", [(100.0, "first loss"), (math.nan, "the loss of step 1 is nan")]
)
def test_a_model_whose_loss_is_wrong_gets_no_time(logit, reason):
    rows = {"right": lambda: constant_model(0.0), "wrong": lambda: constant_model(logit)}
    results = step.measure(rows, TINY, repeats=1)
    table = step.table(results, TINY)
    assert results["right"].seconds
    assert isinstance(results["wrong"], ArithmeticError)
    assert reason in cells(table, "wrong")[1]
    assert set(cells(table, "wrong")[2:]) == {"-"}


def test_a_peer_that_fails_is_a_row_and_no_error(monkeypatch, capsys):
    def fail():
        raise MemoryError("out of memory")

    rows = {OURS: lambda: constant_model(0.0), TRAX: fail}
    monkeypatch.setattr(step, "candidates", lambda shape, peers: rows)
    monkeypatch.setattr(step, "baseline", lambda shape: {"Transformer": rows[OURS]})
    monkeypatch.setitem(step.SHAPES, "cpu", (TINY,))
    monkeypatch.setattr(step.jax, "default_backend", lambda: "cpu")
    step.main(["--repeats=1"])
    printed = capsys.readouterr().out
    assert cells(printed, TRAX)[1] == "MemoryError: out of memory"
    assert cells(printed, OURS)[-1] == "-"

    rows[OURS] = fail
    with pytest.raises(SystemExit, match=f"failed: {OURS}, Transformer"):
        step.main(["--repeats=1"])


def test_a_length_that_no_table_has_is_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--lengths", "7"])
    assert "--lengths" in capsys.readouterr().err


TINY_TEXT = generation.Shape(
    context=40, n_new=9, d_model=8, d_ff=8, n_heads=2, d_head=4, n_layers=1, cycle=("lsh",)
)


def test_generation_beside_the_forward(monkeypatch, capsys):
    """Everything runs; the times are made up: 1 ms for the prompt, 3 for all, 9 for the forward."""

    def in_turn(functions, repeats):
        assert repeats == 1
        made_up = {"all": 0.009, 1: 0.001, TINY_TEXT.n_new: 0.003}
        for function in functions.values():
            function()
        return {name: made_up.get(name, 0.129) for name in functions}

    monkeypatch.delitem(generation.LSH, "strictly causal")
    monkeypatch.setattr(generation, "in_turn", in_turn)
    generation.on_cpu(TINY_TEXT._replace(context=300), repeats=1)
    printed = capsys.readouterr().out
    assert cells(printed, "ordinary")[1:] == ["9.0", "0.250", "36", "4000"]
    assert cells(printed, "128")[1:] == ["128.0", "1000"]


def test_calls_take_turns():
    order = []
    times = generation.in_turn({n: lambda n=n: order.append(n) for n in "ab"}, repeats=3)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"} and all(t >= 0 for t in times.values())


def test_a_missing_peer_is_a_row(monkeypatch, capsys):
    def missing(*_):
        raise ImportError("no module | named torch")

    monkeypatch.setattr(generation, "theirs", missing)
    monkeypatch.setattr(generation, "ours", lambda *_: (0.002, 0.1))
    generation.on_gpu(
        TINY_TEXT._replace(axial_shape=(8, 8)), repeats=1, peers=True, peer_new=4, peer_seconds=60
    )
    printed = capsys.readouterr().out
    assert cells(printed, "reformax, ordinary")[1:] == ["1", "2.000", "500", "0.10"]
    name = "Hugging Face, float32, generate"
    assert cells(printed, name)[2] == "ImportError: no module / named torch"
    assert "batch 1: inf times their fastest" in printed

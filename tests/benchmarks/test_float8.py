"""Steps in bfloat16 and with FP8 products."""

import math

import jax
import pytest

from benchmarks import float8
from benchmarks.harness.calls import Program
from benchmarks.harness.training_step import Shape
from tests.helpers import table_cells


class FakeStep:
    """Takes a millisecond per row's number, and writes down the rows that ran."""

    def __init__(self, number, ran):
        self.number, self.ran = number, ran
        self.shape, self.seconds = float8.TINY, []
        self.program = Program(None, 0.0, 1.0)

    def compile(self):
        return self

    def warm_up(self):
        if self.number == 3:
            raise ArithmeticError("first loss nan")
        return self

    def release(self):
        return self

    def turn(self):
        self.ran.append(self.number)
        self.seconds.append(self.number / 1e3)
        return self


def test_rows_run_in_one_order_and_then_in_the_other_and_one_that_fails_says_why(
    monkeypatch, capsys
):
    ran, made, micro = [], [], []

    def step(shape, accumulate, options):
        made.append(options)
        micro.append(accumulate)
        return FakeStep(len(made), ran)

    monkeypatch.setattr(float8, "training_step", step)
    with pytest.raises(SystemExit, match="failed: float8, amax_history=16"):
        float8.main(["--tiny", "--tokens", "32", "--repeats=3"])
    assert ran == [1, 2, 2, 1, 1, 2]
    assert micro == [1] * 3
    assert [(x["dtype"], x.get("amax_history", 0)) for x in made] == [
        ("bfloat16", 0),
        ("float8", 0),
        ("float8", 16),
    ]
    printed = capsys.readouterr().out
    assert table_cells(printed, "float8")[1:3] == ["2.0", "16,000"]
    assert table_cells(printed, "float8")[-1] == "0.500"
    failed = table_cells(printed, "float8, amax_history=16")
    assert failed[1] == "ArithmeticError: first loss nan"


def test_a_number_of_tokens_that_has_no_table_is_refused(capsys):
    with pytest.raises(SystemExit):
        float8.main(["--tiny", "--tokens", "31"])
    assert "--tokens has {31}: expected some of {32, 128}" in capsys.readouterr().err


def test_operations_are_six_a_weight_and_those_of_attention():
    """Embeddings are looked up; norms and biases take no part in products either."""
    (shape, _), (longer, _) = float8.STEPS["gpu"]
    assert shape.tokens == 16_384 and longer.tokens == 65_536
    assert float8.STEPS["gpu"][1][1] == 4
    model = float8.model(shape, float8.ROWS["float8"])
    assert model.remat_policy == "all" and not model.scan_layers
    weights = jax.eval_shape(
        lambda key: model.init_params(key, (1, shape.length)), jax.random.PRNGKey(0)
    )
    n_weights = sum(x.size for x in jax.tree.leaves(weights)) - weights["embedding"].size
    assert n_weights == pytest.approx(1.31e9, rel=1e-2)
    # A token's logits and sums of values, each of half the row, in forward and backward passes.
    attention = 24 * 3 * 2 * (2 * 2048 * shape.length / 2)
    assert shape.flop / shape.tokens - attention == pytest.approx(6 * n_weights, rel=1e-3)
    assert shape.rates(0.3234) == pytest.approx((50_662, 460), rel=1e-3)


def test_a_first_loss_that_is_no_guess_gets_no_time():
    shape = Shape(32, 2, 2, 2, 16, vocab_size=50, masked=False)
    assert shape.checked(4.0) == 4.0
    for loss in (2.5, math.nan):
        with pytest.raises(ArithmeticError, match="expected about 3.912"):
            shape.checked(loss)

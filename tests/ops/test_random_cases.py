"""Random calls of every op against the float64 oracle: a few, or as many as a night has.

    pytest -m 'slow or not slow' tests/ops/test_random_cases.py --cases=10000

A call's time is nearly all compilation. Options, sizes and masks are therefore drawn from a few
programs of each row, and every program gets many contents.
"""

import functools
import random
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ops.reference import LONGEST
from tests.ops.rows import ROWS, Row, Shape, one_of_each_kind, over
from tests.ops.test_against_oracle import DROPOUT, attend_and_differentiate, check

LENGTHS = (1, 3, 17, 64, 97, LONGEST)
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
CASES_OF_A_PROGRAM = 40
BY_NAME = {row.name: row for row in ROWS}


class Program(NamedTuple):
    """A call that is compiled: what `check` takes besides the seed."""

    dtype: Any
    case: dict[str, Any]


@functools.lru_cache(maxsize=64)
def program(name: str, number: int) -> Program:
    """The program of a row's number, always the same."""
    row, rng = BY_NAME[name], random.Random(f"{name} {number}")
    options = {option: rng.choice(values) for option, values in row.options.items()}
    length = rng.choice(LENGTHS)
    causal, dropout = row.causal(rng.random() < 0.5), row.dropout(rng.choice((0.0, DROPOUT)))
    shape = Shape(
        batch=rng.randint(1, 2),
        n_queries=length,
        n_keys=rng.choice(LENGTHS) if row.op().cross else length,
        n_heads=rng.randint(1, 3),
    )
    bias = row.bias and rng.random() < 0.3
    case = dict(
        options=options,
        causal=causal,
        packed=rng.random() < 0.5,
        bias_axes=tuple(rng.random() < 0.5 for _ in range(4)) if bias else None,
        dropout=dropout,
        shape=shape,
        d_qk=rng.choice((4, 1, 6)),
        d_v=rng.choice((4, 1, 3)),
        run=attend_and_differentiate(row.op(**options), causal, dropout),
    )
    return Program(jnp.float32 if rng.random() < 0.7 else jnp.bfloat16, case)


@over(ROWS, quick=one_of_each_kind)
def test_random_cases(row: Row, pytestconfig: pytest.Config):
    n_cases = -(-pytestconfig.getoption("--cases") // len(ROWS))
    n_programs = -(-n_cases // CASES_OF_A_PROGRAM)

    @settings(
        max_examples=n_cases,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(
        number=st.integers(0, n_programs - 1),
        seed=st.integers(0, 2**31),
        equal=st.sampled_from((False, False, False, True)),
    )
    def try_case(number, seed, equal):
        dtype, case = program(row.name, number)
        check(row, TOLERANCES[dtype], dtype, **case, seed=seed, equal=equal)

    try_case()

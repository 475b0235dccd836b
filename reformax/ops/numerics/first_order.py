"""Raises an error where a gradient without a second derivative is differentiated again."""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_jvp
def first_order(inputs: Any) -> Any:
    """The inputs of a pass, any tree; `NotImplementedError` when the pass is differentiated."""
    return inputs


@first_order.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "this gradient has no second derivative: use an op that has one with impl='xla', such as "
        "dense.dense(impl='xla')"
    )

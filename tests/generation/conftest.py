"""Short runs of the same settings share what XLA compiled."""

from tests.training.conftest import compile_once

__all__ = ["compile_once"]

"""Helpers of the tests of data."""

import contextlib

import numpy as np
import pytest


@pytest.fixture
def fails_in_one_line():
    """A context whose error is of the type, matches the pattern and is a single line."""

    @contextlib.contextmanager
    def context(error, match):
        with pytest.raises(error, match=match) as raised:
            yield
        assert "\n" not in str(raised.value)

    return context


@pytest.fixture
def content():
    """The bytes of a task's split, read through its evaluation batches."""

    def read(task, *splits):
        found = []
        for split in splits or ("train", "valid", "test"):
            for batch in task.eval_batches(split, 16, 4096, 4096):
                found.append(batch.targets[batch.weights == 1])
        return np.concatenate(found).astype(np.uint8).tobytes()

    return read

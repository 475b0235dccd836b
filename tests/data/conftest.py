"""Helpers of the tests of data."""

import contextlib
import os

import numpy as np
import pytest

from reformax.data import piece_files, text, token_files


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


@pytest.fixture
def in_files(monkeypatch, tmp_path):
    """A context in which this process puts every text in files, of many shards."""

    @contextlib.contextmanager
    def context(shard=9000):
        with monkeypatch.context() as patch:
            patch.setattr(text, "SMALL", 0)
            patch.setattr(text, "SMALL_PIECES", 0)
            patch.setattr(token_files, "SHARD", shard)
            patch.setattr(piece_files, "_SPAN", 2**15)
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            patch.setattr(os, "sched_getaffinity", lambda _: {0})
            yield tmp_path / "cache" / "reformax" / "texts"

    return context

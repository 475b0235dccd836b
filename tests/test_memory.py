"""Sizes beyond the machine's memory are refused before they are computed."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from reformax import memory
from reformax.declared import SettingError
from reformax.generation import decoding
from reformax.models import TransformerLM
from reformax.training import loop
from tests.layers import plain
from tests.training import worker

ROOT = Path(__file__).resolve().parents[1]


def test_what_there_is():
    assert 2**28 < memory.available() < 2**60


@pytest.mark.parametrize(
    "line, place",
    [
        ("0::/a/b", "a/b/memory.max"),
        ("0::/a/b", "a/memory.max"),  # of the one that it is in
        ("0::/a/b", "unified/a/b/memory.max"),
        ("0::/", "memory.max"),  # a container's own
        ("4:cpu,memory:/a/b", "memory/a/b/memory.limit_in_bytes"),
        ("4:memory:/outside", "memory/memory.limit_in_bytes"),
    ],
)
def test_a_containers_limit_counts(line, place, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OF_PROCESS", tmp_path / "of_process")
    (tmp_path / "of_process").write_text(f"9:cpuset:/a\n{line}\n")
    path = tmp_path / "cgroup" / place
    path.parent.mkdir(parents=True)
    path.write_text("123456\n")
    assert memory.available() == 123456
    path.write_text("max\n")
    assert memory.available() > 123456


def test_a_limit_of_the_shell_counts_and_needs_no_jax():
    code = "import sys; from reformax import memory; print(memory.host(), 'jax' in sys.modules)"
    command = f'ulimit -v 2000000; exec "{sys.executable}" -c "{code}"'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.split() == [b"2048000000", b"False"]


def test_bytes_of_arrays_and_of_shapes():
    tree = {"a": jnp.zeros((3, 4), jnp.float32), "b": jax.ShapeDtypeStruct((10,), jnp.bfloat16)}
    assert memory.size_of(tree) == 48 + 20


@pytest.fixture
def small(monkeypatch):
    """A machine of a mebibyte."""
    monkeypatch.setattr(memory, "available", lambda: 2**20)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model": {"d_model": 4096}}, "parameters, their gradient and the optimizer's state take"),
        ({"batch_size": 2**13}, "tokens of 8,192 rows of 16 take .* lower batch_size or length"),
        ({"eval_length": 2**14}, "lower eval_batch_size or eval_length"),
        ({"model": {"d_model": 64}, "length": 300}, "features of 8 rows of 300 positions take"),
    ],
)
def test_training_that_does_not_fit(small, settings, message, tmp_path):
    with pytest.raises(SettingError, match=message) as error:
        loop.train(tmp_path, **worker.arguments(**settings))
    assert "\n" not in str(error.value) and not (tmp_path / "checkpoints" / "1").exists()


def test_training_that_fits(small, tmp_path):
    assert loop.train(tmp_path, **worker.arguments(steps=1))["step"] == 1


def test_caches_that_do_not_fit():
    sizes = dict(d_model=16, d_ff=16, n_heads=2, n_layers=1)
    model = TransformerLM(256, **sizes, mode="eval")
    params = plain.init(model, (1, 8))
    with pytest.raises(SettingError, match=r"caches of 1 rows of 2,147,483,647 tokens take .* GiB"):
        decoding.generate(model, params, [[1]], 4, max_length=2**31 - 1)


def resident() -> int:
    """The resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_freed_goes_back_to_the_system():
    """Blocks between which some are in use, and which refer to themselves."""
    blocks = []
    for _ in range(64_000):
        block = [bytearray(1024), None]
        block[1] = block
        blocks.append(block)
    kept, held = [block[0] for block in blocks[::64]], resident()
    del block, blocks
    memory.give_back()
    assert resident() < held - 2**25 and len(kept) == 1000

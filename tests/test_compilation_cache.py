"""The compilation cache of the scripts: where it is, when it is off, and that it changes no bit."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.cli import compilation_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def config():
    """Sets what the test likes of JAX's settings of the cache, until its end."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    yield jax.config.update
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def home(tmp_path, monkeypatch, config):
    """A user's home, and JAX without a cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    config("jax_compilation_cache_dir", None)
    return tmp_path


def found():
    compilation_cache.use()
    return jax.config.jax_compilation_cache_dir


def test_the_cache_is_a_folder_of_the_user_s(home, config, monkeypatch):
    assert found() == str(home / ".cache/reformax/jax")
    assert (home / ".cache/reformax/jax").stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_persistent_cache_min_compile_time_secs == compilation_cache.SHORTEST
    config("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert found() == str(home / "elsewhere/reformax/jax")


def test_jax_s_own_settings_come_first(home, config):
    config("jax_compilation_cache_dir", str(home / "mine"))
    assert found() == str(home / "mine")
    config("jax_compilation_cache_dir", None)
    config("jax_enable_compilation_cache", False)
    assert found() is None
    assert not list(home.iterdir())


def test_a_home_that_cannot_be_written_costs_the_cache_alone(home):
    (home / ".cache").write_text("")
    assert found() is None


def test_a_user_without_a_home_has_none(home, monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compilation_cache.Path, "home", fail)
    assert found() is None


def test_the_oldest_programs_make_room(tmp_path):
    for age in range(5):
        (tmp_path / f"program{age}").write_bytes(bytes(10))
        os.utime(tmp_path / f"program{age}", (1e9 - age, 1e9 - age))
    compilation_cache._prune(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program0", "program1", "program2"]


def test_a_program_of_the_cache_computes_the_same_bits(config):
    """Two functions of one text: the second one's program is read."""
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    config("jax_persistent_cache_min_compile_time_secs", 0)
    config("jax_persistent_cache_min_entry_size_bytes", -1)

    def make():
        def loss(x, w):
            return jnp.sum(jnp.tanh(x @ w).sum(axis=0) * jax.nn.softmax(x)[:33])

        return jax.jit(jax.grad(loss))

    x, w = jax.random.normal(jax.random.key(0), (2, 33, 33))
    one = make()(x, w)
    hits.clear()
    other = make()(x, w)
    assert "/jax/compilation_cache/cache_hits" in hits
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

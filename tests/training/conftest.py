"""Compiles each short run once: XLA takes most of its time."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_once():
    """Runs of the same settings share what XLA compiled, in whichever process of the session."""
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)

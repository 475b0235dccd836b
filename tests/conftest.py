"""Settings that every test shares."""

import os

import hypothesis

# Set before the first import of JAX. JAX_PLATFORMS=cuda pytest -n 0 runs the tests on
# a GPU, which is one process's.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# An example's first run compiles, so its time says nothing. In CI every run draws the same ones.
hypothesis.settings.register_profile(
    "reformax", deadline=None, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("reformax")

"""Settings that every test shares."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib
from importlib import metadata

import hypothesis
import pytest

from tests.quick_cases import COLLECTED, QUICK, case_of

# What is imported stays: collections of garbage among it were a fifth of the time to import it.
gc.disable()

# Set before the first import of JAX. JAX_PLATFORMS=cuda pytest -n 0 runs the tests on
# a GPU, which is one process's.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A GPU's products of float32 are of 10 bits of each number by default; tests compare them to 1e-5.
if os.environ["JAX_PLATFORMS"] != "cpu":
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# Most of a test's time is XLA compiling a program that runs once or twice. Here it does so without
# LLVM's optimisation of the loops, and with its older, quicker emitter of fused ones where it has
# that. `tests.helpers.default_jit` compiles as in use; XLA_FLAGS of one's own come after these.
if os.environ["JAX_PLATFORMS"] == "cpu":
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])

# The scripts would keep what they compile in the user's folder. Here all processes of a session
# share one, with every program in it; the process that made it deletes it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="reformax.tests.")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# No test reads which line of Python an operation of a program is of.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# A session starts a hundred processes, each of which would compile the package's Python anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under nohup a run ignores SIGHUP, which tests send.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example's first run compiles, so its time says nothing. In CI every run draws the same ones.
hypothesis.settings.register_profile(
    "reformax", deadline=None, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("reformax")


# Their tests wait for processes, the longest for a minute. They come first, so that at the end no
# worker is left alone with one.
LONGEST = ("test_devices.py", "test_docs.py", "test_processes.py")


def pytest_addoption(parser):
    parser.addoption(
        "--cases", type=int, default=60, help="of tests/ops/test_random_cases.py, over all rows"
    )
    parser.addoption(
        "--part",
        default="1/1",
        metavar="I/N",
        help="of slow tests those of the i-th of n parts",
    )


def pytest_itemcollected(item):
    """A case that the line of its test leaves out is slow."""
    file, test, case = case_of(item)
    if case not in QUICK.get(file, {}).get(test, [case]):
        item.add_marker("slow")


def pytest_collection_modifyitems(config, items):
    """Leaves slow tests of other parts out: a test's name says which part it is of.

    A test that divides its own cases by `--part` is of each part. The longest come first.
    """
    config.stash[COLLECTED] = [case_of(item) for item in items]
    part, n_parts = map(int, config.getoption("--part").split("/"))
    taken, left_out = [], []
    for item in items:
        of_part = zlib.crc32(item.nodeid.encode()) % n_parts == part % n_parts
        divided = item.get_closest_marker("slow") and not item.get_closest_marker("every_part")
        (left_out if divided and not of_part else taken).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(taken, key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """What is imported by now stays, so that no garbage collection need look through it again."""
    gc.set_threshold(10_000, 10, 10)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_programs_of_others():
    """What a module has traced and compiled goes with it.

    JAX would keep it all: gigabytes, which each garbage collection of later tests looks through.
    """
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_config_of_others():
    """What the test before has parsed is no config of this one."""
    if gin := sys.modules.get("gin"):
        gin.clear_config()


@pytest.fixture(scope="session", autouse=True)
def drawing():
    """What draws a run's figure.

    Only tests that ask for `figures` have it: matplotlib took half of a short run's time.
    """
    from reformax.training import curves

    draw = curves.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda lines, *_: b"\x89PNG of %d lines" % len(lines))
        yield draw


@pytest.fixture
def figures(drawing, monkeypatch):
    """Runs draw their figures."""
    monkeypatch.setattr("reformax.training.curves.draw", drawing)


@pytest.fixture
def no_search(monkeypatch):
    """A dry run looks for no largest length and batch: each size that it tries is a compilation."""
    monkeypatch.setattr("reformax.training.dry_run._capacities", lambda *args: [])


@pytest.fixture
def call(monkeypatch, capsys):
    """Calls a script's `main` as from a command line: `(exit code, stdout, stderr)`."""
    import gin

    from reformax.cli import errors

    def run(main, *flags):
        gin.clear_config()  # a process begins with none
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
        try:
            code = errors.exit_code(main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

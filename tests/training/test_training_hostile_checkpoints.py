"""A stranger's checkpoint costs one line: no abort, no memory beyond that of the model."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts

from reformax.training import arrays, loop, manifest
from reformax.training.checkpoint import Checkpoints
from tests.training import worker
from tests.training.test_training_checkpoint import save_arrays
from tests.training.test_training_damage import edit, rewrite_manifest

pytestmark = pytest.mark.usefixtures("reader_process")

NAME = "params.hidden.kernel"  # float32 [8, 8]
LARGE = 10**10  # numbers
MOST_MB = 700  # of the process that reads: its libraries, 256 MB to decode in, and the tensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    loop.train(folder, **worker.arguments(steps=2, checkpoint_every=2))
    return folder


@pytest.fixture
def checkpoint(whole, tmp_path):
    """The folder of a copy's checkpoint."""
    return Path(shutil.copytree(whole, tmp_path / "run")) / "checkpoints/2"


def like(folder):
    """The tree that the checkpoint was written from: names, shapes, dtypes."""
    tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    found = {}
    for name, (shape, dtype) in tensors.items():
        *path, last = name.split(".")
        at = found
        for part in path:
            at = at.setdefault(part, {})
        at[last] = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return found


def read(folder):
    return Checkpoints(folder.parent.parent).restore(2, like(folder))


def database(folder):
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / 'arrays'}/"}}


def store(folder, shape, chunks, key=None, value=b"", dtype="<f4"):
    """Sets a tensor's shape and chunks, and a chunk's bytes."""
    kv = ts.KvStore.open(database(folder)).result()
    described = json.loads(kv.read(f"{NAME}/.zarray").result().value)
    described |= {"shape": shape, "chunks": chunks, "dtype": dtype}
    kv.write(f"{NAME}/.zarray", json.dumps(described).encode()).result()
    if key is not None:
        kv.write(f"{NAME}/{key}", value).result()
    rewrite_manifest(folder)


def compressed_chunk(folder):
    """A chunk of 256 bytes that decodes to 512 MB of zeros."""
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    metadata = {"compressor": {"id": "zstd"}, "shape": [2**29], "chunks": [2**29], "dtype": "|i1"}
    metadata |= {"fill_value": 1}  # what is equal to it is not stored
    big = ts.open(spec | {"metadata": metadata, "create": True}).result()
    big.write(np.zeros(2**29, np.int8)).result()
    store(folder, [8, 8], [8, 8], "0.0", big.kvstore.read("0").result().value)


def hole(name, size):
    """A file of many bytes, none of which is on the disk."""

    def harm(folder):
        noted = json.loads((folder / manifest.FILE).read_text())
        with open(folder / name, "ab") as file:
            file.truncate(size)
        if name != manifest.FILE:
            noted[name] = {"size": size, "crc32": 0}
            (folder / manifest.FILE).write_text(json.dumps(noted))

    return harm


def garbage(name):
    def harm(folder):
        (folder / name).write_bytes(b"\xff\x00{" * 99)
        rewrite_manifest(folder)

    return harm


TENSORS = {NAME: [[LARGE], "float32"]}
HOSTILE = {
    "a damaged index": (garbage("arrays/manifest.ocdbt"), "cannot be decoded"),
    "a tensor of 40 GB in a chunk": (
        lambda f: store(f, [LARGE], [LARGE]),
        f"{NAME} is of shape .{LARGE},., and of shape .8, 8. in checkpoint.json",
    ),
    "a chunk of 40 GB": (lambda f: store(f, [8, 8], [8, LARGE]), "has chunks of .8, 10000000000."),
    "wide numbers": (lambda f: store(f, [8, 8], [8, 8], dtype="<f8"), "is of float64, and"),
    "a chunk that decodes to much": (
        compressed_chunk,
        "reading .* ends in SIG|not be dec",
    ),
    "a chunk of other bytes": (
        lambda f: store(f, [8, 8], [8, 8], "0.0", b"x" * 99),
        "not be dec",
    ),
    "a long description": (
        hole("checkpoint.json", 2**33),
        "checkpoint.json has .* bytes: exp",
    ),
    "a long manifest": (hole(manifest.FILE, 2**33), "manifest.json has .* bytes: expected"),
    "a long file": (
        hole("arrays/d/1", 2**41),
        "its files have 2,199,023,.* bytes",
    ),
    "texts for numbers": (edit("tensors", {NAME: [[8, 8], "S1000000000"]}), "has no tensors that"),
    "objects for numbers": (edit("tensors", {NAME: [[8, 8], "object"]}), "has no tensors that"),
    "tensors of tensors": (
        edit("tensors", {NAME: [[8], "(1000000,)f8"]}),
        "has no tensors that",
    ),
}


PROGRAM = """
import re, subprocess, sys, threading, time
from pathlib import Path
from tests.training import test_training_hostile_checkpoints as test
peak, begun = [0], []
def note(pid):
    try: text = Path(f"/proc/{pid}/status").read_text()
    except OSError: return
    if found := re.search(r"VmHWM:\\s+(\\d+)", text): peak.append(int(found[1]))
def watch():
    while True:
        for task in Path("/proc/self/task").glob("*/children"):
            for pid in task.read_text().split(): note(pid)
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
try: test.read(Path(sys.argv[1]))
except ValueError as error: print(str(error).replace("\\n", " NEWLINE "))
note("self")
print(max(peak) / 1024)
"""


def peak_mb(folder):
    """The memory of the processes that read it, of each at the most, and the line that they say."""
    command = [sys.executable, "-c", PROGRAM, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *said, peak = done.stdout.splitlines()
    return float(peak), " ".join(said)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_told_in_a_line(checkpoint, name):
    harm, words = HOSTILE[name]
    tree = like(checkpoint)
    harm(checkpoint)
    with pytest.raises(ValueError, match=words) as error:
        Checkpoints(checkpoint.parent.parent).restore(2, tree)
    line = str(error.value)
    assert "\n" not in line and len(line) < 500 and "checkpoints/2" in line
    assert "get it again from where it was trained" in line or "is damaged" in line


def test_a_hostile_checkpoint_takes_little_memory(checkpoint):
    compressed_chunk(checkpoint)
    peak, said = peak_mb(checkpoint)
    assert "get it again" in said and "NEWLINE" not in said
    assert peak < MOST_MB


def test_sizes_are_compared_with_the_models_before_a_file_is_read(checkpoint, monkeypatch):
    tree = like(checkpoint)
    edit("tensors", {NAME: [[LARGE, 99], "float32"]})(checkpoint)
    monkeypatch.setattr(manifest, "damage", lambda *args: pytest.fail("a file is read"))
    monkeypatch.setattr(arrays, "restore", lambda *args: pytest.fail("a tensor is read"))
    checkpoints = Checkpoints(checkpoint.parent.parent)
    with pytest.raises(ValueError, match="is of another model: .* has no such tensor there"):
        checkpoints.restore(2, tree)
    # Where the model, which is the folder's too, is of that size.
    with pytest.raises(ValueError, match=r"the tensors of .* take 3,688.0 GiB or more"):
        checkpoints.restore(2, like(checkpoint))


def test_of_a_checkpoint_no_more_is_read_than_is_wanted(checkpoint, monkeypatch):
    asked = []
    real = arrays.restore
    monkeypatch.setattr(arrays, "restore", lambda f, x: asked.append(x) or real(f, x))
    tree = like(checkpoint)
    found, _ = Checkpoints(checkpoint.parent.parent).restore_params(2, tree["params"])
    assert {name.partition(".")[0] for name in asked[0]} == {"params"}
    everything, _ = Checkpoints(checkpoint.parent.parent).restore(2, tree)
    jax.tree.map(np.testing.assert_array_equal, found, everything["params"])
    # A file that orbax alone would look at is none of it.
    garbage("arrays/_sharding")(checkpoint)
    again, _ = Checkpoints(checkpoint.parent.parent).restore(2, tree)
    jax.tree.map(np.testing.assert_array_equal, again, everything)


@pytest.mark.parametrize("seed", range(4))
def test_no_changed_byte_ends_this_process(checkpoint, seed):
    rng = np.random.default_rng(seed)
    tree = like(checkpoint)
    paths = [p for p in sorted((checkpoint / "arrays").rglob("*")) if p.is_file()]
    for _ in range(2):
        path = paths[rng.integers(len(paths))]
        data = bytearray(path.read_bytes())
        at = rng.integers(len(data), size=rng.integers(1, 9))
        for i in at:
            data[i] = rng.integers(256)
        path.write_bytes(data)
    rewrite_manifest(checkpoint)
    try:
        found, _ = Checkpoints(checkpoint.parent.parent).restore(2, tree)
    except ValueError as error:
        assert "\n" not in str(error) and "get it again" in str(error)
    else:
        jax.tree.map(lambda x, like: x.shape == like.shape or pytest.fail("shape"), found, tree)


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """Puts a program in the reader's place."""

    def put(text):
        (tmp_path / "program.py").write_text(f"import json, os, signal, sys\n{text}\n")
        monkeypatch.setattr(arrays.array_reader, "__file__", str(tmp_path / "program.py"))

    return put


@pytest.mark.parametrize(
    "ending, words",
    [("os.abort()", "SIGABRT"), ("os.kill(os.getpid(), 11)", "SIGSEGV"), ("sys.exit(3)", "code 3")],
)
def test_the_reader_that_dies_of_what_it_reads_is_told(checkpoint, reader, ending, words):
    reader(ending)
    with pytest.raises(ValueError, match=f"reading its arrays ends in .*{words}.*get it again"):
        read(checkpoint)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_the_reader_that_the_system_ends_is_no_damage(checkpoint, reader, name):
    reader(f"os.kill(os.getpid(), signal.{name})")
    with pytest.raises(OSError, match=f"cannot be read: .* ended by {name}.*free memory, and run"):
        read(checkpoint)


def test_signals_of_the_terminal_do_not_reach_the_reader(checkpoint, reader):
    reader("print(json.dumps({'unfit': f'session {os.getsid(0)}, process {os.getpid()}'}))")
    with pytest.raises(ValueError, match=r"session (\d+), process \1"):
        read(checkpoint)
    reader(
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from reformax.training import array_reader as real\n"
        "def tell(*args): raise real.Unfit(str([signal.getsignal(n) for n in (1, 2, 15)]))\n"
        "real.read = tell\nreal.main()"
    )
    with pytest.raises(ValueError, match="(Handlers.SIG_IGN: 1>.*){3}"):
        read(checkpoint)


def test_the_reader_imports_nothing_of_the_working_directory(checkpoint, monkeypatch, tmp_path):
    for module in ("numpy", "tensorstore", "mmap", "json"):
        (tmp_path / f"{module}.py").write_text("open('marker', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    read(checkpoint)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("stack", [2**20, 2**29, resource.RLIM_INFINITY])
def test_stacks_of_any_size_have_room(checkpoint, stack):
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, before[1]))
    try:
        read(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)


def test_no_more_threads_read_than_there_is_room_for(checkpoint):
    """On a machine of any number of cores; more tensors than threads are read."""
    state = {f"w{i}": np.full((1000, i + 1), i, np.float32) for i in range(40)}
    (checkpoint / "many").mkdir()
    save_arrays(checkpoint / "many/arrays", state)
    program = (
        "import sys; from pathlib import Path; import numpy as np; import tensorstore\n"
        "from reformax.training import array_reader as reader\n"
        "n = lambda: len(list(Path('/proc/self/task').iterdir()))\n"
        "before = n()\n"
        "x = {f'w{i}': [np.zeros((1000, i + 1), np.float32)] for i in range(40)}\n"
        "want = lambda a: reader.Wanted(a.shape, a.dtype, [reader.whole(a.shape)])\n"
        "reader.read(Path(sys.argv[1]), {n: want(a) for n, (a,) in x.items()}, x)\n"
        "assert all((a == int(name[1:])).all() for name, (a,) in x.items())\n"
        "print(n() - before)\n"
    )
    command = [sys.executable, "-c", program, checkpoint / "many"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= arrays.array_reader.THREADS

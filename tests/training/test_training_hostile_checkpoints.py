"""A stranger's checkpoint costs one line, before its tensors are read."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts

from reformax.training import arrays, loop, manifest
from reformax.training.checkpoint import Checkpoints
from tests.training import worker
from tests.training.test_training_damage import edit, rewrite_manifest

NAME = "params.hidden.kernel"  # float32 [8, 8]
LARGE = 10**10  # numbers


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

"""Copies of checkpoints in an object store, of which a local fake has neither rename nor lock."""

import contextlib
import itertools
import json
import re
import shutil
import threading

import fsspec
import jax
import numpy as np
import pytest
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem

from reformax.declared import SettingError
from reformax.training import loop, manifest
from reformax.training.checkpoint import Checkpoints, ownership
from reformax.training.checkpoint.copies import Copies
from reformax.training.processes import Processes
from tests.training import worker

ADDRESS = "s3://bucket/run"
STATE = {"a": np.arange(6.0), "b": np.ones((2, 3), np.float32)}


class Store(MemoryFileSystem):
    """An object store: whole objects by key, and a limit of writes."""

    protocol = ("s3",)
    store: dict = {}
    pseudo_dirs: list = [""]
    left = 10**9  # writes

    def mv(self, *args, **kwargs):
        raise NotImplementedError("an object store has no rename")

    rename = move = mv_file = mv

    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            Store.left -= 1
            if Store.left < 0:
                raise PermissionError("AccessDenied:\nthe key has expired")
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    fsspec.register_implementation("s3", Store, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    Store.clear_instance_cache()
    monkeypatch.setattr(Store, "store", {})
    monkeypatch.setattr(Store, "pseudo_dirs", [""])
    monkeypatch.setattr(Store, "left", 10**9)
    yield Store.store
    backend.fsspec_backend._get_filesystem.cache_clear()


def saved(folder, steps, address=ADDRESS, **options):
    checkpoints = Checkpoints(folder, copies=address, **options)
    for step in steps:
        checkpoints.save(step, {name: x + step for name, x in STATE.items()})
        checkpoints.wait()
    checkpoints.close()
    return checkpoints


def copies():
    return Copies(ADDRESS, Processes("alone"))


def test_the_store_has_what_is_kept_and_another_folder_goes_on_from_it(store, tmp_path):
    here = saved(tmp_path / "here", [1, 2, 3])
    assert here.steps() == copies().steps() == [2, 3] and not here.notes
    assert not [key for key in store if "/1/" in key]
    there = Checkpoints(tmp_path / "there", copies=ADDRESS)
    assert there.newest_whole() == 3 and there.steps() == [2, 3]
    # Another run's copies would be gone on from as well.
    (note,) = there.notes
    assert note.endswith(f"goes on from the copies in checkpoint_copies={ADDRESS}, of steps 2, 3")
    found, _ = there.restore(3, STATE)
    jax.tree.map(np.testing.assert_array_equal, found, {n: x + 3 for n, x in STATE.items()})
    # The store is looked at by a folder alone that has no checkpoint.
    saved(tmp_path / "there", [4], None)
    assert Checkpoints(tmp_path / "there", copies=ADDRESS).newest_whole() == 4


def test_a_copy_that_was_cut_short_is_none(store, tmp_path, monkeypatch):
    saved(tmp_path / "here", [1])
    for left in itertools.count():  # saves of one state may differ in their number of files
        monkeypatch.setattr(Store, "left", left)
        checkpoints = saved(tmp_path / "here", [2])
        if not checkpoints.notes:
            break
        (note,) = checkpoints.notes
        assert "checkpoint 2 is saved and not copied to s3://bucket/run (PermissionError" in note
        assert "AccessDenied: the key has expired" in note and "\n" not in note
        assert checkpoints.steps() == [1, 2] and copies().steps() == [1]
        shutil.rmtree(tmp_path / "here/checkpoints/2")
    assert copies().steps() == [1, 2] and left > 2


def test_a_changed_copy_is_not_gone_on_from(store, tmp_path):
    saved(tmp_path / "here", [1, 2])
    (key,) = [key for key in store if key.endswith("/2/checkpoint.json")]
    Store().pipe_file(key, Store().cat_file(key).replace(b"reformax", b"reformed"))
    there = Checkpoints(tmp_path / "there", copies=ADDRESS)
    assert there.newest_whole() == 1
    said = []
    there.tidy(said.append)
    assert "checkpoint 2 is damaged (checkpoint.json has changed)" in said[0]


@pytest.mark.parametrize("name", ["../../../marker", "/tmp/marker", "arrays/../../marker"])
def test_no_copy_is_written_outside_its_folder(store, tmp_path, name):
    saved(tmp_path / "here", [1])
    (key,) = [key for key in store if key.endswith("/1/" + manifest.FILE)]
    Store().pipe_file(key, json.dumps({name: {"size": 1, "crc32": 0}}).encode())
    with pytest.raises(OSError, match="which is no file of a checkpoint") as error:
        Checkpoints(tmp_path / "there", copies=ADDRESS).newest_whole()
    assert f"checkpoint_copies={ADDRESS} cannot be read" in str(error.value)


def test_a_store_that_cannot_be_read_is_one_line(store, tmp_path):
    with pytest.raises(OSError, match="checkpoint_copies=az://b/run cannot be read .*install") as e:
        Checkpoints(tmp_path, copies="az://b/run").newest_whole()
    assert "\n" not in str(e.value)


def test_a_copy_may_be_on_another_disk_and_an_unknown_store_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("here", [1, 2], "copies")
    there = sorted(path.name for path in (tmp_path / "copies").iterdir())
    assert there == ["1", "2", "run.json"]
    assert Checkpoints("there", copies="copies").newest_whole() == 2
    with pytest.raises(SettingError, match="checkpoint_copies=ftp://x must be a folder or begin"):
        Checkpoints("there", copies="ftp://x")


def test_a_fetch_that_is_cut_short_is_made_again(store, tmp_path, monkeypatch):
    saved(tmp_path / "here", [1, 2])
    fetch = Copies._fetch

    def cut_short(copies, step, folder):
        if step == 2:
            raise ConnectionError("the store is gone")
        fetch(copies, step, folder)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the store is gone"):
        patch.setattr(Copies, "_fetch", cut_short)
        Checkpoints(tmp_path / "there", copies=ADDRESS).newest_whole()
    assert Checkpoints(tmp_path / "there").steps() == []
    assert Checkpoints(tmp_path / "there", copies=ADDRESS).newest_whole() == 2


def test_a_damaged_copy_is_left_out(store, tmp_path):
    saved(tmp_path / "here", [1, 2])
    (key,) = [key for key in store if key.endswith("/2/" + manifest.FILE)]
    Store().pipe_file(key, b"{")
    there = Checkpoints(tmp_path / "there", copies=ADDRESS)
    assert there.newest_whole() == 1
    assert "the copy 2 in s3://bucket/run is left out: manifest.json is cut short" in there.notes[0]


def test_another_run_does_not_mix_its_copies(tmp_path):
    """It has checkpoints of its own, or began at the same time."""
    address, other = (
        str(tmp_path / "copies"),
        r"has the copies of the run in \S*/one/checkpoints on",
    )
    saved(tmp_path / "begun", [7], None)
    second = Checkpoints(tmp_path / "two", copies=address)
    assert second.newest_whole() is None
    assert not saved(tmp_path / "one", [1, 2], address).notes
    for step in (1, 2):
        second.save(step, STATE)
        second.wait()
    second.close()
    assert second.steps() == [1, 2] and len(second.notes) == 2
    assert second.notes[1].startswith("checkpoint 2 is saved and not copied: checkpoint_copies=")
    assert re.search(other + ".*give each run its own", second.notes[1])
    for folder in ("begun", "two"):
        with pytest.raises(SettingError, match=other):
            Checkpoints(tmp_path / folder, copies=address).newest_whole()
    assert not saved(tmp_path / "one", [3], address).notes  # the same command again
    assert Checkpoints(tmp_path / "one", copies=address).newest_whole() == 3
    assert saved(tmp_path / "begun", [8], str(tmp_path / "its own")).notes == []


@pytest.mark.parametrize("takes_over", [False, True])
def test_of_two_runs_that_claim_copies_at_once_one_is_refused(tmp_path, monkeypatch, takes_over):
    """Both would find that the copies are nobody's, or those that they both go on from."""
    copies, runs = tmp_path / "copies", [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        run.mkdir()
    if takes_over:
        (tmp_path / "old").mkdir()
        ownership.claim(copies, tmp_path / "old", "copies", copies)
        for run in runs:
            ownership.follow(copies, run)
    looked, owner = threading.Barrier(2), ownership._owner

    def owner_for_both(copies):
        found = owner(copies)
        with contextlib.suppress(threading.BrokenBarrierError):
            looked.wait(1)  # for the other claim, which does not look where it waits
        return found

    monkeypatch.setattr(ownership, "_owner", owner_for_both)
    refused = []

    def claim(run):
        try:
            ownership.claim(copies, run, "copies", copies)
        except ownership.Others as error:
            refused.append((run, str(error)))

    threads = [threading.Thread(target=claim, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((loser, line),) = refused
    (winner,) = set(runs) - {loser}
    assert line.startswith(f"checkpoint_copies=copies has the copies of the run in {winner} on ")
    ownership.check(copies, winner, "copies")


def test_a_run_that_lost_its_disk_takes_its_copies_over(store, tmp_path):
    saved(tmp_path / "old", [1, 2])
    assert Checkpoints(tmp_path / "new", copies=ADDRESS).newest_whole() == 2
    # A kill before its first save, and it goes on; what it never copied to is still the old one's.
    assert Checkpoints(tmp_path / "new", copies=ADDRESS).newest_whole() == 2
    assert not saved(tmp_path / "old", [3]).notes
    assert not saved(tmp_path / "new", [4]).notes
    # The disk comes back: going on from it would overwrite what the other has done since.
    with pytest.raises(SettingError, match="has the copies of the run in .*/new/checkpoints"):
        Checkpoints(tmp_path / "old", copies=ADDRESS).newest_whole()
    assert "not copied: checkpoint_copies" in saved(tmp_path / "old", [5]).notes[0]
    assert Checkpoints(tmp_path / "newest", copies=ADDRESS).newest_whole() == 4


def test_copies_without_a_readable_owner_are_anybodys(store, tmp_path):
    """As those of earlier versions, or where a kill has cut the file short."""
    for content in (None, b"{", b"[]", b'{"token": 7}'):
        saved(tmp_path / "here", [1])
        (key,) = [key for key in store if key.endswith("/run.json")]
        Store().rm(key) if content is None else Store().pipe_file(key, content)
        for folder in ("here", "there"):
            assert Checkpoints(tmp_path / folder, copies=ADDRESS).newest_whole() == 1
        assert not saved(tmp_path / "here", [1]).notes
        shutil.rmtree(tmp_path / "there")


def test_a_store_that_cannot_be_read_keeps_no_run_with_checkpoints(store, tmp_path):
    saved(tmp_path, [1])
    assert Checkpoints(tmp_path, copies="az://b/run").newest_whole() == 1


def test_copies_leave_what_is_not_theirs(tmp_path):
    (tmp_path / "copies/2024").mkdir(parents=True)
    (tmp_path / "copies/2024/thesis.txt").touch()
    saved(tmp_path / "here", [1, 2, 3], str(tmp_path / "copies"))
    assert (tmp_path / "copies/2024/thesis.txt").exists()
    own = tmp_path / "here/checkpoints"
    with pytest.raises(SettingError, match="is the folder of the run's own checkpoints"):
        Checkpoints(tmp_path / "here", copies=str(own))


def test_a_slow_store_delays_no_save(tmp_path, monkeypatch):
    sending = threading.Event()
    monkeypatch.setattr(Copies, "send", lambda *args: sending.wait(60))
    checkpoints = Checkpoints(tmp_path / "here", copies=str(tmp_path / "copies"))
    for step in (1, 2):
        checkpoints.save(step, STATE)
        checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    sending.set()
    checkpoints.close()


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_ends_with_the_same_numbers(store, tmp_path):
    options = {"steps": 8, "checkpoint_every": 4, "eval_every": None}
    loop.train(tmp_path / "whole", **worker.arguments(**options))
    options["checkpoint_copies"] = ADDRESS
    loop.train(tmp_path / "lost", **worker.arguments(**options | {"steps": 4}))
    shutil.rmtree(tmp_path / "lost")
    loop.train(tmp_path / "again", **worker.arguments(**options))
    one, two = (Checkpoints(tmp_path / name)._read(8)[0] for name in ("whole", "again"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    steps = [x["step"] for x in worker.record(tmp_path / "again") if x["split"] == "train"]
    assert steps == [8]

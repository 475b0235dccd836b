"""What stays of a text: a vocabulary that is learnt once, and the cache, which is pruned."""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import pytest

from reformax.cli import prepare
from reformax.data import cache, pieces, token_files
from reformax.data import text as texts
from reformax.data.text import text


@pytest.fixture
def source(tmp_path, monkeypatch, in_files):
    """A text that is prepared, by this process."""
    monkeypatch.setattr(cache, "_held", {})
    path = tmp_path / "mine.txt"
    path.write_text("a line of some words, and another\nthe next one\n" * 300)
    with in_files(shard=2**20):
        yield path


def release():
    """Lets go of all texts, as this process does at its end."""
    for descriptor in cache._held.values():
        os.close(descriptor)
    cache._held.clear()


@pytest.fixture
def learnt(monkeypatch):
    """The sizes of the vocabularies that were learnt."""
    found, learn = [], pieces.learnt

    def counted(sentences, size, settings):
        found.append(size)
        return learn(sentences, size, settings)

    monkeypatch.setattr(pieces, "learnt", counted)
    return found


def fingerprint(path, folder, **options):
    folder.mkdir()
    return text(path, **{"vocab_size": 290, **options}).vocabulary.keep_in(folder, begun=False)


def test_training_learns_a_vocabulary_once(source, learnt, tmp_path):
    one = fingerprint(source, tmp_path / "a")
    assert fingerprint(source, tmp_path / "b") == one and learnt == [290]
    fingerprint(source, tmp_path / "c", vocab_size=280)
    fingerprint(source, tmp_path / "d", model_type="char")
    fingerprint(source, tmp_path / "e", max_held_out=300)  # other text to train on
    assert learnt == [290, 280, 290, 290]
    source.write_text(source.read_text().replace("words", "birds"))
    assert fingerprint(source, tmp_path / "f") != one and len(learnt) == 5


def test_prepare_learns_a_vocabulary_once(source, learnt, tmp_path):
    command = [f"--data_dir={source}", f"--to={tmp_path / 'made'}", "--quiet"]
    for _ in range(2):
        prepare.main([*command, "--vocab_size=290"])
    first = (tmp_path / "made" / "vocabulary.model").read_bytes()
    prepare.main([*command, "--vocab_size=280"])
    assert learnt == [290, 280]
    source.write_text(source.read_text().replace("words", "birds"))
    prepare.main([*command, "--vocab_size=290"])
    assert learnt == [290, 280, 290]
    assert (tmp_path / "made" / "vocabulary.model").read_bytes() != first


def test_a_folder_that_is_only_read_learns_each_time(source, learnt, tmp_path, monkeypatch, caplog):
    text(source)
    monkeypatch.setattr(cache, "_held", {})

    def refused(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    write = pieces.durable.write
    with monkeypatch.context() as patch:
        patch.setattr(pieces.durable, "write", refused)
        model = text(source, vocab_size=290).vocabulary.serialised()
    assert pieces.durable.write is write and model and "is not kept" in caplog.text


def folder_of(source):
    key = token_files.key_of(texts.find(source, texts.DEFAULTS), texts.DEFAULTS)
    return token_files.cache_folder(None) / key[:32]


def read_in_another_process(source):
    code = (
        "import sys; from reformax.data import text as t; t.SMALL = 0\n"
        f"t.text({str(source)!r}); print('reads', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"reads\n"
    return process


def test_the_cache_is_listed_and_pruned_of_what_nobody_reads(source, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 300)
    process = read_in_another_process(source)
    second = read_in_another_process(other)
    second.communicate()
    folders = folder_of(source), folder_of(other)
    prepare.main(["--list"])
    first, last = sorted(capsys.readouterr().out.splitlines(), key=lambda x: "in use" not in x)
    assert str(folders[0]) in first and "in use" in first and "of " + str(source) in first
    assert str(folders[1]) in last and "in use" not in last and f"of {other}" in last
    prepare.main(["--prune=1"])
    assert all(folder.is_dir() for folder in folders)  # used today
    prepare.main(["--prune=0"])
    assert folders[0].is_dir() and not folders[1].exists()
    said = capsys.readouterr().out
    assert f"{folders[0]}: a process reads it, and it stays" in said
    assert "1 texts of" in said
    process.communicate()
    prepare.main(["--prune=0"])
    assert not folders[0].exists()
    text(source)  # is prepared again
    assert folders[0].is_dir()


def test_age_is_since_the_last_start_that_read_it(source, tmp_path):
    read_in_another_process(source).communicate()
    folder, week = folder_of(source), time.time() - 7 * 86_400
    lock = folder.with_name(f".{folder.name}.used")
    os.utime(lock, (week, week))
    assert [x.used for x in cache.entries(folder.parent)] == [week]
    read_in_another_process(source).communicate()
    assert cache.prune(folder.parent, 6) == ([], [])
    os.utime(lock, (week, week))
    deleted, kept = cache.prune(folder.parent, 6)
    assert [x.folder for x in deleted] == [folder] and not kept and not folder.exists()


def test_what_was_stopped_and_texts_of_before_are_pruned_and_others_files_stay(source, tmp_path):
    root = token_files.cache_folder(None)
    (root / f"{'a' * 32}.partial").mkdir(parents=True)
    (root / f"{'b' * 32}").mkdir()
    (root / "mine").mkdir()
    (root / "notes.txt").write_text("mine")
    assert {x.folder.name for x in cache.entries(root)} == {"a" * 32, "b" * 32}
    cache.prune(root, 0)
    assert {x.name for x in root.iterdir() if not x.name.startswith(".")} == {"mine", "notes.txt"}


@pytest.mark.parametrize("end", ["", ".partial"])
def test_pruning_that_was_stopped_leaves_no_half_of_a_text(end, source, monkeypatch):
    text(source)
    release()
    folder = folder_of(source)
    if end:  # stopped before it got its name
        folder.rename(folder.with_name(folder.name + end))

    def stopped(path):
        next(path.rglob("*.bytes")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.durable.shutil, "rmtree", stopped)
        with pytest.raises(KeyboardInterrupt):
            cache.prune(folder.parent, 0)
    assert [x.folder for x in cache.entries(folder.parent)] == [folder]
    assert text(source).n_targets("train") > 0
    release()
    cache.prune(folder.parent, 0)
    assert not [x for x in folder.parent.iterdir() if x.is_dir()]


def test_a_reader_who_may_not_write_the_lock_holds_it(source, monkeypatch):
    text(source)
    release()
    folder = folder_of(source)
    assert [x.in_use for x in cache.entries(folder.parent)] == [False]

    def refused(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    def read_only(path, mode):
        return open(path, mode) if mode == "rb" else refused(path)

    with monkeypatch.context() as patch:  # as another user's
        patch.setattr(cache, "open", read_only, raising=False)
        patch.setattr(cache.os, "utime", refused)
        cache.hold(folder)
        assert [x.in_use for x in cache.entries(folder.parent)] == [True]
    deleted, kept = cache.prune(folder.parent, 0)
    assert not deleted and [x.folder for x in kept] == [folder] and folder.is_dir()


@pytest.mark.parametrize("when", ["before it is looked at", "while it is measured", "all of it"])
def test_what_another_process_deletes_meanwhile_is_passed_over(when, source, monkeypatch):
    text(source)
    release()
    folder = folder_of(source)
    alone, lstat = cache._alone, os.lstat

    def deleting(path):
        shutil.rmtree(folder.parent if when == "all of it" else folder)
        return alone(path)

    def gone(path):
        with contextlib.suppress(OSError):
            os.unlink(path) if str(path).endswith(".bytes") else None
        return lstat(path)

    measured = when == "while it is measured"
    with monkeypatch.context() as patch:
        if measured:
            patch.setattr(cache.os, "lstat", gone)
        else:
            patch.setattr(cache, "_alone", deleting)
        found = cache.entries(folder.parent)
    assert [x.folder for x in found] == [folder] * measured
    monkeypatch.setattr(cache, "entries", lambda _: [cache.Entry(folder, 0, 0.0, False)])
    if not measured:
        assert cache.prune(folder.parent, 0) == ([], [])


ROWS = [
    ([], "--data_dir and --to are missing"),
    (["--list", "--to=x"], "--to=x: --list and --prune go by the cache, leave the flag out"),
    (["--prune=3", "--join_by=a"], "--join_by=a: --list and --prune go by the cache"),
    (["--data_dir=x", "--to=y", "--cache_dir=z"], "--list and --prune"),
]


@pytest.mark.parametrize("flags, words", ROWS)
def test_flags_that_say_nothing_are_refused(flags, words, fails_in_one_line):
    with fails_in_one_line(ValueError, words):
        prepare.main(flags)


def test_another_cache_is_named(source, tmp_path, capsys):
    text(source, cache_dir=tmp_path / "own")
    prepare.main(["--list", f"--cache_dir={tmp_path / 'own'}"])
    assert str(tmp_path / "own") in capsys.readouterr().out
    prepare.main(["--list"])
    assert capsys.readouterr().out == ""

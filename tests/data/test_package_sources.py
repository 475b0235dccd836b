"""The text of pinned wheels, with tiny wheels in the place of the published ones."""

import functools
import hashlib
import os
import re
import tracemalloc
import zipfile

import pytest

from reformax.data import package_sources
from reformax.data.base import SPLITS
from reformax.data.package_sources import LISTS, Known, pins
from reformax.data.text import text

ONE = b"x = 1\n" * 100
TWO = b"# no newline at the end" * 20
LONG = b"y = 2\n" * 50_001


def write_wheel(folder, name, members, tag="py3-none-any"):
    """Writes a wheel; returns the line of a list that pins it."""
    path = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
    return pin(path)


def pin(path):
    project, version = path.name.split("-")[:2]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{project}=={version} --hash=sha256:{digest}\n"


@pytest.fixture
def listed(tmp_path):
    """A folder of two wheels and the list that names them, the second first."""
    first = write_wheel(tmp_path, "first-1.0", {"first/a.py": ONE, "first/data.json": b"{}" * 200})
    members = {"b/z.py": ONE, "b/a.py": TWO, "b/long.py": LONG, "b/__init__.py": b"short"}
    second = write_wheel(tmp_path, "Se_cond-2.0.post1", members)
    path = tmp_path / "list.txt"
    path.write_text("# In order.\n" + second.replace("Se_cond", "se-cond") + "\n" + first)
    return path


JOINED = b"# b/a.py\n" + TWO + b"\n# b/z.py\n" + ONE


def test_files_are_documents(listed, tmp_path):
    task = package_sources.package_sources(str(tmp_path), wheels=str(listed), windows="documents")
    assert list(task.borders("train")) == [0, len(b"# b/a.py\n" + TWO + b"\n")]
    assert not len(task.borders("valid"))
    assert task.train_batch(0, 0, 4, 8).inputs.shape == (4, 8)
    with pytest.raises(ValueError, match="windows is 'documents'"):
        package_sources.package_sources(str(tmp_path), str(listed), 100, "documents")
    masked = package_sources.package_sources(str(tmp_path), str(listed), document_mask=True)
    assert masked.train_batch(0, 0, 4, 8).inputs.segment_ids.shape == (4, 8)


def test_splits_are_those_of_the_text_in_a_file(listed, tmp_path, content):
    (tmp_path / "text").write_bytes(JOINED)
    task = package_sources.package_sources(str(tmp_path), wheels=str(listed))
    same = text(str(tmp_path / "text"))
    for split in ("train", "valid", "test"):
        assert content(task, split) == content(same, split)
        assert task.fingerprint(split) == same.fingerprint(split)


def test_a_part_to_train_on_leaves_what_is_held_out(listed, tmp_path, content):
    small = package_sources.package_sources(str(tmp_path), str(listed), max_held_out=7)
    assert small.n_targets("test") == small.n_targets("valid") == 7
    whole, part = (
        package_sources.package_sources(str(tmp_path), str(listed), n) for n in (None, 100)
    )
    assert content(part, "train") == content(whole, "train")[:100]
    assert content(part, "valid", "test") == content(whole, "valid", "test")


def test_no_package_is_in_two_splits_of_whole_packages(tmp_path, content, fails_in_one_line):
    sizes = dict(zip("abcdef", (40, 20, 2, 2, 1, 1), strict=True))
    members = {
        name: {f"{name}/{i}.py": b"%s = %d\n" % (name.encode(), i) * 50 for i in range(n)}
        for name, n in sizes.items()
    }
    lines = [write_wheel(tmp_path, f"{name}-1", members[name]) for name in sizes]
    (tmp_path / "list").write_text("".join(lines))
    make = functools.partial(package_sources.package_sources, str(tmp_path), str(tmp_path / "list"))
    parts = {split: content(make(whole_packages=True), split) for split in SPLITS}
    found = {split: set(re.findall(rb"^# (\w)/", parts[split], re.M)) for split in SPLITS}
    assert found == {"train": {b"a", b"b", b"c"}, "valid": {b"d"}, "test": {b"e", b"f"}}
    assert b"".join(parts[split] for split in SPLITS) == content(make())
    assert all(x.startswith(b"# ") for x in parts.values())
    assert max(len(parts["valid"]), len(parts["test"])) <= len(content(make())) * 5 // 100
    with fails_in_one_line(ValueError, "whole_packages is True and no whole package .* 7 bytes of"):
        make(whole_packages=True, max_held_out=7)


def test_the_text_is_in_memory_once(tmp_path):
    members = {f"a/{i}.py": b"# line %d\n" % i * 10_000 for i in range(30)}
    (tmp_path / "list").write_text(write_wheel(tmp_path, "a-1", members))
    tracemalloc.start()
    found = package_sources.read(tmp_path, tmp_path / "list")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * len(found.data)


def test_a_missing_wheel_is_named_with_the_command(listed, tmp_path, fails_in_one_line):
    (tmp_path / "first-1.0-py3-none-any.whl").unlink()
    match = rf"no wheel of first 1.0: pip download --no-deps --dest {tmp_path} -r {listed}"
    with fails_in_one_line(FileNotFoundError, match):
        package_sources.package_sources(str(tmp_path), wheels=str(listed))


def test_a_wheel_of_another_content_is_named(listed, tmp_path, fails_in_one_line):
    write_wheel(tmp_path, "first-1.0", {"first/a.py": ONE + b"changed"})
    with fails_in_one_line(ValueError, "first-1.0-py3-none-any.whl is another file than .*list"):
        package_sources.package_sources(str(tmp_path), wheels=str(listed))


def test_of_several_wheels_of_a_version_the_pinned_one_is_read(listed, tmp_path, content):
    for tag in ("cp310-cp310-any", "py4-none-any"):
        write_wheel(tmp_path, "first-1.0", {"first/a.py": TWO}, tag)
    task = package_sources.package_sources(str(tmp_path), wheels=str(listed))
    assert content(task) == JOINED


def no_archive(path):
    path.write_bytes(b"text")


def cut(path):
    """As pinned, but its middle is lost."""
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + bytes(40) + whole[60:])


@pytest.mark.parametrize("damage", [no_archive, cut])
def test_a_pinned_wheel_that_cannot_be_unpacked_is_named(
    damage, listed, tmp_path, fails_in_one_line
):
    path = tmp_path / "first-1.0-py3-none-any.whl"
    damage(path)
    listed.write_text(pin(path))
    with fails_in_one_line(ValueError, f"{path} is damaged .*: pin another"):
        package_sources.package_sources(str(tmp_path), wheels=str(listed))


@pytest.mark.parametrize(
    "make, what", [(os.mkfifo, "a FIFO"), (os.mkdir, "a folder"), (lambda path: None, "no wheel")]
)
def test_a_wheel_that_is_no_file_is_refused(make, what, listed, tmp_path, fails_in_one_line):
    path = tmp_path / "first-1.0-py3-none-any.whl"
    path.unlink()
    make(path)
    with fails_in_one_line(ValueError, what):
        package_sources.package_sources(str(tmp_path), wheels=str(listed))


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_comes_along_stands_for_one_text(
    name, listed, tmp_path, monkeypatch, content, fails_in_one_line
):
    of_joined = len(JOINED), hashlib.sha256(JOINED).hexdigest()
    for known in (Known(listed, *LISTS[name][1:]), Known(listed, 7, of_joined[1])):
        monkeypatch.setitem(LISTS, name, known)
        with fails_in_one_line(ValueError, "is not what it was"):
            package_sources.package_sources(str(tmp_path), name)
    monkeypatch.setitem(LISTS, name, Known(listed, *of_joined))
    assert content(package_sources.package_sources(str(tmp_path), name)) == JOINED


@pytest.mark.parametrize(
    "name, n, first", [(None, 40, "sympy 1.12"), ("large", 113, "transformers 5.24.0")]
)
def test_a_list_that_comes_along_is_whole(name, n, first, tmp_path, fails_in_one_line):
    found = pins(LISTS[name].path)
    assert len({pin.sha256 for pin in found}) == len(found) == n
    assert found[-40:] == pins(LISTS[None].path)
    with fails_in_one_line(FileNotFoundError, f"no wheel of {first}: pip download"):
        package_sources.package_sources(str(tmp_path), name)


@pytest.mark.parametrize(
    "line, match",
    [("sympy==1.12", "'sympy==1.12' is no 'name==version"), ("# alone", "names no wheel")],
)
def test_a_list_without_hashes_is_refused(line, match, tmp_path, fails_in_one_line):
    (tmp_path / "list.txt").write_text(line)
    with fails_in_one_line(ValueError, match):
        package_sources.package_sources(str(tmp_path), wheels=str(tmp_path / "list.txt"))


def test_no_folder_and_no_list(listed, tmp_path, fails_in_one_line):
    with fails_in_one_line(ValueError, "data_dir is .*list.txt, a file: give the folder of the wh"):
        package_sources.package_sources(str(listed), wheels=str(listed))
    listed.write_bytes(b"\xff\xfef")
    with fails_in_one_line(ValueError, "list.txt is no text in UTF-8"):
        package_sources.package_sources(str(tmp_path), wheels=str(listed))
    listed.unlink()
    with fails_in_one_line(FileNotFoundError, "set data_dir"):
        package_sources.package_sources(str(tmp_path / "none"))
    with fails_in_one_line(FileNotFoundError, "list.txt"):
        package_sources.package_sources(str(tmp_path), wheels=str(tmp_path / "list.txt"))

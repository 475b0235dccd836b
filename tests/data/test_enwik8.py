"""enwik8 from local files, and by download from a local server."""

import functools
import gzip
import hashlib
import http.server
import io
import logging
import lzma
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from reformax.data import enwik8
from reformax.data.base import split_bytes

SPLITS = ("train", "valid", "test")
# Each split has several blocks, the last one not full.
TEXT = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8).tobytes()
SHORT = TEXT[:500]


def packed(ending, data):
    if ending == ".zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("enwik8", data)
        return buffer.getvalue()
    return {".gz": gzip.compress, ".xz": lzma.compress, "": bytes}[ending](data)


@pytest.mark.parametrize("ending", ["", ".zip", ".gz", ".xz"])
@pytest.mark.parametrize("give", ["file", "folder"])
def test_local_file(ending, give, tmp_path, content):
    path = tmp_path / f"enwik8{ending}"
    path.write_bytes(packed(ending, SHORT))
    (tmp_path / "enwik8.md5").write_text("not the text")
    task = enwik8.enwik8(str(path if give == "file" else tmp_path))
    assert content(task) == SHORT
    assert [task.n_targets(split) for split in SPLITS] == [450, 25, 25]


def test_whole_file_goes_before_a_part_and_plain_before_packed(tmp_path, content):
    (tmp_path / "enwik8_prefix.xz").write_bytes(packed(".xz", TEXT[:100]))
    (tmp_path / "enwik8.gz").write_bytes(packed(".gz", TEXT[:200]))
    assert content(enwik8.enwik8(str(tmp_path))) == TEXT[:200]
    (tmp_path / "enwik8").write_bytes(TEXT[:300])
    assert content(enwik8.enwik8(str(tmp_path))) == TEXT[:300]


def test_a_part_says_so_in_one_line(tmp_path, content, caplog):
    (tmp_path / "enwik8_prefix.xz").write_bytes(packed(".xz", SHORT))
    with caplog.at_level(logging.WARNING):
        assert content(enwik8.enwik8(str(tmp_path))) == SHORT
    (message,) = caplog.messages
    assert "500 bytes, not the 100,000,000 of enwik8: split 90/5/5" in message


def test_a_download_without_tensorflow_datasets_says_how_to_install_it(
    monkeypatch, fails_in_one_line
):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)  # its import fails
    with fails_in_one_line(ModuleNotFoundError, r"pip install 'reformax\[tfds\]', or download"):
        enwik8.enwik8()


def test_the_whole_says_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(enwik8, "N_BYTES", 500)
    (tmp_path / "enwik8").write_bytes(SHORT)
    with caplog.at_level(logging.DEBUG):
        enwik8.enwik8(str(tmp_path))
    assert not caplog.messages


def test_local_errors(tmp_path, fails_in_one_line):
    with fails_in_one_line(FileNotFoundError, "missing does not exist: set data_dir"):
        enwik8.enwik8(str(tmp_path / "missing"))
    with fails_in_one_line(FileNotFoundError, "has no file enwik8, .zip, .gz or .xz: put one"):
        enwik8.enwik8(str(tmp_path))
    for name in ("enwik8_a.gz", "enwik8_b.xz"):
        (tmp_path / name).write_bytes(b"damaged")
    with fails_in_one_line(ValueError, "enwik8_a.gz, enwik8_b.xz: set data_dir to one of them"):
        enwik8.enwik8(str(tmp_path))
    with fails_in_one_line(ValueError, "enwik8_b.xz is not packed by xz"):
        enwik8.enwik8(str(tmp_path / "enwik8_b.xz"))


@pytest.mark.skipif("REFORMAX_DATA" not in os.environ, reason="REFORMAX_DATA is not set")
def test_prefix_of_the_real_enwik8(content):
    task = enwik8.enwik8(os.environ["REFORMAX_DATA"])
    assert [task.n_targets(split) for split in SPLITS] == [3_738_658, 207_703, 207_703]
    assert (
        hashlib.sha256(content(task)).hexdigest()
        == "d8b3b95fb4993726ea7dcc93ae3c9e08a1a04cc540d05d7656fd267cc8ab5d6a"
    )


@pytest.fixture
def builder():
    pytest.importorskip("tensorflow_datasets")
    from reformax.data import enwik8_builder

    return enwik8_builder


def expect(builder, monkeypatch, url, archive):
    """Makes the builder expect an archive's size and checksum at `url`."""
    info = builder.UrlInfo(
        size=len(archive), checksum=hashlib.sha256(archive).hexdigest(), filename="enwik8.zip"
    )
    monkeypatch.setattr(builder, "URL", url)
    monkeypatch.setattr(builder.Enwik8, "url_infos", {url: info})


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of tmp_path/www: its address and the list of its requests."""
    (tmp_path / "www").mkdir()
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            # Some servers refuse Python's own client and serve the downloader's.
            if "urllib" in self.headers["User-Agent"]:
                self.send_error(403)
            else:
                super().do_GET()

        def log_message(self, format, *args):
            asked.append(args[0])

    handler = functools.partial(Handler, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
        thread.join()


def test_download_gives_the_bytes_once_and_then_from_disk(
    builder, server, tmp_path, monkeypatch, content
):
    address, asked = server
    archive = packed(".zip", TEXT)
    (tmp_path / "www" / "enwik8.zip").write_bytes(archive)
    expect(builder, monkeypatch, f"{address}/enwik8.zip", archive)
    home = str(tmp_path / "tfds")
    splits = builder.load(home)
    for split, expected in split_bytes(np.frombuffer(TEXT, np.uint8), "text").items():
        np.testing.assert_array_equal(splits[split], expected)
    assert asked
    asked.clear()
    again = builder.load(home)
    assert not asked
    np.testing.assert_array_equal(again["test"], splits["test"])

    monkeypatch.setattr(builder, "load", lambda: again)
    assert content(enwik8.enwik8()) == TEXT

    # Reading back needs no TensorFlow.
    script = f"""
import sys, hashlib
from reformax.data import enwik8_builder
data = b"".join(s.tobytes() for s in enwik8_builder.load({home!r}).values())
assert hashlib.md5(data).hexdigest() == {hashlib.md5(TEXT).hexdigest()!r}
assert "tensorflow" not in sys.modules
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def test_builder_describes_the_published_file(builder):
    ((url, info),) = builder.Enwik8.url_infos.items()
    assert url == builder.URL == "http://mattmahoney.net/dc/enwik8.zip"
    assert (info.size, info.filename) == (36_445_475, "enwik8.zip")
    assert info.checksum == "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"


def test_wrong_checksum_prepares_nothing(builder, server, tmp_path, monkeypatch, fails_in_one_line):
    address, _ = server
    right, wrong = packed(".zip", SHORT), packed(".zip", TEXT[1:501])
    (tmp_path / "www" / "enwik8.zip").write_bytes(wrong)
    expect(builder, monkeypatch, f"{address}/enwik8.zip", right)
    home = str(tmp_path / "tfds")
    with fails_in_one_line(OSError, r"wrong checksum.*pass --data_dir"):
        builder.load(home)
    (tmp_path / "www" / "enwik8.zip").write_bytes(right)
    assert b"".join(s.tobytes() for s in builder.load(home).values()) == SHORT


def test_missing_on_the_server(builder, server, tmp_path, monkeypatch, fails_in_one_line):
    address, _ = server
    expect(builder, monkeypatch, f"{address}/enwik8.zip", b"")
    with fails_in_one_line(OSError, "404.*: download enwik8.zip yourself and pass --data_dir"):
        builder.load(str(tmp_path / "tfds"))


def test_no_network(builder, tmp_path, monkeypatch, fails_in_one_line):
    # Nobody listens on port 1.
    expect(builder, monkeypatch, "http://127.0.0.1:1/enwik8.zip", b"")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fails_in_one_line(OSError, "refused.*: download enwik8.zip yourself and pass --data_dir"):
        builder.load(str(tmp_path / "tfds"))

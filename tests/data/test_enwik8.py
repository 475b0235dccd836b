"""enwik8 from local files, and by download from a local server."""

import functools
import gzip
import hashlib
import http.server
import io
import logging
import lzma
import os
import threading
import zipfile

import numpy as np
import pytest

from reformax.data import enwik8

SPLITS = ("train", "valid", "test")
TEXT = np.random.default_rng(0).integers(0, 256, 501, np.uint8).tobytes()
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


def test_a_part_says_so_in_one_line_and_the_whole_nothing(tmp_path, content, caplog, monkeypatch):
    (tmp_path / "enwik8_prefix.xz").write_bytes(packed(".xz", SHORT))
    with caplog.at_level(logging.WARNING):
        assert content(enwik8.enwik8(str(tmp_path))) == SHORT
    (message,) = caplog.messages
    assert "500 bytes, not the 100,000,000 of enwik8: split 90/5/5" in message
    caplog.clear()
    monkeypatch.setattr(enwik8, "N_BYTES", 500)
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
def server(tmp_path, monkeypatch):
    """A server of tmp_path/www, in the place of the published one, and the list of its requests."""
    (tmp_path / "www").mkdir()
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(enwik8, "URL", f"http://127.0.0.1:{running.server_port}/enwik8.zip")
        yield asked
        running.shutdown()
        thread.join()


def test_a_download_is_checked_and_made_once(
    server, tmp_path, monkeypatch, content, fails_in_one_line
):
    with fails_in_one_line(OSError, "404.*: download enwik8.zip yourself and pass --data_dir"):
        enwik8.enwik8()
    archive = packed(".zip", SHORT)
    monkeypatch.setattr(enwik8, "SHA256", hashlib.sha256(archive).hexdigest())
    (tmp_path / "www/enwik8.zip").write_bytes(packed(".zip", TEXT[1:501]))
    with fails_in_one_line(OSError, r"another file by its SHA-256.*pass --data_dir"):
        enwik8.enwik8()
    assert not (tmp_path / "cache").exists()
    (tmp_path / "www/enwik8.zip").write_bytes(archive)
    for _ in range(2):
        assert content(enwik8.enwik8()) == SHORT
    assert len(server) == 3


def test_no_network(tmp_path, monkeypatch, fails_in_one_line):
    monkeypatch.setattr(enwik8, "URL", "http://127.0.0.1:1/enwik8.zip")  # nobody listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with fails_in_one_line(OSError, "refused.*: download enwik8.zip yourself and pass --data_dir"):
        enwik8.enwik8()

"""Side channels fail, training goes on: no line of the record is lost and nothing hangs."""

import errno
import io
import struct
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from reformax.training import events, loop, side_channels
from reformax.training import record as record_lib
from tests.training import worker


def scalars(folder):
    """(step, name, value) of the event files in `folder`; every checksum is compared."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (n,) = struct.unpack("<Q", data[:8])
            frame, data = data[: n + 16], data[n + 16 :]
            for part, check in ((frame[:8], frame[8:12]), (frame[12:-4], frame[-4:])):
                assert struct.unpack("<I", check) == (masked_crc32c(part),)
            event = Event.FromString(frame[12:-4])
            found += [(event.step, x.tag, x.simple_value) for x in event.summary.value]
    return found


class Disk:
    """Makes unbuffered files; there is room for `room` bytes in all."""

    room = 100

    def open(self, *args, **kwargs):
        self.file = open(*args, **kwargs)  # noqa: SIM115
        return self

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = self.file.write(data[: self.room])
        self.room -= n
        return n

    def close(self):
        self.file.close()


@pytest.fixture
def disk(monkeypatch):
    """The disk of event files."""
    found = Disk()
    monkeypatch.setattr(events, "open", found.open, raising=False)
    return found


def test_events_that_found_no_room_are_written_once_there_is(tmp_path, disk):
    file = events.EventFile(tmp_path, purge_step=1)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space"):
            file.add(step, {"a": step, "b": 0.5})
    disk.room = 10**6
    file.add(3, {"a": 3.0})
    file.close()
    wanted = [(1, "a", 1.0), (1, "b", 0.5), (2, "a", 2.0), (2, "b", 0.5), (3, "a", 3.0)]
    assert scalars(tmp_path) == wanted


def run(folder, **settings):
    result = loop.train(folder, **worker.arguments(steps=12, **settings))
    assert result["step"] == 12
    return worker.record(folder)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The record of a run of which nothing fails."""
    return run(tmp_path_factory.mktemp("whole"))


def test_a_full_disk_of_event_files_costs_no_line(tmp_path, capsys, disk, wanted):
    assert run(tmp_path, log_every=1)[-1] == wanted[-1]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "note: TensorBoard's event file failed, and the work" in err
    assert "No space left on device" in err


@pytest.mark.slow
def test_a_run_that_is_done_writes_no_event_file(tmp_path, wanted):
    assert run(tmp_path) == wanted
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert [x[:2] for x in scalars(file.parent) if "bits" in x[1]] == [
        (x["step"], f"{x['split']}/bits_per_dim") for x in wanted
    ]
    assert run(tmp_path) == wanted
    assert list((tmp_path / "tensorboard").iterdir()) == [file]


@pytest.mark.slow
def test_a_folder_of_events_that_cannot_be_made_costs_no_line(tmp_path, capsys, wanted):
    (tmp_path / "tensorboard").write_text("")
    assert run(tmp_path) == wanted
    assert capsys.readouterr().err.count("note: ") == 1


@pytest.mark.usefixtures("figures")
@pytest.mark.slow
def test_a_plot_that_fails_is_drawn_at_the_next_evaluation(tmp_path, capsys, monkeypatch, wanted):
    from matplotlib.figure import Figure

    savefig, calls = Figure.savefig, []

    def fails_at_first(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        savefig(*args, **options)

    monkeypatch.setattr(Figure, "savefig", fails_at_first)
    assert run(tmp_path) == wanted and len(calls) == 2
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "note: the plot failed" in err


class Broken(io.StringIO):
    """A stream of which a call fails."""

    def __init__(self, call, error):
        super().__init__()
        self.call, self.error = call, error

    def _fails(self, call):
        if call == self.call:
            raise self.error

    def write(self, text):
        self._fails("write")
        return super().write(text)

    def flush(self):
        self._fails("flush")

    def isatty(self):
        self._fails("isatty")
        return False


ERRORS = {
    "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "terminal": OSError(errno.EIO, "Input/output error"),
    "closed": ValueError("I/O operation on closed file"),
    "encoding": UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["write", "flush"])
@pytest.mark.parametrize("name, other", [("stdout", "stderr"), ("stderr", "stdout")])
def test_a_broken_stream_is_told_once_on_the_other(monkeypatch, name, other, call, error):
    whole = io.StringIO()
    monkeypatch.setattr(sys, name, Broken(call, ERRORS[error]))
    monkeypatch.setattr(sys, other, whole)
    for _ in range(2):
        print("a line", file=getattr(side_channels, name)(), flush=True)
    assert whole.getvalue().count("\n") == 1 and "note: standard" in whole.getvalue()
    assert str(ERRORS[error]) in whole.getvalue()


@pytest.mark.parametrize(
    "out, err", [("write", "whole"), ("whole", "write"), ("flush", "isatty"), (None, None)]
)
def test_broken_streams_cost_no_line(tmp_path, monkeypatch, wanted, out, err):
    for name, call in (("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, name, call and Broken(call, ERRORS["disk"]))
    assert run(tmp_path, progress=True) == wanted
    if out == "whole":
        assert "step 12: valid" in sys.stdout.getvalue() and "note: " in sys.stdout.getvalue()
    if err == "whole":
        assert "12 of 12" in sys.stderr.getvalue() and sys.stderr.getvalue().count("note: ") == 1


def test_the_bar_goes_on_once_its_stream_does(monkeypatch):
    stream = Broken("write", ERRORS["disk"])
    monkeypatch.setattr(sys, "stderr", stream)
    bar = record_lib.Bar(0, 2)
    bar.advance(2.5, None)
    stream.call = None
    bar.advance(1.5, None)
    bar.close()
    assert "1.500 bits/dim" in stream.getvalue()

"""TensorBoard's events, written by the caller's thread.

tensorboardX writes in a thread behind a queue. When the disk is full its thread dies, and the next
call waits for it for ever. Here an event that cannot be written is kept for the next call.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """Appends scalars to an event file in `folder`; the file is made with the first of them.

    Args:
      folder: TensorBoard's name of the run.
      purge_step: hides the events of this step and later ones that a killed run wrote.
    """

    def __init__(self, folder: Path, purge_step: int):
        self._folder, self._file = folder, None
        self._unwritten = bytearray()
        self._append(Event(step=purge_step, file_version="brain.Event:2"))
        self._append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars of a step.

        Raises:
          OSError: not all is written; the rest is written by a later call.
        """
        values = [Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
        self._append(Event(step=step, summary=Summary(value=values)))
        self._write()

    def close(self) -> None:
        """Writes what is left and closes the file; raises as `add`."""
        if self._file is None:
            return  # no scalar, or no file could be made
        try:
            self._write()
        finally:
            self._file.close()

    def _append(self, event: Event) -> None:
        """Adds the frame of a TFRecord: length, its checksum, data, its checksum."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        for part in (length, data):
            self._unwritten += part + struct.pack("<I", masked_crc32c(part))

    def _write(self) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            # Unbuffered: what a call wrote is known, also when the next one fails.
            self._file = open(self._folder / name, "ab", buffering=0)  # noqa: SIM115
        while self._unwritten:
            n = self._file.write(self._unwritten)
            del self._unwritten[:n]

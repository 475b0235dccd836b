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
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """Appends values to an event file in `folder`; the file is made with the first of them.

    Args:
      folder: TensorBoard's name of the run.
      purge_step: hides the events of this step and later ones that a killed run wrote.
    """

    def __init__(self, folder: Path, purge_step: int):
        self._folder, self._file = folder, None
        self._unwritten = bytearray()
        self._append(Event(step=purge_step, file_version="brain.Event:2"))
        self._append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers and the lists of texts of a step; leaves other values out.

        Raises:
          OSError: not all is written; the rest is written by a later call.
        """
        found = [x for name, value in values.items() if (x := _summary(name, value)) is not None]
        if found:
            self._append(Event(step=step, summary=Summary(value=found)))
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


def _summary(name: str, value: Any) -> Summary.Value | None:
    """A number as a scalar, texts as TensorBoard's text plugin has them, else None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Summary.Value(tag=name, simple_value=value)
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        return None
    # The plugin reads Markdown: an indented block stays as it is.
    blocks = ["    " + text.replace("\n", "\n    ") for text in value]
    texts = TensorProto(
        dtype="DT_STRING",
        string_val=[block.encode() for block in blocks],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(blocks))]),
    )
    of_plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=name, metadata=of_plugin, tensor=texts)

"""The log for TensorBoard. Its own writer fails in a thread, where the error is lost; this one writes at once."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """A file of events in ``folder``, made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname():.60}.{os.getpid()}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one number for each name; nothing if TensorBoard is not installed."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
        except ImportError:
            return
        if not self._file.exists():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._file.open("ab") as file:
            RecordWriter(file).write(event.SerializeToString())

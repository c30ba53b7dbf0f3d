"""TensorBoard: an event file for each start of a run, read by `tensorboard --logdir`."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from stretto.train.sinks.sink import RunStatus, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

_HISTORY = "history"
_numbers = itertools.count()


class TensorBoardSink:
    """Scalars by `kind/name` over steps. What an earlier start has written of later steps is marked as overtaken.

    TensorBoard's own writers have a thread that prints a traceback when the disk is full, and don't say where a record
    was torn; here a line is written whole or not at all.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Else the files of earlier starts have it; whole, if none of them was killed while it was still at it.
        self._state = SinkState(folder)
        is_there = any(folder.glob("events.out.tfevents.*")) and self._state.read(_HISTORY) is not None
        self.needs_history = not is_there
        # The name that its readers look for; sorted by time, which is the order they read in.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._path = folder / name
        self._path.touch()
        start = SessionLog(status=SessionLog.START)
        # What was written of this step and later ones is overtaken; of all, where all is written again.
        first = 0 if self.needs_history else step + 1
        self._append(Event(file_version="brain.Event:2"), Event(step=first, session_log=start))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        scalars = [
            Summary.Value(tag=scalar.tag, simple_value=scalar.value)
            for scalar in iter_scalars(kind, values)
            if scalar.name != "step"
        ]
        if scalars:
            self._append(Event(step=step_of(values), summary=Summary(value=scalars)))

    def end_history(self) -> None:
        if self.needs_history:
            self._state.write(_HISTORY, "whole")

    def close(self, status: RunStatus) -> None:
        """Each line is in the file already."""

    def _append(self, *events: Event) -> None:
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        before = self._path.stat().st_size
        try:
            with self._path.open("ab") as file:
                file.write(records.getvalue())
        except OSError:
            # Half a record would hide all that come after it.
            os.truncate(self._path, before)
            raise

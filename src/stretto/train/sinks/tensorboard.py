"""TensorBoard: writes one event file per launch of a run, for `tensorboard --logdir`."""

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

from stretto.train.sinks.sink import Sink, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

_HISTORY = "history"
_file_numbers = itertools.count()  # so that all files of a process have different names


class TensorBoardSink(Sink):
    """Writes scalars named `kind/name`. This launch continues after `step`; what older files have after it is purged.

    TensorBoard's own writers have a thread that prints a traceback when the disk is full and may leave half a record;
    here a record is written completely or not at all.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Older event files hold the history (log lines of earlier launches), unless a launch was killed writing it.
        self._state = SinkState(folder)
        has_history = any(folder.glob("events.out.tfevents.*")) and self._state.read(_HISTORY) is not None
        self.needs_history = not has_history
        # TensorBoard looks for this pattern, and reads the files in the order of the times in their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._path = folder / name
        self._path.touch()
        start = SessionLog(status=SessionLog.START)
        # From this step on, TensorBoard drops what earlier files have; that is everything if the history is rewritten.
        first_purged_step = 0 if self.needs_history else step + 1
        self._append(Event(file_version="brain.Event:2"), Event(step=first_purged_step, session_log=start))

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
            self._state.write(_HISTORY, "complete")

    def _append(self, *events: Event) -> None:
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        num_bytes = self._path.stat().st_size
        try:
            with self._path.open("ab") as file:
                file.write(records.getvalue())
        except OSError:
            # Half a record would hide all records after it.
            os.truncate(self._path, num_bytes)
            raise

"""BackgroundSink: writes to a sink in a thread of its own, so that a slow or broken tracker never stops a run."""

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten

from stretto.base.reason import class_and_reason
from stretto.train.sinks.sink import LogLine, RunStatus, Sink

# How many lines can queue up for a slow sink, and how long it has to finish at the end.
_MAX_QUEUED_LINES = 100_000
_CLOSE_TIMEOUT_SECONDS = 30.0

_log = logging.getLogger(__name__)


class BackgroundSink:
    """A sink with its own thread; its first error is logged as a warning, and none is raised."""

    def __init__(self, name: str, sink: Sink, history: Iterable[LogLine] = ()) -> None:
        self._name, self._sink = name, sink
        self.is_per_node = sink.is_per_node
        self._history = history if sink.needs_history else ()
        self._lines: queue.Queue[LogLine | None] = queue.Queue()
        self._status: RunStatus = "interrupted"
        self._has_warned = False
        self._thread = threading.Thread(target=self._write_lines, name=f"stretto-{name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Queue a line, without waiting."""
        if self._lines.qsize() < _MAX_QUEUED_LINES:
            self._lines.put((kind, dict(values)))
        else:
            self._warn("it is slower than the run")

    def close(self, status: RunStatus, seconds: float = _CLOSE_TIMEOUT_SECONDS) -> None:
        """Wait until all lines are written, for a limited time; `status` is how the run ended."""
        self._status = status
        self._lines.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"it did not finish within {seconds:.0f} s")

    def _write_lines(self) -> None:
        with self._catch_errors():
            for line in self._history:
                self._write(line)
            if not self._has_warned:  # otherwise the history may be incomplete
                self._sink.end_history()
        while (line_or_end := self._next_line()) is not None:
            self._write(line_or_end)
        with self._catch_errors():
            self._sink.close(self._status)

    def _next_line(self) -> LogLine | None:
        """Wait for a line; None at the end. Wake the sink meanwhile, if it asks for that."""
        while True:
            try:
                return self._lines.get(timeout=self._sink.wake_seconds)
            except queue.Empty:
                with self._catch_errors():
                    self._sink.wake()

    def _write(self, line: LogLine) -> None:
        with self._catch_errors():
            self._sink.write(*line)

    @contextmanager
    def _catch_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the tracker raises, the run must not end
            self._warn(describe_error(error))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the tracker of logging.%s may lack log lines (%s); the run is unaffected", self._name, reason)


def describe_error(error: Exception) -> str:
    """Return an error's reason on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return shorten(class_and_reason(error), 300)

"""Feeder: feeds a sink in the background, so that the run waits for no tool, and ends for none."""

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten

from stretto.train.sinks.sink import Ending, Line, Sink

# Lines that may wait for a sink that is slow, and seconds in which it may finish at the end.
_MOST_WAITING = 100_000
_PATIENCE = 30.0

_log = logging.getLogger(__name__)


class Feeder:
    """A sink with a thread of its own; what goes wrong with it is said once."""

    def __init__(self, name: str, sink: Sink, history: Iterable[Line] = ()) -> None:
        self._name, self._sink = name, sink
        self._history = history if sink.needs_history else ()
        self._lines: queue.Queue[Line | None] = queue.Queue()
        self._ending: Ending = "left"
        self._has_warned = False
        self._thread = threading.Thread(target=self._feed, name=f"stretto-{name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Hand over a line, without waiting."""
        if self._lines.qsize() < _MOST_WAITING:
            self._lines.put((kind, dict(values)))
        else:
            self._warn("it is slower than the run")

    def close(self, ending: Ending) -> None:
        """Wait until all lines have arrived, but not for ever."""
        self._ending = ending
        self._lines.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._warn(f"it has not finished within {_PATIENCE:.0f} s")

    def _feed(self) -> None:
        with self._forgiving():
            for line in self._history:
                self._write(line)
            if not self._has_warned:
                self._sink.end_history()
        while (line_or_end := self._lines.get()) is not None:
            self._write(line_or_end)
        with self._forgiving():
            self._sink.close(self._ending)

    def _write(self, line: Line) -> None:
        with self._forgiving():
            self._sink.write(*line)

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the tool raises, the run is not to end for it
            self._warn(describe(error))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("watch.%s misses lines of the log (%s); the run goes on", self._name, reason)


def describe(error: Exception) -> str:
    """Return why a tool failed, in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return shorten(f"{type(error).__name__}: {error}".rstrip(": "), 300)

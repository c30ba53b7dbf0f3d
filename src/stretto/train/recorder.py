"""Recorder: writes the events of a run to its log and to the trackers that its config names."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TextIO

from stretto.base.run_folder import RunFolder
from stretto.config.run import RunConfig
from stretto.train.events import Event, log_line
from stretto.train.log import open_log, read_lines
from stretto.train.sinks.sinks import Sinks, flatten, open_sinks

_log = logging.getLogger(__name__)


class Recorder:
    """A run's log, and the sinks that get the same lines. Only the first rank has one."""

    def __init__(self, file: TextIO, sinks: Sinks | None = None) -> None:
        self._file = file
        self._sinks = sinks

    def record(self, event: Event) -> None:
        """Write the line of an event."""
        self.write(*log_line(event))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Write one line."""
        # JSON has no NaN and no infinity.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, **finite}) + "\n")
        except OSError as error:
            # A missing line is no reason to end a run; a full disk may have space again tomorrow.
            _log.warning("%s can't be written (%s); the run continues", self._file.name, error.strerror)
        if self._sinks is not None:
            self._sinks.write(kind, finite)


@contextmanager
def open_recorder(folder: RunFolder, config: RunConfig, step: int) -> Iterator[Recorder]:
    """Open the log and the sinks of a run, to continue after a step."""
    with folder.writing():
        file = open_log(folder.log, step)
    num_bytes = folder.log.stat().st_size
    with (
        closing(file),
        open_sinks(
            config.logging,
            folder.path,
            step=step,
            hyperparameters=flatten(config.model_dump(mode="json", exclude_none=True)),
            history=lambda: read_lines(folder.log, num_bytes),
        ) as sinks,
    ):
        yield Recorder(file, sinks)
